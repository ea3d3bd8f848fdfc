r"""How much of a long text the first attention takes in, at any length, from a sample of its rows.

A row of attention over m tokens costs O(m), so a few rows at 100,000 tokens cost no more than all rows at 1,000. Row i
has logits l_ij of the keys j that it sees, and weights a_ij = softmax(l_i)_j:

  effective tokens   exp of the entropy of a_i, 1 to the number of tokens seen
  logit std          standard deviation of l_ij over j; attention freezes once it reaches √(2 ln m)

Only the first block is measured: the tokens that later blocks read depend on every row of the attention before them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from limitformer.base.errors import InputError, require, require_count
from limitformer.base.memory import check_scratch
from limitformer.base.progress import advance, progress_bar
from limitformer.nn.drawn.simulate import resolve_device
from limitformer.results.datasets import stamp
from limitformer.subjects.inputs import Inputs
from limitformer.subjects.subject import Subject, resolve
from limitformer.weightless.network import Weightless
from limitformer.weightless.run import AUTO, WeightlessRun
from limitformer.weightless.simulate import named_errors

ROWS = "limitformer-rows"
ADDED = ("softcap", "s_aux", "position_bias")  # terms inside the softmax that are not computed here
COPIES = 6  # of the stream: queries, keys, values and what they are computed from
CHUNK = 2**22  # logits at a time


class RowsMeasured(Exception):  # noqa: N818, no error
    """The rows of the first attention; it ends the pass.

    Attributes:
        values: effective tokens, tokens seen and the logits' standard deviation, each (heads,), means over rows.
    """

    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__(values)
        self.values = values


@dataclass(frozen=True)
class WantedMask:
    """A mask that is not made: causal or not, None if it is neither, and the window that its model asks for."""

    causal: bool | None
    window: int | None


asked: list[Tensor] = []  # the rows that the next attention is asked for


def attention_by_length(
    model: Any, lengths: Sequence[int], *, rows: int = 64, samples: int = 1, seed: int = 0, progress: bool = True
) -> xr.Dataset:
    """Measure the first attention of a language model at several lengths, by the law of its weights.

    Args:
        model: a configuration of transformers, its folder, JSON or public name.
        lengths: numbers of tokens, which are unrelated; above the size of the vocabulary they are drawn from it.
        rows: number of rows of each text, drawn from its second half; all of that half if it has fewer.
        samples: number of networks.
        seed: the same seed gives the same numbers.
        progress: whether the terminal shows work of more than two seconds.

    Returns:
        `effective_tokens`, `tokens_seen` and `logit_std` (sample, length, head), means over the rows; `threshold`
        (length), √(2 ln m) of the m tokens that the last row sees, above which attention is frozen.

    Raises:
        InputError: an argument cannot be used, or the first attention has terms or a mask that are not known.

    >>> small = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64}
    >>> data = attention_by_length(small | {"num_hidden_layers": 1, "vocab_size": 99}, [64, 4096], progress=False)
    >>> (data["effective_tokens"] / data["tokens_seen"]).mean(["sample", "head"]).round(2).values.tolist()
    [1.0, 1.0]
    """
    lengths = [require_count("lengths", length, least=4) for length in lengths]
    require(bool(lengths), "lengths must hold at least one number of tokens.")
    for name, value in (("rows", rows), ("samples", samples)):
        require_count(name, value)
    subject = resolve(model)
    is_text = subject.config is not None and subject.task in ("causal", "masked")
    require(is_text, f"the model must be a language model of transformers; got {subject.name}.")
    config: Any = subject.config
    for part in {id(each): each for each in (config, config.get_text_config())}.values():
        part._attn_implementation = ROWS
    network = Weightless(subject, torch.float32, torch.device(resolve_device(None)), {}, None)
    results = []
    bar = progress_bar("lengths", len(lengths) * samples, 0.0) if progress else None
    try:
        for sample in range(samples):
            each = []
            for k, length in enumerate(lengths):
                each.append(one_length(network, subject, length, rows, seed, sample))
                advance(bar, sample * len(lengths) + k + 1)
            results.append(each)
    finally:
        advance(bar, -1)
    data = {
        name: (("sample", "length", "head"), np.array([[one[name].numpy() for one in each] for each in results]))
        for name in results[0][0]
    }
    seen = data["tokens_seen"][1].max((0, 2))
    threshold = ("length", np.sqrt(2 * np.log(np.maximum(seen, 2))))
    about = {**stamp("float32"), "model": subject.name, "seed": seed, "rows": rows, "block": 1}
    return xr.Dataset({**data, "threshold": threshold}, {"length": lengths}).assign_attrs(about)


def one_length(
    network: Weightless, subject: Subject, length: int, rows: int, seed: int, sample: int
) -> dict[str, Tensor]:
    """Return the measures of one network at one length."""
    text: Any = subject.config.get_text_config()
    width, size = int(text.hidden_size), int(text.vocab_size)
    check_scratch(COPIES * length * width * 4, f"The first attention of {length:,} tokens", "shorter lengths")
    chance = np.random.Generator(np.random.Philox(seed))
    ids = chance.permutation(size)[:length] if length <= size else chance.integers(0, size, length)
    inputs = Inputs({"input_ids": torch.tensor(ids)[None]}, {}, 1)
    if subject.task == "causal":
        inputs = replace(inputs, options={"use_cache": False})
    half = np.arange(length // 2, length)
    asked[:] = [torch.tensor(np.sort(chance.choice(half, min(rows, len(half)), replace=False)))]

    def call(run: WeightlessRun) -> dict[str, Tensor]:
        try:
            with torch.no_grad():
                network.call(network.arguments(run, inputs))
        except RowsMeasured as found:
            return found.values
        raise InputError(f"{subject.name} has no attention that calls the attention function of transformers.")

    result: dict[str, Tensor] = named_errors(
        lambda: network.until_it_runs(seed, range(sample, sample + 1), inputs, AUTO, None, call), subject, inputs
    )
    return result


def rows_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | WantedMask | None, **options: Any
) -> Any:
    """Measure the rows that are asked for, in place of the attention, and end the pass."""
    added = [name for name in ADDED if options.get(name) is not None]
    require(not added, f"the first attention adds {', '.join(added)} inside its softmax, which is not computed.")
    window, scale = options.get("sliding_window"), options.get("scaling")
    mask = attention_mask if isinstance(attention_mask, WantedMask) else WantedMask(None, None)
    known = mask.causal is not None and mask.window == window
    require(known, "the first attention has a mask that is not known. Nearest: simulate, for all rows of fewer tokens.")
    repeats = query.shape[1] // key.shape[1]
    rows, keys = asked[0].to(key.device), torch.arange(key.shape[2], device=key.device)
    visible = torch.ones(len(rows), len(keys), dtype=torch.bool, device=key.device)
    if mask.causal:
        visible = (keys <= rows[:, None]) & (keys > rows[:, None] - (window or len(keys)))
    values = []
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    for head in range(query.shape[1]):
        of_keys = key[0, head // repeats]
        step = max(1, CHUNK // len(keys))
        parts = [
            summary(query[0, head, rows[at : at + step]] @ of_keys.mT * scale, visible[at : at + step])
            for at in range(0, len(rows), step)
        ]
        values.append(torch.cat(parts, 1).mean(1))
    effective, seen, variance = torch.stack(values, 1).cpu()
    raise RowsMeasured({"effective_tokens": effective, "tokens_seen": seen, "logit_std": variance.sqrt()})


def summary(logits: Tensor, visible: Tensor) -> Tensor:
    """Return effective tokens, tokens seen and the variance of logits of each row (3, rows)."""
    logits = logits.double().masked_fill(~visible, -torch.inf)
    weights = logits.softmax(-1)
    seen = visible.sum(-1).double()
    mean = logits.masked_fill(~visible, 0.0).sum(-1, keepdim=True) / seen[:, None]
    variance = (logits - mean).masked_fill(~visible, 0.0).square().sum(-1) / seen
    return torch.stack([torch.special.entr(weights).sum(-1).exp(), seen, variance])


def rows_mask(*_: Any, mask_function: Any = causal_mask_function, **options: Any) -> WantedMask:
    """Return which mask a model wants, without making it; a causal window sees keys i − w < j ≤ i."""
    window = options.get("local_size")
    plain = {causal_mask_function: True, bidirectional_mask_function: False}
    if mask_function in plain:
        return WantedMask(plain[mask_function], window)
    w = window or 1
    ends = 8 * w, 8 * w + 1, 9 * w, 9 * w + 1  # keys of the row 9 w at both ends of a causal window
    sees = [bool(mask_function(0, 0, torch.tensor(9 * w), torch.tensor(key))) for key in ends]
    return WantedMask(True if window and sees == [False, True, True, False] else None, window)


AttentionInterface.register(ROWS, rows_attention)
AttentionMaskInterface.register(ROWS, rows_mask)
