r"""[CT, Fig. 5]: one layer as a diagram, and the same boxes run in the order in which they are drawn.

Caption: "One layer of the Deep Transformer with added normalization and diffusion scaling (∼ 1/√L). The diagram
highlights that self-attention acts globally across all tokens. The residual connection is shown with a dashed outline
to indicate that it represents a mode of connectivity rather than an operation."

`BOXES` is the diagram: each box with its name and its function of the tokens. `compute` sends tokens through the boxes
and holds the outcome against the layer of the library's chain [CT, eq. 4]; and it moves one token at a time before a
box to see which tokens move behind it: all of them after attention, only that token after every other box.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch
from numpy.typing import NDArray

from limitformer.models import StochasticTransformer
from limitformer.plot import BLUE, GREEN, ORANGE, PURPLE, SKY, legend_below, panels
from limitformer_papers.clustering.sphere import tokens_chain
from limitformer_papers.common.claims import Claim, FigureRun, ks_distance, ks_noise

Array = NDArray[np.float64]
MOVE = 1e-3  # change of one token, to see which others follow
LANES = ("1", "2", "N")  # the tokens that are drawn


class LayerInputs(NamedTuple):
    """LayerInputs of a layer: V (sample, d, d), β, L, and the tokens (sample, N, d) of the residual connection."""

    values: Array
    beta: float
    layers: int
    residual: Array


@dataclass(frozen=True)
class Box:
    """A box of the diagram: name, text, colour, whether it spans all tokens, and its function."""

    name: str
    text: str
    colour: str
    wide: bool
    act: Callable[[Array, LayerInputs], Array]


def attend(x: Array, inputs: LayerInputs) -> Array:
    """Return A(Xⁱ) [CT, eq. 2], Q = K = I."""
    logits = inputs.beta * x @ np.swapaxes(x, -1, -2)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True) @ x)


def value(x: Array, inputs: LayerInputs) -> Array:
    return np.asarray(x @ np.swapaxes(inputs.values, -1, -2))


def scale(x: Array, inputs: LayerInputs) -> Array:
    return np.asarray(x / inputs.layers**0.5)


def add(x: Array, inputs: LayerInputs) -> Array:
    return np.asarray(inputs.residual + x)


def normalise(x: Array, inputs: LayerInputs) -> Array:
    """Scale each token to length 1, the RMSNorm of [CT]."""
    return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))


BOXES = (
    Box("attention", "self-attention A$_β$", ORANGE, True, attend),
    Box("values", "V$_{n+1}$", BLUE, False, value),
    Box("scale", "× 1/√L", SKY, False, scale),
    Box("add", "+", PURPLE, False, add),
    Box("normalise", "RMSNorm", GREEN, False, normalise),
)


HEIGHTS = dict(zip((box.name for box in BOXES), (2.3, 3.75, 4.95, 6.2, 7.5), strict=True))  # in the drawing


@dataclass(frozen=True, kw_only=True)
class Config:
    """N, d, β, L and samples of the comparison; the paper's figure has no numbers."""

    tokens: int = 4
    dim: int = 5
    beta: float = 2.0
    layers_per_unit_time: int = 3
    samples: int = 20_000


paper = Config


def quick() -> Config:
    return Config(samples=2000)


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return overlaps after one layer, `boxes` and `chain` (sample, pair), and `follows` (box, moved, token).

    `length` (sample, token) is that of the tokens behind the last box.
    """
    random = np.random.Generator(np.random.Philox(run.seed))
    start = normalise(random.standard_normal((config.tokens, config.dim)), None)  # type: ignore[arg-type]  # not used
    x = np.broadcast_to(start, (config.samples, *start.shape)).copy()
    values = random.standard_normal((config.samples, config.dim, config.dim))
    after = through(x, LayerInputs(values, config.beta, config.layers_per_unit_time, x))
    rows, columns = np.triu_indices(config.tokens, 1)
    return xr.Dataset(
        {
            "boxes": (("sample", "pair"), (after @ np.swapaxes(after, -1, -2))[:, rows, columns]),
            "chain": (("sample", "pair"), one_layer(config, start, run)),
            "follows": (("box", "moved", "token"), tokens_that_follow(start, values[0], config)),
            "length": (("sample", "token"), np.linalg.norm(after, axis=-1)),
        },
        coords={"box": [box.name for box in BOXES]},
    )


def through(x: Array, inputs: LayerInputs) -> Array:
    """Pass tokens (sample, N, d) through all boxes."""
    for box in BOXES:
        x = box.act(x, inputs)
    return x


def one_layer(config: Config, start: Array, run: FigureRun) -> Array:
    """Return the overlaps (sample, pair) after one layer of the library's chain."""
    model = StochasticTransformer(
        tokens=config.tokens, dim=config.dim, beta=config.beta, layers_per_unit_time=config.layers_per_unit_time
    )
    samples = tokens_chain(model, [1 / config.layers_per_unit_time], config.samples, run, start=start)
    return np.asarray(samples["overlap"].values[:, 0])


def tokens_that_follow(start: Array, values: Array, config: Config) -> NDArray[np.int64]:
    """Return (box, moved, token): 1 where a token behind the box changes when one token before it is moved."""
    follows = np.zeros((len(BOXES), config.tokens, config.tokens), np.int64)
    x, inputs = start, LayerInputs(values, config.beta, config.layers_per_unit_time, start)
    for number, box in enumerate(BOXES):
        for moved in range(config.tokens):
            other = x.copy()
            other[moved] += MOVE * np.arange(1, config.dim + 1)  # in no special direction
            follows[number, moved] = np.abs(box.act(other, inputs) - box.act(x, inputs)).max(-1) > 0
        x = box.act(x, inputs)
    return follows


def claims(data: xr.Dataset) -> list[Claim]:
    """The boxes make the chain's layer; only attention is global; tokens end on the sphere."""
    pairs = range(data.sizes["pair"])
    distance = max(ks_distance(data["boxes"][:, pair], data["chain"][:, pair]) for pair in pairs)
    noise = ks_noise(data["boxes"][:, 0], data["chain"][:, 0])
    apart = ~np.eye(data.sizes["token"], dtype=bool)
    shares = {str(name): float(data["follows"].sel(box=name).values[apart].mean()) for name in data["box"].values}
    others = max(share for name, share in shares.items() if name != "attention")
    off = float(np.abs(data["length"] - 1).max())
    return [
        Claim(
            f"largest KS distance of a pair's overlap, boxes against chain (sampling noise: {noise:.3f})",
            distance,
            distance < noise,
        ),
        Claim("share of the other tokens that move with one: attention", shares["attention"], shares["attention"] == 1),
        Claim("share of the other tokens that move with one: any other box", others, others == 0),
        Claim("largest ||X| − 1| behind RMSNorm", off, off < 1e-14),
    ]


def draw(data: xr.Dataset) -> Figure:
    """Draw the diagram from bottom to top, a lane for each token; residual connections are dashed."""
    figure, (axes,) = panels(1, height=5.4)
    axes.set_axis_off()
    axes.set(xlim=(0, 10), ylim=(0, 9.4), aspect="equal")
    lanes = dict(zip(LANES, (1.7, 4.5, 8.4), strict=True))
    draw_box(axes, BOXES[0], 5.0)
    middle = HEIGHTS["attention"]
    for ends in product(lanes.values(), repeat=2):
        axes.plot(ends, (middle - 0.65, middle + 0.65), color="black", linewidth=0.8, alpha=0.3, zorder=3)
    for token, x in lanes.items():
        axes.text(x, 0.4, f"X$_n^{token}$", ha="center", va="center")
        axes.text(x, 9.1, f"X$_{{n+1}}^{token}$", ha="center", va="center")
        draw_lane(axes, x)
    for y in (0.4, *list(HEIGHTS.values())[1:], 9.1):
        axes.text(6.3, y, "…", ha="center", va="center", color="gray")
    axes.plot([], [], color="gray", linestyle="--", label="residual connection: Xⁱ as it is")
    legend_below(figure, 1)
    return figure


def draw_lane(axes: Axes, x: float) -> None:
    for box in BOXES[1:]:
        draw_box(axes, box, x)
    stops = [0.75, *HEIGHTS.values(), 8.75]
    halves = [0.0, 0.65, 0.3, 0.3, 0.27, 0.3, 0.0]
    for k in range(len(stops) - 1):
        arrow(axes, (x, stops[k] + halves[k]), (x, stops[k + 1] - halves[k + 1]), "-")
    side, y = x - 1.2, HEIGHTS["add"]
    axes.plot([x, side, side], [1.1, 1.1, y], color="gray", linestyle="--", linewidth=1.4, zorder=4)
    arrow(axes, (side, y), (x - 0.27, y), "--")


def arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float], line: str) -> None:
    style = {"arrowstyle": "-|>", "color": "gray" if line == "--" else "black", "linestyle": line, "linewidth": 1.4}
    axes.annotate("", xy=end, xytext=begin, arrowprops=style | {"shrinkA": 0, "shrinkB": 0}, zorder=1)


def draw_box(axes: Axes, box: Box, x: float) -> None:
    y, light = HEIGHTS[box.name], tuple(0.5 + 0.5 * part for part in to_rgb(box.colour))
    look: Any = {"facecolor": light, "edgecolor": "black", "zorder": 2}
    if box.name == "add":
        axes.add_patch(Circle((x, y), 0.27, **look))
    else:
        width, height = (9.4, 1.3) if box.wide else (1.5, 0.6)
        corner = (x - width / 2, y - height / 2)
        axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle="round,pad=0,rounding_size=0.1", **look))
    ground: Any = {"facecolor": light, "edgecolor": "none", "pad": 2} if box.wide else None
    axes.text(x + 0.85 * box.wide, y, box.text, ha="center", va="center", zorder=5, bbox=ground)
