"""Texts as starts: repeated words are identical tokens, and files that are not texts are refused."""

import re
from pathlib import Path

import numpy as np
import pytest

from limitformer.base.errors import InputError
from limitformer.models import from_text
from limitformer.models.text import embed, sinusoids

pytestmark = pytest.mark.fast

TEXT = "To be, or not to be!"


def refuses(message, *arguments, **settings):
    with pytest.raises(InputError, match=re.escape(message)):
        from_text(*arguments, **{"width": 4, **settings})


def correlations(start):
    deviation = np.sqrt(start.covariance.diagonal())
    return start.covariance / deviation[:, None] / deviation


def test_words_and_marks_are_tokens_in_lower_case():
    start = from_text(TEXT, width=16)
    assert start.labels == ("to", "be", ",", "or", "not", "to", "be", "!")
    assert start.tokens == 8
    assert start.description == "text, 8 tokens, 6 distinct, positions None, seed 0"


def test_repeated_words_are_identical_tokens():
    start = from_text(TEXT, width=16)
    np.testing.assert_array_equal(start.covariance[0], start.covariance[5])
    np.testing.assert_array_equal(start.means[[0, 1]], start.means[[5, 6]])
    assert start.rank() == 6
    assert correlations(start)[0, 1] < 0.99


def test_positions_distinguish_repeated_words():
    start = from_text(TEXT, width=16, positions="sinusoidal")
    assert start.rank() == 8
    assert correlations(start)[0, 5] < 0.99
    assert start.labels == from_text(TEXT, width=16).labels
    assert "positions sinusoidal" in start.description


def test_covariance_and_means_are_those_of_the_embeddings():
    start = from_text(TEXT, width=5, positions="sinusoidal", seed=3)
    x = embed(list(start.labels), 5, 3) + sinusoids(8, 5)
    np.testing.assert_allclose(start.covariance, x @ x.T / 5, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(start.means, x.mean(1), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("width", [1, 4, 7])
def test_sinusoids_are_those_of_the_paper(width):
    """Coordinate by coordinate, Vaswani et al. (2017, Sec. 3.5)."""
    out = sinusoids(9, width)
    for p in range(9):
        for k in range(width):
            angle = p / 10_000 ** ((k - k % 2) / width)
            assert out[p, k] == pytest.approx(np.cos(angle) if k % 2 else np.sin(angle), abs=1e-15)


def test_embeddings_depend_on_the_seed_and_on_the_order_of_first_appearance():
    first, second = from_text(TEXT, width=16, seed=1), from_text(TEXT, width=16, seed=2)
    assert np.abs(first.covariance - second.covariance).max() > 0.1
    np.testing.assert_array_equal(first.covariance, from_text(TEXT, width=16, seed=1).covariance)
    np.testing.assert_array_equal(from_text("to be , x", width=16, seed=1).covariance, first.covariance[:4, :4])


def test_embeddings_are_standard_normal():
    """Mean and variance of 300 words in 400 coordinates, in standard errors."""
    x = embed([str(k) for k in range(300)], 400, 0)
    assert abs(x.mean()) * x.size**0.5 < 4
    assert abs(x.var() - 1) * (x.size / 2) ** 0.5 < 4


def test_a_file_and_its_text_are_one_start(tmp_path):
    path = tmp_path / "übung.txt"
    path.write_bytes("Grüße – 你好 grüße\r\n".encode())
    start = from_text(path, width=6)
    assert start.labels == ("grüße", "–", "你好", "grüße")
    np.testing.assert_array_equal(start.covariance, from_text("Grüße – 你好 grüße", width=6).covariance)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "A text must hold at least one word; {path} holds none."),
        (b" \n\t", "A text must hold at least one word; {path} holds none."),
        (b"a b\0c", "{path} is a binary file, not a text: it holds NUL bytes."),
        (b"abc\xff\xfe", "{path} is not UTF-8 text: byte 3 cannot be decoded."),
        (b"one two three", "{path} has 3 tokens; 5 were asked for."),
    ],
)
def test_unusable_files_are_refused(tmp_path, data, message):
    path = tmp_path / "text.txt"
    path.write_bytes(data)
    refuses(message.format(path=path), path, tokens=5)


def test_missing_files_and_folders_are_refused(tmp_path):
    missing = tmp_path / "missing.txt"
    refuses(f"Cannot read the text {missing}: No such file or directory.", missing)
    refuses(f"Cannot read the text {tmp_path}: Is a directory.", tmp_path)


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ("", {}, "A text must hold at least one word; the text holds none."),
        ("a b", {"tokens": 3}, "the text has 2 tokens; 3 were asked for."),
        ("a b", {"tokens": 0}, "tokens must be at least 1; got 0."),
        ("a b", {"tokens": True}, "tokens must be a whole number; got True."),
        ("a b", {"width": 0}, "width must be at least 1; got 0."),
        ("a b", {"width": 4.0}, "width must be a whole number; got 4.0."),
        ("a b", {"seed": -1}, "seed must be at least 0; got -1."),
        (3, {}, "source must be a text (str) or a file (Path); got int."),
        (b"a b", {}, "source must be a text (str) or a file (Path); got bytes."),
        ("a b", {"width": 10**12}, "An embedding of width 1,000,000,000,000 takes 59,604.6 GiB, more than is free."),
        ("a b", {"positions": "rotary"}, "positions must be None or \"sinusoidal\"; got 'rotary'."),
    ],
)
def test_unusable_arguments_are_refused(source, settings, message):
    refuses(message, source, **settings)


@pytest.mark.parametrize("name", ["novel.txt", "notes/README.md", "novel"])
def test_name_of_a_file_as_text_is_refused(tmp_path, monkeypatch, name):
    """The file exists, or the text has the suffix of one; other texts of one word are accepted."""
    (tmp_path / "novel").write_text("to be")
    monkeypatch.chdir(tmp_path)
    refuses(f"The text is the name of a file, '{name}'. Nearest: from_text(Path('{name}'), …).", name)
    assert from_text(Path("novel"), width=4).labels == ("to", "be")
    assert from_text("novels", width=4).labels == ("novels",)
