"""Every figure at quick scale: its files, its claims, its drawing, and failures that must leave no files."""

import importlib
import json

import numpy as np
import pytest
from PIL import Image
from scipy.stats import sem

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.plot import style
from limitformer_papers import FIGURES, make
from limitformer_papers.beyond.lifetimes import mean_and_error
from limitformer_papers.common.claims import FigureRun, ks_claim, ks_noise
from limitformer_papers.making import module_of
from quick_figures import SEED, in_tiers

pytestmark = pytest.mark.xdist_group("figures")  # they share the figures


@pytest.fixture
def no_work(monkeypatch):
    """Fail if a figure is computed."""
    for name in FIGURES:
        monkeypatch.setattr(module_of(name), "compute", lambda *_: pytest.fail("work was done"))


def record_of(folder, name):
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", in_tiers())
def test_files_have_picture_data_claims_and_config(figures, name):
    folder = figures[name].paths[0].parent
    assert {path.suffix for path in folder.glob(f"{name}.*")} == {".png", ".nc", ".json"}
    picture_, data_, record_ = (folder / f"{name}.{ending}" for ending in ("png", "nc", "json"))
    assert figures[name].paths == [picture_, data_, record_]
    with Image.open(picture_) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 400
        some = np.asarray(picture.convert("RGB"))[::3, ::3].astype(int) @ [65536, 256, 1]
        assert len(np.unique(some)) > 20  # colours
    loaded, data, claims = lf.load(data_), figures[name].data, figures[name].claims
    assert set(loaded.variables) == set(data.variables)
    for variable in data.variables:
        np.testing.assert_array_equal(loaded[variable].values, data[variable].values)
    assert module_of(name).claims(loaded) == claims
    record = record_of(folder, name)
    assert (record["figure"], record["scale"], record["seed"]) == (name, "quick", SEED)
    assert (record["shows"], record["config"]) == (FIGURES[name], json.loads(data.attrs["config"]))
    assert record["config"]["samples"] == module_of(name).quick().samples
    assert [(c["name"], c["value"], c["holds"]) for c in record["claims"]] == [
        (c.name, c.value if np.isfinite(c.value) else str(c.value), c.holds) for c in claims
    ]


@pytest.mark.parametrize("name", in_tiers())
def test_every_claim_holds(figures, name):
    judged = [claim for claim in figures[name].claims if claim.holds is not None]
    assert judged
    assert [claim for claim in judged if not claim.holds] == []
    assert all(isinstance(claim.holds, bool) for claim in judged)
    assert len({claim.name for claim in figures[name].claims}) == len(figures[name].claims)


def test_wrong_twin_diagram_without_a_box_is_rejected(monkeypatch):
    """Without 1/√L, or with the normalisation before the sum, the boxes do not make the chain's layer."""
    module = importlib.import_module("limitformer_papers.clustering.ct_fig5")
    a, v, scale, add, norm = module.BOXES
    for boxes in ((a, v, add, norm), (a, v, scale, norm, add)):
        monkeypatch.setattr(module, "BOXES", boxes)
        claims = module.claims(module.compute(module.quick(), FigureRun(SEED, 2)))
        assert claims[0].holds is False


def test_drawing_does_not_change_the_style(figures):
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    with style():
        module_of("st-fig7").draw(figures["st-fig7"].data)
    assert dict(mpl.rcParams) == before


def test_numbers_do_not_depend_on_threads():
    module = module_of("st-fig7")
    one, two, other = (module.compute(module.quick(), FigureRun(*run)) for run in ((3, 1), (3, 2), (4, 2)))
    np.testing.assert_array_equal(one["network"].values, two["network"].values)
    np.testing.assert_array_equal(one["sde"].values, two["sde"].values)
    assert (one["network"].values != other["network"].values).any()


def small_grid():
    return module_of("ct-fig6").Config(tokens=(2, 3), betas=(0.0, 6.0), times=(1.0, 2.0), samples=8)


def test_interrupted_grid_resumes(tmp_path, monkeypatch):
    """Finished cells are not computed again, and the numbers are those of an uninterrupted run."""
    module, work = module_of("ct-fig6"), importlib.import_module("limitformer.sweep.run")
    compute, began = work.compute, []

    def stopping(sweep, cell, **options):
        if "samples" in options:  # the trial of a new store
            return compute(sweep, cell, **options)
        began.append(cell.model)
        if len(began) == 3:
            raise KeyboardInterrupt
        return compute(sweep, cell, **options)

    monkeypatch.setattr(work, "compute", stopping)
    run = FigureRun(seed=2, threads=1, stores=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        module.compute(small_grid(), run)
    data = module.compute(small_grid(), run)
    assert len(began) == 5  # two, the one that was stopped, and the two that were left
    whole = module.compute(small_grid(), FigureRun(seed=2, threads=2))
    for name in ("probability", "equal"):
        np.testing.assert_array_equal(data[name].values, whole[name].values)


# Claims that can fail: for each figure, data in which what the paper says is false.


def swapped(data, dim, first, second):
    """`data` with the values of two labels of `dim` exchanged."""
    order = [{first: second, second: first}.get(label, label) for label in data[dim].values]
    return data.sel({dim: order}).assign_coords({dim: data[dim].values})


def reversed_along(data, dim):
    """`data` with the values along `dim` in the opposite order."""
    return data.isel({dim: slice(None, None, -1)}).assign_coords({dim: data[dim].values})


def flatter(data):
    """`data` with SDE samples of a law that is more concentrated."""
    return data.assign(sde=data["sde"] * 0.6)


TWINS = {
    "st-fig1, shaped and unshaped": ("st-fig1", lambda d: swapped(d, "model", "shaped", "unshaped"), "mean |ρ|"),
    "st-fig1, shaped and Pre-LN": ("st-fig1", lambda d: swapped(d, "model", "shaped", "unshaped + Pre-LN"), "Pre-LN"),
    "st-fig1, another SDE": ("st-fig1", flatter, "KS distance"),
    "st-fig2, shaped and Pre-LN": ("st-fig2", lambda d: swapped(d, "model", "shaped", "Pre-LN"), "vanishes"),
    "st-fig2, a layer without gradient": (
        "st-fig2",
        lambda d: d.assign(norm=d["norm"].where(d.layer > 1, 1e-9)),
        "stable",
    ),
    "st-fig3, SDE of another γ": ("st-fig3", lambda d: d.assign(sde=d["sde"].roll(gamma=1)), "KS"),
    "st-fig3, γ backwards": ("st-fig3", lambda d: reversed_along(d, "gamma"), "it rises"),
    "st-fig4, shaped and only id": ("st-fig4", lambda d: swapped(d, "case", "shaped", "only id"), "only id"),
    "st-fig5, γ backwards": ("st-fig5", lambda d: reversed_along(d, "gamma"), "it falls"),
    "st-fig5, never stable": ("st-fig5", lambda d: d.assign(stopping_time=d["stopping_time"] * 0.5), "smallest"),
    "st-fig7, another SDE": ("st-fig7", flatter, "V of two tokens"),
    "st-fig7, V for the variance": ("st-fig7", lambda d: d.assign(sde_variance=d["sde"]), "variance"),
    "st-fig8, γ backwards": ("st-fig8", lambda d: reversed_along(d, "gamma"), "γ to the next, γ ≤"),
    "st-fig8, τ₀ backwards": ("st-fig8", lambda d: reversed_along(d, "tau0"), "τ₀ to the next"),
    "text-fate, shaped and unshaped": ("text-fate", lambda d: swapped(d, "model", "shaped", "unshaped"), "shaped"),
    "text-fate, words that part": ("text-fate", lambda d: d.assign(correlation=d["correlation"] * 0.999), "one word"),
    "ct-fig1, not projected": ("ct-fig1", lambda d: d.assign(tangent=d["field"]), "tangential"),
    "ct-fig1, flow backwards": ("ct-fig1", lambda d: d.assign(speed=-d["speed"]), "stable point of the flow"),
    "ct-fig3, β backwards": (
        "ct-fig3",
        lambda d: d.assign(probability=reversed_along(d["probability"], "beta")),
        "threshold",
    ),
    "ct-fig3, another limit": ("ct-fig3", lambda d: d.assign(bias=d["bias"] + 0.2), "standard errors"),
    "ct-fig4, outcomes exchanged": (
        "ct-fig4",
        lambda d: swapped(d, "outcome", "single cluster", "antipodal pair"),
        "dominant outcome",
    ),
    "ct-fig4, exponents exchanged": ("ct-fig4", lambda d: d.assign(minus=d["plus"], plus=d["minus"]), "exponents"),
    "ct-fig6, two and three tokens": ("ct-fig6", lambda d: swapped(d, "tokens", 2, 3), "N = 3"),
    "ct-fig6, β backwards": ("ct-fig6", lambda d: reversed_along(d, "beta"), "β = 0"),
    "ct-fig6, another lifetime": ("ct-fig6", lambda d: d.assign(lifetime=d["lifetime"] / 1e5), "predicted"),
    "ct-fig7, time backwards": ("ct-fig7", lambda d: reversed_along(d, "time"), "unresolved"),
    "ct-fig7, no antipodal state": ("ct-fig7", lambda d: d.assign(antipodal=d["antipodal"] * 0), "it is positive"),
    "ct-fig8, d exchanged": (
        "ct-fig8",
        lambda d: d.assign(chain=swapped(d["chain"], "dim", 4, 6)),
        "below the thresholds",
    ),
    "ct-fig9, models exchanged": (
        "ct-fig9",
        lambda d: swapped(d, "model", "stochastic", "deterministic"),
        "much faster",
    ),
    "ct-fig9, β exchanged": ("ct-fig9", lambda d: swapped(d, "beta", 0.5, 4.5), "comparable"),
    "ct-fig5, attention of each token alone": ("ct-fig5", lambda d: d.assign(follows=d["follows"] * 0), "attention"),
    "ct-fig5, boxes that mix": ("ct-fig5", lambda d: d.assign(follows=d["follows"] * 0 + 1), "any other box"),
    "ct-fig5, no normalisation": ("ct-fig5", lambda d: d.assign(length=d["length"] * 1.1), "behind RMSNorm"),
    "ct-fig5, another layer": ("ct-fig5", lambda d: d.assign(boxes=d["boxes"] * 0.7), "KS distance"),
    "ct-table1, α exchanged": ("ct-table1", lambda d: swapped(d, "scale", "1/L", "1/√L"), "from the ODE"),
    "ct-table1, V exchanged": ("ct-table1", lambda d: swapped(d, "law", "identity", "random"), "no limit"),
    "ct-table1, no drift": ("ct-table1", lambda d: d.assign(end=d["end"] - 1), "from the SDE"),
    "ct-table1, noise that stays": ("ct-table1", lambda d: d.assign(moved=d["moved"] + 0.1), "nothing moves"),
    "ct-euler, on the circle": ("ct-euler", lambda d: d.assign(circle_end=d["circle_end"] * 0 + 1), "circle"),
    "ct-euler, on the sphere": ("ct-euler", lambda d: d.assign(length=d["length"] * 0 + 1), "it leaves"),
    "ct-euler, no second order": ("ct-euler", lambda d: d.assign(growth=d["growth"] * 0.5), "growth"),
    "ct-euler, Euler for the layer": (
        "ct-euler",
        lambda d: d.assign(deviation=swapped(d["deviation"], "scheme", "Euler", "normalised")),
        "it stays",
    ),
    "stock-models, logits of another width": (
        "stock-models",
        lambda d: d.assign(logit_std=d["logit_std"] * 1.3),
        "of the first logits",
    ),
    "stock-models, no first block": ("stock-models", lambda d: d.assign(size=d["size"] * 0 + 1), "the stream"),
    "transition, drawn for fixed": ("transition", lambda d: swapped(d, "kind", "fixed", "drawn"), "drawn, d ≥ 4"),
    "transition, dimensions backwards": (
        "transition",
        lambda d: d.assign(rate=reversed_along(d["rate"], "dim")),
        "rate",
    ),
    "transition, other lifetimes": ("transition", lambda d: d.assign(lived=d["lived"] * 1.5), "lifetime, in standard"),
    "feedforward-branch, ReLU for tanh": (
        "feedforward-branch",
        lambda d: swapped(d, "branch", "tanh", "ReLU"),
        "linear, tanh: least growth",
    ),
    "feedforward-branch, half the pairs": (
        "feedforward-branch",
        lambda d: d.assign(share=d["share"] * 0.5),
        "linear, tanh: largest",
    ),
    "large-beta, biased coins": ("large-beta", lambda d: d.assign(count=swapped(d["count"], "few", 0, 1)), "p-value"),
    "large-beta, another limit": ("large-beta", lambda d: d.assign(limit=d["limit"] * 0 + 1), "largest |share"),
    "many-tokens, that stay apart": ("many-tokens", lambda d: d.assign(rest=d["rest"] * 0 + 0.2), "odd N"),
    "many-tokens, half as long": ("many-tokens", lambda d: d.assign(lifetime=d["lifetime"] * 0.5), "simulated over"),
    "gradient-limit, another SDE": ("gradient-limit", lambda d: d.assign(sde=d["sde"] * 1.5), "KS distance of chain"),
    "gradient-limit, widths backwards": ("gradient-limit", lambda d: reversed_along(d, "width"), "it falls"),
    "gradient-limit, a frozen chain": (
        "gradient-limit",
        lambda d: d.assign(network=d["network"] * 0 + d["frozen"]),
        "frozen kernel; above",
    ),
    "lifetimes, β backwards": ("lifetimes", lambda d: reversed_along(d, "beta"), "growth"),
    "lifetimes, another limit": ("lifetimes", lambda d: d.assign(fine=d["fine"] * [2.0, 1.0, 1.0]), "the chain's"),
    "lifetimes, clusters that part": ("lifetimes", lambda d: d.assign(spread=d["spread"] + 1e-9), "one cluster"),
    "lifetimes-spread, another formula": ("lifetimes-spread", lambda d: d.assign(tight=d["tight"] * 0.8), "standard"),
    "lifetimes-spread, spreads backwards": ("lifetimes-spread", lambda d: reversed_along(d, "spread"), "split"),
    "lifetimes-spread, lives as tight": (
        "lifetimes-spread",
        lambda d: d.assign(lifetime=d["lifetime"] * 0 + d["tight"]),
        "shorter",
    ),
    "lifetimes, equal clusters that part": (
        "lifetimes",
        lambda d: d.assign(equal_gap=d["equal_gap"] + 1e-9),
        "they stay",
    ),
}


@pytest.mark.parametrize("twin", in_tiers(TWINS, lambda twin: TWINS[twin][0]))
def test_wrong_twin_is_rejected(figures, twin):
    name, spoil, which = TWINS[twin]
    claims = [claim for claim in module_of(name).claims(spoil(figures[name].data)) if which in claim.name]
    assert claims
    assert False in [claim.holds for claim in claims]


def test_every_figure_has_a_wrong_twin():
    assert {name for name, _, _ in TWINS.values()} == set(FIGURES)


def test_ks_claim_distinguishes_laws():
    """Kolmogorov's law exceeds λ = 1.949475 once in a thousand times (`scipy.stats.kstwobign.isf(0.001)`).

    The distance of samples of sizes n and k is λ √((n + k)/(n k)), so λ/100 for 20,000 and 20,000, and λ/63.25 for
    20,000 and 5,000.
    """
    generator = np.random.Generator(np.random.Philox(5))
    x, y, wider = generator.standard_normal((3, 20_000)) * [[1.0], [1.0], [1.3]]
    assert ks_noise(x, y) == pytest.approx(0.019495, abs=1e-6)
    assert ks_noise(x, y[:5000]) == pytest.approx(0.030824, abs=1e-6)
    assert ks_claim("same", x, y).holds is True
    assert ks_claim("wider", x, wider).holds is False


# What must not happen.


@pytest.mark.parametrize(
    ("name", "scale", "below", "message"),
    [
        (
            "st-fig9",
            "quick",
            "out",
            r"Unknown figure 'st-fig9'; there are st-fig1, .*feedforward-branch, .*st-lr, .*foretells, ct-fig2\.",
        ),
        ("st-fig1", "huge", "out", r"Unknown scale 'huge'; there are paper, quick\."),
        ("st-fig1", "quick", "file/deeper/still", "Cannot write"),
        ("st-lr", "quick", "out", r"st-lr is drawn from finished runs: give their folder \(--runs\)"),
    ],
)
def test_bad_options_of_make_are_refused_before_any_work(name, scale, below, message, tmp_path, no_work):
    (tmp_path / "file").write_text("here before", encoding="utf-8")
    with pytest.raises(InputError, match=message):
        make(name, scale=scale, out=tmp_path / below)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def fail_with(error):
    def failing(*_):
        raise error

    return failing


@pytest.mark.parametrize(("stage", "error"), [("compute", KeyboardInterrupt()), ("draw", RuntimeError("a bug"))])
def test_figure_writes_nothing_if_a_stage_fails(tmp_path, monkeypatch, stage, error):
    monkeypatch.setattr(module_of("st-fig7"), stage, fail_with(error))
    with pytest.raises(type(error)):
        make("st-fig7", scale="quick", out=tmp_path, seed=1, threads=1)
    assert list(tmp_path.iterdir()) == []


def test_interruption_while_saving_leaves_complete_files_only(tmp_path, monkeypatch):
    maker = importlib.import_module("limitformer_papers.making")
    monkeypatch.setattr(maker, "save", fail_with(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        make("st-fig7", scale="quick", out=tmp_path, seed=1, threads=1)
    assert [path.name for path in tmp_path.iterdir()] == ["st-fig7.png"]
    with Image.open(tmp_path / "st-fig7.png") as picture:
        picture.load()


def test_failure_keeps_earlier_files(figures, monkeypatch):
    folder = figures["st-fig7"].paths[0].parent
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(module_of("st-fig7"), "draw", fail_with(RuntimeError("a bug")))
    with pytest.raises(RuntimeError):
        make("st-fig7", scale="quick", out=folder, seed=SEED + 1, threads=1)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_error_of_a_mean_lifetime_equals_scipys():
    lengths = np.array([1.0, 2.0, 4.0, 9.0])
    assert mean_and_error(lengths) == pytest.approx((4.0, sem(lengths)))
    assert mean_and_error(lengths)[1] != pytest.approx(lengths.std(ddof=1), rel=0.1)  # the deviation of one of them
