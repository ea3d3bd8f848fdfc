"""The overlap of two tokens, or clusters, on the sphere: a diffusion on (−1, 1) whose fate is known exactly."""

from limitformer.limits.overlap.declare import overlap as overlap
from limitformer.limits.overlap.diffusion import OverlapDiffusion as OverlapDiffusion
from limitformer.limits.overlap.ends import Boundaries as Boundaries
from limitformer.limits.overlap.ends import Boundary as Boundary
from limitformer.limits.overlap.ends import Rates as Rates
from limitformer.limits.overlap.gap import MetastableGap as MetastableGap
