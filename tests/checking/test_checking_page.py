"""The page of a check: its text and data against the report; and its behaviour in a browser without a network.

`LIMITFORMER_SCREENSHOTS=folder` stores pictures of it. Without a Chromium the tests of the browser are skipped.
"""

import base64
import io
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import limitformer as lf
from chromium import launched
from limitformer.checking import check
from limitformer.checking.curves import CURVES
from limitformer.checking.page.page import SHOWN as SHOWN_BY
from limitformer.checking.page.page import TITLES
from limitformer.checking.thresholds import VERDICTS
from limitformer.checking.verdicts import Verdict
from limitformer.initialisation.weight_by_weight import initialisation
from limitformer.reports import drawing
from limitformer.reports import page as frame
from limitformer.reports.figures import HeatMap
from pages_read import CONTRAST, PageParser, figure_of, intruders, opened, table_of

SIZES = {"vocab_size": 60, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 24, "bos_token_id": 1}
SIZES |= {"eos_token_id": 2, "initializer_range": 0.15}
LLAMA = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 48}
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\"'&<!--"
ELSEWHERE = {"effective_experts", "busiest_expert", "longest_memory", "median_memory"}  # of other kinds of network
SHOWN = [name for name, curve in CURVES.items() if curve.title and name not in ELSEWHERE]
TEXT = "the cat sat on the mat and the cat </script> <b> sat"


@pytest.fixture(scope="module")
def network():
    """Return the report of a network with its law, next to a configuration of another depth."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES))
    return check(model, TEXT, samples=3, against=transformers.LlamaConfig(**LLAMA), progress=False)


@pytest.fixture(scope="module")
def law():
    """Return the report of a Transformer that collapses, from words, without gradients."""
    attention = lf.SoftmaxAttention(tau0=1.0, heads=2)
    model = lf.Transformer(width=16, depth=40, gamma=0.7, attention=attention)
    return check(model, lf.from_text(TEXT, width=16), samples=3, gradients=False, progress=False)


@pytest.fixture(scope="module")
def network_page(network):
    return network.page()


@pytest.fixture(scope="module")
def law_page(law):
    return law.page()


@pytest.fixture(scope="module")
def hostile(network):
    """Return a report in which every name would run as code."""
    curves, band = (
        each.assign_coords(kind=[f"{kind}{HOSTILE}" for kind in each["kind"].values])
        for each in (network.curves, network.band)
    )
    data = network.data.assign_coords(word=("token", [HOSTILE] * network.data.sizes["token"]))
    laws = replace(network.laws, tied=dict.fromkeys(network.laws.laws, (HOSTILE,)))
    verdict = replace(network.verdicts[0], said=HOSTILE, why=HOSTILE, mends=HOSTILE, source=HOSTILE)
    result = replace(network, name=HOSTILE, curves=curves, band=band, data=data, laws=laws, verdicts=[verdict])
    about = {**network.about, HOSTILE: HOSTILE}
    return replace(result, about=about, against=replace(network.against, name=HOSTILE))


# Text


def test_verdicts_precede_the_curves_with_their_reasons(law, law_page):
    text = law_page
    words = PageParser(text).words
    broken = [verdict for verdict in law.verdicts if verdict.grade == "broken"]
    assert broken
    assert text.index(">Verdict<") < text.index(">By layer<") < text.index(">Correlation of tokens, at a depth<")
    for verdict in law.verdicts:
        for part in (verdict.said, verdict.why, verdict.mends, verdict.source, f"{verdict.share:.0%} of them"):
            assert " ".join(part.split()) in words
    assert text.count('class="card broken"') == len(broken)
    assert words.count("✗ broken") == len(broken)


def test_verdicts_have_links_to_the_curves_that_show_them(law, law_page, network, network_page):
    for report, page, curve in ((law, law_page, "correlation"), (network, network_page, "")):
        ids = {attributes["id"]: tag for tag, attributes in PageParser(page).tags if "id" in attributes}
        links = [attributes["href"] for tag, attributes in PageParser(page).tags if tag == "a"]
        assert all(ids.get(link.removeprefix("#")) in ("figure", "h2") for link in links)
        if curve:
            place = page.index(f'id="{links[0].removeprefix("#")}"')
            assert page.index(f"<strong>{CURVES[curve].title}</strong>") == page.index("<strong>", place)
            assert report.verdicts[0].name == "collapsed"
    for name, curve in SHOWN_BY.items():
        assert name in VERDICTS
        assert CURVES[curve].title or curve in ("gradient", *TITLES)


def test_every_verdict_of_the_page_has_its_figure(network):
    """The link of each verdict leads to a part of the page, with one stack and with two."""
    t5 = {"model_type": "t5", "d_model": 16, "num_layers": 2, "num_heads": 2, "d_kv": 8, "d_ff": 32, "vocab_size": 40}
    two = check(t5, tokens=6, samples=2, progress=False, witness=False)
    for report in (network, two):
        said = ["", *(f"{each.name}: " for each in report.stacks)]
        every = [
            Verdict(name, "watch", f"{start}wrong", severe=k == 1)
            for start in said
            for name in VERDICTS
            for k in (0, 1)
        ]
        page = replace(report, verdicts=every).page()
        tags = PageParser(page).tags
        links = [attributes["href"].removeprefix("#") for tag, attributes in tags if tag == "a"]
        assert len(links) > 20
        assert set(links) <= {attributes.get("id") for tag, attributes in tags if tag in ("figure", "h2")}


def test_grades_are_written_in_words(law):
    text = replace(law, verdicts=[Verdict("fine", "fine", "fine: no threshold is reached")]).page()
    assert "✓ fine no threshold is reached" in PageParser(text).words
    assert 'class="card broken"' not in text
    text = replace(law, verdicts=[replace(law.verdicts[0], grade="watch")]).page()
    assert "! watch" in PageParser(text).words
    assert 'class="card watch"' in text


def test_page_lists_laws_thresholds_and_provenance(network, network_page):
    words = PageParser(network_page).words
    for name, (number, shape, weight, _) in network.laws.alike().items():
        assert f"{name} {number} {shape} {weight}" in words
    for name, threshold in network.thresholds.items():
        numbers = " ".join(f"{each:g}" for each in (threshold.watch, threshold.broken) if each is not None)
        assert f"{name} {numbers} {threshold.source}" in words
    for name in ("seed", "samples", "dtype", "limitformer_version", "torch", "weights"):
        assert f"{name} {network.about[name]}" in words
    assert network.against.name in words


def test_page_lists_findings_on_the_weights(network, network_page, law_page):
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES))
    for block in model.transformer.h:
        torch.nn.init.zeros_(block.ln_1.weight)
    report = initialisation(model)
    words = PageParser(replace(network, initialisation=report).page()).words
    assert report.findings
    for one in report.findings:
        assert one.bug
        assert f"{one.bug} {one.pattern} {one.entries} {one.law}" in words
        assert f"{one.why} {one.mend}" in words
    assert f"{network.name}: {report.summary}." in words
    assert f"{network.name}: {network.initialisation.summary}." in PageParser(network_page).words
    assert "Findings on the weights" not in network_page
    assert "weight by weight" not in law_page


# Escaping


def test_hostile_names_stay_text(hostile):
    text = hostile.page()
    assert intruders(text) == []
    assert PageParser(text).words.count(" ".join(HOSTILE.split())) > 10
    assert drawing.short(HOSTILE) in PageParser(text).words  # a word beside the cells


@pytest.mark.parametrize("module", [frame, drawing])
def test_wrong_twin_without_escaped_names_is_detected(module, hostile, monkeypatch):
    monkeypatch.setattr(module, "escape", str)
    assert intruders(hostile.page())


def test_policy_allows_no_script_and_no_request(network_page):
    seen = PageParser(network_page)
    policy = next(each["content"] for tag, each in seen.tags if tag == "meta" and "content" in each)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'none'"
    assert seen.count("script") == 0
    style = network_page[network_page.index("<style>") : network_page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


def test_same_report_gives_the_same_bytes(law, law_page):
    assert law.page() == law_page


# Curves


def drawn(text, title, colour):
    """Return the points (x, y) of a line in the units of its axes, and the numbers at its ticks."""
    figure = figure_of(text, title)
    path = re.search(rf'<path d="([^"]*)" style="fill: none;[^"]*stroke: var\(--{colour}\)', figure)[1]
    at = np.array(re.findall(r"[-\d.]+", path), float).reshape(-1, 2)
    labels = re.findall(r'text-anchor: (\w+)[^>]* x="([-\d.]+)" y="([-\d.]+)">([-\d.e]+)</text>', figure)
    x = np.array([[float(a), float(text)] for anchor, a, _, text in labels if anchor == "middle"])
    y = np.array([[float(b) - 4.2, float(text)] for anchor, _, b, text in labels if anchor == "end"])
    return at, x, y


def by_line(positions, ticks):
    """Interpolate positions between two ticks."""
    (a, low), (b, high) = ticks[0], ticks[-1]
    return low + (positions - a) / (b - a) * (high - low)


@pytest.mark.parametrize("kind", ["law", "own", "other"])
def test_line_positions_match_the_numbers(kind, network, network_page):
    expected = {
        "law": network.band["correlation"].sel(edge="middle").values,
        "own": network.curves["correlation"].values[0],
        "other": np.median(network.against.curves["correlation"].values, 0),
    }[kind]
    at, x, y = drawn(network_page, "Correlation of tokens, mean", kind)
    assert by_line(at[:, 0], x) == pytest.approx(np.arange(len(expected)), abs=0.01)
    pixel = abs(y[-1, 1] - y[0, 1]) / abs(y[-1, 0] - y[0, 0])
    assert np.abs(by_line(at[:, 1], y) - expected).max() < 0.25 * pixel
    assert np.abs(by_line(at[:, 1], y) - expected[::-1]).max() > 5 * pixel  # the reversed curve differs


def test_logarithmic_axis_has_logarithmic_positions(law, law_page):
    at, _, y = drawn(law_page, "Effective rank of the tokens", "law")
    expected = law.band["effective_rank"].sel(edge="middle").values
    y[:, 1] = np.log(y[:, 1])
    assert by_line(at[:, 1], y) == pytest.approx(np.log(expected), abs=0.02)
    assert expected[0] > 5 * expected[-1]


def test_page_draws_every_curve_and_kind_of_weight(network, network_page):
    text = network_page
    measured = [name for name in SHOWN if name in network.curves]
    kinds = {*network.curves["kind"].values, *network.against.curves["kind"].values}
    depths, maps = 6, 6  # cells of two networks
    assert len(measured) == len(SHOWN)
    count = len(measured) + network.curves.sizes["sublayer"] - 1 + len(kinds) + 1 + 2 * depths + maps
    assert text.count('<figure class="plot"') == count
    assert {f"<strong>{kind}</strong>" for kind in kinds} <= set(re.findall("<strong>.*?</strong>", text))
    assert f"{network.about['chance']:.4g}" in PageParser(text).words


def test_picture_shows_the_panels_of_the_page(network):
    figure = network.draw()
    (axes,) = (each for each in figure.axes if each.get_title() == "Stream")
    lines = {line.get_label(): line.get_ydata() for line in axes.lines}
    assert lines["this network"] == pytest.approx(network.curves["size"].values[0])
    assert lines["median of new networks"] == pytest.approx(network.band["size"].sel(edge="middle").values)
    assert lines[network.against.name] == pytest.approx(np.median(network.against.curves["size"].values, 0))


# Coloured cells


def cells_of(figure):
    """Return the colours (row, column, 4) of the cells of a figure."""
    encoded = re.search(r"data:image/png;base64,\s*([^\"]+)", figure)[1]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGBA"), float)


def test_matrices_hold_the_correlations_by_token(network, network_page):
    views = network_page[network_page.index(">Correlation of tokens, at a depth<") :].split('<div class="view">')[1:]
    for report in (network, network.against):
        depths = report.data.sizes["layer"]
        for layer in {0, depths - 1}:
            figure = figure_of(views[round(layer * 5 / (depths - 1))], report.name)
            assert f"layer {layer} of {depths - 1}" in figure
            v = report.data["covariance"].values[0, layer].astype(float)
            rho = v / np.sqrt(np.outer(np.diag(v), np.diag(v)))
            below = np.tril_indices(len(v))
            head, *rows = table_of(figure)
            assert head[1:] == [row[0] for row in rows] == list(report.data["word"].values)
            hundredths = np.array([float(each) for k, row in enumerate(rows) for each in row[1 : k + 2]])
            assert hundredths / 100 == pytest.approx(rho[below], abs=0.00501)
            red, _, blue, _ = np.moveaxis(cells_of(figure), -1, 0)
            assert np.corrcoef((red - blue).ravel(), rho.ravel())[0, 1] > 0.98


def test_heads_hold_medians_by_block(network, network_page):
    text = network_page[network_page.index(">Heads by block<") :]
    text = text[text.index(f"{network.against.name}: 4 heads in 5 blocks") - 400 :]
    figure = figure_of(text, "Effective tokens")
    head, *rows = table_of(figure)
    assert head == ["block", *"12345"]
    expected = np.median(network.against.curves["effective_tokens"].values, 0).T
    assert np.array([row[1:] for row in rows], float) == pytest.approx(expected, rel=1e-3)
    dark = -cells_of(figure)[..., 0]
    assert dark.ravel()[np.argmax(expected)] == dark.max()
    assert dark.ravel()[np.argmin(expected)] == dark.min()


def test_cells_without_a_colour_have_signs():
    values = np.ma.masked_array([[1.0, 0.0, np.nan], [np.inf, 100.0, 5.0]], [[0, 0, 0], [0, 0, 1]])
    cells = HeatMap("Change", "of matrices", ("up", "down"), ("0", "1", "2"), values, above=True)
    with drawing.canvas() as canvas:
        colours = cells_of(canvas.svg(cells))
    assert (colours[1::2, :, 3] > 0).tolist() == [[True, False, False], [False, True, False]]
    assert cells.legend() == "colours by the logarithm, ○ zero, △ it was zero, × not known"
    assert {sign: where.tolist() for sign, where in cells.signs().items()} == {
        "o": [[False, True, False], [False] * 3],
        "^": [[False] * 3, [True, False, False]],
        "x": [[False, False, True], [False] * 3],
    }
    assert cells.table()[1] == [["up", "1", "0", "–"], ["down", "inf", "100", ""]]


# In a browser


@pytest.fixture(scope="module")
def browser():
    """Return a headless browser for all tests."""
    with launched() as result:
        yield result


UNDRAWN = """() => {
  const empty = [];
  for (const plot of document.querySelectorAll("svg[role=img]")) {
    if (!plot.getClientRects().length) continue;
    const shapes = [...plot.querySelectorAll("path, image, use")].map((each) => each.getBoundingClientRect());
    if (shapes.filter((box) => box.width + box.height > 3).length < 1) empty.push(plot.getAttribute("aria-label"));
  }
  return empty;
}"""


def test_browser_draws_every_plot_without_a_request(browser, network_page, tmp_path):
    with opened(browser, network_page, tmp_path) as tab:
        assert tab.troubles == []
        assert tab.evaluate(UNDRAWN) == []
        shown = tab.locator("svg[role=img]:visible").count()
        assert shown == len(SHOWN) + 1 + 1 + 1 + 2 + 6  # sublayers, a kind of weight, the loss, a depth, heads


def test_keys_choose_the_depth(browser, network_page, tmp_path):
    with opened(browser, network_page, tmp_path) as tab:
        last = tab.get_by_role("radio", name="5", exact=True)
        assert last.is_checked()
        assert tab.locator("figure:visible", has_text="layer 3 of 3").count() == 1
        last.focus()
        for _ in range(5):
            tab.keyboard.press("ArrowLeft")
        assert tab.get_by_role("radio", name="0", exact=True).is_checked()
        assert tab.locator("figure:visible", has_text="layer 0 of 3").count() == 1
        assert tab.locator("figure:visible", has_text="layer 0 of 5").count() == 1
        assert tab.locator("figure:visible", has_text="layer 3 of 3").count() == 0
        assert tab.troubles == []


@pytest.mark.parametrize(("which", "width", "scheme"), [("network_page", 390, "dark"), ("law_page", 1280, "light")])
def test_page_fits_the_screen_with_enough_contrast(browser, which, width, scheme, tmp_path, request):
    with opened(browser, request.getfixturevalue(which), tmp_path, width, scheme) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        assert tab.troubles == []
        ratio = tab.evaluate(CONTRAST)
        assert min(ratio.values()) >= 4.5, ratio
        folder = os.environ.get("LIMITFORMER_SCREENSHOTS")
        if folder:
            tab.screenshot(path=Path(folder) / f"check-{which}-{width}-{scheme}.png", full_page=True)
