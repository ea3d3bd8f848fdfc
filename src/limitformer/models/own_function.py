"""What parts made of somebody's function share: they keep the function, the same on tensors, and what it read."""

from typing import Any

from limitformer.base.errors import set_fields
from limitformer.models.functions import Function, checked, checked_torch, name_of
from limitformer.models.readings import reading_of, require_unchanged
from limitformer.models.renewed import renewed


def keep_functions(part: Any) -> None:
    """Check `function` and `torch` of a part that is being made, and note what the function reads, which no JSON has.

    Raises:
        InputError: `function` is none of Python or Numba, or `torch` names nothing that can be called.
    """
    function = checked("function", part.function)
    set_fields(part, function=function, torch=checked_torch(part.torch), _read=reading_of(function))


def function_of(part: Any) -> Function:
    """The function of a part, its helpers made again; `InputError` where it reads what has changed since then."""
    require_unchanged(part.function, part._read)
    return renewed(part.function, part._read)


def has_function(part: object) -> bool:
    """Whether it is made of a function of somebody's."""
    return hasattr(part, "_read")


def name_of_part(part: Any) -> str:
    """For messages: `Elementwise(module:function)`."""
    return f"{type(part).__name__}({name_of(part.function)})"
