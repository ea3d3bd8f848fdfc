r"""The fate of a real text's tokens: mean correlation matrix at a few depths, shaped against unshaped.

The Transformers are those of [ST, Fig. 1]; the text is the beginning of *The Zen of Python* (PEP 20, public domain),
each distinct word one random embedding, so repeated words begin, and stay, identical.
"""

from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import xarray as xr
from matplotlib.figure import Figure

from limitformer.base.progress import track
from limitformer.models import ShapedAttention, ShapedReLU, SoftmaxAttention, Transformer, from_text
from limitformer.plot import heatmap, panels
from limitformer.results.datasets import correlation
from limitformer_papers.common.claims import Claim, FigureRun, chain

WORDS = 7.5  # points: 24 words fit next to a panel
ZEN = Path(__file__).parents[1] / "data" / "zen-of-python.txt"


@dataclass(frozen=True, kw_only=True)
class Config:
    """The Transformers of [ST, Fig. 1], and the tokens, depths and samples."""

    width: int = 200
    depth: int = 150
    gamma: float = 1 / sqrt(8)
    tau0: float = 1.0
    c_plus: float = 0.0
    c_minus: float = -1.0
    tokens: int = 24
    depths: tuple[int, ...] = (0, 10, 40, 150)
    samples: int = 256


paper = Config


def quick() -> Config:
    return Config(samples=16)


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return `correlation` (model, depth, token, token_), the mean over the samples."""
    text = ZEN.read_text(encoding="utf-8").split("\n", 2)[2]  # without the title
    start = from_text(text, width=config.width, tokens=config.tokens, seed=run.seed)
    feedforward = ShapedReLU(c_plus=config.c_plus, c_minus=config.c_minus)
    attentions = {"shaped": ShapedAttention(tau0=config.tau0), "unshaped": SoftmaxAttention()}
    parts = []
    for attention in track(list(attentions.values()), "models"):
        model = Transformer(
            width=config.width, depth=config.depth, gamma=config.gamma, attention=attention, feedforward=feedforward
        )
        rho = correlation(chain(model, start, config.samples, run, list(config.depths)))
        parts.append(rho.mean("sample"))
    return xr.concat(parts, xr.DataArray(list(attentions), dims="model", name="model")).to_dataset()


def between_words(data: xr.Dataset) -> xr.DataArray:
    """Return the mean correlation of different words (model, depth)."""
    words = data.label.values
    different = xr.DataArray(words[:, None] != words[None], dims=("token", "token_"))
    return data["correlation"].where(different).mean(("token", "token_"))


def claims(data: xr.Dataset) -> list[Claim]:
    """Unshaped, all words become alike; shaped, they stay apart; equal words stay equal in both."""
    last = between_words(data).isel(depth=-1)
    shaped, unshaped = float(last.sel(model="shaped")), float(last.sel(model="unshaped"))
    words = data.label.values
    same = xr.DataArray(words[:, None] == words[None], dims=("token", "token_"))
    apart = float((1 - data["correlation"].where(same)).max())
    return [
        Claim("mean correlation of different words at the last depth, shaped", shaped, shaped < 0.5),
        Claim("mean correlation of different words at the last depth, unshaped", unshaped, unshaped > 0.99),
        Claim("largest 1 − ρ between two places of one word, any depth", apart, apart < 1e-9),
    ]


def draw(data: xr.Dataset) -> Figure:
    figure, axes = panels(data.sizes["depth"], height=3.0, rows=2)
    words = data.label.values
    for row, model in enumerate(data.model.values):
        for column, depth in enumerate(data.depth.values):
            one, rho = axes[row, column], data["correlation"].sel(model=model, depth=depth)
            image = heatmap(one, rho, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
            one.set_title(f"{model}, layer {depth}")
            one.set(xticks=[], xlabel="token" if row else "", ylabel="" if column else "token")
            one.set_yticks(range(len(words)) if column == 0 else [])
            if column == 0:
                one.set_yticklabels(words, fontsize=WORDS)
    figure.colorbar(image, ax=axes, label="mean correlation", shrink=0.7)
    return figure
