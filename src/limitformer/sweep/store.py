r"""The store of a sweep: a folder with `sweep.json`, which describes it, and `cells`, with one file for each cell.

Each worker writes a finished cell to its own file (`cells`, `files`). Workers share no file, so that a crash at any
moment leaves each cell whole or absent. `sweep.json` has a digest and is written when it changes.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from limitformer.base.errors import require
from limitformer.base.memory import SHARE, available_memory
from limitformer.sweep.cells import (
    DAMAGED,
    DONE,
    ERROR_LENGTH,
    FAILED,
    HEADER_LIMIT,
    OWN,
    CellFile,
    Kind,
    Names,
    arrays_of,
    bytes_of,
    decoded,
    encoded,
    place_of,
    record_of,
)
from limitformer.sweep.describe import Sweep, points_of
from limitformer.sweep.files import CELLS, names_in_cells, read_regular, readable, sync_names, write_whole
from limitformer.sweep.grid import Index
from limitformer.sweep.origin import Code, code
from limitformer.sweep.reduce import LABELS, Reduced

FORMAT = 3
DESCRIPTION = "sweep.json"
LARGEST_DESCRIPTION = 2**28  # bytes
LASTING_SECONDS = 0.1  # a cell that took longer is flushed to the disk, which takes milliseconds


@dataclass(frozen=True)
class Survey:
    """The state of all cells, from files whose checksums were compared.

    Attributes:
        status: (axes), MISSING, DONE, FAILED or DAMAGED.
        code: (axes), the numbers of the codes that made the cells.
        finished: (axes), when they ended, in seconds since 1970; 0 if a cell is missing or damaged.
        errors: messages of failed cells.
    """

    status: NDArray[np.int8]
    code: NDArray[np.int32]
    finished: NDArray[np.float64]
    errors: dict[Index, str]


class Store:
    """A sweep's store on disk.

    Attributes:
        path: its folder.
        sweep: the sweep, its axes in the order of the store.
        kinds: dimensions, shapes and types of a cell's results.
        codes: the codes that made its cells, by their numbers.
        read_only: why it cannot be written; empty if it can.
    """

    def __init__(
        self, path: Path, sweep: Sweep, kinds: Mapping[str, Kind], codes: Mapping[int, Code], read_only: str = ""
    ) -> None:
        self.path, self.sweep, self.kinds, self.read_only = path, sweep, dict(kinds), read_only
        self.codes, self.names = dict(codes), Names(sweep)

    def write_description(self) -> None:
        """Write `sweep.json` unless it is there unchanged."""
        codes = list(self.codes.values())
        description = {"format": FORMAT, **self.sweep.record(), "results": record_of(self.kinds), "codes": codes}
        data = json.dumps({"sweep": description, "digest": digest(description)}).encode()
        if read_regular(self.path / DESCRIPTION, len(data)) != data:
            write_whole(self.path, DESCRIPTION, data, durable=True)
            sync_names(self.path)

    def coordinates(self) -> dict[str, Any]:
        """Return the axes and the labels of the results' dimensions."""
        return coordinates_of(self.sweep, {dim for kind in self.kinds.values() for dim in kind.dims})

    def done(self, index: Index, results: Mapping[str, Reduced], seconds: float) -> bytes:
        """Return the file of a finished cell; raise `InputError` if its shapes are not those of the first cell."""
        return self._file(index, DONE, seconds, "", bytes_of(results, self.kinds))

    def failed(self, index: Index, message: str) -> bytes:
        """Return the file of a failed cell."""
        return self._file(index, FAILED, 0.0, message[:ERROR_LENGTH], b"")

    def _file(self, index: Index, status: int, seconds: float, error: str, data: bytes) -> bytes:
        facts = {"status": status, "seconds": seconds, "finished": time.time(), "error": error}
        return encoded(self.names.of(index), facts, code(), data)

    def write(self, index: Index, file: bytes, seconds: float) -> None:
        """Write the file of a cell that took `seconds` to compute."""
        place = f"{CELLS}/{place_of(self.names.of(index))}"
        write_whole(self.path, place, file, durable=seconds > LASTING_SECONDS)

    def present(self) -> set[str]:
        """Return the names of all files of cells."""
        names: set[str] = set()
        for entry in names_in_cells(self.path):
            if entry.is_dir(follow_symlinks=False):
                names.update(os.listdir(entry.path))
        return names

    def cells(self) -> Iterator[tuple[Index, CellFile | None]]:
        """Yield each cell of the grid that has a file, with its content; None if it is damaged."""
        limit = sum(kind.size for kind in self.kinds.values()) + HEADER_LIMIT
        folder = str(self.path / CELLS)
        for index, name in self.names.among(self.present()):
            file = read_regular(f"{folder}/{place_of(name)}", limit)
            if file is not None:
                cell = decoded(name, file, self.kinds)
                if cell is not None:
                    self.codes.setdefault(cell.code, cell.origin)
                yield index, cell

    def survey(self) -> Survey:
        """Read the state of each cell.

        Raises:
            InputError: the grid does not fit into memory, or a file cannot be read.
        """
        shape = self.sweep.shape
        check_room(prod(shape) * 100, f"The cells of {self.path}")
        survey = Survey(np.zeros(shape, np.int8), np.zeros(shape, np.int32), np.zeros(shape), {})
        with readable(self.path):
            for index, cell in self.cells():
                survey.status[index] = DAMAGED if cell is None else cell.status
                if cell is not None:
                    survey.code[index], survey.finished[index] = cell.code, cell.finished
                    if cell.status == FAILED:
                        survey.errors[index] = cell.error
        return survey

    def load(self) -> xr.Dataset:
        """Gather all cells in memory; cells that are not done are NaN (0 in integers)."""
        kinds, shape, axes = self.kinds | OWN, self.sweep.shape, tuple(self.sweep.over)
        check_room(prod(shape) * sum(kind.size for kind in kinds.values()), f"All results in {self.path}")
        arrays = {name: np.full((*shape, *kind.shape), kind.fill, kind.dtype) for name, kind in kinds.items()}
        with readable(self.path):
            for index, cell in self.cells():
                arrays["status"][index] = DAMAGED if cell is None else cell.status
                if cell is not None:
                    arrays["code"][index], arrays["seconds"][index] = cell.code, cell.seconds
                    if cell.status == DONE:
                        for name, values in arrays_of(cell.data, self.kinds).items():
                            arrays[name][index] = values
        variables = {name: ((*axes, *kind.dims), arrays[name]) for name, kind in kinds.items()}
        codes = {str(number): origin for number, origin in self.codes.items()}
        attributes = {"sweep": json.dumps(self.sweep.record()), "codes": json.dumps(codes)}
        return xr.Dataset(variables, self.coordinates(), attributes)


def digest(description: Mapping[str, Any]) -> str:
    """Return the hash that proves a description."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def check_room(needed: int, what: str) -> None:
    """Raise `InputError` unless that many bytes are free."""
    free = available_memory()
    fits = free is None or needed <= SHARE * free
    require(fits, f"{what} take {needed / 2**30:,.1f} GiB, more than is free.")


def coordinates_of(sweep: Sweep, dims: set[str]) -> dict[str, Any]:
    """Return the axes, and the labels of those of the results' dimensions that have labels."""
    coordinates: dict[str, Any] = {name: labels_of(values) for name, values in sweep.over.items()}
    coordinates |= {dim: labels for dim, labels in LABELS.items() if dim in dims}
    if "quantile" in dims:
        coordinates["quantile"] = sweep.reduce["quantiles"]["levels"]
    points = points_of(sweep)
    return coordinates | ({} if points is None or "point" not in dims else {"point": points})


def labels_of(values: Sequence[Any]) -> list[Any]:
    """Return the labels of an axis; None becomes the word "none"."""
    return ["none" if value is None else value for value in values]
