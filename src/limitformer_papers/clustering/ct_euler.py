r"""[CT, Sec. 4.1]: noise that is tangential leaves the sphere.

The paper's warning: dXⁱ = P⊥[dW A(Xⁱ)], "a naive approach", is tangential at every moment and yet not on the sphere. By
Itô's formula, with P⊥ the projection onto the space orthogonal to Xⁱ,

  d|Xⁱ|² = 2⟨Xⁱ, dXⁱ⟩ + (d − 1) σ² |Aⁱ|² dt = (d − 1) σ² |Aⁱ|² dt.

Left, the paper's illustration on the circle, dX = (−X₂, X₁) dW/|X|, for which d|X|² = dt: |X_t|² = 1 + t. An Euler step
adds g² dt to |X|², so E|X_t|² = 1 + t at every dt, and |X_t|² → 1 + t on every path as dt → 0. Middle and right, tokens
in dimension d, by three schemes:

  naive        X + √dt P⊥[G A]                                  leaves at once, at every dt;
  Euler        X − ½(d − 1)σ²|A|² X dt + √dt P⊥[G A]  [CT, eq. 6]  stays for dt → 0 (Lemma 1), leaves for dt > 0;
  normalised   (X + √dt G A)/|X + √dt G A|            [CT, eq. 4]  stays: a layer with L = 1/dt.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from numpy.typing import NDArray

from limitformer.models import StochasticTransformer
from limitformer.plot import BLACK, BLUE, ORANGE, RED, legend_below, panels
from limitformer.simulation.processes import limit
from limitformer.sphere.limit import TokenLimit
from limitformer_papers.clustering.sphere import tokens_chain
from limitformer_papers.common.claims import Claim, FigureRun

Array = NDArray[np.float64]
NAIVE, EULER, NORMALISED = "naive", "Euler", "normalised"
LOOKS: dict[str, dict[str, Any]] = {
    NAIVE: {"color": RED, "linestyle": "-"},
    NORMALISED: {"color": BLUE, "linestyle": "-."},
    EULER: {"color": ORANGE, "linestyle": "--"},
}
ITO: dict[str, Any] = {"color": BLACK, "linestyle": ":"}
PATH: dict[str, Any] = {"color": "gray", "linewidth": 0.7}
PATHS = 4  # drawn


@dataclass(frozen=True, kw_only=True)
class Config:
    """N, d, β (σ = 1), the time, steps of Euler from coarse to fine, and trajectories; the paper has no numbers."""

    tokens: int = 3
    dim: int = 4
    beta: float = 1.0
    time: float = 1.0
    steps: tuple[int, ...] = (25, 100, 400)
    samples: int = 2000


paper = Config


def quick() -> Config:
    return Config(samples=400)


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Circle: |X|² by time, `circle_mean` (point,) and `circle_paths` (point, path), and `circle_end` (sample,).

    Tokens: the mean |X| at the end, `length` (scheme, steps, sample), the largest ||X| − 1| then, `deviation`;
    `mean_length` (scheme, point) by time at the finest step, and d|X|²/dt in the first one, `growth` (sample, token).
    """
    model = StochasticTransformer(
        tokens=config.tokens, dim=config.dim, beta=config.beta, layers_per_unit_time=config.steps[-1]
    )
    start = tokens_in_general_position(config)
    schemes: dict[str, list[Array]] = {name: [] for name in (NAIVE, EULER, NORMALISED)}
    for steps in config.steps:
        schemes[NAIVE].append(lengths(config, model, start, steps, run.seed, drifting=False))
        schemes[EULER].append(lengths(config, model, start, steps, run.seed, drifting=True))
        schemes[NORMALISED].append(normalised(config, model, start, steps, run))
    ends = np.array([[one[-1] for one in runs] for runs in schemes.values()])  # (scheme, steps, sample, token)
    finest = np.array([runs[-1].mean((1, 2)) for runs in schemes.values()])
    first, circle = schemes[NAIVE][-1][1], on_circle(config, run.seed)
    sde = limit(model)
    assert isinstance(sde, TokenLimit)
    growth = (config.dim - 1) * (sde.attention(start) ** 2).sum(1)  # by Itô's formula
    return xr.Dataset(
        {
            "circle_mean": ("point", circle.mean(1)),
            "circle_paths": (("point", "path"), circle[:, :PATHS]),
            "circle_end": ("sample", circle[-1]),
            "length": (("scheme", "steps", "sample"), ends.mean(-1)),
            "deviation": (("scheme", "steps", "sample"), np.abs(ends - 1).max(-1)),
            "mean_length": (("scheme", "point"), finest),
            "growth": (("sample", "token"), (first**2 - 1) * config.steps[-1] / config.time),
        },
        coords={
            "scheme": list(schemes),
            "steps": list(config.steps),
            "time": ("point", np.linspace(0, config.time, config.steps[-1] + 1)),
        },
        attrs={"growth": growth.tolist(), "time": config.time},
    )


def tokens_in_general_position(config: Config) -> Array:
    """Return unit vectors (N, d), the same for every seed: trajectories differ by their noise only."""
    x = np.random.Generator(np.random.Philox(1)).standard_normal((config.tokens, config.dim))
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))


def on_circle(config: Config, seed: int) -> Array:
    """Return |X|² (point, sample) of dX = (−X₂, X₁) dW/|X|, by Euler at the finest step."""
    steps = config.steps[-1]
    normals = np.random.Generator(np.random.Philox([seed, 2])).standard_normal((steps, config.samples))
    x = np.zeros((config.samples, 2))
    x[:, 0] = 1.0
    squares = [np.ones(config.samples)]
    for g in normals:
        turned = np.stack([-x[:, 1], x[:, 0]], axis=1) / np.linalg.norm(x, axis=1, keepdims=True)
        x = x + (config.time / steps) ** 0.5 * g[:, None] * turned
        squares.append((x**2).sum(1))
    return np.stack(squares)


def lengths(
    config: Config, model: StochasticTransformer, start: Array, steps: int, seed: int, *, drifting: bool
) -> Array:
    """Return |X| (step, sample, token) by Euler, with the drift of [CT, eq. 6] or, naively, without."""
    random, dt = np.random.Generator(np.random.Philox([seed, steps])), config.time / steps
    x = np.broadcast_to(start, (config.samples, *start.shape)).copy()
    norms = [np.linalg.norm(x, axis=-1)]
    for _ in range(steps):
        a = attention(x, model.beta)
        noise = a @ random.standard_normal((config.samples, model.dim, model.dim))  # rows (G A)ᵀ of one G
        along = (x * noise).sum(-1, keepdims=True) / (x * x).sum(-1, keepdims=True)
        drift = (1 - model.dim) / 2 * (a * a).sum(-1, keepdims=True) * x if drifting else 0.0
        x = x + drift * dt + dt**0.5 * (noise - along * x)
        norms.append(np.linalg.norm(x, axis=-1))
    return np.stack(norms)


def attention(x: Array, beta: float) -> Array:
    """Return A(Xⁱ) (sample, N, d) at X (sample, N, d) [CT, eq. 2], Q = K = I."""
    logits = beta * x @ np.swapaxes(x, -1, -2)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True) @ x)


def normalised(config: Config, model: StochasticTransformer, start: Array, steps: int, run: FigureRun) -> Array:
    """Return |X| (step, sample, token) by `steps` of the library's own layers."""
    per_unit = replace(model, layers_per_unit_time=round(steps / config.time))
    times = np.linspace(0, config.time, steps + 1)
    samples = tokens_chain(per_unit, times, config.samples, run, start=start, keep="tokens")
    return np.asarray(np.linalg.norm(samples["tokens"].values, axis=-1).swapaxes(0, 1))


def claims(data: xr.Dataset) -> list[Claim]:
    """The naive scheme leaves as Itô's formula says, at every step; Euler's error falls with dt; the layer stays."""
    last, samples = data["circle_end"], data.sizes["sample"]
    exact = 1 + data.attrs["time"]
    growth, rates = data["growth"], np.asarray(data.attrs["growth"])
    errors = (growth.mean("sample").values - rates) / (growth.std("sample").values / samples**0.5)
    mean = data["length"].mean("sample")
    euler = data["deviation"].sel(scheme=EULER).mean("sample").values
    order = float(np.log(euler[0] / euler[-1]) / np.log(data["steps"].values[-1] / data["steps"].values[0]))
    off = float(data["deviation"].sel(scheme=NORMALISED).max())
    return [
        Claim(
            f"circle: mean |X|² at t = {data.attrs['time']:g} (Itô: {exact:g})",
            float(last.mean()),
            bool(abs(float(last.mean()) - exact) < 4 * float(last.std()) / samples**0.5),
        ),
        Claim(
            "tokens, naive: growth of |X|² in the first step, largest standard errors from (d − 1)|A|²",
            float(np.abs(errors).max()),
            bool(np.abs(errors).max() < 4),
        ),
        *(
            Claim(
                f"tokens, naive, {steps} steps: mean length at the end; it leaves",
                float(mean.sel(scheme=NAIVE, steps=steps)),
                bool(mean.sel(scheme=NAIVE, steps=steps) > 1.2),
            )
            for steps in data["steps"].values
        ),
        *(
            Claim(
                f"tokens, Euler with the drift, {steps} steps: mean of the largest ||X| − 1| at the end", float(value)
            )
            for steps, value in zip(data["steps"].values, euler, strict=True)
        ),
        Claim("its order in dt: half", order, 0.4 < order < 0.6),
        Claim("tokens, normalised: largest ||X| − 1|; it stays", off, off < 1e-12),
    ]


def draw(data: xr.Dataset) -> Figure:
    """Draw |X|² on the circle, lengths of tokens by scheme, and distances from the sphere by number of steps."""
    figure, (left, middle, right) = panels(3)
    time, steps, ends = data["time"].values, data["steps"].values, data["deviation"].mean("sample")
    left.plot(time, data["circle_paths"], **PATH)
    left.plot(time, data["circle_mean"], **LOOKS[NAIVE])
    left.plot(time, 1 + time, **ITO)
    for scheme, look in LOOKS.items():
        middle.plot(time, data["mean_length"].sel(scheme=scheme), label=scheme, **look)
        right.loglog(steps, ends.sel(scheme=scheme), marker="o", **look)
    slope, near = float(np.mean(data.attrs["growth"])) / 2, time <= 0.3 * data.attrs["time"]
    middle.plot(time[near], 1 + slope * time[near], label="by Itô's formula", **ITO)
    middle.plot([], [], label="single paths", **PATH)
    right.set_xticks(steps, [str(number) for number in steps])
    right.minorticks_off()
    left.set(xlabel="time t", ylabel="|X|² on the circle")
    middle.set(xlabel="time t", ylabel="mean length |X| of the tokens")
    right.set(xlabel="steps", ylabel="distance from the sphere at the end")
    legend_below(figure, 5, handles=middle.get_legend_handles_labels()[0])
    return figure
