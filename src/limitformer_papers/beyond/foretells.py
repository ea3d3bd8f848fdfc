r"""Does the law at initialisation foretell training? A study of tiny networks, its rules written before it was run.

**Networks**: every kind (pre, post, none, shaped: `tiny_networks`), depth and initializer_range s of a grid. Each is
trained once on next tokens of Python's standard library, all with one learning rate. One of each kind and depth, drawn
by the seed, is trained again with another seed.

**Predictors** are ten numbers of `limitformer.check`, from the configuration only, on unrelated tokens. Neither text
nor training enters them. The **outcome** is the held-out loss after the last step; a run that diverged ranks last.

**Halves**: within each kind and depth, half of the values of s, drawn by the seed, serve to choose a predictor, and the
others to test it. ρ is Spearman's (`ranks`). There are two hypotheses, each judged by p < 0.025 over permutations, so
the probability that either holds by chance is at most 5 %:

1. over all: the predictor with the largest |ρ| in the first half has a ρ of the same sign in the held-out half;
2. at one s, which the configuration states: the same for the mean ρ among networks with equal s. The predictor is
   chosen by that mean, and permutations are within s.

The following numbers decide nothing: ρ of all predictors; the two knobs, s and depth, as predictors; ρ within kinds;
and ρ between the two seeds, which bounds what a predictor can be expected to reach. ρ of the law's loss at the start
and the loss of the first step checks that the law describes the networks that were trained.

Added after the losses were known, so it decides nothing either: ρ within depths; the held-out loss of the frequencies
of tokens, which a network without any learnt context reaches (the order of such networks is noise); and how many of the
networks that meet the objective learnt context.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from limitformer.base.progress import track
from limitformer.plot import BLACK, BLUE, GREEN, MARKERS, ORANGE, RED, legend_below, panels
from limitformer_papers.beyond.ranks import generator, interval, p_value, ranks, spearman, within
from limitformer_papers.beyond.tiny_networks import KINDS, Sizes, TinyNetwork, foretold, loss_of_frequencies, trained
from limitformer_papers.common.claims import Claim, FigureRun
from limitformer_papers.training.data.text_data import TextData, text_data

CHOOSE, TEST = "choosing", "held-out"
START, DISTANCE = "loss at the start", "distance of the objective"
KNOBS = {"initializer_range": "scale", "depth": "depth"}
LEVEL = 0.025  # of each of the two hypotheses
FEWEST = 10  # networks in a half, below which nothing is judged
NEAR = 0.1  # nats from the loss of the frequencies
SOURCE = "stdlib"
COLOURS = dict(zip(KINDS, (BLUE, RED, GREEN, ORANGE), strict=True))


@dataclass(frozen=True, kw_only=True)
class Config:
    """The grid of networks; the default is that of the study: 48 networks, 12 of them trained twice, at width 64.

    Attributes:
        kinds, depths, scales: s is the initializer_range; an even number of them, for the halves.
        sizes: of all networks.
        samples: networks of the law.
    """

    kinds: tuple[str, ...] = KINDS
    depths: tuple[int, ...] = (2, 5, 10)
    scales: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    sizes: Sizes = field(default_factory=Sizes)
    samples: int = 4


paper = Config


def quick() -> Config:
    sizes = Sizes(width=16, heads=2, vocabulary=300, length=8, batch=4, steps=6, warmup=1, evaluated=8, documents=30)
    return Config(kinds=("shaped",), depths=(2,), scales=(0.03, 0.3, 0.6, 1.0), sizes=sizes, samples=1)


def cells_of(config: Config) -> list[TinyNetwork]:
    """Return the grid, s fastest."""
    return [TinyNetwork(k, d, s) for k in config.kinds for d in config.depths for s in config.scales]


def halves(config: Config, seed: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which cells (cell,) are held out, half of each kind and depth, and which are trained twice, one of
    each.
    """
    groups, each = len(config.kinds) * len(config.depths), len(config.scales)
    random = generator(seed)
    order = random.permuted(np.tile(np.arange(each), (groups, 1)), axis=1)
    again = random.permuted(np.tile(np.arange(each), (groups, 1)), axis=1)
    return (order >= each // 2).ravel(), (again == 0).ravel()


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return `foretold` (predictor, cell), `loss` and `first` (seed, cell), NaN if not trained, and `frequencies`."""
    cells = cells_of(config)
    predictions = [foretold(cell, config.sizes, config.samples, run.seed) for cell in track(cells, "checks")]
    held_out, again = halves(config, run.seed)
    with cell_folder(config, run) as out:
        data = text_data(SOURCE, config.sizes.vocabulary, config.sizes.length, out / "data", config.sizes.documents)
        first, loss = outcomes(config, run.seed, again, data, out)
    names = list(predictions[0])
    parts: dict[str, Any] = {
        "foretold": (("predictor", "cell"), [[prediction[name] for prediction in predictions] for name in names]),
        "loss": (("seed", "cell"), loss),
        "first": (("seed", "cell"), first),
        "frequencies": loss_of_frequencies(data, config.sizes),
    }
    along: dict[str, Any] = {name: [getattr(cell, name) for cell in cells] for name in ("kind", "depth", "scale")}
    along["half"] = np.where(held_out, TEST, CHOOSE)
    return xr.Dataset(parts, {"predictor": names, **{name: ("cell", value) for name, value in along.items()}})


@contextmanager
def cell_folder(config: Any, run: FigureRun) -> Iterator[Path]:
    """Yield the folder of the networks of this configuration and seed, or a temporary one."""
    if run.stores is None:
        with TemporaryDirectory() as folder:
            yield Path(folder)
        return
    settings = json.dumps(asdict(config) | {"seed": run.seed}, sort_keys=True)
    yield run.stores / sha256(settings.encode()).hexdigest()[:16]


def outcomes(
    config: Config, seed: int, again: NDArray[np.bool_], data: TextData, out: Path
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return losses (seed, cell) of the first step and after the last; the second seed is that of repeated networks."""
    cells = cells_of(config)
    losses = np.full((2, 2, len(cells)), np.nan)
    todo = [(0, k) for k in range(len(cells))] + [(1, int(k)) for k in np.flatnonzero(again)]
    for which, k in track(todo, "networks"):
        losses[:, which, k] = trained(cells[k], config.sizes, data, 2 * seed + which, out)
    return losses[0], losses[1]


def half(data: xr.Dataset, name: str) -> xr.Dataset:
    return data.isel({data["half"].dims[0]: np.flatnonzero(data["half"].values == name)})


def relation(data: xr.Dataset, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a predictor or a knob, and the loss of the first seed, each (cell,)."""
    x = data[KNOBS[name]].values if name in KNOBS else data["foretold"].sel(predictor=name).values
    return np.asarray(x, np.float64), data["loss"].values[0]


def rho_of(data: xr.Dataset, name: str, groups: str = "all") -> float:
    """Return Spearman's ρ with the loss, averaged over groups."""
    x, y = relation(data, name)
    return spearman(x, y) if groups == "all" else within(x, y, data[groups].values)


def chosen(data: xr.Dataset, names: list[str], groups: str = "all") -> str:
    """Return the name with the largest |ρ| in the half to choose with."""
    there = half(data, CHOOSE)
    return max(names, key=lambda name: abs(rho_of(there, name, groups)))


def predictors(data: xr.Dataset) -> list[str]:
    return [str(name) for name in data["predictor"].values]


def claims(data: xr.Dataset) -> list[Claim]:
    """Return the two hypotheses first, then numbers that decide nothing."""
    data = data.assign_coords(all=("cell", np.zeros(data.sizes["cell"])))
    parts = [(name, side) for name in (*predictors(data), *KNOBS) for side in (CHOOSE, TEST)]
    return [
        *hypothesis(data, "all", "over all"),
        *hypothesis(data, "scale", "at one s"),
        *secondary_claims(data),
        *[Claim(f"ρ of {name} and the loss, {side} half", rho_of(half(data, side), name)) for name, side in parts],
    ]


def hypothesis(data: xr.Dataset, groups: str, label: str) -> list[Claim]:
    """Return the chosen predictor and whether the held-out half confirms it; judged from ten networks on."""
    best, held_out = chosen(data, predictors(data), groups), half(data, TEST)
    there, rho = rho_of(half(data, CHOOSE), best, groups), rho_of(held_out, best, groups)
    p, number = p_value(*relation(held_out, best), held_out[groups].values, 1), held_out.sizes["cell"]
    holds = confirmed(p, rho * there > 0, number)
    what = f"{label}: ρ in the {TEST} half of {number}; the hypothesis: the same sign, p < {LEVEL:g}"
    return [
        Claim(f"{label}: chosen in the {CHOOSE} half is the {best}; its ρ there", there),
        Claim(what, rho, holds),
        Claim(f"{label}: p of that, over permutations", p),
    ]


def confirmed(p: float, same_sign: bool, number: int) -> bool | None:
    """Return whether `number` held-out networks confirm a hypothesis; None for fewer than `FEWEST`."""
    return bool(p < LEVEL and same_sign) if number >= FEWEST else None


def secondary_claims(data: xr.Dataset) -> list[Claim]:
    """Return numbers that do not decide: intervals, other groups, the better knob, seeds, and a check of the law."""
    best, held_out, knob = chosen(data, predictors(data)), half(data, TEST), chosen(data, list(KNOBS))
    low, high = interval(*relation(held_out, best), 2)
    same = spearman(data["foretold"].sel(predictor=START).values, data["first"].values[0])
    return [
        Claim("over all: lower end of the 95 % interval", low),
        Claim("over all: upper end of the 95 % interval", high),
        Claim(f"mean ρ within kinds, {TEST} half", rho_of(held_out, best, "kind")),
        Claim(
            f"mean ρ within depths, {TEST} half (added when the losses had been seen)", rho_of(held_out, best, "depth")
        ),
        Claim(f"ρ of the knob chosen likewise, {knob}, {TEST} half", rho_of(held_out, knob)),
        Claim("ρ of two seeds of the same networks", between_seeds(data)),
        Claim(
            f"networks of {data.sizes['cell']} that learnt no context: {NEAR:g} below the frequencies' loss or above",
            float(no_context(data).sum()),
        ),
        *objective_claims(data),
        Claim("held-out loss of the frequencies", float(data["frequencies"])),
        Claim("runs that diverged", float(np.isinf(data["loss"].values).sum())),
        Claim("ρ of the law's loss at the start and the loss of the first step: above 0.9", same, bool(same > 0.9)),
    ]


def objective_claims(data: xr.Dataset) -> list[Claim]:
    """Return numbers added after the losses were known: networks inside all bands of the objective."""
    met, learnt = data["foretold"].sel(predictor=DISTANCE).values == 0, ~no_context(data)
    return [
        Claim("networks that meet the default objective", float(met.sum())),
        Claim("of these learnt context", float((met & learnt).sum())),
        Claim("of the others learnt context", float((~met & learnt).sum())),
    ]


def no_context(data: xr.Dataset) -> NDArray[np.bool_]:
    """Return which networks (cell,) are not clearly better than the frequencies of tokens."""
    return np.asarray(data["loss"].values[0] > float(data["frequencies"]) - NEAR)


def between_seeds(data: xr.Dataset) -> float:
    first, second = data["loss"].values
    twice = ~np.isnan(second)
    return spearman(first[twice], second[twice])


def draw(data: xr.Dataset) -> Figure:
    """Draw the chosen predictor against the loss, and ρ of all predictors in both halves."""
    figure, (left, right) = panels(2, height=4.4)
    best = chosen(data, predictors(data))
    scatter(left, data, best)
    names, held_out = [*predictors(data), *KNOBS], half(data, TEST)
    for at, name in enumerate(names):
        rhos = [rho_of(half(data, side), name) for side in (CHOOSE, TEST)]
        draw_rho(right, at, rhos, interval(*relation(held_out, name), 2), color=BLACK, linewidth=1)
    name_rows(right, names, best)
    right.axhline(len(names) - len(KNOBS) - 0.5, color=BLACK, linewidth=0.8, linestyle=":")
    right.set(xlabel="Spearman's ρ with the loss", ylabel="what is known before training")
    line = Line2D([], [], color=BLACK, linestyle=":", label="frequencies of tokens alone")
    figure_legend(figure, 7, data["kind"].values, COLOURS, [line])
    return figure


def draw_cases(axes: Axes, x: Any, y: Any, names: Any, halves: Any, colours: Mapping[str, str]) -> None:
    """Draw one mark a network, hollow in the choosing half."""
    for at, (name, side) in enumerate(zip(map(str, names), halves, strict=True)):
        colour, mark = colours[name], MARKERS[list(colours).index(name)]
        face = "none" if side == CHOOSE else colour
        axes.plot(x[at], y[at], mark, color=colour, markerfacecolor=face, markersize=6)


def draw_rho(axes: Axes, at: float, rhos: Sequence[float], ends: Any, *, size: int = 6, **line: Any) -> None:
    """Draw ρ in the choosing half, hollow, and in the held-out one, with the interval of the second."""
    axes.plot(ends, [at, at], **line)
    for rho, face in ((rhos[1], line["color"]), (rhos[0], "white")):
        axes.plot(rho, at, "o", color=line["color"], markersize=size, markerfacecolor=face)


def name_rows(axes: Axes, names: Sequence[str], best: str) -> None:
    """Name the rows of ρ, the first one at the top."""
    axes.axvline(0, color=BLACK, linewidth=0.8)
    axes.set_yticks(range(len(names)), [f"{name} (chosen)" if name == best else name for name in names])
    axes.invert_yaxis()
    axes.set_xlim(-1.05, 1.05)


def figure_legend(figure: Figure, columns: int, names: Any, colours: Mapping[str, str], others: list[Line2D]) -> None:
    """Draw a legend of the names' colours and marks, of hollow and full marks for the halves, and of other lines."""
    dot: dict[str, Any] = {"marker": "o", "linestyle": "", "color": BLACK}
    looks = zip(colours.items(), MARKERS, strict=False)
    named = [Line2D([], [], **dot | {"color": c, "marker": m}, label=n) for (n, c), m in looks if n in names]
    hollow = Line2D([], [], **dot, markerfacecolor="none", label=f"{CHOOSE} half")
    legend_below(figure, columns, handles=[*named, hollow, Line2D([], [], **dot, label=f"{TEST} half"), *others])


def scatter(axes: Axes, data: xr.Dataset, best: str) -> None:
    """Draw the ranks of the predictor and the losses; runs that diverged are at the upper edge."""
    x, loss = relation(data, best)
    top = 1.05 * float(np.max(loss[np.isfinite(loss)], initial=1.0))
    draw_cases(axes, ranks(x), np.minimum(loss, top), data["kind"].values, data["half"].values, COLOURS)
    axes.axhline(float(data["frequencies"]), color=BLACK, linestyle=":", linewidth=1)
    rhos = [f"{rho_of(half(data, side), best):.2f} {side}" for side in (CHOOSE, TEST)]
    axes.set(xlabel=f"rank of the {best}, before training", ylabel="held-out loss after training (nats)")
    axes.set(title=f"ρ = {rhos[0]}, {rhos[1]}")
