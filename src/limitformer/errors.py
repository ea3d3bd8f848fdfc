"""What goes wrong, said in one line: what came, what was needed, and the nearest repair."""


class InputError(ValueError):
    """An argument that cannot be used; the command line prints its message alone."""


class NoLimitError(InputError):
    """The model has no infinite-depth limit that is known; the message names the scaling that is missing."""


class MissingExtraError(ImportError):
    """An optional package that is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"This needs {package}, which is not installed: pip install 'limitformer[{extra}]'.")


def require(condition: bool, message: str) -> None:
    """Raise `InputError(message)` unless `condition` holds."""
    if not condition:
        raise InputError(message)


def require_count(name: str, value: object, least: int = 1) -> None:
    """Raise `InputError` unless `value` is a whole number of at least `least`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole, f"{name} must be a whole number; got {value!r}.")
    require(int(str(value)) >= least, f"{name} must be at least {least}; got {value}.")
