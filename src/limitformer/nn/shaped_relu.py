r"""The shaped ReLU σ(x) = s₊ max(x, 0) + s₋ min(x, 0) [ST, after eq. 4], with a negative slope that trains.

[ST, App. D] takes s₊ = 1 and s₋ = 1 − 1/√n. At 0 the gradient is s₋: with `clamp` it would be the sum of both slopes,
and padded tokens are exact zeros.
"""

from typing import Annotated

import torch
from torch import Tensor, nn

from limitformer.base.errors import require_real
from limitformer.nn.gains import Gain


class TrainableShapedReLU(nn.Module):
    """The shaped ReLU σ, entry by entry, for any shape.

    Args:
        negative: s₋ at the start; for width n, [ST] takes 1 − 1/√n.
        positive: s₊, which is constant.
        trained: whether s₋ has a gradient.
    """

    def __init__(self, *, negative: float, positive: float = 1.0, trained: bool = True) -> None:
        super().__init__()
        self.positive = require_real("positive", positive)
        self.negative = Gain(require_real("negative", negative), trained=trained)

    def forward(self, x: Annotated[Tensor, "*shape"]) -> Annotated[Tensor, "*shape"]:
        """Compute σ(x)."""
        return torch.where(x > 0, self.positive * x, (self.negative() * x).to(x.dtype))

    def extra_repr(self) -> str:
        return f"positive={self.positive}"
