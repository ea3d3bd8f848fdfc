"""Rows of cells: what proves that one is what was written there, and its form as a file.

The key of a cell is made from all that decides about its numbers: the sweep but for the values of its axes, and the
cell's own value on each axis. The checksum of a row covers the key. So a row is sound only where it belongs: not in
another cell, nor in the store of another sweep.

A finished cell is a file of its own until it is gathered into the arrays: the row, and the code that made it as JSON.
"""

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from limitformer.sweep.describe import Sweep
from limitformer.sweep.layout import Block, Index, Layout, Rows
from limitformer.sweep.origin import Code, checked_codes

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ over the golden ratio
MOST_CODE = 10_000  # bytes of the JSON of a code


def number_of(text: str) -> int:
    """64 bits of a text's digest."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Keys:
    """The keys of a sweep's cells."""

    def __init__(self, sweep: Sweep) -> None:
        record = sweep.record()
        self.over: Mapping[str, Any] = record.pop("over")
        self.sweep = np.uint64(number_of(json.dumps([record, list(self.over)], sort_keys=True)))

    def at(self, cells: tuple[slice, ...]) -> NDArray[np.uint64]:
        """(cells on each axis): of a part of the grid."""
        found = np.full((1,) * len(cells), self.sweep)
        for axis, (values, part) in enumerate(zip(self.over.values(), cells, strict=True)):
            numbers = np.array([number_of(repr(value)) for value in values[part]], np.uint64)
            along = numbers.reshape([-1 if k == axis else 1 for k in range(len(cells))])
            found = (found ^ along) * MULTIPLIER
            found = found ^ (found >> np.uint64(32))
        return found

    def of(self, index: Index) -> int:
        """Of one cell."""
        return int(self.at(tuple(slice(k, k + 1) for k in index)).item())


def checksum(row: memoryview, key: int) -> int:
    """Of the row of a cell, all but its last field; never 0, which is that of no row."""
    return zlib.crc32(row[:-4], zlib.crc32(key.to_bytes(8, "little"))) or 1


def sound(rows: Rows, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """(…): which rows (…, bytes) are what was written for the cells with these keys (…)."""
    size = rows.shape[-1]
    whole = np.ascontiguousarray(rows).reshape(-1).data
    kept = np.ascontiguousarray(rows[..., -4:]).view("<u4").ravel().tolist()
    marks = [
        mark != 0 and mark == checksum(whole[k * size : (k + 1) * size], key)
        for k, (key, mark) in enumerate(zip(keys.ravel().tolist(), kept, strict=True))
    ]
    return np.array(marks, np.bool_).reshape(keys.shape)


def loose_name(index: Index) -> str:
    """The file of a finished cell."""
    return ".".join(map(str, index))


def loose_index(name: str, shape: Index) -> Index | None:
    """The cell of a file; None if it is no cell of the grid."""
    parts = name.split(".")
    if len(parts) != len(shape) or not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        return None
    index = tuple(map(int, parts))
    return index if all(k < count for k, count in zip(index, shape, strict=True)) else None


def loose_data(row: Rows, code: Code) -> bytes:
    """What is in the file."""
    return row.tobytes() + json.dumps(code).encode()


def loose_row(data: bytes, layout: Layout, key: int) -> tuple[Rows, Code] | None:
    """What was in the file of the cell with that key; None if it is damaged."""
    row = np.frombuffer(data, np.uint8, count=min(layout.size, len(data)))
    if len(row) < layout.size or not sound(row[None], np.array([key], np.uint64))[0]:
        return None
    try:
        ((number, code),) = checked_codes([json.loads(data[layout.size :])]).items()
    except (ValueError, RecursionError):  # an `InputError` is a ValueError
        return None
    return (row, code) if number == layout.fields["code"].of(row) else None


def by_block(indices: Iterable[Index], lengths: Index) -> dict[Index, list[Index]]:
    """The cells of each block that has some."""
    found: dict[Index, list[Index]] = {}
    for index in indices:
        found.setdefault(tuple(k // length for k, length in zip(index, lengths, strict=True)), []).append(index)
    return found


def place_in(block: Block, index: Index) -> Index:
    """Where a cell of the grid lies in its block."""
    return tuple(k - first for k, first in zip(index, block.start, strict=True))
