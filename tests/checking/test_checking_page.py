"""The page of a check: its text and data against the report; and its behaviour in a browser without a network.

`LIMITFORMER_SCREENSHOTS=folder` stores pictures of it. Without a Chromium the tests of the browser are skipped.
"""

import base64
import hashlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import limitformer as lf
from chromium import launched
from limitformer.checking import check
from limitformer.checking.curves import CURVES
from limitformer.checking.page import page as pages
from limitformer.checking.verdicts import Verdict
from limitformer.initialisation.weight_by_weight import initialisation
from limitformer.reports import figures
from limitformer.reports import page as frame
from pages_read import CONTRAST, PageParser, intruders, opened

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


def data_of(text):
    """Return the data of the script."""
    return json.loads(PageParser(text).scripts[0])


# Text


def test_verdicts_precede_the_curves_with_their_reasons(law, law_page):
    text = law_page
    words = PageParser(text).words
    broken = [verdict for verdict in law.verdicts if verdict.grade == "broken"]
    assert broken
    assert text.index('id="verdict"') < text.index('id="curves"') < text.index('id="matrix"')
    for verdict in law.verdicts:
        for part in (verdict.said, verdict.why, verdict.mends, verdict.source, f"{verdict.share:.0%} of them"):
            assert " ".join(part.split()) in words
    assert text.count('class="card broken"') == len(broken)
    assert words.count("✗ broken") == len(broken)


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
    words = PageParser(text).words
    assert words.count(" ".join(HOSTILE.split())) > 10
    assert data_of(text)["matrices"][0]["words"][0] == HOSTILE
    assert data_of(text)["matrices"][0]["network"] == HOSTILE


@pytest.mark.parametrize(
    ("module", "function", "twin"),
    [(pages, "escape", str), (figures, "escape", str), (frame, "escape", str), (pages, "as_json", json.dumps)],
)
def test_wrong_twin_without_escaped_names_is_detected(module, function, twin, hostile, monkeypatch):
    monkeypatch.setattr(module, function, twin)
    assert intruders(hostile.page())


def test_policy_allows_only_the_script_of_the_page(network_page):
    text = network_page
    seen = PageParser(text)
    policy = next(each["content"] for tag, each in seen.tags if tag == "meta" and "content" in each)
    digest = base64.b64encode(hashlib.sha256(seen.scripts[1].encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1]
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


# Curves


def drawn(text, title, kind):
    """Return the points (x, y) of a line in the units of its axes, and the numbers at its ticks."""
    start = text.index(f"<strong>{title}</strong>")
    figure = text[start : text.index("</figure>", start)]
    path = re.search(rf'<path class="line {kind}" d="([^"]*)"', figure)[1]
    at = np.array([[float(each) for each in pair.split(",")] for pair in re.findall(r"[-\d.]+,[-\d.]+", path)])
    labels = re.findall(r'<text x="([-\d.]+)" y="([-\d.]+)" text-anchor="(\w+)">([^<]*)</text>', figure)
    x = np.array([[float(a), float(text)] for a, _, anchor, text in labels[:-1] if anchor == "middle"])
    y = np.array([[float(b) - 4, float(text)] for _, b, anchor, text in labels if anchor == "end"])
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
    sublayers = network.curves.sizes["sublayer"]
    measured = [name for name in SHOWN if name in network.curves]
    kinds = {*network.curves["kind"].values, *network.against.curves["kind"].values}
    assert len(measured) == len(SHOWN)
    assert text.count('<figure class="plot">') == len(measured) + sublayers - 1 + len(kinds) + 1
    assert {f"<strong>{kind}</strong>" for kind in kinds} <= set(re.findall("<strong>.*?</strong>", text))
    assert f"{network.about['chance']:.4g}" in PageParser(text).words


# Coloured cells


def unpacked(text, tokens):
    """Return the matrix (token, token_) of one depth."""
    cells = np.frombuffer(base64.b64decode(text), np.int8)
    rho = np.zeros((tokens, tokens))
    rho[np.tril_indices(tokens)] = cells / 100
    return np.maximum(rho, rho.T) if (cells >= 0).all() else rho + np.tril(rho, -1).T


def test_matrices_hold_the_correlations_by_token(network, network_page):
    result = data_of(network_page)["matrices"]
    assert [each["layers"] for each in result] == [list(range(4)), list(range(6))]
    for one, report in zip(result, (network, network.against), strict=True):
        for row, layer in zip(one["rows"], one["layers"], strict=True):
            v = report.data["covariance"].values[0, layer].astype(float)
            size = np.sqrt(np.diag(v))
            assert unpacked(row, len(v)) == pytest.approx(v / np.outer(size, size), abs=0.00501)
    assert result[0]["words"] == list(network.data["word"].values)


def test_heads_hold_medians_by_block(network, network_page):
    result = data_of(network_page)["heads"]
    assert [each["network"] for each in result] == [network.name] * 3 + [network.against.name] * 3
    cells = np.array(result[4]["cells"])
    expected = np.median(network.against.curves["effective_tokens"].values, 0).T
    assert cells == pytest.approx(expected, rel=1e-4)
    assert cells.shape == (4, 5)


# In a browser


@pytest.fixture(scope="module")
def browser():
    """Return a headless browser for all tests."""
    with launched() as result:
        yield result


UNDRAWN = """() => {
  const empty = [];
  for (const plot of document.querySelectorAll("svg[role=img]")) {
    if (plot.closest("[hidden]")) continue;
    const shapes = [...plot.querySelectorAll(".line, circle")].map((each) => each.getBoundingClientRect());
    if (!shapes.some((box) => box.width + box.height > 3)) empty.push(plot.getAttribute("aria-label"));
  }
  for (const canvas of document.querySelectorAll("canvas")) {
    const cells = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const colours = new Set(new Uint32Array(cells.buffer));
    if (colours.size < 3) empty.push(canvas.getAttribute("aria-label"));
  }
  for (const part of ["matrices", "heads"]) if (!document.querySelector(`#${part} canvas`)) empty.push(part);
  return empty;
}"""
PICTURE = "document.querySelector('#matrices canvas').toDataURL()"


def test_browser_draws_every_plot_without_a_request(browser, network_page, tmp_path):
    with opened(browser, network_page, tmp_path) as tab:
        assert tab.troubles == []
        assert tab.evaluate(UNDRAWN) == []
        assert tab.locator("canvas:visible").count() == 2 + 6
        shown = tab.locator("svg[role=img]:visible").count()
        assert shown == len(SHOWN) + 1 + 1 + 1  # two sublayers, one kind of weight, the loss


def test_wrong_twin_of_the_script_is_detected(browser, network, tmp_path, monkeypatch):
    script = pages.SCRIPT
    broken = script.replace("const matrix = data", "").replace("this.cell(pen, row, column);", "nothing();")
    assert broken != script
    monkeypatch.setattr(pages, "SCRIPT", broken)
    with opened(browser, network.page(), tmp_path) as tab:
        assert tab.troubles
        assert tab.evaluate(UNDRAWN)


def test_slider_keys_change_the_depth(browser, network_page, tmp_path):
    with opened(browser, network_page, tmp_path) as tab:
        slider = tab.get_by_role("slider", name="Depth")
        last, label = tab.evaluate(PICTURE), tab.locator("#depth-said").text_content()
        assert label == "layer 3 of 3."
        slider.focus()
        tab.keyboard.press("Home")
        assert tab.locator("#depth-said").text_content() == "layer 0 of 3."
        assert tab.evaluate(PICTURE) != last
        assert "layer 0 of 5" in tab.locator("#matrices figure").nth(1).text_content()
        tab.keyboard.press("End")
        assert tab.evaluate(PICTURE) == last
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
