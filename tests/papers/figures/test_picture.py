"""`Picture`: formats, width in print, letters of panels and typeface."""

import re
import shutil

import pytest
from PIL import Image

from limitformer.base.errors import InputError
from limitformer.plot import panels
from limitformer_papers import Picture, make
from limitformer_papers.common import picture as pictures


def drawn(picture, path, columns=2):
    """Draw panels with a title and a label, and write them."""
    with picture.look():
        figure, axes = panels(columns)
        for k, part in enumerate(axes):
            part.plot([0, 1, 4], label="squares")
            part.set(title=f"Panel {k}", xlabel="number")
        picture.write(figure, path)
    return figure


def test_width_is_that_of_the_page_and_the_shape_stays(tmp_path):
    drawn(Picture("pdf", width=6.5), tmp_path / "a.pdf")
    box = re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ([\d.]+) \]", (tmp_path / "a.pdf").read_bytes())
    assert float(box[1]) == pytest.approx(72 * 6.5, abs=0.5)
    assert float(box[2]) == pytest.approx(72 * 6.5 * 3.6 / 9.6, abs=0.5)


def test_panels_side_by_side_keep_a_width_that_can_be_read(tmp_path):
    drawn(Picture("svg", width=3.4), tmp_path / "a.svg")
    assert 'width="374.4pt"' in (tmp_path / "a.svg").read_text()  # 2 · 2.6 in
    drawn(Picture("svg", width=3.4), tmp_path / "a.svg", 1)
    assert 'width="244.8pt"' in (tmp_path / "a.svg").read_text()
    drawn(Picture(width=3.4), tmp_path / "a.png", 1)
    with Image.open(tmp_path / "a.png") as image:
        assert image.width == 2040  # 600 dots per inch


def test_type_shrinks_with_the_width_to_a_least_size(tmp_path):
    sizes = [
        drawn(Picture(width=width), tmp_path / "a.png").axes[0].xaxis.label.get_size() for width in (None, 8.0, 3.4)
    ]
    assert sizes == pytest.approx([10.0, 10.0 * 8.0 / 9.6, 10.0 * 6.5 / 9.0])


def test_panels_have_letters_and_keep_their_titles(tmp_path):
    figure = drawn(Picture(letters=True), tmp_path / "a.png")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["a", "b"]
    assert [axes.get_title() for axes in figure.axes] == ["Panel 0", "Panel 1"]
    assert [axes.get_title(loc="left") for axes in drawn(Picture(letters=True), tmp_path / "a.png", 1).axes] == [""]


@pytest.mark.parametrize(("serif", "font"), [(True, b"STIXGeneral"), (False, b"DejaVuSans")])
def test_typeface_is_embedded_as_journals_want_it(tmp_path, serif, font):
    drawn(Picture("pdf", serif=serif), tmp_path / "a.pdf")
    text = (tmp_path / "a.pdf").read_bytes()
    assert font in text
    assert b"/Type3" not in text


def test_figure_is_written_in_the_format_that_was_asked_for(tmp_path):
    made = make("st-fig7", scale="quick", out=tmp_path, threads=1, picture=Picture("svg", width=4.0))
    assert [path.name for path in made.paths] == ["st-fig7.svg", "st-fig7.nc", "st-fig7.json"]
    width = re.search(r'<svg .*?width="([\d.]+)pt"', (tmp_path / "st-fig7.svg").read_text(), re.DOTALL)
    assert float(width[1]) == pytest.approx(288, abs=1)
    with Image.open(make("st-fig7", scale="quick", out=tmp_path, threads=1).paths[0]) as image:
        assert image.format == "PNG"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"format": "jpg"}, r"format must be one of png, pdf, svg, pgf; got 'jpg'\. Nearest: png"),
        ({"width": 0.5}, r"width must be 2 to 40 inches; got 0\.5"),
        ({"width": float("nan")}, r"width must be 2 to 40 inches; got nan"),
    ],
)
def test_pictures_that_cannot_be_drawn_are_refused(options, says):
    with pytest.raises(InputError, match=says):
        Picture(**options)


def test_pgf_needs_tex(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(InputError, match="PGF needs TeX: none of xelatex, lualatex, pdflatex is installed"):
        Picture("pgf")
    monkeypatch.setattr(pictures.shutil, "which", lambda name: name if name == "lualatex" else None)
    assert Picture("pgf").tex() == "lualatex"
