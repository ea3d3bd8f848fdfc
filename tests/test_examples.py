"""The notebooks under `examples` run, and print the verdicts that they show."""

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.ipynb"))
VERDICT = re.compile(r"rank collapse|frozen|uniform|healthy|times the embedding|projection too large")


def cells(path):
    """(code, what it printed) of each cell."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            printed = "".join("".join(out.get("text", "")) for out in cell["outputs"])
            yield "".join(cell["source"]), printed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_gives_the_verdicts_that_it_shows(path, capsys):
    namespace: dict[str, object] = {}
    seen = 0
    for code, shown in cells(path):
        capsys.readouterr()
        exec(compile(code, path.name, "exec"), namespace)
        printed = capsys.readouterr().out
        assert VERDICT.findall(printed) == VERDICT.findall(shown)
        seen += len(VERDICT.findall(shown))
    assert seen >= 3


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["my-own-architecture", "will-my-llama-collapse"]
