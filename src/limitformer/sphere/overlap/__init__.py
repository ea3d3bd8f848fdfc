"""The overlap of two tokens, or clusters, on the sphere: a diffusion on (−1, 1) whose fate is known exactly."""

from limitformer.sphere.overlap.diffusion import OverlapDiffusion as OverlapDiffusion
from limitformer.sphere.overlap.diffusion import overlap as overlap
from limitformer.sphere.overlap.gap import MetastableGap as MetastableGap
from limitformer.sphere.overlap.motion import Boundaries as Boundaries
from limitformer.sphere.overlap.motion import Boundary as Boundary
from limitformer.sphere.overlap.motion import Rates as Rates
