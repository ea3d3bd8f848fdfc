"""The chain with gradients compared with the chain without, and with drawn networks and autograd, on one thread."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import limitformer as lf
from limitformer.models import Transformer
from limitformer.nn.drawn.network import Layer, draw_weights
from limitformer.nn.drawn.simulate import TokenLaw

WIDTH, DEPTH, NETWORKS = 200, 150, 2
WANTED_OVER_CHAIN, WANTED_OVER_NETWORK = 10, 200
Compared = Callable[[Callable[[], object], Callable[[], object], int, int], dict[str, float]]


def models() -> dict[str, Transformer]:
    """Return models of two tokens at width 200, as in [ST, Fig. 1]."""
    attention, feedforward = lf.ShapedAttention(tau0=1.0), lf.ShapedReLU(c_plus=0.0, c_minus=-1.0)
    common: dict[str, Any] = {"width": WIDTH, "depth": DEPTH, "gamma": 8**-0.5}
    return {
        "attention": Transformer(**common, attention=attention),
        "attention + feed-forward": Transformer(**common, attention=attention, feedforward=feedforward),
    }


def drawn(model: Transformer, networks: int, generator: torch.Generator) -> dict[str, np.ndarray[Any, Any]]:
    """Draw `networks` together with torch's generator, and return the gradient norms that the chain gives, by
    autograd."""
    start = lf.equicorrelated(tokens=2, correlation=0.2)
    x = TokenLaw(start, model).tokens(networks, generator).float().requires_grad_()
    layers = [Layer(model, (networks,)) for _ in range(model.depth)]
    stream = [x]
    for layer in layers:
        draw_weights(layer, generator)
        x = layer(x)
        x.retain_grad()
        stream.append(x)
    (x.square().sum((1, 2)) / (2 * x.shape[1])).sum().backward()
    weights: list[torch.Tensor] = [weight for layer in layers for weight in layer.parameters()]
    return {"stream": norms(stream), "weights": norms(weights)}


def norms(tensors: list[torch.Tensor]) -> np.ndarray[Any, Any]:
    return torch.stack([torch.linalg.matrix_norm(x.grad) for x in tensors if x.grad is not None], 1).numpy()


def table(compared: Compared) -> list[dict[str, Any]]:
    """Return nanoseconds per layer and sample, and the ratios."""
    start, rows, generator = lf.equicorrelated(tokens=2, correlation=0.2), [], torch.Generator().manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, model in models().items():
        samples = 2_000

        def chain(gradients: bool, model: Transformer = model, samples: int = samples) -> object:
            options: dict[str, Any] = {"samples": samples, "seed": 0, "threads": 1, "progress": False}
            return lf.simulate(model, start, gradients=gradients, **options)

        def networks(model: Transformer = model) -> object:
            return drawn(model, NETWORKS, generator)

        up, down, units = (lambda chain=chain: chain(False)), (lambda chain=chain: chain(True)), samples * DEPTH
        over_chain = compared(up, down, units, units)
        over_network = compared(down, networks, units, NETWORKS * DEPTH)
        rows.append({"what": f"{name}: over no gradients, at most", "wanted": WANTED_OVER_CHAIN, **over_chain})
        rows.append({"what": f"{name}: network over chain", "wanted": WANTED_OVER_NETWORK, **over_network})
    torch.set_num_threads(threads)
    return rows
