"""Paths of the covariance SDE from a start, recorded at chosen times."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import require, require_real, set_fields
from limitformer.covariance.limit.ball import (
    ACTIVE,
    BLOCKS_OF_STEP,
    TIME,
    Ball,
    find_leaving,
    is_finite,
    is_near,
    keep_active,
    open_ball,
    scale_to_radius,
    trace,
)
from limitformer.covariance.limit.covariance import CovarianceLimit, largest_step
from limitformer.covariance.limit.euler import cholesky, euler_maruyama_step
from limitformer.covariance.limit.factor_step import (
    StepWorkspace,
    covariance_of,
    factor_step,
    step_workspace,
    to_step_factor,
    tokens_of,
    trace_of,
)
from limitformer.covariance.limit.short_steps import (
    EULER_RESOLUTION,
    FACTOR_RESOLUTION,
    MOST_STEPS,
    SHORTENED,
    ShortSteps,
    clear_short_steps,
    measure_pace,
    measure_root,
    open_short_steps,
    quicken_near_ball,
    shorten_euler_step,
    shorten_factor_step,
    too_coarse,
)
from limitformer.models import Start
from limitformer.numerics.elementary import U64
from limitformer.numerics.factor import copy, gram, lower_root
from limitformer.numerics.kernels import allocator, driver, kernel
from limitformer.numerics.lanes import LANES, all_below, everywhere, in_lanes, lane_matrix, load, store
from limitformer.numerics.random import Stream, key, open_stream, rewind
from limitformer.numerics.watch import Watch, count_whole, is_halted, keep_going
from limitformer.sampling.arrays import points_in
from limitformer.sampling.exits import (
    LEFT_BALL,
    LEFT_CONE,
    Ledger,
    check_ball,
    clear_exits,
    copy_exits,
    first_at,
    open_ledger,
    record_exit,
)
from limitformer.sampling.process import whole_steps
from limitformer.sampling.recording import (
    ALL_OF_V,
    FACTOR_FLOOR,
    VALUE_FLOOR,
    CovarianceProcess,
    Outputs,
    Recording,
    replicas_of,
    rows_of,
    write,
    write_rows,
)

Step = Literal["factor", "euler-maruyama"]


class PathWorkspace(NamedTuple):
    """Scratch of one thread."""

    stream: Stream
    ledger: Ledger  # with V of the Euler-Maruyama step as `now`
    step: StepWorkspace
    short: ShortSteps
    ball: Ball
    factor: np.ndarray  # (m, m, LANES)
    moved: np.ndarray  # (m, m, LANES): the start's factor, then the output of the factor step, in turn with `factor`


@allocator
def path_workspace(tokens, constants, mask, dt, resolution, radius, key_words):
    return PathWorkspace(
        open_stream(),
        open_ledger(tokens),
        step_workspace(tokens, constants, mask),
        open_short_steps(tokens, dt, resolution, radius),
        open_ball(tokens, constants, mask, radius, dt, resolution, key_words),
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, tokens),
    )


@kernel
def begin_paths(start, key_words, replica, work):
    """Begin the paths of `replica` and its neighbours; `key_words` (6,): steps, short steps, exits."""
    rewind(work.stream, key_words[:2], replica)
    rewind(work.short.stream, key_words[2:4], replica)
    copy(start, work.moved)
    clear_exits(work.ledger)


@driver
def run_factor_paths(start, constants, mask, dt, resolution, steps, share, watch):
    """Run the replicas of a share from `start` (m, m, LANES); write their records, exits and causes."""
    work = path_workspace(start.shape[0], constants, mask, dt, resolution, share.radius, share.key_words[4:])
    for begin in range(0, len(share.exits), LANES):
        begin_paths(start, share.key_words, np.uint64(share.first + begin), work)
        record = rows_of(share.arrays, begin)
        factor_paths(constants, mask, dt, steps, share.points, share.radius, record, work, watch)
        if is_halted(watch):
            return
        copy_exits(work.ledger, begin, share.exits, share.causes)
        count_whole(watch, min(LANES, len(share.exits) - begin))


@kernel
def factor_paths(constants, mask, dt, steps, points, radius, record, work, watch):
    """Run the paths of all lanes by the factor step."""
    to_step_factor(work.moved, mask, work.factor)
    first = trace_of(work.factor, mask)
    check_start(first, radius, mask, work)
    write_step_factor(work.factor, points, 0, record, mask, work)
    factor, moved, long = work.factor, work.moved, everywhere(dt)
    for step in range(1, steps + 1):
        if not keep_going(watch, replicas_of(record), step / (steps + 1)):
            return
        measure_pace(constants, mask, factor, work.step)
        quicken_near_ball(first, work.step, work.short)
        factor_step(work.stream, long, constants, mask, factor, moved, work.step)
        clear_short_steps(work.short)
        if too_coarse(long, work.step, work.short):
            shorten_factor_step(step, dt, constants, mask, factor, moved, work.step, work.ledger, work.ball, work.short)
        last = trace_of(moved, mask)
        if is_near(first, last, work.ball):
            activate_unshortened(work)
            if keep_active(first, last, work.ball):
                covariance_of(moved, mask, work.short.trial, work.ledger.now)
                covariance_of(factor, mask, work.short.trial, work.ledger.before)
                check_long_ball(step, dt, constants, mask, work)
        write_step_factor(moved, points, step, record, mask, work)
        factor, moved, first = moved, factor, last


@kernel
def check_start(size, radius, mask, work):
    """Record the exits of paths that begin outside the ball; `size` is tr V."""
    if not all_below(size, radius):
        covariance_of(work.factor, mask, work.short.trial, work.ledger.now)
        check_ball(0, radius, work.ledger)


@kernel
def activate_unshortened(work):
    """Make the paths active that are inside and took no short steps, which check the ball themselves."""
    for lane in range(LANES):
        inside = work.ledger.exits[lane] == np.inf and work.short.lanes[SHORTENED, 0, lane] == 0.0
        work.ball.lanes[ACTIVE, 0, lane] = 1.0 if inside else 0.0


@kernel
def check_long_ball(step, dt, constants, mask, work):
    """Record the exits of the active paths that leave the ball in the step from `ledger.before` to `ledger.now`."""
    ledger, ball = work.ledger, work.ball
    store(ball.lanes, TIME, 0, dt)
    block = U64(step) << BLOCKS_OF_STEP
    find_leaving(constants, mask, ledger.before, ledger.now, block, work.stream.words[2], work.step, ball)
    for lane in range(LANES):
        if ball.lanes[ACTIVE, 0, lane] > 0.0:
            finite = is_finite(lane, ball)
            record_exit(lane, step, LEFT_BALL, ledger.now if finite else ledger.before, ledger)
            if finite:
                scale_to_radius(lane, ball, ledger)


@kernel
def write_step_factor(factor, points, step, record, mask, work):
    """Call `write` on V of a step's factor, or `write_rows` if V is not recorded."""
    k = first_at(points, step)
    if k == len(points) or points[k] != step:
        return
    if points_in(record.covariance) > 0:
        covariance_of(factor, mask, work.short.trial, work.ledger.now)
        write(points, step, record, work.ledger)
    else:
        tokens_of(factor, mask, work.short.trial)
        write_rows(work.short.trial, factor, mask.full, points, step, record, work.ledger)


@driver
def run_euler_paths(start, constants, mask, dt, resolution, steps, share, watch):
    """Run the replicas of a share as `run_factor_paths`, by Euler-Maruyama."""
    work = path_workspace(start.shape[0], constants, mask, dt, resolution, share.radius, share.key_words[4:])
    for begin in range(0, len(share.exits), LANES):
        begin_paths(start, share.key_words, np.uint64(share.first + begin), work)
        gram(work.moved, work.ledger.now)
        record = rows_of(share.arrays, begin)
        euler_paths(constants, mask, dt, steps, share.points, share.radius, record, work, watch)
        if is_halted(watch):
            return
        copy_exits(work.ledger, begin, share.exits, share.causes)
        count_whole(watch, min(LANES, len(share.exits) - begin))


@kernel
def euler_paths(constants, mask, dt, steps, points, radius, record, work, watch):
    """Run the paths of all lanes by Euler-Maruyama; each keeps its last V that is a covariance."""
    copy(work.ledger.now, work.ledger.before)
    cholesky(work.ledger.now, work.factor, work.step.failed)
    check_cone(0, work.step.failed, work.ledger)
    check_ball(0, radius, work.ledger)
    write(points, 0, record, work.ledger)
    for step in range(1, steps + 1):
        if not keep_going(watch, replicas_of(record), step / (steps + 1)):
            return
        copy(work.ledger.now, work.ledger.before)
        move_by_euler(step, dt, constants, mask, work)
        cholesky(work.ledger.now, work.factor, work.step.failed)
        check_cone(step, work.step.failed, work.ledger)  # before the ball, because |V| means nothing outside the cone
        activate_unshortened(work)
        if keep_active(trace(work.ledger.before), trace(work.ledger.now), work.ball):
            check_long_ball(step, dt, constants, mask, work)
        write(points, step, record, work.ledger)


@kernel
def move_by_euler(step, dt, constants, mask, work):
    """Move the paths by one step, or by short steps where it is too coarse."""
    long = everywhere(dt)
    clear_short_steps(work.short)
    measure_root(constants, mask, work.factor, work.step)
    quicken_near_ball(trace(work.ledger.now), work.step, work.short)
    euler_maruyama_step(work.stream, long, constants, mask, work.ledger.now, work.factor, work.step)
    if too_coarse(long, work.step, work.short):
        shorten_euler_step(step, dt, constants, mask, work.factor, work.step, work.ledger, work.ball, work.short)


@kernel
def check_cone(step, failed, ledger):
    """Record the exit of the paths whose V has no root."""
    if all_below(load(failed, 0, 0), 0.5):
        return
    for lane in range(LANES):
        if ledger.exits[lane] == np.inf and failed[0, 0, lane] > 0.0:
            record_exit(lane, step, LEFT_CONE, ledger.before, ledger)


@dataclass(frozen=True, kw_only=True, eq=False)
class CovariancePaths(CovarianceProcess):
    """Paths of one limit and start, ready to run.

    Attributes:
        model: the limit.
        start: V₀.
        times: times to record, ascending, each rounded to the nearest step.
        radius: paths whose |V| reaches it stop there.
        dt: step; it is shortened so that a whole number of steps meets the horizon.
        step: "factor" stays positive semi-definite, "euler-maruyama" is the paper's.
        recording: quantities to record.
    """

    model: CovarianceLimit
    start: Start
    times: NDArray[np.float64]
    radius: float
    dt: float
    step: Step
    recording: Recording = ALL_OF_V
    axis: str = field(default="time", init=False)
    description: str = field(default="limit", init=False)
    unit: str = field(default="depth/width", init=False)

    def __post_init__(self) -> None:
        require(
            self.step in ("factor", "euler-maruyama"), f'step must be "factor" or "euler-maruyama"; got {self.step!r}.'
        )
        set_fields(self, dt=require_real("dt", self.dt))
        least = self.model.horizon / MOST_STEPS
        enough = whole_steps(self.model.horizon, self.dt) <= MOST_STEPS
        require(enough, f"dt must be at least {least:.3g} for this horizon; got {self.dt}. Nearest: {least:.3g}.")
        in_range = bool((self.times >= 0).all() and (self.times <= self.model.horizon * (1 + 1e-12)).all())
        require(in_range, f"Times to record must lie in [0, {self.model.horizon:g}]; got {self.times}.")
        longest = largest_step(self.model, self.start.tokens)
        require(
            self.step != "factor" or self.actual_dt < longest,
            f"dt must be below {longest:.3g} for {self.start.tokens} tokens and this gamma; got {self.actual_dt:.3g}.",
        )

    @property
    def steps(self) -> int:
        """The number of steps to the horizon."""
        return whole_steps(self.model.horizon, self.dt)

    @property
    def actual_dt(self) -> float:
        """The length of a step."""
        return self.model.horizon / self.steps

    @property
    def step_numbers(self) -> NDArray[np.int64]:
        """The steps that are recorded."""
        return np.rint(self.times / self.actual_dt).astype(np.int64)

    @property
    def points(self) -> NDArray[np.float64]:
        """The times that are recorded."""
        return np.asarray(self.step_numbers * self.actual_dt, dtype=np.float64)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that are stored with the results."""
        start = {"start": self.start.description, "radius": self.radius}
        recording = self.recording.settings(FACTOR_FLOOR if self.step == "factor" else VALUE_FLOOR)
        return {**start, "step": self.step, "dt": self.dt, "actual_dt": self.actual_dt, **recording}

    def prepare(self, seed: int) -> "PreparedPaths":
        """Return the part of the computation that all replicas share."""
        return PreparedPaths(self, seed)


class PreparedPaths:
    """Paths with their start factor and keys. Several threads may call `run`."""

    def __init__(self, paths: CovariancePaths, seed: int) -> None:
        self.paths = paths
        self.factor = in_lanes(lower_root(paths.start.covariance))
        words = (
            *key(seed, f"limit {paths.step}"),
            *key(seed, f"limit {paths.step}, short steps"),
            *key(seed, f"limit {paths.step}, exits"),
        )
        self.key_words = np.array(words, np.uint64)
        self.resolution = FACTOR_RESOLUTION if paths.step == "factor" else EULER_RESOLUTION
        self.kernel = run_factor_paths if paths.step == "factor" else run_euler_paths

    def run(self, first: int, outputs: Outputs, watch: Watch) -> None:
        """Write replicas `first`, `first` + 1, … and their exits into `outputs`, unless `watch` is halted."""
        paths = self.paths
        constants, mask = paths.model.constants(), paths.model.mask_from(paths.start)
        share = paths.share(outputs, first, self.key_words, paths.step_numbers)
        self.kernel(self.factor, constants, mask, paths.actual_dt, self.resolution, paths.steps, share, watch)
        outputs["exits"] *= paths.actual_dt
