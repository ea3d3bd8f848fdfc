r"""The store of a sweep: a Zarr group, with one chunk a cell in every array.

* results: (axes of the grid, dimensions of the result), NaN where a cell is missing;
* `status` (axes): 0 not done, 1 done, 2 failed — apart from the data, because NaN can be a result; written last;
* `seconds` (axes) and `error` (axes, 240), what a cell took and what went wrong, as bytes of UTF-8;
* the axes as coordinates (numbers; other values by their position, and as JSON in the attributes);
* attribute `sweep`: all that decides about the numbers, and the code that made them.

Every chunk has one writer and a checksum (`chunks`). Two sweeps never share a store; the same sweep may be started
again, or extended by more values of an axis.
"""

import hashlib
import json
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr
from numpy.typing import NDArray
from zarr.codecs import Crc32cCodec

from limitformer.errors import InputError, require
from limitformer.models.serial import from_record
from limitformer.results import check_writable, package_version
from limitformer.sweep.chunks import chunk_path, read_chunk, remove_unfinished, write_chunk
from limitformer.sweep.describe import Sweep, compute, points_of, where
from limitformer.sweep.reduce import LABELS, Reduced

MISSING, DONE, FAILED = 0, 1, 2
ERROR_LENGTH = 240
MOST_TRIALS = 10  # of cells, to learn the shapes of their results
FORMAT = 1
PACKAGE = Path(__file__).parents[1]
NO_NUMBERS = ("cli", "figures", "nn", "hf", "train", "plot.py", "progress.py", "phase.py")  # parts without effect here
Index = tuple[int, ...]


class OtherSweepError(InputError):
    """The store has something else in it than what is to be computed."""


def same(condition: bool, message: str) -> None:
    """Raise `OtherSweepError(message)` unless `condition` holds."""
    if not condition:
        raise OtherSweepError(message)


class Layout:
    """Names, own dimensions, shapes and types of the arrays of a store."""

    def __init__(self, results: dict[str, tuple[tuple[str, ...], tuple[int, ...], np.dtype[Any]]]) -> None:
        self.arrays = {
            **results,
            "status": ((), (), np.dtype(np.int8)),
            "seconds": ((), (), np.dtype(np.float32)),
            "error": (("character",), (ERROR_LENGTH,), np.dtype(np.uint8)),
        }
        self.results = tuple(results)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            name: [list(dims), list(shape), dtype.str]
            for name, (dims, shape, dtype) in self.arrays.items()
            if name in self.results
        }


def layout_of(sweep: Sweep) -> Layout:
    """From two samples of the first cell."""
    found = first_results(sweep, samples=min(2, sweep.settings.samples))
    return Layout({name: full_shape(result, sweep.settings.samples) for name, result in found.items()})


def first_results(sweep: Sweep, samples: int) -> dict[str, Reduced]:
    """Of the first cell that does not fail; one that fails will be recorded like any other.

    Raises:
        InputError: of a cell; or the first few fail.
    """
    for cell in islice(sweep.cells(), MOST_TRIALS):
        try:
            return compute(sweep, cell, samples=samples)
        except InputError as error:
            raise InputError(f"Cell {where(sweep, cell)}: {error}") from error
        except Exception as error:  # noqa: BLE001  # whatever it is, another cell has the same shapes
            trouble = error
    raise InputError(f"The first cells fail: {type(trouble).__name__}: {trouble}") from trouble


def full_shape(result: Reduced, samples: int) -> tuple[tuple[str, ...], tuple[int, ...], np.dtype[Any]]:
    """Dimensions, shape and type of a result, with all samples."""
    sizes = zip(result.dims, np.shape(result.values), strict=True)
    shape = tuple(samples if dim == "sample" else size for dim, size in sizes)
    return result.dims, shape, np.asarray(result.values).dtype


class Store:
    """A sweep's store on disk.

    Attributes:
        path: its folder.
        sweep: what is in it, the axes in the order of the store.
        layout: its arrays.
    """

    def __init__(self, path: Path, sweep: Sweep, layout: Layout) -> None:
        self.path = path
        self.sweep = sweep
        self.layout = layout

    def write(self, index: Index, results: dict[str, Reduced], seconds: float) -> None:
        """Put a finished cell down; its mark comes last."""
        for name, result in results.items():
            self._write(name, index, np.asarray(result.values))
        self._write("seconds", index, np.asarray(seconds))
        chunk_path(self.path / "error", index, 1).unlink(missing_ok=True)  # of an earlier run
        self._write("status", index, np.asarray(DONE))

    def fail(self, index: Index, message: str) -> None:
        """Mark a cell as failed, with what went wrong."""
        text = np.zeros(ERROR_LENGTH, np.uint8)
        data = message.encode()[:ERROR_LENGTH]
        text[: len(data)] = np.frombuffer(data, np.uint8)
        self._write("error", index, text)
        self._write("status", index, np.asarray(FAILED))

    def _write(self, name: str, index: Index, values: NDArray[Any]) -> None:
        dims, shape, dtype = self.layout.arrays[name]
        fits = values.shape == shape
        require(fits, f"{name} has shape {values.shape} in this cell and {shape} in the first one.")
        write_chunk(chunk_path(self.path / name, index, len(dims)), values.astype(dtype))

    def read(self, name: str, index: Index) -> NDArray[Any] | None:
        """One chunk; None if it is absent or damaged."""
        dims, shape, dtype = self.layout.arrays[name]
        return read_chunk(chunk_path(self.path / name, index, len(dims)), dtype, shape)

    def indices(self) -> Iterator[Index]:
        """Of all cells."""
        return iter(np.ndindex(self.sweep.shape))

    def status(self) -> NDArray[np.int8]:
        """(axes): what is known of each cell."""
        found = np.zeros(self.sweep.shape, np.int8)
        for index in self.indices():
            mark = self.read("status", index)
            found[index] = MISSING if mark is None else int(mark)
        return found

    def verified(self) -> NDArray[np.int8]:
        """As `status`, with cells missing whose chunks are absent or damaged."""
        found = self.status()
        needed = {DONE: (*self.layout.results, "seconds"), FAILED: ("error",)}
        for index in zip(*np.nonzero(found), strict=True):
            if any(self.read(name, index) is None for name in needed.get(int(found[index]), ("status",))):
                found[index] = MISSING
        return found

    def error(self, index: Index) -> str:
        """What went wrong in a cell."""
        text = self.read("error", index)
        return "" if text is None else bytes(text).rstrip(b"\0").decode(errors="replace")

    def load(self) -> xr.Dataset:
        """All of it, in memory; cells that are not done are NaN (or 0 where there is no NaN)."""
        axes, variables = tuple(self.sweep.over), {}
        for name, (dims, shape, dtype) in self.layout.arrays.items():
            if name == "error":
                continue
            values = np.full((*self.sweep.shape, *shape), fill_value(dtype), dtype)
            for index in self.indices():
                chunk = self.read(name, index)
                if chunk is not None:
                    values[index] = chunk
            variables[name] = ((*axes, *dims), values)
        return xr.Dataset(variables, self.coordinates(), {"sweep": json.dumps(self.sweep.record())})

    def coordinates(self) -> dict[str, Any]:
        """The axes and the labels of the results' dimensions."""
        return coordinates_of(self.sweep, {dim for own, _, _ in self.layout.arrays.values() for dim in own})


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


def fill_value(dtype: np.dtype[Any]) -> Any:
    """What stands for a missing value."""
    return np.nan if dtype.kind == "f" else 0


@cache
def code() -> dict[str, str]:
    """The version, and a fingerprint of the sources that make the numbers."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] not in NO_NUMBERS:
            digest.update(path.read_bytes())
    return {"version": package_version(), "sources": digest.hexdigest()[:16]}


def create(path: Path, sweep: Sweep) -> Store:
    """A new store, or a line that says why not; made beside its place, so that a kill leaves no half store."""
    check_writable(path.parent)
    store = Store(path, sweep, layout_of(sweep))
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent, ignore_cleanup_errors=True) as folder:
        beside = Path(folder) / "store"
        write_metadata(store, beside)
        try:
            beside.rename(path)  # refused if somebody else has begun the store in the meantime
        except OSError as error:
            raise InputError(f"Cannot make the store {path}: {error.strerror}.") from error
    return store


def write_metadata(store: Store, folder: Path) -> None:
    """Make the arrays, or give them the sweep's shape; what they hold stays. The attributes come last."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Consolidated metadata")  # xarray wants it, Zarr 3 has not fixed it yet
            group = zarr.open_group(folder, mode="a", zarr_format=3, use_consolidated=False)
            for name in store.layout.arrays:
                place_array(group, store, name)
            for name, values in store.coordinates().items():
                place_coordinate(group, name, values)
            group.attrs["sweep"] = {
                "format": FORMAT,
                **store.sweep.record(),
                **code(),
                "layout": store.layout.record(),
            }
            zarr.consolidate_metadata(str(folder))
    except OSError as error:
        raise InputError(f"Cannot write the store {store.path}: {error.strerror or error}.") from error


def place_array(group: zarr.Group, store: Store, name: str) -> None:
    """An array of the layout, made or given its shape."""
    dims, shape, dtype = store.layout.arrays[name]
    whole = (*store.sweep.shape, *shape)
    if name in group:
        array = group[name]
        assert isinstance(array, zarr.Array)
        if array.shape != whole:
            array.resize(whole)
        return
    group.create_array(
        name,
        shape=whole,
        chunks=(*[1] * len(store.sweep.shape), *[max(size, 1) for size in shape]),
        dtype=dtype,
        compressors=[Crc32cCodec()],
        fill_value=fill_value(dtype),
        dimension_names=(*store.sweep.over, *dims),
        chunk_key_encoding={"name": "default", "separator": "."},
    )


def place_coordinate(group: zarr.Group, name: str, values: list[Any]) -> None:
    """The values of an axis; those that are no numbers by their positions."""
    text = json.dumps(list(values))
    if name in group and group[name].attrs.get("values") == text:
        return
    numbers = np.asarray(values)
    if numbers.dtype.kind not in "iufb":
        numbers = np.arange(len(values))
    array = group.create_array(
        name, shape=numbers.shape, chunks=numbers.shape, dtype=numbers.dtype, dimension_names=(name,), overwrite=True
    )
    array[:] = numbers
    array.attrs["values"] = text  # written last: then the numbers are there too


def open_store(path: Path) -> Store:
    """The store in a folder.

    Raises:
        InputError: there is none.
    """
    kept = attributes(path)
    sweep = Sweep(
        from_record(kept["base"]),
        over=kept["over"],
        simulate={name: value for name, value in kept["simulate"].items() if value is not None},
        reduce=kept["keep"],
        unchecked=True,
    )
    layout = {
        name: (tuple(dims), tuple(shape), np.dtype(dtype)) for name, (dims, shape, dtype) in kept["layout"].items()
    }
    return Store(path, sweep, Layout(layout))


def attributes(path: Path) -> dict[str, Any]:
    """What the store says of itself."""
    try:
        record = json.loads((path / "zarr.json").read_text(encoding="utf-8"))
        kept: dict[str, Any] = record["attributes"]["sweep"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not the store of a sweep.") from error
    known = kept.get("format") == FORMAT
    require(known, f"{path} has the format {kept.get('format')} of a sweep's store; this version reads {FORMAT}.")
    return kept


def resume(path: Path, sweep: Sweep, *, extend: bool, any_version: bool) -> Store:
    """The store that is there, to go on with; its axes in its own order, with the new values behind.

    Raises:
        InputError: it belongs to another sweep, to other code, or has fewer values on an axis.
    """
    store, kept = open_store(path), attributes(path)
    check_same(path, store.sweep.record(), sweep.record())
    check_code(path, kept, any_version)
    over = merged_axes(path, store.sweep.over, sweep.over, extend)
    store.sweep = replace(sweep, over=over)
    remove_unfinished(path)
    write_metadata(store, path)
    return store


def check_same(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise `InputError` if the sweeps differ in more than the values of their axes."""
    a, b = flat(there), flat(here)
    differing = [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
    shown = "; ".join(f"{name}: {a.get(name)!r} there, {b.get(name)!r} here" for name in differing[:3])
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    same(not differing, f"{path} belongs to another sweep ({shown}{more}). Choose another store.")


def flat(record: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Dotted names to values; of the axes their names alone."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        if key == "over":
            found["over"] = list(value)
        elif isinstance(value, dict):
            found |= flat(value, f"{before}{key}.")
        else:
            found[before + key] = value
    return found


def check_code(path: Path, kept: dict[str, Any], any_version: bool) -> None:
    """Raise `InputError` if other code began the store, unless that does not matter."""
    differing = {name: kept.get(name) for name, mine in code().items() if kept.get(name) != mine}
    shown = "; ".join(f"{name} {there} there, {code()[name]} here" for name, there in differing.items())
    same(
        any_version or not differing,
        f"{path} was begun by other code ({shown}), whose numbers may differ. "
        "Nearest: another store, or accept it (any_version, --any-version).",
    )


def merged_axes(path: Path, there: Any, here: Any, extend: bool) -> dict[str, list[Any]]:
    """The values of both, those of the store first."""
    merged: dict[str, list[Any]] = {}
    for name, values in there.items():
        new = [value for value in here[name] if value not in values]
        gone = [value for value in values if value not in here[name]]
        same(
            not new or extend,
            f"{path} has no {name} = {', '.join(map(str, new[:5]))}. Nearest: extend it (extend, --extend).",
        )
        same(not gone, f"{path} has {name} = {', '.join(map(str, gone[:5]))}, which this sweep has not. Add them.")
        merged[name] = [*values, *new]
    return merged
