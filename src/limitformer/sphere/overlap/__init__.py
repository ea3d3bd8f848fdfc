"""The overlap of two tokens, or clusters, on the sphere: a diffusion on (−1, 1) whose fate is known exactly."""

from limitformer.sphere.overlap.declare import overlap as overlap
from limitformer.sphere.overlap.diffusion import OverlapDiffusion as OverlapDiffusion
from limitformer.sphere.overlap.ends import Boundaries as Boundaries
from limitformer.sphere.overlap.ends import Boundary as Boundary
from limitformer.sphere.overlap.ends import Rates as Rates
from limitformer.sphere.overlap.gap import MetastableGap as MetastableGap
