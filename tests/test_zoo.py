"""The zoo of all model types of transformers: five types, a law, the processes, and the page."""

import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from benchmarks.zoo.children import Limits, append, rows_in, run_all
from benchmarks.zoo.configurations import CONFIG_MAPPING
from benchmarks.zoo.examine import ABSENT, FAILS, REFUSED, WORKS, examine
from benchmarks.zoo.laws import compare
from benchmarks.zoo.page import counts_of, page
from benchmarks.zoo.scaling import scale
from benchmarks.zoo.sizes import LARGE, SLOW, WITHIN, measure_size, reads_text, verdict_of

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("kind", ["gpt2", "bert", "qwen2_moe"])
def test_zoo_examines_types_in_process(kind):
    row = examine(kind)
    assert row["verdict"] == WORKS, row
    assert 4.4 < row["loss"] < 5.5  # ln 128 = 4.85
    assert row["named"] == {"input_ids": [1, 16]}


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("kind", ["gpt2", "mamba2", "t5", "deepseek_v3", "qwen3_next"])
def test_zoo_doubles_width_and_depth_with_rules(kind):
    row = scale(kind)
    assert [row.get(name) for name in ("width", "depth", "mup", "completep")] == [WORKS] * 4, row


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


def test_zoo_measures_default_configurations_at_their_real_size():
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # the peak memory is that of a whole process
        row = pool.submit(measure_size, "bert").result()
    assert row["verdict"] == WITHIN, row
    assert row["parameters"] == 109_514_298
    assert 0 < row["seconds"] < 60
    assert 0.1 < row["gigabytes"] < 8
    assert measure_size("big_bird")["verdict"] == REFUSED  # it draws random numbers when it runs
    assert measure_size("dbrx")["verdict"] == ABSENT  # its default configuration has no rope_theta


def test_zoo_measures_types_that_read_text():
    read = {kind: reads_text(CONFIG_MAPPING[kind]) for kind in ("gpt2", "t5", "llava", "vit", "wav2vec2")}
    assert read == {"gpt2": True, "t5": True, "llava": True, "vit": False, "wav2vec2": False}


def test_zoo_page_names_the_types_beyond_the_limits():
    measured = {"parameters": 7 * 10**9, "gigabytes": 1.25}
    sizes = {
        "a": {"seconds": 12.4, **measured},
        "b": {"seconds": 70.0, **measured},
        "c": {"seconds": 7.0, **measured, "gigabytes": 8.1},
        "d": {"error": "took more than 180 s of CPU time"},
        "e": {"reason": "DefaultCPUAllocator: can't allocate memory", "verdict": FAILS, "seconds": 9.0},
        "f": {"reason": "g draws", "verdict": REFUSED, "seconds": 1.0},
        "g": {"reason": "no field", "verdict": ABSENT},
        "h": {"error": "the process ended with status -9"},
    }
    verdicts = [verdict_of(row) for row in sizes.values()]
    assert verdicts == [WITHIN, SLOW, LARGE, SLOW, LARGE, REFUSED, ABSENT, FAILS]
    sizes = {kind: {"type": kind} | row for kind, row in sizes.items()}
    text = page({kind: {"type": kind, "verdict": WORKS} for kind in sizes}, {}, sizes)
    assert "Of 7 types" in text
    assert "1 are within 60 s and 8 GB" in text
    assert "* more than 60 s: b, d.\n* more than 8 GB: c, e.\n* refused: f (g draws).\n" in text
    assert "* fails: h (the process ended with status -9)." in text
    assert "| a |  |  |  | works |  | 7 B, 12 s, 1.2 GB |" in text
    assert "| d |  |  |  | works |  | more than 60 s: took more than 180 s of CPU time |" in text
    assert counts_of(text)[0] == counts_of(text)[1]
