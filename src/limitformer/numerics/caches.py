"""The folder of compiled kernels, to which no other user can write.

Numba's index of a cache is a pickle: a user who can write into the folder, or replace it, can run code as the owner.
So the folder belongs to the user (mode 0700), and all folders above it belong to the user, to the system or to the
owner of the source, whose code runs anyway. Without such a folder kernels stay in memory.
"""

import os
import stat
import sys
import tempfile
from functools import cache
from pathlib import Path


def folder(chosen: str, package: Path, name: str) -> Path | None:
    """Return the first safe folder `name` in `chosen`, the source and the user's caches; None if there is none."""
    return next(filter(usable, (candidate.absolute() / name for candidate in candidates(chosen, package))), None)


def candidates(chosen: str, package: Path) -> list[Path]:
    """Return the folders that may contain the cache, best first."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = [Path(chosen)] if chosen else []
    places.append(package / "__pycache__")
    if os.path.isabs(home):  # a user without an entry in passwd and without HOME has none
        places.append(Path(home) / "limitformer")
    try:
        return [*places, Path(tempfile.gettempdir()) / f"limitformer-{user()}"]
    except OSError:  # no temporary folder can be written
        return places


def user() -> int | None:
    """Return the number of the user of this process; None on systems without."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def usable(place: Path) -> bool:
    """Make `place` if it does not exist, and return whether only this user can write files there."""
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        if user() is not None and not (private(place) and all(map(guarded, place.resolve().parents))):
            return False
        tempfile.TemporaryFile(dir=place).close()  # the only reliable test: mode bits do not bind root
    except OSError:
        return False
    return True


def private(place: Path) -> bool:
    """Whether `place` is a folder, not a link, to which only this user has access."""
    state = place.lstat()
    return stat.S_ISDIR(state.st_mode) and state.st_uid == user() and not state.st_mode & 0o077


def guarded(place: Path) -> bool:
    """Whether other users cannot rename entries of `place`."""
    state, trusted = place.stat(), (user(), 0, Path("/").stat().st_uid, Path(__file__).stat().st_uid)
    return state.st_uid in trusted and (not state.st_mode & stat.S_IWOTH or bool(state.st_mode & stat.S_ISVTX))


def how_often(folder: Path | None, chosen: str) -> str:
    """Describe how often kernels are compiled with this cache, if the user has `chosen` a folder ("" for none)."""
    if folder is None:
        return "in every process: no folder of yours can keep them. Nearest: NUMBA_CACHE_DIR, a folder of mode 0700"
    if chosen and folder.parent != Path(chosen).absolute():
        return f"the first time only; kept in {folder.parent}, as NUMBA_CACHE_DIR={chosen} is not a safe folder"
    return "the first time only"


@cache
def warn_not_cached(folder: Path | None, reason: str) -> None:
    """Print one line, once per process."""
    print(f"Kernels cannot be cached in {folder} ({reason}): each process compiles them.", file=sys.stderr)
