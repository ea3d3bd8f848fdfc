"""Progress in a notebook: HTML that replaces itself, without ipywidgets."""

import builtins
import sys
from types import ModuleType, SimpleNamespace

import pytest

from limitformer.base import progress


class Handle:
    """A stand-in for IPython's display handle that records its pictures."""

    def __init__(self, pictures):
        self.pictures = pictures

    def update(self, picture, raw):
        assert raw
        self.pictures.append(picture)


@pytest.fixture
def pictures(monkeypatch):
    """The pictures that a notebook displays; a second display fails."""
    displayed = []

    def display(picture, raw, display_id):
        assert raw
        assert display_id
        assert displayed == []
        displayed.append(picture)
        return Handle(displayed)

    package, module = ModuleType("IPython"), ModuleType("IPython.display")
    module.display = display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.setattr(builtins, "get_ipython", type("ZMQInteractiveShell", (), {}), raising=False)
    return displayed


def at(monkeypatch, *seconds):
    clock = iter(seconds)
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: next(clock)))


def test_notebook_bar_replaces_itself(monkeypatch, pictures, capsys):
    """It appears after two seconds, changes at most twice a second, and disappears at the end."""
    at(monkeypatch, 0.0, 1.0, 4.0, 4.3, 8.0)
    bar = progress.progress_bar("chains & <samples>", 10_000)
    for done in (0, 2500, 2600, 5000):
        progress.advance(bar, done)
    progress.advance(bar, -1)
    lines = [picture["text/plain"] for picture in pictures]
    assert lines == [
        "chains & <samples>: 2,500 of 10,000, about 12 s left",
        "chains & <samples>: 5,000 of 10,000, about 8 s left",
        "",
    ]
    assert 'value="5000" max="10000"' in pictures[1]["text/html"]
    assert "chains &amp; &lt;samples&gt;: 5,000" in pictures[1]["text/html"]
    assert pictures[-1]["text/html"] == ""
    assert capsys.readouterr() == ("", "")


def test_notebook_bar_is_absent_for_short_work(monkeypatch, pictures):
    monkeypatch.setattr(progress, "PATIENCE", 1000.0)
    assert list(progress.track([1, 2, 3], "pieces")) == [1, 2, 3]
    assert pictures == []


def test_wrong_twin_rich_bar_warns_in_a_notebook(monkeypatch, pictures):
    """This is the reason for the notebook bar; warnings are errors here."""
    monkeypatch.setattr(sys.modules["IPython.display"], "display", lambda *_: None)
    bar = progress.progress_bar("samples", 3)
    with pytest.raises(UserWarning, match="ipywidgets"):
        bar.progress.start()
