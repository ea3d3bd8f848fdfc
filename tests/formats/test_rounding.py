"""Networks in a number format, by layer, against plain modules that torch runs in that format."""

from copy import deepcopy

import numpy as np
import pytest
import torch

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.checking.check import weightless_of
from limitformer.formats.rounding import rounding, to_eight_bits
from limitformer.formats.table import FORMATS
from limitformer.subjects.inputs import inputs_for
from limitformer.subjects.losses import chosen_loss
from limitformer.subjects.subject import resolve
from limitformer.weightless.run import AUTO
from limitformer.weightless.simulate import accepted_inputs

CONFIGS = {
    "gpt2": {"model_type": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 3, "vocab_size": 50, "n_positions": 16},
    "llama": {
        "model_type": "llama", "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3,
        "num_key_value_heads": 3, "intermediate_size": 64, "vocab_size": 50, "initializer_range": 0.1,
    },
}  # fmt: skip
BLOCKS = {"gpt2": "transformer.h", "llama": "model.layers"}
SAMPLES = 12


def loss_of(out, arguments):
    return out.logits.float().square().mean((1, 2))


def streams(module, inputs, blocks):
    """Return the stream before each block and after the last, and its gradients."""
    kept = []

    def keep(x):
        x = x[0] if isinstance(x, tuple) else x
        x.retain_grad()
        kept.append(x)

    handles = [each.register_forward_pre_hook(lambda part, args: keep(args)) for each in blocks]
    handles.append(blocks[-1].register_forward_hook(lambda part, args, out: keep(out)))
    loss_of(module(**inputs), inputs).mean().backward()
    for each in handles:
        each.remove()
    return np.array([each.detach().float().numpy() for each in kept]), np.array([x.grad.float().numpy() for x in kept])


class RoundedLinear(torch.nn.Module):
    """A product whose factors are rounded to eight bits, forward and backward, as `float8` training does."""

    def __init__(self, weight, bias, dtype):
        super().__init__()
        self.weight, self.bias, self.dtype = weight, bias, dtype

    def forward(self, x):
        rounded = x + (scaled(x.float(), self.dtype) - x.float()).detach().to(x.dtype)
        out = (rounded.float() @ self.weight.float()).to(x.dtype)
        out.register_hook(lambda gradient: scaled(gradient.float(), self.dtype).to(gradient.dtype))
        return out if self.bias is None else out + self.bias


def scaled(x, dtype):
    power = 2.0 ** np.floor(np.log2(torch.finfo(dtype).max / float(x.detach().abs().max())))
    return (x * power).to(dtype).float() / power


def drawn_differences(config, family, inputs, which, seed):
    """Return |h′ − h|/|h| by layer of one drawn network with rounded weights, and of its gradients."""
    torch.manual_seed(seed)
    module = resolve(config).factory().eval()
    other_type = which.dtype if which.dtype.itemsize == 2 else torch.bfloat16
    for one in module.parameters():
        one.data = one.data.to(other_type).float()
    other = deepcopy(module).to(other_type)
    if which.dtype.itemsize == 1:
        for part in list(other.modules()):
            for name, child in list(part.named_children()):
                if isinstance(child, torch.nn.Linear) or type(child).__name__ == "Conv1D":
                    weight = child.weight.mT if isinstance(child, torch.nn.Linear) else child.weight
                    setattr(part, name, RoundedLinear(weight, child.bias, which.dtype))
    both = [streams(each, inputs, list(each.get_submodule(BLOCKS[family]))) for each in (module, other)]
    axes = tuple(range(1, both[0][0].ndim))
    return [np.sqrt(((b - a) ** 2).sum(axes) / (a**2).sum(axes)) for a, b in zip(*both, strict=True)]


@pytest.mark.parametrize(("family", "name"), [("gpt2", "bf16"), ("llama", "bf16"), ("llama", "fp16"), ("gpt2", "e4m3")])
def test_rounded_networks_differ_from_float32_as_drawn_ones_do(family, name):
    config, which = CONFIGS[family], FORMATS[name]
    subject = resolve(config)
    network = weightless_of(subject)
    inputs = accepted_inputs(inputs_for(subject, None, 12), network, 0, own_loss=False)
    network.run(0, range(1), inputs, AUTO, None)
    loss = chosen_loss(loss_of, subject.task)
    mine = rounding(lambda: weightless_of(subject), network.layout, inputs, loss, [which], 0, SAMPLES)
    arguments = inputs.of(0, range(1), torch.float32)
    theirs = np.array([drawn_differences(config, family, arguments, which, seed) for seed in range(SAMPLES)])
    for k, key in enumerate(("stream", "gradient")):
        here, there = mine[key].values[0], theirs[:, k]
        if key == "stream":
            here, there = here[:, 1:], there[:, 1:]  # before the first block, tables are rounded already
        error = np.sqrt(here.var(0, ddof=1) / SAMPLES + there.var(0, ddof=1) / SAMPLES)
        allowed = 4.5 * error + 0.1 * there.mean(0)
        assert (np.abs(here.mean(0) - there.mean(0)) < allowed).all(), (key, here.mean(0), there.mean(0))
    wrong = rounding(lambda: weightless_of(subject), network.layout, inputs, loss, [FORMATS["e5m2"]], 0, 3)
    assert (np.abs(wrong["stream"].values[0, :, 1:].mean(0) / theirs[:, 0, 1:].mean(0) - 1) > 0.5).all()


def test_eight_bits_with_a_scale():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-5
    which = FORMATS["e4m3"]
    assert torch.equal(to_eight_bits(which, x), scaled(x, which.dtype))
    assert float((to_eight_bits(which, x) - x).norm() / x.norm()) == pytest.approx(0.026, abs=0.004)
    assert torch.equal(to_eight_bits(which, torch.zeros(3)), torch.zeros(3))


class Block(torch.nn.Module):
    """A block with random biases, whose norm computes in float32 if it `lifts` its input."""

    def __init__(self, lifts, norm):
        super().__init__()
        self.inward, self.out = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        self.norm, self.lifts = torch.nn.LayerNorm(32) if norm else torch.nn.Identity(), lifts

    def forward(self, x):
        x = x.float() if self.lifts else x
        return x + self.out(torch.relu(self.inward(self.norm(x))))


class Biased(torch.nn.Module):
    def __init__(self, lifts=False, norm=True):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(40, 32), torch.nn.Linear(32, 40)
        self.blocks = torch.nn.ModuleList(Block(lifts, norm) for _ in range(3))

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def biased_loss(out, _):
    return out.float().square().mean((1, 2))


def test_networks_with_random_biases_keep_their_type():
    ids = torch.randint(0, 40, (1, 10), generator=torch.Generator().manual_seed(2))
    mine = [
        lf.check(Biased, ids, samples=1, seed=seed, loss=biased_loss, formats="bf16", rounding=True, progress=False)
        .rounding["stream"].values[0, 0]
        for seed in range(6)
    ]  # fmt: skip
    theirs = []
    for seed in range(12):
        torch.manual_seed(seed)
        module = Biased().eval()
        for name, one in module.named_parameters():
            if name != "table.weight":  # whose rows are results, which are rounded
                one.data = one.data.bfloat16().float()
        kept = [[], []]
        for network, streams in zip((module, deepcopy(module).bfloat16()), kept, strict=True):
            for block in network.blocks:
                block.register_forward_hook(lambda part, args, out, streams=streams: streams.append(out.float()))
            with torch.no_grad():
                network(ids)
        theirs.append([float((b - a).norm() / a.norm()) for a, b in zip(*kept, strict=True)])
    assert np.mean(mine, 0)[1:] == pytest.approx(np.mean(theirs, 0), rel=0.12)


def test_types_that_plain_torch_refuses_are_refused():
    for norm, says in ((True, "cannot run in bf16: mixed dtype"), (False, "which plain PyTorch refuses")):
        with pytest.raises(InputError, match=says):
            lf.check(lambda norm=norm: Biased(True, norm), 8, samples=1, formats="bf16", rounding=True, progress=False)


class Entries(Biased):
    """A head that is not a linear map of torch's."""

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return torch.einsum("bnd,fd->bnf", x, self.head.weight)


def test_eight_bits_have_no_answer_where_entries_are_used():
    report = lf.check(Entries, 8, samples=1, formats="bf16,e4m3", rounding=True, progress=False)
    known = np.isfinite(report.rounding["stream"]).all(("sample", "layer"))
    assert known.values.tolist() == [True, False]


def test_rounding_is_of_a_new_network():
    with pytest.raises(InputError, match="rounding runs a new network"):
        lf.check(Biased(), 8, formats="bf16", rounding=True)
