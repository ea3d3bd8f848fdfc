r"""A real text as a start: each distinct word has one random embedding, so repeated words are identical tokens.

The embedding of a word has i.i.d. N(0, 1) coordinates. With positions, token number p = 0, 1, … gains the
sinusoids of *Attention is all you need* (Vaswani et al., 2017, Sec. 3.5), whose variance is 1/2:
  PE(p, 2i) = sin(p/10000^{2i/n}),  PE(p, 2i + 1) = cos(p/10000^{2i/n}).
"""

import codecs
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import InputError, require, require_count
from limitformer.base.files import check_regular
from limitformer.base.memory import check_scratch
from limitformer.models.start import Start, from_tokens

GROWTH = 4  # factor between successive reads of a text
PIECE = 2**20  # bytes
CHARACTERS = 16  # characters per wanted token in the first read
Positions = Literal["sinusoidal"]


def from_text(
    source: str | Path,
    *,
    width: int,
    tokens: int | None = None,
    positions: Positions | None = None,
    seed: int = 0,
) -> Start:
    """Start from a text's words and punctuation marks, embedded at random.

    Args:
        source: the text itself (str), or its file (Path).
        width: n, coordinates of an embedding.
        tokens: how many tokens to take from the beginning; None takes all.
        positions: "sinusoidal" adds positional encodings.
        seed: seed of the embeddings.

    Raises:
        InputError: a file that is missing, not UTF-8 text or without words, or fewer tokens than asked for.

    >>> from_text("to be or not to be", width=4).labels
    ('to', 'be', 'or', 'not', 'to', 'be')
    """
    require_count("width", width)
    require_count("seed", seed, least=0)
    require(positions in (None, "sinusoidal"), f'positions must be None or "sinusoidal"; got {positions!r}.')
    words = words_of(source, None if tokens is None else require_count("tokens", tokens))
    if tokens is not None:
        name = str(source) if isinstance(source, Path) else "the text"
        require(tokens <= len(words), f"{name} has {len(words)} tokens; {tokens} were asked for.")
        words = words[:tokens]
    check_scratch(16 * (len(words) + len(set(words))) * width, f"An embedding of width {width:,}", "a smaller width")
    x = embed(words, width, seed)
    if positions == "sinusoidal":
        x = x + sinusoids(len(words), width)
    start = from_tokens(x)
    return Start(
        covariance=start.covariance,
        means=start.means,
        labels=tuple(words),
        description=f"text, {len(words)} tokens, {len(set(words))} distinct, positions {positions}, seed {seed}",
    )


def words_of(source: str | Path, most: int | None = None) -> list[str]:
    """Return the first `most` words and punctuation marks of a text (str) or a file (Path), in lower case.

    A long text is read only as far as needed.
    """
    words: list[str] = []
    for text, whole in prefixes(source, None if most is None else CHARACTERS * most):
        words = re.findall(r"\w+|[^\w\s]", text.lower())
        if whole or len(words) > (most or 0):  # the last word may be cut
            break
    name = str(source) if isinstance(source, Path) else "the text"
    require(bool(words), f"A text must hold at least one word; {name} holds none.")
    return words[:most]


def prefixes(source: str | Path, size: int | None) -> Iterator[tuple[str, bool]]:
    """Yield longer and longer beginnings of a text (str) or a file (Path), and whether that is all of it.

    The first has `size` characters, or bytes of a file; None yields the whole text at once.
    """
    if not isinstance(source, Path):
        require(isinstance(source, str), f"source must be a text (str) or a file (Path); got {type(source).__name__}.")
        named = os.path.isfile(source) or re.fullmatch(r"\S+\.(txt|md)", source) is not None
        nearest = f"Nearest: from_text(Path({source!r}), …)."
        require(not named, f"The text is the name of a file, {source!r}. {nearest}")
        while size is not None and size < len(source):
            yield source[:size], False
            size *= GROWTH
        yield source, True
        return
    check_regular(source)
    try:
        with source.open("rb") as file:
            data = file.read(-1 if size is None else size)
            while size is not None and len(data) == size:
                yield decoded(source, data, False), False
                size *= GROWTH
                data += file.read(size - len(data))
            yield decoded(source, data, True), True
    except OSError as error:
        raise InputError(f"Cannot read the text {source}: {error.strerror}.") from error


def read_text(path: Path, most: int | None = None) -> str:
    """Return the text of a file; raise `InputError` if it cannot be decoded or has more than `most` bytes.

    It is decoded while it is read, so that an endless device is refused at its first bytes.
    """
    text = ""
    for text, whole in prefixes(path, PIECE if most is None else min(PIECE, most)):
        if most is not None and not whole and len(text) >= most:
            raise InputError(f"{path} has more than {most:,} bytes.")
    return text


def decoded(path: Path, data: bytes, whole: bool) -> str:
    """Decode bytes of a file, whose last character may be cut unless they are the whole file."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data, whole)
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: byte {error.start} cannot be decoded.") from error
    require("\0" not in text, f"{path} is a binary file, not a text: it holds NUL bytes.")
    return text


def embed(words: list[str], width: int, seed: int) -> NDArray[np.float64]:
    """Return one N(0, 1) vector for each distinct word: (tokens, width)."""
    vocabulary = {word: row for row, word in enumerate(dict.fromkeys(words))}
    table = np.random.Generator(np.random.Philox(seed)).standard_normal((len(vocabulary), width))
    return table[[vocabulary[word] for word in words]]


def sinusoids(tokens: int, width: int) -> NDArray[np.float64]:
    """Return the positional encodings of Vaswani et al. (2017): (tokens, width)."""
    coordinate = np.arange(width)
    frequency = 10_000.0 ** (-(coordinate - coordinate % 2) / width)
    angle = np.arange(tokens)[:, None] * frequency
    return np.where(coordinate % 2 == 0, np.sin(angle), np.cos(angle))
