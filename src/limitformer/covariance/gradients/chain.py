"""The process that `simulate(model, gradients=True)` runs; the mathematics is in `backward`."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from limitformer.base.memory import check_bytes, check_scratch
from limitformer.covariance.chain.own import elementwise_address
from limitformer.covariance.chain.transformer import (
    ATTENTION,
    FEEDFORWARD,
    HEADS,
    Constants,
    PreparedChain,
    TransformerChain,
    constants_of,
    sublayers_of,
    subtracts_mean,
)
from limitformer.covariance.gradients.backward import (
    Buffers,
    GradientArrays,
    buffer_shapes,
    run_replicas_with_gradients,
)
from limitformer.covariance.gradients.matrices import allocate, count_bytes
from limitformer.models import Elementwise, Gated, Mixing, OneMatrix, RadialNorm, ShapedSmooth, Transformer
from limitformer.models.activations import derivative_of
from limitformer.models.functions import function_of
from limitformer.numerics.random import key
from limitformer.numerics.watch import Watch
from limitformer.sampling.arrays import Shapes, bytes_of
from limitformer.sampling.recording import Outputs

# In the order of `nn.network`, which is also the order in which `backward` writes them.
WEIGHTS_OF = {
    ATTENTION: ("attention.query", "attention.key", "attention.value"),
    HEADS: ("attention.query", "attention.key", "attention.value", "attention.output"),
    FEEDFORWARD: ("feedforward.pre", "feedforward.post"),
}


def weights_of(model: Transformer) -> list[str]:
    """Return the names of all weights, layer after layer, as in `lf.nn.simulate(model, gradients=True)`."""
    names = [name for sublayer in sublayers_of(model) for name in WEIGHTS_OF[sublayer]]
    if type(model.feedforward) is Gated:
        names.insert(names.index("feedforward.post"), "feedforward.gate")
    return [f"layers.{layer}.{name}" for layer in range(model.depth) for name in names]


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientChain(TransformerChain):
    """A chain with a backward pass; the attributes are those of `TransformerChain`."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the chain, and the loss that is differentiated."""
        return {**super().settings, "gradients": "of half the squared norm of the last tokens, mean over tokens"}

    @property
    def gradient_shapes(self) -> Shapes:
        """The shapes of one sample: the loss and norms, in float64."""
        weights = len(weights_of(self.model))
        sizes = {"loss": (), "stream_gradient": (len(self.points),), "weight_gradient": (weights,)}
        return {name: (size, np.float64) for name, size in sizes.items()}

    def shapes(self, samples: int) -> Shapes:
        """Return the shapes of all recorded arrays."""
        return {**super().shapes(samples), **of_samples(self.gradient_shapes, samples)}

    def outputs(self, samples: int) -> Outputs:
        """Allocate the arrays of the results; raise `InputError` if they or the buffers do not fit."""
        points, needed = len(self.points), bytes_of(self.shapes(samples)) + bytes_of(self.shared_shapes)
        check_bytes(needed, samples, points, self.axis, ("fewer samples", "gradients=False"))
        scratch = count_bytes(shapes_of(self.model, self.tokens))
        check_scratch(scratch, "The scratch memory of one thread", "fewer tokens or layers")
        new = of_samples(self.gradient_shapes, samples)
        return super().outputs(samples) | {name: np.empty(*shape) for name, shape in new.items()}

    def prepare(self, seed: int) -> "PreparedGradients":  # type: ignore[override]  # another class of the same protocol
        """Return the part of the computation that all replicas share."""
        return PreparedGradients(super().prepare(seed), seed)


class PreparedGradients:
    """A chain with its start factor and keys. Several threads may call `run`."""

    def __init__(self, prepared: PreparedChain, seed: int) -> None:
        self.prepared = prepared
        part, self.constants = prepared.chain.model.feedforward, prepared.constants
        if type(part) in (Elementwise, Gated):
            derivative = derivative_of(function_of(part))
            assert derivative is not None  # as `has_gradients` requires
            own = self.constants.feedforward._replace(derivative=elementwise_address(derivative))
            self.constants = self.constants._replace(feedforward=own)
        self.shapes = shapes_of(prepared.chain.model, prepared.chain.tokens, self.constants)
        self.keys = np.array([prepared.key_words, key(seed, "chain, backward")], np.uint64)

    def run(self, first: int, outputs: Outputs, watch: Watch) -> None:
        """Write replicas `first`, `first` + 1, … into `outputs`, unless `watch` is halted."""
        prepared, chain = self.prepared, self.prepared.chain
        run_replicas_with_gradients(
            prepared.factor,
            prepared.turned,
            self.constants,
            allocate(self.shapes),
            prepared.sublayers,
            prepared.visible,
            chain.share(outputs, first, self.keys, chain.points),
            GradientArrays(outputs["loss"], outputs["stream_gradient"], outputs["weight_gradient"]),
            watch,
        )


def has_gradients(part: object) -> bool:
    """Whether the chain can differentiate a part of a model."""
    if type(part) in (Elementwise, Gated):
        return derivative_of(function_of(part)) is not None
    return type(part) not in (Mixing, OneMatrix, RadialNorm, ShapedSmooth)


def of_samples(shapes: Shapes, samples: int) -> Shapes:
    return {name: ((samples, *shape), kind) for name, (shape, kind) in shapes.items()}


def shapes_of(model: Transformer, tokens: int, constants: Constants | None = None) -> Buffers:
    """Return the shapes of the buffers of one thread."""
    rank = min(tokens + subtracts_mean(model), model.width)
    constants = constants or constants_of(model, rank)
    return buffer_shapes(tokens, rank, model.depth * len(sublayers_of(model)), constants)
