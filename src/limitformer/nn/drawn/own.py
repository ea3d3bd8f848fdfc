r"""Functions of one's own on tensors: found by what a part says of them, and tried against the part's function.

σ of an `Elementwise` and the rule of a `Mixing` are functions of numbers; a network needs the same on tensors, with
gradients. It is what `torch` names; else torch's own function of that name; else the function itself, where it takes
tensors. Whatever it is must give the numbers of the part's function: two different functions would be two models. They
are compared again when either reads something else than before (`models.readings`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from math import isclose, isfinite, nan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from limitformer import models
from limitformer.base.errors import InputError, first_line, require
from limitformer.models.elementwise import TRIED
from limitformer.models.functions import Function, import_function, is_path, python_function, value_at
from limitformer.models.mixing import matrix_of, tried_logits
from limitformer.models.norm import POSITIVE
from limitformer.models.own_function import function_of, name_of_part
from limitformer.models.readings import Reading, reading_of

Part = models.Elementwise | models.Mixing | models.RadialNorm
AGREEMENT = 1e-6
FAR = (-1000.0, -100.0, -30.0, 30.0, 100.0, 1000.0)


def torch_elementwise(part: models.Elementwise) -> Callable[[Tensor], Tensor]:
    """σ on tensors, entry by entry.

    Raises:
        InputError: there is none, or it is another function.
    """
    return kept_elementwise(part, *readings_of(part, function_of(part)))


def torch_scale(part: models.RadialNorm) -> Callable[[Tensor], Tensor]:
    """s on tensors, entry by entry; raises as above."""
    return kept_scale(part, *readings_of(part, function_of(part)))


def torch_mixing(part: models.Mixing) -> Callable[[Tensor, Tensor], Tensor]:
    """The rule on tensors, from logits (*, tokens, tokens) and `visible` (tokens, tokens); raises as above."""
    return kept_mixing(part, *readings_of(part, function_of(part)))


def readings_of(part: Part, function: Function) -> tuple[Reading, Reading]:
    """What the function, and that on tensors, read now."""
    return reading_of(function), () if part.torch is None else reading_of(tensor_function(part.torch))


@lru_cache(maxsize=1024)
def kept_elementwise(part: models.Elementwise, *readings: Reading) -> Callable[[Tensor], Tensor]:
    """σ, compared once for what both functions read."""
    return scalar_on_tensors(part, function_of(part), [*TRIED, 0.3, -0.7, 2.2], FAR)


@lru_cache(maxsize=1024)
def kept_scale(part: models.RadialNorm, *readings: Reading) -> Callable[[Tensor], Tensor]:
    """s, in the same way."""
    return scalar_on_tensors(part, function_of(part), [*POSITIVE, 0.7, 2.2], [x for x in FAR if x > 0])


def scalar_on_tensors(part: Part, function: Function, tried: list[float], far: Sequence[float]) -> Function:
    """A function of numbers, entry by entry; `far` out it is compared where both are finite."""
    points, wanted = np.array(tried), np.array([value_at(function, x) for x in tried])
    found = agreeing(part, named_candidates(function), lambda found: found(tensor_of(points)), wanted)
    for x in far:
        on_tensors, number = found(tensor_of(np.array([x]))).item(), number_at(function, x)
        both = isfinite(on_tensors) and isfinite(number)
        same = not both or isclose(on_tensors, number, rel_tol=AGREEMENT, abs_tol=AGREEMENT * np.abs(wanted).max())
        where = f"{on_tensors:.7g} in the place of {number:.7g} at {x:g}"
        require(
            same, f"{name_of_part(part)} is another function on tensors: {where}. Nearest: torch=, the same function."
        )
    return found


def number_at(function: Function, x: float) -> float:
    """Its value, NaN where it has none: far out it may overflow."""
    try:
        return value_at(function, x)
    except InputError:
        return nan


@lru_cache(maxsize=1024)
def kept_mixing(part: models.Mixing, *readings: Reading) -> Callable[[Tensor, Tensor], Tensor]:
    """The rule, in the same way."""
    logits = np.stack([tried_logits(4), tried_logits(4).T - 1])[:, None]
    visible = np.ones((4, 4), bool)
    wanted = np.stack([[matrix_of(function_of(part), y, visible) for y in batch] for batch in logits])
    seen = torch.ones(4, 4, dtype=torch.bool, device="cpu")
    return agreeing(part, (python_function(function_of(part)),), lambda found: found(tensor_of(logits), seen), wanted)


def agreeing(
    part: Part,
    otherwise: tuple[Function, ...],
    tried: Callable[[Function], Any],
    wanted: NDArray[Any],
) -> Function:
    """What `torch` of the part names, or the first of the others that gives what is `wanted`."""
    if part.torch is not None:
        found = tensor_function(part.torch)
        why = difference(partial(tried, found), wanted)
        require(why is None, f"torch of {name_of_part(part)} is another function: {why}.")
        return found
    for found in otherwise:
        if difference(partial(tried, found), wanted) is None:
            return found
    raise InputError(
        f"{name_of_part(part)} is not known on tensors. Nearest: torch=, the same function written with torch."
    )


def named_candidates(function: Function) -> tuple[Function, ...]:
    """torch's functions of that name, and the function itself."""
    own = python_function(function)
    return *functions_named(own.__name__), own


def functions_named(name: str) -> Iterator[Function]:
    """Of torch.nn.functional and of torch."""
    for home in (functional, torch):
        found = getattr(home, name, None)
        if callable(found):
            yield found


def tensor_function(given: Function | str) -> Function:
    """The function itself, of a path, or of a name in torch.

    Raises:
        InputError: nothing is there.
    """
    if not isinstance(given, str):
        return given
    if is_path(given):
        return import_function(given)
    found = next(functions_named(given), None)
    if found is None:
        raise InputError(f"torch has no function {given!r}. Nearest: its path, such as 'package.module:name'.")
    return found


def difference(call: Callable[[], Any], wanted: NDArray[Any]) -> str | None:
    """Why what `call` gives is not `wanted`; None if it is."""
    try:
        with torch.enable_grad(), torch.device("cpu"):
            found = call()
    except Exception as error:  # noqa: BLE001  somebody's own code
        return f"it raised {type(error).__name__}: {first_line(error)}"
    if not isinstance(found, Tensor) or found.shape != wanted.shape:
        return f"it gave no tensor of shape {wanted.shape}"
    values = found.detach().double().numpy()
    if np.allclose(values, wanted, rtol=AGREEMENT, atol=AGREEMENT * np.abs(wanted).max()):
        return None
    k = np.unravel_index(np.argmax(np.abs(values - wanted)), wanted.shape)
    return f"{values[k]:.7g} in the place of {wanted[k]:.7g}"


def tensor_of(values: NDArray[Any]) -> Tensor:
    """In float64, with a gradient, so that a function that leaves torch is none."""
    return torch.tensor(values, dtype=torch.float64, device="cpu", requires_grad=True)
