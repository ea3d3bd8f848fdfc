"""Marks by which a tensor that was changed in place is known."""

import torch
from torch import Tensor

Marks = tuple[float, ...]


def marks(z: Tensor) -> Marks:
    """Torch counts the changes that it sees, and the norm tells of others; in inference mode it counts none."""
    z = z.detach()
    counted = float(z.sum()) if z.is_inference() else float(z._version)
    return counted, float(torch.linalg.vector_norm(z))
