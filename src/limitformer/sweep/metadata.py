"""What a store says of itself: documents of Zarr 3 [zarr-specs.readthedocs.io, v3], and the description of its sweep.

The description is all that decides about the numbers, with the layout of the arrays and the codes that made the cells.
It stands in the attributes of the store's group and, as a spare, in `cells/sweep.json`, each time with a digest. A
document is written only if it changes, and the group's own last: a kill in between leaves what was there before.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import InputError
from limitformer.sweep.files import CELLS, keep_names, read_inside, readable, write_whole
from limitformer.sweep.layout import OWN, Field, Index, checked_lengths

FORMAT = 2
GROUP, SPARE = "zarr.json", f"{CELLS}/sweep.json"
MOST_BYTES = 2**28  # of a document
Document = dict[str, Any]


class OtherSweepError(InputError):
    """The store has something else in it than what is to be computed."""


class NoStoreError(InputError):
    """There is no store of a sweep."""


class LostDescriptionError(InputError):
    """A store whose description is gone, in both places."""


def documents(
    description: Document, fields: Sequence[Field], coordinates: Mapping[str, Sequence[Any]]
) -> dict[str, bytes]:
    """The files that describe a store, by their names, in the order in which they are written."""
    shape = [len(values) for values in description["over"].values()]
    axes, block = list(description["over"]), description["block"]
    arrays = {field.name: array_of(field, axes, shape, block) for field in fields}
    files: dict[str, bytes] = {}
    for name, values in coordinates.items():
        arrays[name], files[f"{name}/c.0"] = coordinate(name, values)
    files |= {f"{name}/{GROUP}": encoded(array) for name, array in arrays.items()}
    described = {"sweep": description, "digest": digest(description)}
    group = {"zarr_format": 3, "node_type": "group"}
    consolidated = {"kind": "inline", "must_understand": False, "metadata": arrays}
    files[f"{CELLS}/{GROUP}"] = encoded({**group, "attributes": {}})
    files[SPARE] = encoded(described)
    files[GROUP] = encoded({**group, "attributes": described, "consolidated_metadata": consolidated})
    return files


def encoded(document: Document) -> bytes:
    """As JSON."""
    return json.dumps(document).encode()


def digest(description: Document) -> str:
    """That of a description is its own proof."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def array_of(field: Field, axes: list[str], shape: list[int], block: Sequence[int]) -> Document:
    """The document of an array over the grid."""
    own = [max(size, 1) for size in field.shape]
    fill = "NaN" if field.dtype.kind == "f" else bool(field.fill) if field.dtype.kind == "b" else 0
    return array([*shape, *field.shape], [*block, *own], field.dtype, fill, [*axes, *field.dims], {})


def array(
    shape: list[int], chunk: list[int], dtype: np.dtype[Any], fill: Any, dims: list[str], attributes: Document
) -> Document:
    """The document of an array whose chunks are the values in C order and four bytes of CRC-32C."""
    order = {} if dtype.itemsize == 1 else {"configuration": {"endian": "little"}}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": fill,
        "codecs": [{"name": "bytes", **order}, {"name": "crc32c"}],
        "attributes": attributes,
        "dimension_names": dims,
        "storage_transformers": [],
    }


def coordinate(name: str, values: Sequence[Any]) -> tuple[Document, bytes]:
    """The document and the chunk of an axis: numbers, or the positions of other values, which are in its attributes."""
    numbers, attributes = np.asarray(values), {}
    if numbers.dtype.kind not in "iufb":
        numbers, attributes = np.arange(len(values)), {"values": json.dumps(list(values))}
    numbers = numbers.astype(numbers.dtype.newbyteorder("<"))
    sizes = list(numbers.shape)
    return array(sizes, sizes, numbers.dtype, 0, [name], attributes), chunk(numbers)


def chunk(values: NDArray[Any]) -> bytes:
    """The values as a chunk."""
    data = values.tobytes()
    return data + struct.pack("<I", google_crc32c.value(data))


def chunk_values(data: bytes, dtype: np.dtype[Any], shape: Index) -> tuple[NDArray[Any], bool]:
    """The values of a chunk, and whether it is whole; of one that is too short, what there is of it, then zeros."""
    size = prod(shape) * dtype.itemsize
    body = data[:size]
    whole = len(data) == size + 4 and struct.pack("<I", google_crc32c.value(body)) == data[size:]
    return np.frombuffer(body.ljust(size, b"\0"), dtype).reshape(shape), whole


def write_documents(path: Path, files: Mapping[str, bytes]) -> bool:
    """Write those that are not there as they should be; whether there were some."""
    changed = False
    for name, data in files.items():
        if read_inside(path, name, len(data)) != data:
            folder = (path / name).parent
            folder.mkdir(exist_ok=True)
            write_whole(path, name, data, durable=True)
            changed = True
    if changed:
        keep_names(path)
    return changed


def description_of(path: Path) -> Document:
    """What the store says of its sweep.

    Raises:
        OtherSweepError: a store of another format.
        LostDescriptionError: the store of a sweep, but nothing tells which.
        NoStoreError: no store.
        InputError: one that cannot be read.
    """
    found = [described(path, name) for name in (GROUP, SPARE)]
    for one in found:
        if one.get("format") == FORMAT and one.pop("proven"):
            return one
    formats = [one["format"] for one in found if isinstance(one.get("format"), int) and one["format"] != FORMAT]
    if formats:
        raise OtherSweepError(
            f"{path} has the format {formats[0]} of a sweep's store; this version reads {FORMAT}. "
            "Nearest: another folder, which computes it again."
        )
    if is_store(path):
        raise LostDescriptionError(
            f"{path} has lost its description. Nearest: run its sweep again with this store, which restores it."
        )
    raise NoStoreError(f"{path} is not the store of a sweep.")


def is_store(path: Path) -> bool:
    """Whether there is a store of a sweep, by its folders: whatever state its documents are in."""
    return all((path / name).is_dir() for name in (CELLS, *OWN))


def block_there(path: Path, shape: Sequence[int]) -> Index | None:
    """How many cells share a chunk on each axis of a grid, as the array `status` has it; None if nothing tells."""
    try:
        record = json.loads(read_inside(path, f"status/{GROUP}", MOST_BYTES) or b"")
        return checked_lengths(record["chunk_grid"]["configuration"]["chunk_shape"], shape)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def described(path: Path, name: str) -> Document:
    """The description in a document, and whether its digest has `proven` it; empty if there is none.

    Raises:
        InputError: the document cannot be read.
    """
    with readable(path):
        data = read_inside(path, name, MOST_BYTES)
    try:
        record = json.loads(data or b"")
        holder = record["attributes"] if name == GROUP else record
        kept = dict(holder["sweep"])
        return {**kept, "proven": holder.get("digest") == digest(kept)}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
