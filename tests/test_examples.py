"""The notebooks under `examples` run, print what they show, and name only those numbers in their text.

They are small enough to run whole. A picture that one keeps is drawn again, not compared.
"""

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.ipynb"))
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
DECIMAL = re.compile(r"\d+\.\d+")
ADDRESS = re.compile(r"\]\([^)]*\)|arXiv:\S+|arxiv\.org/\S+")
NEAR, NOTHING = 0.05, 0.011  # another processor sums in another order, and training carries that on


def cells(path, kind):
    """Return the notebook's cells of one kind."""
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def source(cell):
    return "".join(cell["source"])


def shown(cell):
    """Return the stored output of a code cell."""
    return "".join("".join(out.get("text", "")) for out in cell["outputs"])


def same_text(one, other):
    """Whether two texts agree up to the last digits of numbers and their alignment."""
    words = [re.sub(r"\s+", " ", NUMBER.sub("#", text)).strip() for text in (one, other)]
    numbers = [[float(found.replace(",", "")) for found in NUMBER.findall(text)] for text in (one, other)]
    return words[0] == words[1] and numbers[0] == pytest.approx(numbers[1], rel=NEAR, abs=NOTHING)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_print_their_stored_output(path, capsys, tmp_path, monkeypatch):
    from matplotlib import pyplot

    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    seen = 0
    for cell in cells(path, "code"):
        capsys.readouterr()
        exec(compile(source(cell), path.name, "exec"), namespace)
        printed = capsys.readouterr().out
        assert same_text(printed, shown(cell)), f"{source(cell)}\nprints\n{printed}\nand shows\n{shown(cell)}"
        seen += bool(printed)
    pyplot.close("all")
    assert seen >= 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_numbers_in_the_text_are_printed_or_given(path):
    known = set(DECIMAL.findall("\n".join(source(cell) + shown(cell) for cell in cells(path, "code"))))
    sentences = ADDRESS.sub("", "\n".join(map(source, cells(path, "markdown"))))
    assert [number for number in DECIMAL.findall(sentences) if number not in known] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_notebooks_lead_somewhere(path):
    targets = re.findall(r"\]\(([^)#]+)", "\n".join(map(source, cells(path, "markdown"))))
    assert [each for each in targets if not each.startswith("https:") and not (path.parent / each).exists()] == []
