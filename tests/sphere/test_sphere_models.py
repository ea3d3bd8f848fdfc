"""Models on the sphere: JSON and back, and every refusal in one line before any work."""

import json
import re

import numpy as np
import pytest

import limitformer as lf
from limitformer.base import memory
from limitformer.base.errors import InputError
from limitformer.models.sphere_start import SphereStart
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


def test_models_of_the_round_trip_are_distinct():
    assert len({lf.to_json(model) for model in MODELS.values()}) == len(MODELS)
    assert all(a != b for a in MODELS.values() for b in MODELS.values() if a is not b)


def test_json_keeps_query_and_key_to_the_last_bit():
    record = json.loads(lf.to_json(MODELS["hybrid"]))
    np.testing.assert_array_equal(record["query_key"][0], QUERY)
    np.testing.assert_array_equal(record["query_key"][1], KEY)
    assert record["epsilon"] == 0.7
    assert record["values"] == "rademacher"


def test_models_are_values():
    one, other = (STOCHASTIC(**SIZE, query_key=pair) for pair in ((QUERY, KEY), [QUERY.tolist(), KEY.tolist()]))
    assert one == other
    assert hash(one) == hash(other)
    assert one != STOCHASTIC(**SIZE, query_key=(KEY, QUERY))


def test_numpy_numbers_are_numbers():
    model = STOCHASTIC(tokens=np.int64(3), dim=np.int32(4), beta=np.float32(1.5), layers_per_unit_time=np.int64(10))
    assert model == STOCHASTIC(**SIZE)
    assert lf.from_json(lf.to_json(model)) == model


def test_defaults():
    assert (STOCHASTIC(**SIZE).sigma, STOCHASTIC(**SIZE).values) == (1.0, "gaussian")
    assert HYBRID(**SIZE, epsilon=1.0).values == "uniform"
    assert STOCHASTIC(**SIZE).attention == "softmax"


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
    ("changes", "message"),
    [
        ({"beta": -300.5}, "beta must be at least -300; got -300.5."),
        ({"beta": np.nan}, "beta must be finite; got nan."),
        ({"beta": np.inf}, "beta must be finite; got inf."),
        ({"beta": "1"}, "beta must be a number; got '1'."),
        ({"dim": 1}, "dim must be at least 2; got 1."),
        ({"dim": 4.0}, "dim must be a whole number; got 4.0."),
        ({"tokens": 0}, "tokens must be at least 1; got 0."),
        ({"tokens": True}, "tokens must be a whole number; got True."),
        ({"layers_per_unit_time": 0}, "layers_per_unit_time must be at least 1; got 0."),
        ({"attention": "linear"}, "attention must be one of 'softmax', 'unnormalized'; got 'linear'."),
        ({"attention": None}, "attention must be one of 'softmax', 'unnormalized'; got None."),
        ({"values": "normal"}, "values must be one of 'gaussian', 'uniform', 'rademacher', 'truncated normal';"),
        ({"query_key": QUERY}, "Q must have 2 dimensions; got shape (4,)."),
        ({"query_key": (QUERY,)}, "query_key must be None, the pair (Q, K)"),
        ({"query_key": 3}, "query_key must be None, the pair (Q, K)"),
        ({"query_key": (QUERY, KEY, KEY)}, "query_key must be None, the pair (Q, K)"),
        ({"query_key": (QUERY, KEY[:1])}, "Q and K must both be (head_dim, dim = 4); got (2, 4) and (1, 4)."),
        ({"query_key": (QUERY.T, KEY.T)}, "Q and K must both be (head_dim, dim = 4); got (4, 2) and (4, 2)."),
        ({"query_key": (QUERY, [["a"] * 4] * 2)}, "K must be an array of numbers; got list."),
        ({"query_key": (QUERY * np.nan, KEY)}, "Q must be finite; 8 of its 8 entries are NaN or infinite."),
    ],
)
@pytest.mark.parametrize("kind", [STOCHASTIC, HYBRID])
def test_both_models_refuse_bad_values(kind, changes, message):
    own = {"epsilon": 0.5} if kind is HYBRID else {}
    refused(lambda: kind(**{**SIZE, **own, **changes}), message)


@pytest.mark.parametrize("sigma", [0, -1.0])
def test_sigma_must_be_positive(sigma):
    refused(lambda: STOCHASTIC(**SIZE, sigma=sigma), f"sigma must be positive; got {float(sigma)}.")


def test_other_refusals_of_one_model():
    refused(lambda: STOCHASTIC(**SIZE, sigma=np.nan), "sigma must be finite; got nan.")
    refused(lambda: HYBRID(**SIZE, epsilon=-0.1), "epsilon must be at least 0; got -0.1.")
    refused(lambda: HYBRID(**SIZE, epsilon=np.inf), "epsilon must be finite; got inf.")
    assert HYBRID(**SIZE, epsilon=0).epsilon == 0.0


def test_models_do_not_change():
    with pytest.raises(AttributeError):
        STOCHASTIC(**SIZE).beta = 2.0


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


@pytest.mark.parametrize("method", ["overlap", "gram", "coordinates"])
@pytest.mark.parametrize(("beta", "sigma"), [(150.0, 1.0), (80.0, 1e30), (34.0, 1e50)])
def test_largest_accepted_beta_gives_finite_results(method, beta, sigma):
    """One layer per unit of time is the longest step; a step that is squared twice overflows above beta = 180."""
    model = unnormalized(beta, tokens=2, sigma=sigma, layers_per_unit_time=1)
    data = lf.simulate(model, 0.3, samples=64, seed=0, horizon=20.0, method=method)
    assert np.isfinite(data["overlap"].values).all()
    assert (data["gap"].values >= 0).all()
    assert len(np.unique(data["overlap"].values[:, -1])) > 1


@pytest.mark.parametrize("stretch", [1.0, 1.83, 2.38, 3.0, 7.0, 8.44, 123.456])
def test_the_beta_that_is_suggested_is_accepted(stretch):
    """A beta that is one percent larger is refused."""
    change = {"query_key": (np.diag([1.0, stretch, 1.0, 1.0]), np.eye(4))}
    with pytest.raises(InputError) as caught:
        unnormalized(1000.0, **change)
    nearest = float(re.search(r'Nearest: beta = ([^,]*), or attention="softmax"', str(caught.value)).group(1))
    assert unnormalized(nearest, **change).beta == nearest
    refused(lambda: unnormalized(1.01 * nearest, **change), "overflows")


@pytest.mark.parametrize("attention", ["softmax", "unnormalized"])
def test_a_product_of_q_and_k_that_overflows_is_refused(attention):
    """Q and K are finite but QᵀK is not."""
    huge = np.full((4, 4), 1e200)
    with pytest.raises(InputError, match="Q"):
        STOCHASTIC(**SIZE, attention=attention, query_key=(huge, huge))


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


@pytest.mark.parametrize("of", ["chain", "limit"])
@pytest.mark.parametrize(
    ("start", "message"),
    [
        (np.eye(3, 4), "The start must be (tokens, dim) = (2, 4); got (3, 4)."),
        (np.eye(2, 3), "The start must be (tokens, dim) = (2, 4); got (2, 3)."),
        (np.eye(4)[0], "The start must have 2 dimensions; got shape (4,)."),
        (np.eye(4)[None, :2], "The start must have 2 dimensions; got shape (1, 2, 4)."),
        ([GOOD[0], [0.0, 1.0, 1e-4, 0.0]], "Tokens must lie on the unit sphere; one has length 1."),
        ([GOOD[0], [0.0, 2.0, 0.0, 0.0]], "Tokens must lie on the unit sphere; one has length 2. Repair: X / norm("),
        ([GOOD[0], [0.0] * 4], "Tokens must lie on the unit sphere; one has length 0."),
        ([GOOD[0], [np.nan, 0, 0, 1]], "The start must be finite; 1 of its 8 entries are NaN or infinite."),
        ([GOOD[0], ["a"] * 4], "The start must be an array of numbers; got list."),
        ([GOOD[0], [1.0]], "The start must be an array of numbers; got list."),
        ([], "The start must have 2 dimensions; got shape (0,)."),
        (1.0001, "The start's overlap must lie in [-1, 1]; got 1.0001."),
        (-2, "The start's overlap must lie in [-1, 1]; got -2.0."),
        (np.nan, "the start's overlap must be finite; got nan."),
        ("0.5", "the start's overlap must be a number; got '0.5'."),
        (True, "the start's overlap must be a number; got True."),
    ],
)
def test_starts_that_are_refused(monkeypatch, of, start, message):
    model = STOCHASTIC(**PAIR)
    refuses(message, monkeypatch, model if of == "chain" else lf.limit(model), start)


@pytest.mark.parametrize("tokens", [1, 3])
def test_an_overlap_is_of_two_tokens(monkeypatch, tokens):
    message = (
        f"A number as the start is the overlap of two tokens, and the model has {tokens}. "
        f"Nearest: an array of unit vectors (tokens, dim) = ({tokens}, 4)."
    )
    refuses(message, monkeypatch, STOCHASTIC(**{**SIZE, "tokens": tokens}), 0.3)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (SphereStart(overlap=0.3), "A number as the start is the overlap of two tokens"),
        (SphereStart(tokens=np.eye(2, 4)), "The start must be (tokens, dim) = (3, 4); got (2, 4)."),
        (SphereStart(tokens=2 * np.eye(3, 4)), "Tokens must lie on the unit sphere; one has length 2."),
    ],
    ids=["overlap", "two tokens", "off the sphere"],
)
def test_a_start_of_another_model_is_refused(monkeypatch, start, message):
    """The starts have two tokens, or lie off the sphere, but the model has three tokens."""
    refuses(message, monkeypatch, STOCHASTIC(**SIZE), start)


def test_lengths_of_a_start_are_normalised_or_refused():
    """An error of 1e-10 is rounding and is divided out; 1e-8 is refused."""
    model, x = STOCHASTIC(**PAIR), np.array(GOOD)
    data = lf.simulate(model, x * (1 + 1e-10), samples=1, seed=0, horizon=0.1, record=[0.0], keep="tokens")
    np.testing.assert_allclose(data["tokens"].values[0, 0], x, rtol=1e-15)
    refused(lambda: lf.simulate(model, x * (1 + 1e-8), samples=1, seed=0, horizon=0.1), "length 1.")


@pytest.mark.parametrize("of", ["chain", "limit"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"horizon": ...}, "on the sphere needs a horizon: how many units of time."),
        ({"horizon": 0}, "horizon must be positive; got 0.0."),
        ({"horizon": -1.0}, "horizon must be positive; got -1.0."),
        ({"horizon": np.nan}, "horizon must be finite; got nan."),
        ({"horizon": None}, "horizon must be a number; got None."),
        ({"tolerance": 0.0}, "tolerance must lie in (0, 0.5); got 0.0."),
        ({"tolerance": 0.5}, "tolerance must lie in (0, 0.5); got 0.5."),
        ({"tolerance": np.nan}, "tolerance must be finite; got nan."),
        ({"early_stop": 0.0}, "early_stop must lie in (0, 1) or be None; got 0.0."),
        ({"early_stop": 1.0}, "early_stop must lie in (0, 1) or be None; got 1.0."),
        ({"early_stop": True}, "early_stop must be a number; got True."),
        ({"keep": "overlaps"}, "keep must be one of 'overlap', 'outcome', 'tokens'; got 'overlaps'."),
        ({"keep": None}, "keep must be one of 'overlap', 'outcome', 'tokens'; got None."),
        ({"method": "fast"}, "method must be one of 'overlap', 'gram', 'coordinates'; got 'fast'."),
        ({"radius": 5.0}, "on the sphere has no option radius; it has horizon, method, keep, tolerance, early_stop"),
        ({"dT": 0.1, "step": "factor"}, "on the sphere has no option dT, step; it has horizon"),
        ({"record": [-0.1, 0.5]}, "Times to record must lie in [0, 1]; got [-0.1  0.5]."),
        ({"record": [0.5, 1.2]}, "Times to record must lie in [0, 1]; got [0.5 1.2]."),
        ({"record": [np.nan]}, "Times to record must lie in [0, 1]; got [nan]."),
        ({"record": [0.0, np.inf]}, "Times to record must lie in [0, 1]; got [ 0. inf]."),
        ({"record": [1e30]}, "Times to record must lie in [0, 1]; got [1.e+30]."),
        ({"record": [-0.001]}, "Times to record must lie in [0, 1]; got [-0.001]."),
        ({"record": [0.5, 0.2]}, "record must be strictly ascending; got [0.5, 0.2]."),
        ({"record": []}, "record must be a list of layers or times; got []."),
        ({"record": ["0.5"]}, "record must be a list of layers or times; got ['0.5']."),
        ({"samples": 0}, "samples must be at least 1; got 0."),
        ({"threads": 0}, "threads must be at least 1; got 0."),
        ({"chunk": 1.5}, "chunk must be a whole number; got 1.5."),
    ],
)
def test_options_that_are_refused(monkeypatch, of, settings, message):
    model = STOCHASTIC(**PAIR)
    refuses(message, monkeypatch, model if of == "chain" else lf.limit(model), **settings)


def test_a_bad_seed_is_refused():
    model = STOCHASTIC(**PAIR)
    refused(lambda: lf.simulate(model, samples=1, seed=-1, horizon=1.0), "seed must be a whole number from 0 to")


@pytest.mark.parametrize(("horizon", "nearest"), [(0.54, "0.5"), (1e-9, "0.1"), (2.98, "3"), (0.101, "0.1")])
def test_a_horizon_is_a_whole_number_of_layers(monkeypatch, horizon, nearest):
    message = f"horizon must be a whole number of layers, 10 in a unit of time; got {horizon:g}. Nearest: {nearest}."
    refuses(message, monkeypatch, horizon=horizon)
    simulated = lf.simulate  # the nearest one is accepted
    monkeypatch.undo()
    data = simulated(STOCHASTIC(**PAIR), samples=1, seed=0, horizon=float(nearest), record=[float(nearest)])
    assert data["time"].values == pytest.approx([float(nearest)], rel=1e-14)


def test_a_horizon_that_no_machine_can_count_is_refused(monkeypatch):
    refuses("horizon", monkeypatch, horizon=1e30)


@pytest.mark.parametrize(
    ("dt", "message"),
    [
        (0, "dt must be positive; got 0.0."),
        (-0.1, "dt must be positive; got -0.1."),
        (np.nan, "dt must be finite; got nan."),
        ("a", "dt must be a number; got 'a'."),
        (1e-300, "dt must be at least 1.11e-16 for this horizon; got 1e-300."),
    ],
)
def test_a_bad_step_of_a_limit_is_refused(monkeypatch, dt, message):
    refuses(message, monkeypatch, lf.limit(STOCHASTIC(**PAIR)), dt=dt)


def test_a_chain_has_no_dt(monkeypatch):
    refuses("A chain on the sphere has no option dt; it has horizon, method", monkeypatch, dt=0.1)


TURN = np.diag([1.0, 2.0, 1.0, 1.0])
NEEDS_OVERLAP = (
    "method 'overlap' needs two tokens, QᵀK = I (or one head, drawn queries and softmax), and Gaussian values or a "
    "hybrid model"
)
NEEDS_GRAM = "method 'gram' needs tokens < dim, QᵀK = I or drawn, and Gaussian values or a hybrid model"


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (STOCHASTIC(**SIZE), {"method": "overlap"}, NEEDS_OVERLAP + "; this model allows 'gram', 'coordinates'."),
        (STOCHASTIC(**{**SIZE, "tokens": 4}), {"method": "gram"}, NEEDS_GRAM + "; this model allows 'coordinates'."),
        (STOCHASTIC(**PAIR, values="uniform"), {"method": "overlap"}, NEEDS_OVERLAP + "; this model allows"),
        (STOCHASTIC(**PAIR, values="rademacher"), {"method": "gram"}, NEEDS_GRAM + "; this model allows"),
        (STOCHASTIC(**PAIR, query_key=(TURN, np.eye(4))), {"method": "overlap"}, NEEDS_OVERLAP),
        (HYBRID(**PAIR, epsilon=1.0, query_key=(TURN, np.eye(4))), {"method": "gram"}, NEEDS_GRAM),
        (STOCHASTIC(**PAIR), {"method": "overlap", "keep": "tokens"}, NEEDS_OVERLAP + ", and cannot keep tokens;"),
        (STOCHASTIC(**PAIR), {"method": "gram", "keep": "tokens"}, NEEDS_GRAM + ", and cannot keep tokens;"),
    ],
)
def test_a_method_that_the_model_does_not_allow_is_refused(monkeypatch, model, settings, message):
    refuses(message, monkeypatch, model, **settings)


@pytest.mark.parametrize(
    ("model", "settings", "method"),
    [
        (STOCHASTIC(**PAIR), {}, "overlap"),
        (STOCHASTIC(**PAIR), {"keep": "outcome"}, "overlap"),
        (STOCHASTIC(**PAIR), {"keep": "tokens"}, "coordinates"),
        (STOCHASTIC(**PAIR, query_key=(np.eye(4), np.eye(4))), {}, "overlap"),
        (STOCHASTIC(**PAIR, query_key=(TURN, np.eye(4))), {}, "coordinates"),
        (STOCHASTIC(**SIZE), {}, "gram"),
        (STOCHASTIC(**{**SIZE, "tokens": 4}), {}, "coordinates"),
        (STOCHASTIC(**{**PAIR, "dim": 2}), {}, "overlap"),
        (STOCHASTIC(**SIZE, values="uniform"), {}, "coordinates"),
        (lf.limit(STOCHASTIC(**SIZE, values="uniform")), {}, "gram"),
        (lf.limit(STOCHASTIC(**PAIR, values="rademacher")), {}, "overlap"),
        (HYBRID(**PAIR, epsilon=0.5), {}, "overlap"),
        (HYBRID(**SIZE, epsilon=0.5, values="rademacher"), {}, "gram"),
    ],
)
def test_the_cheapest_method_is_chosen(model, settings, method):
    data = lf.simulate(model, samples=1, seed=0, horizon=1.0, record=[1.0], **settings)
    assert data.attrs["method"] == method


@pytest.mark.parametrize("what", ["text", None, 3, STOCHASTIC])
def test_simulate_refuses_other_objects(what):
    refused(lambda: lf.simulate(what, samples=1, seed=0, horizon=1.0), "simulate needs a model or limit(model); got ")


@pytest.mark.parametrize("what", [3, None, "text"])
def test_limit_refuses_other_objects(what):
    refused(lambda: lf.TokenLimit(model=what), "model must be one of StochasticTransformer or HybridTransformer; got ")


def test_tokens_of_a_limit_are_checked():
    limit = lf.limit(STOCHASTIC(**PAIR))
    for method in (limit.attention, limit.drift, limit.diffusion):
        refused(lambda: method(2 * np.eye(2, 4)), "Tokens must lie on the unit sphere; one has length 2.")  # noqa: B023
        refused(lambda: method(np.eye(3, 4)), "The start must be (tokens, dim) = (2, 4); got (3, 4).")  # noqa: B023


def test_a_recording_that_does_not_fit_the_memory_is_refused(monkeypatch):
    """1000 samples, 11 times, 3 pairs with z and 1 − |z|, and the stops need 536,136 of the 3/4 that are free."""
    run = {"samples": 1000, "seed": 0, "horizon": 1.0}
    monkeypatch.setattr(memory, "available_memory", lambda: 714_848)
    assert lf.simulate(STOCHASTIC(**SIZE), **run).sizes["time"] == 11
    monkeypatch.setattr(memory, "available_memory", lambda: 714_847)
    refused(
        lambda: lf.simulate(STOCHASTIC(**SIZE), **run),
        'Nearest: record at most 10 times, or dtype="float32" for half of it, or fewer than these 3 pairs',
    )
    assert lf.simulate(STOCHASTIC(**SIZE), **run, keep="outcome").sizes["time"] == 11
    refused(lambda: lf.simulate(STOCHASTIC(**SIZE), **run, keep="tokens"), "Nearest: record at most")


def test_the_default_record_is_about_a_hundred_times():
    model = STOCHASTIC(**{**PAIR, "layers_per_unit_time": 1000})
    times = lf.simulate(model, samples=1, seed=0, horizon=2.0)["time"].values
    np.testing.assert_allclose(times, np.linspace(0, 2, 101), rtol=1e-13)
    few = lf.simulate(STOCHASTIC(**PAIR), samples=1, seed=0, horizon=0.7)["time"].values
    np.testing.assert_allclose(few, np.arange(8) / 10, rtol=1e-13)


def test_times_are_rounded_to_layers():
    data = lf.simulate(STOCHASTIC(**PAIR), samples=1, seed=0, horizon=1.0, record=[0.04, 0.26, 0.31, 0.99])
    np.testing.assert_allclose(data["time"].values, [0.0, 0.3, 1.0], rtol=1e-13)
