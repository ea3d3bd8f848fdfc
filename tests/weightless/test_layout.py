"""Blocks of every arrangement are found and measured, and stacks are kept apart."""

import numpy as np
import pytest
import torch
from torch import nn

import limitformer as lf
from limitformer.weightless import split_stacks

WIDTH, WORDS = 16, 50
IDS = torch.arange(20).reshape(2, 10) % 17


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Three blocks in a list; the other networks have the same weights in the same order."""

    def __init__(self):
        super().__init__()
        self.embed, self.h = nn.Embedding(WORDS, WIDTH), self.blocks()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def blocks(self):
        return nn.ModuleList(Block() for _ in range(3))

    def stream(self, x):
        """Return the stream before each block and after the last."""
        states = [x]
        for block in self.h:
            states.append(block(states[-1]))
        return states

    def forward(self, ids):
        return self.head(self.norm(self.stream(self.embed(ids))[-1]))


class Named(Net):
    def blocks(self):
        return nn.ModuleDict({str(k): Block() for k in range(3)})

    def stream(self, x):
        states = [x]
        for block in self.h.values():
            states.append(block(states[-1]))
        return states


class Packed(Net):
    """All tokens in one dimension."""

    def stream(self, x):
        return [each.reshape(2, 10, WIDTH) for each in super().stream(x.flatten(0, 1))]


class Grid(Net):
    """(B, height, width, n)."""

    def stream(self, x):
        return [each.flatten(1, 2) for each in super().stream(x.unflatten(1, (5, 2)))]


class Nested(Net):
    """Lists of two modules in a list, whose sums are outside of them."""

    def blocks(self):
        return nn.ModuleList(nn.ModuleList([nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]) for _ in range(3))

    def stream(self, x):
        states = [x]
        for norm, branch in self.h:
            states.append(states[-1] + branch(norm(states[-1])))
        return states


class Pairs(Net):
    """Lists of two modules of one class in a list, whose sums are outside of them."""

    def blocks(self):
        return nn.ModuleList(nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]) for _ in range(3))

    def stream(self, x):
        states = [x]
        for first, second in self.h:
            x = x + first(x)
            x = x + second(x)
            states.append(x)
        return states


class Scaled(nn.Module):
    """A norm and a map, whose output a module outside of the block scales."""

    def __init__(self, scale):
        super().__init__()
        self.norm, self.map, self.scale = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), [scale]

    def forward(self, x):
        return self.scale[0](self.map(self.norm(x)).mean(-1, keepdim=True)) * x


class Called(Net):
    """A module outside of the blocks that they call, as a bias of positions."""

    def blocks(self):
        self.scale = nn.Linear(1, 1)
        return nn.ModuleList(nn.ModuleList([nn.Linear(WIDTH, WIDTH), Scaled(self.scale)]) for _ in range(3))

    def stream(self, x):
        states = [x]
        for first, second in self.h:
            states.append(states[-1] + second(first(states[-1])))
        return states


class Branches(Net):
    """One list, whose sums are outside of its modules."""

    def stream(self, x):
        states = [x]
        for branch in self.h:
            states.append(states[-1] + 0.5 * branch(states[-1]))
        return states


class Holder(Net):
    """A dictionary of all parts by their names, which is not a list of blocks."""

    def blocks(self):
        return nn.ModuleDict({"drop": nn.Dropout(0.0), "h": super().blocks(), "last": nn.LayerNorm(WIDTH)})

    def stream(self, x):
        states = [self.h["drop"](x)]
        for block in self.h["h"]:
            states.append(block(states[-1]))
        return states


class Parallel(Net):
    """Lists of equal length, post-norm."""

    def blocks(self):
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def stream(self, x):
        states = [x]
        for branch, norm in zip(self.branches, self.norms, strict=True):
            states.append(norm(states[-1] + branch(states[-1])))
        return states


class Attributes(Net):
    def blocks(self):
        self.first, self.second, self.third = Block(), Block(), Block()

    def stream(self, x):
        states = [x]
        for block in (self.first, self.second, self.third):
            states.append(block(states[-1]))
        return states


class Loop(Net):
    """One block three times."""

    def blocks(self):
        self.block = Block()

    def stream(self, x):
        states = [x]
        for _ in range(3):
            states.append(self.block(states[-1]))
        return states


class Chunked(Net):
    """A list of lists of blocks, and a list of other modules, which see no token."""

    def blocks(self):
        self.positions = nn.ModuleList(nn.Linear(1, WIDTH) for _ in range(2))
        return nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([nn.Identity(), Block()])])

    def stream(self, x):
        states = [x + sum(part(torch.ones(10, 1)) for part in self.positions)]
        for chunk in self.h:
            for block in chunk:
                states += [block(states[-1])] if isinstance(block, Block) else []
        return states


NETWORKS = [Net, Named, Packed, Grid, Nested, Pairs, Called, Branches, Holder, Parallel, Attributes, Loop, Chunked]


def gram(states, n=WIDTH):
    """Return V of each state, over the tokens of all sequences."""
    return np.stack([(x.reshape(-1, n) @ x.reshape(-1, n).T / n).detach().numpy() for x in states])


@pytest.mark.parametrize("network", NETWORKS, ids=lambda each: each.__name__)
def test_stream_of_every_arrangement_is_that_of_the_module(network):
    torch.manual_seed(1)
    module = network()
    data = lf.check(module, IDS, law=False, progress=False).data
    expected = gram(module.stream(module.embed(IDS)))
    np.testing.assert_allclose(data["covariance"].values[0], expected, rtol=1e-4, atol=1e-5)
    assert data.sizes["sublayer"] == (2 if network in (Pairs, Branches) else 1)
    if network not in (Parallel, Pairs, Branches):  # whose norm follows the sum, or that have two sums
        first, second = module.stream(module.embed(IDS))[:2]
        branch = (second - first).square().mean().sqrt().item()
        np.testing.assert_allclose(data["branch"].values[0, 0, 0], branch, rtol=1e-4)
    assert np.isfinite(data["stream_gradient"].values).all()


class HyperConnected(Net):
    """Several streams a token, in any dimension; each block has a further input, as Gemma 3n."""

    def __init__(self, place, count):
        super().__init__()
        self.place, self.count = place, count

    def blocks(self):
        return nn.ModuleList(WithInput() for _ in range(2))

    def stream(self, x):
        states = [torch.stack([x, 2 * x, torch.flip(x, (-1,))][: self.count], self.place)]
        for block in self.h:
            states.append(block(states[-1], x[..., :5]))
        return states

    def forward(self, ids):
        return self.stream(self.embed(ids))[-1].mean(self.place)


class WithInput(Block):
    def forward(self, x, other):
        return super().forward(x) + other.mean()


@pytest.mark.parametrize(("place", "count"), [(0, 3), (1, 2), (2, 2)])  # two of two sequences: no size shows it
def test_several_streams_of_a_token_are_one_long_vector(place, count):
    torch.manual_seed(1)
    module = HyperConnected(place, count)
    data = lf.check(module, IDS, law=False, progress=False).data
    states = module.stream(module.embed(IDS))
    expected = gram([x.movedim(place, 2) for x in states], count * WIDTH)
    np.testing.assert_allclose(data["covariance"].values[0], expected, rtol=1e-4, atol=1e-5)


class Towers(nn.Module):
    """An encoder of 6 tokens and a decoder of 10 that reads it; a third list of blocks follows the decoder's."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.encoder, self.decoder, self.more = (nn.ModuleList(Block() for _ in range(k)) for k in (3, 2, 1))

    def stacks(self, ids):
        source, target = [self.embed(ids[:, :6])], [self.embed(ids)]
        for block in self.encoder:
            source.append(block(source[-1]))
        target[0] = target[0] + source[-1].mean(1, keepdim=True)
        for block in [*self.decoder, *self.more]:
            target.append(block(target[-1]))
        return source, target

    def forward(self, ids):
        return self.head(self.stacks(ids)[1][-1])


def test_each_stack_has_its_own_tokens_and_verdicts():
    torch.manual_seed(1)
    module = Towers()
    report = lf.check(module, IDS, law=False, progress=False)
    source, target = module.stacks(IDS)
    (encoder,) = report.stacks
    assert (encoder.name, report.stack) == ("encoder", "decoder + more")
    np.testing.assert_allclose(encoder.data["covariance"].values[0], gram(source), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(report.data["covariance"].values[0], gram(target), rtol=1e-4, atol=1e-5)
    assert encoder.data["sequence"].values.tolist() == [0] * 6 + [1] * 6
    assert set(encoder.curves["gradient"]["kind"].values) & set(report.curves["gradient"]["kind"].values) == set()
    assert "loss" in report.curves
    assert "loss" not in encoder.curves
    text = str(report)
    assert "encoder: 3 blocks, 6 tokens, this network" in text
    assert "blocks: encoder: 3 × Block; decoder + more: 3 × Block" in text


def test_decoder_that_reads_an_encoder_is_a_stack_of_its_own():
    """Both have the same number of tokens, and the decoder's blocks receive the encoder's output."""

    class Reading(Block):
        def forward(self, x, source):
            return super().forward(x + source.mean(1, keepdim=True))

    class Pair(Net):
        def blocks(self):
            self.decoder = nn.ModuleList(Reading() for _ in range(2))
            return nn.ModuleList(Block() for _ in range(3))

        def forward(self, ids):
            source = self.stream(self.embed(ids))[-1]
            x = self.embed(ids)
            for block in self.decoder:
                x = block(x, source)
            return self.head(x)

    data = lf.weightless.simulate(Pair, IDS, samples=1, seed=0, progress=False)
    assert data.attrs["blocks"] == "h: 3 × Block; decoder: 2 × Reading"


class Widening(Net):
    """Blocks, and a list of pairs that widen the stream."""

    def __init__(self):
        super().__init__()
        self.wide = nn.ModuleList([nn.ModuleList([nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)])])
        self.more = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, 2 * WIDTH)]) for _ in "ab"
        )

    def forward(self, ids):
        x = self.stream(self.embed(ids))[-1]
        for norm, widen in self.wide:
            x = widen(norm(x))
        for norm, branch in self.more:
            x = x + branch(norm(x))
        return x


def test_modules_that_change_the_width_of_the_stream_are_no_blocks():
    data = lf.weightless.simulate(Widening, IDS, samples=1, seed=0, progress=False)
    assert data.attrs["blocks"] == "h: 3 × Block; more: 2 × LayerNorm, Linear"


def test_verdict_on_another_stack_begins_with_its_name(tmp_path):
    torch.manual_seed(1)
    module = Towers()
    with torch.no_grad():
        for block in module.encoder:
            block.down.bias.fill_(30.0)  # all tokens of the encoder become alike
    report = lf.check(module, IDS, law=False, progress=False)
    names = {each.name: each.said for each in report.verdicts}
    assert names["collapsed"].startswith("encoder: ")
    assert report.failed("collapsed")
    paths = [path.name for path in report.save(tmp_path)]
    assert paths == ["check.html", "check.json", "check.png", "check.nc", "check-encoder.nc"]
    assert "By layer: encoder" in (tmp_path / "check.html").read_text()


def test_law_of_two_stacks_is_one_dataset_that_splits():
    data = lf.weightless.simulate(Towers, IDS, samples=2, seed=0, gradients=True, progress=False)
    assert data["stack"].values.tolist() == ["encoder"] * 4 + ["decoder + more"] * 4
    assert np.isnan(data["covariance"].values[:, :4, 12:]).all()
    parts = split_stacks(data)
    assert [(part.sizes["layer"], part.sizes["token"]) for part in parts.values()] == [(4, 12), (4, 20)]
    assert all(np.isfinite(part["covariance"].values).all() for part in parts.values())
    weights = [list(part["weight"].values) for part in parts.values()]
    assert sorted(weights[0] + weights[1]) == sorted(data["weight"].values)
    assert "embed.weight" in weights[1]
    assert all(name.startswith("encoder.") for name in weights[0])


@pytest.mark.parametrize("blocks", ["decoder.*", ["decoder.0", "decoder.1"], lambda module: list(module.decoder)])
def test_users_choose_the_blocks(blocks):
    data = lf.weightless.simulate(Towers, IDS, samples=2, seed=0, blocks=blocks, progress=False)
    assert data.attrs["blocks"] == "decoder: 2 × Block"
    assert "stack" not in data.coords
    whole = split_stacks(lf.weightless.simulate(Towers, IDS, samples=2, seed=0, progress=False))["decoder + more"]
    np.testing.assert_array_equal(data["covariance"], whole["covariance"][:, :3])


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        ("layers.*", r"no module of Towers fits 'layers\.\*'. Its lists: encoder\.\*, decoder\.\*, more\.\*"),
        ([3], "must be a pattern of names such as"),
        (lambda module: [nn.Linear(2, 2)], "blocks must return modules of Towers"),
        ("head", r"head receives tokens \(2, 10, 16\) and returns none of that shape"),
    ],
)
def test_blocks_that_do_not_exist_are_refused(blocks, says):
    with pytest.raises(lf.InputError, match=says):
        lf.weightless.simulate(Towers, IDS, samples=1, seed=0, blocks=blocks, progress=False)


def test_sum_after_the_last_block_that_is_not_with_its_output_does_not_count():
    class Mixed(Net):
        def forward(self, ids):
            states = self.stream(self.embed(ids))
            return self.head(states[-2] + self.norm(states[-1]))

    torch.manual_seed(1)
    module = Mixed()
    data = lf.check(module, IDS, law=False, progress=False).data
    expected = gram(module.stream(module.embed(IDS)))
    np.testing.assert_allclose(data["covariance"].values[0], expected, rtol=1e-4, atol=1e-5)


def test_gradient_that_torch_cannot_compute_is_one_line():
    class InPlace(Net):
        def stream(self, x):
            x = self.h[0](x)
            x += self.h[1](x.square())
            return [self.h[2](x)]

    with pytest.raises(lf.InputError, match="cannot be differentiated: one of the variables needed"):
        lf.check(InPlace(), IDS, law=False, progress=False)


class WithMemory(Block):
    """A block whose first argument is not the stream, and whose first output is not it either."""

    def forward(self, memory, x):
        return memory + x, super().forward(x + memory.mean(1, keepdim=True))


class Memories(Net):
    def blocks(self):
        return nn.ModuleList(WithMemory() for _ in range(3))

    def stream(self, x):
        states, memory = [x], torch.flip(x, (1,))
        for block in self.h:
            states.append(block(memory, states[-1])[1])
        return states


class ReadsMemory(Memories):
    """A decoder with as many tokens as its encoder, whose output it takes first."""

    def blocks(self):
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        return super().blocks()

    def stream(self, x):
        memory, states = x, [x.exp()]
        for block in self.encoder:
            memory = block(memory)
        for block in self.h:
            states.append(block(memory, states[-1])[1])
        return states


@pytest.mark.parametrize("network", [Memories, ReadsMemory])
def test_modules_of_a_list_show_their_stream_by_passing_it_on(network):
    torch.manual_seed(1)
    module = network()
    data = lf.check(module, IDS, law=False, progress=False).data
    np.testing.assert_allclose(
        data["covariance"].values[0], gram(module.stream(module.embed(IDS))), rtol=1e-4, atol=1e-5
    )
    assert "between" not in data.attrs["blocks"]
    assert data.attrs["blocks"].endswith("h: 3 × WithMemory")
    law = split_stacks(lf.weightless.simulate(network, IDS, samples=1, seed=0, progress=False))
    assert list(law.values())[-1].sizes["layer"] == 4
