"""Models on the sphere: JSON and back, and every refusal in one line before any work."""

import re

import numpy as np
import pytest

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.models.sphere import SphereStart
from limitformer.sphere.chain import PATHS

pytestmark = pytest.mark.fast

SIZE = {"tokens": 3, "dim": 4, "beta": 1.5, "layers_per_unit_time": 10}
PAIR = {**SIZE, "tokens": 2}
QUERY = np.array([[0.3, -1.0, 2.0, 0.1], [1.0 / 3, 0.0, -0.7, 1e-3]])
KEY = np.array([[1.0, 0.2, 0.0, -0.4], [0.0, 2.0, 0.5, 0.6]])
STOCHASTIC, HYBRID = lf.StochasticTransformer, lf.HybridTransformer


def refused(make, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        make()
    assert "\n" not in str(caught.value)


MODELS = {
    "stochastic": STOCHASTIC(**SIZE, sigma=1.3),
    "unnormalized": STOCHASTIC(**SIZE, attention="unnormalized", values="rademacher"),
    "queries and keys": STOCHASTIC(**SIZE, query_key=(QUERY, KEY), values="truncated normal"),
    "hybrid": HYBRID(**SIZE, epsilon=0.7, query_key=(QUERY, KEY), values="rademacher"),
    "limit": lf.limit(STOCHASTIC(**SIZE, query_key=(QUERY, KEY))),
    "hybrid limit": lf.limit(HYBRID(**SIZE, epsilon=0.0)),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_json_and_back(model):
    text = lf.to_json(model)
    again = lf.from_json(text)
    assert again == model
    assert type(again) is type(model)
    assert lf.to_json(again) == text
    declared = getattr(model, "model", model)
    np.testing.assert_array_equal(getattr(again, "model", again).bilinear(), declared.bilinear())


def test_models_are_values():
    one, other = (STOCHASTIC(**SIZE, query_key=pair) for pair in ((QUERY, KEY), [QUERY.tolist(), KEY.tolist()]))
    assert one == other
    assert hash(one) == hash(other)
    assert one != STOCHASTIC(**SIZE, query_key=(KEY, QUERY))


def test_isotropic_depends_on_the_product_of_q_and_k():
    """QᵀK = I for a rotated pair (U, U) with orthonormal columns, but not for (U, 2U)."""
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((6, 4)))[0]
    assert STOCHASTIC(**SIZE).is_isotropic
    assert STOCHASTIC(**SIZE, query_key=(turn, turn)).is_isotropic
    assert not STOCHASTIC(**SIZE, query_key=(turn, 2 * turn)).is_isotropic
    assert not STOCHASTIC(**SIZE, query_key=(turn, turn * (1 + 1e-6))).is_isotropic
    np.testing.assert_allclose(MODELS["hybrid"].bilinear(), QUERY.T @ KEY, rtol=1e-15)


def test_a_multiple_of_the_identity_is_another_beta():
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((6, 4)))[0]
    assert STOCHASTIC(**SIZE).isotropic_beta == 1.5
    assert STOCHASTIC(**SIZE, query_key=(turn, -2 * turn)).isotropic_beta == pytest.approx(-3.0)
    assert STOCHASTIC(**SIZE, query_key=(turn, 1e-9 * turn)).isotropic_beta == pytest.approx(1.5e-9)
    assert STOCHASTIC(**SIZE, query_key=(turn, 0 * turn)).isotropic_beta == 0
    assert STOCHASTIC(**SIZE, query_key=(turn, turn @ np.diag([2.0, 2, 2, 2 + 1e-9]))).isotropic_beta is None
    assert MODELS["hybrid"].isotropic_beta is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: STOCHASTIC(**{**SIZE, "beta": -300.5}), "beta must be at least -300; got -300.5."),
        (lambda: STOCHASTIC(**{**SIZE, "beta": np.nan}), "beta must be finite; got nan."),
        (lambda: HYBRID(**{**SIZE, "beta": "1"}, epsilon=0.5), "beta must be a number; got '1'."),
        (lambda: HYBRID(**{**SIZE, "dim": 1}, epsilon=0.5), "dim must be at least 2; got 1."),
        (lambda: STOCHASTIC(**{**SIZE, "dim": 4.0}), "dim must be a whole number; got 4.0."),
        (lambda: STOCHASTIC(**{**SIZE, "tokens": 0}), "tokens must be at least 1; got 0."),
        (lambda: STOCHASTIC(**{**SIZE, "layers_per_unit_time": 0}), "layers_per_unit_time must be at least 1; got 0."),
        (lambda: STOCHASTIC(**SIZE, attention="linear"), "attention must be one of 'softmax', 'unnormalized'; got"),
        (lambda: STOCHASTIC(**SIZE, values="normal"), "values must be one of 'gaussian', 'uniform', 'rademacher',"),
        (lambda: STOCHASTIC(**SIZE, query_key=QUERY), "Q must have 2 dimensions; got shape (4,)."),
        (lambda: STOCHASTIC(**SIZE, query_key=3), "query_key must be None, the pair (Q, K)"),
        (lambda: HYBRID(**SIZE, epsilon=0.5, query_key=(QUERY, KEY[:1])), "Q and K must both be (head_dim, dim = 4);"),
        (lambda: STOCHASTIC(**SIZE, query_key=(QUERY * np.nan, KEY)), "Q must be finite; 8 of its 8 entries are NaN"),
        (lambda: STOCHASTIC(**SIZE, sigma=0), "sigma must be positive; got 0.0."),
        (lambda: STOCHASTIC(**SIZE, sigma=np.nan), "sigma must be finite; got nan."),
        (lambda: HYBRID(**SIZE, epsilon=-0.1), "epsilon must be at least 0; got -0.1."),
        (lambda: lf.TokenLimit(model=3), "model must be one of StochasticTransformer or HybridTransformer; got "),
    ],
)
def test_models_refuse_wrong_fields_in_one_line(make, message):
    refused(make, message)


def unnormalized(beta, **changes):
    return STOCHASTIC(**{**SIZE, "beta": beta, "attention": "unnormalized", **changes})


def test_weights_that_overflow_are_refused():
    """They overflow only without a shift; 150 itself is allowed."""
    assert unnormalized(150.0).beta == 150.0
    assert STOCHASTIC(**{**SIZE, "beta": 1e6}).beta == 1e6
    message = "Unnormalized attention overflows: with logits up to 151 a layer's step leaves the range of doubles."
    refused(lambda: unnormalized(151.0), message + " Nearest: beta = ")
    refused(lambda: unnormalized(30.0, query_key=(np.diag([1.0, 7.0, 1.0, 1.0]), np.eye(4))), "with logits up to 210")
    refused(lambda: unnormalized(100.0, sigma=1e30), "with logits up to 100")


@pytest.mark.parametrize(
    ("method", "beta", "sigma"), [("overlap", 150.0, 1.0), ("gram", 80.0, 1e30), ("coordinates", 34.0, 1e50)]
)
def test_largest_accepted_beta_gives_finite_results(method, beta, sigma):
    """One layer per unit of time is the longest step; a step that is squared twice overflows above beta = 180."""
    model = unnormalized(beta, tokens=2, sigma=sigma, layers_per_unit_time=1)
    data = lf.simulate(model, 0.3, samples=64, seed=0, horizon=20.0, method=method)
    assert np.isfinite(data["overlap"].values).all()
    assert (data["gap"].values >= 0).all()
    assert len(np.unique(data["overlap"].values[:, -1])) > 1


@pytest.mark.parametrize("stretch", [1.0, 2.38, 123.456])
def test_the_beta_that_is_suggested_is_accepted(stretch):
    """A beta that is one percent larger is refused."""
    change = {"query_key": (np.diag([1.0, stretch, 1.0, 1.0]), np.eye(4))}
    with pytest.raises(InputError) as caught:
        unnormalized(1000.0, **change)
    nearest = float(re.search(r'Nearest: beta = ([^,]*), or attention="softmax"', str(caught.value)).group(1))
    assert unnormalized(nearest, **change).beta == nearest
    refused(lambda: unnormalized(1.01 * nearest, **change), "overflows")


# --- simulate: starts, options, records -------------------------------------------------------------------------------


def no_work(*arguments):
    raise AssertionError("work was begun")


def refuses(message, monkeypatch, model=None, start=None, **settings):
    """`simulate` raises before anything is allocated or prepared."""
    for paths in PATHS.values():
        monkeypatch.setattr(paths, "outputs", no_work)
        monkeypatch.setattr(paths, "prepare", no_work)
    model = STOCHASTIC(**PAIR) if model is None else model
    arguments = {"samples": 2, "seed": 0, "threads": 1, "horizon": 1.0, **settings}
    arguments = {name: value for name, value in arguments.items() if value is not Ellipsis}
    refused(lambda: lf.simulate(model, start, **arguments), message)


HALF = 0.5**0.5
GOOD = [[1.0, 0.0, 0.0, 0.0], [0.0, HALF, HALF, 0.0]]


def test_lengths_of_a_start_are_normalised_or_refused():
    """An error of 1e-10 is rounding and is divided out; 1e-8 is refused."""
    model, x = STOCHASTIC(**PAIR), np.array(GOOD)
    data = lf.simulate(model, x * (1 + 1e-10), samples=1, seed=0, horizon=0.1, record=[0.0], keep="tokens")
    np.testing.assert_allclose(data["tokens"].values[0, 0], x, rtol=1e-15)
    refused(lambda: lf.simulate(model, x * (1 + 1e-8), samples=1, seed=0, horizon=0.1), "length 1.")


WIDE = {"model": STOCHASTIC(**SIZE)}
LIMIT = {"model": lf.limit(STOCHASTIC(**PAIR))}
TURN = np.diag([1.0, 2.0, 1.0, 1.0])
NEEDS_OVERLAP = (
    "method 'overlap' needs two tokens, QᵀK = I (or one head, drawn queries and softmax), and Gaussian values or a "
    "hybrid model"
)
NEEDS_GRAM = "method 'gram' needs tokens < dim, QᵀK = I or drawn, and Gaussian values or a hybrid model"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": np.eye(3, 4)}, "The start must be (tokens, dim) = (2, 4); got (3, 4)."),
        (LIMIT | {"start": np.eye(4)[0]}, "The start must have 2 dimensions; got shape (4,)."),
        ({"start": [GOOD[0], [0.0, 2.0, 0.0, 0.0]]}, "on the unit sphere; one has length 2. Repair: X / norm("),
        ({"start": [GOOD[0], [np.nan, 0, 0, 1]]}, "The start must be finite; 1 of its 8 entries are NaN or infinite."),
        ({"start": [GOOD[0], [1.0]]}, "The start must be an array of numbers; got list."),
        (LIMIT | {"start": 1.0001}, "The start's overlap must lie in [-1, 1]; got 1.0001."),
        ({"start": "0.5"}, "the start's overlap must be a number; got '0.5'."),
        (WIDE | {"start": 0.3}, "A number as the start is the overlap of two tokens, and the model has 3. Nearest: an"),
        (WIDE | {"start": SphereStart(tokens=np.eye(2, 4))}, "The start must be (tokens, dim) = (3, 4); got (2, 4)."),
        ({"horizon": ...}, "on the sphere needs a horizon: how many units of time."),
        ({"horizon": 0}, "horizon must be positive; got 0.0."),
        ({"horizon": None}, "horizon must be a number; got None."),
        (LIMIT | {"tolerance": 0.5}, "tolerance must lie in (0, 0.5); got 0.5."),
        ({"early_stop": 1.0}, "early_stop must lie in (0, 1) or be None; got 1.0."),
        ({"early_stop": True}, "early_stop must be a number; got True."),
        ({"keep": "overlaps"}, "keep must be one of 'overlap', 'outcome', 'tokens'; got 'overlaps'."),
        ({"method": "fast"}, "method must be one of 'overlap', 'gram', 'coordinates'; got 'fast'."),
        ({"radius": 5.0}, "on the sphere has no option radius; it has horizon, method, keep, tolerance, early_stop"),
        ({"dt": 0.1}, "A chain on the sphere has no option dt; it has horizon, method"),
        ({"record": [0.5, 1.2]}, "Times to record must lie in [0, 1]; got [0.5 1.2]."),
        ({"record": [0.5, 0.2]}, "record must be strictly ascending; got [0.5, 0.2]."),
        (LIMIT | {"dt": 0}, "dt must be positive; got 0.0."),
        (LIMIT | {"dt": 1e-300}, "dt must be at least 1.11e-16 for this horizon; got 1e-300."),
        (WIDE | {"method": "overlap"}, NEEDS_OVERLAP + "; this model allows 'gram', 'coordinates'."),
        ({"model": STOCHASTIC(**PAIR, values="uniform"), "method": "gram"}, NEEDS_GRAM + "; this model allows"),
        ({"model": HYBRID(**PAIR, epsilon=1.0, query_key=(TURN, np.eye(4))), "method": "gram"}, NEEDS_GRAM),
        ({"method": "overlap", "keep": "tokens"}, NEEDS_OVERLAP + ", and cannot keep tokens;"),
    ],
)
def test_simulate_refuses_wrong_arguments_in_one_line(monkeypatch, settings, message):
    refuses(message, monkeypatch, **settings)


def test_coefficients_of_a_limit_refuse_tokens_off_the_sphere():
    limit = lf.limit(STOCHASTIC(**PAIR))
    for method in (limit.attention, limit.drift, limit.diffusion):
        refused(lambda: method(2 * np.eye(2, 4)), "Tokens must lie on the unit sphere; one has length 2.")  # noqa: B023


@pytest.mark.parametrize(("horizon", "nearest"), [(0.54, "0.5"), (1e-9, "0.1"), (2.98, "3")])
def test_a_horizon_is_a_whole_number_of_layers(monkeypatch, horizon, nearest):
    message = f"horizon must be a whole number of layers, 10 in a unit of time; got {horizon:g}. Nearest: {nearest}."
    refuses(message, monkeypatch, horizon=horizon)
    simulated = lf.simulate  # the nearest one is accepted
    monkeypatch.undo()
    data = simulated(STOCHASTIC(**PAIR), samples=1, seed=0, horizon=float(nearest), record=[float(nearest)])
    assert data["time"].values == pytest.approx([float(nearest)], rel=1e-14)


@pytest.mark.parametrize(
    ("model", "settings", "method"),
    [
        (STOCHASTIC(**PAIR), {}, "overlap"),
        (STOCHASTIC(**PAIR), {"keep": "tokens"}, "coordinates"),
        (STOCHASTIC(**PAIR, query_key=(TURN, np.eye(4))), {}, "coordinates"),
        (STOCHASTIC(**SIZE), {}, "gram"),
        (STOCHASTIC(**{**SIZE, "tokens": 4}), {}, "coordinates"),
        (STOCHASTIC(**SIZE, values="uniform"), {}, "coordinates"),
        (lf.limit(STOCHASTIC(**SIZE, values="uniform")), {}, "gram"),
        (HYBRID(**PAIR, epsilon=0.5), {}, "overlap"),
        (HYBRID(**SIZE, epsilon=0.5, values="rademacher"), {}, "gram"),
    ],
)
def test_the_cheapest_method_is_chosen(model, settings, method):
    data = lf.simulate(model, samples=1, seed=0, horizon=1.0, record=[1.0], **settings)
    assert data.attrs["method"] == method


def test_the_default_record_is_about_a_hundred_times():
    model = STOCHASTIC(**{**PAIR, "layers_per_unit_time": 1000})
    times = lf.simulate(model, samples=1, seed=0, horizon=2.0)["time"].values
    np.testing.assert_allclose(times, np.linspace(0, 2, 101), rtol=1e-13)
    few = lf.simulate(STOCHASTIC(**PAIR), samples=1, seed=0, horizon=0.7)["time"].values
    np.testing.assert_allclose(few, np.arange(8) / 10, rtol=1e-13)


def test_times_are_rounded_to_layers():
    data = lf.simulate(STOCHASTIC(**PAIR), samples=1, seed=0, horizon=1.0, record=[0.04, 0.26, 0.31, 0.99])
    np.testing.assert_allclose(data["time"].values, [0.0, 0.3, 1.0], rtol=1e-13)
