r"""The store of a sweep: a folder with `sweep.json`, which describes it, and `cells`, with the files of its cells.

A finished cell is the file NAME.nc, which `lf.load` reads: its results, the SHA-256 of its contents and the code that
made it. A failed cell is the file NAME.failed with its error. NAME is a hash of all that determines the numbers: the
sweep without the values of its axes, and the cell's value on each axis. So a cell is never taken for another one.

Each file is written under a temporary name and then renamed: a kill at any moment leaves it whole or absent.

The code, the numerical libraries and the processor that make a cell's numbers.

The instructions of a processor change the order of a sum, and so its last bits.
"""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from limitformer.base.errors import InputError, printable, require
from limitformer.base.extras import package_version
from limitformer.base.files import check_regular, check_writable, local_path, write_whole
from limitformer.base.lock import only_one
from limitformer.base.memory import check_scratch
from limitformer.results.storage import load, save
from limitformer.sweep.describe import Sweep
from limitformer.sweep.grid import Index
from limitformer.sweep.reduce import LABELS, Reduced


@cache
def origin() -> str:
    """Return versions and processor of this process in one line."""
    import numba  # slow to import, and not needed to read a store

    return f"limitformer {package_version()}, numpy {np.__version__}, numba {numba.__version__}, {processor()}"


def processor() -> str:
    """Return the name of the processor that kernels are compiled for, and a fingerprint of its features."""
    from numba.core.registry import cpu_target

    system, name, features = cpu_target.target_context.codegen().magic_tuple()
    return f"{name}-{hashlib.sha256(f'{system} {features}'.encode()).hexdigest()[:8]}"


FORMAT = 4
MISSING, DONE, FAILED = 0, 1, 2
DESCRIPTION, CELLS, LOCK = "sweep.json", "cells", "lock"
ENDINGS = {DONE: ".nc", FAILED: ".failed"}


class OtherSweepError(InputError):
    """The store belongs to another sweep, or to another version of limitformer."""


def require_same(condition: bool, message: str) -> None:
    """Raise `OtherSweepError(message)` unless `condition` holds."""
    if not condition:
        raise OtherSweepError(message)


@dataclass(frozen=True)
class Store:
    """A sweep's store on disk: its folder, and `Sweep.record` with the axes in the order of the store."""

    path: Path
    record: dict[str, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of values on each axis."""
        return tuple(len(values) for values in self.record["over"].values())

    def names(self) -> Iterator[tuple[Index, str]]:
        """Yield the place and the name of each cell, the last axis fastest."""
        over = self.record["over"]
        rest = hashlib.sha256(json.dumps([{**self.record, "over": list(over)}], sort_keys=True).encode())
        for index in np.ndindex(self.shape):
            digest = rest.copy()
            digest.update(json.dumps([values[k] for values, k in zip(over.values(), index, strict=True)]).encode())
            yield index, digest.hexdigest()[:32]

    def file(self, name: str, status: int) -> Path:
        """Return the file of a cell that is DONE or FAILED."""
        return self.path / CELLS / f"{name}{ENDINGS[status]}"

    def status(self) -> NDArray[np.int8]:
        """Return MISSING, DONE or FAILED for each cell, (axes), without reading its file."""
        check_scratch(100 * prod(self.shape), f"The cells of {self.path}", "a smaller grid")
        status, files = np.zeros(self.shape, np.int8), set(file_names(self.path))
        for index, name in self.names() if files else ():
            done, failed = (f"{name}{ending}" in files for ending in ENDINGS.values())
            status[index] = DONE if done else FAILED if failed else MISSING
        return status

    def errors(self, status: NDArray[np.int8]) -> dict[Index, str]:
        """Return the errors of the failed cells."""
        failed = ((index, name) for index, name in self.names() if status[index] == FAILED)
        return {index: printable(self.file(name, FAILED).read_text(errors="replace")) for index, name in failed}

    def save(self, name: str, results: Mapping[str, Reduced], seconds: float) -> None:
        """Write the file of a finished cell."""
        variables = {each: (result.dims, result.values) for each, result in results.items()}
        attributes = {"cell": name, "origin": origin(), "seconds": seconds, "results": " ".join(results)}
        save(xr.Dataset(variables, attrs=attributes), self.file(name, DONE))
        self.file(name, FAILED).unlink(missing_ok=True)

    def load(self, name: str, origins: set[str]) -> dict[str, Reduced]:
        """Return the results of a finished cell; add the code that made it to `origins`.

        Raises:
            InputError, LookupError, TypeError, UserWarning: the file is damaged, or that of another cell.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # a file without a checksum is none that a run wrote
            data = load(self.file(name, DONE))
        require(data.attrs["cell"] == name, "the file of another cell")
        origins.add(printable(data.attrs["origin"]))
        variables = {each: data[each] for each in data.attrs["results"].split()}  # NetCDF has another order
        results = {each: Reduced(array.values, tuple(map(str, array.dims))) for each, array in variables.items()}
        return results | {"seconds": Reduced(np.array(data.attrs["seconds"], np.float32), ())}

    def fail(self, name: str, message: str) -> None:
        """Write the file of a failed cell."""
        write_whole(self.file(name, FAILED), lambda path: path.write_text(message))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs out of the store in the block; make its folder, and remove what a killed run has left.

        Raises:
            InputError: another process works on the store, or it cannot be written.
        """
        check_writable(self.path / CELLS)
        with only_one(self.path / LOCK, str(self.path)):
            for folder in (*self.path.glob(f".{DESCRIPTION}.*"), *(self.path / CELLS).glob(".*")):
                shutil.rmtree(folder, ignore_errors=True)
            yield

    @property
    def text(self) -> str:
        """The content of `sweep.json`."""
        return json.dumps({"format": FORMAT, **self.record})

    def is_described(self) -> bool:
        """Whether `sweep.json` is there unchanged."""
        file = self.path / DESCRIPTION
        return file.exists() and file.read_text() == self.text

    def describe(self) -> None:
        """Write `sweep.json` unless it is there unchanged."""
        if not self.is_described():
            write_whole(self.path / DESCRIPTION, lambda path: path.write_text(self.text))


def file_names(path: Path) -> list[str]:
    """Return the names of the files of cells."""
    try:
        return os.listdir(path / CELLS)
    except (FileNotFoundError, NotADirectoryError):
        return []


def store_path(place: str | Path) -> Path:
    """Return the path of a store; raise `InputError` for an address, or a name that the system refuses."""
    path = local_path(place)
    try:
        path.exists()
    except OSError as error:
        raise InputError(f"Cannot use the folder {path}: {error.strerror}.") from error
    return path


def open_store(place: str | Path) -> Store:
    """Open a store, without running code that its description names.

    Raises:
        OtherSweepError: the store of another version of limitformer.
        InputError: not a store, or one whose description is damaged.
    """
    path = store_path(place)
    file = path / DESCRIPTION
    older = (path / "zarr.json").exists()  # limitformer 0.2 and before
    require(older or file.exists(), f"{path} is not the store of a sweep.")
    check_regular(file)
    try:
        record = {} if older else json.loads(file.read_bytes())
        version = record.pop("format", None)
        ours = {name: record[name] for name in ("base", "over", "simulate", "keep")} if version == FORMAT else {}
        sound = all(isinstance(table, dict) for table in ours.values())
        sound = sound and all(isinstance(values, list) for values in ours.get("over", {}).values())
    except OSError as error:
        raise InputError(f"Cannot read the store {path}: {error.strerror} ({error.filename}).") from error
    except (ValueError, AttributeError, LookupError, TypeError, RecursionError):
        sound = False
    require(sound, f"{file} is damaged. Nearest: delete it and run the sweep again, which keeps all cells.")
    require_same(
        version == FORMAT,
        f"{path} is a store of another version of limitformer. Nearest: export it to .nc with that version "
        "(limitformer sweep export), or choose another folder.",
    )
    return Store(path, record)


def store_for(sweep: Sweep, place: str | Path, *, extend: bool) -> Store:
    """Return the store to run a sweep in; its axes are those of the folder, then the new values.

    Raises:
        OtherSweepError: the folder has another sweep, or lacks values and `extend` is false.
        InputError: something else is in the folder.
    """
    path, here = store_path(place), sweep.record()
    inside = {entry.name.split(f"{DESCRIPTION}.")[0] for entry in path.iterdir()} if path.is_dir() else set()
    foreign = path.exists() and not (path.is_dir() and inside <= {CELLS, LOCK, "."})  # such as a killed run leaves
    if not foreign:
        return Store(path, here)
    require(
        any((path / name).exists() for name in (DESCRIPTION, "zarr.json")),
        f"{path} is there and is not the store of a sweep. Choose another folder.",
    )
    there = open_store(path).record
    check_same(path, there, here)
    return Store(path, {**here, "over": merged_axes(path, there["over"], here["over"], extend)})


def check_same(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise `OtherSweepError` if the sweeps differ in more than the values of their axes."""
    a, b = (flat({**record, "over": list(record["over"])}) for record in (there, json.loads(json.dumps(here))))
    differing = [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
    examples = "; ".join(f"{name}: {a.get(name)!r} there, {b.get(name)!r} here" for name in differing[:3])
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    require_same(not differing, f"{path} belongs to another sweep ({examples}{more}). Choose another store.")


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return a nested record with dotted names."""
    if not isinstance(value, dict):
        return {name.removeprefix("."): value}
    return {place: one for key, inner in value.items() for place, one in flat(inner, f"{name}.{key}").items()}


def merged_axes(path: Path, there: Any, here: Any, extend: bool) -> dict[str, list[Any]]:
    """Return the values of both, those of the store first."""
    merged: dict[str, list[Any]] = {}
    for name, values in there.items():
        known, asked = set(values), set(here[name])
        new = [value for value in here[name] if value not in known]
        lacking = [value for value in values if value not in asked]
        there_lacks = f"{path} has no {name} = {', '.join(map(str, new[:5]))}. Nearest: extend it (extend, --extend)."
        require_same(not new or extend, there_lacks)
        here_lacks = f"{path} has {name} = {', '.join(map(str, lacking[:5]))}, which this sweep lacks."
        require_same(not lacking, f"{here_lacks} Nearest: add them.")
        merged[name] = [*values, *new]
    return merged


def load_sweep(store: str | Path) -> xr.Dataset:
    """Gather a store in memory: its results over the axes, `status` (0 missing, 1 done, 2 failed) and `seconds`.

    The SHA-256 of every cell is compared. The attribute `origins` has the versions and processors that made the cells;
    several are also a warning, because their last digits may differ.

    Raises:
        InputError: not the store of a sweep, one of another version, or damaged cells, which are named.
    """
    there = open_store(store)
    status = there.status()
    origins: set[str] = set()
    damaged: list[str] = []

    def done() -> Iterator[tuple[Index, dict[str, Reduced]]]:
        for index, name in there.names():
            if status[index] == DONE:
                try:
                    yield index, there.load(name, origins)
                except (InputError, LookupError, TypeError, UserWarning):
                    damaged.append(str(there.file(name, DONE)))

    data = gathered(there.record, done())
    names = ", ".join(damaged)
    require(not damaged, f"{there.path} has damaged cells. Nearest: delete them and run the sweep again: {names}.")
    codes = "; ".join(sorted(origins))
    if len(origins) > 1:
        warnings.warn(f"{len(origins)} different codes made the cells of {there.path}: {codes}.", stacklevel=2)
    return data.assign(status=(tuple(there.record["over"]), status)).assign_attrs(origins=codes)


def gathered(record: Mapping[str, Any], cells: Iterable[tuple[Index, Mapping[str, Reduced]]]) -> xr.Dataset:
    """Return all results over the axes; cells that are missing are NaN (0 in integers).

    Raises:
        InputError: the results do not fit the memory, or have different shapes.
    """
    axes, shape = tuple(record["over"]), tuple(map(len, record["over"].values()))
    variables: dict[str, tuple[tuple[str, ...], NDArray[Any]]] = {}
    for index, results in cells:
        for name, result in results.items():
            values = np.asarray(result.values)
            if name not in variables:
                check_scratch(prod(shape) * values.nbytes, f"All values of {name}", "fewer cells")
                fill = np.nan if values.dtype.kind == "f" else 0
                whole = np.full((*shape, *values.shape), fill, values.dtype.newbyteorder("="))
                variables[name] = (*axes, *result.dims), whole
            whole = variables[name][1]
            same = whole.shape == (*shape, *values.shape)
            require(same, f"{name} has shape {values.shape} in cell {index}, and another one in the first cell.")
            whole[index] = values
    dims = {dim for names, _ in variables.values() for dim in names}
    return xr.Dataset(variables, coordinates_of(record, dims), {"sweep": json.dumps(record)})


def coordinates_of(record: Mapping[str, Any], dims: set[str]) -> dict[str, Any]:
    """Return the axes, with "none" for None, and the labels of those of the results' dimensions that have labels."""
    axes = record["over"].items()
    coordinates: dict[str, Any] = {name: ["none" if value is None else value for value in axis] for name, axis in axes}
    coordinates |= {dim: labels for dim, labels in LABELS.items() if dim in dims}
    if "quantile" in dims:
        coordinates["quantile"] = record["keep"]["quantiles"]["levels"]
    points = record["simulate"]["record"]
    return coordinates | ({"point": np.asarray(points, np.float64)} if isinstance(points, list) else {})
