"""The page of a check: what it says, against the report; and in a browser, without a network, what it draws and does.

`LIMITFORMER_SCREENSHOTS=folder` keeps pictures of it. Without a Chromium the tests of the browser are skipped.
"""

import base64
import hashlib
import json
import os
import re
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import xarray as xr

import limitformer as lf
from chromium import launched
from limitformer.checking import check
from limitformer.checking.curves import BY_HEAD, CURVES, curves
from limitformer.checking.page import grids, svg
from limitformer.checking.page import page as pages
from limitformer.checking.report import Report
from limitformer.checking.thresholds import THRESHOLDS
from limitformer.checking.verdicts import Verdict
from limitformer.initialisation.weight_by_weight import initialisation

SIZES = {"vocab_size": 60, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 24, "bos_token_id": 1}
SIZES |= {"eos_token_id": 2, "initializer_range": 0.15}
LLAMA = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 48}
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\"'&<!--"
SHOWN = [name for name, curve in CURVES.items() if curve.title]
TEXT = "the cat sat on the mat and the cat </script> <b> sat"


@pytest.fixture(scope="module")
def held():
    """A network that exists, with its law, beside a configuration of another depth."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES))
    return check(model, TEXT, samples=3, against=transformers.LlamaConfig(**LLAMA), progress=False)


@pytest.fixture(scope="module")
def law():
    """Of a Transformer of this library that collapses, from words, without gradients."""
    attention = lf.SoftmaxAttention(tau0=1.0, heads=2)
    model = lf.Transformer(width=16, depth=40, gamma=0.7, attention=attention)
    return check(model, lf.from_text(TEXT, width=16), samples=3, gradients=False, progress=False)


@pytest.fixture(scope="module")
def held_page(held):
    """Made once."""
    return held.page()


@pytest.fixture(scope="module")
def law_page(law):
    """Made once."""
    return law.page()


@pytest.fixture(scope="module")
def hostile(held):
    """Whatever has a name is called something that would run."""
    curves, band = (
        each.assign_coords(kind=[f"{kind}{HOSTILE}" for kind in each["kind"].values])
        for each in (held.curves, held.band)
    )
    data = held.data.assign_coords(word=("token", [HOSTILE] * held.data.sizes["token"]))
    laws = replace(held.laws, tied=dict.fromkeys(held.laws.laws, (HOSTILE,)))
    verdict = replace(held.verdicts[0], said=HOSTILE, why=HOSTILE, mends=HOSTILE, source=HOSTILE)
    found = replace(held, name=HOSTILE, curves=curves, band=band, data=data, laws=laws, verdicts=[verdict])
    about = {**held.about, HOSTILE: HOSTILE}
    return replace(found, about=about, against=replace(held.against, name=HOSTILE))


class Seen(HTMLParser):
    """Tags with attributes, and text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.scripts, self.inside = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside.append(tag)

    def handle_endtag(self, tag):
        if tag in self.inside:
            while self.inside.pop() != tag:
                pass

    def handle_data(self, data):
        (self.scripts if self.inside[-1:] == ["script"] else self.text).append(data)

    @property
    def said(self):
        """All text, as one."""
        return " ".join(" ".join(self.text).split())

    def count(self, name):
        """Of tags."""
        return sum(tag == name for tag, _ in self.tags)


def data_of(text):
    """What the script is given."""
    return json.loads(Seen(text).scripts[0])


# What it says


def test_verdicts_come_first_with_their_reasons(law, law_page):
    text = law_page
    said = Seen(text).said
    broken = [verdict for verdict in law.verdicts if verdict.grade == "broken"]
    assert broken
    assert text.index('id="verdict"') < text.index('id="curves"') < text.index('id="matrix"')
    for verdict in law.verdicts:
        for part in (verdict.said, verdict.why, verdict.mends, verdict.source, f"{verdict.share:.0%} of them"):
            assert " ".join(part.split()) in said
    assert text.count('class="card broken"') == len(broken)
    assert said.count("✗ broken") == len(broken)


def test_each_kind_of_verdict_is_told_in_words_too(law):
    text = replace(law, verdicts=[Verdict("fine", "fine", "fine: no threshold is reached")]).page()
    assert "✓ fine no threshold is reached" in Seen(text).said
    assert 'class="card broken"' not in text
    text = replace(law, verdicts=[replace(law.verdicts[0], grade="watch")]).page()
    assert "! watch" in Seen(text).said
    assert 'class="card watch"' in text


def test_what_is_about_initialisation_says_so(law_page, held_page):
    assert "This is about initialisation" in law_page
    assert "This is about initialisation" not in held_page
    assert "This is the network as it is" in held_page


def test_laws_thresholds_and_provenance_are_there(held, held_page):
    said = Seen(held_page).said
    for name, (number, shape, weight, _) in held.laws.alike().items():
        assert f"{name} {number} {shape} {weight}" in said
    for name, threshold in held.thresholds.items():
        numbers = " ".join(f"{each:g}" for each in (threshold.watch, threshold.broken) if each is not None)
        assert f"{name} {numbers} {threshold.source}" in said
    for name in ("seed", "samples", "dtype", "limitformer_version", "torch", "weights"):
        assert f"{name} {held.about[name]}" in said
    assert held.against.name in said


def test_findings_of_the_initialisation_are_shown_where_there_are_some(held, held_page, law_page):
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES))
    for block in model.transformer.h:
        torch.nn.init.zeros_(block.ln_1.weight)
    found = initialisation(model)
    said = Seen(replace(held, initialisation=found).page()).said
    assert found.findings
    for one in found.findings:
        assert one.bug
        assert f"{one.bug} {one.pattern} {one.entries} {one.law}" in said
        assert f"{one.why} {one.mend}" in said
    assert f"{held.name}: {found.summary}." in said
    assert f"{held.name}: {held.initialisation.summary}." in Seen(held_page).said
    assert "Findings on the weights" not in held_page
    assert "weight by weight" not in law_page


# That nothing from elsewhere gets in


def intruders(text):
    """What a page holds that it should not: other scripts, pictures, handlers, addresses."""
    seen = Seen(text)
    found = ["script"] * (seen.count("script") - 2) + ["img"] * seen.count("img") + ["b"] * seen.count("b")
    for tag, attributes in seen.tags:
        found += [f"{tag} {name}" for name in attributes if name.startswith("on")]
        places = [attributes.get(name) or "" for name in ("src", "href", "action", "data")]
        found += [f"{tag} {place}" for place in places if place and place != "data:,"]
    return found


def test_hostile_names_stay_text(hostile):
    text = hostile.page()
    assert intruders(text) == []
    said = Seen(text).said
    assert said.count(" ".join(HOSTILE.split())) > 10
    assert data_of(text)["matrices"][0]["words"][0] == HOSTILE
    assert data_of(text)["matrices"][0]["network"] == HOSTILE


@pytest.mark.parametrize("module", [pages, svg])
def test_names_that_are_not_escaped_are_found(module, hostile, monkeypatch):
    monkeypatch.setattr(module, "escape", str)
    assert intruders(hostile.page())


def test_json_that_is_not_escaped_is_found(hostile, monkeypatch):
    monkeypatch.setattr(pages, "as_json", json.dumps)
    assert intruders(hostile.page())


def test_nothing_is_loaded_and_only_its_own_script_may_run(held_page):
    text = held_page
    seen = Seen(text)
    policy = next(each["content"] for tag, each in seen.tags if tag == "meta" and "content" in each)
    digest = base64.b64encode(hashlib.sha256(seen.scripts[1].encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1]
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


# What the curves show


def drawn(text, title, kind):
    """Points (x, y) of a line in the units of its axes, by the numbers at its ticks."""
    start = text.index(f"<strong>{title}</strong>")
    figure = text[start : text.index("</figure>", start)]
    path = re.search(rf'<path class="line {kind}" d="([^"]*)"', figure)[1]
    at = np.array([[float(each) for each in pair.split(",")] for pair in re.findall(r"[-\d.]+,[-\d.]+", path)])
    labels = re.findall(r'<text x="([-\d.]+)" y="([-\d.]+)" text-anchor="(\w+)">([^<]*)</text>', figure)
    x = np.array([[float(a), float(text)] for a, _, anchor, text in labels[:-1] if anchor == "middle"])
    y = np.array([[float(b) - 4, float(text)] for _, b, anchor, text in labels if anchor == "end"])
    return at, x, y


def by_line(positions, ticks):
    """Numbers of positions between two ticks."""
    (a, low), (b, high) = ticks[0], ticks[-1]
    return low + (positions - a) / (b - a) * (high - low)


@pytest.mark.parametrize("kind", ["law", "own", "other"])
def test_a_line_is_where_its_numbers_are(kind, held, held_page):
    expected = {
        "law": held.band["correlation"].sel(edge="middle").values,
        "own": held.curves["correlation"].values[0],
        "other": np.median(held.against.curves["correlation"].values, 0),
    }[kind]
    at, x, y = drawn(held_page, "Correlation of tokens, mean", kind)
    assert by_line(at[:, 0], x) == pytest.approx(np.arange(len(expected)), abs=0.01)
    pixel = abs(y[-1, 1] - y[0, 1]) / abs(y[-1, 0] - y[0, 0])
    assert np.abs(by_line(at[:, 1], y) - expected).max() < 0.25 * pixel
    assert np.abs(by_line(at[:, 1], y) - expected[::-1]).max() > 5 * pixel  # the other way round it would be seen


def test_a_logarithmic_axis_is_one(law, law_page):
    at, _, y = drawn(law_page, "Effective rank of the tokens", "law")
    expected = law.band["effective_rank"].sel(edge="middle").values
    y[:, 1] = np.log(y[:, 1])
    assert by_line(at[:, 1], y) == pytest.approx(np.log(expected), abs=0.02)
    assert expected[0] > 5 * expected[-1]


def test_all_curves_are_drawn_and_those_of_each_kind_of_weight(held, held_page):
    text = held_page
    sublayers = held.curves.sizes["sublayer"]
    measured = [name for name in SHOWN if name in held.curves]
    kinds = {*held.curves["kind"].values, *held.against.curves["kind"].values}
    assert len(measured) == len(SHOWN)
    assert text.count('<figure class="plot">') == len(measured) + sublayers - 1 + len(kinds) + 1
    assert {f"<strong>{kind}</strong>" for kind in kinds} <= set(re.findall("<strong>.*?</strong>", text))
    assert f"{held.about['chance']:.4g}" in Seen(text).said


def test_without_gradients_nothing_of_them_is_shown(law_page):
    for part in ("Gradient", "<select", "Loss"):
        assert part not in law_page


def test_the_part_in_the_band_is_that_of_the_curve(held, held_page):
    own, band = held.curves["size"].values[0], held.band["size"]
    within = (own >= band.sel(edge="low").values) & (own <= band.sel(edge="high").values)
    start = held_page.index("<strong>Stream</strong>")
    assert f"{within.mean():.0%} within the law&#x27;s band" in held_page[start : start + 200]


def test_gaps_and_lone_points_are_told():
    x, y = np.arange(6.0), np.array([1.0, np.nan, 3.0, np.inf, 5.0, 6.0])
    text = svg.plot(svg.Panel("t", "", "layer", (svg.Line("law", "law", x, y),)))
    path = re.search(r'class="line law" d="([^"]*)"', text)[1]
    assert path.count("M") == 3
    assert text.count("<circle") == 2
    nothing = svg.plot(svg.Panel("t", "", "layer", (svg.Line("law", "law", x, x * np.nan),)))
    assert "nothing was measured" in nothing


@pytest.mark.parametrize(
    "values", [[1e-320, 1e300], [0.0, 0.0], [1.0, 1.0 + 1e-9], [-3.0, 2.0], [5e307, 1.7e308], [0.2, 3.0], [7.0]]
)
def test_ticks_are_inside_and_differ(values):
    scale = svg.scale_of(np.array(values), 100.0, 0.0)
    at = [position for position, _ in scale.ticks()]
    assert at
    assert all(0 <= position <= 100 for position in at)
    assert len({label for _, label in scale.ticks()}) == len(at)
    assert np.isfinite(scale(np.array(values))).all()


# What the coloured cells hold


def unpacked(text, tokens):
    """(token, token_) of one depth."""
    cells = np.frombuffer(base64.b64decode(text), np.int8)
    rho = np.zeros((tokens, tokens))
    rho[np.tril_indices(tokens)] = cells / 100
    return np.maximum(rho, rho.T) if (cells >= 0).all() else rho + np.tril(rho, -1).T


def test_matrices_are_the_correlations_by_token(held, held_page):
    found = data_of(held_page)["matrices"]
    assert [each["layers"] for each in found] == [list(range(4)), list(range(6))]
    for one, report in zip(found, (held, held.against), strict=True):
        for row, layer in zip(one["rows"], one["layers"], strict=True):
            v = report.data["covariance"].values[0, layer].astype(float)
            size = np.sqrt(np.diag(v))
            assert unpacked(row, len(v)) == pytest.approx(v / np.outer(size, size), abs=0.00501)
    assert found[0]["words"] == list(held.data["word"].values)


def large(layers=127, tokens=200, heads=128):
    """A report of random numbers as large as they come."""
    chance = np.random.default_rng(0)
    x = chance.normal(size=(1, layers, tokens, 8))
    dims = ("sample", "layer", "token", "token_")
    covariance = (dims, (x @ x.transpose(0, 1, 3, 2) / 8).astype(np.float32))
    by_head = (("sample", "block", "head"), chance.lognormal(size=(1, layers - 1, heads)))
    by_kind = (("sample", "weight"), chance.lognormal(size=(1, 16 * (layers - 1))))
    names = [f"model.layers.{k}.part_{kind}.weight" for k in range(layers - 1) for kind in range(16)]
    data = xr.Dataset(
        {"covariance": covariance, **dict.fromkeys(BY_HEAD, by_head), "weight_gradient": by_kind},
        {"layer": range(layers), "block": range(1, layers), "weight": names},
    )
    shown = curves(data).assign_attrs(tokens=tokens)
    return Report("large", False, shown, None, data, None, {"tokens": tokens}, thresholds=THRESHOLDS)


def test_a_large_network_gives_a_page_below_three_megabytes():
    text = large().page()
    one = data_of(text)["matrices"][0]
    assert len(text.encode()) < 3e6
    assert len(one["layers"]) == grids.DEPTHS
    assert (one["layers"][0], one["layers"][-1]) == (0, 126)
    assert (len(one["tokens"]), one["of"]) == (128, 200)
    assert (one["tokens"][0], one["tokens"][-1]) == (1, 200)


def test_heads_are_medians_by_head_and_block(held, held_page):
    found = data_of(held_page)["heads"]
    assert [each["network"] for each in found] == [held.name] * 3 + [held.against.name] * 3
    cells = np.array(found[4]["cells"])
    expected = np.median(held.against.curves["effective_tokens"].values, 0).T
    assert cells == pytest.approx(expected, rel=1e-4)
    assert cells.shape == (4, 5)


def test_what_is_unknown_is_null(held):
    values = held.curves["logit_std"].where(held.curves["block"] != 2)
    found = grids.grids([replace(held, curves=held.curves.assign(logit_std=values))])
    assert [row[1] for row in found["heads"][0]["cells"]] == [None] * 4
    covariance = held.data["covariance"].where(held.data["layer"] != 1)
    found = grids.matrices(replace(held, data=held.data.assign(covariance=covariance)))
    assert set(base64.b64decode(found["rows"][1])) == {grids.UNKNOWN % 256}


def test_only_the_first_sequence_is_shown(held):
    sequence = np.repeat([0, 1], [5, held.data.sizes["token"] - 5])
    found = grids.matrices(replace(held, data=held.data.assign_coords(sequence=("token", sequence))))
    assert found["tokens"] == [1, 2, 3, 4, 5]


def test_a_notebook_shows_the_page(law, law_page):
    assert Seen(law._repr_html_()).tags[0][1]["srcdoc"] == law_page


# In a browser


@pytest.fixture(scope="module")
def browser():
    """Headless, for all tests."""
    with launched() as found:
        yield found


@contextmanager
def opened(browser, text, folder, width=1280, scheme="light"):
    """The page at a width; what it complains of and asks for is in `.troubles`."""
    place = folder / "check.html"
    place.write_text(text, encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    tab = context.new_page()
    tab.troubles = []
    tab.on("console", lambda message: tab.troubles.append(message.text))
    tab.on("pageerror", lambda error: tab.troubles.append(str(error)))
    tab.on("request", lambda request: tab.troubles.append(request.url) if request.url != place.as_uri() else None)
    tab.goto(place.as_uri())
    yield tab
    context.close()


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


def test_every_plot_is_drawn_without_a_word_or_a_request(browser, held_page, tmp_path):
    with opened(browser, held_page, tmp_path) as tab:
        assert tab.troubles == []
        assert tab.evaluate(UNDRAWN) == []
        assert tab.locator("canvas:visible").count() == 2 + 6
        shown = tab.locator("svg[role=img]:visible").count()
        assert shown == len(SHOWN) + 1 + 1 + 1  # two sublayers, one kind of weight, the loss


def test_a_script_that_fails_is_seen(browser, held, tmp_path, monkeypatch):
    script = pages.asset("page.js")
    broken = script.replace("const matrix = data", "").replace("this.cell(pen, row, column);", "nothing();")
    assert broken != script
    monkeypatch.setattr(pages, "asset", lambda name, real=pages.asset: broken if name == "page.js" else real(name))
    with opened(browser, held.page(), tmp_path) as tab:
        assert tab.troubles
        assert tab.evaluate(UNDRAWN)


def test_the_slider_moves_the_picture_by_keys_and_back(browser, held_page, tmp_path):
    with opened(browser, held_page, tmp_path) as tab:
        slider = tab.get_by_role("slider", name="Depth")
        last, said = tab.evaluate(PICTURE), tab.locator("#depth-said").text_content()
        assert said == "layer 3 of 3."
        slider.focus()
        tab.keyboard.press("Home")
        assert tab.locator("#depth-said").text_content() == "layer 0 of 3."
        assert tab.evaluate(PICTURE) != last
        assert "layer 0 of 5" in tab.locator("#matrices figure").nth(1).text_content()
        tab.keyboard.press("End")
        assert tab.evaluate(PICTURE) == last
        assert tab.troubles == []


def test_cells_tell_the_correlations(browser, held, held_page, tmp_path):
    rho = lf.correlation(held.data).values[0, -1]
    words = held.data["word"].values
    with opened(browser, held_page, tmp_path) as tab:
        canvas = tab.locator("#matrices canvas").first
        canvas.focus()
        for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
            tab.keyboard.press(key)
        said = tab.locator("#matrices output").first.text_content()
        assert said == f"{words[3]} (4), {words[1]} (2): {rho[3, 1]:.2f}"
        box = canvas.bounding_box()
        tab.mouse.move(box["x"] + box["width"] - 2, box["y"] + box["height"] - 2)
        assert tab.locator("#matrices output").first.text_content().endswith(": 1.00")
        heads = tab.locator("#heads canvas").nth(1)
        heads.focus()
        tab.keyboard.press("ArrowRight")
        said = tab.locator("#heads output").nth(1).text_content()
        assert said == f"block 2, head 1: {float(held.curves['effective_tokens'][0, 1, 0]):.5g}"


def test_the_kind_of_weight_is_chosen(browser, held, held_page, tmp_path):
    kinds = list(dict.fromkeys([*held.curves["kind"].values, *held.against.curves["kind"].values]))
    with opened(browser, held_page, tmp_path) as tab:
        shown = tab.locator(".choice:visible figcaption strong")
        assert shown.all_text_contents() == [kinds[0]]
        tab.get_by_label("Kind of weight", exact=True).select_option(kinds[-1])
        assert shown.all_text_contents() == [kinds[-1]]


def test_hostile_names_do_nothing_in_a_browser(browser, hostile, tmp_path):
    with opened(browser, hostile.page(), tmp_path) as tab:
        assert tab.evaluate("window.hacked") is None
        assert tab.troubles == []
        assert tab.evaluate(UNDRAWN) == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
@pytest.mark.parametrize("which", ["held_page", "law_page"])
def test_it_fits_the_screen_and_can_be_read(browser, which, width, scheme, tmp_path, request):
    with opened(browser, request.getfixturevalue(which), tmp_path, width, scheme) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        assert tab.troubles == []
        ratio = tab.evaluate(CONTRAST)
        assert min(ratio.values()) >= 4.5, ratio
        folder = os.environ.get("LIMITFORMER_SCREENSHOTS")
        if folder:
            tab.screenshot(path=Path(folder) / f"check-{which}-{width}-{scheme}.png", full_page=True)


CONTRAST = """() => {
  const light = (text) => {
    const parts = text.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (each) => {
    const colour = getComputedStyle(each).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" ? behind(each.parentElement) : colour;
  };
  const found = {};
  for (const each of document.querySelectorAll("h1, p, .kind, .card h3, dt, dd, td, th, figcaption span, svg text")) {
    const style = getComputedStyle(each);
    const ink = each.namespaceURI.endsWith("svg") ? style.fill : style.color;
    const [a, b] = [light(ink), light(behind(each))];
    found[`${each.tagName} ${ink}`] = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }
  return found;
}"""


def test_in_print_it_is_dark_on_white(browser, held_page, tmp_path):
    with opened(browser, held_page, tmp_path, scheme="dark") as tab:
        tab.emulate_media(media="print", color_scheme="dark")
        colours = tab.evaluate("['color', 'backgroundColor'].map((each) => getComputedStyle(document.body)[each])")
        assert colours == ["rgb(0, 0, 0)", "rgb(255, 255, 255)"]
        assert tab.locator("details:visible").count() == 0
        assert len(tab.pdf()) > 1e4


def test_curves_need_no_script(browser, held_page, tmp_path):
    text = re.sub("<script>.*?</script>", "", held_page, flags=re.DOTALL)
    with opened(browser, text, tmp_path) as tab:
        shown = tab.locator("svg[role=img]:visible").count()
        assert shown == held_page.count('<figure class="plot">')
