r"""Finished runs as data, shared by the figures of training runs.

**Divergence** has one rule. A run diverged if its summary says so. Its final losses are then ∞ (`final`): a mean over
seeds is ∞ if one of them diverged, and a diverged run ranks last when settings are compared. Its curves are what it
logged, NaN from the first value that is not finite.

**Seeds** have one rule. A figure uses the seeds that all its settings have (`with_all_seeds`): losses are compared over
the same seeds, and differences are taken seed by seed.

**γ** of the shaped variant, where a figure has room for one, is that of the least held-out loss (`best_gamma`).
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from scipy.stats import t

from limitformer.base.errors import require
from limitformer.plot import sequence
from limitformer_papers.common.claims import FigureRun
from limitformer_papers.training.log import curve, read_log
from limitformer_papers.training.plan import FREE, FinishedRun, flat, read_runs

VARIANTS = {
    "shaped-recover": "shaped, Recover",
    "shaped-learn": "shaped, Learn",
    "shaped-fixed": "shaped, fixed",
    "pre-ln": "Pre-LN",
    "post-ln": "Post-LN",
}
CROSS: Any = {"marker": "x", "markersize": 8, "markeredgewidth": 2, "linestyle": ""}
PLACE = ("variant", "gamma", "depth", "learning_rate", "seed")  # runs of a figure may differ in these only


def language_runs(
    run: FigureRun, variants: Collection[str] = tuple(VARIANTS), place: Sequence[str] = PLACE
) -> list[FinishedRun]:
    """Return the finished runs of `limitformer train mlm` of these variants in the figure's folder, by path.

    They differ in `place` only.

    Raises:
        InputError: there are none, or runs that cannot be compared.
    """
    runs = runs_of("mlm", run)
    chosen = [one for one in runs if one.about["variant"] in variants]
    there = ", ".join(sorted({str(one.about["variant"]) for one in runs}))
    require(
        bool(chosen),
        f"The figure is of {' and '.join(variants)}; the finished runs in {run.runs} are of {there}. "
        f"Nearest: limitformer train mlm --variant {next(iter(variants))}.",
    )
    check_alike(chosen, run.runs, place)
    return chosen


def runs_of(experiment: str, run: FigureRun) -> list[FinishedRun]:
    """Return the finished runs of `limitformer train EXPERIMENT` in the figure's folder, or raise `InputError`."""
    command = f"`limitformer train {experiment}`"
    require(run.runs is not None, f"The figure is drawn from finished runs of {command}: give their folder.")
    assert run.runs is not None
    runs = [one for one in read_runs(run.runs) if one.about.get("experiment") == experiment]
    require(bool(runs), f"The finished runs in {run.runs} are of other experiments. Nearest: {command}.")
    return runs


def check_alike(runs: Sequence[FinishedRun], folder: Path | None, place: Sequence[str]) -> None:
    """Raise `InputError` unless the runs differ in `place` only, and no two have the same place."""
    alike: dict[str, FinishedRun] = {}
    seen: dict[tuple[Any, ...], FinishedRun] = {}
    for run in runs:
        alike.setdefault(json.dumps(same(run, place), sort_keys=True), run)
        settings = {**run.about, **run.plan}
        other = seen.setdefault(tuple(settings.get(name) for name in place), run)
        twice = f"{other.path} and {run.path} are the same run twice. Nearest: a folder with one of them."
        require(other is run, twice)
    require(len(alike) == 1, unlike(list(alike.values()), folder, place) if len(alike) > 1 else "")


def same(run: FinishedRun, place: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in flat({**run.about, **run.plan}) if name not in (*place, *FREE)}


def unlike(runs: Sequence[FinishedRun], folder: Path | None, place: Sequence[str]) -> str:
    """Return the message on the first difference between runs."""
    first, second = (same(run, place) for run in runs[:2])
    name = next(n for n in {**first, **second} if first.get(n, "missing") != second.get(n, "missing"))
    return (
        f"The runs in {folder} have {len(runs)} different settings or data and cannot be compared: {name} is "
        f"{first.get(name, 'missing')} in {runs[0].path}, {second.get(name, 'missing')} in {runs[1].path}. "
        "Nearest: a folder for each."
    )


def setting(run: FinishedRun, name: str) -> Any:
    return {**run.about, **run.plan}["learning_rate" if name == "rate" else name]


def along(runs: Sequence[FinishedRun], name: str) -> list[Any]:
    """Return the values of an axis, sorted; variants are in the order of the papers."""
    return sorted({setting(run, name) for run in runs}, key=list(VARIANTS).index if name == "variant" else None)


def with_all_seeds(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    """Return the runs of those seeds that every variant, γ, depth and learning rate of the runs has."""
    seeds: dict[tuple[Any, ...], set[int]] = {}
    for run in runs:
        cell = tuple(setting(run, name) for name in ("depth", "variant", "gamma", "rate"))
        seeds.setdefault(cell, set()).add(setting(run, "seed"))
    common = set.intersection(*seeds.values())
    fewest = min(seeds, key=lambda cell: len(seeds[cell]))
    require(
        bool(common),
        f"No seed is finished for all settings that have begun; {VARIANTS[fewest[1]]} at learning rate {fewest[3]:g}, "
        f"γ = {fewest[2]:g}, depth {fewest[0]} has {sorted(seeds[fewest])}. Nearest: finish the grid.",
    )
    return [run for run in runs if setting(run, "seed") in common]


def scale_of(runs: Sequence[FinishedRun], found: Sequence[FinishedRun] = ()) -> str:
    """Return one line on the scale of the runs and the number of seeds used."""
    about, plan = runs[0].about, runs[0].plan
    widths, depths, heads = ("/".join(map(str, along(runs, name))) for name in ("width", "depth", "heads"))
    used, there = len(along(runs, "seed")), len(along([*runs, *found], "seed"))
    seeds = f"{used} seed{'s' * (used > 1)}" if used == there else f"{used} of {there} seeds"
    return (
        f"n = {widths}, d = {depths}, {heads} heads, length {about['length']}, batch {plan['batch']}, "
        f"{plan['steps']:,} steps, {about['data']['source']}, {seeds}"
    )


def final(run: FinishedRun, name: str) -> float:
    """Return a loss at the end; ∞ if the run diverged."""
    return float("inf") if run.summary["diverged"] else float(run.summary[name])


def best_gamma(runs: Sequence[FinishedRun]) -> float:
    """Return γ of the least mean held-out loss over learning rates and seeds; NaN without shaped runs.

    If it is ∞ for several γ, the one with the fewest divergences wins, then the one with the least mean of the other
    runs. Only rates and seeds that all γ have count; others would favour the γ that was tried less.
    """
    losses: dict[float, dict[tuple[float, int], float]] = {}
    for run in runs:
        if run.about["variant"] == "shaped-recover":
            cell = setting(run, "rate"), setting(run, "seed")
            losses.setdefault(run.about["gamma"], {})[cell] = final(run, "eval_loss")
    common = set.intersection(*map(set, losses.values())) if losses else set()
    return min(losses, key=lambda gamma: (*badness(losses[gamma], common), gamma), default=float("nan"))


def badness(losses: Mapping[tuple[float, int], float], common: set[tuple[float, int]]) -> tuple[float, int, float]:
    """Return what `best_gamma` compares: mean loss, number of divergences, mean loss of the other runs."""
    values = np.array([loss for cell, loss in losses.items() if cell in common or not common])
    ended = values[np.isfinite(values)]
    return float(values.mean()), len(values) - len(ended), float(ended.mean()) if len(ended) else float("inf")


def with_gamma(runs: Sequence[FinishedRun], gamma: Mapping[int, float]) -> list[FinishedRun]:
    """Drop the shaped runs whose γ is not that chosen for their depth."""
    return [r for r in runs if r.about["variant"] != "shaped-recover" or r.about["gamma"] == gamma[r.about["depth"]]]


def logs(runs: Sequence[FinishedRun]) -> list[pa.Table]:
    return [read_log(run.path) for run in runs]


def curves(
    tables: Sequence[pa.Table], name: str, layer: int = -1, head: int = -1
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return (steps (k,), values (run, k)) of one quantity; NaN where it is not finite or the run had ended."""
    pairs = [curve(table, name, layer, head) for table in tables]
    steps = np.unique(np.concatenate([at for at, _ in pairs]))
    values = np.full((len(tables), len(steps)), np.nan)
    for row, (at, value) in zip(values, pairs, strict=True):
        row[np.searchsorted(steps, at)] = np.where(np.isfinite(value), value, np.nan)
    return steps, values


def smoothed(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Return means of (…, k) over the last `window` steps, fewer at the beginning."""
    sums = np.cumsum(values, axis=-1)
    before = np.concatenate([np.zeros_like(sums[..., :window]), sums[..., :-window]], axis=-1)
    return np.asarray((sums - before) / np.minimum(np.arange(values.shape[-1]) + 1, window))


def grid_of_runs(
    runs: Sequence[FinishedRun], names: Sequence[str], values: Any, others: Mapping[str, Any] | None = None
) -> xr.DataArray:
    """Arrange values (run, …) as (*names, *others), NaN without a run; `others` are the coordinates of …."""
    others, array = others or {}, np.asarray(values, np.float64)
    axes = {name: along(runs, name) for name in names}
    grid = np.full((*map(len, axes.values()), *array.shape[1:]), np.nan)
    for run, value in zip(runs, array, strict=True):
        grid[tuple(axis.index(setting(run, name)) for name, axis in axes.items())] = value
    return xr.DataArray(grid, dims=(*axes, *others), coords={**axes, **others})


def diverged(runs: Sequence[FinishedRun], names: Sequence[str]) -> xr.DataArray:
    """Return 1 where a run diverged, 0 where it did not, NaN without a run; the last of `names` is the seed."""
    return grid_of_runs(runs, names, [one.summary["diverged"] for one in runs])


def variant_label(name: str, gone: xr.DataArray) -> str:
    """Name a variant and, if some of its seeds diverged, their number; `gone` (seed,) is part of `diverged`."""
    number, of = int(gone.sum()), int(gone.notnull().sum())
    return VARIANTS[name] + (f" ({number} of {of} diverged)" if number else "")


def below(value: float, bound: float) -> bool | None:
    """Return whether a number is below a bound; None for NaN."""
    return None if np.isnan(value) else bool(value < bound)


def student(first: NDArray[np.float64], second: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean of first − second (seed,), seed by seed, and the half-width of its 95 % interval.

    The half-width is q s/√n, q the 97.5 % quantile of Student's law with n − 1 degrees of freedom: with few seeds two
    standard errors are far too narrow (q = 12.7 for two seeds, 4.3 for three, 2.8 for five). It is ∞ for one seed and
    where a value is ∞; the mean is then ±∞, or NaN if both sides have one.
    """
    number = len(first)
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        both = np.isinf(first).any() and np.isinf(second).any()
        return float("nan") if both else float(np.mean(first) - np.mean(second)), float("inf")
    differences = first - second
    error = differences.std(ddof=1) / number**0.5 if number > 1 else float("inf")
    return float(differences.mean()), float(t.ppf(0.975, max(1, number - 1)) * error)


def interval_of(half: float) -> str:
    """Return the words of a claim for the half-width of `student`."""
    return f"95 %: ± {half:.3f}" if np.isfinite(half) else "no 95 % interval"


def draw_curve(axes: Axes, line: xr.DataArray, gone: xr.DataArray, top: float, **style: Any) -> None:
    """Draw a curve (step,), with a cross where it ends or passes `top` if a seed of `gone` (seed,) diverged."""
    visible = line.dropna("step")
    axes.plot(visible["step"], visible, **style)
    inside = visible[: int((np.append(visible.values, np.inf) > top).argmax())]
    if inside.size and bool((gone == 1).any()):
        axes.plot(inside["step"][-1], inside[-1], color=style["color"], **CROSS)


def keys(data: xr.Dataset, others: Sequence[Line2D], **style: Any) -> list[Line2D]:
    """Return legend handles for colours and crosses, with `others` between them."""
    rates = zip(sequence(data.sizes["rate"]), data["rate"].values, strict=True)
    handles = [Line2D([], [], color=colour, label=f"rate {rate:g}", **style) for colour, rate in rates]
    crosses = [Line2D([], [], color="gray", label="a seed diverged", **CROSS)]
    return [*handles, *others, *(crosses if bool((data["diverged"] == 1).any()) else [])]
