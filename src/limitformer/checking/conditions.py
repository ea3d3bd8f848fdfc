"""The agreement of outputs for two inputs that differ wholly or in one condition, and the size of groups of tokens.

`agreement` runs a network once with two sequences that differ in one input alone, and compares the last stream x of one
with that x' of the other: mean of ⟨x, x'⟩/(|x| |x'|) over the tokens whose own embedding is the same in both. If the
stream itself begins with the changed input, as with an image among the words, only tokens after it count. If all
inputs are changed, every token counts.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

from limitformer.base.errors import InputError
from limitformer.checking.thresholds import EVERY_INPUT
from limitformer.subjects.choices import PLACEHOLDERS, lookup
from limitformer.subjects.inputs import Inputs
from limitformer.subjects.losses import TARGETS
from limitformer.weightless.arrays import split_stacks

NO_CONDITION = {"mask", "masks", "position", "positions", "type", "grid", "sizes", "shapes", "length", "lengths"}
SAME = 1e-10  # |x − x'|² over |x|² + |x'|² of equal tokens, up to rounding


def agreement(inputs: Inputs, config: Any, measure: Callable[[Inputs], xr.Dataset]) -> xr.DataArray | None:
    """Return the agreement of outputs (condition) for each input except the stream's own, and for all of them.

    Args:
        inputs: those of the check.
        config: of transformers, with a vocabulary; None: ids are changed only together with all inputs.
        measure: measures one network for any inputs.
    """
    result = dict[str, float]()
    changes = {name: [name] for name in candidates(inputs, config)}
    fixed = {name: each.narrow(inputs.batch_dim, 0, 1) for name, each in inputs.fixed.items()}
    first = replace(inputs, fixed=fixed, rows=1, choices=[])  # the first sequence alone
    every = [name for name in conditions(first) if can_change(first.fixed[name], config, smaller=True)]
    changes |= {EVERY_INPUT: every} if every and inputs.tokens is None else {}
    for name, names in changes.items():
        whole = name == EVERY_INPUT
        try:
            data = measure(with_other(first if whole else inputs, names, config))
        except InputError:  # the two sequences cannot lie side by side
            continue
        value = agreement_of(list(split_stacks(data).values())[-1]["covariance"].values[0], whole)
        if value is not None:
            result[name] = value
    if not result:
        return None
    names = [name or "the first input" for name in result]
    return xr.DataArray(list(result.values()), {"condition": names}, ("condition",))


def conditions(inputs: Inputs) -> list[str]:
    """Return the names of the inputs that are not targets, masks, positions and the like."""
    return [name for name in inputs.fixed if name not in TARGETS and not NO_CONDITION & set(name.split("_"))]


def candidates(inputs: Inputs, config: Any) -> list[str]:
    """Return the names of the inputs that may be conditions, if there are two or more inputs."""
    names = conditions(inputs)
    if len(names) < 2 or inputs.tokens is not None:
        return []
    own = "decoder_input_ids" if "decoder_input_ids" in names else "input_ids"  # the words of the last stream
    names = [name for name in names if name != own]
    return [name for name in names if can_change(inputs.fixed[name], config)]


def can_change(value: Tensor, config: Any, smaller: bool = False) -> bool:
    """Whether there are other numbers for this input: real ones, ids of a known vocabulary, smaller whole numbers.

    Args:
        smaller: whether ids without a known vocabulary are changed to ids up to the largest of them.
    """
    if value.is_floating_point():
        return True
    if value.dtype == torch.bool:
        return False
    if value.dim() > 1 and (vocabulary(config) is not None or not smaller):
        return vocabulary(config) is not None
    return bool((value > 0).any())


def vocabulary(config: Any) -> int | None:
    size = lookup(config, ("vocab_size",)) if hasattr(config, "model_type") else None
    return size if isinstance(size, int) else None


def with_other(inputs: Inputs, names: list[str], config: Any) -> Inputs:
    """Return every sequence twice, the second time with other numbers in some inputs."""
    chance, twice = np.random.Generator(np.random.Philox(1)), inputs.repeated(2)
    both = {
        name: torch.cat([inputs.fixed[name], other_numbers(inputs.fixed[name], config, chance)], inputs.batch_dim)
        for name in names
    }
    return replace(twice, fixed=twice.fixed | both, choices=[])


def other_numbers(value: Tensor, config: Any, chance: np.random.Generator) -> Tensor:
    mean, spread = float(value.double().mean()), float(value.double().std(correction=0))
    if value.is_floating_point() and spread > 0:
        return torch.tensor(chance.standard_normal(tuple(value.shape)) * spread + mean, dtype=value.dtype)
    if value.is_floating_point():  # one number, such as a time: a part of it
        return torch.tensor(chance.random(tuple(value.shape)) * (mean or 1.0), dtype=value.dtype)
    if value.dim() == 1:  # classes or times
        other = torch.tensor(chance.integers(0, int(value.max()), tuple(value.shape)), dtype=value.dtype)
        return torch.where(other < value, other, other + 1)  # never the same number
    if vocabulary(config) is None:
        return torch.tensor(chance.integers(0, int(value.max()) + 1, tuple(value.shape)), dtype=value.dtype)
    return other_ids(value, config, chance)


def other_ids(ids: Tensor, config: Any, chance: np.random.Generator) -> Tensor:
    """Return ids of words that do not occur, as far as the vocabulary has any; placeholders and special ids stay."""
    size = vocabulary(config)
    assert size is not None  # else ids are no candidates
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    entries = [lookup(config, (name,)) for name in (*names, *(each for part in PLACEHOLDERS.values() for each in part))]
    flat = [one for each in entries for one in (each if isinstance(each, list | tuple) else [each])]
    fixed = {one for one in flat if isinstance(one, int)}  # ids that stand for something else than a word
    present = set(ids.unique().tolist())
    free = [k for k in range(size) if k not in fixed and k not in present] or [k for k in range(size) if k not in fixed]
    drawn = torch.tensor(chance.choice(free, tuple(ids.shape)), dtype=ids.dtype)
    stays = torch.isin(ids, torch.tensor(sorted(fixed), dtype=ids.dtype)) if fixed else torch.zeros_like(ids).bool()
    return torch.where(stays, ids, drawn)


def agreement_of(v: NDArray[np.float64], whole: bool = False) -> float | None:
    """Return the mean correlation of like tokens, or of all if `whole`, of the two halves, from V (layer, T, T).

    It is None if no token is like, or all like ones are the same up to the end. Tokens that precede every difference,
    which a causal mask leaves alone, do not count.
    """
    half = v.shape[-1] // 2
    own, other = np.arange(half), np.arange(half, 2 * half)
    size = v[:, own, own] + v[:, other, other]
    with np.errstate(invalid="ignore", divide="ignore"):
        away = size - 2 * v[:, own, other]
        differs = away[0] > SAME * size[0]
        after = np.maximum.accumulate(differs) & ~differs
        counts = np.ones_like(differs) if whole else after if differs.any() else ~differs
        rho = v[-1, own, other] / np.sqrt(v[-1, own, own] * v[-1, other, other])
    reached = whole or (away[-1] > SAME * size[-1])[counts].any()
    if not reached or not np.isfinite(rho[counts]).all():
        return None  # no path leads from the input to these tokens
    return float(rho[counts].mean())


def size_by_group(data: xr.Dataset, inputs: Inputs, config: Any) -> xr.DataArray | None:
    """Return the size of the stream (sample, layer, group) of words and of what stands among them, such as an image.

    It is None if the text has no placeholders, or the stream has other tokens than the text.
    """
    ids = inputs.fixed.get("input_ids")
    if ids is None or not hasattr(config, "model_type"):
        return None
    counted = torch.ones_like(ids, dtype=torch.bool) if inputs.counted is None else inputs.counted
    flat = ids[counted].numpy()
    if len(flat) != data.sizes["token"]:
        return None
    groups = dict[str, NDArray[np.bool_]]()
    for name, fields in PLACEHOLDERS.items():
        token = lookup(config, fields) if name in inputs.fixed else None
        if isinstance(token, int) and (flat == token).any() and not (flat == token).all():
            groups[name] = flat == token
    if not groups:
        return None
    groups = {"words": ~np.any(list(groups.values()), axis=0), **groups}
    variance = np.einsum("slii->sli", data["covariance"].values)
    sizes = np.stack([np.sqrt(variance[..., at].mean(-1)) for at in groups.values()], -1)
    return xr.DataArray(sizes, {"group": list(groups)}, ("sample", "layer", "group"))
