r"""A finished cell as a file, in a format that runs no code.

    checksum                                                    SHA-256 of the cell's name and of all that follows
    {"status": 1, "seconds": 0.7, "finished": 1.7e9, "error": ""}
    {"version": "0.2.0", "numpy": "2.4.0", …}                   the code that made the cell (`origin`)
    …                                                           its results by name, little-endian, in C order

`sweep.json` lists the results with their dimensions, shapes and types. A failed cell has none.

A cell's name is a hash of all that determines its numbers: the sweep without the values of its axes, and the cell's own
value on each axis. The checksum covers the name. Hence a file is valid only where it belongs: neither as another cell
nor in the store of another sweep.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import InputError, require
from limitformer.sweep.describe import Sweep
from limitformer.sweep.grid import Index
from limitformer.sweep.origin import Code, checked_codes
from limitformer.sweep.reduce import Reduced

MISSING, DONE, FAILED, DAMAGED = 0, 1, 2, 3
HEADER_LIMIT = 2**15  # bytes before the results
LONGEST = 1e11  # seconds, 3,000 years: for a cell, and since 1970
ERROR_LENGTH = 1000  # characters of a stored error
SHARD_LETTERS = 3  # of a cell's name: 4,096 subfolders, with about 1,000 files each for four million cells
TYPES = ("<f8", "<f4", "<i8", "<i4", "<i2", "|i1", "<u8", "<u4", "<u2", "|u1", "|b1")
ENDING = ".cell"
NAME = re.compile(rf"[0-9a-f]{{32}}\{ENDING}")
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True)
class Kind:
    """Dimensions, shape and type of one result of a cell."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Bytes in a cell's file."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def fill(self) -> Any:
        """The value of a cell without results."""
        return np.nan if self.dtype.kind == "f" else 0


OWN = {name: Kind((), (), np.dtype(dtype)) for name, dtype in {"status": "i1", "code": "i4", "seconds": "f4"}.items()}


@dataclass(frozen=True)
class CellFile:
    """The content of a cell's file.

    Attributes:
        status: DONE or FAILED.
        seconds: the time that the cell took.
        finished: when it ended, in seconds since 1970.
        error: why it failed.
        code: the number of the code that made it.
        origin: that code.
        data: the bytes of its results.
    """

    status: int
    seconds: float
    finished: float
    error: str
    code: int
    origin: Code
    data: bytes


class Names:
    """The names of a sweep's cells."""

    def __init__(self, sweep: Sweep) -> None:
        record = sweep.record()
        over = record.pop("over")
        self.sweep = hashlib.sha256(json.dumps([record, list(over)], sort_keys=True).encode())
        self.values = [[json.dumps(value).encode() + b"\n" for value in values] for values in over.values()]

    def of(self, index: Index) -> str:
        """Return the name of the cell at `index`."""
        digest = self.sweep.copy()
        for values, k in zip(self.values, index, strict=True):
            digest.update(values[k])
        return f"{digest.hexdigest()[:32]}{ENDING}"

    def among(self, names: Iterable[str]) -> Iterator[tuple[Index, str]]:
        """Yield each cell whose name is among `names`, in the order of the grid.

        Cells that share their first values share the work of hashing them: a grid of a million cells takes a second.
        """
        wanted = {bytes.fromhex(name[:32]) for name in names if NAME.fullmatch(name)}
        states: Iterator[tuple[Any, Index]] = iter([(self.sweep, ())])
        for values in self.values:
            states = extended(states, values)
        for digest, index in states if wanted else ():
            name = digest.digest()[:16]
            if name in wanted:
                yield index, f"{name.hex()}{ENDING}"
                wanted.remove(name)
                if not wanted:
                    return


def extended(states: Iterator[tuple[Any, Index]], values: Sequence[bytes]) -> Iterator[tuple[Any, Index]]:
    """Yield the states of the hash, and the places, after each value of one more axis."""
    for before, place in states:
        for k, value in enumerate(values):
            digest = before.copy()
            digest.update(value)
            yield digest, (*place, k)


def place_of(name: str) -> str:
    """Return the place of a cell's file in the folder `cells`."""
    return f"{name[:SHARD_LETTERS]}/{name}"


def checksum(name: str, body: bytes) -> bytes:
    digest = hashlib.sha256(name.encode())
    digest.update(body)
    return digest.hexdigest().encode()


def encoded(name: str, facts: Mapping[str, Any], code: Code, data: bytes) -> bytes:
    """Return the file of a cell."""
    body = b"\n".join([b"", json.dumps(facts).encode(), json.dumps(code).encode(), data])
    return checksum(name, body) + body


def decoded(name: str, file: bytes, kinds: Mapping[str, Kind]) -> CellFile | None:
    """Return the content of a cell's file; None if it is damaged."""
    if file[:64] != checksum(name, file[64:]):
        return None
    try:
        _, header, code, data = file.split(b"\n", 3)
        facts = json.loads(header)
        status, error = facts["status"], facts["error"]
        seconds, finished = float(facts["seconds"]), float(facts["finished"])
        number, origin = code_from(code)
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):  # an `InputError` is a ValueError
        return None
    size = sum(kind.size for kind in kinds.values()) if status == DONE else 0
    times = 0 <= seconds <= LONGEST and 0 <= finished <= LONGEST  # NaN is neither
    valid = status in (DONE, FAILED) and isinstance(error, str) and times
    return CellFile(status, seconds, finished, error, number, origin, data) if valid and len(data) == size else None


@lru_cache(maxsize=1000)
def code_from(text: bytes) -> tuple[int, Code]:
    ((number, code),) = checked_codes([json.loads(text)]).items()
    return number, code


def bytes_of(results: Mapping[str, Reduced], kinds: Mapping[str, Kind]) -> bytes:
    """Return the results of a cell as bytes.

    Raises:
        InputError: a result has another shape than in the first cell.
    """
    parts = []
    for name, kind in sorted(kinds.items()):
        values = np.asarray(results[name].values)
        same = values.shape == kind.shape
        require(same, f"{name} has shape {values.shape} in this cell and {kind.shape} in the first one.")
        parts.append(values.astype(kind.dtype, copy=False).tobytes())
    return b"".join(parts)


def arrays_of(data: bytes, kinds: Mapping[str, Kind]) -> dict[str, NDArray[Any]]:
    """Return the results in a cell's file."""
    arrays, start = {}, 0
    for name, kind in sorted(kinds.items()):
        values = np.frombuffer(data, kind.dtype, prod(kind.shape), start)
        arrays[name], start = values.reshape(kind.shape), start + kind.size
    return arrays


def record_of(kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """Return the kinds for JSON."""
    return {name: [list(kind.dims), list(kind.shape), kind.dtype.str] for name, kind in kinds.items()}


def kinds_from(record: Any) -> dict[str, Kind]:
    """Return the kinds that a description of unknown origin has.

    Raises:
        InputError: an impossible name, dimension, shape or type.
    """
    require(isinstance(record, dict) and len(record) > 0, "its results are not a table.")
    kinds = {name: checked_kind(name, kind) for name, kind in record.items()}
    size = sum(kind.size for kind in kinds.values())
    require(size < 2**62, f"A cell of {size:,} bytes is larger than any memory.")
    return kinds


def checked_kind(name: str, kind: Any) -> Kind:
    require(bool(WORD.fullmatch(name)) and name not in OWN, f"a result cannot have the name {name[:40]!r}.")
    try:
        dims, shape, dtype = kind
        words = all(WORD.fullmatch(dim) for dim in dims) and len(set(dims)) == len(dims)
        sizes = all(type(size) is int and 0 <= size < 2**48 for size in shape) and len(shape) == len(dims) < 8
    except (TypeError, ValueError) as error:
        raise InputError(f"its result {name} is not described by dimensions, shape and type.") from error
    require(words and sizes, f"its result {name} has impossible dimensions: {str(dims)[:40]}, {str(shape)[:40]}.")
    require(dtype in TYPES, f"its result {name} has the type {str(dtype)[:40]}; possible are {', '.join(TYPES)}.")
    return Kind(tuple(dims), tuple(shape), np.dtype(dtype))
