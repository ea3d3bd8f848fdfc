"""The inputs of a module (texts, ids, images, tokens of a given covariance) and its loss."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limitformer.base.errors import InputError, require
from limitformer.models import as_start
from limitformer.models.text import words_of
from limitformer.nn.drawn.simulate import TokenLaw, torch_seed
from limitformer.weightless.models import Blueprint

OTHER_INPUTS = ("decoder_", "pixel_", "labels", "encoder_")  # with other lengths


@dataclass(frozen=True)
class Inputs:
    """The arguments of one sample's pass; every tensor has `rows` sequences in dimension `batch_dim`."""

    fixed: dict[str, Tensor]
    options: dict[str, Any]
    rows: int
    labels: tuple[str, ...] = ()
    tokens: TokenLaw | None = None  # drawn for each sample
    batch_dim: int = 0

    @property
    def counted(self) -> Tensor | None:
        """The tokens (B, M) that are not padding; None without an attention_mask."""
        mask = self.fixed.get("attention_mask")
        if mask is None or mask.dim() != 2:
            return None
        return mask.bool().movedim(self.batch_dim, 0)

    def with_batch_dim(self, batch_dim: int) -> "Inputs":
        """Return the inputs with sequences in this dimension.

        Raises:
            InputError: it is not 0 or 1, the inputs have no second dimension, or an attention_mask does not fit.
        """
        require(batch_dim in (0, 1) and not isinstance(batch_dim, bool), f"batch_dim must be 0 or 1; got {batch_dim}.")
        result = self
        if batch_dim == 1:
            fits = self.tokens is None and all(each.dim() > 1 for each in self.fixed.values())
            require(fits, "batch_dim=1 needs inputs of two dimensions or more. Nearest: batch_dim=0.")
            result = replace(self, rows=next(iter(self.fixed.values())).shape[1], batch_dim=1)
        result.check_mask()
        return result

    def check_mask(self) -> None:
        """Raise `InputError` unless an attention_mask has the first two sizes of the inputs and shows a token."""
        mask, counted = self.fixed.get("attention_mask"), self.counted
        if mask is None or counted is None:
            return
        kind = ("sequences", "tokens") if self.batch_dim == 0 else ("tokens", "sequences")
        for name, each in self.fixed.items():
            fits = name == "attention_mask" or each.dim() < 2 or each.shape[:2] == mask.shape
            is_vector = each.dim() == 2 and each.is_floating_point()  # one vector a sequence, without tokens
            require(
                fits or is_vector or each.dim() > 3 or name.startswith(OTHER_INPUTS),
                f"attention_mask must be ({', '.join(kind)}) like {name or 'the input'}, {tuple(each.shape[:2])}; got "
                f"{tuple(mask.shape)}.",
            )
        empty = (~counted.any(1)).nonzero().flatten().tolist()
        require(not empty, f"attention_mask hides every token of sequence {''.join(map(str, empty[:1]))}.")

    def repeated(self, times: int) -> "Inputs":
        """Return the inputs with each sequence `times` times."""
        fixed = {name: torch.cat([each] * times, self.batch_dim) for name, each in self.fixed.items()}
        return replace(self, fixed=fixed, rows=times * self.rows)

    def sequence_of(self, tokens: int) -> Tensor:
        """Return the sequence of each of the `tokens` that are not padding."""
        if self.counted is not None and int(self.counted.sum()) == tokens:
            return self.counted.nonzero()[:, 0]
        return torch.arange(self.rows).repeat_interleave(max(1, tokens // self.rows))

    def of(self, seed: int, samples: range, dtype: torch.dtype) -> dict[str, Any]:
        """Return the arguments for samples side by side."""
        if self.tokens is not None:
            seeds = [torch_seed(seed, f"weightless tokens {sample}") for sample in samples]
            drawn = [self.tokens.tokens(1, torch.Generator().manual_seed(each)).to(dtype) for each in seeds]
            return {"x": torch.cat(drawn).requires_grad_()}
        many = {name: value.repeat(len(samples), *[1] * (value.dim() - 1)) for name, value in self.fixed.items()}
        return {name: with_gradient(each, dtype) for name, each in many.items()} | self.options


def with_gradient(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast floating-point numbers to the dtype of a pass, with a gradient: the stream may begin with them."""
    if not values.is_floating_point():
        return values
    return values.to(dtype).requires_grad_().clone()  # a module may change a copy in place


def inputs_of(inputs: Any, blueprint: Blueprint) -> Inputs:
    """Make the inputs of a model from the argument `inputs` of the public functions.

    Raises:
        InputError: it does not fit the model.
    """
    if isinstance(inputs, Inputs):
        return inputs
    if blueprint.transformer is not None:
        start = as_start(inputs)
        return Inputs({}, {}, 1, start.labels or (), TokenLaw(start, blueprint.transformer))
    if isinstance(inputs, Mapping):
        fixed = {name: torch.as_tensor(each) for name, each in inputs.items() if each is not None}
        require(bool(fixed), "inputs must name at least one tensor; got none.")
        return Inputs(fixed, options_of(blueprint), len(next(iter(fixed.values()))))
    if blueprint.task == "image":
        pixels = images(inputs, blueprint.config)
        return Inputs({"pixel_values": pixels}, {}, len(pixels))
    if blueprint.config is None:
        return inputs_of_factory(inputs)
    ids, labels = ids_of(inputs, blueprint.config)
    fixed = {"input_ids": ids}
    if blueprint.task == "seq2seq":
        first = torch.full_like(ids[:, :1], getattr(blueprint.config, "decoder_start_token_id", None) or 0)
        fixed["decoder_input_ids"] = torch.cat([first, ids[:, :-1]], 1)  # the tokens before those that are predicted
    return Inputs(fixed, options_of(blueprint), len(ids), labels)


def options_of(blueprint: Blueprint) -> dict[str, Any]:
    """Return further arguments of a language model of transformers."""
    return {"use_cache": False} if blueprint.task in ("causal", "seq2seq") else {}


def inputs_of_factory(inputs: Any) -> Inputs:
    """Make the first argument of a user's module."""
    texts = isinstance(inputs, list | tuple) and any(isinstance(each, str | Path) for each in inputs)
    if texts or isinstance(inputs, int | str | Path):
        inputs = ids_of(inputs, None)[0]
    tensor = torch.as_tensor(inputs)
    if tensor.dim() == 1 and not tensor.is_floating_point():
        tensor = tensor[None]  # ids of one sequence
    return Inputs({"": tensor}, {}, len(tensor))


def ids_of(inputs: Any, config: Any) -> tuple[Tensor, tuple[str, ...]]:
    """Return ids (sequences, tokens), and the words of the first text, of a number of tokens, texts or ids.

    A network with random weights depends only on which tokens are equal, so words are numbered in their order.
    """
    if isinstance(inputs, int | np.integer) and not isinstance(inputs, bool):
        require(bool(inputs >= 1), f"inputs must be at least one token; got {inputs}.")
        return numbered([[str(k) for k in range(inputs)]], config), ()
    if isinstance(inputs, str | Path):
        inputs = [inputs]
    if isinstance(inputs, list | tuple) and inputs and all(isinstance(each, str | Path) for each in inputs):
        words = [words_of(text) for text in inputs]
        shortest = min(map(len, words))
        return numbered([each[:shortest] for each in words], config), tuple(words[0][:shortest])
    try:
        ids = torch.as_tensor(inputs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"inputs must be texts, ids, a number of tokens, or named tensors; got {inputs!r:.60}."
        ) from error
    ids = ids[None] if ids.dim() == 1 else ids
    require(
        ids.dim() == 2 and not ids.is_floating_point() and ids.numel() > 0,
        f"ids must be whole numbers (tokens,) or (sequences, tokens); got {ids.dtype} {tuple(ids.shape)}.",
    )
    return ids.long(), ()


def numbered(words: list[list[str]], config: Any) -> Tensor:
    """Number distinct words by ids that are not special."""
    special = set[Any]()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        each = getattr(config, name, None)
        special |= set(each) if isinstance(each, list | tuple) else {each}
    vocabulary = getattr(config, "vocab_size", None)
    distinct = dict.fromkeys(word for text in words for word in text)
    free = (k for k in range(10**9) if k not in special)
    ids = {word: next(free) for word in distinct}
    if vocabulary is not None and max(ids.values()) >= vocabulary:
        raise InputError(f"{len(distinct)} distinct tokens need a larger vocabulary than {vocabulary}.")
    return torch.tensor([[ids[word] for word in text] for text in words])


def images(inputs: Any, config: Any) -> Tensor:
    """Return images (B, channels, height, width); a number of images becomes noise."""
    if isinstance(inputs, int):
        noise = np.random.Generator(np.random.Philox(0)).standard_normal(
            (inputs, config.num_channels, config.image_size, config.image_size)
        )
        return torch.tensor(noise)
    pixels = torch.as_tensor(np.asarray(inputs))
    size = (config.num_channels, config.image_size, config.image_size)
    require(
        tuple(pixels.shape[1:]) == size,
        f"images must be (number, {', '.join(map(str, size))}); got {tuple(pixels.shape)}.",
    )
    return pixels
