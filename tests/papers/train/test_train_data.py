"""Corpora, tokenizers, sequences, masks and GLUE's files are read completely and reproducibly."""

import json
import os
import pickle
import subprocess
import sys
import threading
import time
from math import sqrt

import datasets
import numpy as np
import pytest
import torch
from scipy.stats import binom
from transformers import EvalPrediction

from limitformer.base.errors import InputError
from limitformer_papers.training.data import sources, text_data
from limitformer_papers.training.data.corpus import hash_of, is_evaluation, read_corpus
from limitformer_papers.training.data.glue_data import Example, read_glue
from limitformer_papers.training.data.masking import IGNORED, MaskedCollator, uniforms
from limitformer_papers.training.data.sequences import packed, read_packed, write_packed
from limitformer_papers.training.data.tokenizer import (
    LEAST,
    SPECIAL,
    ids_of,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from limitformer_papers.training.tasks.glue import score

VOCABULARY = 400


@pytest.fixture(scope="module")
def programs():
    """Some files of the standard library."""
    return sources.read_source("stdlib", 12)


@pytest.fixture(scope="module")
def tokenizer(programs):
    return train_tokenizer(programs, VOCABULARY)


@pytest.fixture(scope="module")
def sequences(programs, tokenizer):
    return packed(programs, tokenizer, 128)


@pytest.fixture
def texts(tmp_path):
    """A folder of 60 documents, some of them in a subfolder."""
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    for k in range(60):
        place = folder / "more" if k % 3 else folder
        (place / f"{k:02d}.txt").write_text(f"Document number {k} says {k * k}.", encoding="utf-8")
    return folder


def documents_of(corpus):
    return sorted([*corpus.train, *corpus.evaluation])


# Corpora


def test_standard_library_is_read_without_tests():
    corpus = read_corpus("stdlib", documents=200)
    assert documents_of(corpus) == sorted(d for d in sources.read_source("stdlib", 200) if d.strip())
    paths = [path.as_posix() for path in sources.standard_library()]
    assert any(path.endswith("/ast.py") for path in paths)
    assert any(path.endswith("/json/decoder.py") for path in paths)
    inside = [path.split("/lib/")[-1] for path in paths]
    strange = ("/test/", "/tests/", "/idle_test/", "site-packages", "_sysconfigdata", "/config-")
    assert [path for path in inside if any(word in f"/{path}" for word in strange)] == []


def test_corpus_splits_all_documents_once(texts):
    """A document's side depends on its text: another order and further documents move none to the other side."""
    corpus = read_corpus(str(texts), share=0.3)
    assert documents_of(corpus) == sorted(path.read_text() for path in texts.rglob("*.txt"))
    assert not set(corpus.train) & set(corpus.evaluation)
    assert corpus.record()["documents"] == {"train": len(corpus.train), "evaluation": len(corpus.evaluation)}
    for path in list(texts.rglob("*.txt"))[::2]:
        path.rename(path.with_name(f"z{path.name}"))
    (texts / "one_more.md").write_text("A new document.")
    after = read_corpus(str(texts), share=0.3)
    assert set(corpus.train) <= set(after.train)
    assert set(corpus.evaluation) <= set(after.evaluation)
    assert list(corpus.train) != list(after.train)[: len(corpus.train)]


def test_split_by_hash_is_fixed():
    """The hash is fixed: that of "abc" is the output of `printf abc | b2sum -l 64`."""
    assert hash_of("abc").hex() == "d8bb14d833d59559"
    assert is_evaluation(bytes.fromhex("1999999999999900"), 0.1)
    assert not is_evaluation(bytes.fromhex("1999999999999a01"), 0.1)


def test_digest_depends_on_text_and_share(texts):
    digest = read_corpus(str(texts), share=0.3).digest
    assert read_corpus(str(texts), share=0.3).digest == digest
    assert read_corpus(str(texts), share=0.4).digest != digest
    (texts / "00.txt").write_text("Document number 0 says 1.")
    assert read_corpus(str(texts), share=0.3).digest != digest


def saved(folder, rows, **columns):
    datasets.Dataset.from_dict({"text": rows, **columns}).save_to_disk(str(folder))
    return folder


def test_data_set_saved_to_disk_is_read(tmp_path):
    rows = [f"Article {k} on {k + 1}." for k in range(50)] + ["", None]
    saved(tmp_path / "one", rows, title=[str(k) for k in range(52)])
    corpus = read_corpus(str(tmp_path / "one"), share=0.3)
    assert documents_of(corpus) == sorted(rows[:50])
    assert corpus.train[3] == list(corpus.train)[3]
    assert list(corpus.train[:3]) == list(corpus.train)[:3]
    part = read_corpus(str(tmp_path / "one"), share=0.3, documents=20)
    assert documents_of(part) == sorted(rows[:20])


def test_dictionary_of_data_sets_gives_its_training_split(tmp_path):
    splits = {name: datasets.Dataset.from_dict({"text": [f"{name} {k}" for k in range(40)]}) for name in ("train", "b")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "both"))
    assert documents_of(read_corpus(str(tmp_path / "both"), share=0.3)) == sorted(f"train {k}" for k in range(40))
    datasets.DatasetDict({"b": splits["b"]}).save_to_disk(str(tmp_path / "other"))
    with pytest.raises(InputError, match=r'no split "train"; it has b'):
        read_corpus(str(tmp_path / "other"))


def test_sources_are_joined_in_their_order(tmp_path, texts):
    one = saved(tmp_path / "one", [f"Article {k}." for k in range(30)])
    corpus = read_corpus(f"{texts}+{one}", share=0.3, documents=10)
    assert len(documents_of(corpus)) == 20
    assert sum(document.startswith("Article") for document in documents_of(corpus)) == 10
    assert read_corpus(f"{one}+{texts}", share=0.3, documents=10).digest != corpus.digest


def test_hub_source_names_revision_and_configuration(monkeypatch):
    """The paper's sources are read through a replaced `load_dataset`."""
    asked = []

    def load_dataset(name, configuration, *, revision, split, streaming):
        asked.append((name, configuration, revision, split, streaming))
        rows = datasets.Dataset.from_dict({"text": [f"{name} {k}" for k in range(30)]})
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr(sources.datasets, "load_dataset", load_dataset)
    source = "wikimedia/wikipedia:20231101.en+bookcorpus/bookcorpus@refs/convert/parquet"
    corpus = read_corpus(source, share=0.3)
    assert len(documents_of(corpus)) == 60
    part = read_corpus(source, share=0.3, documents=12)
    names = ("wikimedia/wikipedia", "bookcorpus/bookcorpus")
    assert documents_of(part) == sorted(f"{name} {k}" for name in names for k in range(12))
    assert asked == [
        (name, configuration, revision, "train", streaming)
        for streaming in (False, True)
        for name, configuration, revision in ((names[0], "20231101.en", None), (names[1], None, "refs/convert/parquet"))
    ]


def test_unreachable_hub_is_reported_in_one_line(monkeypatch):
    def load_dataset(*_, **__):
        raise datasets.exceptions.DatasetNotFoundError("Couldn't reach it\non the Hub")

    monkeypatch.setattr(sources.datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError, match=r"^some/name is neither .* Couldn't reach it on the Hub$"):
        read_corpus("some/name")


def test_bad_corpora_are_refused(tmp_path, texts):
    (tmp_path / "empty").mkdir()
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    saved(tmp_path / "broken", ["a", "b"])
    next((tmp_path / "broken").glob("*.arrow")).write_bytes(b"nothing")
    datasets.Dataset.from_dict({"body": ["a"]}).save_to_disk(str(tmp_path / "column"))
    (tmp_path / "lonely.txt").write_text("One paragraph.")
    for source, words in {
        "no file here.txt": "No such file or folder",
        str(tmp_path / "empty"): "it needs files that end in .txt, .py, .md",
        str(tmp_path / "picture.png"): "is not a text",
        str(tmp_path / "latin.txt"): "is not UTF-8 text",
        str(tmp_path / "broken"): "is not whole",
        str(tmp_path / "column"): 'no column "text"; it has body',
        str(tmp_path / "lonely.txt"): "1 documents to train on and 0 to evaluate on",
        "": "source must be a name",
    }.items():
        with pytest.raises(InputError) as caught:
            read_corpus(source)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    for options in ({"share": 0}, {"share": 1.0}, {"documents": 0}, {"share": "much"}):
        with pytest.raises(InputError):
            read_corpus(str(texts), **options)


# Tokenizer


def test_any_text_is_encoded_and_decoded_unchanged(tokenizer):
    for text in ("def f(x):\n\treturn x  # twice\n", "naïve Σ 日本 🙂", " a  b ", "\x00\r\n"):
        (ids,) = ids_of(tokenizer, [text])
        assert (ids[0], ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids[1:-1]) == text
    assert len(tokenizer) == VOCABULARY
    assert [tokenizer.convert_ids_to_tokens(k) for k in range(5)] == list(SPECIAL.values())


def test_special_tokens_in_a_text_are_encoded_as_text(tokenizer):
    (ids,) = ids_of(tokenizer, ["x[MASK][SEP]"])
    assert not set(ids[1:-1]) & set(tokenizer.all_special_ids)
    assert tokenizer.mask_token_id in tokenizer("x[MASK]")["input_ids"]  # the wrong twin


@pytest.mark.slow
def test_tokenizer_is_reproducible_to_the_last_bit(programs, tokenizer, tmp_path):
    (tmp_path / "programs.json").write_text(json.dumps(programs))
    code = (
        "import json, sys; from limitformer_papers.training.data.tokenizer import train_tokenizer; "
        f"documents = json.load(open({str(tmp_path / 'programs.json')!r})); "
        f"sys.stdout.write(train_tokenizer(documents, {VOCABULARY}).backend_tokenizer.to_str())"
    )
    environment = os.environ | {"PYTHONHASHSEED": "3", "RAYON_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", code]
    elsewhere = subprocess.run(command, capture_output=True, check=True, text=True, env=environment).stdout
    assert elsewhere == tokenizer.backend_tokenizer.to_str()
    assert train_tokenizer(programs[:6], VOCABULARY).backend_tokenizer.to_str() != elsewhere


def test_saved_tokenizer_loads_unchanged(tokenizer, programs, tmp_path):
    save_tokenizer(tokenizer, tmp_path / "run" / "tokenizer")
    loaded = load_tokenizer(tmp_path / "run" / "tokenizer")
    assert loaded.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert loaded.special_tokens_map == tokenizer.special_tokens_map
    assert ids_of(loaded, programs) == ids_of(tokenizer, programs)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tokenizer"]
    pair = loaded("a b", "c")
    assert pair["token_type_ids"] == [0] * (len(ids_of(loaded, ["a b"])[0])) + [1, 1]


def test_too_large_vocabulary_is_refused_with_the_largest(programs):
    with pytest.raises(InputError, match=r"got 5000, the largest it allows is (\d+)") as caught:
        train_tokenizer([programs[0][:4000]], 5000)
    largest = int(str(caught.value).rstrip(".").split()[-1])
    assert len(train_tokenizer([programs[0][:4000]], largest)) == largest
    with pytest.raises(InputError):
        train_tokenizer([programs[0][:4000]], largest + 1)
    with pytest.raises(InputError, match="at least 261"):
        train_tokenizer(programs, 260)


def test_missing_or_damaged_tokenizer_is_refused(tokenizer, tmp_path):
    with pytest.raises(InputError, match=r"No tokenizer in .*tokenizer\.json"):
        load_tokenizer(tmp_path)
    save_tokenizer(tokenizer, tmp_path / "saved")
    path = tmp_path / "saved" / "tokenizer.json"
    path.write_text(path.read_text()[:500])
    with pytest.raises(InputError, match="not a tokenizer that limitformer saved"):
        load_tokenizer(tmp_path / "saved")


# Sequences


def test_packing_loses_fewer_tokens_than_one_sequence(programs, tokenizer, sequences):
    whole = [token for row in ids_of(tokenizer, programs) for token in row]
    together = torch.cat([sequences[k]["input_ids"] for k in range(len(sequences))]).tolist()
    assert all(len(sequences[k]["input_ids"]) == 128 for k in range(len(sequences)))
    assert together == whole[: len(together)]
    assert 0 <= len(whole) - len(together) < 128
    assert together.count(tokenizer.sep_token_id) in (len(programs) - 1, len(programs))
    assert [sequences[k]["example"] for k in range(len(sequences))] == list(range(len(sequences)))
    assert sequences.tokens.dtype == np.uint16


def test_a_file_of_packed_documents_has_the_same_sequences(programs, tokenizer, sequences, tmp_path, monkeypatch):
    monkeypatch.setattr("limitformer_papers.training.data.sequences.BATCH", 5)
    write_packed(tmp_path / "tokens.npy", programs, tokenizer, 128)
    found = read_packed(tmp_path / "tokens.npy", 128)
    assert isinstance(found.tokens, np.memmap)  # not in memory before they are asked for
    assert found.tokens.dtype == sequences.tokens.dtype
    np.testing.assert_array_equal(found.tokens, sequences.tokens)
    assert len(found) == len(sequences)
    assert torch.equal(found[3]["input_ids"], sequences[3]["input_ids"])
    assert found[3]["input_ids"].dtype == torch.int64
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.npy"]


def test_short_or_damaged_token_files_are_refused(programs, tokenizer, tmp_path):
    with pytest.raises(InputError, match=r"length must be at most \d+, the tokens of these 1 documents; got 10000"):
        write_packed(tmp_path / "short.npy", ["short"], tokenizer, 10000)
    assert list(tmp_path.iterdir()) == []
    write_packed(tmp_path / "tokens.npy", programs[:2], tokenizer, 128)
    content = (tmp_path / "tokens.npy").read_bytes()
    for damaged in (content[:-100], content[:50], b""):
        (tmp_path / "tokens.npy").write_bytes(damaged)
        with pytest.raises(InputError, match=r"tokens\.npy is damaged .*made again") as refused:
            read_packed(tmp_path / "tokens.npy", 128)
        assert "\n" not in str(refused.value)


def test_simultaneous_runs_write_the_data_once(texts, tmp_path, monkeypatch):
    made, write = [], text_data.write_text_data

    def slowly(corpus, vocabulary, length, folder):
        made.append(folder)
        time.sleep(0.3)
        write(corpus, vocabulary, length, folder)

    monkeypatch.setattr(text_data, "write_text_data", slowly)
    asked = (str(texts), LEAST, 8, tmp_path / "data")
    both = [threading.Thread(target=text_data.text_data, args=asked) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert len(made) == 1


def test_bad_sequences_are_refused(programs, tokenizer, sequences):
    with pytest.raises(InputError, match="at least one document"):
        packed([], tokenizer, 128)
    with pytest.raises(InputError):
        packed(programs, tokenizer, 0)
    for index in (len(sequences), -1):
        with pytest.raises(IndexError):
            sequences[index]


# Masks


@pytest.fixture(scope="module")
def batch(sequences, tokenizer):
    """The tokens, the model's input and the labels of all sequences."""
    batch = MaskedCollator(tokenizer, seed=5)([sequences[k] for k in range(len(sequences))])
    there = torch.stack([sequences[k]["input_ids"] for k in range(len(sequences))])
    return there, batch["input_ids"], batch["labels"]


def likely(successes, trials, probability):
    """Return whether a binomial count fits its probability, at level 1e-4, two-sided."""
    tail = min(binom.cdf(successes, trials, probability), binom.sf(successes - 1, trials, probability))
    return bool(tail > 0.5e-4)


def test_mask_frequencies_are_those_of_bert(batch, tokenizer):
    there, seen, labels = batch
    ordinary = there > 4
    chosen = labels != IGNORED
    count, total = int(chosen.sum()), int(ordinary.sum())
    assert total > 30_000
    assert likely(count, total, 0.15)
    assert not likely(count, total, 0.16)
    masked, unchanged = seen[chosen] == tokenizer.mask_token_id, seen[chosen] == there[chosen]
    words = VOCABULARY - 5  # a drawn word equals the original with probability 1/words
    assert likely(int(masked.sum()), count, 0.8)
    assert likely(int(unchanged.sum()), count, 0.1 + 0.1 / words)
    assert not likely(int(masked.sum()), count, 0.85)
    assert not likely(int(unchanged.sum()), count, 0.12)


def test_labels_are_the_original_tokens(batch):
    there, seen, labels = batch
    chosen = labels != IGNORED
    assert torch.equal(labels[chosen], there[chosen])
    assert torch.equal(seen[~chosen], there[~chosen])
    assert not (there[chosen] <= 4).any()


def test_replacements_are_uniform_over_the_vocabulary(batch, tokenizer):
    there, seen, labels = batch
    put = seen[(labels != IGNORED) & (seen != there) & (seen != tokenizer.mask_token_id)]
    assert put.min() > 4
    half = (VOCABULARY - 5) // 2
    assert likely(int((put < 5 + half).sum()), len(put), half / (VOCABULARY - 5))
    assert not likely(int((there[there > 4] < 5 + half).sum()), int((there > 4).sum()), half / (VOCABULARY - 5))


def alone(collator, example):
    return {name: tensor[0] for name, tensor in collator([example]).items()}


def test_mask_depends_on_the_example_only(sequences, tokenizer):
    """A mask depends neither on the batch and its order nor on repetition or the process."""
    collator = MaskedCollator(tokenizer, seed=5)
    first = [alone(collator, sequences[k]) for k in range(8)]
    for order in ([0, 1, 2, 3, 4, 5, 6, 7], [7, 3], [3, 3, 1], list(range(7, -1, -1))):
        batch = pickle.loads(pickle.dumps(collator))([sequences[k] for k in order])
        for row, k in enumerate(order):
            assert all(torch.equal(batch[name][row], first[k][name]) for name in batch)


def test_masks_differ_between_seeds_and_examples(sequences, tokenizer):
    same = {"input_ids": sequences[0]["input_ids"]}
    labels = [
        alone(MaskedCollator(tokenizer, seed=seed), same | {"example": example})["labels"] != IGNORED
        for seed in (0, 1, 2**64 - 1)
        for example in (0, 1, 2, 2**40)
    ]
    assert len({tuple(one.tolist()) for one in labels}) == 12
    overlap = [float((a & b).sum()) for k, a in enumerate(labels) for b in labels[:k]]
    mean = 126 * 0.0225
    assert abs(np.mean(overlap) - mean) < 5 * sqrt(mean / len(overlap))
    assert not np.array_equal(uniforms(1, 2, 4), uniforms(2, 1, 4))


def test_uniform_numbers_equal_the_reference_generator():
    """Philox 4×64-10 of NumPy at counters 1, 2, … gives the numbers of a key to the last bit."""
    raw = np.random.Philox(key=7 + (11 << 64)).random_raw(6)
    assert np.array_equal(uniforms(7, 11, 2).ravel(), (raw >> np.uint64(11)) * 2.0**-53)


def test_padding_is_masked_and_has_no_labels(tokenizer, programs):
    rows = ids_of(tokenizer, ["x = 1", programs[0]])
    some = [{"input_ids": torch.tensor(row[:32]), "example": k} for k, row in enumerate(rows)]
    collator = MaskedCollator(tokenizer, seed=0)
    batch = collator(some)
    length = len(some[0]["input_ids"])
    assert batch["attention_mask"].sum(1).tolist() == [length, 32]
    assert (batch["input_ids"][0, length:] == tokenizer.pad_token_id).all()
    assert (batch["labels"][0, length:] == IGNORED).all()
    assert torch.equal(batch["labels"][0, :length], alone(collator, some[0])["labels"])


def test_sequence_with_a_word_has_a_target(tokenizer):
    ids = torch.tensor(ids_of(tokenizer, ["a"])[0])
    batch = MaskedCollator(tokenizer, seed=0)([{"input_ids": ids, "example": k} for k in range(50)])
    assert (batch["labels"] != IGNORED).sum(1).tolist() == [1] * 50
    empty = {"input_ids": torch.tensor(ids_of(tokenizer, [""])[0]), "example": 0}
    assert (MaskedCollator(tokenizer, seed=0)([empty])["labels"] == IGNORED).all()


def test_bad_collator_options_are_refused(tokenizer, sequences):
    for options in ({"seed": -1}, {"seed": 2**64}, {"seed": 0, "share": 0}, {"seed": 0, "share": 1.5}, {"seed": 0.5}):
        with pytest.raises(InputError):
            MaskedCollator(tokenizer, **options)
    with pytest.raises(InputError, match="remove_unused_columns=False"):
        MaskedCollator(tokenizer, seed=0)([{"input_ids": sequences[0]["input_ids"]}])


# GLUE

COLA = "gj04\t1\t\tOur friends won't \"buy this analysis.\ngj04\t0\t*\tThey drank the pub.\u2028Twice.\n"
MRPC = (
    "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
    '1\t702876\t702977\tAmrozi "said.\tHe said.\r\n0\t21\t22\tOne "thing\tAnother\r\n'
)
RTE = (
    "index\tsentence1\tsentence2\tlabel\n"
    "0\tNo weapons.\tWeapons found.\tnot_entailment\n1\tA cat sat.\tIt sat.\tentailment\n"
)


def written(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8", newline="")
    return folder


def test_cola_is_read_in_both_layouts(tmp_path):
    own = written(
        tmp_path / "cola_public" / "raw",
        in_domain_train__tsv=COLA,
        in_domain_dev__tsv=COLA,
        out_of_domain_dev__tsv="clc95\t1\t\tOut of it.\n",
    )
    glue = written(tmp_path / "glue" / "CoLA", train__tsv=COLA, dev__tsv=COLA)
    expected = [
        Example(("Our friends won't \"buy this analysis.",), 1),
        Example(("They drank the pub.\u2028Twice.",), 0),
    ]
    for folder in (own, own.parent, glue, glue.parent):
        assert read_glue("CoLA", folder, "train") == expected
    assert read_glue("CoLA", own, "dev") == [*expected, Example(("Out of it.",), 1)]
    assert read_glue("CoLA", glue, "dev") == expected


def test_mrpc_is_read_in_both_layouts(tmp_path):
    expected = [Example(('Amrozi "said.', "He said."), 1), Example(('One "thing', "Another"), 0)]
    own = written(tmp_path / "own", msr_paraphrase_train__txt=MRPC, msr_paraphrase_test__txt=MRPC)
    glue = written(tmp_path / "glue", train__tsv=MRPC.replace("\ufeff", ""), dev__tsv=MRPC)
    for folder in (own, glue):
        for split in ("train", "dev"):
            assert read_glue("MRPC", folder, split) == expected


def test_rte_is_read(tmp_path):
    folder = written(tmp_path, train__tsv=RTE, dev__tsv=RTE)
    assert read_glue("RTE", folder, "train") == [
        Example(("No weapons.", "Weapons found."), 1),
        Example(("A cat sat.", "It sat."), 0),
    ]


@pytest.mark.parametrize(
    ("task", "text", "words"),
    [
        ("CoLA", COLA + "gj04\t1\tthree columns\n", ":3: a line has 4 columns between tabs; got 3"),
        ("CoLA", COLA.replace("\t0\t", "\tno\t"), ":2: the label must be 0 or 1; got 'no'"),
        ("CoLA", "", "has no examples"),
        ("MRPC", MRPC.partition("\n")[2], ":1: the columns must be Quality, #1 ID"),
        (
            "RTE",
            RTE.replace("\tentailment", "\tmaybe"),
            ":3: the label must be entailment or not_entailment; got 'maybe'",
        ),
        ("RTE", RTE.replace("It sat.", " "), ":3: a sentence is empty"),
        ("RTE", "\x00", "is a binary file"),
    ],
)
def test_bad_glue_lines_are_named(tmp_path, task, text, words):
    written(tmp_path, train__tsv=text)
    with pytest.raises(InputError) as caught:
        read_glue(task, tmp_path, "train")
    assert words in str(caught.value)
    assert str(tmp_path / "train.tsv") in str(caught.value)


def test_missing_glue_files_are_named(tmp_path):
    with pytest.raises(InputError, match=r"it needs in_domain_dev.tsv with out_of_domain_dev.tsv, or dev.tsv"):
        read_glue("CoLA", written(tmp_path, in_domain_dev__tsv=COLA), "dev")
    with pytest.raises(InputError, match="No such folder for RTE"):
        read_glue("RTE", tmp_path / "nowhere", "train")
    with pytest.raises(InputError, match="task must be one of CoLA, MRPC, RTE; got 'SST-2'"):
        read_glue("SST-2", tmp_path, "train")
    with pytest.raises(InputError, match="split must be one of train, dev"):
        read_glue("RTE", tmp_path, "test")


def test_scores_are_the_metrics_of_each_task():
    """Labels 0 0 1 1 1 against 0 1 1 1 0: 2 right positives, 1 right negative, 1 wrong one of each kind."""
    labels, classes = np.array([0, 0, 1, 1, 1]), np.array([0, 1, 1, 1, 0])
    predicted = EvalPrediction(predictions=np.eye(2)[classes], label_ids=labels)
    assert score("CoLA", predicted) == {"matthews": pytest.approx(1 / 6)}
    assert score("MRPC", predicted) == pytest.approx({"accuracy": 3 / 5, "f1": 2 / 3})
    assert score("RTE", predicted) == pytest.approx({"accuracy": 3 / 5})
    one_class = EvalPrediction(predictions=np.eye(2)[[0, 0]], label_ids=np.array([0, 0]))
    assert score("CoLA", one_class) == {"matthews": 0.0}
    assert score("MRPC", one_class) == {"accuracy": 1.0, "f1": 0.0}
