r"""[CT, Fig. 1]: RMS normalisation turns the attention field into a tangential one.

Left: A^U_β(X, 𝑿) [CT, eq. 3] on the circle, 𝑿 = (X, X¹, X²), β = 1, Q = K = I. Right: its tangential part P⊥A.
The paper does not say which X¹ and X² it takes. In dimension 2 a tangent has one coordinate, the speed along the
circle; the stable points of the flow dX/dt = P⊥A with X¹ and X² held still are where that falls through 0.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from limitformer.plot import BLUE, GREEN, ORANGE, RED, legend_below, panels
from limitformer_papers.common.claims import Claim, FigureRun

Array = NDArray[np.float64]
SHORTENED = 2.5  # arrows of both panels are shorter than the vectors by this factor
FINE = 3600  # points of the circle that are searched for stable ones
STEPS = (1e-2, 1e-3)  # h of a layer X ← normalised(X + hA), whose error is O(h²)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The caption's β, the angles of X¹ and X² in degrees, and the number of arrows."""

    beta: float = 1.0
    degrees: tuple[float, float] = (20.0, 110.0)
    samples: int = 24


paper = Config


def quick() -> Config:
    return Config(samples=16)


def on_circle(angles: ArrayLike) -> Array:
    angle = np.asarray(angles, np.float64)
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1)


def attention(x: Array, tokens: Array, beta: float) -> Array:
    """Return A^U_β(X, (X, X¹, X²)) (n, 2) of the points `x` (n, 2)."""
    weights = np.exp(beta * x @ tokens.T)
    return np.asarray((np.exp(beta) * x + weights @ tokens) / (1 + len(tokens)))


def projected(x: Array, field: Array) -> Array:
    """Return P⊥A = A − ⟨X, A⟩X, (n, 2)."""
    return field - (x * field).sum(-1, keepdims=True) * x


def normalised(x: Array) -> Array:
    return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return `field` and `tangent` (angle, coordinate), `speed` (fine,) along the circle, `layer_error` (step,)."""
    tokens = on_circle(np.radians(config.degrees))
    angle = np.linspace(0, 2 * np.pi, config.samples, endpoint=False)
    fine = np.linspace(0, 2 * np.pi, FINE, endpoint=False)
    x, all_x = on_circle(angle), on_circle(fine)
    field = attention(x, tokens, config.beta)
    tangent = projected(x, field)
    speed = (attention(all_x, tokens, config.beta) * on_circle(fine + np.pi / 2)).sum(-1)
    errors = [float(np.abs((normalised(x + h * field) - x) / h - tangent).max()) for h in STEPS]
    return xr.Dataset(
        {
            "field": (("angle", "coordinate"), field),
            "tangent": (("angle", "coordinate"), tangent),
            "speed": ("fine", speed),
            "layer_error": ("step", errors),
        },
        coords={"angle": angle, "fine": fine, "step": list(STEPS)},
        attrs={"beta": config.beta, "degrees": list(config.degrees)},
    )


def stable(data: xr.Dataset) -> Array:
    """Return the angles at which the speed falls through 0, in degrees, by linear interpolation."""
    speed, width = data["speed"].values, 360 / data.sizes["fine"]
    after = np.roll(speed, -1)
    falls = (speed > 0) & (after <= 0)
    return np.asarray((np.arange(len(speed)) + speed / np.where(falls, speed - after, 1.0))[falls] * width)


def between(degrees: Array, ends: ArrayLike) -> Array:
    """Return by how many degrees angles lie outside of the shorter arc between two others; 0 inside."""
    first, second = np.asarray(ends, np.float64)
    half = abs((second - first + 180) % 360 - 180) / 2
    middle = np.degrees(np.angle(np.exp(1j * np.radians(first)) + np.exp(1j * np.radians(second))))
    return np.asarray(np.maximum(np.abs((degrees - middle + 180) % 360 - 180) - half, 0))


def claims(data: xr.Dataset) -> list[Claim]:
    """The projection is tangential and shorter, is what a normalised layer does, and leads to the tokens."""
    x = on_circle(data["angle"].values)
    field, tangent = data["field"].values, data["tangent"].values
    radial = float(np.abs((x * tangent).sum(-1)).max())
    longer = float((np.linalg.norm(tangent, axis=-1) - np.linalg.norm(field, axis=-1)).max())
    error, ratio = data["layer_error"].values[-1], data["layer_error"].values[0] / data["layer_error"].values[-1]
    points = stable(data)
    outside = float(between(points, data.attrs["degrees"]).max(initial=0.0)) if len(points) else np.inf
    removed = 1 - float((tangent**2).sum() / (field**2).sum())
    return [
        Claim("largest |⟨X, P⊥A⟩|: the projection is tangential", radial, radial < 1e-14),
        Claim("largest |P⊥A| − |A|: the projection is never longer", longer, longer <= 0),
        Claim(
            f"largest difference of a normalised layer and P⊥A, step {STEPS[-1]:g} (it is of the order of the step)",
            float(error),
            bool(error < 10 * STEPS[-1] and 0.8 < ratio * STEPS[-1] / STEPS[0] < 1.25),
        ),
        Claim(
            "degrees by which a stable point of the flow lies outside of the arc between the tokens",
            outside,
            outside < 0.1,
        ),
        Claim("number of stable points", float(len(points))),
        Claim("share of the field's mean square that the projection takes away", removed),
    ]


def draw(data: xr.Dataset) -> Figure:
    figure, (left, right) = panels(2, height=5.2)
    x = on_circle(data["angle"].values)
    for axes, name, colour in ((left, "field", BLUE), (right, "tangent", RED)):
        scene(axes, data)
        arrows = data[name].values / SHORTENED
        options: Any = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.006, "headwidth": 4, "zorder": 3}
        axes.quiver(*x.T, *arrows.T, color=colour, **options)
    left.set_title("A(X; X, X¹, X²): the attention field")
    right.set_title("P⊥A: its tangential part, to the same scale")
    points = on_circle(np.radians(stable(data)))
    right.plot(*points.T, "*", color=GREEN, markersize=13, zorder=4, label="stable point of the flow")
    legend_below(figure, 2, handles=right.get_legend_handles_labels()[0])
    return figure


def scene(axes: Axes, data: xr.Dataset) -> None:
    axes.plot(*on_circle(np.linspace(0, 2 * np.pi, 361)).T, color="gray", linewidth=1)
    tokens = on_circle(np.radians(data.attrs["degrees"]))
    axes.plot(*tokens.T, "o", color=ORANGE, markersize=9, zorder=4, label="tokens X¹, X²")
    for k, point in enumerate(tokens):
        axes.annotate("X" + "¹²"[k], point * 0.83, ha="center", va="center")
    axes.set(xlim=(-1.8, 1.8), ylim=(-1.8, 1.8), aspect="equal", xlabel="first coordinate", ylabel="second coordinate")
    axes.set(xticks=[-1, 0, 1], yticks=[-1, 0, 1])
