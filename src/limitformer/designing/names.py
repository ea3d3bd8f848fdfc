"""The names of the knobs; this module imports nothing large, so that options are validated at once."""

from collections.abc import Iterable

from limitformer.base.errors import InputError, nearest, require

FIELD = "initializer_range"
SCALES = ("embedding", "output", "logits")
SHAPED = ("gamma", "tau0")


def distinct(names: str | Iterable[str]) -> list[str]:
    """Return one or two names; raise `InputError` for more, or for equal names."""
    require(isinstance(names, Iterable), f"knobs must be one or two names; got {names!r}.")
    result = [names] if isinstance(names, str) else list(names)
    require(len(result) in (1, 2), f"knobs must be one or two names; got {len(result)}.")
    require(len(set(result)) == len(result), f"knobs must differ; got {', '.join(result)}.")
    return result


def is_pattern(name: str) -> bool:
    """Whether the name is a pattern of weights' names."""
    return "*" in name or "." in name


def no_knob(name: str, known: tuple[str, ...]) -> InputError:
    """Return the error for an unknown knob."""
    return InputError(
        f"there is no knob {name!r}; there are {', '.join(known)}, and patterns of names.{nearest(name, known)}"
    )
