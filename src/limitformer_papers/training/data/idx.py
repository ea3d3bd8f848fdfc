"""Images and labels in the IDX format of MNIST: Fashion-MNIST, or any set with its four file names.

A file begins with two zero bytes, a byte for the type (8: unsigned bytes) and one for the number of axes; then come
the sizes as big-endian integers of 32 bits, and the entries in C order. Files may be compressed by gzip (`.gz`).
"""

import gzip
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import InputError, require
from limitformer_papers.training.data.cifar import Arrays

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist
NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
UNSIGNED_BYTES = 8
CLASSES = 10
LARGEST = 2**28  # bytes of the entries of a file; 60,000 images of 28 × 28 are 47 million


def read_fashion(folder: Path | None) -> tuple[Arrays, Arrays]:
    """Return training and test images (n, side, side, 1) with their labels (n,).

    Args:
        folder: holds the four files, each plain or with .gz; None takes the folder of Debian's package.

    Raises:
        InputError: a missing, damaged or foreign file.
    """
    folder = DEBIAN if folder is None else folder
    paths = [path_of(folder, name) for name in NAMES]
    images, labels, test_images, test_labels = (read_idx(path) for path in paths)
    for path, pictures, classes in ((paths[0], images, labels), (paths[2], test_images, test_labels)):
        check_pair(path, pictures, classes)
    require(
        images.shape[1:] == test_images.shape[1:],
        f"Training and test images in {folder} must have one size; got {images.shape[1:]} and {test_images.shape[1:]}.",
    )
    return (images[..., None], labels.astype(np.int64)), (test_images[..., None], test_labels.astype(np.int64))


def path_of(folder: Path, name: str) -> Path:
    """Return the path of a file, plain or compressed."""
    paths = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
    nearest = "Nearest: install Debian's package dataset-fashion-mnist, or name the folder of the four files (--data)."
    require(bool(paths), f"No file {name} or {name}.gz in {folder}. {nearest}")
    return paths[0]


def check_pair(path: Path, images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> None:
    """Raise `InputError` unless images (n, side, side) have n labels of the ten classes."""
    require(images.size > 0, f"{path} holds no images.")
    shapes = f"{' × '.join(map(str, images.shape))} pixels and {' × '.join(map(str, labels.shape))} labels"
    require(
        images.ndim == 3 and labels.shape == images.shape[:1] and images.shape[1] == images.shape[2],
        f"{path} and its labels must hold n square images and n labels; got {shapes}.",
    )
    require(
        bool((labels < CLASSES).all()),
        f"The labels of {path} must be 0 to {CLASSES - 1}; got {labels.max()}. Nearest: Fashion-MNIST or MNIST itself.",
    )


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Return the array of one file of unsigned bytes.

    Raises:
        InputError: a damaged or foreign file.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            start = file.read(4)
            axes = start[3] if len(start) == 4 else 0
            known = start[:3] == bytes([0, 0, UNSIGNED_BYTES]) and axes in (1, 3)
            require(
                known, f"{path} is not an IDX file of unsigned bytes; it begins with {start.hex(' ') or 'nothing'}."
            )
            begun = file.read(4 * axes)
            require(len(begun) == 4 * axes, f"{path} ends within its sizes. Nearest: copy it again.")
            sizes = np.frombuffer(begun, ">u4")
            count = int(np.prod(sizes, dtype=object))
            require(count <= LARGEST, f"{path} claims {count:,} entries; at most {LARGEST:,} are read.")
            content = file.read(count + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} is damaged: {error}. Nearest: copy it again.") from error
    right = f"{' × '.join(map(str, sizes))} = {count:,} bytes"
    came = f"{len(content):,}" if len(content) <= count else "more"
    require(len(content) == count, f"{path} must hold {right} after its sizes; got {came}. Nearest: copy it again.")
    return np.frombuffer(content, np.uint8).reshape(sizes)
