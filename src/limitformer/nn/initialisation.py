r"""Initial variances of a trainable network as data [ST, App. D]; weights are normal with mean 0, biases 0.

The theory has N(0, 1) weights and its scales outside; a network that trains has the scales in its weights, so that
learning rates need no second search. With n `width`, n_k `head_dim`, h `heads`, n_h `hidden`, c the feed-forward gain:

| weight       | shape       | shaped                  | standard |
|--------------|-------------|-------------------------|----------|
| query, key   | n × h n_k   | n^(−3/2)                | 1/n      |
| value        | n × h n_k   | 1/n                     | 1/n      |
| output       | h n_k × n   | 1/(h n_k)               | 1/(h n_k) |
| pre          | n × n_h     | 1/n                     | 1/n      |
| post         | n_h × n     | c/n_h                   | c/n_h    |

Logits are divided by τ₀ √n_k only: two matrices of variance n^(−3/2) contribute the other √n of τ = τ₀ √(n n_k). [ST,
App. D] calls it "a factor of 1/n": the variance of their product has it, each matrix has a factor n^(−1/2). App. D.1
has 1/n for c/n_h: `InitialVariances.paper`.
"""

from dataclasses import dataclass, fields

import torch
from torch import nn

from limitformer.base.errors import require, require_count, require_real, set_fields


@dataclass(frozen=True, kw_only=True)
class InitialVariances:
    """The variance of each weight's entries."""

    query: float
    key: float
    value: float
    output: float
    pre: float
    post: float

    def __post_init__(self) -> None:
        for field in fields(self):
            set_fields(self, **{field.name: require_real(field.name, getattr(self, field.name))})
            message = f"{field.name} must be at least 0: it is a variance; got {getattr(self, field.name)}."
            require(getattr(self, field.name) >= 0, message)

    @staticmethod
    def shaped(
        width: int, *, joined: int | None = None, hidden: int | None = None, gain: float = 1.0
    ) -> "InitialVariances":
        """Return the variances of shaped attention, the law of a `Transformer` with `ShapedAttention`.

        Args:
            width: n.
            joined: h n_k; None means the width.
            hidden: n_h; None means the width.
            gain: c = 1/E σ(g)², g ~ N(0, 1).
        """
        return variances(width, require_count("width", width) ** -1.5, joined, hidden, gain)

    @staticmethod
    def standard(
        width: int, *, joined: int | None = None, hidden: int | None = None, gain: float = 1.0
    ) -> "InitialVariances":
        """Return the variances of softmax attention, temperature τ₀ √n_k; arguments as for `shaped`."""
        return variances(width, 1 / require_count("width", width), joined, hidden, gain)

    @staticmethod
    def paper(width: int) -> "InitialVariances":
        """Return the variances of [ST, App. D.1]: 1/n for any fan-in, and n^(−3/2) for queries and keys."""
        logit, other = require_count("width", width) ** -1.5, 1 / width
        return InitialVariances(query=logit, key=logit, value=other, output=other, pre=other, post=other)


def variances(width: int, logit: float, joined: int | None, hidden: int | None, gain: float) -> InitialVariances:
    """Fill the table above; `logit` is the variance of queries and keys."""
    joined = width if joined is None else require_count("joined", joined)
    hidden = width if hidden is None else require_count("hidden", hidden)
    return InitialVariances(
        query=logit, key=logit, value=1 / width, output=1 / joined, pre=1 / width, post=gain / hidden
    )


@torch.no_grad()
def draw(model: nn.Module, variances: InitialVariances, generator: torch.Generator | None = None) -> None:
    """Draw, in place, every linear layer of `model` whose name is in the table; its bias becomes 0."""
    known = {field.name: getattr(variances, field.name) for field in fields(variances)}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and last in known:
            module.weight.normal_(std=known[last] ** 0.5, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
