"""Paths of the covariance SDE from a start, step by step, written down at chosen times."""

from dataclasses import dataclass, field
from math import ceil
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from limitformer.errors import keep, require, require_real
from limitformer.factor import gram, lower_root, put
from limitformer.kernels import driver, kernel
from limitformer.lanes import LANES, all_below, load
from limitformer.limits.covariance import CovarianceLimit, largest_step
from limitformer.limits.steps import cholesky, euler_maruyama_step, factor_step, step_workspace
from limitformer.models import Start
from limitformer.random import key, rewind
from limitformer.recording import (
    LEFT_CONE,
    check_ball,
    check_factor,
    clear,
    covariance_outputs,
    keep_before,
    leave,
    report,
    write,
    write_factor,
)

Step = Literal["factor", "euler-maruyama"]


@driver
def run_factor_paths(start, constants, mask, dt, steps, points, key_words, first, radius, covariance, exits, causes):
    """Replicas `first`, …: `covariance` (replicas, points, m, m), step of the exit and its cause."""
    work = step_workspace(start.shape[0], constants, mask)
    for begin in range(0, covariance.shape[0], LANES):
        rewind(work.stream, key_words, np.uint64(first + begin))
        put(start, work.factor)
        factor_paths(constants, mask, dt, steps, points, radius, covariance[begin : begin + LANES], work)
        report(work.ledger, begin, exits, causes)


@kernel
def factor_paths(constants, mask, dt, steps, points, radius, covariance, work):
    """The paths that run side by side, by the factor step."""
    clear(work.ledger)
    check_factor(work.factor, work.factor, 0, radius, work.ledger)
    write_factor(work.factor, points, 0, covariance, work.ledger)
    factor, moved = work.factor, work.moved_factor
    for step in range(1, steps + 1):
        factor_step(dt, constants, mask, factor, moved, work)
        check_factor(moved, factor, step, radius, work.ledger)
        write_factor(moved, points, step, covariance, work.ledger)
        factor, moved = moved, factor


@driver
def run_euler_paths(start, constants, mask, dt, steps, points, key_words, first, radius, covariance, exits, causes):
    """As `run_factor_paths`, by Euler-Maruyama."""
    work = step_workspace(start.shape[0], constants, mask)
    for begin in range(0, covariance.shape[0], LANES):
        rewind(work.stream, key_words, np.uint64(first + begin))
        put(start, work.factor)
        gram(work.factor, work.ledger.now)
        euler_paths(constants, mask, dt, steps, points, radius, covariance[begin : begin + LANES], work)
        report(work.ledger, begin, exits, causes)


@kernel
def euler_paths(constants, mask, dt, steps, points, radius, covariance, work):
    """The paths that run side by side, by Euler-Maruyama; each keeps the last V that was a covariance."""
    clear(work.ledger)
    keep_before(work.ledger)
    for step in range(steps + 1):
        if step > 0:
            keep_before(work.ledger)
            euler_maruyama_step(dt, constants, mask, work)
        check_ball(step, radius, work.ledger)
        cholesky(work.ledger.now, work.factor, work.failed)
        check_cone(step, work.failed, work.ledger)
        write(points, step, covariance, work.ledger)


@kernel
def check_cone(step, failed, ledger):
    """Note the paths whose V has no root."""
    if all_below(load(failed, 0, 0), 0.5):
        return
    for lane in range(LANES):
        if ledger.exits[lane] == np.inf and failed[0, 0, lane] > 0.0:
            leave(lane, step, LEFT_CONE, ledger.before, ledger)


def whole_steps(horizon: float, dt: float) -> int:
    """The least number of equal steps of at most `dt`, up to rounding, that make the horizon."""
    dt = require_real("dt", dt)
    require(dt > 0, f"dt must be positive; got {dt}.")
    require(horizon / dt <= 2**53, f"dt must be at least {horizon / 2**53:.3g} for this horizon; got {dt}.")
    return max(1, ceil(horizon / dt - 1e-9))


@dataclass(frozen=True, kw_only=True, eq=False)
class CovariancePaths:
    """Paths of one limit and start, ready to run.

    Attributes:
        model: the limit.
        start: V₀.
        times: when to record, ascending, each rounded to the nearest step.
        radius: paths whose |V| reaches it stop there.
        dt: step; it is shortened so that a whole number of steps meets the horizon.
        step: "factor" stays positive semi-definite, "euler-maruyama" is the paper's.
    """

    model: CovarianceLimit
    start: Start
    times: NDArray[np.float64]
    radius: float
    dt: float
    step: Step
    axis: str = field(default="time", init=False)
    description: str = field(default="limit", init=False)

    def __post_init__(self) -> None:
        require(
            self.step in ("factor", "euler-maruyama"),
            f'step must be "factor" or "euler-maruyama"; got {self.step!r}.',
        )
        keep(self, dt=require_real("dt", self.dt))
        whole_steps(self.model.horizon, self.dt)
        in_range = bool((self.times >= 0).all() and (self.times <= self.model.horizon * (1 + 1e-12)).all())
        require(in_range, f"Times to record must lie in [0, {self.model.horizon:g}]; got {self.times}.")
        longest = largest_step(self.model, self.start.tokens)
        require(
            self.step != "factor" or self.actual_dt < longest,
            f"dt must be below {longest:.3g} for {self.start.tokens} tokens and this gamma; got {self.actual_dt:.3g}.",
        )

    @property
    def steps(self) -> int:
        """Number of steps to the horizon."""
        return whole_steps(self.model.horizon, self.dt)

    @property
    def actual_dt(self) -> float:
        """The step that meets the horizon."""
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
    def tokens(self) -> int:
        """m."""
        return self.start.tokens

    @property
    def settings(self) -> dict[str, Any]:
        """Where it starts and stops, the step, its length as it was asked for and as it is."""
        start = {"start": self.start.description, "radius": self.radius}
        return {**start, "step": self.step, "dt": self.dt, "actual_dt": self.actual_dt}

    def outputs(self, samples: int) -> dict[str, NDArray[Any]]:
        """Arrays for the results of so many samples."""
        return covariance_outputs(samples, len(self.points), self.start.tokens, self.axis)

    def prepare(self, seed: int) -> "PreparedPaths":
        """Everything that all replicas share."""
        return PreparedPaths(self, seed)


class PreparedPaths:
    """Paths with their start factor and key; `run` may be called from several threads."""

    def __init__(self, paths: CovariancePaths, seed: int) -> None:
        self.paths = paths
        self.factor = lower_root(paths.start.covariance)
        self.key_words = np.array(key(seed, f"limit {paths.step}"), np.uint64)
        self.kernel = run_factor_paths if paths.step == "factor" else run_euler_paths

    def run(self, first: int, outputs: dict[str, NDArray[Any]]) -> None:
        """Replicas `first` … into `covariance` (replicas, points, m, m), `exits` (∞ if none) and `causes`."""
        paths = self.paths
        self.kernel(
            self.factor,
            paths.model.constants(),
            paths.model.mask_for(paths.start.tokens),
            paths.actual_dt,
            paths.steps,
            paths.step_numbers,
            self.key_words,
            first,
            paths.radius,
            outputs["covariance"],
            outputs["exits"],
            outputs["causes"],
        )
        outputs["exits"] *= paths.actual_dt
