r"""[ST, Fig. 2]: norms of gradients at initialisation, of value and of query weights, by layer.

The caption has the architecture of Figure 1, here that of its left panel (attention and shaped ReLU, n = 200, d = 150,
γ = 1/√8, τ₀ = 1), with a causal mask, and next-token prediction on code. Four Transformers [ST, eq. 11]: shaped;
Pre-LN and Post-LN with λ = γ = 1, the stock blocks; and unshaped without normalisation, λ² + γ² = 1, as in Figure 1.
The caption leaves open, and this figure takes:

* weights are N(0, 1), scales are outside (`limitformer.nn.Network`): with the scales inside, gradients are √n times as
  large (n^{3/4} for shaped queries), in all layers alike;
* embedding: one N(0, 1) vector for each token of the vocabulary, no positions; head: logits X W/√n, W of N(0, 1), after
  a last LayerNorm in Pre-LN; loss: mean cross-entropy of the next token over the batch;
* data: Python's standard library, a byte-level BPE of 1024 tokens, sequences of 64 at random.

‖∂L/∂W‖ is the Frobenius norm. Everything is float64, and tokens are carried as differences from the first one
(`differences_of_tokens`): otherwise the query gradients of Post-LN are rounding from layer 80 on.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from limitformer.nn import Network  # first: without torch its error names the missing extra

# isort: split
import torch
from torch import Tensor
from torch.nn import functional

from limitformer.base.progress import track
from limitformer.models import ShapedAttention, ShapedReLU, SoftmaxAttention, Transformer
from limitformer.nn.drawn import Norm
from limitformer.plot import BLUE, GREEN, ORANGE, RED, legend_below, panels
from limitformer_papers.common.claims import Claim, FigureRun
from limitformer_papers.shaped_transformer.differences_of_tokens import apart, run
from limitformer_papers.training.data.corpus import read_corpus
from limitformer_papers.training.data.sequences import Sequences, packed
from limitformer_papers.training.data.tokenizer import train_tokenizer
from limitformer_papers.training.harness import threads

SHAPED, PRE_LN, POST_LN, UNSHAPED = "shaped", "Pre-LN", "Post-LN", "unshaped, no norm"
WEIGHTS = ("value", "query")
LOOKS = {SHAPED: (BLUE, "-"), PRE_LN: (GREEN, "--"), POST_LN: (ORANGE, "-."), UNSHAPED: (RED, ":")}
STABLE = 5  # largest over smallest norm of all layers
# Largest ratio of last to first layer of a gradient that vanishes, as the caption says; at most 1/STABLE.
VANISHED = {(POST_LN, "query"): 1e-6, (UNSHAPED, "query"): 0.1, (PRE_LN, "value"): 0.2, (PRE_LN, "query"): 0.1}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The caption's parameters, and from `vocabulary` on those that it leaves open."""

    width: int = 200
    depth: int = 150
    gamma: float = 1 / sqrt(8)
    tau0: float = 1.0
    c_plus: float = 0.0
    c_minus: float = -1.0
    vocabulary: int = 1024
    length: int = 64
    batch: int = 2
    documents: int | None = None
    samples: int = 16


paper = Config


def quick() -> Config:
    return Config(width=100, depth=75, samples=8, length=16, documents=40)


def models(config: Config) -> dict[str, Transformer]:
    common: dict[str, Any] = {
        "width": config.width,
        "depth": config.depth,
        "feedforward": ShapedReLU(c_plus=config.c_plus, c_minus=config.c_minus),
        "mask": "causal",
    }
    stock: dict[str, Any] = common | {"gamma": 1.0, "lam": 1.0, "attention": SoftmaxAttention()}
    return {
        SHAPED: Transformer(**common, gamma=config.gamma, attention=ShapedAttention(tau0=config.tau0)),
        PRE_LN: Transformer(**stock, norm="pre"),
        POST_LN: Transformer(**stock, norm="post"),
        UNSHAPED: Transformer(**common, gamma=config.gamma, attention=SoftmaxAttention()),
    }


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return `norm` (model, weight, sample, layer) of gradients; models share each sample's weights and sequences."""
    sequences = code(config)
    named = list(models(config).items())
    with threads(1):  # the number of threads changes the last bits of sums
        norms = [
            [gradient_norms(model, sequences, config, seed) for seed in seeds(run.seed, config.samples)]
            for _, model in track(named, "models")
        ]
    return xr.Dataset(
        {"norm": (("model", "weight", "sample", "layer"), np.moveaxis(np.array(norms), 2, 1), {"units": "1"})},
        coords={"model": [name for name, _ in named], "weight": list(WEIGHTS), "layer": np.arange(1, config.depth + 1)},
    )


def code(config: Config) -> Sequences:
    """Return sequences one token longer than the input: the last token is only predicted."""
    corpus = read_corpus("stdlib", documents=config.documents)
    return packed(corpus.train, train_tokenizer(corpus.train, config.vocabulary), config.length + 1)


def seeds(seed: int, samples: int) -> list[int]:
    """Return one seed for each sample."""
    return [int(k) for k in np.random.SeedSequence(seed).generate_state(samples, np.uint64) >> np.uint64(1)]


def gradient_norms(model: Transformer, sequences: Sequences, config: Config, seed: int) -> NDArray[np.float64]:
    """Return ‖∂L/∂W‖ of one network on one batch: (weight, layer)."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(sequences), (config.batch,), generator=generator)
    ids = torch.stack([sequences[int(k)]["input_ids"] for k in chosen])
    embedding = normal(config.vocabulary, config.width, generator=generator)
    head = normal(config.width, config.vocabulary, generator=generator)
    network = Network(model, generator).double()
    loss(network, model, embedding[ids[:, :-1]], head, ids[:, 1:]).backward()
    return np.array([[norm_of(layer, name) for layer in network.layers] for name in WEIGHTS])


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def loss(network: Network, model: Transformer, x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token, from embedded tokens (b, m, n)."""
    hidden = run(network, apart(x)).whole()
    if model.normalisation is not None and model.normalisation.placement == "pre":
        hidden = Norm(model.normalisation)(hidden)
    logits = hidden @ head / sqrt(model.width)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def norm_of(layer: Any, name: str) -> float:
    gradient = getattr(layer.attention, name).grad
    return float(torch.linalg.vector_norm(gradient))


def typical(data: xr.Dataset, model: str, weight: str) -> xr.DataArray:
    """Return exp of the mean log norm over the samples, by layer: norms of one layer differ by factors."""
    logarithm = logarithms(data).sel(model=model, weight=weight)
    norms: xr.DataArray = xr.apply_ufunc(np.exp, logarithm.mean("sample"))
    return norms


def logarithms(data: xr.Dataset) -> xr.DataArray:
    logarithm: xr.DataArray = xr.apply_ufunc(np.log, data["norm"])
    return logarithm


def claims(data: xr.Dataset) -> list[Claim]:
    """Return the caption's statements as numbers."""
    cases = [(str(name), weight) for name in data.model.values for weight in WEIGHTS]
    ratios = [fall(name, weight, typical(data, name, weight)) for name, weight in cases]
    calm = ((SHAPED, "value"), (SHAPED, "query"), (POST_LN, "value"))
    stable = [stability(f"{weight} gradient, {name}", typical(data, name, weight)) for name, weight in calm]
    return [*ratios, *stable, first_layer(data), *powers(data)]


def fall(name: str, weight: str, norms: xr.DataArray) -> Claim:
    ratio, bound = float(norms[-1] / norms[0]), VANISHED.get((name, weight))
    what = f"last over first layer, {weight} gradient, {name}"
    return Claim(what, ratio) if bound is None else Claim(f"{what}: vanishes, below {bound:g}", ratio, ratio < bound)


def stability(what: str, norms: xr.DataArray) -> Claim:
    value = float(norms.max() / norms.min())
    return Claim(f"largest over smallest of all layers, {what}: stable, below {STABLE}", value, value < STABLE)


def first_layer(data: xr.Dataset) -> Claim:
    """Tokens that have collapsed at the last layer make even the first layer's query gradients vanish."""
    ratio = float(typical(data, POST_LN, "query")[0] / typical(data, SHAPED, "query")[0])
    return Claim(f"first layer, query gradient, {POST_LN} over {SHAPED}: vanishes, below 0.001", ratio, ratio < 1e-3)


def powers(data: xr.Dataset) -> list[Claim]:
    """Pre-LN falls as a power of the layer, not exponentially."""
    name = f"power p of a fall as ℓᵖ, {PRE_LN}"
    return [Claim(f"{name}, {weight} gradient", slope(typical(data, PRE_LN, weight))) for weight in WEIGHTS]


def slope(norms: xr.DataArray) -> float:
    """Return p of the best fit ‖∂L/∂W_ℓ‖ ∝ ℓᵖ, from layer 5 on."""
    later = norms[4:]
    return float(np.polyfit(np.log(later.layer), np.log(later), 1)[0])


def draw(data: xr.Dataset) -> Figure:
    """Draw both panels of the paper, and the second again without Post-LN, whose decades hide the others."""
    figure, axes = panels(3, height=3.9)
    names = [str(name) for name in data.model.values]
    panel(axes[0], data, "value", names)
    panel(axes[1], data, "query", names)
    panel(axes[2], data, "query", [name for name in names if name != POST_LN])
    axes[2].set_title(f"query weights, without {POST_LN}")
    legend_below(figure, 4, handles=axes[0].get_legend_handles_labels()[0], handlelength=3)
    return figure


def panel(axes: Axes, data: xr.Dataset, weight: str, names: list[str]) -> None:
    """Draw geometric means over the samples by layer, with two standard errors."""
    logarithm = logarithms(data).sel(weight=weight)
    mean, error = logarithm.mean("sample"), logarithm.std("sample", ddof=1) / sqrt(data.sizes["sample"])
    for name in names:
        middle, half = mean.sel(model=name), 2 * error.sel(model=name)
        colour, line = LOOKS[name]
        axes.plot(data.layer, np.exp(middle), color=colour, linestyle=line, label=name)
        axes.fill_between(
            data.layer, np.exp(middle - half), np.exp(middle + half), color=colour, alpha=0.15, linewidth=0
        )
    axes.set(xlabel="layer ℓ", ylabel=rf"$\|\partial L/\partial W^{weight[0].upper()}_\ell\|$", yscale="log")
    axes.set_title(f"{weight} weights")
