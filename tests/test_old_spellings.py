"""Every old spelling of docs/from-0.2-to-0.3.md gives the one line that its row quotes, and no other row does."""

import io
import json
import pickle
import re
import sys
import warnings
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import xarray as xr
from transformers import CONFIG_MAPPING
from typer.testing import CliRunner

import limitformer as lf
from limitformer.checking import THRESHOLDS, Report
from limitformer.cli.app import app

PAGE = Path(__file__).parents[1] / "docs/from-0.2-to-0.3.md"
CELLS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text("utf-8").splitlines()]
ROWS = [cells for cells in CELLS if len(cells) == 3][2:]
SPELLING = re.compile(r"`((?:from |import |limitformer |lf\.|pickle\.|report\.|threshold\.).+?)`")
# All options that are gone, where the page names one of several.
MORE = {
    "simulate": "width depth attention tau0 temperature center identity heads head-dim norm mask lam hidden one-matrix "
    "feedforward c-plus c-minus",
    "sweep run": "cores memory queue walltime",
}
CASES = [(old, row[1]) for row in ROWS for old in SPELLING.findall(row[0])]
for command, options in MORE.items():
    (said,) = {said for old, said in CASES if old.startswith(f"limitformer {command}") and "--…" in said}
    CASES += [(f"limitformer {command} --{option} 1", said) for option in options.split()]


def quotes(said, line):
    return fnmatchcase(line, said.replace("[", "[[]").replace("…", "*"))


def answer(spelling):
    """Return the line that a command, a statement of Python, or a warning ends with."""
    if spelling.startswith("limitformer "):
        done = CliRunner().invoke(app, spelling.split()[1:], env={"COLUMNS": "400"})
        assert done.exit_code == 2
        return done.stderr.removeprefix("Error: ").rstrip("\n")
    part = io.BytesIO(b"climitformer.models.elementwise\nElementwise\n.")
    names = {"lf": lf, "pickle": pickle, "part": part, "sweep": None, "store": None, "address": None}
    names |= {"report": object.__new__(Report), "threshold": THRESHOLDS["collapse"]}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises((AttributeError, ImportError, TypeError, lf.InputError, UserWarning)) as raised:
            exec(spelling, names)
    return str(raised.value)


@pytest.mark.parametrize(("spelling", "said"), CASES, ids=lambda text: text[:70])
def test_an_old_spelling_gives_the_line_that_the_page_quotes(spelling, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.zarr").mkdir()
    (tmp_path / "old.zarr/zarr.json").write_text("{}")
    xr.Dataset({"x": 1.0}).to_netcdf("saved.nc", engine="scipy")
    xr.Dataset({"x": 1.0}).to_zarr("saved.zarr", zarr_format=3, consolidated=False)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/config.json").write_text(json.dumps({"model_type": "shaped_transformer"}))
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", {})  # another test may have imported what registers itself
    line = answer(spelling)
    assert "\n" not in line
    assert [row[1] for row in ROWS if quotes(row[1], line)] == [said]
    for statement in re.findall("`((?:from|import) .+?)`", next(row[2] for row in ROWS if row[1] == said)):
        exec(statement, {})
    if spelling.startswith(("from", "import")):  # the name alone says the same, and there is none for `hasattr`
        owner, _, name = line.split()[0].rpartition(".")
        with pytest.raises(AttributeError, match=f"^{re.escape(line)}$"):
            getattr(sys.modules[owner], name)
