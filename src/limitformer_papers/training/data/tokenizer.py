r"""A byte-level BPE tokenizer, trained on the training split only, which has tokens for any text.

Its vocabulary is the five special tokens, the 256 bytes, and merges in the order in which training made them. The same
corpus and size give the same tokenizer to the last bit. Special tokens written in a text, such as "[MASK]" in a program
about them, are encoded as text (`ids_of`).
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from limitformer.base.errors import InputError, require, require_count
from limitformer.base.files import write_whole

SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
LEAST = len(SPECIAL) + 256
BATCH = 1000  # documents


def train_tokenizer(documents: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer.

    Args:
        documents: the training split.
        vocabulary: size with special tokens; [ST, App. D.1] takes 32,000.

    Raises:
        InputError: a size too small for bytes and special tokens, or larger than the corpus allows.
    """
    vocabulary = require_count("vocabulary", vocabulary)
    require(vocabulary >= LEAST, f"vocabulary must be at least {LEAST}, bytes and special tokens; got {vocabulary}.")
    tokenizer = untrained()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer, length=len(documents))
    largest = tokenizer.get_vocab_size()
    if largest < vocabulary:
        raise InputError(
            f"vocabulary is larger than the corpus allows; got {vocabulary}, the largest it allows is {largest}."
        )
    return finished(tokenizer)


def untrained() -> Tokenizer:
    """Return a byte-level BPE tokenizer without merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def finished(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Wrap the tokenizer for `transformers`: [CLS] A [SEP], or [CLS] A [SEP] B [SEP] with type 1 for B."""
    places = [(SPECIAL[name], tokenizer.token_to_id(SPECIAL[name])) for name in ("cls_token", "sep_token")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=places
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **SPECIAL,
    )


def ids_of(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> list[list[int]]:
    """Return [CLS] document [SEP] of each document; special tokens written in it are encoded as text."""
    encoded = tokenizer(
        documents, split_special_tokens=True, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )
    rows: list[list[int]] = encoded["input_ids"]
    return rows


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: str | Path) -> Path:
    """Save to a folder, whole or not at all, and return the folder."""
    folder = Path(folder)
    write_whole(folder, lambda whole: tokenizer.save_pretrained(str(whole)))
    return folder


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """Load a tokenizer that `save_tokenizer` wrote.

    Raises:
        InputError: the tokenizer is missing or damaged.
    """
    missing = [name for name in ("tokenizer.json", "tokenizer_config.json") if not (Path(folder) / name).is_file()]
    require(not missing, f"No tokenizer in {folder}: {' and '.join(missing)} missing.")
    try:
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the Rust side raises bare Exception
        raise InputError(f"{folder} is not a tokenizer that limitformer saved: {error}.") from error
