"""What no theorem speaks of, whichever limit is asked for."""

from limitformer.base.errors import NoLimitError
from limitformer.models import Elementwise, Gated, Mixing, OneMatrix, Transformer


def refuse_own(model: Transformer) -> None:
    """Raise `NoLimitError` for parts of one's own, and for strengths that differ, of which no theorem speaks."""
    if not model.uniform:
        raise NoLimitError(
            "No limit is proven where strengths differ by layer or sublayer; gamma and lam must be numbers."
        )
    feedforward = model.feedforward
    parts = (model.attention, feedforward.activation if type(feedforward) is OneMatrix else feedforward)
    for part in parts:
        if type(part) in (Mixing, Elementwise, Gated):
            raise NoLimitError(f"No limit is proven for {part!r}; it needs ShapedAttention and ShapedReLU.")
