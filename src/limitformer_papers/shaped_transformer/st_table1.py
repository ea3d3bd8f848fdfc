r"""[ST, Table 1]: training and held-out loss of each variant, depth and γ at its best learning rate.

Drawn from finished runs of `limitformer train mlm`, at the scale of those runs: means and standard deviations over
seeds. The best rate is the one with the least mean held-out loss; the mean is ∞ if one of its seeds diverged. The
baseline is Pre-LN.

The paper states that shaped attention is comparable to Pre-LN or better. Let D be the mean over seeds of the
held-out loss of the best shaped row minus that of Pre-LN, seed by seed, and [D − h, D + h] its 95 % interval. With
c = 0.05 nats, 5 % of the perplexity,

    D + h < c: it holds,        D − h > c: it does not,        else, and below three seeds: not judged,

so noise makes it undecided, never true. The rows that are compared were chosen by the same loss, which favours the side
with more γ and rates to choose from; the claim's name states this.
"""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from limitformer.plot import BLUE, GREEN, ORANGE, PURPLE, RED, panels
from limitformer_papers.common.claims import Claim, FigureRun, NoConfig
from limitformer_papers.shaped_transformer.language_runs import (
    VARIANTS,
    along,
    final,
    interval_of,
    language_runs,
    scale_of,
    setting,
    student,
    with_all_seeds,
)
from limitformer_papers.training.plan import FinishedRun

COLOURS = {"shaped-recover": BLUE, "shaped-learn": GREEN, "shaped-fixed": PURPLE, "pre-ln": RED, "post-ln": ORANGE}
LOSSES = ("train_loss", "eval_loss")
COMPARABLE = 0.05  # nats: exp(0.05), 5 % of the perplexity
SEEDS = 3  # with two, Student's interval is 13 standard errors wide
paper = quick = NoConfig


def compute(config: NoConfig, run: FigureRun) -> xr.Dataset:
    """Return `train_loss` and `eval_loss` (row, seed) at `rate` (row,), and the number `diverged` (row,) over all
    rates.

    A row is a depth, variant and γ; the losses of runs that diverged are ∞.
    """
    all_runs = language_runs(run)
    runs = with_all_seeds(all_runs)
    keys = sorted({key_of(one) for one in runs}, key=order)
    rows = [best([one for one in runs if key_of(one) == key]) for key in keys]
    data = xr.Dataset(
        {name: (("row", "seed") if name in LOSSES else "row", [row[name] for row in rows]) for name in rows[0]},
        coords={"seed": along(runs, "seed")},
        attrs={"runs": scale_of(runs, all_runs)},
    )
    return data.assign(
        {name: ("row", [key[k] for key in keys]) for k, name in enumerate(("depth", "variant", "gamma"))}
    )


def key_of(run: FinishedRun) -> tuple[int, str, float]:
    """Return depth, variant and γ, which name the row of a run."""
    return run.about["depth"], run.about["variant"], run.about["gamma"]


def order(key: tuple[int, str, float]) -> tuple[int, int, float]:
    depth, variant, gamma = key
    return depth, list(VARIANTS).index(variant), gamma


def best(runs: list[FinishedRun]) -> dict[str, Any]:
    """Return the row of the best learning rate; the smallest rate if a run diverged at each."""
    rows = [at_rate([one for one in runs if setting(one, "rate") == rate], rate) for rate in along(runs, "rate")]
    row = min(rows, key=lambda row: (np.mean(row["eval_loss"]), row["rate"]))
    return row | {"diverged": sum(bool(one.summary["diverged"]) for one in runs)}


def at_rate(runs: list[FinishedRun], rate: float) -> dict[str, Any]:
    ordered = sorted(runs, key=lambda one: int(one.plan["seed"]))
    return {"rate": rate} | {name: [final(one, name) for one in ordered] for name in LOSSES}


def claims(data: xr.Dataset) -> list[Claim]:
    """Return every row's losses, and whether the best shaped row is as good as Pre-LN."""
    statements, rows = [], [data.isel(row=row) for row in range(data.sizes["row"])]
    for one in rows:
        statements += [Claim(f"{at_best(one)}: {name.replace('_', ' ')}", float(one[name].mean())) for name in LOSSES]
        statements.append(Claim(f"{label(one)}: runs that diverged, at all rates", float(one["diverged"])))
    for depth in np.unique(data["depth"]):
        statements += difference([one for one in rows if int(one["depth"]) == depth])
    return statements


def difference(rows: list[xr.Dataset]) -> list[Claim]:
    """Return the held-out loss of the best shaped row minus Pre-LN at one depth; nothing without both."""
    shaped = [one for one in rows if is_shaped(one)]
    base = [one for one in rows if one["variant"].item() == "pre-ln"]
    if not shaped or not base:
        return []
    chosen = min(shaped, key=lambda one: float(one["eval_loss"].mean()))
    gap, half = student(chosen["eval_loss"].values, base[0]["eval_loss"].values)
    name = (
        f"{label(chosen)} minus Pre-LN, held-out loss, mean of {chosen.sizes['seed']} seeds in pairs "
        f"({interval_of(half)}; each at the best rate, and the shaped one of the best variant and γ, chosen by this "
        f"loss; the paper: comparable or better, here less than {COMPARABLE:g} above)"
    )
    return [Claim(name, gap, comparable(gap, half) if chosen.sizes["seed"] >= SEEDS else None)]


def comparable(gap: float, half: float) -> bool | None:
    """Return whether the whole interval is below `COMPARABLE`; None if the bound is inside it."""
    if np.isinf(gap):  # one side diverged at each of its rates
        return gap < 0
    return True if gap + half < COMPARABLE else False if gap - half > COMPARABLE else None


def is_shaped(row: xr.Dataset) -> bool:
    return str(row["variant"].item()).startswith("shaped")


def label(row: xr.Dataset) -> str:
    gamma = f", γ = {float(row['gamma']):g}" if is_shaped(row) else ""
    return f"d = {int(row['depth'])}, {VARIANTS[row['variant'].item()]}{gamma}"


def at_best(row: xr.Dataset) -> str:
    """Name a row and its rate; no rate is best if a run diverged at each."""
    best = f"rate {float(row['rate']):g}" if bool(np.isfinite(row["eval_loss"]).all()) else "each rate"
    return f"{label(row)}, {best}"


def draw(data: xr.Dataset) -> Figure:
    """Draw both losses, a row for each setting, with one standard deviation if there are several seeds."""
    figure, axes = panels(2, height=1.4 + 0.42 * data.sizes["row"])
    rows = [data.isel(row=row) for row in range(data.sizes["row"])]
    places = list(range(len(rows)))[::-1]
    for panel, name, what in zip(axes, LOSSES, ("training", "held-out"), strict=True):
        for place, row in zip(places, rows, strict=True):
            point(panel, place, row[name].values, COLOURS[row["variant"].item()])
        panel.set(ylim=(-0.6, len(places) - 0.2), xlabel=f"{what} loss (nats)")
        panel.margins(x=0.25)
    axes[0].set_yticks(places, [at_best(row) for row in rows])
    axes[1].set_yticks(places, [])
    figure.suptitle(f"best learning rate of each; {data.attrs['runs']}")
    return figure


def point(axes: Axes, place: int, values: NDArray[np.float64], colour: str) -> None:
    """Draw mean and standard deviation of losses (seed,), with their numbers."""
    if np.isinf(values).any():
        axes.annotate(
            "diverged", (0.5, place), xycoords=("axes fraction", "data"), color=colour, ha="center", va="center"
        )
        return
    spread = float(values.std(ddof=1)) if len(values) > 1 else None
    axes.errorbar(values.mean(), place, xerr=spread, fmt="o", color=colour, capsize=3)
    text = f"{values.mean():.3f}" + ("" if spread is None else f" ± {spread:.3f}")
    above: Any = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center"}
    axes.annotate(text, (float(values.mean()), place), **above)
