r"""Attention by a user's rule: any function from logits and visibility to a mixing matrix.

X ← λX + γ A X W_V/√n with A = rule(Y/τ, visible), for the logits Y and temperatures of `attention`; with several heads
each has its own A. Examples are sigmoid attention, linear attention, softmax with a skip of the values (A = I + …),
windows and decays: any map from a matrix (tokens, tokens) to a matrix (tokens, tokens).
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import InputError, first_line, require
from limitformer.models.attention import Attention, Temperature, require_temperature
from limitformer.models.functions import (
    FrozenFunction,
    Function,
    compile_user_function,
    freeze_functions,
    function_of,
    name_of,
)
from limitformer.models.kinds import register

Logits = NDArray[np.float64]
Visible = Annotated[NDArray[np.bool_], "tokens tokens"]


@register("attention")
@dataclass(frozen=True, kw_only=True)
class Mixing(Attention):
    """Attention whose matrix A is made by a rule, as that was when the part was made.

    Attributes:
        function: the rule, from the logits Y/τ (tokens, tokens) of one head, float64, and `visible` (tokens, tokens),
            True where the row's token sees the column's, to A (tokens, tokens). A function of Python that Numba can
            compile, or of Numba, or its path; the attribute is a copy of it. Under a mask, A must be 0 wherever
            `visible` is False.
        temperature: "standard" for τ = τ₀ √n_k, "shaped" for τ₀ √(n n_k).
        torch: the same rule on tensors, for networks, from logits (…, tokens, tokens) to A of that shape: a function or
            its path; None tries the rule itself on tensors. It must agree with the rule.

    Raises:
        InputError: `function` is not a function, does not return a finite matrix of that shape, or Numba cannot
            compile it.

    >>> def linear(logits, visible):
    ...     return logits * visible / visible.sum()
    >>> Mixing(linear, heads=4).heads
    4
    """

    function: Function | str = field(kw_only=False)
    tau0: float = 1.0
    temperature: Temperature = "standard"
    torch: Function | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_temperature(self.temperature)
        freeze_functions(self)
        for tokens in (1, 4):
            try_rule(function_of(self), np.ones((tokens, tokens), bool))
        logits, visible = tried_logits(4), np.tril(np.ones((4, 4), bool))
        matrix = matrix_of(function_of(self), logits, visible)
        compile_user_function(function_of(self), [(logits, visible)], [matrix])

    @property
    def interventions(self) -> tuple[bool, bool, Temperature]:
        return False, False, self.temperature

    def require_mask(self, mask: str | None) -> None:
        if mask == "causal":
            try_rule(function_of(self), np.tril(np.ones((4, 4), bool)))

    def require_tokens(self, visible: Visible) -> None:
        """Raise `InputError` unless the rule works for these tokens; called when a simulation is prepared."""
        try_rule(function_of(self), visible)


def tried_logits(tokens: int) -> Logits:
    """Return asymmetric logits of ordinary size."""
    return np.sin(1 + np.arange(tokens**2, dtype=np.float64)).reshape(tokens, tokens) * 2


def matrix_of(function: FrozenFunction, logits: Logits, visible: Visible) -> Any:
    """Return the real matrix of the rule in Python; raise `InputError` if it raises or returns anything else."""
    name = name_of(function)
    try:
        with np.errstate(all="ignore"):  # values that are not finite are refused below
            a = function(logits.copy(), visible.copy())
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"function must take (logits, visible); {name} raised {reason}.") from error
    shape, kind = np.shape(a), np.asarray(a).dtype
    real = isinstance(a, np.ndarray) and shape == visible.shape and kind.kind in "fiub"
    value = f"{type(a).__name__} {shape} of {kind}"
    require(real, f"function must give a real matrix {visible.shape}; {name} gave {value}.")
    return a


def try_rule(function: FrozenFunction, visible: Visible) -> None:
    """Raise `InputError` unless the rule gives finite matrices of the logits' shape, 0 outside `visible`.

    It is tried at logits of both signs and of one sign, of ordinary size, small and large.
    """
    y, name = tried_logits(len(visible)), name_of(function)
    for logits in (y, -y, np.abs(y), -np.abs(y), 0.01 * y, 10 * y):
        a = matrix_of(function, logits, visible)
        finite = np.isfinite(a)
        bad = "" if finite.all() else f"{a[~finite][0]} at logits of {np.abs(logits).max():.3g} at most"
        require(not bad, f"function must give a finite matrix; {name} gave {bad}.")
        leak = bool(np.any(a[~visible]))
        require(not leak, f"Under a mask A must be 0 outside visible; {name} ignores visible. Nearest: A * visible.")
