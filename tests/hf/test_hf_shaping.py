"""Shaped stock models: start values, residuals and activations, law, training, precision, refusals."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    MistralConfig,
    MistralModel,
    T5Config,
    T5Model,
    ViTConfig,
    ViTModel,
)

from hf_models import BASE, HEADS, LAYERS, WIDTH, Blocks, chain, config_of, inputs_of, network, shaped, stock
from limitformer import InputError
from limitformer.hf import Shaping, shape_model
from limitformer.hf.families import FAMILIES
from limitformer.hf.shaping import redraw_blocks
from limitformer.nn import (
    Residual,
    RoundingWarning,
    TrainableShapedReLU,
    gains,
    rounding,
)
from statistics_checks import assert_same_law

UNGATED = [family for family in FAMILIES if family != "llama"]
families = pytest.mark.parametrize("family", FAMILIES)


def given(family, **options):
    return inputs_of("vit" if family == "vit" else "text", **options)


def run(model, family, **options):
    return model(**given(family), **options).last_hidden_state


def largest(one, other):
    return float((one - other).detach().abs().max())


def everything(family):
    return Shaping(residual_gamma=0.3, shaped_relu=family in UNGATED, tau0=0.8)


# The start.


@pytest.mark.parametrize(
    ("family", "per_head", "trained"), [("bert", False, True), ("gpt2", True, False), ("llama", False, False)]
)
def test_gains_have_their_start_values(family, per_head, trained):
    shaping = Shaping(
        gamma1=1.5, gamma2=0.5, per_head=per_head, trained=trained, residual_gamma=0.3,
        shaped_relu=family in UNGATED,
    )  # fmt: skip
    model = shape_model(BASE[family](config_of(family)), shaping)
    all_gains = gains(model)
    assert len(all_gains) == LAYERS * (3 if family in UNGATED else 2)
    starts = sorted({(gain.start, tuple(gain.value.shape)) for gain in all_gains})
    size = (HEADS,) if per_head else (1,)
    assert starts == sorted({(1.5, size), (0.5, size)} | ({(0.75, (1,))} if family in UNGATED else set()))
    residuals = [module for module in model.modules() if isinstance(module, Residual)]
    assert len(residuals) == 2 * LAYERS
    for residual in residuals:
        assert (residual.lam.item(), residual.gamma.item()) == pytest.approx((0.91**0.5, 0.3))
    mine = [*[gain.value for gain in all_gains], *[value for residual in residuals for value in residual.parameters()]]
    assert all(value.requires_grad == trained for value in mine)


@pytest.mark.parametrize(
    ("family", "gain"), [("bert", 0.0), ("roberta", None), ("gpt2", 0.0), ("llama", None), ("vit", 0.0)]
)
def test_shaping_without_gains_does_not_change_a_model(family, gain):
    """Gains of 0 or None do not change outputs; gains of 1 do."""
    model = stock(family)
    wanted = run(model, family)
    actual = run(shape_model(copy.deepcopy(model), Shaping(gamma1=gain, gamma2=gain)), family)
    # Llama, ViT: the library's own softmax may pass through float32; sdpa, which both use here, does not.
    assert largest(actual, wanted) < 1e-12 * float(wanted.detach().abs().max())
    assert largest(run(shape_model(copy.deepcopy(model)), family), wanted) > 1e-2


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_shape_model_does_not_change_a_shared_configuration(family):
    """Neither the configuration changes nor another model that was built from it."""
    inputs = {name: x.float() if x.is_floating_point() else x for name, x in given(family).items()}
    config = config_of(family)
    before = config.to_dict()
    other, model = BASE[family](config).eval(), BASE[family](config)
    wanted = other(**inputs).last_hidden_state
    shape_model(model, everything(family))
    assert config.to_dict() == before
    assert torch.equal(other(**inputs).last_hidden_state, wanted)
    assert all(part.config is model.config for part in model.modules() if hasattr(part, "config"))


# Residuals and activations, by hand.


def branches(block, family):
    """Return the block's two functions f, without hooks."""
    if family in ("bert", "roberta"):
        attention, output = block.attention.self, block.attention.output.dense
        return (
            lambda x: output(attention.forward(x)[0]),
            lambda x: block.output.dense(block.intermediate(x)),
        )
    if family == "llama":
        ones, zeros = torch.ones(1, 10, 4), torch.zeros(1, 10, 4)
        rotation = (ones.double(), zeros.double())  # none
        return (
            lambda x: block.self_attn.forward(x, position_embeddings=rotation)[0],
            lambda x: block.mlp.forward(x),
        )
    attention = block.attn if family == "gpt2" else block.attention
    return lambda x: attention.forward(x)[0], lambda x: block.mlp.forward(x)


@families
def test_shaped_residuals_follow_their_formula(family):
    """A block is λx + γf(x) twice, f without normalisation; tokens have norm √n before the first block."""
    model = shaped(family, shaping=everything(family))
    if family == "llama":  # without rotation
        model.rotary_emb.inv_freq.zero_()
    states = model(**given(family), output_hidden_states=True).hidden_states
    blocks = FAMILIES[family].blocks_of(model)
    x = states[0]
    assert largest(x.square().mean(-1), torch.ones(())) < (1e-4 if family in ("bert", "roberta") else 1e-6)
    for layer, block in enumerate(blocks):
        residuals = [module for module in block.modules() if isinstance(module, Residual)]
        assert len(residuals) == 2
        wrong = x
        for f, residual in zip(branches(block, family), residuals, strict=True):
            lam, gamma = residual.lam.double(), residual.gamma.double()
            wrong = gamma * wrong + lam * f(wrong)
            x = lam * x + gamma * f(x)
        if layer < LAYERS - 1:  # the last is normalised again
            assert largest(states[layer + 1], x) < 1e-12
            assert largest(states[layer + 1], wrong) > 1e-2
    last = {"gpt2": "ln_f", "llama": "norm", "vit": "layernorm"}.get(family)
    wanted = x if last is None else getattr(model, last)(x)
    assert largest(run(model, family), wanted) < 1e-12 * max(1.0, float(wanted.detach().abs().max()))


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_dropout_acts_only_on_the_branch(family):
    """A dropped entry is λx, any other λx + γf/(1 − p)."""
    options = {"resid_pdrop": 0.25} if family == "gpt2" else {"hidden_dropout_prob": 0.25}
    model = shaped(family, shaping=Shaping(residual_gamma=0.3), **options)
    block = FAMILIES[family].blocks_of(model)[1]
    block.train()
    torch.manual_seed(0)
    x = torch.randn(3, 10, WIDTH, dtype=torch.float64)
    residual = next(module for module in block.modules() if isinstance(module, Residual))
    block.eval()
    f = branches(block, family)[0](x)
    block.train()
    middle = []
    after = block.ln_2 if family == "gpt2" else block.intermediate
    hook = after.register_forward_pre_hook(lambda _, args: middle.append(args[0]))
    block(x)
    hook.remove()
    branch = middle[0] - residual.lam * x
    dropped = branch.abs() < 1e-12
    assert 0.15 < dropped.double().mean() < 0.35
    assert largest(branch[~dropped], (residual.gamma * f / 0.75)[~dropped]) < 1e-12


@pytest.mark.parametrize("family", UNGATED)
def test_the_activation_is_a_shaped_relu(family):
    model = shaped(family, shaping=Shaping(shaped_relu=True))
    activations = [module for module in model.modules() if isinstance(module, TrainableShapedReLU)]
    assert len(activations) == LAYERS
    wanted = run(model, family)
    for activation in activations:
        activation.negative.value.data.fill_(1.0)  # the identity
    linear = run(model, family)
    assert largest(wanted, linear) > 1e-3
    for block in FAMILIES[family].blocks_of(model):
        parent, _, name = FAMILIES[family].activation.rpartition(".")
        setattr(block.get_submodule(parent), name, nn.Identity())
    assert largest(run(model, family), linear) < 1e-12


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_model_on_the_meta_device_can_be_shaped(family):
    with torch.device("meta"):
        model = shape_model(AutoModel.from_config(config_of(family)))
    assert {value.device.type for value in model.parameters()} == {"meta"}
    assert len(gains(model)) == 2 * LAYERS


# The law.


def test_redrawn_model_has_the_law_of_the_exact_chain():
    """The wrong twin is the chain at half the width."""
    shaping = Shaping(residual_gamma=0.5, shaped_relu=True, tau0=0.5)
    model = shape_model(stock("gpt2", n_inner=32, n_layer=5), shaping, redraw=True)
    statistics = network(
        Blocks(nn.ModuleList(FAMILIES["gpt2"].blocks_of(model))),
        lambda generator: redraw_blocks(model, FAMILIES["gpt2"], generator),
        samples=2000,
        width=WIDTH,
    )
    assert_same_law(chain(16, True), statistics, wrong=chain(8, True))


@pytest.mark.parametrize(("family", "shaped_relu"), [("bert", False), ("llama", False), ("gpt2", True)])
def test_redrawn_weights_have_their_variances(family, shaped_relu):
    """Each branch maps N(0, 1) to mean square 1 for any activation; queries and keys have variance n^(-3/2)."""
    n, hidden = 96, 384
    sizes = (
        {"n_embd": n, "n_inner": hidden, "n_layer": 1}
        if family == "gpt2"
        else {"hidden_size": n, "intermediate_size": hidden, "num_hidden_layers": 1}
    )
    sizes |= {"num_key_value_heads": HEADS} if family == "llama" else {}
    torch.manual_seed(0)
    model = BASE[family](config_of(family, **sizes))
    shaping = Shaping(residual_gamma=0.3, shaped_relu=shaped_relu)
    shape_model(model, shaping, redraw=True, generator=torch.Generator().manual_seed(0))
    (block,) = FAMILIES[family].blocks_of(model)
    weights = FAMILIES[family].weights(block)
    for name, logit in (("query", n**-1.5), ("key", n**-1.5), ("value", 1 / n), ("output", 1 / n), ("pre", 1 / n)):
        for weight in weights[name]:
            error = (2 / weight.numel()) ** 0.5
            assert abs(float(weight.detach().double().square().mean()) / logit - 1) < 4.5 * error, name
    f = branches(block.eval(), family)[1] if family != "llama" else block.mlp.forward
    out = f(torch.randn(400, n, generator=torch.Generator().manual_seed(1)))
    assert abs(float(out.detach().square().mean()) - 1) < 0.06
    assert not any(value.any() for name, value in block.named_parameters() if name.endswith("bias"))


# Training.


def gradients(tokens, parameters):
    for value in parameters:
        value.grad = None
    tokens.square().sum().backward()
    return [value.grad for value in parameters]


@pytest.mark.parametrize(("family", "reentrant"), [("bert", False), ("llama", True)])
def test_gradient_checkpointing_changes_nothing(family, reentrant):
    model = shaped(family, shaping=everything(family)).train()
    parameters = [value for value in model.parameters() if value.requires_grad]
    options = {"use_cache": False} if family in ("gpt2", "llama") else {}
    out = run(model, family, **options)
    wanted = gradients(out, parameters)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    attention = next(module for module in model.modules() if hasattr(module, "shaping"))
    attention.register_forward_pre_hook(lambda *_: calls.append(1))
    again = run(model, family, **options)
    recomputed = gradients(again, parameters)
    assert len(calls) == 2  # computed again in the backward
    assert torch.equal(out, again)
    assert all(one is other is None or torch.equal(one, other) for one, other in zip(recomputed, wanted, strict=True))


# Precision.


@pytest.mark.parametrize(("family", "autocast"), [("bert", False), ("llama", True)])
def test_shaped_model_in_16_bits_warns_once(family, autocast):
    model = shape_model(BASE[family](config_of(family)).eval())
    model = model if autocast else model.to(torch.bfloat16)
    rounding.warn.cache_clear()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with pytest.warns(RoundingWarning, match=r"in bfloat16.*1/√width.*1 part in 256.*float32=True") as caught:
            run(model, family)
        assert len(caught) == 1
        run(model, family)
        rounding.warn.cache_clear()
        for shaping in (Shaping(float32=True), Shaping(gamma1=None, gamma2=None)):
            quiet = shape_model(BASE[family](config_of(family)).eval(), shaping)
            run(quiet if autocast else quiet.to(torch.bfloat16), family)
    rounding.warn.cache_clear()


# Refusals.


def small(**options):
    return options | {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16}


def mistral():
    return MistralModel(MistralConfig(**small(vocab_size=9, num_key_value_heads=2, sliding_window=4)))


def t5():
    return T5Model(T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))


def crossed_bert():
    return BertModel(BertConfig(**small(vocab_size=9, is_decoder=True, add_cross_attention=True)))


def relative_bert():
    model = stock("bert")
    model.config.position_embedding_type = "relative_key"
    return model


def dropping_vit():
    return ViTModel(ViTConfig(**small(image_size=8, patch_size=4, hidden_dropout_prob=0.1)))


REFUSED = {
    "another family": (mistral, Shaping(), r"redraw is for bert, roberta, .*; of mistral only"),
    "relative positions": (t5, Shaping(), "no attention was found in the blocks of t5"),
    "cross-attention": (crossed_bert, Shaping(), "no meaning for cross-attention"),
    "positions inside the softmax": (relative_bert, Shaping(), r"positions inside the softmax \('relative_key'\)"),
    "twice": (lambda: shaped("bert"), Shaping(), "This BertModel is shaped already"),
    "a gated activation": (lambda: stock("llama"), Shaping(shaped_relu=True), "llama has a gated activation"),
    "dropout of the sum": (dropping_vit, Shaping(residual_gamma=0.2), "needs hidden_dropout_prob=0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_shape_model_refuses_other_models_without_changing_them(name):
    build, shaping, message = REFUSED[name]
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config, hooks = model.config.to_dict(), [len(part._forward_pre_hooks) for part in model.modules()]
    with pytest.raises(InputError, match=message):
        shape_model(model, shaping, redraw=True)
    assert model.config.to_dict() == config
    assert [len(part._forward_pre_hooks) for part in model.modules()] == hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(before) == len(model.state_dict())


def test_shape_model_refuses_other_modules():
    with pytest.raises(InputError, match="takes a model of transformers; got Linear"):
        shape_model(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma1": float("inf")}, "gamma1 must be finite"),
        ({"gamma2": "1"}, "gamma2 must be a number; got '1'"),
        ({"tau0": 0.0}, "tau0 must be positive; got 0.0"),
        ({"residual_gamma": 1.5}, r"residual_gamma must lie in \[0, 1\]; got 1.5"),
    ],
    ids=range(4),
)
def test_shaping_refuses_bad_values(options, message):
    with pytest.raises(InputError, match=message):
        Shaping(**options)
