"""The explorer: its numbers are those of the library; its pages show them offline, by keys and on a telephone.

`LIMITFORMER_SCREENSHOTS=folder` saves pictures of the pages at two widths. Without a Chromium the tests of the browser
are skipped.
"""

import functools
import json
import os
import re
from dataclasses import replace
from math import prod, sqrt
from pathlib import Path

import numpy as np
import pytest
from docs.tools import explorer

from chromium import launched
from limitformer.base.errors import InputError
from limitformer_papers.explorer import covariance, make, parts, sphere, stock
from pages_read import CONTRAST, opened

MOST = 8 * 2**20  # bytes of all pages with numbers
OTHER_STEPS = 0.02  # largest change of a quantile if some paths differ
NEAR = 2e-3  # two processors may differ in the last of four digits


@functools.cache
def page(name):
    """Return the stored numbers of a page."""
    return json.loads(explorer.read(f"{name}.json"))


def axis(data, name):
    return next(each for each in data["axes"] if each["name"] == name)


def cell_of(data, part, **values):
    """Return the cell of a plot or a fact where the axes have these values."""
    index = 0
    for name in part["by"]:
        known = axis(data, name)["values"]
        index = index * len(known) + known.index(values[name])
    return part["cells"][index]


def plot_of(data, title, **only):
    (plot,) = [each for each in data["plots"] if each["title"] == title and each.get("only", {}) == only]
    return plot


# Contents of the files.


@pytest.mark.parametrize("name", make.PAGES)
def test_page_data_are_of_this_version_and_settings(name):
    """If this fails, run `make explorer`."""
    assert make.is_current(explorer.FOLDER / f"{name}.json", make.module_of(name).Config())
    assert page(name)["page"] == name
    assert set(page(name)["about"]) == {"limitformer_version", "seed", "samples", "command", "settings"}


@pytest.mark.parametrize("name", make.PAGES)
def test_parts_have_a_cell_for_every_choice(name):
    data = page(name)
    sizes = {each["name"]: len(each["values"]) for each in data["axes"]}
    assert len(sizes) == len(data["axes"])
    for each in data["axes"]:
        assert 0 <= each["start"] < len(each["values"]) == len(set(each["values"]))
        assert len(each.get("texts", each["values"])) == len(each["values"])
    for part in [*data["plots"], *data["facts"], *data.get("sphere", {}).get("sets", [])]:
        assert len(part["cells"]) == prod(sizes[each] for each in part["by"])
        assert all(value in axis(data, each)["values"] for each, value in part.get("only", {}).items())


def test_pages_are_small(tmp_path):
    explorer.write(tmp_path)
    files = [*explorer.FOLDER.glob("*.*"), *tmp_path.iterdir()]
    assert sum(path.stat().st_size for path in files) <= MOST


# Numbers of the library.


def parts_of(data, small):
    """Yield each stored cell with the same cell computed for a part of the grid."""
    by_name = {each["name"]: each["values"] for each in small["axes"]}
    for place, plot in enumerate(small["plots"]):
        stored = data["plots"][place]
        assert stored["title"] == plot["title"]
        for index, cell in enumerate(plot["cells"]):
            places = np.unravel_index(index, [len(by_name[each]) for each in plot["by"]])
            values = {each: by_name[each][k] for each, k in zip(plot["by"], places, strict=True)}
            yield cell_of(data, stored, **values), cell


def close(stored, found, tolerance):
    """Return where values agree; None counts as NaN."""
    return np.isclose(np.array(stored, float), np.array(found, float), rtol=tolerance, atol=tolerance, equal_nan=True)


def same(stored, found):
    return close(stored, found, NEAR).all()


def of_the_same_paths(pairs):
    """Return whether cells have the same paths, of which one in a hundred may differ by the processor.

    Rounding decides on the length of their steps. It moves some quantiles: 3 of 2,952, by one hundredth.
    """
    near = np.concatenate([close(*pair, NEAR).ravel() for pair in pairs])
    return near.mean() > 0.995 and all(close(*pair, OTHER_STEPS).all() for pair in pairs)


def mean_distance(pairs):
    return np.mean([np.abs(np.array(stored, float) - np.array(found, float)) for stored, found in pairs])


def test_covariances_equal_a_new_sweep():
    """A part of the grid suffices: a cell's numbers do not depend on the others."""
    part = {"gammas": (0.6, 0.9), "tau0s": (0.5, 1.0), "tokens": (2, 4), "layers": ("attention",)}
    result = covariance.compute(replace(covariance.Config(), **part), make.SEED, None)
    pairs = list(parts_of(page("covariance"), result))
    assert len(pairs) == 3 * 8
    two, correlations = pairs[::2], pairs[1:8:2]  # of two tokens, and of four
    assert of_the_same_paths(two)
    assert not of_the_same_paths([*two[1:], (two[0][0], two[1][1])])
    # The paths of four tokens differ between processors, and have the same law; these are quantiles of 512 paths.
    other_gammas = [
        (one, found) for (one, _), (_, found) in zip(correlations, correlations[2:] + correlations[:2], strict=True)
    ]
    assert mean_distance(correlations) < 0.03 < mean_distance(other_gammas)


def test_counted_explosions_equal_the_closed_form():
    """Two tokens with attention only have a closed form; that of another τ₀ is a wrong twin."""
    data = page("covariance")
    plot = plot_of(data, "Probability of an explosion")
    n = data["about"]["settings"]["samples"]
    for tau0, other, fits in ((0.5, 0.5, True), (1.0, 1.0, True), (2.0, 2.0, True), (0.5, 2.0, False)):
        worst = 0.0
        for gamma in axis(data, "gamma")["values"]:
            share = cell_of(data, plot, layer="attention", gamma=gamma, tau0=tau0, tokens=2)[1]
            exact = cell_of(data, plot, layer="attention", gamma=gamma, tau0=other, tokens=2)[4]
            errors = [sqrt(p * (1 - p) / n) + 1 / n for p in exact]
            worst = max(worst, *(abs(a - p) / error for a, p, error in zip(share, exact, errors, strict=True)))
        assert (worst < 4) == fits, worst


def test_fates_equal_the_overlap():
    part = {"dims": (4,), "betas": (2.0,), "sigmas": (2.0,), "epsilons": (0.9, 1.2), "tokens": (2,)}
    result = sphere.compute(replace(sphere.Config(), **part), make.SEED, None)
    assert all(same(*pair) for pair in parts_of(page("sphere"), result))
    fate = plot_of(page("sphere"), sphere.FATE, **sphere.STOCHASTIC)
    at = fate["at"].index(2.0)
    assert cell_of(page("sphere"), fate, dim=4)[0][at] == 0.2811  # docs/api: lf.phase_diagram


def test_trajectories_equal_the_chain():
    data, config = page("sphere"), replace(sphere.Config(), betas=(2.0,), sigmas=(2.0,), tokens=(2,))
    (model,) = sphere.models(config, "stochastic")
    for run, tokens in enumerate(sphere.trajectories(config, model, make.SEED)):
        stored = cell_of(data, data["sphere"]["sets"][0], beta=2.0, sigma=2.0, tokens=2, run=run + 1)
        assert np.abs(np.array(stored) - np.array(sphere.thousandths(tokens))).max() <= 1


def test_stock_shapes_equal_check():
    config = replace(stock.Config(), families=("llama",), widths=(128,), depths=(6,), ranges=(0.02,))
    result = stock.compute(config, make.SEED, None)
    assert all(same(*pair) for pair in parts_of(page("stock"), result))
    chosen = {"family": "llama", "width": 128, "depth": 6, "range": 0.02}
    assert cell_of(page("stock"), page("stock")["facts"][0], **chosen) == result["facts"][0]["cells"][0]


# Making the files.


def test_rounded_numbers_are_short_or_null():
    assert parts.rounded([[np.inf, np.nan, -np.inf], [123456.0, 0.000123456, -3.0]]) == [
        [None] * 3,
        [123500.0, 0.0001235, -3],
    ]


def test_finished_cells_are_not_computed_again(tmp_path):
    asked = []
    for key in (1, 1, 2):
        assert parts.cached(asked.append, tmp_path)(key) is None
    assert asked == [1, 2]


def test_page_is_made_only_if_outdated(tmp_path):
    config = replace(
        sphere.Config(), dims=(3, 4, 6), betas=(1.0,), fine_betas=(1.0,), sigmas=(1.0,), epsilons=(0.5, 1.0)
    )
    config = replace(config, fine_epsilons=(0.5, 1.0), tokens=(2,), runs=1, times=(0.0, 1.0))
    assert make.make_page("sphere", tmp_path, config)
    assert not make.make_page("sphere", tmp_path, config)
    assert make.make_page("sphere", tmp_path, replace(config, betas=(1.5,), fine_betas=(1.5,)))
    assert [path.name for path in tmp_path.iterdir()] == ["sphere.json"]
    with pytest.raises(InputError, match="no page 'spere'"):
        make.module_of("spere")


# In a browser.


@pytest.fixture(scope="module")
def browser():
    with launched() as found:
        yield found


UNDRAWN = """() => [...document.querySelectorAll("figure:not([hidden]) > svg")].filter((plot) => {
  const shapes = [...plot.querySelectorAll(".line, .path")].map((each) => each.getBoundingClientRect());
  return !shapes.some((box) => box.width + box.height > 20);
}).map((plot) => plot.getAttribute("aria-label"))"""
SHAPES = "[...document.querySelectorAll('figure:not([hidden]) path')].map((each) => each.getAttribute('d')).join()"
READ = "h1, p, a, legend, label, output, dt, dd, strong, .legend span, summary, figure > svg text:not(.name)"
SLIDERS = {"covariance": "Residual strength γ", "sphere": "Inverse temperature β", "stock": "initializer_range"}


@pytest.mark.parametrize("name", make.PAGES)
def test_page_draws_every_curve_without_requests(browser, name, tmp_path):
    with opened(browser, explorer.single_file(name), tmp_path) as tab:
        assert tab.troubles == []
        assert tab.evaluate(UNDRAWN) == []
        visible = len([plot for plot in page(name)["plots"] if plot.get("only") in (None, sphere.STOCHASTIC)]) + (
            name == "sphere"
        )
        assert tab.locator("figure:visible").count() == visible
        assert page(name)["about"]["samples"] in tab.locator(".about").inner_text()


@pytest.mark.parametrize("name", make.PAGES)
def test_slider_works_by_keys_and_its_address_restores_the_picture(browser, name, tmp_path):
    with opened(browser, explorer.single_file(name), tmp_path) as tab:
        slider = tab.get_by_role("slider", name=SLIDERS[name])
        first = tab.evaluate(SHAPES)
        slider.focus()
        tab.keyboard.press("ArrowRight")
        moved, view = tab.evaluate(SHAPES), tab.evaluate("location.hash")
        assert moved != first
        tab.keyboard.press("ArrowLeft")
        assert tab.evaluate(SHAPES) == first
        assert tab.troubles == []
    with opened(browser, explorer.single_file(name), tmp_path, view=view) as tab:
        assert tab.evaluate(SHAPES) == moved
        assert tab.troubles == []


def test_readout_shows_computed_numbers(browser, tmp_path):
    data, chosen = page("covariance"), {"layer": "both", "gamma": 0.8, "tau0": 0.5, "tokens": 8}
    low, middle, high = (each[30] for each in cell_of(data, data["plots"][0], **chosen))
    view = "#" + "&".join(f"{name}={value}" for name, value in (chosen | {"ratio": 1.5}).items())
    with opened(browser, explorer.single_file("covariance"), tmp_path, view=view) as tab:
        said = tab.locator(".said").first.text_content().replace("−", "-")
        assert said == f"depth/width 1.5: median {middle}, 5 to 95 % of paths {low} to {high}"
        tab.locator("summary").first.click()
        row = tab.locator("details tbody tr").nth(30).inner_text().replace("−", "-").split()
        assert row == [str(each) for each in (1.5, middle, low, high)]


def test_plot_is_read_by_keys(browser, tmp_path):
    """Stock shapes have no slider over layers."""
    with opened(browser, explorer.single_file("stock"), tmp_path) as tab:
        plot = tab.locator("figure > svg").first
        plot.focus()
        tab.keyboard.press("ArrowRight")
        tab.keyboard.press("ArrowRight")
        assert tab.locator(".said").first.text_content().startswith("layer 1: middle of the law ")


def test_sphere_turns_by_keys_and_pointer(browser, tmp_path):
    with opened(browser, explorer.single_file("sphere"), tmp_path) as tab:
        ball, before = tab.locator("svg.sphere"), tab.evaluate(SHAPES)
        said = tab.locator(".said").first.text_content()
        ball.focus()
        tab.keyboard.press("ArrowLeft")
        by_keys = tab.evaluate(SHAPES)
        assert by_keys != before
        assert "turn=20%2C20" in tab.evaluate("location.hash")
        box = ball.bounding_box()
        tab.mouse.move(box["x"] + 100, box["y"] + 100)
        tab.mouse.down()
        tab.mouse.move(box["x"] + 160, box["y"] + 120, steps=4)
        tab.mouse.up()
        assert tab.evaluate(SHAPES) != by_keys
        assert tab.locator(".said").first.text_content() == said  # overlaps do not turn
        tab.get_by_label("Kind").select_option(label="hybrid (ε)")
        assert tab.get_by_role("slider", name="Noise ε").is_visible()
        assert not tab.get_by_role("slider", name="Noise σ").is_visible()
        assert tab.evaluate(UNDRAWN) == []
        assert tab.troubles == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
@pytest.mark.parametrize("name", make.PAGES)
def test_page_fits_the_screen_and_is_legible(browser, name, width, scheme, tmp_path):
    with opened(browser, explorer.single_file(name), tmp_path, width, scheme, has_touch=width < 400) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        assert min(tab.evaluate(CONTRAST, READ).values()) >= 4.5
        controls = tab.locator("input:visible, select:visible").evaluate_all(
            "all => all.map((one) => one.labels.length)"
        )
        assert controls == [1] * len(controls)
        assert tab.troubles == []
        if folder := os.environ.get("LIMITFORMER_SCREENSHOTS"):
            tab.screenshot(path=Path(folder) / f"explorer-{name}-{width}-{scheme}.png", full_page=True)


def test_single_file_page_loads_nothing():
    for name in make.PAGES:
        text = explorer.single_file(name)
        assert not re.search(r'<(?:script|img|link|iframe)[^>]+(?:src|href)="(?!data:)', text)
        assert text.count("<script") == 2
