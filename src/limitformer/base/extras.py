"""Imports that need an extra."""

from collections.abc import Iterator
from contextlib import contextmanager

from limitformer.base.errors import MissingExtraError


@contextmanager
def of_extra(extra: str) -> Iterator[None]:
    """Name the extra that brings a package which is imported in the block.

    Raises:
        MissingExtraError: such a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).split(".")[0]
        if package == "limitformer":
            raise
        raise MissingExtraError(package, extra) from error
