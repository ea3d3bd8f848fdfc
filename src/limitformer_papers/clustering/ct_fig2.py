r"""[CT, Fig. 2]: random values train better than constant ones.

A vision Transformer with attention only, on the sphere; `limitformer_papers.training.tasks.vit` has its equation and
what the paper leaves open. V starts as one identity for all layers (constant), as one for each layer (untied), or
Gaussian and independent (random). Drawn: mean validation accuracy by epoch, with its range over seeds. The data are
finished runs of `limitformer train vit`.
"""

from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import t

from limitformer.base.errors import require
from limitformer.plot import legend_below, panels
from limitformer_papers.common.claims import Claim, FigureRun, NoConfig
from limitformer_papers.shaped_transformer.language_runs import check_alike, runs_of, student
from limitformer_papers.training.log import curve, read_log

COLOURS = {"constant": "#CC2A8F", "untied": "#E69F00", "random": "#6A3D9A"}  # magenta and violet, as in the paper
LINES = {"constant": "--", "untied": ":", "random": "-"}
# Runs may differ in these: a preset's name is not a setting, and the rate of each variant is one of the configuration.
PLACE = ("variant", "seed", "preset", "learning_rate")
paper = quick = NoConfig


def compute(config: NoConfig, run: FigureRun) -> xr.Dataset:
    """Return `accuracy` and `loss` (variant, seed, epoch) on the held-out images, for the seeds of all variants.

    `diverged` (variant,) counts the runs that diverged; a seed with such a run is left out.

    Raises:
        InputError: no finished runs of the experiment, none of random values, none of others, or runs of different
            settings.
    """
    runs = runs_of("vit", run)
    check_alike(runs, run.runs, PLACE)
    whole = {(one.about["variant"], one.about["seed"]): one.path for one in runs if not one.summary["diverged"]}
    ran = {one.about["variant"] for one in runs}
    needed = "constant" if ran == {"random"} else "random"
    variants = [each for each in COLOURS if each in ran | {needed}]
    finished = {variant: sorted(seed for one, seed in whole if one == variant) for variant in variants}
    diverged = {
        name: sum(bool(one.summary["diverged"]) for one in runs if one.about["variant"] == name) for name in variants
    }
    seeds = [seed for seed in finished["random"] if all(seed in each for each in finished.values())]
    require(
        bool(seeds),
        f"The figure compares variants with the same seed; {run.runs} has finished seeds "
        f"{' and '.join(f'{each} of {name}' for name, each in finished.items())} ({sum(diverged.values())} diverged). "
        "Nearest: run the other variants.",
    )
    curves = np.array([[curves_of(whole[variant, seed]) for seed in seeds] for variant in variants])
    return dataset(curves, seeds, runs[0].about, diverged)


def curves_of(path: Path) -> list[NDArray[np.float64]]:
    """Return accuracy and loss at the end of each epoch (2, epoch)."""
    log = read_log(path)
    return [curve(log, "eval_accuracy")[1], curve(log, "eval_loss")[1]]


def dataset(curves: NDArray[np.float64], seeds: list[int], about: Any, diverged: dict[str, int]) -> xr.Dataset:
    """Return curves (variant, seed, 2, epoch) as a Dataset, with the settings of the runs as attributes."""
    config, axes = about["config"], ("variant", "seed", "epoch")
    names = ("data", "layers", "dim", "patch", "beta", "sigma", "batch", "learning_rate", "epochs")
    scale = {name: config[name] for name in names} | {"preset": about["preset"]}
    own = ("untied_learning_rate", "random_learning_rate")
    scale |= {name: config.get(name) or config["learning_rate"] for name in own}
    parts = {
        "accuracy": (axes, curves[:, :, 0], {"units": "1"}),
        "loss": (axes, curves[:, :, 1], {"units": "nat"}),
        "diverged": ("variant", list(diverged.values())),
    }
    epochs = np.arange(1, curves.shape[-1] + 1)
    return xr.Dataset(
        parts,
        coords={"variant": list(diverged), "seed": seeds, "epoch": epochs},
        attrs={**scale, "training": about["examples"]["training"], "held_out": about["examples"]["held_out"]},
    )


def difference(data: xr.Dataset, name: str, other: str) -> tuple[float, float]:
    """Return random minus another after the last epoch: the mean over seeds and the half-width of its 95 % interval.

    The seeds of a pair share the order of the data and the initial patches, so the difference is averaged.
    """
    last = data[name].isel(epoch=-1)
    return student(last.sel(variant="random").values, last.sel(variant=other).values)


def claims(data: xr.Dataset) -> list[Claim]:
    """Return the paper's claim, as the mean of differences seed by seed, and the numbers behind it."""
    last = data["accuracy"].isel(epoch=-1)
    whole, names = data["accuracy"].mean(("seed", "epoch")), [str(each) for each in data["variant"].values]
    others = [name for name in names if name != "random"]
    return [
        *[better(data, name) for name in others],
        *[Claim(f"mean final accuracy, {name}", float(last.sel(variant=name).mean())) for name in names],
        *[Claim(f"accuracy, mean over all epochs, {name}", float(whole.sel(variant=name))) for name in names],
        *[Claim(f"final loss, random minus {name}", difference(data, "loss", name)[0]) for name in others],
        *[
            Claim(f"{name} runs that diverged and are left out", float(data["diverged"].sel(variant=name)))
            for name in names
        ],
    ]


def better(data: xr.Dataset, other: str) -> Claim:
    """Return whether random values are better than others by more than seeds differ; one seed decides nothing."""
    seeds, (mean, half) = data.sizes["seed"], difference(data, "accuracy", other)
    name = f"final accuracy, random minus {other}, "
    if seeds == 1:
        return Claim(f"{name}one seed, which decides nothing (the paper: random is better)", mean, None)
    error = half / t.ppf(0.975, seeds - 1)
    name += (
        f"mean of {seeds} seeds (standard error {error:.4f}); "
        f"the paper: random is better; it holds if the 95 % interval, ± {half:.4f}, is above 0"
    )
    return Claim(name, mean, bool(mean > half))


def draw(data: xr.Dataset) -> Figure:
    figure, (axes,) = panels(1, width=6.4, height=4.2)
    for name in data["variant"].values:
        colour = COLOURS[name]
        accuracy = 100 * data["accuracy"].sel(variant=name)
        low, high = accuracy.min("seed"), accuracy.max("seed")
        axes.fill_between(data["epoch"].values, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(
            data["epoch"].values, accuracy.mean("seed"), color=colour, linestyle=LINES[name], label=f"{name} weights"
        )
    if data.sizes["seed"] > 1:
        axes.fill_between([], [], [], color="0.5", alpha=0.3, linewidth=0, label="range over seeds")
    axes.set(xlabel="epoch", ylabel="validation accuracy, %")
    axes.set_title(title(data))
    legend_below(axes, 3)
    return figure


def title(data: xr.Dataset) -> str:
    names = {"digits": "digits of scikit-learn", "fashion": "Fashion-MNIST", "cifar10": "CIFAR-10"}
    about, seeds, diverged = data.attrs, data.sizes["seed"], int(data["diverged"].sum())
    return (
        f"{names[about['data']]}, {about['layers']} layers, d = {about['dim']}, β = {about['beta']:g}, "
        f"{seeds} seed{'s' * (seeds > 1)}" + (f"; {diverged} diverged" if diverged else "")
    )
