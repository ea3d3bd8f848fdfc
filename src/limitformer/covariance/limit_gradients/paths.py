"""The process that `simulate(limit(model), gradients=True)` runs; the mathematics is in `backward`."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from limitformer.base.errors import require
from limitformer.base.memory import check_bytes, check_scratch
from limitformer.covariance.gradients.chain import of_samples
from limitformer.covariance.gradients.matrices import allocate, count_bytes
from limitformer.covariance.limit import CovarianceLimit, CovariancePaths
from limitformer.covariance.limit_gradients.backward import GradientResults, KeptPath, kept_shapes, run_gradient_paths
from limitformer.covariance.limit_gradients.step_back import GradientConstants, state_shapes
from limitformer.models.start import correlations_of
from limitformer.numerics.factor import lower_root
from limitformer.numerics.lanes import in_lanes
from limitformer.numerics.random import key
from limitformer.numerics.watch import Watch
from limitformer.sampling.arrays import Shapes, bytes_of
from limitformer.sampling.recording import Outputs

LEAST_RADIUS = 1e6  # the least radius over |V| at the start, from which a path explodes within a step
LEAST_EIGENVALUE = 1e-10  # of the correlations of the start: their inverse enters the equation


def weight_kinds(limit: CovarianceLimit) -> list[str]:
    """Return the names of a layer's weights."""
    attention = ["attention.query", "attention.key", "attention.value"] if limit.tau0 is not None else []
    return attention + (["feedforward.pre", "feedforward.post"] if limit.kink is not None else [])


def gradient_constants(limit: CovarianceLimit) -> GradientConstants:
    """Return the factors of the forward SDE and of the gradients'."""
    return GradientConstants(
        forward=limit.constants(),
        gamma=limit.gamma,
        lam=float(np.sqrt(1 - limit.gamma**2)),
        inverse_temperature=0.0 if limit.tau0 is None else 1 / limit.tau0,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientPaths(CovariancePaths):
    """Paths of the limit with a backward pass; the attributes are those of `CovariancePaths`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.step == "factor", f'gradients=True needs step="factor"; got {self.step!r}.')
        require(
            self.model.hidden_ratio is not None,
            "The limit with OneMatrix has no gradients. Nearest: lf.nn.simulate(…, gradients=True).",
        )
        require(
            not (self.model.second or self.model.third),
            "The limit with ShapedSmooth has no gradients. Nearest: lf.nn.simulate(…, gradients=True).",
        )
        near = LEAST_RADIUS * float(np.linalg.norm(self.start.covariance))
        require(
            self.radius >= near,
            f"The limit's gradients see exits at the ends of steps alone, and need a radius of at least {near:.3g}, "
            f"{LEAST_RADIUS:g} times the start; got {self.radius:.3g}. Nearest: leave out radius.",
        )
        least = float(np.linalg.eigvalsh(correlations_of(self.start.covariance)[0])[0])
        require(
            least > LEAST_EIGENVALUE,
            "The limit's gradients need linearly independent tokens; the least eigenvalue of the start's correlations "
            f"is {least:.1e}. Nearest: leave out tokens that repeat others, or simulate(model, …, gradients=True).",
        )
        constants = self.model.constants()
        rate = (4 * self.tokens - 1) * constants.linear**2 + constants.kink  # (1 − C²)/dt in the last row of T
        require(
            self.actual_dt * rate < 1,
            f"dt must be below {1 / max(rate, 1e-300):.3g} for gradients of {self.tokens} tokens and this gamma; got "
            f"{self.actual_dt:.3g}.",
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the paths, and the loss that is differentiated."""
        return {**super().settings, "gradients": "of half the squared norm of the last tokens, mean over tokens"}

    @property
    def gradient_shapes(self) -> Shapes:
        """The shapes of one sample: the loss, norms and the kernel, in float64."""
        points = len(self.points)
        sizes = {
            "loss": (),
            "stream_gradient": (points,),
            "weight_gradient": (points, len(weight_kinds(self.model))),
            "tangent_kernel": (),
        }
        return {name: (size, np.float64) for name, size in sizes.items()}

    def shapes(self, samples: int) -> Shapes:
        """Return the shapes of all recorded arrays."""
        return {**super().shapes(samples), **of_samples(self.gradient_shapes, samples)}

    def outputs(self, samples: int) -> Outputs:
        """Allocate the arrays of the results; raise `InputError` if they or the buffers do not fit."""
        points, needed = len(self.points), bytes_of(self.shapes(samples)) + bytes_of(self.shared_shapes)
        check_bytes(needed, samples, points, self.axis, ("fewer samples", "gradients=False"))
        scratch = count_bytes(self.kept_shapes) + count_bytes(state_shapes(self.tokens))
        check_scratch(scratch, "The scratch memory of one thread", "fewer tokens or a larger dt")
        new = of_samples(self.gradient_shapes, samples)
        return super().outputs(samples) | {name: np.empty(*shape) for name, shape in new.items()}

    @property
    def kept_shapes(self) -> KeptPath:
        """The shapes of what one thread keeps of the forward pass."""
        return kept_shapes(self.tokens, self.steps, self.model.tau0 is not None)

    def prepare(self, seed: int) -> "PreparedGradientPaths":  # type: ignore[override]  # another class of the same protocol
        """Return the part of the computation that all replicas share."""
        return PreparedGradientPaths(self, seed)


class PreparedGradientPaths:
    """Paths with their start factor and keys. Several threads may call `run`."""

    def __init__(self, paths: GradientPaths, seed: int) -> None:
        self.paths = paths
        self.factor = in_lanes(lower_root(paths.start.covariance))
        purposes = ("limit with gradients", "limit with gradients, short steps")
        backward = ("limit, backward", "limit, backward, short steps")
        self.keys = np.array([key(seed, purpose) for purpose in purposes + backward], np.uint64)
        self.constants = gradient_constants(paths.model)
        self.mask = paths.model.mask_for(paths.tokens)._replace(full=False)  # the rows of the factor are the tokens

    def run(self, first: int, outputs: Outputs, watch: Watch) -> None:
        """Write replicas `first`, `first` + 1, … into `outputs`, unless `watch` is halted."""
        paths = self.paths
        kernel = outputs["tangent_kernel"]
        run_gradient_paths(
            self.factor,
            self.constants,
            self.mask,
            paths.actual_dt,
            paths.steps,
            allocate(paths.kept_shapes),
            allocate(state_shapes(paths.tokens)),
            paths.share(outputs, first, self.keys, paths.step_numbers),
            GradientResults(outputs["loss"], outputs["stream_gradient"], outputs["weight_gradient"], kernel),
            watch,
        )
        # The gradients of queries and keys are smaller by √n, and do not enter.
        kernel *= (paths.model.tau0 is not None) + 2 * (paths.model.kink is not None)
        outputs["exits"] *= paths.actual_dt
