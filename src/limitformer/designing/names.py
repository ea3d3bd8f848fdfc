"""The names of the knobs, in a module that imports nothing large: options are checked against them at once."""

from collections.abc import Iterable

from limitformer.base.errors import InputError, nearest, require

FIELD = "initializer_range"
SCALES = ("embedding", "output", "logits")
SHAPED = ("gamma", "tau0")


def distinct(names: str | Iterable[str]) -> list[str]:
    """Return one or two names; `InputError` for more, or twice the same."""
    given = [names] if isinstance(names, str) else list(names)
    require(len(given) in (1, 2), f"knobs must be one or two names; got {len(given)}.")
    require(len(set(given)) == len(given), f"knobs must differ; got {', '.join(given)}.")
    return given


def is_pattern(name: str) -> bool:
    """Whether the name is a pattern of weights' names."""
    return "*" in name or "." in name


def no_knob(name: str, known: tuple[str, ...]) -> InputError:
    """Return the error about a knob that there is not."""
    return InputError(
        f"there is no knob {name!r}; there are {', '.join(known)}, and patterns of names.{nearest(name, known)}"
    )
