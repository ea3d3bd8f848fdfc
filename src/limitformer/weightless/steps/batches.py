"""The batches of training steps, and one that no step sees."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from limitformer.base.errors import InputError, require
from limitformer.nn.drawn.simulate import torch_seed
from limitformer.weightless.inputs import Inputs, inputs_of, with_targets
from limitformer.weightless.losses import TARGETS
from limitformer.weightless.network import Weightless
from limitformer.weightless.run import POSITIONS
from limitformer.weightless.steps.trajectory import StepBatches

SAME, FRESH = "same", "fresh"
IDS = ("", "input_ids", "decoder_input_ids", *TARGETS)
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id", "mask_token_id")


def batches_of(
    first: Inputs, batches: Any, unseen: Any, network: Weightless, steps: int, seed: int, batch_dim: int
) -> StepBatches:
    """Return the batches of all steps.

    Args:
        first: the inputs of the first step.
        batches: "same", "fresh", or inputs for each step.
        unseen: inputs that no step sees; None draws them.

    Raises:
        InputError: batches are unknown, too few, or of another shape than the first.
    """
    if isinstance(batches, str) and batches in (SAME, FRESH):
        of_steps = [first] + [
            first if batches == SAME else drawn_like(first, network, seed, k) for k in range(1, steps + 1)
        ]
    elif isinstance(batches, Sequence) and not isinstance(batches, str):
        require(
            len(batches) in (steps, steps + 1),
            f"batches must have inputs for each of the {steps} steps, and perhaps for the loss after them; got "
            f'{len(batches)}. Nearest: batches="same".',
        )
        others = [user_batch(each, first, network, f"batches[{k}]", batch_dim) for k, each in enumerate(batches)]
        of_steps = others if len(others) > steps else [*others, others[-1]]
    else:
        raise InputError(f'batches must be "same", "fresh" or a list of inputs; got {batches!r:.60}. Nearest: "same".')
    other = (
        drawn_like(first, network, seed, -1)
        if unseen is None
        else user_batch(unseen, first, network, "unseen", batch_dim)
    )
    return StepBatches(of_steps, other)


def user_batch(value: Any, first: Inputs, network: Weightless, name: str, batch_dim: int) -> Inputs:
    """Return a batch of the user, with the shapes of the first."""
    prepared = inputs_of(value, network.blueprint).with_batch_dim(batch_dim)
    if network.foreign and any(target in first.fixed for target in TARGETS):
        prepared = with_targets(prepared, network.module)
    shapes, wanted = ({key: tuple(each.shape) for key, each in batch.fixed.items()} for batch in (prepared, first))
    require(shapes == wanted, f"{name} must have the shapes of the first batch, {first}; got {prepared}.")
    return prepared


def drawn_like(first: Inputs, network: Weightless, seed: int, k: int) -> Inputs:
    """Return another batch of the same shapes: ids uniform in the vocabulary, numbers of the same mean and variance.

    Without a known vocabulary, whole numbers are drawn from those of the batch. Inputs of a `limitformer.Transformer`
    are drawn for each network, and so stay as they are.
    """
    if first.tokens is not None:
        return first
    generator = torch.Generator().manual_seed(torch_seed(seed, f"batch {k}"))
    ids = vocabulary(network)
    rolled = {name for name in TARGETS if name in first.fixed and is_next_token(first, name)}
    floats = any(each.is_floating_point() for each in first.fixed.values())
    fixed, changed = {}, False
    for name, each in first.fixed.items():
        fixed[name] = each
        if each.is_floating_point():
            noise = torch.randn(each.shape, generator=generator, dtype=torch.float64)
            fixed[name] = (each.double().mean() + noise * each.double().std(correction=0)).to(each.dtype)
            changed = True
        elif name in IDS and not floats and name not in rolled and len(ids):
            fixed[name] = ids[torch.randint(len(ids), each.shape, generator=generator)].to(each.dtype)
            changed = True
    for name, each in first.fixed.items() if not changed else ():
        if each.dtype == torch.long:  # whatever they number, these are valid
            values, changed = each.unique(), True
            fixed[name] = values[torch.randint(len(values), each.shape, generator=generator)]
    require(
        changed,
        f"no other batch can be drawn for {first}: it has neither ids nor real numbers. Nearest: "
        "give the batches as a list, and unseen=….",
    )
    for name in rolled:
        fixed[name] = fixed[""].roll(-1, 1 - first.batch_dim)
    return replace(first, fixed=fixed, choices=[], labels=())


def is_next_token(inputs: Inputs, name: str) -> bool:
    """Whether a target is the next token, as `with_targets` makes it."""
    ids = inputs.fixed.get("")
    return ids is not None and torch.equal(inputs.fixed[name], ids.roll(-1, 1 - inputs.batch_dim))


def tables(network: Weightless) -> list[tuple[int, int]]:
    """Return rows and columns of the tables that were looked up, without those of positions."""
    found = {w.name: (w.shape[0], w.shape[-1]) for w in network.weights if "rows" in network.uses.get(w.name, "")}
    for name, part in network.module.named_modules():
        if isinstance(part, nn.Embedding):
            found[f"{name}.weight"] = part.num_embeddings, part.embedding_dim
    return [sizes for name, sizes in found.items() if not POSITIONS.search(name)]


def vocabulary(network: Weightless) -> Tensor:
    """Return the ids that are not special; none if no table was looked up."""
    config = network.blueprint.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config  # of a model of several parts
    size = getattr(text, "vocab_size", None)
    if not isinstance(size, int):
        size = max((rows for rows, _ in tables(network)), default=0)
    special = [getattr(config, name, None) for name in SPECIAL]
    excluded = torch.tensor([each for each in special if isinstance(each, int)], dtype=torch.long)
    ids = torch.arange(size)
    left = ids[~torch.isin(ids, excluded)]
    return left if len(left) else ids
