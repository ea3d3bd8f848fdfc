"""Exits: paths stop when they leave a ball or the cone of covariance matrices, or explode."""

from dataclasses import replace

import numpy as np
import pytest

from limitformer.models import GELU, ShapedAttention, ShapedReLU, SoftmaxAttention, Transformer
from limitformer.sampling.exits import (
    INSIDE,
    LEFT_BALL,
    LEFT_CONE,
)
from limitformer.simulation.processes import limit
from limitformer.simulation.simulate import simulate

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
# At this τ₀ no path needs short steps, in which it could leave and come back between two points.
WARM = limit(replace(MODEL, attention=ShapedAttention(tau0=4.0)))
EULER = {"dt": 0.01, "step": "euler-maruyama"}
PATHS = {
    "chain": (MODEL, {}),
    "chain with heads": (HEADS, {}),
    "limit": (WARM, {"dt": 0.02}),
    "limit, Euler-Maruyama": (WARM, EULER),
}
CHAINS = list(PATHS.values())[:2]
LIMITS = list(PATHS.values())[2:]
every_path = pytest.mark.parametrize(("model", "options"), PATHS.values(), ids=list(PATHS))


def run(model, start=START, samples=60, **settings):
    return simulate(model, start, samples=samples, seed=3, threads=1, **settings)


def axis_of(data):
    return "depth" if "depth" in data.dims else "time"


def norms(data):
    """|V| (sample, point)."""
    return np.linalg.norm(data["covariance"].values, axis=(-2, -1))


def stopped(full, radius):
    """Compute covariance, exits and causes of a run with `radius` from one without."""
    outside = norms(full) >= radius
    left = outside.any(1)
    last = np.where(left, outside.argmax(1), outside.shape[1] - 1)
    points = np.minimum(np.arange(outside.shape[1]), last[:, None])
    covariance = full["covariance"].values[np.arange(len(points))[:, None], points]
    exits = np.where(left, full[axis_of(full)].values[last], np.inf)
    return covariance, exits, np.where(left, LEFT_BALL, INSIDE)


def middle_radius(full):
    """Return a radius that half of the paths reach, none of them at the start or by a rounding error."""
    radius = (1 - 1e-9) * float(np.median(norms(full).max(1)))
    assert radius > norms(full)[:, 0].max()
    return radius


def unbroken(model, options):
    """Return the paths that stay in the cone in a run without a radius, and which they are."""
    full = run(model, **options)
    inside = full["exit_cause"].values == INSIDE
    assert inside.mean() > 0.5
    return full.isel(sample=inside), inside


@pytest.mark.parametrize(("model", "options"), CHAINS, ids=list(PATHS)[:2])
def test_a_path_keeps_the_value_of_its_exit(model, options):
    """It has the bits of the unstopped path up to the exit, then the value at the exit; half of the paths leave."""
    full, inside = unbroken(model, options)
    radius = middle_radius(full)
    part = run(model, radius=radius, **options).isel(sample=inside)
    covariance, exits, causes = stopped(full, radius)
    np.testing.assert_array_equal(part["covariance"].values, covariance)
    np.testing.assert_allclose(part["exit"].values, exits, rtol=1e-13)
    np.testing.assert_array_equal(part["exit_cause"].values, causes)
    assert 0 < (causes == LEFT_BALL).sum() < len(causes)


@pytest.mark.parametrize(("model", "options"), LIMITS, ids=list(PATHS)[2:])
def test_a_path_of_the_limit_keeps_a_value_on_the_ball(model, options):
    """|V| is below the radius before the exit, and from then on V is one value with |V| = radius.

    Far from the ball paths have the bits of those without a radius.
    """
    full = run(model, **options)
    radius = middle_radius(full)
    part = run(model, radius=radius, **options)
    left = part["exit_cause"].values == LEFT_BALL
    assert 0 < left.sum() < len(left)
    after = part["time"].values >= part["exit"].values[:, None] - 1e-12
    size = norms(part)
    np.testing.assert_allclose(size[after & left[:, None]], radius, rtol=1e-12)
    assert (size[~after & left[:, None]] < radius).all()
    last = part["covariance"].values[:, -1:]
    assert (part["covariance"].values == last)[after & left[:, None]].all()
    calm, wide = norms(full).max(1) < 10 * radius, run(model, radius=1e4 * radius, **options)
    assert calm.mean() > 0.5
    np.testing.assert_array_equal(wide["covariance"].values[calm], full["covariance"].values[calm])


@pytest.mark.parametrize("step", ["factor", "euler-maruyama"])
def test_an_exit_in_a_short_step_has_its_own_time_and_value(step):
    """A step of 0.05 would jump far over the radius."""
    model = limit(Transformer(width=20, depth=20, gamma=0.6, attention=ShapedAttention(tau0=0.2)))
    left = run(model, dt=0.05, step=step, radius=1e6)
    out = left["exit_cause"].values == LEFT_BALL
    assert 10 < out.sum() < len(out)
    np.testing.assert_allclose(norms(left)[out, -1], 1e6, rtol=1e-12)
    whole = left["exit"].values[out] / 0.05
    assert (np.abs(whole - np.rint(whole)) > 1e-6).any()
    points = left["time"].values >= left["exit"].values[:, None]
    last = left["covariance"].values[:, -1][:, None]
    assert (left["covariance"].values == last)[points & out[:, None]].all()


@every_path
def test_an_exit_between_recorded_points_keeps_its_value(model, options):
    """`record` does not change the exit, and the value afterwards is that of the exit, not the last recorded one."""
    full = run(model, **options)
    points = full[axis_of(full)].values
    chosen = [0, len(points) // 2, len(points) - 1]
    radius = middle_radius(full)
    whole, part = (run(model, radius=radius, record=record, **options) for record in (None, points[chosen]))
    np.testing.assert_array_equal(part["covariance"].values, whole["covariance"].values[:, chosen])
    for name in ("exit", "exit_cause"):
        np.testing.assert_array_equal(part[name].values, whole[name].values)


@every_path
def test_a_start_outside_the_ball_is_an_exit_at_zero(model, options):
    """T_r = inf{t: |V_t| >= r} is 0, and the stopped process is the start."""
    data = run(model, samples=3, radius=0.5, **options)
    np.testing.assert_array_equal(data["exit"].values, 0)
    np.testing.assert_array_equal(data["exit_cause"].values, LEFT_BALL)
    np.testing.assert_allclose(data["covariance"].values, np.broadcast_to(START, data["covariance"].shape), atol=1e-14)


def test_an_unreached_radius_changes_nothing():
    full, part = run(MODEL), run(MODEL, radius=1e6)
    np.testing.assert_array_equal(full["covariance"].values, part["covariance"].values)
    assert np.isinf(part["exit"].values).all()


def test_euler_maruyama_that_leaves_the_cone_keeps_the_last_covariance():
    """Many paths leave with steps of 0.25 from correlation 0.94; every recorded value is a covariance matrix."""
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


def test_paths_that_leave_ball_and_cone_at_once_keep_a_covariance():
    """Long steps take many V out of both; one that has left the ball is recorded on it."""
    model = limit(replace(MODEL, width=1000, depth=1000, gamma=0.9, feedforward=None))
    data = run(model, START, samples=1000, dt=0.25, step="euler-maruyama", radius=4.0)
    v, causes = data["covariance"].values, data["exit_cause"].values
    assert {LEFT_BALL, LEFT_CONE} <= set(causes.tolist())
    assert (np.linalg.eigvalsh(v)[..., 0] >= -1e-9 * np.trace(v, axis1=-2, axis2=-1)).all()
    np.testing.assert_allclose(norms(data)[causes == LEFT_BALL, -1], 4.0, rtol=1e-12)


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
