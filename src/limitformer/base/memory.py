"""Memory: check that a recording fits before it begins."""

import os
from collections.abc import Iterable
from pathlib import Path

from limitformer.base.errors import InputError, require

SHARE = 0.75  # of the free memory that a recording may take

CGROUP = Path("/sys/fs/cgroup")
LIMITS = (  # files of the limit and of the use, and the line of memory.stat for page cache: versions 2 and 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def available_memory() -> int | None:
    """Return the bytes that are free, also within a container's limit; None if the system does not report them."""
    amounts = free_in_system(), *(headroom(*names) for names in LIMITS)
    return min((amount for amount in amounts if amount is not None), default=None)


def free_in_system() -> int | None:
    """Return the available memory of Linux; elsewhere the physical memory."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        names = getattr(os, "sysconf_names", {})
        known = "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else None


def headroom(limit: str, used: str, cached: str) -> int | None:
    """Return a control group's limit minus its use, or None; page cache counts as free, as the system reclaims it."""
    try:
        state = (CGROUP / limit).with_name("memory.stat").read_text()
        reclaimable = sum(int(line.split()[1]) for line in state.splitlines() if line.split()[:1] == [cached])
        return max(0, int((CGROUP / limit).read_text()) - int((CGROUP / used).read_text()) + reclaimable)
    except (OSError, ValueError):
        return None


def check_bytes(needed: int, samples: int, points: int, axis: str, smaller: Iterable[str] = ()) -> None:
    """Raise `InputError` if a recording of `needed` bytes does not fit the free memory.

    The message proposes fewer points, and the repairs in `smaller`.
    """
    available = available_memory()
    if available is None or needed <= SHARE * available:
        return
    fitting = int(SHARE * available * points / needed)
    repairs = [f"record at most {fitting} {axis}s" if fitting else "take fewer samples", *smaller]
    raise InputError(
        f"Recording {samples} samples at {points} {axis}s takes {readable(needed)}; "
        f"{readable(int(available))} are free. Nearest: {', or '.join(repairs)}."
    )


def readable(size: int) -> str:
    """Return a number of bytes in GiB, MiB or KiB.

    >>> readable(3 * 2**30 // 2)
    '1.5 GiB'
    """
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{size / 2**power:,.1f} {unit}"
    return f"{size} bytes"


def check_scratch(needed: int, what: str, repair: str) -> None:
    """Raise `InputError` if the arrays that a thread works on do not fit the free memory."""
    available = available_memory()
    fits = available is None or needed <= SHARE * available
    require(fits, f"{what} takes {readable(needed)}, more than is free. Nearest: {repair}.")
