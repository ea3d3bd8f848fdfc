"""The zoo of all model types of transformers: five types, a law, the processes, and the page."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from benchmarks.zoo.examine import ABSENT, REFUSED, WORKS, examine
from benchmarks.zoo.laws import compare
from benchmarks.zoo.page import counts_of
from benchmarks.zoo.scaling import scale
from benchmarks.zoo.sizes import WITHIN, measure_size

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


def test_zoo_page_counts_its_rows():
    head, rows = counts_of((ROOT / "docs/architectures.md").read_text(encoding="utf-8"))
    assert head == rows
    assert sum(rows.values()) > 600


def test_zoo_measures_default_configurations_at_their_real_size():
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # the peak memory is that of a whole process
        row = pool.submit(measure_size, "electra").result()
    assert row["verdict"] == WITHIN, row
    assert row["parameters"] == 13_546_682
    assert 0 < row["seconds"] < 60
    assert 0.1 < row["gigabytes"] < 8
    assert measure_size("big_bird")["verdict"] == REFUSED  # it draws random numbers when it runs
    assert measure_size("dbrx")["verdict"] == ABSENT  # its default configuration has no rope_theta
