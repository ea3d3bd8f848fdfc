r"""User functions on tensors, with gradients.

σ of an `Elementwise` and the rule of a `Mixing` are functions of numbers; a network needs the same function on tensors.
It is the function that `torch` names; else torch's own function of that name; else the function itself, if it takes
tensors. It must give the numbers of the part's function, because two different functions would be two models.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from math import isclose, isfinite, nan
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from limitformer import models
from limitformer.base.errors import InputError, first_line, require
from limitformer.models.feedforward import TRIED
from limitformer.models.functions import Function, freeze, function_of, import_function, is_path, name_of_part, value_at
from limitformer.models.mixing import matrix_of, tried_logits
from limitformer.models.norm import POSITIVE

Scalar = models.Elementwise | models.ShapedSmooth
Part = Scalar | models.Mixing | models.RadialNorm
AGREEMENT = 1e-6
FAR = (-1000.0, -100.0, -30.0, 30.0, 100.0, 1000.0)


def torch_elementwise(part: Scalar) -> Callable[[Tensor], Tensor]:
    """Return σ on tensors, entry by entry.

    Raises:
        InputError: there is none, or it is another function.
    """
    return compared_elementwise(part, tensor_function(part))


def torch_shaped(part: models.ShapedSmooth, width: int) -> Callable[[Tensor], Tensor]:
    """Return σ_n on tensors at this width; raises as above."""
    return partial(scaled, torch_elementwise(part), part.scale_at(width))


def scaled(function: Callable[[Tensor], Tensor], scale: float, x: Tensor) -> Tensor:
    return scale * function(x / scale)


def torch_scale(part: models.RadialNorm) -> Callable[[Tensor], Tensor]:
    """Return s on tensors, entry by entry; raises as above."""
    return compared_scale(part, tensor_function(part))


def torch_mixing(part: models.Mixing) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the rule on tensors, from logits (*, tokens, tokens) and `visible` (tokens, tokens); raises as above."""
    return compared_mixing(part, tensor_function(part))


@lru_cache(maxsize=1024)
def compared_elementwise(part: Scalar, function: Function | None) -> Callable[[Tensor], Tensor]:
    return scalar_on_tensors(part, function, [*TRIED, 0.3, -0.7, 2.2], FAR)


@lru_cache(maxsize=1024)
def compared_scale(part: models.RadialNorm, function: Function | None) -> Callable[[Tensor], Tensor]:
    return scalar_on_tensors(part, function, [*POSITIVE, 0.7, 2.2], [x for x in FAR if x > 0])


def scalar_on_tensors(
    part: Scalar | models.RadialNorm, function: Function | None, tried: list[float], far: Sequence[float]
) -> Function:
    """Return a scalar function on tensors; `far` out it is compared where both are finite."""
    frozen = function_of(part)
    points, wanted = np.array(tried), np.array([value_at(frozen, x) for x in tried])
    candidates: list[Function] = [*functions_named(frozen.__name__), frozen]
    on_tensors = agreeing(part, function, candidates, lambda candidate: candidate(tensor_of(points)), wanted)
    for x in far:
        entry, number = on_tensors(tensor_of(np.array([x]))).item(), number_at(frozen, x)
        both = isfinite(entry) and isfinite(number)
        same = not both or isclose(entry, number, rel_tol=AGREEMENT, abs_tol=AGREEMENT * np.abs(wanted).max())
        where = f"{entry:.7g} instead of {number:.7g} at {x:g}"
        require(
            same, f"{name_of_part(part)} is another function on tensors: {where}. Nearest: torch=, the same function."
        )
    return on_tensors


def number_at(function: Function, x: float) -> float:
    """Return its value, or NaN where it has none, as far out it may overflow."""
    try:
        return value_at(function, x)
    except InputError:
        return nan


@lru_cache(maxsize=1024)
def compared_mixing(part: models.Mixing, function: Function | None) -> Callable[[Tensor, Tensor], Tensor]:
    rule = function_of(part)
    logits = np.stack([tried_logits(4), tried_logits(4).T - 1])[:, None]
    visible = np.ones((4, 4), bool)
    wanted = np.stack([[matrix_of(rule, y, visible) for y in batch] for batch in logits])
    seen = torch.ones(4, 4, dtype=torch.bool, device="cpu")
    return agreeing(part, function, (rule,), lambda candidate: candidate(tensor_of(logits), seen), wanted)


def agreeing(
    part: Part,
    function: Function | None,
    candidates: Iterable[Function],
    evaluate: Callable[[Function], Any],
    wanted: NDArray[Any],
) -> Function:
    """Return what `torch` of the part names, or else the first candidate, that gives what is `wanted`."""
    if function is not None:
        why = difference(partial(evaluate, function), wanted)
        require(why is None, f"torch of {name_of_part(part)} is another function: {why}.")
        return function
    for candidate in candidates:
        if difference(partial(evaluate, candidate), wanted) is None:
            return candidate
    raise InputError(
        f"{name_of_part(part)} is not known on tensors. Nearest: torch=, the same function written with torch."
    )


def functions_named(name: str) -> Iterator[Function]:
    """Yield the functions of this name in torch.nn.functional and in torch."""
    for home in (functional, torch):
        function = getattr(home, name, None)
        if callable(function):
            yield function


def tensor_function(part: Any) -> Function | None:
    """Return what `torch` of a part names, as it was when the part was made; a path is imported only now.

    Raises:
        InputError: nothing is there.
    """
    name, function = part.torch, part._torch
    if function is not None or name is None:
        return function
    if is_path(name):
        function = import_function(name)
        return freeze(function) if isinstance(function, FunctionType) else function
    function = next(functions_named(name), None)
    if function is None:
        raise InputError(f"torch has no function {name!r}. Nearest: its path, such as 'package.module:name'.")
    return function


def difference(call: Callable[[], Any], wanted: NDArray[Any]) -> str | None:
    """Describe how the value of `call` differs from `wanted`; None if it is equal."""
    try:
        with torch.enable_grad(), torch.device("cpu"):
            output = call()
    except Exception as error:  # noqa: BLE001  a user's code
        return f"it raised {type(error).__name__}: {first_line(error)}"
    if not isinstance(output, Tensor) or output.shape != wanted.shape:
        return f"it did not give a tensor of shape {wanted.shape}"
    values = output.detach().double().numpy()
    if np.allclose(values, wanted, rtol=AGREEMENT, atol=AGREEMENT * np.abs(wanted).max()):
        return None
    k = np.unravel_index(np.argmax(np.abs(values - wanted)), wanted.shape)
    return f"{values[k]:.7g} instead of {wanted[k]:.7g}"


def tensor_of(values: NDArray[Any]) -> Tensor:
    """Return a float64 tensor that needs a gradient, so that a function that leaves torch fails."""
    return torch.tensor(values, dtype=torch.float64, device="cpu", requires_grad=True)
