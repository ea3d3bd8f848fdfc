r"""The store of a sweep: a Zarr group whose arrays are over the axes of the grid.

* results: (axes of the grid, dimensions of the result), NaN where a cell is missing;
* `status` (axes): 0 missing, 1 done, 2 failed — apart from the data, because NaN can be a result;
* `seconds` and `finished`, what a cell took and when it was done; `error`, what went wrong, as bytes of UTF-8;
* `code`, a number for what made the cell, whose description is in the attributes; `checksum`, of all of the above;
* the axes as coordinates (numbers; other values by their position, and as JSON in the attributes).

Whoever computes a cell writes it as one file in `cells`. The one process that runs the sweep, which holds its lock,
gathers these files into the arrays, whose chunks hold many cells, and then removes them. So no two writers share a
file, and whatever is killed when: a cell is in `cells`, in the arrays, or in both and the same. What is in `cells`
counts before what is in the arrays.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from limitformer.base.errors import require
from limitformer.base.memory import SHARE, available_memory
from limitformer.sweep.describe import Sweep, points_of
from limitformer.sweep.files import CELLS, loose_names, read_inside, readable, write_whole
from limitformer.sweep.layout import ERROR_LENGTH, Block, Field, Index, Layout, Rows, block_at, blocks
from limitformer.sweep.metadata import FORMAT, Document, chunk, chunk_values, documents, write_documents
from limitformer.sweep.origin import Code, code, code_number
from limitformer.sweep.reduce import LABELS, Reduced
from limitformer.sweep.rows import (
    MOST_CODE,
    Keys,
    by_block,
    checksum,
    loose_data,
    loose_index,
    loose_name,
    loose_row,
    place_in,
    sound,
)

SLACK = 4096  # bytes that a chunk may be too long and is read all the same: what it should have is in front
MISSING, DONE, FAILED, DAMAGED = 0, 1, 2, 3


@dataclass(frozen=True)
class Survey:
    """What is known of the cells, their checksums compared.

    Attributes:
        status, code, finished: (axes), as in the store; cells that are damaged have the status 3.
        errors: of cells that have failed.
        broken: numbers of the blocks that are damaged somewhere.
    """

    status: NDArray[np.int8]
    code: NDArray[np.int32]
    finished: NDArray[np.float64]
    errors: dict[Index, str]
    broken: set[Index]


@dataclass(frozen=True)
class Part:
    """The cells of a block.

    Attributes:
        block: which.
        rows: (*block.shape, bytes), blank where a cell is missing or damaged.
        damaged: (*block.shape).
        whole: whether the arrays are as they were written.
        loose: the cells that have files of their own.
    """

    block: Block
    rows: Rows
    damaged: NDArray[np.bool_]
    whole: bool
    loose: list[Index]

    def status(self, layout: Layout) -> NDArray[np.int8]:
        """(*block.shape)."""
        return np.where(self.damaged, np.int8(DAMAGED), layout.fields["status"].of(self.rows))


class Store:
    """A sweep's store on disk.

    Attributes:
        path: its folder.
        sweep: what is in it, the axes in the order of the store.
        layout: the fields of a cell.
        block: how many cells share a chunk, on each axis.
        codes: what made its cells, by their numbers.
        read_only: why it cannot be written; empty if it can.
    """

    def __init__(
        self, path: Path, sweep: Sweep, layout: Layout, block: Index, codes: Mapping[int, Code], read_only: str = ""
    ) -> None:
        self.path, self.sweep, self.layout, self.block, self.read_only = path, sweep, layout, block, read_only
        self.codes, self.keys, self.described = dict(codes), Keys(sweep), 0

    # What it says of itself.

    def description(self) -> Document:
        """All that decides about the numbers, and where they are."""
        kept = {"layout": self.layout.record(), "block": list(self.block), "codes": list(self.codes.values())}
        return {"format": FORMAT, **self.sweep.record(), **kept}

    def write_description(self) -> bool:
        """Write it where it has changed or is damaged; whether it was."""
        self.described = len(self.codes)
        files = documents(self.description(), list(self.layout.fields.values()), self.coordinates())
        return write_documents(self.path, files)

    def coordinates(self) -> dict[str, Any]:
        """The axes and the labels of the results' dimensions."""
        return coordinates_of(self.sweep, {dim for field in self.layout.fields.values() for dim in field.dims})

    # Cells, as workers write them.

    def done(self, results: Mapping[str, Reduced], seconds: float) -> Rows:
        """The row of a finished cell."""
        return self.layout.row(results, status=DONE, seconds=seconds)

    def failed(self, message: str) -> Rows:
        """The row of a cell that has failed, with what went wrong."""
        data = np.frombuffer(message.encode()[:ERROR_LENGTH].ljust(ERROR_LENGTH, b"\0"), np.uint8)
        return self.layout.row({}, status=FAILED, error=data)

    def write(self, index: Index, row: Rows) -> None:
        """Put a cell down, with what made it, when, and the checksum."""
        fields = self.layout.fields
        fields["code"].put(row, code_number(code()))
        fields["finished"].put(row, time.time())
        fields["checksum"].put(row, checksum(row.data, self.keys.of(index)))
        write_whole(self.path, f"{CELLS}/{loose_name(index)}", loose_data(row, code()), durable=False)

    # Cells, as they are read.

    def loose(self) -> dict[Index, list[Index]]:
        """The cells in `cells`, by the numbers of their blocks."""
        names = (loose_index(name, self.sweep.shape) for name in loose_names(self.path))
        return by_block((index for index in names if index is not None), self.block)

    def parts(self) -> Iterator[Part]:
        """What there is of the cells, a block at a time; of blocks that have nothing, nothing."""
        loose = self.loose()
        for block in blocks(self.sweep.shape, self.block):
            part = self.part(block, loose.get(block.number, []))
            if part is not None:
                yield part

    def part(self, block: Block, loose: list[Index]) -> Part | None:
        """The cells of a block; None if there are none.

        What is loose is read first: in the meantime it may be gathered, but never the other way round.
        """
        apart = {index: self._loose_row(index) for index in loose}
        found = self._gathered(block)
        if found is None and not apart:
            return None
        rows, whole = found or (self.layout.blank(*block.shape), True)
        damaged = np.zeros(block.shape, np.bool_) if found is None else self._clean(rows, block)
        whole = whole and not damaged.any()
        for index, row in apart.items():
            place = place_in(block, index)
            if row is not None:
                rows[place], damaged[place] = row, False
            else:
                damaged[place] |= (rows[place] == self.layout.blank()).all()
        return Part(block, rows, damaged, whole, loose)

    def _loose_row(self, index: Index) -> Rows | None:
        """The row in the cell's own file; None if it is damaged."""
        data = read_inside(self.path, f"{CELLS}/{loose_name(index)}", self.layout.size + MOST_CODE)
        found = loose_row(data or b"", self.layout, self.keys.of(index))
        if found is None:
            return None
        row, made = found
        self.codes.setdefault(code_number(made), made)
        return row

    def _gathered(self, block: Block) -> tuple[Rows, bool] | None:
        """(*block.shape, bytes): what the arrays have, as it is, and whether their chunks are whole."""
        rows, everything, some = self.layout.blank(*self.block), True, False
        for field in self.layout.fields.values():
            size = prod(self.block) * field.size
            data = read_inside(self.path, chunk_name(field, block), 2 * size + SLACK)
            if data is not None:
                values, whole = chunk_values(data, field.dtype, (*self.block, *field.shape))
                field.put(rows, values)
                everything, some = everything and whole, True
        return (np.ascontiguousarray(rows[block.inside]), everything) if some else None

    def _clean(self, rows: Rows, block: Block) -> NDArray[np.bool_]:
        """(*block.shape): which cells are damaged; their rows are blank then."""
        suspect = ~sound(rows, self.keys.at(block.cells))
        damaged = suspect.copy()
        damaged[suspect] = (rows[suspect] != self.layout.blank()).any(-1)
        rows[damaged] = self.layout.blank()
        return damaged

    def survey(self) -> Survey:
        """What is known of each cell.

        Raises:
            InputError: more cells than the memory has room for.
        """
        shape = self.sweep.shape
        check_room(prod(shape) * 13 + 2 * prod(self.block) * self.layout.size, f"The cells of {self.path}")
        found = Survey(np.zeros(shape, np.int8), np.zeros(shape, np.int32), np.zeros(shape), {}, set())
        with readable(self.path):
            for part in self.parts():
                self._enter(part, found)
        return found

    def _enter(self, part: Part, found: Survey) -> None:
        """Put a block into the survey."""
        where, fields = part.block.cells, self.layout.fields
        found.status[where] = part.status(self.layout)
        found.code[where], found.finished[where] = fields["code"].of(part.rows), fields["finished"].of(part.rows)
        if not part.whole:
            found.broken.add(part.block.number)
        for place in zip(*np.nonzero(found.status[where] == FAILED), strict=True):
            index = tuple(int(k) + first for k, first in zip(place, part.block.start, strict=True))
            found.errors[index] = text_of(fields["error"].of(part.rows[place]).tobytes())

    def load(self) -> xr.Dataset:
        """All of it, in memory; cells that are not done are NaN (or 0 where there is no NaN)."""
        names = [*self.layout.results, "status", "code", "seconds"]
        fields = {name: self.layout.fields[name] for name in names}
        shape, axes = self.sweep.shape, tuple(self.sweep.over)
        block = 2 * prod(self.block) * self.layout.size  # what is read at a time
        check_room(prod(shape) * sum(field.size for field in fields.values()) + block, f"All that is in {self.path}")
        arrays = {
            name: np.full((*shape, *field.shape), field.fill, field.dtype.newbyteorder("="))
            for name, field in fields.items()
        }
        with readable(self.path):
            for part in self.parts():
                for name, field in fields.items():
                    arrays[name][part.block.cells] = field.of(part.rows)
                arrays["status"][part.block.cells] = part.status(self.layout)
        variables = {name: ((*axes, *field.dims), arrays[name]) for name, field in fields.items()}
        codes = {str(number): made for number, made in self.codes.items()}
        described = {"sweep": json.dumps(self.sweep.record()), "codes": json.dumps(codes)}
        return xr.Dataset(variables, self.coordinates(), described)

    # Gathering.

    def gather(self, others: Iterable[Index] = ()) -> None:
        """Bring all loose cells into the arrays, and renew the `others` of the blocks; for the holder of the lock."""
        loose = self.loose()
        for number in sorted({*loose, *others}):
            part = self.part(block_at(number, self.sweep.shape, self.block), loose.get(number, []))
            if part is not None:
                self._write_part(part)

    def _write_part(self, part: Part) -> None:
        """Write the chunks of a block, the status last; then what was loose can go."""
        if len(self.codes) > self.described:
            self.write_description()
        rows = self.layout.blank(*self.block)
        rows[part.block.inside] = part.rows
        for field in reversed(self.layout.fields.values()):
            values = field.of(rows)
            if field.name == "error" and not values.any():
                (self.path / chunk_name(field, part.block)).unlink(missing_ok=True)
            else:
                write_whole(self.path, chunk_name(field, part.block), chunk(values), durable=True)
        for index in part.loose:
            (self.path / CELLS / loose_name(index)).unlink(missing_ok=True)


def text_of(data: bytes) -> str:
    """What an error says."""
    return data.rstrip(b"\0").decode(errors="replace")


def shortened(message: str) -> str:
    """As much of an error as the store has."""
    return text_of(message.encode()[:ERROR_LENGTH])


def chunk_name(field: Field, block: Block) -> str:
    """The file of a block's values."""
    return f"{field.name}/" + ".".join(map(str, ["c", *block.number, *[0] * len(field.dims)]))


def check_room(needed: int, what: str) -> None:
    """Raise `InputError` unless so many bytes are free."""
    free = available_memory()
    fits = free is None or needed <= SHARE * free
    require(fits, f"{what} take {needed / 2**30:,.1f} GiB, more than is free.")


def coordinates_of(sweep: Sweep, dims: set[str]) -> dict[str, Any]:
    """The axes, and the labels of those of the results' dimensions that have some."""
    found: dict[str, Any] = {name: labels_of(values) for name, values in sweep.over.items()}
    found |= {dim: labels for dim, labels in LABELS.items() if dim in dims}
    if "quantile" in dims:
        found["quantile"] = sweep.reduce["quantiles"]["levels"]
    points = points_of(sweep)
    return found | ({} if points is None or "point" not in dims else {"point": points})


def labels_of(values: Sequence[Any]) -> list[Any]:
    """Of an axis; None is a word."""
    return ["none" if value is None else value for value in values]
