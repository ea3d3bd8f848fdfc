"""Which folder keeps compiled kernels: one that nobody else can write to.

Numba's index of a cache is a pickle: whoever can write into the folder, or put another folder in its place, runs code
as its user. So the folder belongs to the user alone (mode 0700), and all folders that it lies in belong to the user,
to the system or to whoever wrote the source, which runs anyway. Where there is no such folder, kernels stay in memory.
"""

import os
import stat
import sys
import tempfile
from functools import cache
from pathlib import Path


def folder(chosen: str, package: Path, name: str) -> Path | None:
    """The first safe folder `name` of `chosen`, beside the source, and in the user's caches; None if there is none."""
    return next(filter(usable, (candidate.absolute() / name for candidate in candidates(chosen, package))), None)


def candidates(chosen: str, package: Path) -> list[Path]:
    """Where kernels may be kept, best first."""
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
    """The number of the user who runs this; None on systems without."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def usable(place: Path) -> bool:
    """Whether files can be written in `place`, made if need be, that nobody else can change."""
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        if user() is not None and not (private(place) and all(map(guarded, place.resolve().parents))):
            return False
        tempfile.TemporaryFile(dir=place).close()  # the only sure sign: root may write where it cannot
    except OSError:
        return False
    return True


def private(place: Path) -> bool:
    """Whether `place` is a folder, no link, of this user alone."""
    state = place.lstat()
    return stat.S_ISDIR(state.st_mode) and state.st_uid == user() and not state.st_mode & 0o077


def guarded(place: Path) -> bool:
    """Whether strangers cannot rename what lies in `place`."""
    state, trusted = place.stat(), (user(), 0, Path("/").stat().st_uid, Path(__file__).stat().st_uid)
    return state.st_uid in trusted and (not state.st_mode & stat.S_IWOTH or bool(state.st_mode & stat.S_ISVTX))


def how_often(kept: Path | None, chosen: str) -> str:
    """How often kernels are compiled that the folder `kept` has, if the user has `chosen` one ("" for none)."""
    if kept is None:
        return "in every process: no folder of yours can keep them. Nearest: NUMBA_CACHE_DIR, a folder of mode 0700"
    if chosen and kept.parent != Path(chosen).absolute():
        return f"the first time only; kept in {kept.parent}, as NUMBA_CACHE_DIR={chosen} is no safe folder to write"
    return "the first time only"


@cache
def say_not_kept(folder: Path | None, reason: str) -> None:
    """One line, once a process."""
    print(f"Kernels cannot be kept in {folder} ({reason}): each process compiles them anew.", file=sys.stderr)
