r"""[CT, Fig. 2]: random values train better than constant ones.

A vision Transformer of attention alone on the sphere (`limitformer.train.vit` has its equation and what the paper
leaves open), trained from V that is the identity and shared by all layers (constant) or Gaussian and independent
(random): mean validation accuracy by epoch, with its range over seeds. The data are finished runs of
`limitformer train vit`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from limitformer.errors import require
from limitformer.figures.claims import Claim, Run
from limitformer.plot import panels

COLOURS = {"constant": "#CC2A8F", "random": "#6A3D9A"}  # magenta and violet, as in the paper
VARIANTS = ("constant", "random")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Nothing: the runs have their settings, and their scale."""


def paper() -> Config:
    """The only one."""
    return Config()


quick = paper


def compute(config: Config, run: Run) -> xr.Dataset:
    """What `from_runs` finds; the seed of `run` plays no part."""
    require(
        run.runs is not None, "The figure is drawn from finished runs of `limitformer train vit`: give their folder."
    )
    assert run.runs is not None
    return from_runs(run.runs)


def from_runs(folder: str | Path) -> xr.Dataset:
    """`accuracy` and `loss` (variant, seed, epoch) on the held-out images, of the seeds that both variants have.

    Raises:
        InputError: no finished runs of the experiment, one variant alone, or runs of different settings.
    """
    from limitformer.train.harness import read_runs  # needs the extra `train`

    runs = [run for run in read_runs(folder) if run.about.get("experiment") == "vit"]
    require(bool(runs), f"The finished runs in {folder} are of other experiments. Nearest: limitformer train vit.")
    check_alike(runs, folder)
    whole = {(run.about["variant"], run.about["seed"]): run.path for run in runs if not run.summary["diverged"]}
    seeds = sorted(seed for variant, seed in whole if variant == "random" and ("constant", seed) in whole)
    found = {variant: sorted(seed for one, seed in whole if one == variant) for variant in VARIANTS}
    require(
        bool(seeds),
        f"The figure compares two variants with the same seed; {folder} has finished seeds {found['constant']} of "
        f"constant and {found['random']} of random. Nearest: run the other variant.",
    )
    curves = [[curves_of(whole[variant, seed]) for seed in seeds] for variant in VARIANTS]
    accuracy, loss = ([[one[k] for one in row] for row in curves] for k in (0, 1))
    return dataset(accuracy, loss, seeds, runs[0].about, len(runs) - len(whole))


def check_alike(runs: Sequence[Any], folder: str | Path) -> None:
    """Raise `InputError` unless all runs have the same settings and data."""
    settings = {json.dumps([run.about["config"], run.about["data"]], sort_keys=True): run.path for run in runs}
    names = ", ".join(str(path) for path in list(settings.values())[:2])
    require(
        len(settings) == 1,
        f"The runs in {folder} have {len(settings)} different settings or data, such as {names}. "
        "Nearest: a folder with runs of one preset.",
    )


def curves_of(path: Path) -> tuple[Any, Any]:
    """Accuracy and loss at the end of each epoch (epoch,)."""
    from limitformer.train.harness import curve, read_log

    log = read_log(path)
    return curve(log, "eval_accuracy")[1], curve(log, "eval_loss")[1]


def dataset(accuracy: Any, loss: Any, seeds: list[int], about: Any, diverged: int) -> xr.Dataset:
    """The Dataset, with what was run among its attributes."""
    config, axes = about["config"], ("variant", "seed", "epoch")
    kept = ("data", "layers", "dim", "patch", "beta", "sigma", "batch", "learning_rate", "epochs")
    scale = {name: config[name] for name in kept}
    attributes = {**scale, "preset": about["preset"], "training": about["examples"]["training"], "diverged": diverged}
    epochs = np.arange(1, np.shape(accuracy)[-1] + 1)
    return xr.Dataset(
        {"accuracy": (axes, accuracy, {"units": "1"}), "loss": (axes, loss, {"units": "nat"})},
        coords={"variant": list(VARIANTS), "seed": seeds, "epoch": epochs},
        attrs={**attributes, "held_out": about["examples"]["held_out"]},
    )


def difference(data: xr.Dataset, name: str) -> tuple[float, float]:
    """Random minus constant after the last epoch, its mean over seeds and the standard error of that; ∞ for one seed.

    The seeds of a pair share the order of the data and the initial patches, so what is averaged is the difference.
    """
    last = data[name].isel(epoch=-1)
    differences = last.sel(variant="random").values - last.sel(variant="constant").values
    number = len(differences)
    return float(differences.mean()), float(differences.std(ddof=1) / number**0.5) if number > 1 else float("inf")


def claims(data: xr.Dataset) -> list[Claim]:
    """The paper's claim, as the difference of two means in standard errors; and what it is made of."""
    last = data["accuracy"].isel(epoch=-1)
    mean, error = difference(data, "accuracy")
    whole = data["accuracy"].mean(("seed", "epoch"))
    seeds = data.sizes["seed"]
    return [
        Claim(
            f"final accuracy, random minus constant, mean of {seeds} seeds (standard error {error:.4f}); "
            "the paper: random is better; it holds if two standard errors above 0",
            mean,
            bool(mean > 2 * error),
        ),
        *[Claim(f"mean final accuracy, {name}", float(last.sel(variant=name).mean())) for name in VARIANTS],
        *[Claim(f"accuracy, mean over all epochs, {name}", float(whole.sel(variant=name))) for name in VARIANTS],
        Claim("final loss, random minus constant", difference(data, "loss")[0]),
        Claim("runs that diverged and are left out", float(data.attrs["diverged"])),
    ]


def draw(data: xr.Dataset) -> Figure:
    """Mean and range by epoch; the title says at what scale it was run."""
    figure, (axes,) = panels(1, width=6.4, height=4.2)
    for name, colour in COLOURS.items():
        accuracy = 100 * data["accuracy"].sel(variant=name)
        low, high = accuracy.min("seed"), accuracy.max("seed")
        axes.fill_between(data["epoch"].values, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(data["epoch"].values, accuracy.mean("seed"), color=colour, label=f"{name} weights")
    axes.set(xlabel="epoch", ylabel="validation accuracy, %")
    axes.set_title(title(data), fontsize=10)
    axes.legend(loc="lower right")
    return figure


def title(data: xr.Dataset) -> str:
    """What was run."""
    names = {"digits": "digits of scikit-learn", "cifar10": "CIFAR-10"}
    about, seeds = data.attrs, data.sizes["seed"]
    return (
        f"{names[about['data']]}, {about['layers']} layers, d = {about['dim']}, β = {about['beta']:g}, "
        f"{seeds} seed{'s' * (seeds > 1)}: mean and range"
    )
