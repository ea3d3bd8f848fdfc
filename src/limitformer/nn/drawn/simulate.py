r"""Many random networks at once: every weight drawn, every token moved.

A batch of networks holds the weights of one layer only, drawn anew for each layer, so memory does not grow with depth.
With gradients it holds all layers, and the norms come from torch's own backward pass. Tokens start at X₀ = √n R₀ Q with
R₀R₀ᵀ = V₀ and Q uniformly random (`limitformer.models.start`).
"""

import time
from typing import Annotated, Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from limitformer.base.errors import InputError, require, require_count
from limitformer.base.memory import check_bytes, check_scratch
from limitformer.base.progress import track
from limitformer.covariance.chain.own import mark_own_exits
from limitformer.covariance.chain.start import start_factor
from limitformer.covariance.chain.transformer import subtracts_mean, visibility
from limitformer.models import Mixing, Start, Transformer, as_start
from limitformer.models.serial import describe
from limitformer.nn.drawn.network import Layer, draw_weights, strengths_of
from limitformer.numerics.random import key
from limitformer.results.datasets import covariance_dataset, with_gradients
from limitformer.sampling.arrays import Outputs
from limitformer.sampling.exits import INSIDE, LEFT_BALL
from limitformer.sampling.process import Record, recorded_layers
from limitformer.sampling.replicas import slices
from limitformer.simulation.simulate import Interrupted

BATCH_BYTES = 2**27  # weights and activations that a batch of networks holds at a time


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
    """Simulate `samples` independent networks; the Dataset has the layout of `limitformer.simulate`'s.

    Args:
        model: the Transformer.
        start: a start, or a covariance matrix V₀.
        samples: number of networks.
        seed: the same seed, batch, device and dtype give the same numbers.
        record: layers to keep, ascending; None keeps all.
        batch: networks at a time; None takes as many as have 128 MiB of weights and activations.
        device: "cpu", "cuda", …; None takes a GPU where there is one.
        dtype: of tokens and weights. Networks that leave its range are marked as exits.
        progress: whether work of more than two seconds shows on the terminal.
        gradients: whether ½|x|² of the last tokens, averaged over tokens, is differentiated, by autograd through the
            drawn weights. The chain computes the same law far faster, `limitformer.simulate(…, gradients=True)`, and
            weightless networks need less memory, `limitformer.weightless.simulate(…, gradients=True)`.

    Returns:
        Dataset of `covariance` (sample, depth, token, token_), `exit` and `exit_cause` (sample,). With gradients also
        `loss` (sample,) and the norms `stream_gradient` (sample, depth) and `weight_gradient` (sample, weight), NaN for
        a network that left the range of `dtype`.

    Raises:
        InputError: an argument that cannot be used.
        Interrupted: Ctrl-C, with the networks of the batches that were finished.
    """
    name = type(model).__name__
    require(isinstance(model, Transformer), f"Networks are drawn of a Transformer; got {name}. Nearest: lf.simulate.")
    real = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
    require(real, f"dtype must be a real one of torch with 16 bits or more, such as torch.float32; got {dtype!r}.")
    require(isinstance(gradients, bool), f"gradients must be True or False; got {gradients!r}.")
    start = as_start(start)
    if type(model.attention) is Mixing:
        model.attention.require_tokens(visibility(model, start.tokens))
    samples = require_count("samples", samples)
    layers = recorded_layers(model, record)
    check_bytes(8 * start.tokens**2 * samples * len(layers), samples, len(layers), "depth")
    token_law, weights = TokenLaw(start, model), weight_names(model) if gradients else []
    device = resolve_device(device)
    fitting = networks_in_batch(model, start.tokens, dtype, gradients)
    batch = min(samples, fitting if batch is None else require_count("batch", batch))

    began = time.perf_counter()
    outputs: Outputs = {
        "covariance": np.empty((samples, len(layers), start.tokens, start.tokens)),
        "exits": np.empty(samples),
        "causes": np.empty(samples, np.int8),
    }
    if gradients:
        sizes = {"loss": (), "stream_gradient": (len(layers),), "weight_gradient": (len(weights),)}
        outputs |= {name: np.empty((samples, *size)) for name, size in sizes.items()}

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
        done = {name: values[:finished] for name, values in outputs.items()}
        paths = done["covariance"], done["exits"], done["causes"]
        result = covariance_dataset(*paths, axis="depth", points=layers, start=start, provenance=provenance)
        return with_gradients(result, done, weights) if gradients else result

    finished, parts = 0, slices(0, samples, batch)
    try:
        for part in track(parts, "batches of networks") if progress else parts:
            generator = torch.Generator(device).manual_seed(torch_seed(seed, f"network {part.start}"))
            networks = part.stop - part.start
            for name, values in run_batch(model, token_law, networks, layers, generator, dtype, gradients).items():
                outputs[name][part] = values
            finished = part.stop
    except KeyboardInterrupt as interrupt:
        raise Interrupted(dataset(finished)) from interrupt
    return dataset(samples)


class TokenLaw:
    """The law of input tokens X₀ = √n R₀ Q: R₀ as in the chain, Q random for each network.

    Args:
        start: the start; under a LayerNorm the tokens have its means, where it has any.
        model: the Transformer, whose width the tokens have.
    """

    def __init__(self, start: Start, model: Transformer) -> None:
        with_means = subtracts_mean(model)
        self.factor, turned = start_factor(start, model.width, with_means)
        self.means_first = with_means and not turned
        self.width = model.width

    def tokens(self, networks: int, generator: torch.Generator) -> Tensor:
        """Draw X₀ (networks, tokens, width) in float64."""
        options: dict[str, Any] = {"dtype": torch.float64, "device": generator.device}
        directions = torch.randn(networks, self.width, self.factor.shape[1], generator=generator, **options)
        if self.means_first:
            directions[..., 0] = 1.0  # the vector of ones comes first, the others are orthogonal to it
        return self.width**0.5 * torch.tensor(self.factor, **options) @ orthonormal(directions).mT


def resolve_device(device: str | None) -> str:
    """Return `device`, or if it is None a GPU where there is one.

    Raises:
        InputError: torch cannot use it, or it holds no numbers.
    """
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


def weight_names(model: Transformer) -> list[str]:
    with torch.device("meta"):
        names = [name for name, _ in Layer(model).named_parameters()]
    return [f"layers.{depth}.{name}" for depth in range(model.depth) for name in names]


def networks_in_batch(model: Transformer, tokens: int, dtype: torch.dtype, gradients: bool = False) -> int:
    """Return how many networks take `BATCH_BYTES` of weights and activations: of one layer, with gradients of all."""
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in Layer(model).parameters()]
    weights = sum(shape.numel() for shape in shapes)
    widest = max(shape[-1] for shape in shapes)
    heads = 1 if model.attention is None else model.attention.heads or 1
    activations = 4 * tokens * max(widest, model.width) + 2 * heads * tokens**2
    size, what = (weights + activations) * dtype.itemsize, f"A layer of width {model.width:,}"
    if gradients:
        size, what = (2 * model.depth * size, f"Differentiating {model.depth:,} layers of width {model.width:,}")
    check_scratch(size, what, "a smaller width, or its chain")
    return max(1, BATCH_BYTES // size)


def torch_seed(seed: int, purpose: str) -> int:
    """Return a 63-bit seed of torch's generators for one purpose, such as the batch that begins at network 12."""
    low, high = key(seed, purpose)
    return low | (high >> 1) << 32


def run_batch(
    model: Transformer,
    token_law: TokenLaw,
    networks: int,
    recorded: NDArray[np.int64],
    generator: torch.Generator,
    dtype: torch.dtype,
    gradients: bool,
) -> Outputs:
    """Run a batch of networks and return its part of every array.

    A network that leaves the range of `dtype` keeps its last finite covariance, and the layer of its exit.
    """
    x = token_law.tokens(networks, generator)
    finite, x = gram(x).to(dtype), x.to(dtype)
    strengths, stream, layers = strengths_of(model), [x.requires_grad_(gradients)], list[Layer]()
    covariances: list[Tensor] = []
    inside, exits = torch.ones(networks, dtype=torch.bool, device=x.device), torch.full((networks,), torch.inf)
    for depth in range(model.depth + 1):
        if depth > 0:
            if gradients or not layers:
                layers.append(Layer(model, (networks,)).to(device=generator.device, dtype=dtype))
            draw_weights(layers[-1], generator)
            layers[-1].strengths = strengths[depth - 1]
            with torch.set_grad_enabled(gradients):
                x = layers[-1](x)
        if gradients and depth > 0:
            stream.append(x)
        with torch.no_grad():
            v = gram(x)
        inside &= v.isfinite().all((-1, -2))
        finite = torch.where(inside[:, None, None], v, finite)
        exits[(~inside.cpu()) & exits.isinf()] = depth
        if depth in recorded:
            covariances.append(finite.cpu())
    causes = torch.where(exits.isinf(), INSIDE, LEFT_BALL).to(torch.int8)
    values = {"covariance": torch.stack(covariances, 1).double(), "exits": exits.double(), "causes": causes}
    if gradients:
        values |= gradient_norms(stream, recorded, [weight for layer in layers for weight in layer.parameters()], exits)
    outputs = {name: tensor.numpy() for name, tensor in values.items()}
    # From a V below this bound a layer stays within the range of `dtype`, unless a user function leaves it.
    mark_own_exits(model, outputs, recorded[-1], torch.finfo(dtype).max ** 0.25)
    return outputs


def gradient_norms(
    stream: list[Tensor], recorded: NDArray[np.int64], weights: list[nn.Parameter], exits: Tensor
) -> dict[str, Tensor]:
    """Differentiate the loss by `stream`, the tokens (networks, m, n) before each layer and after the last."""
    with torch.enable_grad():  # the caller may have switched gradients off
        loss = stream[-1].double().square().sum((-1, -2)) / (2 * stream[-1].shape[-2])
        total = loss.sum()
    slopes = torch.autograd.grad(total, [*stream, *weights], allow_unused=True, materialize_grads=True)
    norms = torch.stack([slope.double().square().sum((-1, -2)).sqrt() for slope in slopes], 1)
    results = {
        "loss": loss.detach(),
        "stream_gradient": norms[:, torch.as_tensor(recorded)],
        "weight_gradient": norms[:, len(stream) :],
    }
    results = {name: values.cpu() for name, values in results.items()}
    for values in results.values():
        values[exits.isfinite()] = torch.nan
    return results


def gram(x: Tensor) -> Tensor:
    """Compute V = XXᵀ/n: (*, m, n) to (*, m, m)."""
    return x @ x.mT / x.shape[-1]


def orthonormal(directions: Tensor) -> Tensor:
    """Return Q of directions (*, n, k) = Q R with a positive diagonal of R.

    With that sign, Q of a Gaussian matrix is Haar distributed; LAPACK's own choice of signs makes it depend on the
    first coordinates [Mezzadri, *How to generate random matrices from the classical compact groups*, 2007].
    """
    q, r = torch.linalg.qr(directions)
    return q * r.diagonal(dim1=-2, dim2=-1).sgn()[..., None, :]
