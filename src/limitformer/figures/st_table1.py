r"""[ST, Table 1]: training and held-out loss of each variant, depth and γ at its best learning rate.

Drawn from finished runs of `limitformer train mlm`, at whatever scale those were: means and standard deviations over
seeds. The best rate is the one with the least held-out loss at which no run diverged. The baseline is Pre-LN.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from limitformer.figures.claims import Claim, Run
from limitformer.figures.language_runs import VARIANTS, language_runs, scale_of
from limitformer.plot import BLUE, GREEN, ORANGE, RED, panels
from limitformer.train.harness import FinishedRun

COLOURS = {"shaped-recover": BLUE, "shaped-learn": GREEN, "pre-ln": RED, "post-ln": ORANGE}
LOSSES = ("train_loss", "eval_loss")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Nothing: the runs have the scale."""


def paper() -> Config:
    """The only one."""
    return Config()


quick = paper


def compute(config: Config, run: Run) -> xr.Dataset:
    """`train_loss`, `eval_loss`, their `_sd`, `seeds`, `rate` (row,); a row is a depth, variant and γ."""
    runs = language_runs(run)
    keys = sorted({(one.about["depth"], one.about["variant"], one.about["gamma"]) for one in runs}, key=order)
    rows = [
        best([one for one in runs if key == (one.about["depth"], one.about["variant"], one.about["gamma"])])
        for key in keys
    ]
    data = xr.Dataset({name: ("row", [row[name] for row in rows]) for name in rows[0]})
    for place, name in enumerate(("depth", "variant", "gamma")):
        data[name] = ("row", [key[place] for key in keys])
    return data.assign_attrs(runs=scale_of(runs))


def order(key: tuple[int, str, float]) -> tuple[int, int, float]:
    """By depth, then variants as the paper has them."""
    depth, variant, gamma = key
    return depth, list(VARIANTS).index(variant), gamma


def best(runs: list[FinishedRun]) -> dict[str, Any]:
    """The row of the best learning rate; NaN if runs diverged at each."""
    rates = sorted({one.plan["learning_rate"] for one in runs})
    rows = [at_rate([one for one in runs if one.plan["learning_rate"] == rate], rate) for rate in rates]
    return min(rows, key=lambda row: row["eval_loss"] if np.isfinite(row["eval_loss"]) else np.inf)


def at_rate(runs: list[FinishedRun], rate: float) -> dict[str, Any]:
    """Means and standard deviations over seeds; NaN where one diverged."""
    row: dict[str, Any] = {"rate": rate, "seeds": len(runs)}
    for name in LOSSES:
        values = [np.nan if one.summary["diverged"] else one.summary[name] for one in runs]
        row |= {name: np.mean(values), f"{name}_sd": np.std(values, ddof=1) if len(values) > 1 else np.nan}
    return row


def claims(data: xr.Dataset) -> list[Claim]:
    """Every row's losses, and whether the best shaped one is as good as Pre-LN."""
    found = []
    for row in range(data.sizes["row"]):
        one = data.isel(row=row)
        what = f"{label(one)}, rate {float(one['rate']):g}"
        found += [Claim(f"{what}: {name.replace('_', ' ')}", float(one[name])) for name in LOSSES]
    for depth in np.unique(data["depth"]):
        found += difference(data.isel(row=np.flatnonzero(data["depth"] == depth)))
    return found


def difference(data: xr.Dataset) -> list[Claim]:
    """Held-out loss of the best shaped row minus that of Pre-LN, at one depth."""
    shaped = data.isel(row=np.flatnonzero([str(name).startswith("shaped") for name in data["variant"].values]))
    base = data.isel(row=np.flatnonzero(data["variant"] == "pre-ln"))
    if not shaped.sizes["row"] or not base.sizes["row"] or not np.isfinite(shaped["eval_loss"]).any():
        return []
    chosen, base = shaped.isel(row=int(np.nanargmin(shaped["eval_loss"].values))), base.isel(row=0)
    gap = float(chosen["eval_loss"] - base["eval_loss"])
    error = float(np.sqrt(sum(one["eval_loss_sd"] ** 2 / one["seeds"] for one in (chosen, base))))
    name = f"{label(chosen)} minus Pre-LN, held-out loss (standard error {error:.3f}; the paper: comparable or better)"
    return [Claim(name, gap, bool(gap < 2 * error) if np.isfinite(error) else None)]


def label(row: xr.Dataset) -> str:
    """A row's name."""
    gamma = f", γ = {float(row['gamma']):g}" if str(row["variant"].item()).startswith("shaped") else ""
    return f"d = {int(row['depth'])}, {VARIANTS[row['variant'].item()]}{gamma}"


def draw(data: xr.Dataset) -> Figure:
    """Both losses, a row each, with one standard deviation."""
    figure, axes = panels(2, width=5.0, height=1.2 + 0.42 * data.sizes["row"])
    places = np.arange(data.sizes["row"])[::-1]
    for panel, name in zip(axes, LOSSES, strict=True):
        for place, row in zip(places, range(data.sizes["row"]), strict=True):
            one = data.isel(row=row)
            value, spread = float(one[name]), np.nan_to_num(float(one[f"{name}_sd"]))
            colour = COLOURS[one["variant"].item()]
            panel.errorbar(value, place, xerr=spread, fmt="o", color=colour, capsize=3)
            panel.annotate(
                f"{value:.3f} ± {spread:.3f}",
                (value, place),
                (0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        panel.set(
            ylim=(-0.6, len(places) - 0.2),
            xlabel="held-out loss (nats)" if name == "eval_loss" else "training loss (nats)",
        )
        panel.margins(x=0.2)
    names = [f"{label(data.isel(row=row))}, rate {float(data['rate'][row]):g}" for row in range(data.sizes["row"])]
    axes[0].set_yticks(places, names)
    axes[1].set_yticks(places, [])
    figure.suptitle(f"best learning rate of each; {data.attrs['runs']}", fontsize=9)
    return figure
