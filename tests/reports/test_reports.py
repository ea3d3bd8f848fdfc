"""All reports: what one says in text, JSON, table, page, notebook and data comes from one object and agrees."""

import csv
import html
import json
import re
from concurrent.futures import ThreadPoolExecutor

import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr

import limitformer as lf
from limitformer.reports import drawing
from limitformer.reports.figures import COLOURS, Line, Panel
from limitformer.reports.page import STYLE

SMALL = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 60, "initializer_range": 0.2}
STEPS = {"optimizer": "sgd", "steps": 1, "seed": 0, "progress": False}


@pytest.fixture(scope="module")
def reports():
    """Return each report by the name of its files, with the sentences that it must say everywhere."""
    quick = {"tokens": 6, "samples": 2, "progress": False}
    check, steps = lf.check(SMALL, **quick), lf.steps(SMALL, 6, rates=[0.1, 10.0], samples=2, **STEPS)
    compare = lf.compare({"one": SMALL, "two": SMALL | {"initializer_range": 3.0}}, witness=False, **quick)
    transfer = lf.transfer(SMALL, {"width": [16, 32]}, 6, samples=4, witness=False, **STEPS)
    design = lf.design(SMALL, tokens=6, knobs="initializer_range", grid={"initializer_range": [0.1, 0.2]}, samples=29,
                       scan=2, objective={"gradient": None}, progress=False)  # fmt: skip
    rate = lf.rate(SMALL, 6, optimizer="sgd", networks=2, steps=1, seed=0, progress=False)
    return {
        "check": (check, [one.said for one in check.verdicts] + [check.proof]),
        "steps": (steps, [one.said for one in steps.verdicts] + [steps.proof]),
        "compare": (compare, [one.said for each in compare.reports.values() for one in each.failed("any")]),
        "transfer": (transfer, [transfer.conclusion]),
        "design": (design, [design.verdict]),
        "rate": (rate, [rate.answer]),
    }


TABLES = {"steps": "rates", "compare": "table", "transfer": "measures"}  # the part of the JSON that is the table


@pytest.mark.parametrize("name", ["check", "steps", "compare", "transfer", "design", "rate"])
def test_text_json_table_page_and_data_agree(name, reports, tmp_path):
    report, sentences = reports[name]
    written = report.save(tmp_path)
    assert all(path.is_file() for path in written)
    assert written[0].name == f"{name}{'.json' if name == 'design' else '.html'}"
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in written}
    record = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    assert record == json.loads(json.dumps(report.record()))
    with xr.open_dataset(tmp_path / f"{name}.nc") as data:
        xr.testing.assert_equal(data.load(), report.dataset())
    page, text = report.page(), " ".join(str(report).split())
    assert sentences
    for sentence in sentences:
        assert " ".join(sentence.split()) in text
        assert not page or html.escape(sentence.removeprefix("fine: ")) in page
    assert report._repr_html_() == (
        f'<iframe srcdoc="{html.escape(page)}" width="100%" height="900" style="border:0"></iframe>' if page else None
    )
    if name in TABLES:
        agrees(name, record[TABLES[name]], tmp_path / f"{name}.csv")


def agrees(name, table, path):
    """Assert that the rows of the CSV hold the numbers of the JSON."""
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    records = [{"model": key, **row} for key, row in table.items()] if name == "compare" else table
    assert len(rows) == len(records) > 1
    numbers = 0
    for row, one in zip(rows, records, strict=True):
        for key, value in one.items():
            if isinstance(value, float):
                assert float(row[key]) == pytest.approx(value, rel=1e-12)
                numbers += 1
            elif value is not None:
                assert row[key] == str(value)
    assert numbers > 2


def test_colours_of_figures_are_those_of_the_page():
    light = STYLE[: STYLE.index("@media")]
    assert all(f"--{name}: {colour};" in light for name, colour in COLOURS.items())
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_figures_survive_numbers_that_no_axis_can_show():
    """Ranges beyond floating numbers, nothing, one place, and words that are formulas or in another script."""
    x, ends = np.arange(4.0), [-1e308, 1e308, 0.0, 1.0]
    for y in (ends, np.abs(ends), [np.nan] * 4, [1.0, np.inf, 2.0, np.nan], [5e-324, 1.0, 2.0, 3.0], [0.0] * 4):
        for place in (x, x[:1]):
            line = Line("own", "$\\frac 日本", place, np.array(y)[: len(place)])
            panel = Panel("$", "", "$x", (line,), (place, line.y, line.y))
            with drawing.canvas() as canvas:
                text = canvas.svg(panel)
            assert "$x</text>" in text
            positions = re.findall(r' (?:d|x|y)="([^"]*)"', text)
            assert positions
            assert not any("inf" in each or "nan" in each for each in positions)


def test_points_without_a_line_are_drawn_however_many_they_are():
    """A long curve has no dots, but samples have nothing else."""
    places = np.arange(100.0)
    panels = {kind: Panel("", "", "sample", (Line(kind, "", places, places),)) for kind in ("samples", "own")}
    with drawing.canvas() as canvas:
        dots = {kind: canvas.svg(panel).count("<use") for kind, panel in panels.items()}
    assert dots == {"samples": 100, "own": 0}


def test_pages_of_several_threads_are_those_of_one(reports):
    """The style of Matplotlib is that of the whole process."""
    before, page = dict(mpl.rcParams), reports["rate"][0].page()
    with ThreadPoolExecutor(3) as threads:
        assert set(threads.map(lambda _: reports["rate"][0].page(), range(9))) == {page}
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("name", ["check", "steps", "transfer"])
def test_ids_of_a_page_are_unique(name, reports):
    found = re.findall(r' id="([^"]*)"', reports[name][0].page())
    assert len(found) == len(set(found)) > 3
