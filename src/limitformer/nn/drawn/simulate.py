r"""Many random networks at once, without gradients: every weight drawn, every token moved.

A batch of networks holds the weights of one layer only, drawn anew for each layer, so memory does not grow with
depth. Tokens start at X₀ = √n R₀ Q with R₀R₀ᵀ = V₀ and Q in a uniformly random position (`limitformer.models.start`).
"""

import time
from typing import Annotated, Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import ArrayLike
from torch import Tensor

from limitformer.base.errors import InputError, require, require_count
from limitformer.base.memory import check_recording, check_scratch
from limitformer.base.progress import track
from limitformer.covariance.chain.own import mark_own_exits
from limitformer.covariance.chain.start import start_factor
from limitformer.covariance.chain.transformer import subtracts_mean, visibility
from limitformer.models import Mixing, Start, Transformer, as_start
from limitformer.models.serial import describe
from limitformer.nn.drawn.network import Layer, strengths_of
from limitformer.nn.drawn.weights import draw_weights
from limitformer.numerics.random import key
from limitformer.paths.exits import INSIDE, LEFT_BALL
from limitformer.paths.replicas import slices
from limitformer.results.datasets import covariance_dataset
from limitformer.simulation.options import Record
from limitformer.simulation.processes import recorded_layers
from limitformer.simulation.simulate import Interrupted

BATCH_BYTES = 2**27  # of one layer's weights


def simulate(
    model: Transformer,
    start: Start | Annotated[ArrayLike, "tokens tokens"],
    *,
    samples: int,
    seed: int,
    record: Record = None,
    batch: int | None = None,
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    progress: bool = True,
    gradients: bool = False,
) -> xr.Dataset:
    """Simulate `samples` independent networks; the result is laid out as that of `limitformer.simulate`.

    Args:
        model: the Transformer.
        start: a start, or a covariance matrix V₀.
        samples: number of networks.
        seed: the same seed, batch, device and dtype give the same numbers.
        record: layers to keep, ascending; None keeps all.
        batch: networks at a time; None takes as many as have 128 MiB of weights and activations in a layer.
        device: "cpu", "cuda", …; None takes a GPU where there is one.
        dtype: of tokens and weights. Networks that leave its range are marked as exits.
        progress: whether work of more than two seconds shows on the terminal.
        gradients: whether ½|x|² of the last tokens, mean over tokens, is differentiated. These networks are weightless
            (`limitformer.weightless.simulate`): the same law, and `weight_gradient` and `stream_gradient` as norms. The
            chain has them far faster: `limitformer.simulate(model, …, gradients=True)`.

    Raises:
        InputError: an argument that cannot be used.
        Interrupted: Ctrl-C, with the networks of the batches that were finished.
    """
    name = type(model).__name__
    require(isinstance(model, Transformer), f"Networks are drawn of a Transformer; got {name}. Nearest: lf.simulate.")
    real = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
    require(real, f"dtype must be a real one of torch with 16 bits or more, such as torch.float32; got {dtype!r}.")
    start = as_start(start)
    if type(model.attention) is Mixing:
        model.attention.require_tokens(visibility(model, start.tokens))
    samples = require_count("samples", samples)
    layers = recorded_layers(model, record)
    check_recording(samples, len(layers), start.tokens, "depth")
    if gradients:
        require(batch is None, "batch is for networks whose weights are drawn; with gradients it must be None.")
        options = {"samples": samples, "seed": seed, "device": device, "dtype": dtype, "progress": progress}
        return with_gradients(model, start, layers, options)
    draw = TokenLaw(start, model)
    device = resolve_device(device)
    batch = networks_in_batch(model, start.tokens, dtype) if batch is None else require_count("batch", batch)
    batch = min(samples, batch)

    began = time.perf_counter()
    covariance = np.empty((samples, len(layers), start.tokens, start.tokens))
    exits, causes = np.full(samples, np.inf), np.full(samples, INSIDE, np.int8)

    def dataset(finished: int) -> xr.Dataset:
        provenance = {
            "model": describe(model),
            "description": "network",
            "start": start.description,
            "seed": seed,
            "samples": finished,
            "batch": batch,
            "device": device,
            "weights_dtype": str(dtype),
            "wall_seconds": time.perf_counter() - began,
        }
        whole = covariance[:finished], exits[:finished], causes[:finished]
        return covariance_dataset(*whole, axis="depth", points=layers, start=start, provenance=provenance)

    finished, parts = 0, slices(0, samples, batch)
    try:
        for part in track(parts, "batches of networks") if progress else parts:
            generator = torch.Generator(device).manual_seed(torch_seed(seed, f"network {part.start}"))
            v, exit_layers = run_batch(model, draw, part.stop - part.start, layers, generator, dtype)
            covariance[part] = v
            exits[part] = exit_layers
            causes[part] = np.where(np.isfinite(exit_layers), LEFT_BALL, INSIDE)
            outputs = {"covariance": v, "exits": exit_layers, "causes": causes[part]}
            mark_own_exits(model, outputs, layers[-1])
            finished = part.stop
    except KeyboardInterrupt as interrupt:
        raise Interrupted(dataset(finished)) from interrupt
    return dataset(samples)


def with_gradients(model: Transformer, start: Start, layers: np.ndarray, options: dict[str, Any]) -> xr.Dataset:
    """Weightless networks, laid out as others: `depth` for the layers that are recorded."""
    from limitformer.weightless import simulate as simulate_weightless  # which stands on this package

    def laid_out(found: xr.Dataset) -> xr.Dataset:
        return found.rename(layer="depth").sel(depth=layers).assign_attrs(model=describe(model))

    try:
        return laid_out(simulate_weightless(model, start, gradients=True, **options))
    except Interrupted as interrupt:
        raise Interrupted(laid_out(interrupt.partial)) from interrupt


class TokenLaw:
    """Input tokens X₀ = √n R₀ Q: R₀ as the chain has it, Q in a random position for each network.

    Args:
        start: the start.
        model: whose width the tokens have; under a LayerNorm they get the start's means where those are given.
    """

    def __init__(self, start: Start, model: Transformer) -> None:
        with_means = subtracts_mean(model)
        self.factor, turned = start_factor(start, model.width, with_means)
        self.means_first = with_means and not turned
        self.width = model.width

    def tokens(self, networks: int, generator: torch.Generator) -> Tensor:
        """X₀ (networks, tokens, width) in float64."""
        options: dict[str, Any] = {"dtype": torch.float64, "device": generator.device}
        directions = torch.randn(networks, self.width, self.factor.shape[1], generator=generator, **options)
        if self.means_first:
            directions[..., 0] = 1.0  # the vector of ones comes first, the others are orthogonal to it
        return self.width**0.5 * torch.tensor(self.factor, **options) @ orthonormal(directions).mT


def resolve_device(device: str | None) -> str:
    """`device`, or the fastest that there is; `InputError` for one that torch does not have."""
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"device must be one that torch can use here, such as cpu; got {device!r}: {reason}"
        ) from error
    require(torch.device(device).type != "meta", "device must be one that holds numbers; got 'meta'. Nearest: cpu.")
    return str(device)


def networks_in_batch(model: Transformer, tokens: int, dtype: torch.dtype) -> int:
    """How many networks' layers have `BATCH_BYTES` of weights and activations."""
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in Layer(model).named_parameters()}
    weights = sum(shape.numel() for shape in shapes.values())
    widest = max(shape[-1] for shape in shapes.values())
    heads = 1 if model.attention is None else model.attention.heads or 1
    activations = 4 * tokens * max(widest, model.width) + 2 * heads * tokens**2
    size = (weights + activations) * dtype.itemsize
    check_scratch(size, f"A layer of width {model.width:,}", "a smaller width, or its chain")
    return max(1, BATCH_BYTES // size)


def torch_seed(seed: int, purpose: str) -> int:
    """A 63-bit seed of torch's generators for one purpose, such as the batch that begins at network 12."""
    low, high = key(seed, purpose)
    return low | (high >> 1) << 32


@torch.no_grad()
def run_batch(
    model: Transformer,
    draw: TokenLaw,
    networks: int,
    layers: np.ndarray,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> tuple[np.ndarray, np.ndarray]:
    """V (networks, layers, m, m) and the layer at which a network left the range of `dtype` (∞ if none).

    A network that left keeps its last finite covariance.
    """
    x = draw.tokens(networks, generator)
    held, x = gram(x).to(dtype), x.to(dtype)
    layer = Layer(model, (networks,)).to(device=generator.device, dtype=dtype)
    strengths = strengths_of(model)
    recorded: list[Tensor] = []
    inside, exits = torch.ones(networks, dtype=torch.bool, device=x.device), torch.full((networks,), torch.inf)
    for depth in range(model.depth + 1):
        if depth > 0:
            draw_weights(layer, generator)
            layer.strengths = strengths[depth - 1]
            x = layer(x)
        v = gram(x)
        inside &= v.isfinite().all((-1, -2))
        held = torch.where(inside[:, None, None], v, held)
        exits[(~inside.cpu()) & exits.isinf()] = depth
        if depth in layers:
            recorded.append(held.cpu())
    return torch.stack(recorded, 1).double().numpy(), exits.double().numpy()


def gram(x: Tensor) -> Tensor:
    """V = XXᵀ/n: (*, m, n) to (*, m, m)."""
    return x @ x.mT / x.shape[-1]


def orthonormal(directions: Tensor) -> Tensor:
    """Q of directions (*, n, k) = Q R with a positive diagonal of R.

    With that sign, Q of a Gaussian matrix is Haar distributed; LAPACK's own choice of signs makes it depend on the
    first coordinates [Mezzadri, *How to generate random matrices from the classical compact groups*, 2007].
    """
    q, r = torch.linalg.qr(directions)
    return q * r.diagonal(dim1=-2, dim2=-1).sgn()[..., None, :]
