r"""Many random networks at once, without gradients: every weight drawn, every token moved.

A batch of networks holds the weights of one layer only, drawn anew for each layer, so memory does not grow with
depth. Tokens start at X₀ = √n R₀ Q with R₀R₀ᵀ = V₀ and Q in a uniformly random position (`limitformer.models.start`).
"""

import time
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import ArrayLike
from torch import Tensor

from limitformer.engine import Record, recorded_layers
from limitformer.errors import require, require_count
from limitformer.factor import root
from limitformer.models import Start, Transformer, as_start, to_json
from limitformer.nn.network import Layer
from limitformer.nn.weights import draw_weights
from limitformer.progress import tracked
from limitformer.random import key
from limitformer.recording import INSIDE, LEFT_BALL
from limitformer.replicas import slices
from limitformer.results import covariance_dataset

BATCH_BYTES = 2**27  # of one layer's weights


def simulate(
    model: Transformer,
    start: Start | ArrayLike,
    *,
    samples: int,
    seed: int,
    record: Record = None,
    batch: int | None = None,
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    progress: bool = True,
) -> xr.Dataset:
    """Simulate `samples` independent networks; the result is laid out as that of `limitformer.simulate`.

    Args:
        model: the Transformer.
        start: a start, or a covariance matrix V₀ (tokens, tokens).
        samples: number of networks.
        seed: the same seed, batch, device and dtype give the same numbers.
        record: layers to keep, ascending; None keeps all.
        batch: networks at a time; None takes as many as have 128 MiB of weights in a layer.
        device: "cpu", "cuda", …; None takes a GPU where there is one.
        dtype: of tokens and weights. Networks that leave its range are marked as exits.
        progress: whether work of more than two seconds shows on the terminal.

    Raises:
        InputError: an argument that cannot be used.
    """
    start = as_start(start)
    require_count("samples", samples)
    check_rank(start, model.width)
    layers = recorded_layers(model, record)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    batch = min(samples, batch or networks_in_batch(model, dtype))
    require_count("batch", batch)

    began = time.perf_counter()
    covariance = np.empty((samples, len(layers), start.tokens, start.tokens))
    exits, causes = np.full(samples, np.inf), np.full(samples, INSIDE, np.int8)
    parts = slices(0, samples, batch)
    for part in tracked(parts, "batches of networks") if progress else parts:
        generator = torch.Generator(device).manual_seed(batch_seed(seed, part.start))
        v, exit_layers = run_batch(model, start, part.stop - part.start, layers, generator, dtype)
        covariance[part] = v
        exits[part] = exit_layers
        causes[part] = np.where(np.isfinite(exit_layers), LEFT_BALL, INSIDE)
    return covariance_dataset(
        covariance,
        exits,
        causes,
        axis="depth",
        points=layers,
        labels=start.labels,
        provenance={
            "model": to_json(model),
            "description": "network",
            "start": start.description,
            "seed": seed,
            "samples": samples,
            "batch": batch,
            "device": device,
            "weights_dtype": str(dtype),
            "wall_seconds": time.perf_counter() - began,
        },
    )


def networks_in_batch(model: Transformer, dtype: torch.dtype) -> int:
    """How many networks' layers have `BATCH_BYTES` of weights."""
    weights = sum(parameter.numel() for parameter in Layer(model).parameters())
    return max(1, BATCH_BYTES // (weights * dtype.itemsize))


def batch_seed(seed: int, first: int) -> int:
    """A 63-bit seed for the batch that begins at network `first`."""
    low, high = key(seed, f"network {first}")
    return low | (high >> 1) << 32


def check_rank(start: Start, width: int) -> None:
    """Raise `InputError` if the tokens spread in more directions than the width has."""
    rank = start.rank()
    require(rank <= width, f"The start spreads in {rank} directions, more than width={width} has.")


@torch.no_grad()
def run_batch(
    model: Transformer,
    start: Start,
    networks: int,
    layers: np.ndarray,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> tuple[np.ndarray, np.ndarray]:
    """V (networks, layers, m, m) and the layer at which a network left the range of `dtype` (∞ if none).

    A network that left keeps its last finite covariance.
    """
    x = draw_tokens(start, model.width, networks, generator).to(dtype)
    layer = Layer(model, (networks,)).to(device=generator.device, dtype=dtype)
    recorded: list[Tensor] = []
    held, exits = gram(x), torch.full((networks,), torch.inf)
    for depth in range(model.depth + 1):
        if depth > 0:
            draw_weights(layer, generator)
            x = layer(x)
        v = gram(x)
        finite = v.isfinite().all((-1, -2))
        held = torch.where(finite[:, None, None], v, held)
        exits[(~finite.cpu()) & exits.isinf()] = depth
        if depth in layers:
            recorded.append(held.cpu())
    return torch.stack(recorded, 1).double().numpy(), exits.double().numpy()


def gram(x: Tensor) -> Tensor:
    """V = XXᵀ/n: (*, m, n) to (*, m, m)."""
    return x @ x.mT / x.shape[-1]


def draw_tokens(start: Start, width: int, networks: int, generator: torch.Generator) -> Tensor:
    """X₀ (networks, tokens, width) in float64, with the start's covariance and, where given, its means."""
    options: dict[str, Any] = {"dtype": torch.float64, "device": generator.device}
    columns = min(start.tokens, width)
    if start.means is None:
        factor = torch.tensor(root(start.covariance, columns), **options)
        directions = torch.randn(networks, width, columns, generator=generator, **options)
        return width**0.5 * factor @ orthonormal(directions).mT
    columns = min(columns, width - 1)
    centred = start.covariance - np.outer(start.means, start.means)
    factor = torch.tensor(np.column_stack([start.means, root(centred, columns)]), **options)
    directions = torch.randn(networks, width, columns + 1, generator=generator, **options)
    directions[..., 0] = 1.0  # the vector of ones comes first, the others are orthogonal to it
    return width**0.5 * factor @ orthonormal(directions).mT


def orthonormal(directions: Tensor) -> Tensor:
    """Q of directions (*, n, k) = Q R with a positive diagonal of R.

    With that sign, Q of a Gaussian matrix is Haar distributed; LAPACK's own choice of signs makes it depend on the
    first coordinates [Mezzadri, *How to generate random matrices from the classical compact groups*, 2007].
    """
    q, r = torch.linalg.qr(directions)
    return q * r.diagonal(dim1=-2, dim2=-1).sgn()[..., None, :]
