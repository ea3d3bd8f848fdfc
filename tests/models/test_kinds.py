"""Unknown kinds of parts are refused when a model is made, and never become another model."""

import re
from dataclasses import dataclass, replace

import numpy as np
import pytest

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.covariance.chain import feedforward as chain_feedforward
from limitformer.covariance.limit import flow
from limitformer.models import Attention, Feedforward, Norm
from limitformer.models.kinds import FAMILIES, KINDS
from limitformer.models.sphere import SphereStart
from limitformer.nn import blocks
from limitformer.nn.drawn import network as nn_network
from limitformer.sphere import limit as limit_tokens
from limitformer.sphere import methods
from limitformer.sphere.overlap import motions

pytestmark = pytest.mark.fast

SIZE = {"width": 8, "depth": 2, "gamma": 0.5}
SPHERE = {"tokens": 2, "dim": 4, "beta": 1.0, "layers_per_unit_time": 10}


@dataclass(frozen=True, kw_only=True)
class SiLU(Feedforward):
    """A user's layer with a complete declaration, but without a kernel."""

    def gain_at(self, width):
        return 1 / 0.3558

    def slopes(self, width):
        return 1.0, 0.0


class WideGELU(lf.GELU):
    def gain_at(self, width):
        return 3.0


class LateSoftmax(lf.SoftmaxAttention):
    pass


class MyLayerNorm(lf.LayerNorm):
    pass


UNKNOWN = {
    "feedforward": (SiLU(), WideGELU(hidden=3), Feedforward()),
    "attention": (LateSoftmax(),),
    "norm": (MyLayerNorm(placement="post"),),
}
PARTS = [(family, part) for family, parts in UNKNOWN.items() for part in parts]
NAMES = {
    "feedforward": "ShapedReLU, ReLU, GELU, Elementwise, Gated, ShapedSmooth, OneMatrix or None",
    "attention": "ShapedAttention, SoftmaxAttention, Mixing or None",
    "norm": 'LayerNorm, RMSNorm, RadialNorm, "pre", "post" or None',
}
by_type = [type(part).__name__ for _, part in PARTS]


@pytest.mark.parametrize(("family", "part"), PARTS, ids=by_type)
def test_a_model_refuses_parts_of_other_kinds(family, part):
    """The message lists the known kinds; isinstance, the wrong twin, would accept all but the abstract ones."""
    model = lf.Transformer(**SIZE, attention=lf.SoftmaxAttention(), feedforward=lf.ReLU())
    message = re.escape(
        f"{family} must be one of {NAMES[family]}; got {part!r}: kernels take exactly these classes, no subclasses"
    )
    with pytest.raises(InputError, match=message):
        lf.Transformer(**{**SIZE, "attention": lf.SoftmaxAttention(), family: part})
    with pytest.raises(InputError, match=message):
        replace(model, **{family: part})
    assert isinstance(part, {"feedforward": Feedforward, "attention": Attention, "norm": Norm}[family])


def test_class_with_the_name_of_a_kind_is_refused():
    """JSON refuses it too, although it stores only names."""
    twin = type("GELU", (lf.GELU,), {})()
    with pytest.raises(InputError, match=r"feedforward must be one of"):
        lf.Transformer(**SIZE, feedforward=twin)
    with pytest.raises(InputError, match=r"JSON takes only .*GELU.*; got GELU\(\)\."):
        lf.to_json(twin)
    assert lf.to_json(lf.GELU()) == '{"kind": "GELU", "hidden": null}'


@pytest.mark.parametrize("base", [lf.Transformer, lf.StochasticTransformer, lf.HybridTransformer, lf.Start])
def test_classes_derived_from_models_and_starts_are_refused(base):
    """They are refused when they are made, with the name of their base class."""
    values = {
        lf.Transformer: {**SIZE, "attention": lf.SoftmaxAttention()},
        lf.StochasticTransformer: SPHERE,
        lf.HybridTransformer: {**SPHERE, "epsilon": 1.0},
        lf.Start: {"covariance": np.eye(2)},
    }[base]
    base(**values)
    derived = type("Mine", (base,), {})
    with pytest.raises(InputError, match=rf"{base.__name__}.*Mine"):
        derived(**values)


@pytest.mark.parametrize(
    "value",
    [
        lf.limit(lf.Transformer(**SIZE, attention=lf.ShapedAttention(tau0=1.0))),
        lf.limit(lf.StochasticTransformer(**SPHERE)),
        SphereStart(overlap=0.5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_classes_derived_from_limits_and_starts_on_the_sphere_are_refused(value):
    derived = type("Mine", (type(value),), {})
    with pytest.raises(InputError, match=f"This must be a {type(value).__name__} itself; got the subclass Mine"):
        derived(**vars(value))


TABLES = {
    "feedforward": (chain_feedforward.KERNELS, nn_network.ACTIVATIONS),
    "attention": (nn_network.KINDS,),
    "norm": (blocks.NORMS,),
    "sphere model": (
        methods.LAYERS,
        methods.ONE_NUMBER,
        limit_tokens.DRIFTS,
        limit_tokens.DIFFUSIONS,
        motions.MOTIONS,
    ),
}


@pytest.mark.parametrize("family", TABLES)
def test_tables_have_exactly_the_kinds_of_their_family(family):
    """A kind that is added to a family but not to a table fails here."""
    # OneMatrix has no σ of its own: it is built before the tables of activations are asked.
    kinds = set(FAMILIES[family]) - {lf.OneMatrix}
    for table in TABLES[family]:
        assert set(table) == kinds
    # What trains has no gates, and limits have no parts of one's own: both say so before they look into a table.
    assert set(blocks.ACTIVATIONS) == set(FAMILIES["feedforward"]) - {lf.OneMatrix, lf.Gated}
    assert set(flow.DUAL_KERNELS) == set(FAMILIES["feedforward"]) - {lf.Elementwise, lf.Gated}


def test_every_kind_belongs_to_one_family():
    assert sorted(KINDS) == sorted(kind.__name__ for kinds in FAMILIES.values() for kind in kinds)
    assert {"attention", "feedforward", "norm", "transformer", "sphere model", "limit"} == set(FAMILIES)
