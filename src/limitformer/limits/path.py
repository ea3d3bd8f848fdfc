"""Paths of the covariance SDE from a start, step by step, written down at chosen times."""

from dataclasses import dataclass, field
from math import ceil, inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from limitformer.errors import require
from limitformer.factor import copy, gram, root
from limitformer.kernels import driver, kernel
from limitformer.limits.covariance import CovarianceLimit, largest_step
from limitformer.limits.steps import cholesky, euler_maruyama_step, factor_step, step_workspace
from limitformer.models import Start
from limitformer.random import key, rewind
from limitformer.recording import INSIDE, LEFT_BALL, LEFT_CONE, OVERFLOW_RADIUS, hold, outside_ball, record

Step = Literal["factor", "euler-maruyama"]


@driver
def run_factor_paths(start, constants, mask, dt, steps, points, key_words, first, radius, covariance, exits, causes):
    """Replicas `first`, …: `covariance` (replicas, points, m, m), step of the exit and its cause."""
    work = step_workspace(start.shape[0], constants)
    for replica in range(covariance.shape[0]):
        rewind(work.stream, key_words, np.uint64(first + replica))
        copy(start, work.factor)
        exits[replica], causes[replica] = factor_path(
            constants, mask, dt, steps, points, radius, covariance[replica], work
        )


@kernel
def factor_path(constants, mask, dt, steps, points, radius, covariance, work):
    """One path by the factor step."""
    written = record(work.factor, points, 0, 0, covariance)
    for step in range(1, steps + 1):
        copy(work.factor, work.previous)
        factor_step(dt, constants, mask, work)
        if outside_ball(work.factor, OVERFLOW_RADIUS, work.covariance):
            hold(work.previous, written, covariance)
            return float(step), LEFT_BALL
        written = record(work.factor, points, step, written, covariance)
        if outside_ball(work.factor, radius, work.covariance):
            hold(work.factor, written, covariance)
            return float(step), LEFT_BALL
    return np.inf, INSIDE


@driver
def run_euler_paths(start, constants, mask, dt, steps, points, key_words, first, radius, covariance, exits, causes):
    """As `run_factor_paths`, by Euler-Maruyama."""
    work = step_workspace(start.shape[0], constants)
    for replica in range(covariance.shape[0]):
        rewind(work.stream, key_words, np.uint64(first + replica))
        gram(start, work.covariance)
        copy(work.covariance, work.previous)
        exits[replica], causes[replica] = euler_path(
            constants, mask, dt, steps, points, radius, covariance[replica], work
        )


@kernel
def euler_path(constants, mask, dt, steps, points, radius, covariance, work):
    """One path by Euler-Maruyama; it keeps the last covariance that was one."""
    written = 0
    for step in range(steps + 1):
        if step > 0:
            euler_maruyama_step(dt, constants, mask, work)
        if not frobenius(work.covariance) < OVERFLOW_RADIUS:
            return leave(step, LEFT_BALL, written, covariance, work)
        if not cholesky(work.covariance, work.factor):
            return leave(step, LEFT_CONE, written, covariance, work)
        written = write(work.covariance, points, step, written, covariance)
        copy(work.covariance, work.previous)
        if frobenius(work.covariance) >= radius:
            return leave(step, LEFT_BALL, written, covariance, work)
    return np.inf, INSIDE


@kernel
def leave(step, cause, written, covariance, work):
    """Write the last good covariance to what remains."""
    for k in range(written, covariance.shape[0]):
        copy(work.previous, covariance[k])
    return float(step), cause


@kernel
def write(v, points, step, written, covariance):
    """Write V if `step` is the next that is asked for; the number written so far."""
    if written < len(points) and points[written] == step:
        copy(v, covariance[written])
        return written + 1
    return written


@kernel
def frobenius(v):
    squared = 0.0
    for i in range(v.shape[0]):
        for j in range(v.shape[1]):
            squared += v[i, j] * v[i, j]
    return np.sqrt(squared)


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
        require(0 < self.dt < inf, f"dt must be positive and finite; got {self.dt}.")
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
        return max(1, ceil(self.model.horizon / self.dt - 1e-9))

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

    def prepare(self, seed: int) -> "PreparedPaths":
        """Everything that all replicas share."""
        return PreparedPaths(self, seed)


class PreparedPaths:
    """Paths with their start factor and key; `run` may be called from several threads."""

    def __init__(self, paths: CovariancePaths, seed: int) -> None:
        self.paths = paths
        self.factor = root(paths.start.covariance, paths.start.tokens)
        self.key_words = np.array(key(seed, f"limit {paths.step}"), np.uint64)
        self.kernel = run_factor_paths if paths.step == "factor" else run_euler_paths

    def run(
        self,
        first: int,
        covariance: NDArray[np.float64],
        exits: NDArray[np.float64],
        causes: NDArray[np.int8],
    ) -> None:
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
            covariance,
            exits,
            causes,
        )
        exits *= paths.actual_dt
