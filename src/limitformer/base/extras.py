"""Imports that take long, and those that need an extra.

Modules are no garbage: that Python looks through them for it, again and again while more are loaded, is a fifth of the
time that torch, transformers and all that stands on them take.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from limitformer.base.errors import MissingExtraError


@contextmanager
def loading() -> Iterator[None]:
    """No collection of garbage in the block, and then as before."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def of_extra(extra: str) -> Iterator[None]:
    """The same for what an extra brings.

    Raises:
        MissingExtraError: a package that is imported in the block is not there.
    """
    try:
        with loading():
            yield
    except ModuleNotFoundError as error:
        package = str(error.name).split(".")[0]
        if package == "limitformer":
            raise
        raise MissingExtraError(package, extra) from error
