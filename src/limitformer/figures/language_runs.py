"""Finished masked-language runs as data: what the figures of [ST, App. D] share."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from limitformer.errors import InputError, require
from limitformer.figures.claims import Run
from limitformer.train.harness import FinishedRun, read_runs
from limitformer.train.log import curve, read_log

VARIANTS = {
    "shaped-recover": "shaped, Recover",
    "shaped-learn": "shaped, Learn",
    "pre-ln": "Pre-LN",
    "post-ln": "Post-LN",
}
PLACE = ("variant", "gamma", "depth")  # of a run in a figure; all else must be the same


def language_runs(run: Run) -> list[FinishedRun]:
    """The finished runs of `limitformer train mlm` in the figure's folder, all of one size but for depth.

    Raises:
        InputError: there are none, or runs that cannot be compared.
    """
    assert run.runs is not None
    found = [one for one in read_runs(run.runs) if one.about.get("experiment") == "mlm"]
    require(bool(found), f"There are no finished runs of `limitformer train mlm` in {run.runs}.")
    check_alike(found, run.runs)
    return found


def check_alike(runs: Sequence[FinishedRun], folder: Path) -> None:
    """`InputError` unless the runs differ in variant, γ, depth, learning rate and seed alone."""
    free = {"learning_rate", "seed", "folder", "save_every", "keep_checkpoints", "tensorboard", "threads"}
    first, *rest = [{**run.about, **run.plan} for run in runs]
    for other in rest:
        differing = [name for name in first if name not in (*PLACE, *free) and first[name] != other.get(name)]
        if differing:
            name = differing[0]
            raise InputError(
                f"The runs in {folder} cannot be compared: {name} is {first[name]} in one, {other.get(name)} in "
                "another. Nearest: a folder for each."
            )


def scale_of(runs: Sequence[FinishedRun]) -> str:
    """One line: at what scale the runs were."""
    about, plan = runs[0].about, runs[0].plan
    depths = "/".join(str(depth) for depth in sorted({one.about["depth"] for one in runs}))
    seeds = len({one.plan["seed"] for one in runs})
    return (
        f"n = {about['width']}, d = {depths}, {about['heads']} heads, length {about['length']}, batch {plan['batch']}, "
        f"{plan['steps']:,} steps, {about['data']['source']}, {seeds} seed{'s' if seeds > 1 else ''}"
    )


def values_of(runs: Iterable[FinishedRun], name: str) -> list[float]:
    """A setting of each run."""
    return [float({**run.about, **run.plan}[name]) for run in runs]


def curves(
    runs: Sequence[FinishedRun], name: str, layer: int = -1, head: int = -1
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(steps (k,), values (run, k)) of one quantity; NaN after a run that diverged."""
    steps = np.unique(np.concatenate([curve(read_log(run.path), name, layer, head)[0] for run in runs]))
    values = np.full((len(runs), len(steps)), np.nan)
    for row, run in enumerate(runs):
        at, found = curve(read_log(run.path), name, layer, head)
        values[row, np.searchsorted(steps, at)] = found
    return steps, values


def smoothed(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Means of (…, k) over the last `window` steps, fewer at the beginning."""
    sums = np.cumsum(values, axis=-1)
    before = np.concatenate([np.zeros_like(sums[..., :window]), sums[..., :-window]], axis=-1)
    return np.asarray((sums - before) / np.minimum(np.arange(values.shape[-1]) + 1, window))


def mean_over_seeds(data: xr.DataArray) -> xr.DataArray:
    """The mean over "seed"; NaN where one of them diverged."""
    return data.mean("seed", skipna=False)
