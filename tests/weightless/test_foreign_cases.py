"""Modules of unknown code that were misread: orders of attention, inputs, devices, seeds, lists of blocks."""

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import limitformer as lf
from cases import foreign
from cases.foreign import ASKING, net_after, skipping_matrices_without_entries

WIDTH, WORDS, TOKENS = 16, 50, 10
SAME_AND_DIFFERENT = torch.tensor([[1] * TOKENS, list(range(TOKENS))])
IDS = torch.arange(2 * TOKENS).reshape(2, TOKENS) % 17
OPTIONS = {"seed": 0, "progress": False}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, block=Block, depth=3):
        super().__init__()
        self.embed, self.h = nn.Embedding(WORDS, WIDTH), nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WORDS)

    def trunk(self, x):
        """Return the stream before each block and after the last."""
        states = [x]
        for block in self.h:
            states.append(block(states[-1]))
        return states

    def forward(self, ids):
        return self.head(self.trunk(self.embed(ids))[-1])


def gram(states):
    """Return V of each state, over the tokens of all sequences."""
    return np.stack([(x.reshape(-1, WIDTH) @ x.reshape(-1, WIDTH).T / WIDTH).detach().numpy() for x in states])


def assert_covariance(data, states):
    np.testing.assert_allclose(data["covariance"].values[0], gram(states), rtol=1e-4, atol=1e-5)


class Attention(nn.Module):
    """One sublayer of attention, whose heads and sequences have any order; `weights` has the plain order."""

    def __init__(self, order, heads):
        super().__init__()
        self.norm, self.order, self.heads = nn.LayerNorm(WIDTH), order, heads
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for part in (self.query, self.key):  # attention that is far from uniform
            nn.init.normal_(part.weight)

    def split(self, x):
        """Return queries, keys and values (B, heads, M, ·)."""
        parts = (part(self.norm(x)) for part in (self.query, self.key, self.value))
        return [each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in parts]

    def weights(self, x):
        q, k, _ = self.split(x)
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)

    def forward(self, x):
        q, k, v = self.split(x)
        q = q / q.shape[-1] ** 0.5
        return x + self.out(ATTEND[self.order](q, k, v).transpose(1, 2).flatten(2))


def attend(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


def heads_first(q, k, v):
    return attend(*(each.transpose(0, 1) for each in (q, k, v))).transpose(0, 1)


def flat(q, k, v):
    return attend(*(each.flatten(0, 1) for each in (q, k, v))).unflatten(0, q.shape[:2])


def flat_heads_first(q, k, v):
    turned = [each.transpose(0, 1).flatten(0, 1) for each in (q, k, v)]
    return attend(*turned).unflatten(0, (q.shape[1], q.shape[0])).transpose(0, 1)


def loop(q, k, v):
    return torch.stack([attend(q[:, j], k[:, j], v[:, j]) for j in range(q.shape[1])], 1)


def loop_of_four_dimensions(q, k, v):
    return torch.cat([attend(*(each[:, j : j + 1] for each in (q, k, v))) for j in range(q.shape[1])], 1)


def groups(q, k, v):
    return attend(*(each.unflatten(1, (2, -1)) for each in (q, k, v))).flatten(1, 2)


def fused(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, scale=1.0)


def fused_flat_heads_first(q, k, v):
    turned = [each.transpose(0, 1).flatten(0, 1) for each in (q, k, v)]
    return fused(*turned).unflatten(0, (q.shape[1], q.shape[0])).transpose(0, 1)


ATTEND = {
    each.__name__: each
    for each in (
        attend, heads_first, flat, flat_heads_first, loop, loop_of_four_dimensions, groups, fused,
        fused_flat_heads_first,
    )
}  # fmt: skip


def entropies(weights):
    """Return the mean entropy of a row by head, of weights (B, heads, M, M)."""
    return torch.special.entr(weights.detach().double()).sum(-1).mean((0, 2)).numpy()


@pytest.mark.parametrize("order", ATTEND)
def test_attention_is_measured_by_head_in_every_order(order):
    """There are two heads of two sequences, so that no size shows the order."""
    torch.manual_seed(1)
    module = Net(lambda: Attention(order, 2), depth=2)
    data = lf.check(module, SAME_AND_DIFFERENT, law=False, progress=False).data
    for place, x in enumerate(module.trunk(module.embed(SAME_AND_DIFFERENT))[:-1]):
        weights = module.h[place].weights(x)
        np.testing.assert_allclose(data["entropy"].values[0, place], entropies(weights), rtol=1e-4)
        # Wrong twin: sequences for heads, of which one has uniform attention.
        twin = entropies(weights.transpose(0, 1))
        assert np.abs(twin[0] - data["entropy"].values[0, place]).min() > 0.1


def test_softmax_over_another_dimension_is_not_called_none_at_all():
    class KeysFirst(Attention):
        def forward(self, x):
            q, k, v = self.split(x)
            return x + self.out(((k @ q.mT).softmax(-2).mT @ v).transpose(1, 2).flatten(2))

    report = lf.check(lambda: Net(lambda: KeysFirst("attend", 2)), IDS, samples=1, progress=False)
    assert "no attention was seen: no softmax of a known form, nor torch's own" in str(report)
    assert "entropy" not in report.curves


class Siamese(Net):
    """Two inputs through one list of blocks: one after the other, or in turn."""

    def __init__(self, in_turn):
        super().__init__()
        self.in_turn = in_turn

    def both(self, first, second):
        x, y = [self.embed(first)], [2 * self.embed(second)]
        if not self.in_turn:
            return self.trunk(x[0]), self.trunk(y[0])
        for block in self.h:
            x.append(block(x[-1]))
            y.append(block(y[-1]))
        return x, y

    def forward(self, first, second):
        x, y = self.both(first, second)
        return self.head(x[-1] - y[-1])


@pytest.mark.parametrize("in_turn", [False, True])
def test_two_inputs_through_the_same_blocks_are_two_stacks(in_turn):
    torch.manual_seed(1)
    module, inputs = Siamese(in_turn), (IDS, IDS.flip(1) + 20)
    report = lf.check(module, inputs, law=False, progress=False)
    assert report.about["blocks"] == "h, input 1: 3 × Block; h, input 2: 3 × Block"
    x, y = module.both(*inputs)
    assert_covariance(report.stacks[0].data, x)
    assert_covariance(report.data, y)


def test_parallel_lists_with_a_stream_each_are_two_stacks():
    class Pair(nn.Module):
        """Two streams, each through a list of its own, of which each may read the other."""

        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.one, self.two = (nn.ModuleList(Block() for _ in range(3)) for _ in range(2))

        def stacks(self, ids):
            x, y = self.embed(ids), self.embed(ids.flip(1))
            first, second = [], []
            for one, two in zip(self.one, self.two, strict=True):
                first, second = [*first, x + 0.1 * y], [*second, y + 0.1 * x]
                x, y = one(first[-1]), two(second[-1])
            return [*first, x], [*second, y]

        def forward(self, ids):
            x, y = self.stacks(ids)
            return x[-1] + y[-1]

    torch.manual_seed(1)
    module = Pair()
    report = lf.check(module, IDS, law=False, progress=False)
    first, second = module.stacks(IDS)
    assert (report.stacks[0].name, report.stack) == ("one", "two")
    assert_covariance(report.stacks[0].data, first)
    assert_covariance(report.data, second)
    assert report.about["blocks"].count("the network changes the stream") == 2


class Hourglass(nn.Module):
    """Blocks that go down and up, with connections that skip those between, and layers that join them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.down, self.up = (nn.ModuleList(Block() for _ in range(3)) for _ in range(2))
        self.joins = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))

    def stacks(self, ids):
        """Return the inputs of the blocks that go down with their last output, and of those that go up."""
        down, up = [self.embed(ids)], []
        for block in self.down:
            down.append(block(down[-1]))
        x = down[-1]
        for block, join, skipped in zip(self.up, self.joins, down[:0:-1], strict=True):
            up.append(join(torch.cat([x, skipped], -1)))
            x = block(up[-1])
        return down, [*up, x]

    def forward(self, ids):
        return self.stacks(ids)[1][-1]


def test_blocks_down_and_up_with_skipping_connections_are_two_stacks():
    torch.manual_seed(1)
    module = Hourglass()
    report = lf.check(module, IDS, law=False, progress=False)
    down, up = module.stacks(IDS)
    assert (report.stacks[0].name, report.stack) == ("down", "up")
    assert_covariance(report.stacks[0].data, down)
    assert_covariance(report.data, up)
    assert "up: 3 × Block (the network changes the stream between blocks" in report.about["blocks"]
    assert "down: 3 × Block;" in report.about["blocks"]


class Batched(Net):
    def forward(self, batch, scale=1.0):
        return super().forward(batch["ids"]) * scale * batch.get("factor", 1.0)


@pytest.mark.parametrize(
    "inputs",
    [
        {"ids": IDS},
        ({"ids": IDS},),
        {"batch": {"ids": IDS}},
        {"ids": IDS, "scale": 1.0},
        ({"ids": IDS}, {"scale": 1.0}),
        ({"batch": {"ids": IDS}, "scale": 1.0},),
    ],
)
def test_forward_may_take_one_dictionary(inputs):
    plain = lf.weightless.simulate(Net, IDS, samples=3, gradients=True, **OPTIONS)
    data = lf.weightless.simulate(Batched, inputs, samples=3, gradients=True, **OPTIONS)
    np.testing.assert_array_equal(data.covariance, plain.covariance)
    np.testing.assert_allclose(data.loss, plain.loss, rtol=1e-6)
    torch.manual_seed(0)
    module = Batched()
    assert_covariance(lf.check(module, inputs, law=False, progress=False).data, module.trunk(module.embed(IDS)))


def test_wrong_names_in_the_dictionary_are_one_clear_error():
    message = (
        r"Batched has no argument idz, and does not take one dictionary of them as batch: KeyError: 'ids'\. "
        r"Nearest: tensors for batch, scale\."
    )
    for model in (Batched, Batched()):
        with pytest.raises(lf.InputError, match=message):
            lf.check(model, {"idz": IDS}, samples=1, progress=False)
    with pytest.raises(lf.InputError, match="unexpected keyword argument 'other'"):  # ids are given
        lf.weightless.simulate(Net, {"ids": IDS, "other": IDS}, samples=1, **OPTIONS)


@pytest.mark.parametrize(
    ("inputs", "others"),
    [
        ({"a": {"ids": IDS}, "b": {"ids": IDS}}, "a, b"),
        (({"ids": IDS}, IDS, {"scale": 1.0}), "argument 1"),
        (({"batch": {"x": {"ids": IDS}}},), "x"),
    ],
)
def test_several_dictionaries_are_refused(inputs, others):
    message = f"one dictionary may be an argument, not several, nor one inside another; got more: {others}\\. Nearest"
    with pytest.raises(lf.InputError, match=message):
        lf.weightless.simulate(Batched, inputs, samples=1, **OPTIONS)


@pytest.mark.parametrize("change", ASKING, ids=lambda c: c.__name__)
def test_code_may_ask_where_a_matrix_is(change):
    laws, plain = (lf.weightless.law(each).laws for each in (lambda: net_after(change), foreign.Net))
    for name, law in laws.items():
        normal = change is skipping_matrices_without_entries and name.endswith("weight") and "norm" not in name
        assert str(law) == ("normal, std 0.4" if normal else str(plain[name]))


def test_factories_whose_samples_are_equal_are_named():
    def seeded():
        torch.manual_seed(0)
        return Net()

    def constant():
        net = Net()
        for parameter in net.parameters():
            nn.init.constant_(parameter, 0.1)
        return net

    reasons = {
        seeded: "the factory seeds its own numbers, so that all samples are equal",
        constant: "the factory makes the same numbers each time, so that all samples are equal",
    }
    for factory, reason in reasons.items():
        data = lf.weightless.simulate(factory, IDS, samples=3, **OPTIONS)
        assert data.attrs["equal_samples"] == reason
        np.testing.assert_array_equal(data.covariance[0], data.covariance[2])
        assert reason in str(lf.check(factory, IDS, samples=2, progress=False))
    assert "equal_samples" not in lf.weightless.simulate(Net, IDS, samples=3, **OPTIONS).attrs
    assert "equal_samples" not in lf.weightless.simulate(seeded, IDS, samples=1, **OPTIONS).attrs


def test_pass_that_torch_has_no_memory_for_is_refused_in_plain_words():
    class Vast(Net):
        def trunk(self, x):
            torch.empty(2**58, dtype=torch.uint8, device="cpu")
            return super().trunk(x)

    with pytest.raises(lf.InputError, match=r"^Vast with these inputs takes more memory than is free\. Nearest: fewer"):
        lf.weightless.simulate(Vast, IDS, samples=1, **OPTIONS)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
STREAMS = {
    "xlm": {"emb_dim": 32, "n_layers": 3, "n_heads": 2, "n_words": 64, "max_position_embeddings": 64},
    "flaubert": {"emb_dim": 32, "n_layers": 3, "n_heads": 2, "n_words": 64, "max_position_embeddings": 64},
    "granite_swa": SMALL | {"num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0, "head_dim": 16},
    "dinov3_vit": SMALL | {"image_size": 32, "patch_size": 8},  # without registers, a parameter without entries
}


@pytest.mark.parametrize("kind", STREAMS)
def test_stream_of_a_type_is_its_hidden_states(kind):
    config = transformers.CONFIG_MAPPING[kind](**STREAMS[kind])
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config).eval()
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    inputs = {"pixel_values": pixels} if kind == "dinov3_vit" else {"input_ids": IDS + 3}
    data = lf.check(model, inputs, law=False, progress=False).data
    states = model(**inputs, output_hidden_states=True).hidden_states[:-1]  # the last one may be normed
    assert data.sizes["layer"] == len(states) + 1
    for k, state in enumerate(states):
        x = state.detach().flatten(0, 1).double()
        np.testing.assert_allclose(
            data["covariance"].values[0, k], (x @ x.T / x.shape[-1]).numpy(), rtol=1e-3, atol=1e-5
        )
