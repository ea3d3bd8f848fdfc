"""Passes whose numbers are counted, and what follows from the counts: a dataset."""

import math
import re
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import xarray as xr
from torch import nn

from limitformer.formats.observer import BACKWARD, DIRECTIONS, GRADIENT, UPDATE, WEIGHT, NumberCounts, Tallies
from limitformer.formats.table import NumberFormat
from limitformer.formats.tally import Tally, tally_of_law
from limitformer.stepping.updates import UpdateRule
from limitformer.weightless.laws import Law
from limitformer.weightless.layout import Layout
from limitformer.weightless.observers.stream import Streams

LARGEST_SCALE = 126.0  # whose power of two float32 holds
FLUSHED = 0.1  # the share of a kind's gradients that may round to zero with a loss scale that works


class Counting:
    """Makes the observer of each pass, `structure.Structure.more`; `observer` is that of the last one."""

    def __init__(self, formats: Sequence[NumberFormat], rules: Mapping[str, UpdateRule] | None = None) -> None:
        self.formats, self.rules = formats, rules or {}
        self.observer: NumberCounts | None = None

    def __call__(self, stream: Streams) -> NumberCounts:
        self.finish()
        self.observer = NumberCounts(stream, self.formats, self.rules)
        return self.observer

    def finish(self) -> None:
        if self.observer is not None:
            self.observer.finish()

    def result(self, module: nn.Module, laws: Mapping[str, Law] | None) -> xr.Dataset:
        """Return the dataset of the last pass, with the weights of the module: by their laws, if they are known."""
        self.finish()
        assert self.observer is not None  # there was a pass
        weights = count_weights(module, laws, self.formats)
        matrices = {name for name, one in module.named_parameters() if one.dim() > 1}
        decay = max((r.lr * r.weight_decay for r in self.rules.values() if r.decoupled), default=0.0)
        data = dataset(self.observer.tallies | weights, self.formats, matrices, self.observer.stream.layout)
        silent = [name in self.observer.silent for name in data["tensor"].values.tolist()]
        return data.assign_coords(silent=("tensor", silent)).assign_attrs(decay=decay)


def count_weights(module: nn.Module, laws: Mapping[str, Law] | None, formats: Sequence[NumberFormat]) -> Tallies:
    """Return the counts of every weight: by its law if that is known, else of its entries."""
    result: Tallies = {}
    for name, one in module.named_parameters():
        law = None if laws is None else laws.get(name)
        if law is not None and (law.random or law.kind == "constant"):
            result[WEIGHT, name] = tally_of_law(law, one.numel(), formats)
        elif not hasattr(one, "weight") and one.is_floating_point():
            result[WEIGHT, name] = Tally(formats)
            result[WEIGHT, name].add(one)
    return result


def kind_of(name: str) -> str:
    """Return the name of a tensor with * for numbers of blocks."""
    return re.sub(r"(?<![^.])\d+(?=[. ]|$)", "*", name)


def block_of(name: str, layout: Layout) -> int:
    """Return the number of the block of a tensor, from 1; 0 outside blocks."""
    module = name.split()[0] + "."
    places = [k for k, block in enumerate(layout.blocks, 1) if any(module.startswith(f"{m}.") for m in block.members)]
    return places[0] if places else 0


def dataset(tallies: Tallies, formats: Sequence[NumberFormat], matrices: Collection[str], layout: Layout) -> xr.Dataset:
    """Return what the counts say of each format.

    Args:
        matrices: the names of the weights whose gradients the loss must be scaled for; those of vectors may be zero but
            for rounding, as of the biases of keys.

    Returns:
        By direction and tensor `amax`, the largest |x|, and `centre`, the exponent of the power of two that brings the
        median |x| to between ½ and 1. By format too, as shares of the numbers that are not zero: `beyond`, those that
        round beyond the largest number, `zero`, those that round to zero, and `subnormal`, those below the smallest
        normal number; `scale`, the exponent of the largest power of two that keeps all numbers in the format, and
        `zero_scaled` and `subnormal_scaled`, the shares with this scale. By format and tensor `lost`, the share of
        numbers that change nothing where they are added to the stream, and `unchanged`, the share of a weight's entries
        that their update leaves as they are, unless it is zero; both for formats of two bytes. `loss_scale`: the
        exponents of the least and the largest power of two for the loss that work, NaN if none does. `block` is the
        number of a tensor's block, from 1, and 0 outside blocks.
    """
    names = list(dict.fromkeys(name for _, name in tallies))
    shape = (len(DIRECTIONS), len(names))
    by_tensor = {key: np.full(shape, np.nan) for key in ("amax", "centre")}
    shares = ("beyond", "zero", "subnormal", "scale", "zero_scaled", "subnormal_scaled")
    by_format = {key: np.full((len(formats), *shape), np.nan) for key in shares}
    of_sums = {key: np.full((len(formats), len(names)), np.nan) for key in ("lost", "unchanged")}
    for (direction, name), tally in tallies.items():
        at = DIRECTIONS.index(direction), names.index(name)
        by_tensor["amax"][at] = tally.largest
        if not tally.count:
            continue
        by_tensor["centre"][at] = tally.middle()
        for k, which in enumerate(formats):
            scale = tally.room(which)
            values = (
                *(tally.over[k], tally.zero(which), tally.subnormal(which)),
                *(scale * tally.count, tally.zero(which, scale), tally.subnormal(which, scale)),
            )
            for key, value in zip(shares, values, strict=True):
                by_format[key][k, *at] = value / tally.count
            added = tally.lost.get(which.name, (0.0, 0.0))
            if added[1]:
                of_sums["unchanged" if direction == UPDATE else "lost"][k, at[1]] = added[0] / added[1]
    dims = "direction", "tensor"
    return xr.Dataset(
        {
            **{key: (dims, each) for key, each in by_tensor.items()},
            **{key: (("format", *dims), each) for key, each in by_format.items()},
            **{key: (("format", "tensor"), each) for key, each in of_sums.items()},
            "loss_scale": (("format", "end"), [loss_scales(tallies, each, matrices) for each in formats]),
        },
        coords={
            "format": [each.name for each in formats],
            "direction": list(DIRECTIONS),
            "tensor": names,
            "end": ["least", "most"],
            "kind": ("tensor", [kind_of(name) for name in names]),
            "block": ("tensor", [block_of(name, layout) for name in names]),
            "matrix": ("tensor", [name in matrices for name in names]),
        },
    )


def loss_scales(tallies: Tallies, which: NumberFormat, matrices: Collection[str]) -> tuple[float, float]:
    """Return the exponents of the least and the largest power of two that may multiply the loss; NaN if there is none.

    With the least, at most a tenth of the gradient of any kind of matrix rounds to zero. With the largest, no gradient
    is beyond the largest number.
    """
    kinds: dict[str, Tally] = {}
    rooms = [LARGEST_SCALE]
    for (direction, name), tally in tallies.items():
        if direction in (BACKWARD, GRADIENT) and tally.count:
            rooms.append(tally.room(which))
        if direction == GRADIENT and tally.count and name in matrices:
            kinds.setdefault(kind_of(name), Tally(tally.formats)).merge(tally)
    if not kinds:
        return math.nan, math.nan
    least = max(which.smallest - 1 - largest_flushed(each) for each in kinds.values())
    return (float(least), float(min(rooms))) if least <= min(rooms) else (math.nan, math.nan)


def largest_flushed(tally: Tally) -> int:
    """Return the largest exponent such that at most a tenth of the numbers are at most that power of two."""
    return next(k for k in range(200, -200, -1) if tally.at_most(k) <= FLUSHED * tally.count)
