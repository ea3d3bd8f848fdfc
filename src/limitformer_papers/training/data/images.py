r"""Images to train on: the digits of scikit-learn, which are always there, or files of Fashion-MNIST or CIFAR-10.

A pixel p of 0…255 becomes (p/255 − mean)/deviation, by the mean and deviation of its channel in the training images.
Of the 1,797 digits (8 × 8, one channel) a fifth is held out, the same for any seed; of the others, their test images.
"""

import hashlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from limitformer.base.errors import require
from limitformer_papers.training.data.autoaugment import augmented
from limitformer_papers.training.data.cifar import Arrays, read_cifar10
from limitformer_papers.training.data.idx import read_fashion

Source = Literal["digits", "fashion", "cifar10"]
HELD_OUT = 5  # every fifth digit


class Images(Dataset[dict[str, torch.Tensor]]):
    """Images (n, height, width, channels) of bytes and labels (n,); an item is the keyword arguments of the model.

    Args:
        images, labels: the data.
        scale: means and deviations of the channels, 0…1.
        augment: seed of the augmentation; None does not augment.
    """

    def __init__(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        scale: tuple[NDArray[np.float64], NDArray[np.float64]],
        augment: int | None = None,
    ) -> None:
        self.images, self.labels, self.scale, self.augment = images, labels, scale, augment
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, with which the augmentation changes."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        image = self.images[index]
        if self.augment is not None:
            image = augmented(image, self.augment, self.epoch, index)
        mean, deviation = self.scale
        pixels = ((image / 255 - mean) / deviation).astype(np.float32).transpose(2, 0, 1)
        return {
            "pixel_values": torch.from_numpy(np.ascontiguousarray(pixels)),
            "labels": torch.tensor(self.labels[index]),
        }

    def fingerprint(self) -> str:
        """Return a digest that identifies the data."""
        return hashlib.sha256(self.images.tobytes() + self.labels.tobytes()).hexdigest()[:16]


def collate(items: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def read_images(
    source: Source, folder: Path | None, augment: int | None = None, first: tuple[int | None, int | None] = (None, None)
) -> tuple[Images, Images]:
    """Return training and held-out images; training images are augmented if there is a seed for it.

    Args:
        source: the data set.
        folder: of its files. The digits have none; None finds Fashion-MNIST where Debian's package installs it.
        augment: seed of the augmentation.
        first: numbers of training and held-out images, from the start of each file; None takes all.

    Raises:
        InputError: no folder where one is needed, one where none is, or files that are missing or damaged.
    """
    if source == "digits":
        require(folder is None, f"The digits come with scikit-learn and take no folder of data; got {folder}.")
        training, test = read_digits()
    elif source == "fashion":
        training, test = read_fashion(folder)
    else:
        require(folder is not None, "CIFAR-10 needs the folder that holds cifar-10-batches-bin; got none.")
        assert folder is not None
        training, test = read_cifar10(folder)
    (images, labels), (test_images, test_labels) = (
        (a[:n], b[:n]) for (a, b), n in zip((training, test), first, strict=True)
    )
    for kind, number, there in (("training", first[0], len(images)), ("held-out", first[1], len(test_images))):
        require(
            number is None or number <= there,
            f"The run asks for the first {number} {kind} images, and {folder or 'the data'} has {there}. "
            "Nearest: the whole data set.",
        )
    pixels = images.astype(np.float64) / 255
    scale = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))
    require(
        bool((images.max((0, 1, 2)) > images.min((0, 1, 2))).all()),
        f"All pixels of the training images in {folder or 'the data'} are equal.",
    )
    return Images(images, labels, scale, augment), Images(test_images, test_labels, scale)


def read_digits() -> tuple[Arrays, Arrays]:
    """Return the digits in an order that mixes writers; pixels 0…16 become 0…240."""
    from sklearn.datasets import load_digits  # slow to import

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (15 * digits.images[order]).astype(np.uint8)[..., None]
    labels = digits.target[order].astype(np.int64)
    held_out = len(labels) // HELD_OUT
    return (images[held_out:], labels[held_out:]), (images[:held_out], labels[:held_out])
