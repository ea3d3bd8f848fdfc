r"""Attention by a rule of one's own: any function from logits and visibility to a mixing matrix.

X ← λX + γ A X W_V/√n with A = rule(Y/τ, visible), for the logits Y and temperatures of `attention`; with several heads
each has its own A. Sigmoid attention, linear attention, softmax with a skip of the values (A = I + …), windows, decays:
whatever is a matrix (tokens, tokens) made of one (tokens, tokens).
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import InputError, first_line, require
from limitformer.models.attention import Attention, Temperature, require_temperature
from limitformer.models.compiled import compile_user_function
from limitformer.models.frozen import FrozenFunction, freeze_functions, function_of
from limitformer.models.functions import Function, name_of
from limitformer.models.kinds import register

Logits = NDArray[np.float64]
Visible = Annotated[NDArray[np.bool_], "tokens tokens"]


@register("attention")
@dataclass(frozen=True, kw_only=True)
class Mixing(Attention):
    """Attention whose matrix A is made by a rule.

    Attributes:
        function: the rule, from the logits Y/τ (tokens, tokens) of one head, float64, and `visible` (tokens, tokens),
            True where the row's token sees the column's, to A (tokens, tokens). Of Python (as Numba can compile it) or
            of Numba; or its path. Under a mask A must be 0 where nothing is seen.
        temperature: "standard" for τ = τ₀ √n_k, "shaped" for τ₀ √(n n_k).
        torch: the same rule on tensors, for networks, from logits (…, tokens, tokens) to A of that shape: a function or
            its path; None tries the rule itself on tensors. What it gives must agree with the rule.

    Raises:
        InputError: no function, or one that does not give a finite matrix of that shape.

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
        """Raise `InputError` unless it gives matrices of these tokens; tried when a simulation is prepared."""
        try_rule(function_of(self), visible)


def tried_logits(tokens: int) -> Logits:
    """Asymmetric ones of ordinary size."""
    return np.sin(1 + np.arange(tokens**2, dtype=np.float64)).reshape(tokens, tokens) * 2


def several_logits(tokens: int) -> tuple[Logits, ...]:
    """Of ordinary size, of both signs and of one, small ones and large ones."""
    y = tried_logits(tokens)
    return y, -y, np.abs(y), -np.abs(y), 0.01 * y, 10 * y


def matrix_of(function: FrozenFunction, logits: Logits, visible: Visible) -> Any:
    """The real matrix that the rule makes of them in Python; `InputError` with what it raises or gives instead."""
    name = name_of(function)
    try:
        with np.errstate(all="ignore"):  # what is not finite is refused in one line
            a = function(logits.copy(), visible.copy())
    except Exception as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"function must take (logits, visible); {name} raised {what}.") from error
    shape, kind = np.shape(a), np.asarray(a).dtype
    real = isinstance(a, np.ndarray) and shape == visible.shape and kind.kind in "fiub"
    got = f"{type(a).__name__} {shape} of {kind}"
    require(real, f"function must give a real matrix {visible.shape}; {name} gave {got}.")
    return a


def try_rule(function: FrozenFunction, visible: Visible) -> None:
    """Raise `InputError` unless the rule gives finite matrices of the logits' shape, 0 where nothing is seen."""
    for logits in several_logits(len(visible)):
        try_logits(function, logits, visible)


def try_logits(function: FrozenFunction, logits: Logits, visible: Visible) -> None:
    """The same for some logits."""
    name, a = name_of(function), matrix_of(function, logits, visible)
    finite = np.isfinite(a)
    some = "" if finite.all() else f"{a[~finite][0]} at logits of {np.abs(logits).max():.3g} at most"
    require(not some, f"function must give a finite matrix; {name} gave {some}.")
    leak = bool(np.any(a[~visible]))
    require(not leak, f"Under a mask A must be 0 where nothing is seen; {name} ignores visible. Nearest: A * visible.")
