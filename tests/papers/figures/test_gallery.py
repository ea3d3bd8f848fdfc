"""The gallery: a card for every figure, written from the records, and detection of figures whose numbers have moved."""

import importlib
import json
import re
from pathlib import Path

import pytest
from docs.tools import cards

from limitformer_papers import FIGURES, RUN_FIGURES, gallery, make
from limitformer_papers.common.claims import Claim
from quick_figures import in_tiers

pytestmark = pytest.mark.xdist_group("figures")  # they share the figures

PICTURES = Path(__file__).resolve().parents[3] / "docs" / "figures"
WITHOUT_PICTURE = ["st-table2", "st-sizes"]  # nobody has run them, or at a size at which tasks are learnt


def record_of(name, folder=PICTURES):
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def test_gallery_page_equals_the_cards():
    assert cards.PAGE.read_text(encoding="utf-8") == cards.cards()


def test_every_figure_with_a_picture_has_a_card():
    linked = re.findall(r"^-   \*\*\[.*\]\(figures/(.*)\.md\)\*\*$", cards.cards(), re.MULTILINE)
    assert sorted([*linked, *WITHOUT_PICTURE]) == sorted(FIGURES | RUN_FIGURES)


@pytest.mark.parametrize("name", WITHOUT_PICTURE)
def test_figure_without_a_picture_has_a_page_that_draws_it(name):
    page = (PICTURES / f"{name}.md").read_text(encoding="utf-8")
    assert f"limitformer figure {name} --runs runs --out out" in page
    assert "![" not in page
    assert not [*PICTURES.glob(f"{name}.png"), *PICTURES.glob(f"{name}.json")]
    assert f"(figures/{name}.md)" in cards.OPENING


def test_card_states_how_many_statements_hold():
    record = {"claims": [{"holds": True}, {"holds": False}, {"holds": None}]}
    assert cards.verdict(record) == '<span class="not-held">Holds: 1 of 2</span>'
    assert cards.verdict({"claims": record["claims"][:1]}) == '<span class="holds">Holds: 1 of 1</span>'


@pytest.mark.parametrize("name", in_tiers())
def test_numbers_equal_the_records_stamp(figures, name):
    """If they have, `make gallery` makes the figure again, and `test_figure_pages` lists the sentences to update.

    On another processor than that of the stamp, up to half of them may move (`gallery`).
    """
    assert gallery.moved(record_of(name), figures[name].claims) == []


# Stamps.

CLAIMS = [Claim("share", 0.25, True), Claim("lifetime", float("inf")), Claim("rounding", 2e-16)]


def test_stamp_detects_moved_numbers():
    record = {"stamp": gallery.stamp(CLAIMS)}
    assert gallery.moved(record, CLAIMS) == []
    assert gallery.moved(record, [Claim("share", 0.2501, True), *CLAIMS[1:2], Claim("rounding", 5e-16)]) == []
    assert gallery.moved(record, [Claim("share", 0.26, True), *CLAIMS[1:]]) == ["share"]
    assert gallery.moved(record, [CLAIMS[0], Claim("lifetime", 3.0), CLAIMS[2]]) == ["lifetime"]
    assert gallery.moved(record, [Claim("part", 0.25), *CLAIMS[1:]]) == ["share", "part"]
    assert gallery.moved({}, CLAIMS) == ["share", "lifetime", "rounding"]


def test_stamp_of_another_processor_tolerates_half_of_the_numbers():
    record = {"stamp": gallery.stamp(CLAIMS) | {"processor": "another"}}
    one, two = Claim("share", 0.5), Claim("lifetime", 3.0)
    assert gallery.moved(record, [one, *CLAIMS[1:]]) == []
    assert gallery.moved(record, [one, two, CLAIMS[2]]) == ["share", "lifetime"]
    assert gallery.moved(record, CLAIMS[1:]) == ["share"]


@pytest.fixture
def small_paper(monkeypatch):
    """Give one figure's paper scale the quick settings; return the scales that are requested."""
    module, scales = importlib.import_module("limitformer_papers.clustering.ct_fig5"), []

    def made(name, *, scale="paper", **options):
        scales.append(scale)
        return make(name, scale=scale, **options)

    monkeypatch.setattr(module, "paper", module.quick)
    monkeypatch.setattr(gallery, "make", made)
    return scales


def test_gallery_remakes_only_outdated_figures(tmp_path, small_paper, monkeypatch, capsys):
    """A figure is made if it is absent, has no picture, is of another version, or has moved."""
    gallery.main(str(tmp_path), "ct-fig5")
    assert small_paper == ["quick", "paper"]
    assert record_of("ct-fig5", tmp_path)["seconds"] > 0
    gallery.main(str(tmp_path), "ct-fig5")
    assert small_paper[2:] == ["quick"]
    assert capsys.readouterr().out == "ct-fig5 made\nct-fig5 is current\n"
    (tmp_path / "ct-fig5.png").unlink()
    assert gallery.remake("ct-fig5", tmp_path)
    changed = record_of("ct-fig5", tmp_path) | {"limitformer_version": "0.0.1"}
    (tmp_path / "ct-fig5.json").write_text(json.dumps(changed), encoding="utf-8")
    assert gallery.remake("ct-fig5", tmp_path)
    changed = record_of("ct-fig5", tmp_path)
    changed["stamp"]["claims"][next(iter(changed["stamp"]["claims"]))] = 0.5
    (tmp_path / "ct-fig5.json").write_text(json.dumps(changed), encoding="utf-8")
    assert gallery.remake("ct-fig5", tmp_path)
    assert not gallery.remake("ct-fig5", tmp_path)
