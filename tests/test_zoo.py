"""The zoo of all model types of transformers: five types, a law, the processes, and the page."""

import os
import time
from pathlib import Path

import pytest
from benchmarks.zoo.children import Limits, append, rows_in, run_all
from benchmarks.zoo.configurations import CONFIG_MAPPING, OVERRIDES
from benchmarks.zoo.examine import FAILS, WORKS, examine
from benchmarks.zoo.laws import compare
from benchmarks.zoo.page import counts_of, page

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "bloom", "qwen2_moe"])
def test_zoo_examines_types_in_process(kind):
    row = examine(kind)
    assert row["verdict"] == WORKS, row
    assert 4.4 < row["loss"] < 5.5  # ln 128 = 4.85
    assert row["named"] == {"input_ids": [1, 16]}


def test_zoo_overrides_have_known_types():
    assert set(OVERRIDES) <= set(CONFIG_MAPPING)


def test_zoo_compares_laws_with_the_loss_of_the_model():
    row = compare("opt", samples=100)
    assert row["p"] > 1e-4, row
    assert row["twin"] < 1e-8, row  # weights that are 5 % larger


def outcome(name):
    if name == "dies":
        os._exit(3)
    if name == "waits":
        time.sleep(60)
    if name == "raises":
        raise ValueError("no such type")
    return {"verdict": WORKS}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_zoo_processes_write_a_row_for_each_type(tmp_path):
    path, names = tmp_path / "zoo.jsonl", ["works", "dies", "raises"]
    rows = list(run_all(outcome, names, path, 2, {"version": 1}, Limits()))
    rows += run_all(outcome, ["waits"], path, 2, {"version": 1}, Limits(wall=2))
    assert {row["type"]: row for row in rows} == rows_in(path)
    assert sorted(rows_in(path)) == sorted([*names, "waits"])
    assert rows_in(path)["works"]["verdict"] == WORKS
    assert "status 3" in rows_in(path)["dies"]["error"]
    assert "ValueError: no such type" in rows_in(path)["raises"]["error"]
    assert "more than 2 s" in rows_in(path)["waits"]["error"]


def test_zoo_rows_survive_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "zoo.jsonl"
    append(path, {"type": "gpt2", "verdict": FAILS})
    append(path, {"type": "gpt2", "verdict": WORKS})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"type": "ll')
    assert rows_in(path) == {"gpt2": {"type": "gpt2", "verdict": WORKS}}
    assert path.read_bytes() == whole


def test_zoo_page_counts_its_rows():
    head, rows = counts_of((ROOT / "docs/architectures.md").read_text(encoding="utf-8"))
    assert head == rows
    assert sum(rows.values()) > 600


def test_zoo_page_escapes_reasons():
    text = page(
        {"a": {"type": "a", "verdict": FAILS, "reason": "x | <b> _y_"}, "b": {"type": "b", "error": "died"}}, {}, {}
    )
    assert "fails: x \\| &lt;b&gt; \\_y\\_ |" in text
    assert counts_of(text)[0] == counts_of(text)[1]
    assert counts_of(text)[0][FAILS] == 2
