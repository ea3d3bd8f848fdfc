r"""The chain of a Transformer with the gradients of its loss, ready to run; the mathematics in `backward`."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from limitformer.base.memory import check_bytes, check_scratch
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
from limitformer.covariance.gradients.backward import Gradients, run_replicas_with_gradients
from limitformer.covariance.gradients.layout import layout
from limitformer.models import Transformer
from limitformer.numerics.lanes import LANES
from limitformer.numerics.random import key
from limitformer.numerics.watch import Watch
from limitformer.paths.arrays import Shapes, bytes_of
from limitformer.paths.recording import Outputs

# In the order in which networks of torch name them (`nn.network`), and in which `backward` writes them down.
WEIGHTS_OF = {
    ATTENTION: ("attention.query", "attention.key", "attention.value"),
    HEADS: ("attention.query", "attention.key", "attention.value", "attention.output"),
    FEEDFORWARD: ("feedforward.pre", "feedforward.post"),
}


def weights_of(model: Transformer) -> list[str]:
    """Names of all weights, layer after layer, as in `lf.nn.simulate(model, gradients=True)`."""
    names = [name for sublayer in sublayers_of(model) for name in WEIGHTS_OF[sublayer]]
    return [f"layers.{layer}.{name}" for layer in range(model.depth) for name in names]


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientChain(TransformerChain):
    """A chain that goes up and then down; attributes as above."""

    @property
    def settings(self) -> dict[str, Any]:
        """As of a chain, and that it has gradients."""
        return {**super().settings, "gradients": "of half the squared norm of the last tokens, mean over tokens"}

    @property
    def gradient_shapes(self) -> Shapes:
        """Of one sample: the loss, and norms in float64."""
        weights = self.model.depth * sum(len(WEIGHTS_OF[sublayer]) for sublayer in sublayers_of(self.model))
        sizes = {"loss": (), "stream_gradient": (len(self.points),), "weight_gradient": (weights,)}
        return {name: (size, np.float64) for name, size in sizes.items()}

    def shapes(self, samples: int) -> Shapes:
        """Of what is kept of so many samples."""
        return {**super().shapes(samples), **of_samples(self.gradient_shapes, samples)}

    def outputs(self, samples: int) -> Outputs:
        """Arrays for the results of so many samples."""
        points, needed = len(self.points), bytes_of(self.shapes(samples)) + bytes_of(self.shared_shapes)
        check_bytes(needed, samples, points, self.axis, ("fewer samples", "gradients=False"))
        scratch = 8 * LANES * int(layout_of(self.model, self.tokens)[-1, 0])
        check_scratch(scratch, "What a thread keeps of a way up", "fewer tokens or layers")
        new = of_samples(self.gradient_shapes, samples)
        return super().outputs(samples) | {name: np.empty(*shape) for name, shape in new.items()}

    def prepare(self, seed: int) -> "PreparedGradients":  # type: ignore[override]  # its own, of the same protocol
        """Everything that all replicas share."""
        return PreparedGradients(super().prepare(seed), seed)


class PreparedGradients:
    """A chain with its start factor and keys; `run` may be called from several threads."""

    def __init__(self, prepared: PreparedChain, seed: int) -> None:
        self.prepared = prepared
        self.table = layout_of(prepared.chain.model, prepared.chain.tokens, prepared.constants)
        self.keys = np.array([prepared.key_words, key(seed, "chain, backward")], np.uint64)

    def run(self, first: int, outputs: Outputs, watch: Watch) -> None:
        """Replicas `first` … into what is kept, unless it is halted."""
        prepared, chain = self.prepared, self.prepared.chain
        run_replicas_with_gradients(
            prepared.factor,
            prepared.turned,
            prepared.constants,
            self.table,
            prepared.sublayers,
            prepared.visible,
            chain.share(outputs, first, self.keys, chain.points),
            Gradients(outputs["loss"], outputs["stream_gradient"], outputs["weight_gradient"]),
            watch,
        )


def of_samples(shapes: Shapes, samples: int) -> Shapes:
    """The same of so many samples."""
    return {name: ((samples, *shape), kind) for name, (shape, kind) in shapes.items()}


def layout_of(model: Transformer, tokens: int, constants: Constants | None = None) -> NDArray[np.int64]:
    """The table of what one thread works on."""
    rank = min(tokens + subtracts_mean(model), model.width)
    constants = constants or constants_of(model, rank)
    return layout(tokens, rank, model.depth * len(sublayers_of(model)), constants)
