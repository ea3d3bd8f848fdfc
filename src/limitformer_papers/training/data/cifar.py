"""CIFAR-10 in its binary version: `cifar-10-batches-bin` with five training batches, a test batch and the names.

A record is one byte for the label and 3,072 for the pixels, channel by channel and row by row.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import require

FOLDER, PYTHON_FOLDER, ARCHIVE = "cifar-10-batches-bin", "cifar-10-batches-py", "cifar-10-binary.tar.gz"
TRAINING = tuple(f"data_batch_{k}.bin" for k in range(1, 6))
TEST = "test_batch.bin"
SIDE, CHANNELS, CLASSES = 32, 3, 10
RECORD = 1 + CHANNELS * SIDE**2
Arrays = tuple[NDArray[np.uint8], NDArray[np.int64]]


def read_cifar10(folder: Path) -> tuple[Arrays, Arrays]:
    """Return training and test images with their labels; `folder` holds `cifar-10-batches-bin`, or is that folder.

    Raises:
        InputError: a missing or damaged file, or the Python version of the data set.
    """
    inner = folder if folder.name == FOLDER else folder / FOLDER
    python = folder.name == PYTHON_FOLDER or (folder / PYTHON_FOLDER).is_dir()
    version = f"{PYTHON_FOLDER} is the Python version, which is not read" if python else f"there is no folder {FOLDER}"
    require(
        inner.is_dir(),
        f"No binary CIFAR-10 in {folder}: {version}. Nearest: unpack {ARCHIVE}, the binary version, there.",
    )
    for name in (*TRAINING, TEST):
        require((inner / name).is_file(), f"CIFAR-10 in {inner} lacks {name}. Nearest: unpack {ARCHIVE} again.")
    parts = [read_batch(inner / name) for name in (*TRAINING, TEST)]
    whole = len({len(labels) for _, labels in parts}) == 1  # a file may be cut between two records
    require(whole, f"The files of CIFAR-10 in {inner} differ in length. Nearest: unpack {ARCHIVE} again.")
    images, labels = (np.concatenate([part[k] for part in parts[:-1]]) for k in (0, 1))
    return (images, labels), parts[-1]


def read_batch(path: Path) -> Arrays:
    """Return images (n, 32, 32, 3) and labels (n,) of one file."""
    content = np.fromfile(path, np.uint8)
    fits = content.size > 0 and content.size % RECORD == 0 and bool((content[::RECORD] < CLASSES).all())
    require(
        fits,
        f"{path} is not a file of CIFAR-10: it needs records of {RECORD:,} bytes that begin with a label of 0 to "
        f"{CLASSES - 1}. Nearest: unpack {ARCHIVE} again.",
    )
    records = content.reshape(-1, RECORD)
    images = records[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), records[:, 0].astype(np.int64)
