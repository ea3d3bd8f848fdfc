"""Paths that stop: at the exit from a ball, from the cone of covariance matrices, or where they explode."""

import numpy as np
import pytest

from limitformer.engine import simulate
from limitformer.limits import limit
from limitformer.models import GELU, ShapedAttention, ShapedReLU, SoftmaxAttention, Transformer
from limitformer.recording import CAUSES, INSIDE, LEFT_BALL, LEFT_CONE, hold, outside_ball, record

START = np.array([[1.0, 0.3, -0.2], [0.3, 2.0, 0.1], [-0.2, 0.1, 0.5]])
MODEL = Transformer(
    width=30,
    depth=30,
    gamma=0.8,
    attention=ShapedAttention(tau0=1.0),
    feedforward=ShapedReLU(c_plus=0.0, c_minus=-1.0),
)
HEADS = Transformer(
    width=30,
    depth=20,
    gamma=0.8,
    attention=SoftmaxAttention(heads=2),
    feedforward=GELU(),
    norm="pre",
    mask="causal",
)
EULER = {"dt": 0.01, "step": "euler-maruyama"}
PATHS = {
    "chain": (MODEL, {}),
    "chain with heads": (HEADS, {}),
    "limit": (limit(MODEL), {"dt": 0.02}),
    "limit, Euler-Maruyama": (limit(MODEL), EULER),
}
every_path = pytest.mark.parametrize(("model", "options"), PATHS.values(), ids=list(PATHS))


def run(model, start=START, samples=60, **settings):
    return simulate(model, start, samples=samples, seed=3, threads=1, **settings)


def axis_of(data):
    return "depth" if "depth" in data.dims else "time"


def norms(data):
    """|V| (sample, point)."""
    return np.linalg.norm(data["covariance"].values, axis=(-2, -1))


def stopped(full, radius):
    """What a run with `radius` has to give, from one without: covariance, exits and causes."""
    outside = norms(full) >= radius
    left = outside.any(1)
    last = np.where(left, outside.argmax(1), outside.shape[1] - 1)
    points = np.minimum(np.arange(outside.shape[1]), last[:, None])
    covariance = full["covariance"].values[np.arange(len(points))[:, None], points]
    exits = np.where(left, full[axis_of(full)].values[last], np.inf)
    return covariance, exits, np.where(left, LEFT_BALL, INSIDE)


def middle_radius(full):
    """A radius that half of the paths reach, not at the start, and none by a rounding error."""
    radius = (1 - 1e-9) * float(np.median(norms(full).max(1)))
    assert radius > norms(full)[:, 0].max()
    return radius


def unbroken(model, options):
    """The paths of a run without a radius that stay in the cone, so that what follows an exit is known."""
    full = run(model, **options)
    inside = full["exit_cause"].values == INSIDE
    assert inside.mean() > 0.5
    return full.isel(sample=inside), inside


@every_path
def test_a_path_keeps_the_value_of_its_exit(model, options):
    """Bits of the unstopped path up to the exit, the exit's value afterwards; half of the paths leave."""
    full, inside = unbroken(model, options)
    radius = middle_radius(full)
    part = run(model, radius=radius, **options).isel(sample=inside)
    covariance, exits, causes = stopped(full, radius)
    np.testing.assert_array_equal(part["covariance"].values, covariance)
    np.testing.assert_allclose(part["exit"].values, exits, rtol=1e-13)
    np.testing.assert_array_equal(part["exit_cause"].values, causes)
    assert 0 < (causes == LEFT_BALL).sum() < len(causes)


@every_path
def test_an_exit_between_recorded_points_is_kept_too(model, options):
    """What is recorded does not move the exit, and the value held is the exit's, not the last recorded."""
    full = run(model, **options)
    points = full[axis_of(full)].values
    kept = [0, len(points) // 2, len(points) - 1]
    radius = middle_radius(full)
    whole, part = (run(model, radius=radius, record=record, **options) for record in (None, points[kept]))
    np.testing.assert_array_equal(part["covariance"].values, whole["covariance"].values[:, kept])
    for name in ("exit", "exit_cause"):
        np.testing.assert_array_equal(part[name].values, whole[name].values)


@every_path
def test_a_start_outside_the_ball_is_an_exit_at_zero(model, options):
    """T_r = inf{t: |V_t| >= r} is 0, and the stopped process is the start."""
    data = run(model, samples=3, radius=0.5, **options)
    np.testing.assert_array_equal(data["exit"].values, 0)
    np.testing.assert_array_equal(data["exit_cause"].values, LEFT_BALL)
    np.testing.assert_allclose(data["covariance"].values, np.broadcast_to(START, data["covariance"].shape), atol=1e-14)


def test_a_radius_that_nobody_reaches_changes_nothing():
    full, part = run(MODEL), run(MODEL, radius=1e6)
    np.testing.assert_array_equal(full["covariance"].values, part["covariance"].values)
    assert np.isinf(part["exit"].values).all()


def test_euler_maruyama_that_leaves_the_cone_keeps_the_last_covariance():
    """Steps of 0.25 from tokens of correlation 0.94: many paths leave; all that is kept is a covariance."""
    model = limit(Transformer(width=20, depth=20, gamma=1.0, attention=ShapedAttention(tau0=0.7)))
    start = np.array([[1.0, 1.33], [1.33, 2.0]])
    data = run(model, start, dt=0.25, step="euler-maruyama")
    v, causes, exits = data["covariance"].values, data["exit_cause"].values, data["exit"].values
    assert (causes == LEFT_CONE).sum() > 10
    assert (causes == INSIDE).sum() > 10
    assert np.isfinite(v).all()
    traces = np.trace(v, axis1=-2, axis2=-1)
    assert (np.linalg.eigvalsh(v)[..., 0] >= -1e-9 * traces).all()
    for k in np.flatnonzero(causes == LEFT_CONE):
        step = round(exits[k] / 0.25)
        assert exits[k] == step * 0.25
        np.testing.assert_array_equal(v[k, step:], np.broadcast_to(v[k, step - 1], v[k, step:].shape))
        assert (v[k, 1:step] != v[k, : step - 1]).any((-1, -2)).all()


def test_the_factor_step_stays_in_the_cone_where_euler_maruyama_does_not():
    model = limit(Transformer(width=20, depth=20, gamma=1.0, attention=ShapedAttention(tau0=0.7)))
    data = run(model, [[1.0, 1.33], [1.33, 2.0]], dt=0.25)
    assert (data["exit_cause"].values != LEFT_CONE).all()
    v = data["covariance"].values
    assert (np.linalg.eigvalsh(v)[..., 0] >= -1e-12 * np.trace(v, axis1=-2, axis2=-1)).all()


@pytest.mark.parametrize("step", ["factor", "euler-maruyama"])
def test_an_explosion_is_marked_and_everything_stays_finite(step):
    """The drift is cubic: from V of 300 every path leaves any ball, within a few steps."""
    model = limit(Transformer(width=20, depth=40, gamma=0.8, attention=ShapedAttention(tau0=0.5)))
    data = run(model, 300 * START, dt=0.05, step=step)
    v, causes, exits = data["covariance"].values, data["exit_cause"].values, data["exit"].values
    assert np.isfinite(v).all()
    assert np.linalg.norm(v, axis=(-2, -1)).max() < 1e120
    assert (causes != INSIDE).all()
    assert (causes == LEFT_BALL).sum() > 10
    assert ((exits > 0) & (exits <= model.horizon)).all()
    assert step != "factor" or (causes == LEFT_BALL).all()


def test_a_chain_that_grows_without_bound_is_stopped():
    """lam = 10 multiplies V by 100 in each layer: |V| passes 1e100 near layer 50."""
    model = Transformer(width=30, depth=200, gamma=0.0, lam=10.0, attention=SoftmaxAttention())
    data = run(model, samples=2)
    expected = np.ceil((100 - np.log10(np.linalg.norm(START))) / 2)
    np.testing.assert_array_equal(data["exit"].values, expected)
    assert np.isfinite(data["covariance"].values).all()
    np.testing.assert_allclose(data["covariance"].values[:, -1] / 100.0**expected, [START, START], rtol=1e-12)


def test_a_chain_that_overflows_in_one_layer_keeps_finite_values():
    """lam = 1e200: V passes from 1 to beyond every double, and the last finite covariance is the start's."""
    model = Transformer(width=30, depth=3, gamma=0.0, lam=1e200, attention=SoftmaxAttention())
    data = run(model, samples=2)
    np.testing.assert_array_equal(data["exit"].values, 1)
    np.testing.assert_array_equal(data["exit_cause"].values, LEFT_BALL)
    assert np.isfinite(data["covariance"].values).all()


def test_causes_are_named_in_their_order():
    assert CAUSES[INSIDE] == "inside"
    assert "ball" in CAUSES[LEFT_BALL]
    assert "cone" in CAUSES[LEFT_CONE]


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e200])
def test_what_is_not_finite_is_outside_of_every_ball(value):
    factor = np.array([[1.0, 0.0], [0.5, value]])
    assert outside_ball(factor, 1e100, np.empty((2, 2)))


def test_the_ball_is_that_of_the_frobenius_norm():
    """Trace 3.25, |V| = 3: neither the trace nor the largest entry decides."""
    factor = np.array([[1.5, 0.0], [0.8, 0.6]])
    norm = np.linalg.norm(factor @ factor.T)
    assert norm < np.trace(factor @ factor.T) - 0.1
    assert not outside_ball(factor, norm * (1 + 1e-14), np.empty((2, 2)))
    assert outside_ball(factor, norm * (1 - 1e-14), np.empty((2, 2)))


def test_record_writes_what_is_asked_for_and_hold_the_rest():
    covariance = np.zeros((3, 1, 1))
    layers = np.array([0, 2, 5])
    written = 0
    for layer in range(3):
        written = record(np.array([[1.0 + layer]]), layers, layer, written, covariance)
    assert written == 2
    np.testing.assert_array_equal(covariance.ravel(), [1, 9, 0])
    hold(np.array([[7.0]]), written, covariance)
    np.testing.assert_array_equal(covariance.ravel(), [1, 9, 49])
