"""The installed version, imports that need an extra, and packages that import their names at first use."""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from limitformer.base.errors import MissingExtraError
from limitformer.base.moved import MOVED, moved


@cache
def package_version() -> str:
    """Return the installed version of limitformer; cached, because the look-up takes longer than a small simulation."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("limitformer")
    except PackageNotFoundError:
        return "not installed"


def require_packages(extra: str, *packages: str) -> None:
    """Raise `MissingExtraError` unless these packages are installed; import none of them."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtraError(package, extra)


class LazyPackage(ModuleType):
    """A package that imports its public names at first use; `_HOMES` is {name: submodule}.

    A home may also be the full name of a module elsewhere.

    Importing a submodule makes it an attribute of its package. Where a public name equals that of a submodule, such as
    `check` in `checking.check`, the attribute stays the public one.
    """

    _HOMES: Mapping[str, str]

    def __getattr__(self, name: str) -> object:
        """Import the public name, or the submodule of this name."""
        home = self._HOMES.get(name, name) if not name.startswith("_") else ""
        home = home if home.startswith("limitformer.") or not home else f"{self.__name__}.{home}"
        full = f"{self.__name__}.{name}"
        if full in MOVED or not home or find_spec(home) is None:
            raise AttributeError(moved(full, f"module {self.__name__!r} has no attribute {name!r}"))
        module = import_module(home)
        return self.__dict__.setdefault(name, getattr(module, name) if name in self._HOMES else module)

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute, except where a submodule would hide a public name."""
        if not (isinstance(value, ModuleType) and name in self.__dict__.get("_HOMES", ())):
            super().__setattr__(name, value)
