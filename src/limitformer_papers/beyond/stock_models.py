r"""Stock architectures of transformers at their real shapes: exact laws at initialisation, no weight drawn.

Weightless networks (`limitformer.weightless`) of one model of each family, on unrelated tokens: of the stream its root
mean square and its mean correlation between tokens, of the heads the standard deviation of a row's logits and exp of
its entropy (the effective tokens), and |∂L/∂X| of the stream, by block. Where nothing normalises queries and keys, two
unrelated tokens of unit mean square have logits of standard deviation s²n, s the initialiser's range, n the width; the
k visible logits of a row spread around their own mean, which takes 1/k of that variance.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from limitformer.base.progress import track
from limitformer.plot import MARKERS, PALETTE, panels
from limitformer.results.correlation import correlation
from limitformer.weightless import shapes, simulate
from limitformer_papers.common.claims import Claim, FigureRun

PATCHES = ("vit",)  # tokens are patches of one image, not ids
PLAIN = ("llama-3-8b", "llama-3-405b", "command-r", "llama-3.2-1b")  # two matrices between the norm and the logits
NORMED = ("qwen3-8b", "gemma-3-1b", "olmo-2-7b", "qwen3-0.6b")  # queries and keys are normalised
PANELS = (
    ("size", "root mean square of the stream", "log"),
    ("correlation", "mean correlation of tokens", "linear"),
    ("logit_std", "standard deviation of logits", "log"),
    ("effective_tokens", "effective tokens", "log"),
    ("stream_gradient", "gradient of the stream, last = 1", "log"),
)

SYMBOLS = {
    "size": r"$|X|/\sqrt{mn}$",
    "correlation": "ρ",
    "logit_std": "σ",
    "effective_tokens": "exp of the entropy",
    "stream_gradient": r"$|\partial L/\partial X|$",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The models, and how many unrelated tokens they read; gradients are skipped for `only_states`."""

    models: tuple[str, ...]
    only_states: tuple[str, ...] = field(default=())
    tokens: int = 128
    samples: int = 1


def paper() -> Config:
    """Return twelve families and the widest model of all."""
    families = (
        "gpt2-xl", "bert-large", "vit-large", "modernbert-large", "t5-large", "pythia-6.9b", "command-r",
        "gemma-7b", "gemma-2-9b", "gemma-3-1b", "olmo-2-7b", "qwen3-8b", "llama-3-8b", "llama-3-405b",
    )  # fmt: skip
    return Config(models=families, only_states=("llama-3-405b",))


def quick() -> Config:
    return Config(models=("gpt2", "llama-3.2-1b", "qwen3-0.6b"), only_states=("llama-3.2-1b",), tokens=12)


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return the curves of each model by its part of the depth, 0 to 1, and the numbers of its configuration."""
    datasets = [curves(name, config, run.seed) for name in track(config.models, "models")]
    return xr.concat(datasets, xr.Variable("model", list(config.models)), join="outer")


def curves(name: str, config: Config, seed: int) -> xr.Dataset:
    inputs = 1 if name.startswith(PATCHES) else config.tokens
    gradients = name not in config.only_states
    data = simulate(name, inputs, samples=config.samples, seed=seed, gradients=gradients, progress=False)
    data = data.mean("sample", keep_attrs=True)
    variance = np.diagonal(data["covariance"].values, axis1=1, axis2=2)
    nothing = np.full(data.sizes["layer"], np.nan)
    gradient = data["stream_gradient"].values if gradients else nothing
    by_layer = {
        "size": np.sqrt(variance.mean(1)),
        "correlation": mean_correlation(data),
        "stream_gradient": gradient / gradient[-1],
    }
    by_block = {key: data[key].mean("head").values for key in ("logit_std", "effective_tokens")}
    layers, blocks = {"layer": np.arange(data.sizes["layer"])}, {"block": np.arange(1, data.sizes["block"] + 1)}
    shape = shapes()[name]
    width = int(shape.get("hidden_size") or shape.get("n_embd") or shape["d_model"])
    numbers = {"width": width, "tokens": data.sizes["token"], "seconds": data.attrs["wall_seconds"]}
    curves: dict[str, Any] = {key: ("layer", value) for key, value in by_layer.items()}
    return xr.Dataset(curves | {key: ("block", value) for key, value in by_block.items()} | numbers, layers | blocks)


def mean_correlation(data: xr.Dataset) -> np.ndarray:
    """Return the mean correlation of different tokens, by layer."""
    rho = correlation(data)
    others = ~np.eye(data.sizes["token"], dtype=bool)
    return np.asarray(rho.values[..., others].mean(-1))


def claims(data: xr.Dataset) -> list[Claim]:
    names = [str(name) for name in data.model.values]
    width_claims = [one for name in names for one in of_width(data.sel(model=name), name)]
    return width_claims + [one for name in names for one in numbers(data.sel(model=name), name)]


def of_width(data: xr.Dataset, name: str) -> list[Claim]:
    """Compare the first logits with 0.02²·width, or with 1 where queries and keys are normalised."""
    first, width = float(data.logit_std[0] / of_a_row(int(data.tokens))), int(data.width)
    if name in NORMED:
        what = f"{name}, width {width:,}: standard deviation of the first logits, queries and keys normed: 1"
        return [Claim(what, first, abs(first - 1) < 0.1)]
    if name not in PLAIN:
        return []
    predicted, seen = 0.02**2 * width, float(data.effective_tokens[0])
    what = f"{name}, width {width:,}: standard deviation of the first logits over 0.02²·width: 1"
    growth = float(data["size"][1] / data["size"][0])
    return [
        Claim(what, first / predicted, abs(first / predicted - 1) < 0.1),
        Claim(f"{name}: the first block multiplies the stream by 10 or more, and forgets it", growth, growth > 10),
        Claim(f"{name}: effective tokens of the first block", seen),
    ]  # fmt: skip


def of_a_row(tokens: int) -> float:
    """Return √(mean of 1 − 1/k) over the rows of a causal mask that see k = 2, …, m tokens."""
    return float(np.sqrt(np.mean(1 - 1 / np.arange(2, tokens + 1))))


def numbers(data: xr.Dataset, name: str) -> list[Claim]:
    last = {key: data[key].dropna(data[key].dims[0]) for key, _, _ in PANELS}
    statements = [
        Claim(f"{name}: logit std, first block", float(last["logit_std"][0])),
        Claim(f"{name}: effective tokens, last block", float(last["effective_tokens"][-1])),
        Claim(f"{name}: mean correlation at the end", float(last["correlation"][-1])),
        Claim(f"{name}: stream at the end over start", float(last["size"][-1] / last["size"][0])),
    ]
    gradient = last["stream_gradient"]
    return statements + ([Claim(f"{name}: gradient, start over end", float(gradient[0]))] if gradient.size else [])


def draw(data: xr.Dataset) -> Figure:
    figure, axes = panels(3, height=3.3, rows=2)
    every = axes.ravel()
    for panel, (key, title, scale) in zip(every, PANELS, strict=False):
        draw_panel(panel, data, key)
        panel.set(title=title, yscale=scale, xlabel="part of the depth", ylabel=SYMBOLS[key])
    handles, labels = every[0].get_legend_handles_labels()
    every[-1].remove()
    figure.legend(handles, labels, loc="center", bbox_to_anchor=(0.85, 0.27), ncols=2)
    return figure


def draw_panel(axes: Axes, data: xr.Dataset, key: str) -> None:
    for place, name in enumerate(data.model.values):
        curve = data[key].sel(model=name)
        curve = curve.dropna(curve.dims[0])
        part = np.linspace(0, 1, curve.size)
        line = ("-", "--")[place // len(PALETTE)]
        every = (place / 14 / 5, 0.2)  # of the curve's length, apart from the others' marks
        colour, mark = PALETTE[place % len(PALETTE)], MARKERS[place % len(MARKERS)]
        axes.plot(
            part,
            curve,
            color=colour,
            linestyle=line,
            marker=mark,
            markevery=every,
            markersize=4,
            label=str(name),
            linewidth=1.4,
        )
