"""Numbers that are counted without weights, against plain drawn networks with hooks of their own."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import limitformer as lf
from limitformer.checking.check import weightless_of
from limitformer.formats.measure import Counting, kind_of
from limitformer.formats.table import FORMATS
from limitformer.stepping.updates import Adam, Muon
from limitformer.subjects.inputs import inputs_for
from limitformer.subjects.losses import chosen_loss
from limitformer.subjects.subject import resolve
from limitformer.weightless.run import AUTO
from limitformer.weightless.simulate import accepted_inputs
from weightless_families import CONFIGS

EVERY = FORMATS["e4m3"], FORMATS["fp16"]
SAMPLES = 60


def small_loss(out, arguments):
    """Return a loss whose gradients are small enough for fp16 to lose some."""
    return 2.0**-9 * out.logits.square().mean((1, 2))


def shares_of_tallies(tallies, formats):
    """Return the share that rounds to zero, and below the smallest normal number, by direction, tensor and format."""
    result = {}
    for key, tally in tallies.items():
        for which in formats if tally.count else ():
            result[*key, which.name, "zero"] = tally.zero(which) / tally.count
            result[*key, which.name, "subnormal"] = tally.subnormal(which) / tally.count
    return result


def shares_of_tensor(x):
    x = x.detach()[x != 0].abs()
    result = {}
    for which in EVERY if len(x) else ():
        zero = x.to(which.dtype) == 0
        result[which.name, "zero"] = float(zero.double().mean())
        result[which.name, "subnormal"] = float(((x < 2.0**which.normal) & ~zero).double().mean())
    return result


def drawn_shares(module, inputs):
    """Return the shares of the outputs of modules without parts, of their gradients, and of those of the weights."""
    result = {}

    def note(direction, name, x):
        result.update({(direction, name, *key): share for key, share in shares_of_tensor(x).items()})

    def forward(name):
        def hook(part, args, out):
            if isinstance(out, torch.Tensor) and all(out.data_ptr() != each.data_ptr() for each in args):
                note("forward", name, out)
                if out.requires_grad:
                    out.register_hook(lambda gradient: note("backward", name, gradient))

        return hook

    for name, part in module.named_modules():
        if not list(part.children()):
            part.register_forward_hook(forward(name))
    small_loss(module(**inputs), inputs).mean().backward()
    for name, one in module.named_parameters():
        if one.grad is not None:
            note("weight gradient", name, one.grad)
    return result


def lawful_shares(network, inputs, loss, samples):
    """Return the tallies of every sample."""
    network.more = counting = Counting(EVERY)
    result = []
    for sample in range(samples):
        network.run(0, range(sample, sample + 1), inputs, AUTO, loss)
        counting.finish()
        result.append(counting.observer.tallies)
    return result


def distances(mine, theirs):
    """Return the difference of the means of each share, in standard errors."""
    result = {}
    for key in set.intersection(*(set(each) for each in (*mine, *theirs))):
        a, b = (np.array([each[key] for each in some]) for some in (mine, theirs))
        error = np.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b))
        if error > 1e-3:
            result[key] = abs(a.mean() - b.mean()) / error
    return result


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "t5"])
def test_shares_are_those_of_drawn_networks_and_not_of_a_format_that_ends_elsewhere(family):
    subject = resolve(CONFIGS[family]())
    network = weightless_of(subject)
    inputs = accepted_inputs(inputs_for(subject, None, 8), network, 0, own_loss=False)
    tallies = lawful_shares(network, inputs, chosen_loss(small_loss, subject.task), SAMPLES)
    theirs = []
    for seed in range(SAMPLES):
        torch.manual_seed(1000 + seed)
        theirs.append(drawn_shares(subject.factory().eval(), inputs.of(0, range(1), torch.float32)))
    known = distances([shares_of_tallies(each, EVERY) for each in tallies], theirs)
    directions = {key[0] for key in known}
    assert directions == {"forward", "backward", "weight gradient"}
    assert len(known) > 40
    assert max(known.values()) < 5, max(known, key=known.get)
    shifted = [replace(each, normal=each.normal - 1) for each in EVERY]
    assert max(distances([shares_of_tallies(each, shifted) for each in tallies], theirs).values()) > 12


def test_a_network_that_exists_has_the_numbers_of_its_own_tensors():
    """Number by number: the largest number and the share of zeros of each output and gradient, and the updates."""
    torch.manual_seed(3)
    module = resolve(CONFIGS["gpt2"]()).factory().eval()
    ids = torch.randint(0, 40, (1, 8), generator=torch.Generator().manual_seed(5))
    rule = {"name": "sgd", "lr": 0.5}
    report = lf.check(
        module, {"input_ids": ids}, loss=small_loss, formats=["e4m3", "fp16"], optimizer=rule, progress=False,
        gradients=True, samples=1,
    )  # fmt: skip
    mine, found = report.formats, drawn_shares(module, {"input_ids": ids})
    for (direction, name, which, what), share in found.items():
        assert float(mine[what].sel(direction=direction, tensor=name, format=which)) == pytest.approx(share, abs=1e-12)
    assert len(found) > 100
    for name, one in module.named_parameters():
        at = mine["amax"].sel(tensor=name)
        assert float(at.sel(direction="weight")) == float(one.detach().abs().max())
        assert float(at.sel(direction="weight gradient")) == float(one.grad.abs().max())
        assert float(at.sel(direction="update")) == pytest.approx(0.5 * float(one.grad.abs().max()))
        changed = (one.half().float() - 0.5 * one.grad).half()
        same = float((changed == one.half())[one.grad != 0].double().mean())
        assert float(mine["unchanged"].sel(tensor=name, format="fp16")) == pytest.approx(same, abs=1e-12, nan_ok=True)


def orthogonalised(gradient):
    """Return Muon's direction in float64; torch's own, in bfloat16, adds the noise of directions without gradient."""
    x = gradient / gradient.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    return max(1.0, gradient.shape[0] / gradient.shape[1]) ** 0.5 * x


@pytest.mark.parametrize(
    "rule",
    [Adam(), Muon()],
    ids=lambda each: each.name,
)
def test_updates_of_undrawn_matrices_are_as_large_as_those_of_torch(rule):
    """The first step of AdamW of torch, and of Muon's formula, on drawn networks of two blocks."""
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    subject = resolve(config)
    network = weightless_of(subject)
    inputs = accepted_inputs(inputs_for(subject, None, 12), network, 0, own_loss=False)
    names = [name for name, one in network.module.named_parameters() if one.dim() == 2 and ".h." in name]
    counting = Counting(EVERY, dict.fromkeys(names, rule))
    network.more = counting
    mine, theirs = [], []
    for sample in range(20):
        network.run(0, range(sample, sample + 1), inputs, AUTO, chosen_loss(small_loss, subject.task))
        mine.append([counting.observer.tallies["update", name].largest for name in names])
        torch.manual_seed(sample)
        module = subject.factory().eval()
        small_loss(module(**inputs.of(0, range(1), torch.float32)), None).mean().backward()
        chosen = {name: one for name, one in module.named_parameters() if name in names}
        before = {name: one.detach().clone() for name, one in chosen.items()}
        if isinstance(rule, Adam):
            torch.optim.AdamW(chosen.values(), lr=rule.lr, weight_decay=0.0).step()
        else:
            for one in chosen.values():
                one.data -= rule.lr * orthogonalised(one.grad.double())
        theirs.append([float((one.detach() - before[name]).abs().max()) for name, one in chosen.items()])
    ratio = np.mean(mine, 0) / np.mean(theirs, 0)
    assert (np.abs(ratio - 1) < 0.1).all(), dict(zip(names, ratio, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"name": "adamw", "lr": 1e-4},
        {"name": "adamw", "lr": 1e-3, "weight_decay": 3.0},  # gains of 1 move by the decay alone
        {"name": "sgd", "lr": 0.02},
        {"name": "sgd", "lr": 0.05, "weight_decay": 0.3},
    ],
    ids=lambda each: f"{each['name']} {each.get('weight_decay', '')}".strip(),
)
def test_entries_that_stay_are_those_of_torch_on_bf16_weights(options):
    """The first step of torch's optimiser on bf16 weights of drawn networks whose gradients are those of float32."""
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    report = lf.check(config, tokens=12, samples=1, formats="bf16", optimizer=options, progress=False)
    subject = resolve(config)
    inputs = inputs_for(subject, None, 12)
    arguments = inputs.of(0, range(1), torch.float32)
    shares = {}
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[options["name"]]
    for seed in range(6):
        torch.manual_seed(seed)
        module = subject.factory().eval()
        chosen_loss(None, subject.task)(module(**arguments), arguments).mean().backward()
        gradients = {name: one.grad for name, one in module.named_parameters()}
        module = module.to(torch.bfloat16)
        before = {name: one.detach().clone() for name, one in module.named_parameters()}
        for name, one in module.named_parameters():
            one.grad = gradients[name].to(torch.bfloat16)
        make(module.parameters(), **{key: each for key, each in options.items() if key != "name"}).step()
        for name, one in module.named_parameters():
            same = (one == before[name])[gradients[name] != 0].float()
            shares.setdefault(name, []).append(float(same.mean()))
    mine = report.formats["unchanged"].sel(format="bf16")
    for name, each in shares.items():
        if ".weight" in name and ".h." in name:
            spread = 0.02 + 4 * np.std(each)
            assert float(mine.sel(tensor=name)) == pytest.approx(np.mean(each), abs=spread), name
    twin = lf.check(
        config, tokens=12, samples=1, formats="bf16", optimizer=options | {"lr": 3 * options["lr"]}, progress=False
    ).formats["unchanged"].sel(format="bf16")  # fmt: skip
    name = "transformer.h.0.mlp.c_fc.weight"
    decays = options.get("weight_decay", 0) > 0
    assert decays or abs(float(twin.sel(tensor=name)) - np.mean(shares[name])) > 0.05


class Shared(torch.nn.Module):
    """A network in which one matrix is used by every layer."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = torch.nn.Embedding(40, 32), torch.nn.LayerNorm(32)
        self.matrix, self.head = torch.nn.Linear(32, 32), torch.nn.Linear(32, 40)
        self.gates = torch.nn.ModuleList(torch.nn.LayerNorm(32) for _ in range(6))

    def forward(self, ids):
        x = self.table(ids)
        for gate in self.gates:
            x = x + torch.tanh(self.matrix(gate(x)))
        return self.head(self.norm(x))


def test_gradient_of_a_weight_that_is_used_often_is_that_of_all_uses():
    ids = torch.randint(0, 40, (1, 8), generator=torch.Generator().manual_seed(1))

    def loss(out, _):
        return out.square().mean((1, 2))

    mine, theirs = [], []
    for seed in range(12):
        report = lf.check(Shared, ids, samples=1, seed=seed, loss=loss, formats="fp16", progress=False)
        mine.append(float(report.formats["amax"].sel(direction="weight gradient", tensor="matrix.weight")))
        torch.manual_seed(seed)
        module = Shared().eval()
        loss(module(ids), None).mean().backward()
        theirs.append(float(module.matrix.weight.grad.abs().max()))
    assert np.mean(mine) == pytest.approx(np.mean(theirs), rel=0.15)  # a sixth of it by use


def test_names_of_kinds():
    assert kind_of("transformer.h.11.attn softmax") == "transformer.h.*.attn softmax"
    assert kind_of("ln_1") == "ln_1"
