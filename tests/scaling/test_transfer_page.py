"""The page of `lf.transfer`: the conclusion first, every exponent, and text that stays text.

`LIMITFORMER_SCREENSHOTS=folder` stores pictures of the page. Without a Chromium the tests of the browser are skipped.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import stdtrit

import limitformer as lf
from limitformer.reports import drawing
from limitformer.reports import page as frame
from limitformer.scaling import page as pages
from limitformer.scaling.exponents import Exponent, exponent
from pages_read import PageParser, intruders

SMALL = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 40}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2}
SIZES = [32, 64, 256]


@pytest.fixture(scope="module")
def result():
    return lf.transfer(SMALL, {"width": SIZES}, 8, optimizer="adamw", rule="mup", samples=4, seed=0, progress=False)


@pytest.fixture(scope="module")
def text(result):
    return result.page()


def test_page_begins_with_the_conclusion_and_ends_with_its_limits(result, text):
    words = PageParser(text).words
    places = [words.index(each) for each in (
        "Does the learning rate transfer over the width?", result.conclusion, "Measures that decide", "Other measures",
        result.notes[0], "What this does not tell", result.about,
    )]  # fmt: skip
    assert places == sorted(places)
    assert "width 32, 64, 256; rule mup; at width 32 adamw (lr 0.001, betas (0.9, 0.999), eps 1e-08" in words
    assert "2 groups: 7 weights with lr 0.001, betas (0.9, 0.999), eps 1.25e-09, weight_decay 0.01; 14 weights" in words
    assert "3 steps; 4 networks at each size" in words
    sizes = result.record()["groups"]
    assert [[(each["lr"], each["parameters"]) for each in sizes[size]] for size in ("32", "256")] == [
        [([1e-3], 21)],
        [([1e-3], 7), ([1.25e-4], 14)],
    ]


def test_page_has_every_measure_with_its_exponent_and_word(result, text):
    words = PageParser(text).words
    for cells in result.cells():
        assert " ".join(" ".join(cells).split()) in words
    for name, each in result.exponents.items():
        assert f"<strong>{name}</strong>" in text
        assert f"{result.word(name)}; exponent {each}: × {2**each.value:.3g} at twice the width" in words
    before = text[: text.index("Other measures</h2>")]
    assert all(f"<strong>{name}</strong>" in before for name in result.deciding)
    assert "<strong>output</strong>" not in before
    for line in result.legend:
        assert line in words


def test_legend_names_the_thresholds_that_decide(result):
    """The words follow the numbers of `is_size_free` and `transfers`."""
    low, high = re.search(r"is beyond ± (0\.\d+), by .* of each is within ± (0\.\d+)\.", result.legend[2]).groups()
    free = float(re.search(r"size-free: the interval is within ± (0\.\d+)", result.legend[1])[1])

    def of(half, centre=0.0):
        powers = centre + half / stdtrit(3, 0.975) * 3**0.5 * np.array([-1.0, -1.0, 1.0, 1.0])
        values = np.exp(powers[:, None] * np.log(SIZES))
        return replace(result, exponents={name: exponent(values, SIZES)}, measures={name: values})

    name, small = "effect of head, first step", 1e-6
    assert of(free - small).word(name) == "size-free"
    assert of(free + small).word(name) == "unclear"
    assert of(0.0, free + small).word(name) == "depends"
    assert of(float(high) - small).transfers is True
    assert of(float(high) + small).transfers is None
    assert of(0.01, float(low) + 0.01 + small).transfers is False
    assert of(0.01, -float(low) - 0.01 - small).transfers is False
    assert result.word("no such measure") == ""


@pytest.mark.parametrize(("verdict", "grade"), [(True, "fine"), (None, "watch"), (False, "broken")])
def test_card_has_the_grade_of_the_verdict(result, monkeypatch, verdict, grade):
    monkeypatch.setattr(type(result), "transfers", verdict)
    monkeypatch.setattr(type(result), "conclusion", "So it is.")
    assert f'<article class="card {grade}">' in result.page()


def hostile(result):
    name = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\"'&<!--"
    measures = {f"effect of {name}": next(iter(result.measures.values()))}
    exponents = {f"effect of {name}": Exponent(0.5, 0.4, 0.6)}
    return replace(result, over=name, rule=name, optimizer=name, measures=measures, exponents=exponents, notes=(name,))


def test_hostile_names_stay_text_on_the_page(result):
    assert intruders(hostile(result).page()) == []


@pytest.mark.parametrize("module", [drawing, frame])
def test_wrong_twin_page_without_escaped_names_is_detected(result, module, monkeypatch):
    monkeypatch.setattr(module, "escape", str)
    assert intruders(hostile(result).page())


def test_plots_are_logarithmic_and_show_sizes(text):
    figure = text[text.index("<figure") : text.index("</figure>")]
    ticks = re.findall(r'text-anchor: middle[^>]* x="([\d.]+)" y="[\d.]+">(\d+)</text>', figure)
    assert [label for _, label in ticks] == ["32", "64", "256"]
    x = [float(place) for place, _ in ticks]
    assert (x[2] - x[1]) / (x[1] - x[0]) == pytest.approx(2.0, abs=0.01)


def test_band_holds_the_networks_and_the_line_their_geometric_mean(result):
    name = next(iter(result.exponents))
    panel, values = pages.panel(result, name), result.measures[name]
    (line,) = panel.lines
    np.testing.assert_allclose(line.y, np.prod(values, axis=0) ** (1 / len(values)))
    x, low, high = panel.band
    assert x.tolist() == SIZES
    ordered = np.sort(values, axis=0)  # of four networks, 5 % is 0.15 of the way from the first to the second
    np.testing.assert_allclose(low, 0.85 * ordered[0] + 0.15 * ordered[1])
    np.testing.assert_allclose(high, 0.15 * ordered[2] + 0.85 * ordered[3])
