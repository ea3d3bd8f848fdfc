r"""[ST, Table 2]: scores on CoLA, MRPC and RTE of each pretrained network after fine-tuning.

Drawn from finished runs of `limitformer train glue`, and of the `train mlm` runs that they started from, which state
depth, variant, γ and pretraining seed; both must be in the folder. If a row was fine-tuned from several pretraining
rates, the one with the least held-out loss *of pretraining* counts, not the best score. CoLA has Matthews correlation,
RTE accuracy; the paper does not say what MRPC has, so both are here.

The paper states that shaped Transformers outperform Pre-LN. Fine-tunings of one pretrained network are not
independent of each other, so scores are averaged over them first. Let D be the mean over pretraining seeds of a shaped
row's score minus that of Pre-LN, seed by seed, and [D − h, D + h] its 95 % interval:

    D − h > 0: it holds,        D + h < 0: it does not,        else, and below three pretraining seeds: not judged.

A run that diverged has no score; its row's means are NaN.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from numpy.typing import NDArray

from limitformer.base.errors import require
from limitformer.plot import panels
from limitformer_papers.common.claims import Claim, FigureRun, NoConfig
from limitformer_papers.shaped_transformer.language_runs import (
    PLACE,
    VARIANTS,
    along,
    check_alike,
    final,
    interval_of,
    runs_of,
    scale_of,
    setting,
    student,
)
from limitformer_papers.shaped_transformer.st_table1 import COLOURS, SEEDS, is_shaped, key_of, label, order, point
from limitformer_papers.training.plan import FinishedRun
from limitformer_papers.training.tasks.glue import METRICS

Key = tuple[int, str, float]  # depth, variant, γ
PLACE_OF_TUNING = ("pretrained", "variant", "weights", "seed")  # all else is the same within a task
paper = quick = NoConfig


@dataclass(frozen=True)
class Tuned:
    """A fine-tuning and the pretraining run that it started from."""

    run: FinishedRun
    pretrained: FinishedRun

    @property
    def seeds(self) -> tuple[int, int]:
        return int(setting(self.pretrained, "seed")), int(setting(self.run, "seed"))

    @property
    def rate(self) -> float:
        return float(setting(self.pretrained, "rate"))


def compute(config: NoConfig, run: FigureRun) -> xr.Dataset:
    """Return `score` (row, metric, seed, tuning) at pretraining rate `rate` (row,); a row is a depth, variant and γ."""
    tuned = tuned_runs(run)
    keys = sorted({key_of(one.pretrained) for one in tuned}, key=order)
    rows = {key: at_best_rate([one for one in tuned if key_of(one.pretrained) == key]) for key in keys}
    tasks = [task for task in METRICS if any(one.run.about["task"] == task for one in tuned)]
    seeds, tunings = seeds_of_all(rows, tasks)
    metrics = [(task, metric) for task in tasks for metric in METRICS[task]]
    score = [[scores(rows[key], *metric, seeds, tunings) for metric in metrics] for key in keys]
    data = xr.Dataset(
        {"score": (("row", "metric", "seed", "tuning"), score), "rate": ("row", [rows[key][0].rate for key in keys])},
        coords={"metric": [" ".join(metric) for metric in metrics], "seed": seeds, "tuning": tunings},
        attrs={"runs": f"pretraining: {scale_of([one.pretrained for some in rows.values() for one in some])}"},
    )
    return data.assign(
        {name: ("row", [key[k] for key in keys]) for k, name in enumerate(("depth", "variant", "gamma"))}
    )


def tuned_runs(run: FigureRun) -> list[Tuned]:
    """Return the finished fine-tunings in the figure's folder with their pretraining runs.

    Raises:
        InputError: there are none, one whose pretraining is not there, or runs that cannot be compared.
    """
    tunings = runs_of("glue", run)
    pretrainings = {one.path.name: one for one in runs_of("mlm", run)}
    for one in tunings:
        name = one.about["pretrained"]
        require(
            name in pretrainings,
            f"{one.path} began from {name}, whose finished run is not in {run.runs}. Nearest: copy its folder there.",
        )
    for task in METRICS:
        some = [one for one in tunings if one.about["task"] == task]
        if some:
            check_alike(some, run.runs, PLACE_OF_TUNING)
    check_alike([pretrainings[name] for name in sorted({one.about["pretrained"] for one in tunings})], run.runs, PLACE)
    return [Tuned(one, pretrainings[one.about["pretrained"]]) for one in tunings]


def at_best_rate(found: Sequence[Tuned]) -> list[Tuned]:
    """Return the fine-tunings of the pretraining rate with the least mean held-out loss; the smallest of equal ones."""
    rates = along([one.pretrained for one in found], "rate")

    def loss(rate: float) -> float:
        pretrained = {one.pretrained.path: one.pretrained for one in found if one.rate == rate}
        return float(np.mean([final(one, "eval_loss") for one in pretrained.values()]))

    best = min(rates, key=lambda rate: (loss(rate), rate))
    return [one for one in found if one.rate == best]


def seeds_of_all(rows: Mapping[Key, Sequence[Tuned]], tasks: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return the pretraining seeds that all rows have for all tasks, and the fine-tuning seeds that all of them
    have.
    """
    cells = {
        (key, task): {one.seeds for one in some if one.run.about["task"] == task}
        for key, some in rows.items()
        for task in tasks
    }
    seeds = set.intersection(*({seed for seed, _ in cell} for cell in cells.values()))
    common = {seed: set.intersection(*({k for s, k in cell if s == seed} for cell in cells.values())) for seed in seeds}
    tunings = set.intersection(*common.values()) if common else set()
    fewest = min(cells, key=lambda place: len(cells[place]))
    (depth, variant, gamma), task = fewest
    require(
        bool(tunings),
        f"No pair of a pretraining and a fine-tuning seed is finished for all rows and tasks; {task}, depth {depth}, "
        f"{VARIANTS[variant]}, γ = {gamma:g}, has {sorted(cells[fewest])}. Nearest: finish the grid.",
    )
    return sorted(seeds), sorted(tunings)


def scores(
    found: Sequence[Tuned], task: str, metric: str, seeds: Sequence[int], tunings: Sequence[int]
) -> NDArray[np.float64]:
    """Return scores (seed, tuning), NaN where a run diverged."""
    by_seeds = {one.seeds: one.run.summary for one in found if one.run.about["task"] == task}
    chosen = [[by_seeds[seed, tuning] for tuning in tunings] for seed in seeds]
    return np.array([[np.nan if s["diverged"] else s[f"eval_{metric}"] for s in row] for row in chosen], np.float64)


def claims(data: xr.Dataset) -> list[Claim]:
    """Return every row's scores, and whether each shaped row is above Pre-LN at its depth."""
    rows = [data.isel(row=row) for row in range(data.sizes["row"])]
    statements = [
        Claim(f"{at_rate(row)}: {metric}", float(row["score"].sel(metric=metric).mean(skipna=False)))
        for row in rows
        for metric in data["metric"].values
    ]
    for row in filter(is_shaped, rows):
        for base in rows:
            if base["variant"].item() == "pre-ln" and int(base["depth"]) == int(row["depth"]):
                statements += [difference(row, base, str(metric)) for metric in data["metric"].values]
    return statements


def difference(row: xr.Dataset, base: xr.Dataset, metric: str) -> Claim:
    first, second = (one["score"].sel(metric=metric).mean("tuning", skipna=False).values for one in (row, base))
    gap, half = student(first, second)
    name = (
        f"{label(row)} minus Pre-LN, {metric}, mean of {len(first)} pretraining seeds in pairs ({interval_of(half)}; "
        "the paper: above)"
    )
    return Claim(name, gap, above(gap, half) if len(first) >= SEEDS else None)


def above(gap: float, half: float) -> bool | None:
    """Return whether the whole interval is above 0; None if 0 is inside it, or a run diverged."""
    return True if gap - half > 0 else False if gap + half < 0 else None


def at_rate(row: xr.Dataset) -> str:
    return f"{label(row)}, pretrained at {float(row['rate']):g}"


def draw(data: xr.Dataset) -> Figure:
    """Draw a panel for each metric, a row for each network, with one standard deviation over all its runs."""
    rows = [data.isel(row=row) for row in range(data.sizes["row"])]
    figure, axes = panels(data.sizes["metric"], height=1.4 + 0.5 * len(rows))
    places = list(range(len(rows)))[::-1]
    for panel, metric in zip(axes, data["metric"].values, strict=True):
        for place, row in zip(places, rows, strict=True):
            values = row["score"].sel(metric=metric).values.ravel()
            point(panel, place, np.where(np.isnan(values), np.inf, values), COLOURS[row["variant"].item()])
        panel.set(ylim=(-0.6, len(places) - 0.2), xlabel=str(metric))
        panel.margins(x=0.25)
        panel.set_yticks(places, [])
    axes[0].set_yticks(places, [at_rate(row).replace(", pretrained", ",\npretrained") for row in rows])
    figure.suptitle(data.attrs["runs"])
    return figure
