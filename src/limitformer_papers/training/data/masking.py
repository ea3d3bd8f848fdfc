r"""Masked language modelling: choose the tokens that a model must predict, and replace them.

[ST, App. D.1] says "mask 15 % of the tokens"; the rest is as in BERT [Devlin et al., 2019, Sec. 3.1]. Each token that
is not special is chosen with probability 0.15, independently of the others; a chosen one becomes

* [MASK] with probability 0.8,
* a uniformly drawn token that is not special with probability 0.1,
* or stays unchanged.

If no token of a sequence is chosen (once in 10⁹ at length 128), the one closest to being chosen is, since a sequence
without a target has no loss. The choice is a function of (seed, example) only, through the counter-based generator
Philox [Salmon et al., 2011] with that pair as its key; batch, order, process and worker do not enter. So a resumed run
sees the same masks. An example has the same mask in every epoch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from limitformer.base.errors import require, require_real

IGNORED = -100  # the label of a token without a target
SHARE = 0.15
MASKED, REPLACED = 0.8, 0.1

Ids = NDArray[np.int64]


class MaskedCollator:
    """Collate examples {"input_ids", "example"} to "input_ids", "attention_mask" and "labels", each (batch, longest).

    Args:
        tokenizer: with a mask and a padding token; only its numbers are kept.
        seed: of the masks, from 0 to 2⁶⁴ − 1.
        share: of the tokens that are chosen.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, share: float = SHARE) -> None:
        named = tokenizer.mask_token_id is not None and tokenizer.pad_token_id is not None
        require(named, "Masking needs a tokenizer with a mask token and a padding token.")
        whole = isinstance(seed, int) and not isinstance(seed, bool)
        require(whole and seed >= 0, f"seed must be a whole number from 0 on; got {seed!r:.40}.")
        require(seed < 2**64, "seed must be below 2**64; got more.")
        self.seed, self.share = seed, require_real("share", share)
        require(0 < self.share <= 1, f"share must lie in (0, 1]; got {share}. BERT takes 0.15.")
        self.mask, self.padding = int(tokenizer.mask_token_id), int(tokenizer.pad_token_id)
        ordinary = np.ones(len(tokenizer), bool)
        ordinary[tokenizer.all_special_ids] = False
        self.ordinary, self.words = ordinary, np.flatnonzero(ordinary)

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return the batch; sequences are padded at the right to the longest."""
        require(all("example" in one for one in examples), UNNUMBERED)
        masked = [self.masked(np.asarray(one["input_ids"], np.int64), int(one["example"])) for one in examples]
        longest = max(len(seen) for seen, _ in masked)
        seen = np.full((len(masked), longest), self.padding, np.int64)
        attention, labels = np.zeros_like(seen), np.full_like(seen, IGNORED)
        for row, (inputs, targets) in enumerate(masked):
            seen[row, : len(inputs)], labels[row, : len(inputs)] = inputs, targets
            attention[row, : len(inputs)] = 1
        arrays = {"input_ids": seen, "attention_mask": attention, "labels": labels}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def masked(self, ids: Ids, example: int) -> tuple[Ids, Ids]:
        """Return (input, labels), each (length,)."""
        uniform = uniforms(self.seed, example, len(ids))
        chance = np.where(self.ordinary[ids], uniform[:, 0], np.inf)
        chosen = (chance < self.share) | ((chance == chance.min()) & np.isfinite(chance))
        word = self.words[(uniform[:, 2] * len(self.words)).astype(np.int64)]
        kind = uniform[:, 1]
        replaced = np.where(kind < MASKED, self.mask, np.where(kind < MASKED + REPLACED, word, ids))
        return np.where(chosen, replaced, ids), np.where(chosen, ids, IGNORED)


UNNUMBERED = (
    'An example must have "input_ids" and "example", its index: masks depend on it. '
    "A Trainer keeps it with remove_unused_columns=False."
)


def uniforms(seed: int, example: int, length: int) -> NDArray[np.float64]:
    """Return uniform numbers (length, 3) of (seed, example): whether chosen, which replacement, which word."""
    key = np.array([seed, example], np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random((length, 3))
