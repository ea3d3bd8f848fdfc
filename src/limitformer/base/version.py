"""The installed version."""

from functools import cache


@cache
def package_version() -> str:
    """Return the installed version of limitformer; cached, because the look-up takes longer than a small simulation."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("limitformer")
    except PackageNotFoundError:
        return "not installed"
