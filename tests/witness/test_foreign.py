"""Modules of unusual code: the whole pass is that of the module in plain PyTorch, with drawn weights and without."""

from functools import partial

import pytest
import torch

import limitformer as lf
from cases.foreign import CASES, DRAWN_WHOLE, IDS
from limitformer.nn.drawn.simulate import torch_seed
from limitformer.stepping import weights
from limitformer.subjects.inputs import inputs_of
from limitformer.subjects.subject import resolve
from limitformer.weightless.building import drawn_module
from limitformer.weightless.network import Weightless
from limitformer.weightless.run import ALWAYS, NEVER
from limitformer.weightless.simulate import accepted_inputs
from limitformer.witness import DRAWN, WITNESSED, witness_pass
from training_networks import BATCHES, MODELS, OPTIMIZERS, UNSEEN, Custom, next_token

SEED = 0


def loss(out, inputs):
    """Return a number for each sequence, which is not a function of norms."""
    return (out.tanh() * out.roll(1, -1)).flatten(1).mean(1) + out.square().flatten(1).mean(1)


@pytest.mark.parametrize("draw", [ALWAYS, NEVER])
@pytest.mark.parametrize("name", CASES)
def test_module_is_witnessed(name, draw):
    build, given = CASES[name]
    network = Weightless(resolve(build), torch.float32, torch.device("cpu"))
    inputs = accepted_inputs(inputs_of(given, network.subject).with_batch_dim(0), network, SEED, own_loss=False)
    found = witness_pass(network, inputs, loss, SEED, draw)
    assert found.status == WITNESSED, found.reason
    assert (found.number_format, found.hidden) == ("float64", 0)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("build", DRAWN_WHOLE)
def test_networks_of_a_module_that_cannot_be_completed_are_those_of_its_own_code(build):
    """Each sample is a network of its own, with numbers from torch, NumPy and Python."""
    report = lf.check(build, IDS, samples=2, seed=SEED, loss=loss, progress=False)
    assert report.witness.status == DRAWN
    for sample in range(2):
        module = drawn_module(build, torch.float32, torch_seed(SEED, f"weightless build {sample}")).eval()
        value = loss(module(IDS), {}).mean().item()
        assert float(report.curves.loss[sample]) == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize(
    ("model", "optimizer", "form"),
    [
        ("mixtral", "sgd", "undrawn"),
        ("albert", "adamw", "undrawn"),
        ("custom", "muon", "drawn again"),
        ("mixtral", "adamw", "drawn again, and updates computed for each product"),
        ("gpt2", "sgd", "entries"),
    ],
)
def test_steps_of_each_form_of_matrices_are_witnessed(model, optimizer, form, monkeypatch):
    if form.startswith("drawn again"):
        monkeypatch.setattr(weights.Forms, "fits", lambda self, weight: len(weight.shape) < 2)
    if "computed" in form:
        monkeypatch.setattr(weights, "STORED_BYTES", 0)
    build, (make, clip) = MODELS[model](), OPTIMIZERS[optimizer]
    options = {"batches": BATCHES[:2], "unseen": UNSEEN, "loss": next_token if model == "custom" else None}
    report = lf.steps(
        build, BATCHES[0], optimizer=make, clip=clip, steps=2, samples=1, seed=SEED, progress=False,
        draw=NEVER if form == "undrawn" else ALWAYS, **options,
    )  # fmt: skip
    found = report.witness
    assert (found.status, found.number_format) == (WITNESSED, "float64"), found.reason
    assert {"entries": "entries", "undrawn": "undrawn"}.get(form, weights.REDRAWN) in report.data.attrs["weights"]


def groups(module):
    """Return the matrices of the blocks, and all other parameters."""
    hidden = [each for name, each in module.named_parameters() if each.dim() == 2 and "blocks" in name]
    return hidden, [each for each in module.parameters() if all(each is not one for one in hidden)]


def muon(module, **options):
    hidden, rest = groups(module)
    mine = torch.optim.Muon(hidden, lr=0.05, weight_decay=0.1, **options)
    return [mine, torch.optim.AdamW(rest, lr=0.01)]


def of_all(kind, **options):
    return lambda module: kind(module.parameters(), **options)


OF_USERS = {
    "dampening": of_all(torch.optim.SGD, lr=0.3, momentum=0.9, dampening=0.3),
    "nesterov": of_all(torch.optim.SGD, lr=0.3, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": of_all(torch.optim.Adam, lr=0.02, weight_decay=0.2),
    "adamw": of_all(torch.optim.AdamW, lr=0.02, weight_decay=0.2),
    "muon": muon,
    "muon without nesterov": partial(muon, nesterov=False),
    "muon with eps": partial(muon, eps=1.0),
}


@pytest.mark.parametrize("optimizer", OF_USERS)
def test_steps_of_an_optimiser_are_witnessed(optimizer):
    """The steps of a simulation with torch's formulas are those of the user's own code."""
    given = torch.tensor([[3, 7, 3, 9, 5], [8, 7, 4, 4, 11]])
    found = lf.steps(
        lambda: Custom(width=48, blocks=1), given, optimizer=OF_USERS[optimizer], steps=2, samples=1, seed=SEED,
        draw="never", loss=next_token, progress=False,
    ).witness  # fmt: skip
    assert (found.status, found.number_format, found.steps) == (WITNESSED, "float64", 2), found.reason
