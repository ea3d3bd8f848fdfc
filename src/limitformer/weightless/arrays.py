"""The results of passes: arrays by sample, and one Dataset."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor, nn

from limitformer.base.errors import require
from limitformer.base.memory import check_scratch
from limitformer.subjects.inputs import Inputs
from limitformer.weightless.block_parts import DECAYS, ROUTER
from limitformer.weightless.layout import kinds_of
from limitformer.weightless.observers.stream import PLACES, MeasuredStack, Streams, in_rows

Arrays = dict[str, NDArray[Any]]

BY_HEAD = ("entropy", "effective_tokens", "tokens_seen", "logit_std", "largest_logit")
BY_LAYER = ("covariance", "largest", "typical", "stream_gradient")  # before each block and after the last
OF_BLOCK = (*ROUTER, *DECAYS)
BY_BLOCK = ("covariance_inside", "branch", "step", *BY_HEAD, *OF_BLOCK)
STACK_COORDINATES = ("stack", "block_stack", "tokens", "layer_sequence", "layer_word", "weight_stack")


OTHER_TOKENS = (
    "the modules that were taken for blocks receive other tokens in each network, as experts do whose tokens a router "
    "chooses. Nearest: blocks='…' with the names of modules that receive all tokens."
)


def stream_arrays(measure: Streams, gradients: bool) -> Arrays:
    """Return the measures of the streams and the heads, by sample; stacks follow each other along layers and blocks."""
    parts = [stack_arrays(stack, gradients) for stack in measure.stacks]
    if len(parts) < 2:
        return parts[0] if parts else {}
    samples, arrays = measure.samples, {}
    tokens = max(part["covariance"].shape[-1] for part in parts)
    layers = [part["covariance"].shape[1] for part in parts]
    what = f"Recording {len(parts)} stacks of {sum(layers)} layers, filled up to {tokens:,} tokens,"
    needed = PLACES * 8 * samples * sum(layers) * tokens**2
    check_scratch(needed, what, "shorter or smaller inputs, or one stack (blocks)")
    for name in (*BY_LAYER, *BY_BLOCK):
        if not any(name in part for part in parts):
            continue
        rest = [part[name].shape[2:] for part in parts if name in part]
        widest = [max(sizes) for sizes in zip(*rest, strict=True)]
        if name in ("covariance", "covariance_inside"):
            widest[-2:] = tokens, tokens
        lengths = [number - (name in BY_BLOCK) for number in layers]
        whole, start = np.full((samples, sum(lengths), *widest), np.nan), 0
        for part, length in zip(parts, lengths, strict=True):
            if name in part:
                sizes = (slice(size) for size in part[name].shape[2:])
                whole[:, start : start + length, *sizes] = part.pop(name)
            start += length
        arrays[name] = whole
    return arrays


def require_same_blocks(first: Arrays, arrays: Arrays) -> None:
    """Raise `InputError` unless the blocks have the same number, tokens and sublayers as in the first pass."""
    sizes, others = ({key: each.shape[1:] for key, each in every.items()} for every in (first, arrays))
    require(sizes == others, OTHER_TOKENS)


def stack_arrays(stack: MeasuredStack, gradients: bool) -> Arrays:
    """Return the measures of one stack."""
    sublayers = max((len(each) for each in stack.branch), default=0)
    like = stack.covariance[0]
    arrays = {"covariance": torch.stack(stack.covariance, 1).cpu().numpy()}
    arrays |= {key: torch.stack(each, 1).cpu().numpy() for key, each in stack.size.items() if each}
    if sublayers:
        inside = [padded(each, sublayers, torch.full_like(like, torch.nan)) for each in stack.inside]
        branch = [padded(each, sublayers, torch.full_like(like[:, 0, 0], torch.nan)) for each in stack.branch]
        arrays["covariance_inside"] = torch.stack(inside, 1).cpu().numpy()
        arrays["branch"] = torch.stack(branch, 1).cpu().numpy()
    layers = [heads for heads in stack.heads if heads]
    if layers:
        most = max(heads["entropy"].shape[1] for heads in layers)
        for key in BY_HEAD:
            arrays[key] = np.full((len(like), len(stack.heads), most), np.nan)
            for block, heads in enumerate(stack.heads):
                if heads:
                    arrays[key][:, block, : heads[key].shape[1]] = heads[key].cpu().numpy()
    for key in OF_BLOCK:
        if any(key in each for each in stack.of_block):
            none = torch.full((len(like),), torch.nan, dtype=torch.float64)
            arrays[key] = torch.stack([each.get(key, none).cpu().double() for each in stack.of_block], 1).numpy()
    if gradients:
        none = torch.full((len(like),), torch.nan)
        parts = [stack.gradient.get(place, none) for place in range(len(stack.covariance))]
        arrays["stream_gradient"] = np.stack([each.cpu().numpy() for each in parts], -1)
    return arrays


BETWEEN = " (the network changes the stream between blocks: their inputs were measured)"


class StackSize(NamedTuple):
    layers: int  # blocks, and one
    tokens: int
    members: tuple[str, ...]  # names of the modules of the blocks that ran
    changed: bool  # whether the network changes the stream between blocks
    width: int


def sizes_of_stacks(measure: Streams) -> dict[str, StackSize]:
    """Return the size of each stack by its name; if several have one name, with their tokens, widths or inputs."""
    stacks, blocks = measure.stacks, measure.layout.blocks
    sizes = [
        StackSize(
            len(stack.covariance),
            stack.covariance[0].shape[-1],
            tuple(member for place in sorted(stack.places) for member in blocks[place].members),
            stack.changed,
            in_rows(stack.first, stack.form).shape[-1],
        )
        for stack in stacks
    ]
    labels = [stack.name for stack in stacks]
    for notes in ([f" ({size.tokens} tokens)" for size in sizes], [f" (width {size.width})" for size in sizes]):
        labels = with_notes(labels, notes)
    inputs = [f", input {labels[: k + 1].count(label)}" for k, label in enumerate(labels)]
    return dict(zip(with_notes(labels, inputs), sizes, strict=True))


def with_notes(labels: list[str], notes: list[str]) -> list[str]:
    """Add a note to each label that several have, if their notes differ."""
    pairs = list(zip(labels, notes, strict=True))
    return [label + note if len({n for other, n in pairs if other == label}) > 1 else label for label, note in pairs]


def blocks_in_words(stacks: Mapping[str, StackSize], module: nn.Module) -> str:
    """Return what was measured, such as `transformer.h: 12 × GPT2Block`."""
    return "; ".join(
        f"{name}: {size.layers - 1} × {kinds_of(size.members, module)}{BETWEEN if size.changed else ''}"
        for name, size in stacks.items()
    )


def padded(values: list[Tensor], count: int, none: Tensor) -> Tensor:
    """Stack along the second dimension, with `none` for missing values."""
    return torch.stack([*values, *[none] * (count - len(values))], 1)


def output_arrays(out: Any, samples: int) -> Arrays:
    """Return mean and standard deviation of the output's logits, by sample."""
    logits = getattr(out, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() == 0:
        return {}
    by_sample = logits.detach().reshape(samples, -1, logits.shape[-1])
    count = by_sample[0].numel()
    mean = by_sample.sum(-1).double().sum(1) / count  # torch's `std_mean` is ten times slower
    rest = torch.linalg.vector_norm(by_sample - mean[:, None, None].to(logits.dtype), dim=-1)
    std = (rest.double().square().sum(1) / (count - 1)).sqrt()
    return {"logits_mean": mean.cpu().numpy(), "logits_std": std.cpu().numpy()}


def dataset(
    parts: list[Arrays], weights: Mapping[str, int], read: Mapping[str, str], stacks: Mapping[str, StackSize],
    inputs: Inputs, about: dict[str, Any],
) -> xr.Dataset:  # fmt: skip
    """Return the dataset of the finished samples, with coordinates and the attributes `about`.

    Args:
        weights: the dimensions of trained parameters, by name.
        read: where the pass read parameters, by name.
        stacks: the size of each stack; if there are several, they follow each other along layers and blocks, and
            smaller ones are filled up with NaN. `split_stacks` separates them.
    """
    arrays = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]} if len(parts) > 1 else parts[0]
    dims = {
        "covariance": ("sample", "layer", "token", "token_"),
        "covariance_inside": ("sample", "block", "sublayer", "token", "token_"),
        "branch": ("sample", "block", "sublayer"),
        "step": ("sample", "block"),
        "largest": ("sample", "layer"),
        "typical": ("sample", "layer"),
        "weight_gradient": ("sample", "weight"),
        "stream_gradient": ("sample", "layer"),
        **dict.fromkeys(BY_HEAD, ("sample", "block", "head")),
        **dict.fromkeys(OF_BLOCK, ("sample", "block")),
    }
    data = xr.Dataset({key: (dims.get(key, ("sample",)), value) for key, value in arrays.items()})
    coordinates: dict[str, Any] = {key: np.arange(data.sizes[key]) for key in ("sample", "layer") if key in data.dims}
    if "block" in data.dims:
        coordinates["block"] = np.arange(1, data.sizes["block"] + 1)
    if "weight" in data.dims:
        coordinates["weight"] = list(weights)
        coordinates["read"] = ("weight", [read.get(name, "") for name in weights])
        coordinates["matrix"] = ("weight", [dimensions >= 2 for dimensions in weights.values()])
    if len(stacks) > 1:
        coordinates |= stack_coordinates(stacks, data.sizes["token"], inputs)
        if "weight" in data.dims:
            inside = [(f"{member}.", stack) for stack, size in stacks.items() for member in size.members]
            first = [next((stack for member, stack in inside if name.startswith(member)), "") for name in weights]
            coordinates["weight_stack"] = ("weight", first)
    else:
        coordinates |= token_coordinates(data.sizes.get("token", 0), inputs)
    return data.assign_coords(coordinates).assign_attrs(about)


def stack_coordinates(stacks: Mapping[str, StackSize], most: int, inputs: Inputs) -> dict[str, Any]:
    """Return stack and number of each layer and block, and the sequence and word of each of a layer's tokens."""
    names = [(name, k) for name, size in stacks.items() for k in range(size.layers)]
    blocks = [(name, k) for name, k in names if k > 0]
    sequences, words = np.full((len(names), most), -1), np.full((len(names), most), "", dtype=object)
    for row, (name, _) in enumerate(names):
        known = token_coordinates(stacks[name].tokens, inputs)
        for coordinate, table in (("sequence", sequences), ("word", words)):
            if coordinate in known:
                table[row, : stacks[name].tokens] = known[coordinate][1]
    result: dict[str, Any] = {
        "stack": ("layer", [name for name, _ in names]),
        "layer": [k for _, k in names],
        "tokens": ("layer", [stacks[name].tokens for name, _ in names]),
        "block_stack": ("block", [name for name, _ in blocks]),
        "block": [k for _, k in blocks],
        "layer_sequence": (("layer", "token"), sequences),
    }
    return result | ({"layer_word": (("layer", "token"), words.astype(str))} if words.any() else {})


def token_coordinates(tokens: int, inputs: Inputs) -> dict[str, Any]:
    """Return the sequence and the word of each token, where they are known."""
    coordinates: dict[str, Any] = {}
    if len(inputs.sequence_of(tokens)) == tokens:
        coordinates["sequence"] = ("token", inputs.sequence_of(tokens).numpy())
    if inputs.labels and tokens == len(inputs.labels):
        coordinates["word"] = ("token", list(inputs.labels))
    return coordinates


def split_stacks(data: xr.Dataset) -> dict[str, xr.Dataset]:
    """Return the data of each stack of blocks by its name, in the order of the pass; of a single stack all of it.

    The last stack also has the loss, the output's logits, and the gradients of the weights outside all blocks.

    >>> import limitformer as lf
    >>> data = lf.weightless.simulate({"model_type": "t5", "d_model": 32, "num_layers": 2}, 4, samples=1, seed=0)
    >>> {name: part.sizes["layer"] for name, part in split_stacks(data).items()}
    {'encoder.block': 3, 'decoder.block': 3}
    """
    if "stack" not in data.coords:
        return {"": data}
    names, result = list(dict.fromkeys(data["stack"].values.tolist())), {}
    last = names[-1]
    for name in names:
        part = data.isel(layer=places(data["stack"].values == name), block=places(data["block_stack"].values == name))
        tokens = int(part["tokens"][0])
        part = part.isel({dim: slice(tokens) for dim in ("token", "token_")})
        overflows = bool(part["covariance"].isnull().all())  # then nothing shows what it lacks
        lacking = [key for key in BY_BLOCK if key in part and not overflows and bool(part[key].isnull().all())]
        if name != last:
            lacking += [str(key) for key in part.data_vars if part[key].dims == ("sample",)]
        if "weight" in part.dims:
            own = part["weight_stack"].values == name
            part = part.isel(weight=own | (part["weight_stack"].values == "") if name == last else own)
        words = {
            key.removeprefix("layer_"): ("token", part[key].values[0])
            for key in ("layer_sequence", "layer_word")
            if key in part.coords and part[key].values[0][0] not in (-1, "")
        }
        part = part.drop_vars([*lacking, *(key for key in STACK_COORDINATES if key in part.coords)])
        result[name] = part.assign_coords(words)
    return result


def places(own: NDArray[np.bool_]) -> slice:
    """Return the consecutive places that are true as a slice, which copies nothing."""
    indices = np.flatnonzero(own)
    return slice(int(indices[0]), int(indices[-1]) + 1)
