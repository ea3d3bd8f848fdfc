"""Looks of printed figures: one size of type, legends off the data, curves that all readers can distinguish."""

import functools
from itertools import combinations

import numpy as np
import pytest
from docs.tools import front_picture
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.lines import Line2D
from PIL import Image

from limitformer.plot import ALONE, BLUE, RED, STYLE, WIDTH, style
from limitformer_papers import FIGURES
from limitformer_papers.beyond import foretells, stock_models
from limitformer_papers.beyond import study_analysis as analysis
from limitformer_papers.making import module_of
from limitformer_papers.shaped_transformer.st_fig4 import CASES, COVARIANCE_ONLY
from quick_figures import in_tiers

pytestmark = pytest.mark.xdist_group("figures")  # they share the figures

ONE_LEGEND = (
    *("st-fig2", "st-fig4", "ct-fig1", "ct-fig4", "ct-fig5", "ct-fig6", "ct-fig8", "ct-fig9", "ct-table1", "ct-euler"),
    *("lifetimes", "transition"),
)
APART = 10.0  # of 100 steps of lightness, or of colour as those see it who lack a cone

# Linear RGB as protanopes and deuteranopes see it [Machado, Oliveira, Fernandes, IEEE TVCG 15 (2009), severity 1].
CONES = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def draw(name, data):
    with style():
        drawing = module_of(name).draw(data)
        FigureCanvasAgg(drawing).draw()
    return drawing


@pytest.fixture(scope="module")
def drawings(figures):
    """Return the drawing of a figure at quick scale, laid out, by the figure's name."""
    return functools.cache(lambda name: draw(name, figures[name].data))


def is_bar(axes):
    return axes.get_label() == "<colorbar>"


def legends_of(drawing):
    return [one for one in [*drawing.legends, *(axes.get_legend() for axes in drawing.axes)] if one]


# Sizes of type.


def sizes(drawing):
    """Return the sizes of each kind of visible text."""
    fonts = {}
    for axes in drawing.axes:
        ticks = "ticks of bars" if is_bar(axes) else "ticks"
        texts = {
            "labels": [axes.xaxis.label, axes.yaxis.label],
            f"{ticks} x": axes.get_xticklabels(),
            f"{ticks} y": axes.get_yticklabels(),
            "titles": [axes.title, axes._left_title, axes._right_title],
            "words": axes.texts,
        }
        for kind, group in texts.items():
            fonts.setdefault(kind, set()).update(one.get_fontsize() for one in group if one.get_text())
    fonts["legends"] = {text.get_fontsize() for legend in legends_of(drawing) for text in legend.get_texts()}
    return {kind: several for kind, several in fonts.items() if several}


@pytest.mark.parametrize("name", in_tiers())
def test_panels_share_font_sizes_and_widths(drawings, name):
    """Type has one size in all figures on a page of fixed width."""
    assert drawings(name).get_size_inches()[0] in (pytest.approx(WIDTH), pytest.approx(ALONE))
    found = sizes(drawings(name))
    assert all(len(several) == 1 for several in found.values()), found
    if name != "ct-fig5":  # a diagram, without axes
        assert found["labels"] == {STYLE["axes.labelsize"]}
    assert found.get("legends", {STYLE["legend.fontsize"]}) == {STYLE["legend.fontsize"]}
    assert min(min(several) for several in found.values()) >= 7.5


# The picture of the first page.

LEAST_PIXELS = 10.0


def pixels(drawing, width):
    """Return the smallest type in pixels of CSS, in a picture that is shown `width` pixels wide."""
    least = min(min(several) for several in sizes(drawing).values())
    return least * width / (72 * drawing.get_size_inches()[0])


@pytest.fixture(scope="module")
def front(figures):
    drawing = front_picture.draw(figures["st-fig1"].data)
    FigureCanvasAgg(drawing).draw()
    return drawing


def test_front_picture_is_legible_on_a_phone(front):
    rates = front_picture.draw_rates(analysis.load(foretells.STORED))
    FigureCanvasAgg(rates).draw()
    for drawing, name, page in ((front, "rank-collapse", "docs/index.md"), (rates, "rates", "README.md")):
        assert pixels(drawing, front_picture.PHONE) > LEAST_PIXELS
        with Image.open(front_picture.ASSETS / f"{name}.png") as picture:
            assert picture.width == 2 * front_picture.SHOWN
        text = (front_picture.ASSETS.parents[1] / page).read_text(encoding="utf-8")
        assert f"{name}.png" in text
        assert f'width="{front_picture.SHOWN}"' in text


def test_front_picture_names_its_lines_beside_them(front):
    """No name lies on another one or leaves the panel."""
    renderer, (axes,) = front.canvas.get_renderer(), front.axes
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    assert len(boxes) == len(front_picture.NAMES)
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    panel = axes.get_window_extent(renderer)
    assert all(panel.x0 < box.x0 and box.x1 < panel.x1 and box.y1 < panel.y1 for box in boxes)


# Labels and legends.


@pytest.mark.parametrize(
    "name", in_tiers(name for name in FIGURES if name not in ("text-fate", "ct-fig5", "stock-models"))
)
def test_axes_are_labelled(drawings, name):
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in drawings(name).axes if not is_bar(axes))
    assert all(axes.has_data() for axes in drawings(name).axes)


def crossings(drawing):
    """Count legends that lie on a panel, and panels whose labels lie on another panel."""
    renderer = drawing.canvas.get_renderer()
    inner = [axes.get_window_extent(renderer) for axes in drawing.axes]
    outer = [axes.get_tightbbox(renderer) for axes in drawing.axes]
    boxes = [legend.get_window_extent(renderer) for legend in legends_of(drawing)]
    on_data = sum(legend.overlaps(panel) for legend in boxes for panel in inner)
    touching = sum(outer[k].overlaps(inner[j]) for k in range(len(inner)) for j in range(len(inner)) if j != k)
    return on_data, touching


@pytest.mark.parametrize("name", in_tiers())
def test_legends_are_off_the_panels_and_have_distinct_labels(drawings, name):
    assert crossings(drawings(name)) == (0, 0)
    legends = legends_of(drawings(name))
    labels = [text.get_text() for legend in legends for text in legend.get_texts()]
    assert len(labels) == len(set(labels))
    if name in ONE_LEGEND:
        assert len(legends) == 1


# Curves.


def linear(colour):
    s = np.array(to_rgb(colour))
    return np.where(s <= 0.04045, s / 12.92, ((s + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """Return CIE L*a*b* of linear RGB."""
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / TO_XYZ.sum(1)
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distinguishable(first, second):
    """Return whether two colours differ in grey, and to readers who lack a cone."""
    pair = [linear(colour) for colour in (first, second)]
    grey = abs(lab(pair[0])[0] - lab(pair[1])[0])
    seen = [np.linalg.norm(lab(cones @ pair[0]) - lab(cones @ pair[1])) for cones in map(np.array, CONES.values())]
    return min(grey, *seen) >= APART


def look(handle):
    """Return kind, line, marker, width and colour of a legend's entry."""
    if isinstance(handle, ErrorbarContainer):
        handle = handle[0]
    if isinstance(handle, Line2D):
        return ("line", handle.get_linestyle(), handle.get_marker(), handle.get_linewidth(), to_hex(handle.get_color()))
    patch = handle[0] if isinstance(handle, BarContainer) else handle
    return ("area", "", "", 1.0, to_hex(np.ravel(patch.get_facecolor())[:3]))


def alike(first, second):
    """Return whether two looks differ only in colours that some readers cannot distinguish."""
    same = first[:3] == second[:3] and max(first[3], second[3]) < 1.5 * min(first[3], second[3])
    return same and not distinguishable(first[4], second[4])


def confused(drawing):
    """Return pairs of curves of one panel that look alike."""
    matches = []
    for axes in drawing.axes:
        entries = list(zip(*axes.get_legend_handles_labels(), strict=True))
        matches += [(a, b) for (x, a), (y, b) in combinations(entries, 2) if alike(look(x), look(y))]
    return matches


@pytest.mark.parametrize("name", in_tiers())
def test_curves_differ_in_grey_and_to_colour_blind_readers(drawings, name):
    assert confused(drawings(name)) == []


def test_wrong_twin_colours_of_one_grey_are_detected():
    assert not distinguishable(BLUE, RED)  # in grey
    assert not distinguishable("#FF0000", "#008000")  # red and green
    assert distinguishable("#000000", "#56B4E9")


# What single figures are to show.


@pytest.mark.parametrize("name", in_tiers(["st-fig1", "st-fig3"]))
def test_drawn_densities_integrate_to_one(drawings, name):
    """They integrate to 1 and vanish at ±1."""
    axes = drawings(name).axes[1 if name == "st-fig1" else 0]
    drawn = [line.get_xydata() for line in axes.lines if len(line.get_xydata())]
    assert len(drawn) >= 2
    for points in drawn:
        assert np.trapezoid(points[:, 1], points[:, 0]) == pytest.approx(1, abs=2e-3)
        assert points[[0, -1], 1].max() < 1e-6
        assert (1 - abs(points[[0, -1], 0])).max() < 1e-6


def test_st_fig4_draws_the_median_as_main_line(figures, drawings):
    axes, data = drawings("st-fig4").axes[1], figures["st-fig4"].data
    named = [line for line in axes.lines if not line.get_label().startswith("_") and len(line.get_xdata())]
    thin = [line for line in axes.lines if line.get_label().startswith("_")]
    for case, line, other in zip(CASES, named, thin, strict=True):
        np.testing.assert_array_equal(line.get_ydata(), data["median_covariance"].sel(case=case).values)
        np.testing.assert_array_equal(other.get_ydata(), data["covariance"].sel(case=case).values)
        assert line.get_linewidth() > 2 * other.get_linewidth()
    assert axes.get_ylabel() == "median |V|"
    shown = len([line for line in drawings("st-fig4").axes[0].lines if len(line.get_xdata())])
    assert shown == len(CASES) - len(COVARIANCE_ONLY)


@pytest.mark.slow
def test_ct_fig4_has_one_colour_scale(drawings):
    drawing = drawings("ct-fig4")
    assert sum(map(is_bar, drawing.axes)) == 1
    images = [axes.collections[0] for axes in drawing.axes if not is_bar(axes)]
    assert {(image.cmap.name, *image.get_clim()) for image in images} == {("outcome", -1.0, 1.0)}
    single, neither, antipodal = (lab(linear(images[0].cmap(images[0].norm(at))[:3]))[0] for at in (-1.0, 0.0, 1.0))
    assert neither > 99
    assert single - antipodal > 2 * APART


def test_stock_models_names_at_most_six_lines_in_a_panel(drawings):
    """Each model has its name in one column, and a grey line in every panel."""
    models = list(stock_models.paper().models)
    columns = stock_models.groups(models)
    assert sorted(name for names in columns.values() for name in names) == sorted(models)
    assert max(map(len, columns.values())) <= 6
    quick = len(stock_models.quick().models)
    for axes in drawings("stock-models").axes:
        grey = [line for line in axes.lines if to_hex(line.get_color()) == to_hex("0.82")]
        assert len(grey) == quick
        assert 1 <= len(axes.lines) - quick < quick
