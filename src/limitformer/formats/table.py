"""The number formats, in one table."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from limitformer.base.errors import nearest, require


@dataclass(frozen=True)
class NumberFormat:
    """A format of binary floating-point numbers with subnormal numbers, rounded to the nearest.

    Attributes:
        name: as options spell it.
        dtype: the type of torch.
        largest: its largest number.
        normal: the exponent of its smallest normal number.
        digits: the binary digits after the point.
        beyond: the smallest float32 that rounds beyond the largest number.
    """

    name: str
    dtype: torch.dtype
    largest: float
    normal: int
    digits: int
    beyond: float

    @property
    def smallest(self) -> int:
        """The exponent of its smallest number."""
        return self.normal - self.digits

    def spacing(self, exponent: int) -> int:
        """Return the exponent of the distance between its numbers in [2^exponent, 2^(exponent + 1))."""
        return max(exponent, self.normal) - self.digits


def half_beyond(largest: float, digits: int, tie_stays: bool = False) -> float:
    """Return the smallest float32 that rounds beyond `largest`: half a spacing above it, or the next after that."""
    limit = np.float32(largest + 2.0 ** (np.floor(np.log2(largest)) - digits - 1))
    return float(np.nextafter(limit, np.float32(np.inf)) if tie_stays else limit)


# arXiv 2209.05433 for e4m3 and e5m2. The largest e4m3 is even, so that the number half a spacing above rounds to it.
FORMATS = {
    each.name: each
    for each in (
        NumberFormat("bf16", torch.bfloat16, 255 * 2.0**120, -126, 7, half_beyond(255 * 2.0**120, 7)),
        NumberFormat("fp16", torch.float16, 65504.0, -14, 10, half_beyond(65504.0, 10)),
        NumberFormat("e4m3", torch.float8_e4m3fn, 448.0, -6, 3, half_beyond(448.0, 3, tie_stays=True)),
        NumberFormat("e5m2", torch.float8_e5m2, 57344.0, -14, 2, half_beyond(57344.0, 2)),
    )
}


def formats_of(names: Sequence[str] | str) -> tuple[NumberFormat, ...]:
    """Return the formats of these names.

    Raises:
        InputError: a name is not in the table, or none is given.
    """
    every = names.split(",") if isinstance(names, str) else names
    several = isinstance(every, list | tuple) and bool(every) and all(isinstance(each, str) for each in every)
    require(several, f"formats must name one of {', '.join(FORMATS)} or several; got {names!r}.")
    known = [each.strip().lower() for each in every]
    for name in known:
        hint = nearest(name, FORMATS)
        require(name in FORMATS, f"there is no number format {name!r}; there are {', '.join(FORMATS)}.{hint}")
    return tuple(FORMATS[name] for name in dict.fromkeys(known))
