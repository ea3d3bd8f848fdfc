"""CIFAR-10 in the layout of torchvision: `cifar-10-batches-py` with five training batches, a test batch and the names.

The files are pickles, which could run any code: the reader here knows NumPy's arrays and nothing else.
"""

import codecs
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from limitformer.errors import InputError, require

FOLDER, META = "cifar-10-batches-py", "batches.meta"
TRAINING = tuple(f"data_batch_{k}" for k in range(1, 6))
TEST = "test_batch"
SIDE, CHANNELS = 32, 3
Arrays = tuple[NDArray[np.uint8], NDArray[np.int64]]

ARRAY = np.array([0]).__reduce__()[0]  # the function that pickles make arrays with, wherever this NumPy keeps it
KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"): ARRAY,
    ("numpy._core.multiarray", "_reconstruct"): ARRAY,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,
}


class ArraysOnly(pickle.Unpickler):
    """Plain containers and NumPy's arrays."""

    def find_class(self, module: str, name: str) -> Any:
        """One of what is known."""
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no such file needs")
        return KNOWN[module, name]


def unpickled(path: Path) -> dict[str, Any]:
    """The dictionary in one of the files.

    Raises:
        InputError: no such file, or not one of CIFAR-10.
    """
    require(
        path.is_file(),
        f"No such file: {path}. CIFAR-10 for Python is one archive; it must be unpacked into {path.parent.parent}.",
    )
    try:
        with path.open("rb") as file:
            content = ArraysOnly(file, encoding="latin1").load()
    except Exception as error:  # a damaged pickle raises anything
        raise InputError(f"{path} is not a file of CIFAR-10: {error}. Nearest: unpack the archive again.") from error
    require(isinstance(content, dict), f"{path} is not a file of CIFAR-10: it holds no dictionary.")
    return dict(content)


def read_batch(path: Path, classes: int) -> Arrays:
    """Images (n, 32, 32, 3) and labels (n,) of one file."""
    content = unpickled(path)
    data: Any = content.get("data")
    labels: Any = content.get("labels")
    fits = isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 2
    fits = fits and data.shape[1] == CHANNELS * SIDE**2 and isinstance(labels, list) and len(labels) == len(data)
    fits = fits and all(isinstance(label, int) and 0 <= label < classes for label in labels)
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
