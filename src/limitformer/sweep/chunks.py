r"""Chunks of a Zarr array, written and read one file at a time.

The format is Zarr 3's [zarr-specs.readthedocs.io, v3]: a chunk of an array whose codecs are `bytes` (little-endian) and
`crc32c` is the values in C order and four bytes of checksum, in the file `c.i.j.…` (one folder an array: a folder a
chunk takes longer to make than the chunk). Zarr reads and writes it too, at a millisecond a chunk; a cell has several.
A chunk is written beside its place and moved there, so that it is whole or absent, also if the writer is killed; its
checksum tells if it was damaged later.
"""

import os
import struct
from pathlib import Path

import google_crc32c
import numpy as np
from numpy.typing import NDArray

UNFINISHED = ".unfinished"  # the ending of what a killed writer leaves behind


def chunk_path(array: Path, index: tuple[int, ...], own_dimensions: int) -> Path:
    """The file of the chunk at `index`, for an array whose other dimensions are in one chunk."""
    return array / ".".join(["c", *map(str, index), *["0"] * own_dimensions])


def write_chunk(path: Path, values: NDArray[np.generic]) -> None:
    """Write the chunk, whole or not at all."""
    data = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()
    beside = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        beside.write_bytes(data + struct.pack("<I", google_crc32c.value(data)))
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def read_chunk(path: Path, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> NDArray[np.generic] | None:
    """The chunk; None if it is absent or damaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    values, checksum = data[:-4], data[-4:]
    whole = len(values) == dtype.itemsize * int(np.prod(shape)) and len(checksum) == 4
    if not whole or struct.pack("<I", google_crc32c.value(values)) != checksum:
        return None
    return np.frombuffer(values, dtype.newbyteorder("<")).reshape(shape).astype(dtype, copy=False)


def remove_unfinished(folder: Path) -> int:
    """Remove what killed writers have left; how many files."""
    orphans = list(folder.rglob(f"*{UNFINISHED}"))
    for orphan in orphans:
        orphan.unlink(missing_ok=True)
    return len(orphans)
