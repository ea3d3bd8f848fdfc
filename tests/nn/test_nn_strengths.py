"""γ₁, γ₂, s₋, λ, γ have float32 in models of 16 bits, at least one dimension, and names without weight decay."""

import copy

import pytest
import torch
from torch import nn
from transformers import GPT2Model, Trainer, TrainingArguments

from hf_models import BASE, VOCABULARY, config_of, unlike
from limitformer.hf import (
    Shaping,
    shape_model,
)
from limitformer.nn import Gain, Residual, TrainableShapedReLU, shaped_block
from limitformer.nn.strengths import ENDING

SIXTEEN = {
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "type": lambda model: model.type(torch.bfloat16),
    "to another": lambda model: model.to(torch.zeros(1, dtype=torch.bfloat16)),
    "double and back": lambda model: model.double().half(),
}
FAMILIES = ["bert", "roberta", "gpt2", "llama", "vit"]
families = pytest.mark.parametrize("family", FAMILIES)


def block():
    return unlike(shaped_block(16, 4, gamma=0.3))


def whole(family, **options):
    """A stock model with every part that shaping can change."""
    torch.manual_seed(0)
    shaping = Shaping(residual_gamma=0.3, shaped_relu=family != "llama", **options)
    return shape_model(BASE[family](config_of(family)), shaping)


def strengths(model):
    return {name: value for name, value in model.named_parameters() if name.endswith(ENDING)}


@pytest.mark.parametrize("how", SIXTEEN)
def test_strengths_stay_float32_in_16_bits(how):
    model = block()
    before = {name: value.detach().clone() for name, value in strengths(model).items()}
    parameters = dict(model.named_parameters())
    SIXTEEN[how](model)
    after = strengths(model)
    assert len(after) == 7
    for name, value in after.items():
        assert value.dtype == torch.float32
        assert value is parameters[name]  # an optimiser still refers to it
        assert torch.equal(value, before[name]), name
    weights = [value for name, value in model.named_parameters() if name not in after]
    assert all(value.dtype in (torch.bfloat16, torch.float16) for value in weights)


@families
def test_strengths_stay_float32_in_bfloat16_stock_models(family):
    model = whole(family).bfloat16()
    assert {value.dtype for value in strengths(model).values()} == {torch.float32}
    later = shape_model(BASE[family](config_of(family)).bfloat16(), Shaping(residual_gamma=0.3))
    assert {value.dtype for value in strengths(later).values()} == {torch.float32}
    assert later.dtype == torch.bfloat16


def test_strengths_follow_finer_dtypes_devices_and_defaults():
    model = block().double()
    assert {value.dtype for value in strengths(model).values()} == {torch.float64}
    assert {value.device.type for value in strengths(model.to("meta")).values()} == {"meta"}
    for default, wanted in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        try:
            torch.set_default_dtype(default)
            assert {value.dtype for value in strengths(shaped_block(16, 4, gamma=0.3)).values()} == {wanted}
        finally:
            torch.set_default_dtype(torch.float32)


# States of earlier versions.


def old_state(model, dtype=torch.float32):
    """Return the state that version 0.1 saved: names without the ending, single numbers without a dimension."""
    state = {}
    for name, value in model.state_dict().items():
        value = value.to(dtype)
        state[name.removesuffix(ENDING)] = value.reshape(()) if value.shape == (1,) and name.endswith(ENDING) else value
    assert not any(name.endswith(ENDING) for name in state)
    return state


@pytest.mark.parametrize(("assign", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_states_of_earlier_versions_are_loaded(assign, dtype):
    for model in (block(), unlike(whole("gpt2", per_head=False)), unlike(whole("bert"))):
        fresh = copy.deepcopy(model)
        with torch.no_grad():
            for value in fresh.parameters():
                value.zero_()
        fresh.load_state_dict(old_state(model, dtype), assign=assign)
        for name, value in fresh.named_parameters():
            wanted = dict(model.named_parameters())[name]
            assert torch.equal(value.float(), wanted.to(dtype).float()), name
            assert value.shape == wanted.shape
            assert not name.endswith(ENDING) or value.dtype == torch.float32
    with pytest.raises(RuntimeError, match="Missing key"):
        block().load_state_dict({name: x for name, x in old_state(block()).items() if "lam" not in name})


# Training in 16 bits.


def distances(model, teacher, dtype, everything=True, rounded=False, steps=100):
    """Return the change of the strengths after some steps of AdamW towards a network with other strengths."""
    model = copy.deepcopy(model).to(dtype)
    batch, tokens = (8, 32) if everything else (4, 10)
    ids = torch.randint(3, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = teacher(ids).last_hidden_state
    own = list(strengths(model).values())
    model.requires_grad_(everything)
    for value in own:
        value.requires_grad_(True)
    before = torch.cat([value.detach().clone() for value in own])
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)
    for _ in range(steps):
        optimiser.zero_grad()
        (model(ids).last_hidden_state.float() - wanted).square().mean().backward()
        optimiser.step()
        for value in own if rounded else ():
            value.data = value.data.bfloat16().float()
    return (torch.cat([value.detach() for value in own]) - before).double()


@pytest.fixture(scope="module")
def pair():
    """A float32 model, and its teacher with other strengths."""
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 1}
    shaping = Shaping(float32=True, residual_gamma=0.3, shaped_relu=True)
    model = shape_model(GPT2Model(config_of("gpt2", **sizes)), shaping, redraw=True)
    teacher = unlike(copy.deepcopy(model))
    return model, teacher


@pytest.mark.parametrize("everything", [True, False])
def test_strengths_train_in_16_bits_as_in_float32(everything, pair):
    """The changes agree to 2 %, whether the weights are trained or not."""
    model, teacher = pair
    wanted = distances(model, teacher, torch.float32, everything)
    found = distances(model, teacher, torch.bfloat16, everything)
    assert (wanted.abs() > 1e-4).all()
    assert (found - wanted).norm() < 0.02 * wanted.norm()
    assert everything or ((found - wanted).abs() < 0.02 * wanted.abs()).all()  # each, where no weight is rounded


def test_wrong_twin_rounding_each_step_freezes_strengths(pair):
    """γ₁ and γ₂ stay at 1."""
    model, teacher = pair
    twin = distances(model, teacher, torch.bfloat16, everything=False, rounded=True, steps=10)
    ones = torch.cat([value.detach() for value in strengths(model).values()]) == 1
    assert ones.sum() == 8
    assert (twin[ones] == 0).all()


def test_slope_and_residual_are_rounded_once():
    """The error is half a unit of the result; rounding λ, γ or s₋ first would add to it."""
    x, f = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    residual, activation = Residual(0.2).bfloat16(), TrainableShapedReLU(negative=0.9779).bfloat16()
    exact = residual.lam.double() * x.double() + residual.gamma.double() * f.double()
    assert residual(x, f).dtype == torch.bfloat16
    assert ((residual(x, f).double() - exact).abs() <= exact.abs() * 2**-8 * 1.0001).all()
    exact = torch.where(x > 0, x.double(), 0.9779 * x.double())
    assert activation(x).dtype == torch.bfloat16
    assert ((activation(x).double() - exact).abs() <= exact.abs() * 2**-8 * 1.0001).all()
    rounded = (residual.lam.bfloat16() * x + residual.gamma.bfloat16() * f).double()
    exact = residual.lam.double() * x.double() + residual.gamma.double() * f.double()
    assert ((rounded - exact).abs() > exact.abs() * 2**-8 * 1.0001).any()


# Weight decay.


def decayed(model, tmp_path):
    """Return the names that the Trainer decays by its own rule."""
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], weight_decay=0.1)
    trainer = Trainer(model, arguments)
    assert type(trainer).get_decay_parameter_names is Trainer.get_decay_parameter_names
    return set(trainer.get_decay_parameter_names(model))


def test_the_stock_trainer_decays_no_strength(tmp_path):
    for model in map(whole, FAMILIES):
        found = decayed(model, tmp_path)
        assert not found & set(strengths(model))
        matrices = {name for name, value in model.named_parameters() if value.dim() >= 2}
        assert matrices <= found


def test_wrong_twin_bare_parameter_gets_weight_decay(tmp_path):
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma1 = nn.Module()
            self.gamma1.value = nn.Parameter(torch.ones(4))
            self.gamma2 = Gain(1.0, 4)

    assert decayed(Bare(), tmp_path) == {"gamma1.value"}
