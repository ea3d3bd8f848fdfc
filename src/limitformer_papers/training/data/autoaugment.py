r"""AutoAugment's policy for CIFAR-10 [Cubuk et al., *AutoAugment: Learning Augmentation Strategies from Data*,
2019].

One of 25 sub-policies is drawn, each two operations (name, probability, magnitude) one after the other [Table 7];
magnitudes 0…9 are ten equal steps over the range of the operation [Table 6], and a signed operation goes either way
with probability 1/2. Ranges not in pixels are those of the paper; a shift of m pixels of its 331 is m · size/331
here. A crop of the image padded by an eighth and a flip come first, as in ViT-CIFAR, which [CT] starts from.

Grey images (one channel) have the same policy, in which Color changes nothing.

Random numbers depend only on (seed, epoch, example), so a resumed run sees the same pictures.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

Picture = Image.Image
Pixels = NDArray[np.uint8]
Operation = tuple[str, float, int]

POLICY: tuple[tuple[Operation, Operation], ...] = (
    (("Invert", 0.1, 7), ("Contrast", 0.2, 6)),
    (("Rotate", 0.7, 2), ("TranslateX", 0.3, 9)),
    (("Sharpness", 0.8, 1), ("Sharpness", 0.9, 3)),
    (("ShearY", 0.5, 8), ("TranslateY", 0.7, 9)),
    (("AutoContrast", 0.5, 8), ("Equalize", 0.9, 2)),
    (("ShearY", 0.2, 7), ("Posterize", 0.3, 7)),
    (("Color", 0.4, 3), ("Brightness", 0.6, 7)),
    (("Sharpness", 0.3, 9), ("Brightness", 0.7, 9)),
    (("Equalize", 0.6, 5), ("Equalize", 0.5, 1)),
    (("Contrast", 0.6, 7), ("Sharpness", 0.6, 5)),
    (("Color", 0.7, 7), ("TranslateX", 0.5, 8)),
    (("Equalize", 0.3, 7), ("AutoContrast", 0.4, 8)),
    (("TranslateY", 0.4, 3), ("Sharpness", 0.2, 6)),
    (("Brightness", 0.9, 6), ("Color", 0.2, 8)),
    (("Solarize", 0.5, 2), ("Invert", 0.0, 3)),
    (("Equalize", 0.2, 0), ("AutoContrast", 0.6, 0)),
    (("Equalize", 0.2, 8), ("Equalize", 0.6, 4)),
    (("Color", 0.9, 9), ("Equalize", 0.6, 6)),
    (("AutoContrast", 0.8, 4), ("Solarize", 0.2, 8)),
    (("Brightness", 0.1, 3), ("Color", 0.7, 0)),
    (("Solarize", 0.4, 5), ("AutoContrast", 0.9, 3)),
    (("TranslateY", 0.9, 9), ("TranslateY", 0.7, 9)),
    (("AutoContrast", 0.9, 2), ("Solarize", 0.8, 3)),
    (("Equalize", 0.8, 8), ("Invert", 0.1, 3)),
    (("TranslateY", 0.7, 9), ("AutoContrast", 0.9, 1)),
)
LARGEST = 9  # magnitude


@dataclass(frozen=True)
class Range:
    """The strengths of an operation at magnitudes 0 and 9, and whether it goes both ways."""

    first: float
    last: float
    signed: bool = False

    def at(self, magnitude: int, sign: int) -> float:
        value = self.first + (self.last - self.first) * magnitude / LARGEST
        return sign * value if self.signed else value


def shifted(picture: Picture, matrix: tuple[float, ...]) -> Picture:
    """Apply the affine map of positions (a, b, c, d, e, f); outside is black."""
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix)


def enhanced(kind: Callable[[Picture], Any]) -> Callable[[Picture, float], Picture]:
    """Return an enhancement by a factor of 1 + strength."""
    return lambda picture, strength: kind(picture).enhance(1 + strength)


RANGES: Mapping[str, Range] = {
    "ShearY": Range(0, 0.3, signed=True),
    "TranslateX": Range(0, 150 / 331, signed=True),  # of the width
    "TranslateY": Range(0, 150 / 331, signed=True),
    "Rotate": Range(0, 30, signed=True),  # degrees
    "Brightness": Range(0, 0.9, signed=True),
    "Color": Range(0, 0.9, signed=True),
    "Contrast": Range(0, 0.9, signed=True),
    "Sharpness": Range(0, 0.9, signed=True),
    "Posterize": Range(8, 4),  # bits
    "Solarize": Range(255, 0),  # brighter pixels are inverted
    "AutoContrast": Range(0, 0),
    "Equalize": Range(0, 0),
    "Invert": Range(0, 0),
}
OPERATIONS: Mapping[str, Callable[[Picture, float], Picture]] = {
    "ShearY": lambda picture, strength: shifted(picture, (1, 0, 0, strength, 1, 0)),
    "TranslateX": lambda picture, strength: shifted(picture, (1, 0, int(strength * picture.width), 0, 1, 0)),
    "TranslateY": lambda picture, strength: shifted(picture, (1, 0, 0, 0, 1, int(strength * picture.height))),
    "Rotate": lambda picture, strength: picture.rotate(strength),
    "Brightness": enhanced(ImageEnhance.Brightness),
    "Color": enhanced(ImageEnhance.Color),
    "Contrast": enhanced(ImageEnhance.Contrast),
    "Sharpness": enhanced(ImageEnhance.Sharpness),
    "Posterize": lambda picture, strength: ImageOps.posterize(picture, round(strength)),
    "Solarize": lambda picture, strength: ImageOps.solarize(picture, round(strength)),
    "AutoContrast": lambda picture, strength: ImageOps.autocontrast(picture),
    "Equalize": lambda picture, strength: ImageOps.equalize(picture),
    "Invert": lambda picture, strength: ImageOps.invert(picture),
}

AUGMENTATION = 2  # the purpose in the seed of these random numbers; the order of the data has another


def augmented(image: Pixels, seed: int, epoch: int, example: int) -> Pixels:
    """Return the image (height, width, 3 or 1) as an epoch sees it: cropped, flipped, and changed by the policy."""
    generator = np.random.default_rng([seed, AUGMENTATION, epoch, example])
    moved = flipped(cropped(image, generator), generator)
    picture = Image.fromarray(moved[..., 0] if moved.shape[-1] == 1 else moved)
    return np.asarray(by_policy(picture, generator)).reshape(image.shape)


def cropped(image: Pixels, generator: Generator) -> Pixels:
    """Crop the image to its size after padding with black, an eighth of its height on each side."""
    height, width = image.shape[:2]
    pad = height // 8
    padded = np.pad(image, ((pad, pad), (pad, pad), (0, 0)))
    top, left = generator.integers(0, 2 * pad + 1, size=2)
    return padded[top : top + height, left : left + width]


def flipped(image: Pixels, generator: Generator) -> Pixels:
    return np.ascontiguousarray(image[:, ::-1] if generator.random() < 0.5 else image)


def by_policy(picture: Picture, generator: Generator) -> Picture:
    for name, probability, magnitude in POLICY[generator.integers(len(POLICY))]:
        chance, sign = generator.random(), int(generator.choice([-1, 1]))
        if chance < probability:
            picture = OPERATIONS[name](picture, RANGES[name].at(magnitude, sign))
    return picture
