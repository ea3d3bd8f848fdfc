"""The version that is installed."""

from functools import cache


@cache
def package_version() -> str:
    """The installed version of limitformer; to look it up takes longer than a small simulation."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("limitformer")
    except PackageNotFoundError:
        return "not installed"
