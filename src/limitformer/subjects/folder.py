"""Load a checkpoint from its folder: every weight comes from the files, none is drawn and none is left over.

Transformers builds the class and sets the weights. It receives tensors and a configuration, but not the folder. A
missing weight, which transformers would draw, and whole numbers, which it would take for weights, are errors here.

Python code of a folder, which its configuration names (`auto_map`), runs only if the user allows it.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from limitformer.base.errors import InputError, require
from limitformer.base.foreign import escaped_errors, one_line, readable_name
from limitformer.base.memory import check_scratch
from limitformer.hf import load_shaped
from limitformer.models.text import prefixes
from limitformer.subjects.checkpoints import check_numbers, weights_in
from limitformer.subjects.classes import family_classes, named_class
from limitformer.subjects.configurations import as_plain_formulas, config_from, quiet_transformers, values_in
from limitformer.subjects.size import size_of

LISTED = 3  # names in a message


@escaped_errors()
def load(folder: Path) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the network in a checkpoint's folder, and the weights of its files that its class does not read.

    These belong to other heads and poolers, which change nothing.

    Raises:
        InputError: the folder does not hold one whole network, in real numbers, of a class of transformers.
    """
    values = values_in(folder)
    quantised = values.get("quantization_config")
    require(
        quantised is None,
        f"The weights in {folder} are quantised ({quantised!s:.60}); real numbers are measured. Nearest: the "
        f"checkpoint in bfloat16, or {folder / 'config.json'} for its law.",
    )
    adapter = (folder / "adapter_config.json").exists()
    require(not adapter, f"{folder} holds an adapter. Nearest: merge_and_unload, then save_pretrained.")
    config, tensors = config_from(values), weights_in(folder)
    require(hasattr(config, "model_type"), f"config.json in {folder} declares a {type(config).__name__}, no weights.")
    # In float32 sixteen bits lose nothing.
    dtype = torch.float64 if any(each.dtype == torch.float64 for each in tensors.values()) else torch.float32
    unread: tuple[str, ...] = ()
    if values.get("shaping") is not None:
        check_numbers(tensors, tensors)
        with quiet_transformers(), one_line(f"{readable_name(folder)} cannot be loaded"):
            module: nn.Module = load_shaped(folder, local_files_only=True, dtype=dtype)
    else:
        module, unread = unshaped(folder, config, tensors, dtype)
    matrices = [each for each in module.parameters() if each.dim() > 1]
    zero = bool(matrices) and not any(bool(each.any()) for each in matrices)
    require(not zero, f"every matrix in {folder} is 0: the files were never written to their end, or hold no network.")
    return module, unread


def unshaped(
    folder: Path, config: Any, tensors: dict[str, Tensor], dtype: torch.dtype
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the class that the configuration names, with these weights, and those that it does not read."""
    kind = named_class(config)
    if kind is None:
        names = ", ".join(list(family_classes(config))[:LISTED])
        raise InputError(f"config.json in {folder} must name the class under 'architectures', such as {names}.")
    config = as_plain_formulas(config)
    size = size_of(partial(kind, config), kind.__name__)
    check_numbers(tensors, size.names)
    twice = sorted(tensors.keys() & {f"{kind.base_model_prefix}.{name}" for name in tensors})
    require(not twice, f"{folder} holds {listed(twice)} also without the first word of the name: one would be lost.")
    check_scratch(size.whole * dtype.itemsize, f"The network in {folder}", "smaller sizes")
    with quiet_transformers(), one_line(f"{readable_name(folder)} cannot be loaded"):
        module, report = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors),
            dtype=dtype,
            ignore_mismatched_sizes=True,  # the report has them
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=False,
        )
    unread = sorted(report["unexpected_keys"])
    faults = []
    if report["missing_keys"]:
        faults.append(f"lacks {listed(sorted(report['missing_keys']))}")
    if unread and not set(unread) <= names_of_heads(config):
        faults.append(f"holds {listed(unread)} that {kind.__name__} does not have")
    if shapes := [f"{name} {tuple(there)} for {tuple(wanted)}" for name, there, wanted in report["mismatched_keys"]]:
        faults.append(f"holds other shapes, {listed(sorted(shapes))}")
    if report["error_msgs"]:
        faults.append(f"cannot be put in: {report['error_msgs'][0]!s:.200}")
    require(not faults, f"{folder} does not hold a {kind.__name__} whole: it {'; it '.join(faults)}.")
    return module, tuple(unread)


def listed(names: list[str]) -> str:
    """Return the first names, and the number of the others."""
    text = ", ".join(f"{name:.100}" for name in names[:LISTED])
    return text if len(names) <= LISTED else f"{text} and {len(names) - LISTED} more weights"


def names_of_heads(config: Any) -> set[str]:
    """Return the weights of all classes of the family, those of the base model also under its name in the others."""
    result: set[str] = set()
    for kind in family_classes(config).values():
        try:
            names = size_of(partial(kind, config), kind.__name__).names
        except InputError:
            continue
        result.update(names)
        result.update(f"{kind.base_model_prefix}.{name}" for name in names)
    return result


CONFIGURATION = "tokenizer_config.json"
VOCABULARY = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "spm.model",
)
OF_BYTES = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")  # these need no vocabulary
CHARACTERS = 64  # of a text, for each token, in the first attempt


@dataclass
class FolderTokenizer:
    """The tokenizer of a checkpoint, loaded when the first text is encoded.

    Attributes:
        folder: the checkpoint's folder.
    """

    folder: Path
    loaded: Any = field(default=None, repr=False)

    def ids(self, text: str | Path, count: int) -> list[int]:
        """Return the first `count` ids of a text, or of the file it is in; fewer if it is shorter.

        Only as much of the text is read as decides them: a longer part must begin with the same ids.

        Raises:
            InputError: the folder holds no usable tokenizer, or the text cannot be read.
        """
        before: list[int] = []
        for part, whole in prefixes(text, CHARACTERS * count):
            now = self.encode(part)
            if whole or (len(before) > count and before[:count] == now[:count]):
                break
            before = now
        return now[:count]

    def encode(self, text: str) -> list[int]:
        if self.loaded is None:
            self.loaded = tokenizer_in(self.folder)
        with one_line(f"the tokenizer in {readable_name(self.folder)} cannot encode the text"):
            ids = self.loaded(text)["input_ids"]
        valid = isinstance(ids, list) and all(isinstance(each, int) for each in ids)
        require(valid, f"the tokenizer in {self.folder} gives no ids.")
        return list(ids)


def folder_tokenizer(folder: Path) -> FolderTokenizer | None:
    """Return the tokenizer of a checkpoint, or None if its folder has none."""
    return FolderTokenizer(folder) if any((folder / name).exists() for name in (*VOCABULARY, CONFIGURATION)) else None


@escaped_errors()
def tokenizer_in(folder: Path) -> Any:
    """Load the tokenizer.

    Raises:
        InputError: transformers cannot build one from the files of the folder.
    """
    from transformers import AutoTokenizer

    with quiet_transformers(), one_line(f"the tokenizer in {readable_name(folder)} cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        kind = type(tokenizer).__name__.removesuffix("Fast")
    require(
        any((folder / name).exists() for name in VOCABULARY) or kind in OF_BYTES,
        f"The tokenizer in {folder} has no vocabulary: there is no tokenizer.json, nor any of "
        f"{', '.join(VOCABULARY[1:])}. Nearest: tokenizer.save_pretrained into the folder, or token ids for a text.",
    )
    return tokenizer
