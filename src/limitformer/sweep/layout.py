"""What a store keeps of a cell, as one row of bytes; and which cells share a chunk.

A row has the cell's results one after the other, and what is known of the cell itself (`OWN`). Its last field is the
checksum of all others and of the cell's key (`rows`). Each field is an array of the store, over the axes of the grid
and the dimensions of its own. A block of neighbouring cells shares a chunk in every array, so that a million cells are
some thousand files.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import InputError, require
from limitformer.sweep.reduce import Reduced

Kind = tuple[tuple[str, ...], tuple[int, ...], np.dtype[Any]]  # own dimensions, their sizes, type
Index = tuple[int, ...]
Rows = NDArray[np.uint8]  # (…, bytes of a row)

ERROR_LENGTH = 240
OWN: dict[str, Kind] = {
    "status": ((), (), np.dtype("i1")),  # 0 missing, 1 done, 2 failed, 3 damaged
    "code": ((), (), np.dtype("<i4")),  # what made it (`origin`)
    "seconds": ((), (), np.dtype("<f4")),
    "finished": ((), (), np.dtype("<f8")),  # seconds since 1970
    "error": (("character",), (ERROR_LENGTH,), np.dtype("u1")),
    "checksum": ((), (), np.dtype("<u4")),  # of all others: the last one
}
TYPES = ("<f8", "<f4", "<i8", "<i4", "<i2", "|i1", "<u8", "<u4", "<u2", "|u1", "|b1")
MOST_CELLS = 4096  # in a block
LARGEST_BLOCK = 2**20  # cells, of whoever makes larger ones
MOST_BYTES = 2**22  # of a block, if it has more than one cell
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True)
class Field:
    """An array of the store, and the place of its values in a row.

    Attributes:
        name: of the array.
        dims, shape, dtype: of the values of one cell.
        start: the first byte in a row.
    """

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int

    @property
    def size(self) -> int:
        """Bytes in a row."""
        return prod(self.shape) * self.dtype.itemsize

    def of(self, rows: Rows) -> NDArray[Any]:
        """(…, *shape): the values in rows (…, bytes)."""
        values: NDArray[Any] = rows[..., self.start : self.start + self.size].view(self.dtype)
        return values.reshape((*rows.shape[:-1], *self.shape))

    def put(self, rows: Rows, values: Any) -> None:
        """Set the values in rows (…, bytes)."""
        flat = np.ascontiguousarray(values, self.dtype).reshape((*rows.shape[:-1], -1))
        rows[..., self.start : self.start + self.size] = flat.view(np.uint8)

    @property
    def fill(self) -> Any:
        """What stands for a missing value."""
        return np.nan if self.dtype.kind == "f" else 0


class Layout:
    """The fields of a row.

    Attributes:
        fields: the status, which is read first and written last; the results; and the others of `OWN`.
        results: names of the results.
        size: bytes of a row.
        blank: the row of a missing cell.
    """

    def __init__(self, results: Mapping[str, Kind]) -> None:
        self.fields: dict[str, Field] = {}
        self.results, self.size = tuple(results), 0
        for name, (dims, shape, dtype) in {"status": OWN["status"], **results, **OWN}.items():
            self.fields[name] = Field(name, dims, shape, dtype.newbyteorder("<"), self.size)
            self.size += self.fields[name].size
        require(self.size < 2**62, f"A cell of {self.size:,} bytes is larger than any memory.")

    def blank(self, *shape: int) -> Rows:
        """(*shape, bytes): rows of missing cells."""
        one = np.zeros(self.size, np.uint8)
        for name in self.results:
            field = self.fields[name]
            field.put(one, np.full(field.shape, field.fill, field.dtype))
        return np.tile(one, (*shape, 1)) if shape else one

    def row(self, results: Mapping[str, Reduced], **own: Any) -> Rows:
        """(bytes,): the row of a cell, but for its checksum.

        Raises:
            InputError: a result has another shape than in the first cell.
        """
        row = self.blank()
        for name, result in results.items():
            found, shape = np.shape(result.values), self.fields[name].shape
            require(found == shape, f"{name} has shape {found} in this cell and {shape} in the first one.")
            self.fields[name].put(row, result.values)
        for name, value in own.items():
            self.fields[name].put(row, value)
        return row

    def record(self) -> dict[str, Any]:
        """The results, for JSON."""
        kept = [self.fields[name] for name in self.results]
        return {field.name: [list(field.dims), list(field.shape), field.dtype.str] for field in kept}


def layout_from(record: Any) -> Layout:
    """What `Layout.record` gave, from whomever it comes.

    Raises:
        InputError: no such record.
    """
    require(isinstance(record, dict) and len(record) > 0, "its layout is no table.")
    return Layout({checked_name(name): checked_kind(name, kind) for name, kind in record.items()})


def checked_name(name: str) -> str:
    """`name`, if an array can have it."""
    require(bool(WORD.fullmatch(name)) and name not in OWN, f"no array can have the name {name[:40]!r}.")
    return name


def checked_kind(name: str, kind: Any) -> Kind:
    """Dimensions, shape and type of a result."""
    good = isinstance(kind, list) and len(kind) == 3 and isinstance(kind[0], list) and isinstance(kind[1], list)
    require(good, f"its array {name} is not described by dimensions, shape and type.")
    dims, shape, dtype = kind
    words = all(isinstance(dim, str) and WORD.fullmatch(dim) for dim in dims) and len(set(dims)) == len(dims)
    sizes = all(type(size) is int and 0 <= size < 2**48 for size in shape) and len(shape) == len(dims) < 8
    require(words and sizes, f"its array {name} has impossible dimensions: {str(dims)[:40]}, {str(shape)[:40]}.")
    require(dtype in TYPES, f"its array {name} has the type {str(dtype)[:40]}, which is none of {', '.join(TYPES)}.")
    return tuple(dims), tuple(shape), np.dtype(dtype)


@dataclass(frozen=True)
class Block:
    """Neighbouring cells whose values share a chunk.

    Attributes:
        number: its place among the blocks, on each axis.
        start: its first cell.
        shape: how many cells it has on each axis; fewer than others at the end of an axis.
    """

    number: Index
    start: Index
    shape: Index

    @property
    def cells(self) -> tuple[slice, ...]:
        """Where its cells lie in the grid."""
        return tuple(slice(first, first + count) for first, count in zip(self.start, self.shape, strict=True))

    @property
    def inside(self) -> tuple[slice, ...]:
        """Where its cells lie in a whole chunk."""
        return tuple(slice(0, count) for count in self.shape)


def block_shape(shape: Sequence[int], row: int) -> Index:
    """Cells of a block on each axis of a grid, for rows of so many bytes: the last axis first, in equal parts."""
    room, lengths = min(MOST_CELLS, max(1, MOST_BYTES // row)), []
    for count in reversed(shape):
        length = ceil(count / ceil(count / room))
        lengths.append(length)
        room = max(1, room // length)
    return tuple(reversed(lengths))


def blocks(shape: Sequence[int], lengths: Index) -> Iterator[Block]:
    """All blocks of a grid."""
    for number in product(*(range(ceil(count / length)) for count, length in zip(shape, lengths, strict=True))):
        yield block_at(number, shape, lengths)


def block_at(number: Index, shape: Sequence[int], lengths: Index) -> Block:
    """The block with that number."""
    start = tuple(k * length for k, length in zip(number, lengths, strict=True))
    sizes = zip(start, lengths, shape, strict=True)
    return Block(number, start, tuple(min(length, count - first) for first, length, count in sizes))


def checked_lengths(given: Any, shape: Sequence[int]) -> Index:
    """Cells of a block on each axis, from whomever they come.

    Raises:
        InputError: no such numbers.
    """
    good = isinstance(given, list) and len(given) == len(shape) and all(type(k) is int and k > 0 for k in given)
    if not good or prod(given) > LARGEST_BLOCK:
        raise InputError(f"its blocks have an impossible shape: {str(given)[:40]}.")
    return tuple(given)
