"""Imports that need an extra, and packages whose names are imported when they are first asked for."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

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


def require_packages(extra: str, *packages: str) -> None:
    """Raise MissingExtraError unless these packages are installed; none of them is imported."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtraError(package, extra)


class LazyPackage(ModuleType):
    """A package whose public names are imported when they are first asked for: its `_HOMES` are {name: submodule}.

    The import of a submodule makes it an attribute of its package. Where a public name is also that of a submodule,
    as `check` of `checking.check`, the attribute stays what is public.
    """

    _HOMES: Mapping[str, str]

    def __getattr__(self, name: str) -> object:
        """Import what the name stands for, or the submodule of this name."""
        home = self._HOMES.get(name, name) if not name.startswith("_") else ""
        if not home or find_spec(f"{self.__name__}.{home}") is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module = import_module(f"{self.__name__}.{home}")
        return self.__dict__.setdefault(name, getattr(module, name) if name in self._HOMES else module)

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute, except where a submodule would hide a public name."""
        if not (isinstance(value, ModuleType) and name in self.__dict__.get("_HOMES", ())):
            super().__setattr__(name, value)
