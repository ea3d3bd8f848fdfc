"""Verdicts on number formats, with their causes and cures, and the tables of a check."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import xarray as xr

from limitformer.formats.observer import BACKWARD, FORWARD, GRADIENT
from limitformer.formats.table import FORMATS, NumberFormat
from limitformer.reports.verdict import BROKEN, NOTE, WATCH, Verdict, aligned, number_text

OURS = "a choice of limitformer's"
LIMITS: Mapping[str, tuple[float, str]] = {  # where the verdicts begin, with their sources
    "flushed": (0.1, f"share of the gradient of a kind of weight that rounds to zero; {OURS}"),
    "swallowed": (0.25, f"share of a tensor that rounds to zero with a scale by its largest number; {OURS}"),
    "lost": (0.5, f"share of the numbers that change nothing where a branch is added to the stream; {OURS}"),
    "coarse": (0.25, f"half the distance between numbers at the largest attention logit; {OURS}"),
    "unchanged": (0.5, f"share of the entries of a weight that an update leaves as they are; {OURS}"),
}
FIRST_SCALE = 16  # torch.amp.GradScaler begins with a loss scale of 2^16
WHY = {
    "overflow": ("They become infinite, and the loss NaN.", "bf16, a smaller scale, or -inf where a mask is meant."),
    "underflow": (
        "What rounds to zero is not learnt from.",
        "A loss scale (torch.amp.GradScaler), or bf16.",
    ),
    "swallowed": (
        "One scale for each tensor leaves too little below its largest number.",
        "Scales by row or block, or this operation in bf16.",
    ),
    "no scale": (
        "A scale by the largest number divides by zero, unless it is guarded (pytorch/ao#3356).",
        "A least value of the scale, or this tensor without a scale at the start.",
    ),
    "lost": ("The stream is so large that blocks hardly change it.", "A stream in float32, or larger branches."),
    "coarse": (
        "Logits are rounded so far that the softmax sees other weights.",
        "Softmax and logits in float32, norms of queries and keys, or a larger temperature.",
    ),
    "unchanged": (
        "Only weights that are kept in this format alone lose it; it repeats at every step.",
        "float32 master weights, or stochastic rounding (arXiv 2010.06192).",
    ),
}


def verdicts(data: xr.Dataset, curves: xr.Dataset) -> list[Verdict]:
    """Return the verdicts of all formats.

    Args:
        data: of `measure.dataset`.
        curves: of a check, whose largest visible logits show the rounding of attention.
    """
    result = []
    for name in data["format"].values:
        which, numbers = FORMATS[str(name)], data.sel(format=name)
        found = [no_room(which, numbers), scales(which, numbers), sums(which, numbers), updates(which, numbers)]
        found += [coarse(which, curves)] if which.dtype.itemsize == 2 else []
        result += [each for each in found if each is not None]
    return result


def verdict(name: str, grade: str, said: str, value: float, limit: str = "", layer: int = -1) -> Verdict:
    threshold, source = LIMITS.get(limit or name, (math.nan, ""))
    why, mends = WHY[name]
    return Verdict(
        name, grade, said, value, threshold, source, None if layer < 0 else layer, why=why, mends=mends,
        severe=grade == BROKEN,
    )  # fmt: skip


def worst(values: xr.DataArray, limit: float) -> tuple[str, float, int, int] | None:
    """Return the kind of tensor with the largest value above a limit, that value, its block, and how many kinds."""
    if not bool((values > limit).any()):
        return None
    at = int(np.nanargmax(values.values))
    kinds = set(values["kind"].values[(values > limit).values])
    return str(values["kind"].values[at]), float(values[at]), int(values["block"][at]), len(kinds)


def single(values: xr.DataArray) -> np.ndarray:
    """Return which tensors are the output of a module, such as what products take."""
    return np.array([" " not in str(name) for name in values["tensor"].values])


def others(count: int) -> str:
    return f" and {count - 1} other kind{'s' * (count > 2)} of tensor" if count > 1 else ""


def no_room(which: NumberFormat, numbers: xr.Dataset) -> Verdict | None:
    """Return what exceeds the largest number of a format that is used without scales."""
    if which.dtype.itemsize == 1:
        return None
    for direction in (FORWARD, BACKWARD, GRADIENT):
        part = numbers.sel(direction=direction)
        if found := worst(part["amax"].where(part["beyond"] > 0), 0.0):
            kind, largest, block, count = found
            said = f"{which.name}: {kind} ({direction}) reaches {number_text(largest)}{others(count)}; the format ends "
            return verdict("overflow", BROKEN, f"{said}at {number_text(which.largest)}", largest, layer=block)
    return None


def scales(which: NumberFormat, numbers: xr.Dataset) -> Verdict | None:
    """Return whether gradients need a loss scale and which range works; in eight bits, whether scales by tensor do."""
    if which.dtype.itemsize == 1:
        products = numbers["zero_scaled"].sel(direction=[FORWARD, BACKWARD]).max("direction")
        if found := worst(products.where(single(products)), LIMITS["swallowed"][0]):
            kind, share, block, count = found
            said = f"{which.name}: {share:.0%} of {kind} round to zero with one scale for it{others(count)}"
            return verdict("swallowed", WATCH, said, share, layer=block)
        silent = numbers["amax"].sel(direction=FORWARD)
        silent = silent[(silent == 0).values & single(silent)]
        if silent.size:
            said = f"{which.name}: {silent['kind'].values[0]} is all zeros{others(len(set(silent['kind'].values)))}"
            return verdict("no scale", NOTE, said, 0.0, layer=int(silent["block"][0]))
        return None
    found = worst(numbers["zero"].sel(direction=GRADIENT).where(numbers["matrix"]), LIMITS["flushed"][0])
    least, most = numbers["loss_scale"].values
    fits = f"a loss scale from 2^{least:.0f} to 2^{most:.0f} works for this batch" if np.isfinite(least) else ""
    if found:
        kind, share, block, _ = found
        said = f"{which.name}: {share:.0%} of the gradient of {kind} rounds to zero; {fits or 'no loss scale works'}"
        grade = NOTE if least <= FIRST_SCALE <= most else WATCH if fits else BROKEN
        return verdict("underflow", grade, said, share, "flushed", block)
    if most < 0 and (numbers["amax"].sel(direction=GRADIENT) > 0).any():
        said = f"{which.name}: gradients are beyond it unless the loss is multiplied by at most 2^{most:.0f}"
        return verdict("overflow", WATCH, said, most)
    return None


def sums(which: NumberFormat, numbers: xr.Dataset) -> Verdict | None:
    found = worst(numbers["lost"], LIMITS["lost"][0])
    if not found:
        return None
    kind, share, block, _ = found
    said = f"{which.name}: {share:.0%} of what {kind} adds to the stream changes nothing there"
    return verdict("lost", WATCH, said, share, layer=block)


def coarse(which: NumberFormat, curves: xr.Dataset) -> Verdict | None:
    """Return the rounding of the largest attention logit that a softmax sees."""
    if "largest_logit" not in curves:
        return None
    by_block = curves["largest_logit"].max("head").median("sample")
    if not np.isfinite(by_block).any():
        return None
    largest = float(by_block.max())
    error = 2.0 ** (which.spacing(math.floor(math.log2(max(largest, 2.0**-20)))) - 1)
    if error < LIMITS["coarse"][0]:
        return None
    block = int(np.nanargmax(by_block.values))
    said = f"{which.name}: attention logits of {number_text(largest)} are rounded by up to {number_text(error)}"
    return verdict("coarse", WATCH, said, error, layer=block)


def updates(which: NumberFormat, numbers: xr.Dataset) -> Verdict | None:
    found = worst(numbers["unchanged"], LIMITS["unchanged"][0])
    if not found:
        return None
    kind, share, block, count = found
    stuck = 0 < numbers.attrs["decay"] <= 2.0 ** -(which.digits + 2)
    said = f"{which.name} weights alone: the first step leaves {share:.0%} of {kind} as it is{others(count)}"
    matrices = numbers["unchanged"].where(numbers["matrix"])
    if not kind.endswith(str(matrices["kind"].values[np.nan_to_num(matrices.values, nan=-1.0).argmax()])):
        said += f"; of matrices at most {float(matrices.max()):.0%}"
    said += "; weight decay changes nothing" if stuck else ""
    return verdict("unchanged", WATCH, said, share, layer=block)


def table(data: xr.Dataset) -> list[str]:
    """Return a line for each format: what it needs, and the largest shares of all kinds."""
    head = ("format", "beyond", "to zero", "so, scaled", "lost in sums", "unchanged", "loss scale")
    rows: list[Sequence[str]] = [head]
    vectors = (data["direction"] == GRADIENT) & ~data["matrix"]  # which may be zero but for rounding

    def share(values: xr.DataArray) -> str:
        return "" if not np.isfinite(values).any() else f"{float(values.max()):.2g}"

    for name in data["format"].values:
        each = data.sel(format=name)
        ends = each["loss_scale"].values
        window = f"2^{ends[0]:.0f} to 2^{ends[1]:.0f}" if np.isfinite(ends[0]) else "none"
        wide = FORMATS[str(name)].dtype.itemsize == 2
        shares = [share(each[key].where(~vectors)) for key in ("beyond", "zero", "zero_scaled")]
        shares += [share(each[key]) for key in ("lost", "unchanged")]
        rows.append((str(name), *shares, window if wide else "by tensor"))
    return aligned(rows)


def rounding_table(data: xr.Dataset) -> list[str]:
    """Return the relative difference from float32 at a few layers, of the stream and of its gradient."""
    last = data.sizes["layer"] - 1
    layers = sorted({0, last // 4, last // 2, 3 * last // 4, last})
    rows: list[Sequence[str]] = [("difference from float32, layer", *map(str, layers))]
    for key in ("stream", "gradient"):
        for name in data["format"].values:
            values = data[key].sel(format=name).mean("sample").values[layers]
            if np.isfinite(values).any():
                rows.append((f"{key} in {name}", *(f"{value:.2g}" for value in values)))
    return aligned(rows)


def record(data: xr.Dataset) -> dict[str, dict[str, float | None]]:
    """Return the largest shares of each format, and its loss scales, as JSON holds them."""
    result = {}
    for name in data["format"].values:
        each = data.sel(format=name)
        keys = ("beyond", "zero", "subnormal", "zero_scaled", "lost", "unchanged")
        ends = dict(zip(("least_loss_scale", "largest_loss_scale"), each["loss_scale"].values, strict=True))
        numbers = {key: float(each[key].max()) for key in keys} | {key: float(end) for key, end in ends.items()}
        result[str(name)] = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
    return result
