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
from limitformer.results.datasets import correlation
from limitformer.weightless import shapes, simulate
from limitformer_papers.common.claims import Claim, FigureRun

PATCHES = ("vit",)  # tokens are patches of one image, not ids
PLAIN = ("llama-3-8b", "llama-3-405b", "command-r", "llama-3.2-1b")  # two matrices between the norm and the logits
NORMED = ("qwen3-8b", "gemma-3-1b", "olmo-2-7b", "qwen3-0.6b")  # queries and keys are normalised
ENCODERS = ("bert-large", "vit-large", "modernbert-large", "t5-large")
CAPPED = ("gemma-2-9b",)
ROWS = (
    ("size", "root mean square\nof the stream", "log"),
    ("correlation", "mean correlation\nof tokens", "linear"),
    ("logit_std", "standard deviation\nof logits", "log"),
    ("effective_tokens", "effective tokens,\nexp of the entropy", "log"),
    ("stream_gradient", "gradient of the\nstream, last = 1", "log"),
)


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
    last = {key: data[key].dropna(data[key].dims[0]) for key, _, _ in ROWS}
    statements = [
        Claim(f"{name}: logit std, first block", float(last["logit_std"][0])),
        Claim(f"{name}: effective tokens, last block", float(last["effective_tokens"][-1])),
        Claim(f"{name}: mean correlation at the end", float(last["correlation"][-1])),
        Claim(f"{name}: stream at the end over start", float(last["size"][-1] / last["size"][0])),
    ]
    gradient = last["stream_gradient"]
    return statements + ([Claim(f"{name}: gradient, start over end", float(gradient[0]))] if gradient.size else [])


def draw(data: xr.Dataset) -> Figure:
    """Draw a column of panels for each group; a panel has the curves of the group over those of all models, in grey."""
    columns = groups([str(name) for name in data.model.values])
    figure, axes = panels(len(columns), height=2.1, rows=len(ROWS))
    axes = np.reshape(axes, (len(ROWS), len(columns)))
    for row, (key, label, scale) in zip(axes, ROWS, strict=True):
        for panel, names in zip(row, columns.values(), strict=True):
            draw_panel(panel, data[key], names)
            panel.set(yscale=scale, xlabel="part of the depth", ylabel=label)
            panel.label_outer()
    for panel, title in zip(axes[0], columns, strict=True):
        panel.legend(title=title, loc="lower center", bbox_to_anchor=(0.5, 1.02), ncols=2)
    return figure


def groups(models: list[str]) -> dict[str, list[str]]:
    """Return the models of each group that has any, by the group's title."""
    title_of = dict.fromkeys(ENCODERS, "with encoders")
    title_of |= dict.fromkeys((*NORMED, *CAPPED), "decoders, logits normed or capped")
    result: dict[str, list[str]] = {}
    for name in models:
        result.setdefault(title_of.get(name, "decoders, neither norm nor cap"), []).append(name)
    return result


def draw_panel(axes: Axes, curves: xr.DataArray, names: list[str]) -> None:
    for name in curves.model.values:
        axes.plot(*by_part(curves, name), color="0.82", linewidth=0.8)
    for k, name in enumerate(names):
        every = (k / len(names) / 4, 0.25)  # of the curve's length, apart from the others' marks
        look: Any = {"color": PALETTE[k], "marker": MARKERS[k % len(MARKERS)], "linestyle": ("-", "--")[k % 2]}
        axes.plot(*by_part(curves, name), label=name, markevery=every, markersize=4, linewidth=1.5, **look)


def by_part(curves: xr.DataArray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the part of the depth, 0 to 1, and the model's curve."""
    curve = curves.sel(model=name).dropna(curves.dims[-1])
    return np.linspace(0, 1, curve.size), curve.values
