"""Exits: paths stop when they leave a ball or the cone of covariance matrices, or explode."""

from dataclasses import replace

import numpy as np
import pytest

from limitformer.covariance.limit.path import check_cone
from limitformer.models import GELU, ShapedAttention, ShapedReLU, SoftmaxAttention, Transformer
from limitformer.numerics.lanes import LANES
from limitformer.results.datasets import CAUSE_CODES
from limitformer.sampling.arrays import as_result_array
from limitformer.sampling.exits import (
    CAUSES,
    INSIDE,
    LEFT_BALL,
    LEFT_CONE,
    OVERFLOW_RADIUS,
    check_ball,
    check_factor,
    clear_exits,
    first_at,
    open_ledger,
    record_exit,
)
from limitformer.sampling.recording import OutputArrays, write, write_factor
from limitformer.simulation.limit import limit
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
    """With steps of 0.25 from correlation 0.94 many paths leave; every recorded value is a covariance matrix."""
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
    assert CAUSE_CODES.startswith("0 inside, 1 left the ball, 2 left the cone")
    assert "ball" in CAUSES[LEFT_BALL]
    assert "cone" in CAUSES[LEFT_CONE]


# --- the ledger -----------------------------------------------------------------------------------------------------

FACTOR = np.array([[1.5, 0.0], [0.8, 0.6]])  # trace 3.25, |V| = 3: neither the trace nor the largest entry decides
SIZES = 2.0 ** np.arange(LANES)  # V of lane k is 4**k that of lane 0


def factors(sizes=SIZES):
    return np.ascontiguousarray(FACTOR[..., None] * sizes)


def gram_of(factor):
    return np.einsum("ikl,jkl->ijl", factor, factor)


def ledger_of(factor=None, previous=None, tokens=2):
    ledger = open_ledger(tokens)
    clear_exits(ledger)
    if factor is not None:
        ledger.now[:] = gram_of(factor)
    if previous is not None:
        ledger.before[:] = gram_of(previous)
    return ledger


def arrays_of(covariance):
    """Return the output arrays that record V in `covariance` (replicas, points, 2, 2)."""
    empty, v = np.empty((len(covariance), 0, 0)), covariance.reshape(*covariance.shape[:2], 4)
    return OutputArrays(np.empty((0, 2), np.int64), np.inf, as_result_array(v), *[as_result_array(empty)] * 3)


def check(factor, radius, previous=None, step=3, ledger=None):
    """Return the ledger after `check_factor`; `check_ball` must agree with it."""
    previous = factors() / 2 if previous is None else previous
    by_factor, by_value = ledger_of(), ledger_of(factor, previous)
    check_factor(factor, previous, step, radius, by_factor)
    check_ball(step, radius, by_value)
    for ours, theirs in ((by_factor.exits, by_value.exits), (by_factor.causes, by_value.causes)):
        np.testing.assert_array_equal(ours, theirs)
    left = by_value.causes != INSIDE
    np.testing.assert_allclose(by_factor.at_exit[..., left], by_value.at_exit[..., left], rtol=1e-14)
    return by_factor


def test_a_new_ledger_has_no_exit():
    ledger = open_ledger(3)
    clear_exits(ledger)
    assert (ledger.exits == np.inf).all()
    assert (ledger.causes == INSIDE).all()
    assert ledger.now.shape == ledger.before.shape == ledger.at_exit.shape == (3, 3, LANES)
    record_exit(2, 5, LEFT_CONE, ledger.now, ledger)
    clear_exits(ledger)
    assert (ledger.exits == np.inf).all()
    assert (ledger.causes == INSIDE).all()


@pytest.mark.parametrize("lane", range(LANES))
def test_record_exit_changes_one_lane(lane):
    ledger, value = ledger_of(), np.random.default_rng(0).standard_normal((2, 2, LANES))
    record_exit(lane, 7, LEFT_CONE, value, ledger)
    others = np.arange(LANES) != lane
    assert (ledger.exits[lane], ledger.causes[lane]) == (7, LEFT_CONE)
    np.testing.assert_array_equal(ledger.at_exit[..., lane], value[..., lane])
    assert (ledger.exits[others] == np.inf).all()
    assert (ledger.causes[others] == INSIDE).all()
    assert not ledger.at_exit[..., others].any()


def test_the_ball_is_that_of_the_frobenius_norm():
    """Each lane decides by its own norm, also for a radius that differs from a norm by a rounding."""
    norms = np.linalg.norm(gram_of(factors()), axis=(0, 1))
    assert norms[0] < np.trace(FACTOR @ FACTOR.T) - 0.1
    for lane in range(LANES):
        for radius, first_outside in ((norms[lane] * (1 + 1e-14), lane + 1), (norms[lane] * (1 - 1e-14), lane)):
            ledger = check(factors(), radius)
            outside = np.arange(LANES) >= first_outside
            np.testing.assert_array_equal(ledger.exits, np.where(outside, 3, np.inf))
            np.testing.assert_array_equal(ledger.causes, np.where(outside, LEFT_BALL, INSIDE))
            np.testing.assert_allclose(ledger.at_exit[..., outside], gram_of(factors())[..., outside], rtol=1e-14)
            assert not ledger.at_exit[..., ~outside].any()


def test_the_boundary_of_the_ball_is_outside():
    """The condition is |V| ≥ radius: V with one entry 4 leaves a radius of 4."""
    factor = np.zeros((2, 2, LANES))
    factor[0, 0] = [2, 2, 1, 2, 1, 1, 2, 1]
    ledger = check(factor, 4.0)
    np.testing.assert_array_equal(ledger.causes, np.where(factor[0, 0] == 2, LEFT_BALL, INSIDE))


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("lane", range(LANES))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e200, 1e61])
def test_values_that_are_not_finite_leave_every_ball(value, lane):
    """The value at the exit is the one before, in that lane only; the others stay inside."""
    factor, previous = factors(), factors(1.1 * SIZES)
    factor[1, 1, lane] = value
    ledger = check(factor, 1e100, previous)
    inside = np.arange(LANES) != lane
    np.testing.assert_array_equal(ledger.exits, np.where(inside, np.inf, 3))
    np.testing.assert_array_equal(ledger.causes, np.where(inside, INSIDE, LEFT_BALL))
    np.testing.assert_allclose(ledger.at_exit[..., lane], gram_of(previous)[..., lane], rtol=1e-14)
    assert not ledger.at_exit[..., inside].any()


def test_an_exit_below_the_overflow_keeps_its_own_value():
    """|V| of 1e119 is recorded; 1e121 is an artefact of the step, and the path keeps the value before."""
    assert OVERFLOW_RADIUS == 1e120
    sizes = np.where(np.arange(LANES) % 2, 1e119, 1e121) ** 0.5
    factor, previous = factors(sizes), factors(np.full(LANES, 3.0))
    ledger = check(factor, 1e100, previous)
    expected = np.where(np.arange(LANES) % 2, gram_of(factor), gram_of(previous))
    np.testing.assert_allclose(ledger.at_exit, expected, rtol=1e-14)
    assert (ledger.causes == LEFT_BALL).all()


def test_a_path_leaves_once():
    """Later steps, farther out or back inside, change neither its exit nor its value."""
    sizes = np.array([1.0, 4.0] * 4)
    ledger, radius = ledger_of(), 9.0
    for step, factor in enumerate((factors(sizes), factors(np.full(LANES, 8.0)), factors(np.full(LANES, 0.1)))):
        check_factor(factor, factor, step, radius, ledger)
    np.testing.assert_array_equal(ledger.exits, [1, 0] * 4)
    expected = gram_of(factors(np.array([8.0, 4.0] * 4)))
    np.testing.assert_allclose(ledger.at_exit, expected, rtol=1e-14)


@pytest.mark.parametrize("lane", range(LANES))
def test_the_cone_is_left_lane_by_lane(lane):
    """A path whose V has no root keeps the value before; one that has left the ball keeps that exit."""
    ledger, failed = ledger_of(factors(), factors() / 2), np.zeros((1, 1, LANES))
    failed[0, 0, lane] = 2.0
    check_cone(4, failed, ledger)
    others = np.arange(LANES) != lane
    np.testing.assert_array_equal(ledger.exits, np.where(others, np.inf, 4))
    np.testing.assert_array_equal(ledger.causes, np.where(others, INSIDE, LEFT_CONE))
    np.testing.assert_array_equal(ledger.at_exit[..., lane], ledger.before[..., lane])
    assert not ledger.at_exit[..., others].any()
    ledger = ledger_of(factors(), factors() / 2)
    check_ball(2, 1e-9, ledger)
    before = ledger.at_exit.copy()
    check_cone(2, failed, ledger)
    assert (ledger.causes == LEFT_BALL).all()
    np.testing.assert_array_equal(ledger.at_exit, before)


@pytest.mark.parametrize("points", [[], [0], [3], [0, 2, 5], [2, 2, 2, 7], [1, 1, 4, 4]])
def test_first_at_is_numpys_search(points):
    points = np.array(points, np.int64)
    for step in range(9):
        assert first_at(points, step) == np.searchsorted(points, step)


@pytest.mark.parametrize("replicas", [1, 3, LANES])
def test_write_repeats_the_value_at_the_exit(replicas):
    """Lane k leaves at step k; later points repeat its value at the exit, and only `replicas` lanes are written."""
    points = np.array([0, 2, 2, 5, 9])
    memory = np.full((replicas + 1, 5, 2, 2), np.nan)
    covariance = memory[:replicas]
    ledger = ledger_of()
    for step in range(7):
        ledger.now[:] = gram_of(factors()) * (1 + step)
        record_exit(step, step, LEFT_BALL, ledger.now, ledger)
        write(points, step, arrays_of(covariance), ledger)
    for lane in range(replicas):
        for k, point in enumerate(points[:4]):
            exit_step = lane if lane < 7 else np.inf
            expected = gram_of(factors())[..., lane] * (1 + min(point, exit_step))
            np.testing.assert_array_equal(covariance[lane, k], expected)
    assert np.isnan(covariance[:, 4]).all()
    assert np.isnan(memory[replicas]).all()


def test_write_factor_forms_v_only_at_recorded_points():
    """At other steps the ledger's V is not formed."""
    points, covariance, ledger = np.array([1, 4]), np.full((LANES, 2, 2, 2), np.nan), ledger_of()
    record_exit(3, 0, LEFT_BALL, np.full((2, 2, LANES), 7.0), ledger)
    for step in range(4):
        write_factor(factors() * (1 + step), points, step, arrays_of(covariance), ledger)
    expected = np.moveaxis(4 * gram_of(factors()), -1, 0)
    expected[3] = 7
    np.testing.assert_allclose(covariance[:, 0], expected, rtol=1e-14)
    np.testing.assert_array_equal(covariance[:, 0], covariance[:, 0].swapaxes(1, 2))
    assert np.isnan(covariance[:, 1]).all()
    np.testing.assert_allclose(ledger.now, 4 * gram_of(factors()), rtol=1e-14)
