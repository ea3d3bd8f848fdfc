"""Declarations: refusals and their messages, derived numbers, and JSON in both directions."""

import json
import math
import re
from dataclasses import fields, replace

import pytest
from hypothesis import strategies as st
from scipy import integrate, stats

import own_parts_example as own
from limitformer.base.errors import InputError
from limitformer.models import (
    GELU,
    Elementwise,
    Gated,
    LayerNorm,
    Mixing,
    OneMatrix,
    RadialNorm,
    ReLU,
    RMSNorm,
    ShapedAttention,
    ShapedReLU,
    ShapedSmooth,
    SoftmaxAttention,
    Transformer,
    from_json,
    to_json,
)
from limitformer.models.kinds import all_kinds

pytestmark = pytest.mark.fast

SHAPED = ShapedAttention(tau0=1.5)
RELU = ShapedReLU(c_plus=0.3, c_minus=-1.0)


def transformer(**changes):
    settings = {"width": 12, "depth": 5, "gamma": 0.6, "attention": SHAPED, "feedforward": RELU}
    return Transformer(**{**settings, **changes})


MODELS = {
    "full": transformer(),
    "attention only": transformer(feedforward=None),
    "resnet": transformer(attention=None),
    "standard temperature": transformer(attention=ShapedAttention(tau0=0.5, temperature="standard")),
    "softmax": transformer(attention=SoftmaxAttention()),
    "heads": transformer(attention=SoftmaxAttention(tau0=2.0, heads=3)),
    "heads with head_dim": transformer(attention=ShapedAttention(tau0=2.0, heads=5, head_dim=7)),
    "relu": transformer(feedforward=ReLU(hidden=48)),
    "gelu": transformer(feedforward=GELU(hidden=5)),
    "one matrix": transformer(attention=None, feedforward=OneMatrix(activation=ReLU())),
    "pre": transformer(norm="pre"),
    "rms": transformer(norm=RMSNorm(placement="pre", eps=0.0)),
    "layer norm": transformer(norm=LayerNorm(placement="post", eps=1e-3)),
    "causal": transformer(mask="causal"),
    "own parts": transformer(attention=Mixing(own.sigmoid_attention, heads=2), feedforward=Elementwise(own.silu)),
    "gated": transformer(feedforward=Gated(own.silu, gain=2.0), norm=RadialNorm(own.bounded, placement="post")),
    "shaped smooth": transformer(feedforward=ShapedSmooth(own.shifted_tanh, scale=2.0)),
    "strengths": transformer(gamma=(0.1, (0.2, 0.3), 0.4, 0.5, 1.6), lam=(1.0, 0.9, (0.8, 0.7), 0.6, 0.5)),
}
PARTS = [part for model in MODELS.values() for part in (model.attention, model.feedforward, model.norm) if part]


def refuses(message, make, *arguments, **settings):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        make(*arguments, **settings)
    assert "\n" not in str(caught.value)


SOFTMAX = SoftmaxAttention()
OF_ATTENTION = "attention must be one of ShapedAttention, SoftmaxAttention, Mixing or None; got"
OF_FEEDFORWARD = (
    "feedforward must be one of ShapedReLU, ReLU, GELU, Elementwise, Gated, ShapedSmooth, OneMatrix or None; got"
)
OF_NORM = 'norm must be one of LayerNorm, RMSNorm, RadialNorm, "pre", "post" or None; got'
NEAREST = "heads must divide width; got width=12, heads=5. Nearest: 4 or 6, or give head_dim."


def changed(part):
    return lambda **changes: replace(part, **changes)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (transformer, {"width": 0}, "width must be at least 1; got 0."),
        (transformer, {"depth": -3}, "depth must be at least 1; got -3."),
        (transformer, {"width": 10**5000}, "width must be below 2⁶³; got more."),  # Python does not write the digits
        (transformer, {"depth": 2**63}, "depth must be below 2⁶³; got more."),
        (transformer, {"width": True}, "width must be a whole number; got True."),
        (transformer, {"depth": 2.0}, "depth must be a whole number; got 2.0."),
        (transformer, {"gamma": -0.1}, "gamma must lie in [0, 1]; got -0.1."),
        (transformer, {"gamma": math.nan}, "gamma must be finite; got nan."),
        (transformer, {"lam": -1e-9}, "lam must be at least 0; got -1e-09."),
        (transformer, {"lam": math.inf}, "lam must be finite; got inf."),
        (transformer, {"attention": SoftmaxAttention(heads=5)}, NEAREST),
        (transformer, {"attention": SoftmaxAttention(heads=50)}, "Nearest: 6 or 12, or give head_dim."),
        (transformer, {"attention": None, "feedforward": None}, "needs attention, feedforward or both; got neither."),
        (transformer, {"attention": RELU}, f"{OF_ATTENTION} ShapedReLU("),
        (transformer, {"attention": "softmax"}, f"{OF_ATTENTION} 'softmax'."),
        (transformer, {"feedforward": SHAPED}, f"{OF_FEEDFORWARD} ShapedAttention("),
        (transformer, {"norm": "mid"}, f"{OF_NORM} 'mid'."),
        (transformer, {"mask": "future"}, "mask must be None or \"causal\"; got 'future'."),
        (changed(SHAPED), {"heads": 0}, "heads must be at least 1; got 0."),
        (changed(SOFTMAX), {"head_dim": True}, "head_dim must be a whole number; got True."),
        (changed(SHAPED), {"tau0": 0}, "tau0 must be positive; got 0.0."),
        (changed(SHAPED), {"temperature": "hot"}, 'temperature must be "shaped" or "standard"; got \'hot\'.'),
        (changed(SHAPED), {"center": 1}, "center must be True or False; got 1."),
        (changed(RELU), {"hidden": 0}, "hidden must be at least 1; got 0."),
        (changed(RELU), {"c_plus": math.inf}, "c_plus must be finite; got inf."),
        (LayerNorm, {"placement": "mid"}, 'placement must be "pre" or "post"; got \'mid\'.'),
        (RMSNorm, {"placement": "pre", "eps": -1e-9}, "eps must be at least 0; got -1e-09."),
    ],
)
def test_values_out_of_range_and_parts_in_the_wrong_place_are_refused(make, changes, message):
    refuses(message, make, **changes)


def test_two_slopes_of_zero_are_refused_at_the_width_where_they_are():
    flat = ShapedReLU(c_plus=-3.0, c_minus=-3.0)
    refuses("c_plus and c_minus make both slopes zero at width 9.", transformer, width=9, feedforward=flat)
    assert transformer(width=16, feedforward=flat).feedforward == flat


@pytest.mark.parametrize("kind", [Transformer, ShapedAttention, ShapedReLU, LayerNorm, RMSNorm])
def test_options_that_choose_the_theorem_have_no_default(kind):
    with pytest.raises(TypeError, match="required keyword-only argument"):
        kind()


def test_lam_completes_gamma_to_one():
    """A grid over γ must not keep the λ of its first model."""
    assert transformer(gamma=0.37).skip == math.sqrt(1 - 0.37**2)
    assert transformer(gamma=0.37, lam=2).skip == 2
    assert replace(transformer(), gamma=0.8).skip == pytest.approx(0.6, rel=1e-15)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_norm_shorthands_stand_for_layer_norm(placement):
    model = transformer(norm=placement)
    assert model == transformer(norm=LayerNorm(placement=placement))
    assert model.normalisation == LayerNorm(placement=placement)


def test_key_dim_and_temperature():
    """tau = tau0 sqrt(width head_dim) shaped, tau0 sqrt(head_dim) standard."""
    heads, explicit = SoftmaxAttention(tau0=3.0, heads=4), ShapedAttention(tau0=0.5, heads=3, head_dim=9)
    assert (SHAPED.key_dim(25), heads.key_dim(100), explicit.key_dim(100)) == (25, 25, 9)
    assert SHAPED.temperature_at(25) == pytest.approx(1.5 * 25)
    assert heads.temperature_at(100) == pytest.approx(3.0 * 5)
    assert explicit.temperature_at(100) == pytest.approx(0.5 * 30)
    assert replace(explicit, temperature="standard").temperature_at(100) == pytest.approx(0.5 * 3)


def second_moment(activation):
    """E activation(g)², integrated on each half-line because of the kink."""
    halves = [(-40, 0), (0, 40)]
    return sum(integrate.quad(lambda x: activation(x) ** 2 * stats.norm.pdf(x), *ends)[0] for ends in halves)


@pytest.mark.parametrize("width", [4, 50])
def test_gains_keep_a_variance_of_one(width):
    """c E activation(g)² = 1 by quadrature, whose own error is below 1e-8; the wrong slopes miss by 1e-3."""
    positive, negative = RELU.slopes(width)
    assert (positive, negative) == (1 + 0.3 / width**0.5, 1 - 1 / width**0.5)
    activations = {
        RELU: lambda x: positive * max(x, 0) + negative * min(x, 0),
        ReLU(): lambda x: max(x, 0),
        GELU(): lambda x: x * stats.norm.cdf(x),
    }
    for part, activation in activations.items():
        assert part.gain_at(width) * second_moment(activation) == pytest.approx(1, abs=1e-7)
    turned = second_moment(lambda x: negative * max(x, 0) + 2 * positive * min(x, 0))
    assert abs(RELU.gain_at(width) * turned - 1) > 1e-3


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_models_survive_json(model):
    assert from_json(to_json(model)) == model
    assert from_json(to_json(model, indent=2)) == model
    for part in (part for part in (model.attention, model.feedforward, model.norm) if part):
        assert from_json(to_json(part)) == part


def test_the_registry_has_every_kind():
    """A kind that is added without a model in this file fails."""
    on_sphere = {"StochasticTransformer", "HybridTransformer", "TokenLimit"}  # test_sphere_models
    present = {"Transformer", "CovarianceLimit", "CovarianceFlow"} | on_sphere | {type(part).__name__ for part in PARTS}
    assert present == set(all_kinds())


def test_json_writes_every_field_out():
    record = json.loads(to_json(transformer(norm="pre")))
    assert set(record) == {"kind"} | {field.name for field in fields(Transformer)}
    assert record["norm"] == {"kind": "LayerNorm", "placement": "pre", "eps": 1e-5}
    assert record["lam"] is None


positive = st.floats(1e-3, 1e3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "A model must be JSON; line 1 is not: Expecting value."),
        (
            "{\n'kind'",
            "A model must be JSON; line 2 is not: Expecting property name enclosed in double quotes.",
        ),
        ("[1, 2]", "A model must be a JSON object; got list."),
        ("null", "A model must be a JSON object; got NoneType."),
        (None, "A model must be JSON: the JSON object must be str, bytes or bytearray, not NoneType."),
        ("[" * 10**5, "A model must be JSON: maximum recursion depth exceeded"),
        ('{"kind": "ReLU", "hidden": ' * 500 + "1" + "}" * 500, "A model has a few levels; got more"),
        ('{"kind": ' + "9" * 5000 + "}", "A model must be JSON: Exceeds the limit"),
        ("{}", '"kind" must be one of ShapedReLU, ReLU, GELU,'),
        ('{"kind": "Perceptron"}', "got 'Perceptron'."),
        ('{"kind": ["ReLU"]}', '"kind" must be one of ShapedReLU, ReLU, GELU,'),
        ('{"kind": {"kind": "ReLU"}}', '"kind" must be one of ShapedReLU, ReLU, GELU,'),
        ('{"kind": "ReLU", "hiden": 3, "a": 1}', "ReLU has no field a, hiden; it has hidden."),
        ('{"kind": "ShapedReLU", "c_plus": 1.0}', "ShapedReLU: "),
        ('{"kind": "ReLU", "hidden": 0}', "hidden must be at least 1; got 0."),
        ('{"kind": "SoftmaxAttention", "tau0": "1"}', "tau0 must be a number; got '1'."),
        (to_json(transformer()).replace("0.6", '"0.5"'), "gamma must be a number; got '0.5'."),
        ('{"kind": "SoftmaxAttention", "tau0": NaN}', "tau0 must be finite; got nan."),
    ],
)
def test_json_mistakes_are_refused_by_name(text, message):
    refuses(message, from_json, text)
