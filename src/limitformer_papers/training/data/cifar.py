"""CIFAR-10 in the layout of torchvision: `cifar-10-batches-py` with five training batches, a test batch and the names.

The files are pickles. They are read as data, without Python's reader of pickles (`inert_pickle`): of
an array the bytes are taken, if its shape and type are those of CIFAR-10.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import InputError, first_line, require
from limitformer_papers.training.data.inert_pickle import Made, Named, read

FOLDER, META = "cifar-10-batches-py", "batches.meta"
TRAINING = tuple(f"data_batch_{k}" for k in range(1, 6))
TEST = "test_batch"
SIDE, CHANNELS = 32, 3
Arrays = tuple[NDArray[np.uint8], NDArray[np.int64]]

ARRAY, DTYPE, ENCODE = Named("numpy", "ndarray"), Named("numpy", "dtype"), Named("_codecs", "encode")
RECONSTRUCT = frozenset(Named(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core"))
KNOWN = RECONSTRUCT | {ARRAY, DTYPE, ENCODE}
BYTE_STATE = (3, "|", None, None, None, -1, -1, 0)  # of the type "u1"


def unpickled(path: Path) -> dict[str, Any]:
    """The dictionary in one of the files, arrays as records.

    Raises:
        InputError: no such file, or not one of CIFAR-10.
    """
    require(
        path.is_file(),
        f"No such file: {path}. CIFAR-10 for Python is one archive; it must be unpacked into {path.parent.parent}.",
    )
    try:
        content = read(path.read_bytes(), KNOWN)
    except Exception as error:  # a damaged pickle raises anything
        reason = first_line(error)
        raise InputError(f"{path} is not a file of CIFAR-10: {reason}. Nearest: unpack the archive again.") from error
    require(isinstance(content, dict), f"{path} is not a file of CIFAR-10: it holds no dictionary.")
    return dict(content)


def bytes_of(value: Any) -> bytes | None:
    """The bytes of a string as Python 2 or 3 pickles them."""
    if isinstance(value, Made):
        value = value.arguments[0] if value.function == ENCODE and value.arguments[1:] == ("latin1",) else None
    try:
        return value.encode("latin1") if isinstance(value, str) else value if isinstance(value, bytes) else None
    except UnicodeEncodeError:
        return None


def array_of(value: Any) -> NDArray[np.uint8] | None:
    """The array of bytes (n, k) that a record stands for; None if it is of any other kind."""
    if not (isinstance(value, Made) and value.function in RECONSTRUCT and isinstance(value.state, tuple)):
        return None
    if len(value.state) != 5:
        return None
    version, shape, dtype, fortran, content = value.state
    data = bytes_of(content)
    plain = isinstance(dtype, Made) and dtype.function == DTYPE and dtype.state in (None, BYTE_STATE)
    plain = plain and dtype.arguments[:1] == ("u1",)
    sized = isinstance(shape, tuple) and len(shape) == 2 and all(type(n) is int and n >= 0 for n in shape)
    if not (plain and sized and version == 1 and fortran is False and data is not None):
        return None
    return np.frombuffer(data, np.uint8).reshape(shape) if len(data) == shape[0] * shape[1] else None


def read_batch(path: Path, classes: int) -> Arrays:
    """Images (n, 32, 32, 3) and labels (n,) of one file."""
    content = unpickled(path)
    data, labels = array_of(content.get("data")), content.get("labels")
    fits = data is not None and data.shape[1] == CHANNELS * SIDE**2
    fits = fits and isinstance(labels, list) and data is not None and len(labels) == len(data)
    fits = fits and all(type(label) is int and 0 <= label < classes for label in labels or [])
    require(
        fits,
        f"{path} is not a file of CIFAR-10: it needs data, bytes (n, {CHANNELS * SIDE**2}), and n labels of 0 to "
        f"{classes - 1}. Nearest: unpack the archive again.",
    )
    images = np.asarray(data).reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), np.asarray(labels, np.int64)


def read_cifar10(folder: Path) -> tuple[Arrays, Arrays]:
    """Training and test images with their labels; `folder` is the one with `cifar-10-batches-py`, or that itself."""
    inner = folder if folder.name == FOLDER else folder / FOLDER
    require(inner.is_dir(), f"No CIFAR-10 in {folder}: there is no folder {FOLDER}. Nearest: --data its parent.")
    for name in (META, *TRAINING, TEST):
        require((inner / name).is_file(), f"CIFAR-10 in {inner} lacks {name}. Nearest: unpack the archive again.")
    names = unpickled(inner / META).get("label_names")
    require(isinstance(names, list) and len(names) == 10, f"{inner / META} is not a file of CIFAR-10: no ten names.")
    parts = [read_batch(inner / name, 10) for name in TRAINING]
    images, labels = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
    return (images, labels), read_batch(inner / TEST, 10)
