"""`limitformer.design`: its patch on networks that transformers draws, its region and its risk."""

import json
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np
import pytest
import torch
import transformers
import xarray as xr
from scipy.stats import binom, binomtest, fisher_exact
from typer.testing import CliRunner

import limitformer as lf
from drawn_networks import attentions_of, blocks, first, first_tokens
from limitformer.base.progress import Bar
from limitformer.checking.curves import gradient_of_matrices, gradient_ratio
from limitformer.cli.app import app
from limitformer.designing import Objective
from limitformer.designing.design import trials_of
from limitformer.designing.grid import region_of
from limitformer.designing.objective import outside
from limitformer.designing.report import Risk
from limitformer.designing.trials import REPORTED
from limitformer.subjects.losses import chosen_loss
from limitformer.subjects.subject import resolve
from limitformer.sweep import SweepInterrupted

GPT2 = {"vocab_size": 60, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 24, "initializer_range": 0.2}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
BANDS = {"correlation": (-0.5, 0.3), "stream": (1.03, 4.0), "effective": (0.6, 0.999), "gradient": 3.0}
TOKENS = 7
NETWORKS = 40
ALPHA = 1e-3  # probability that a right design fails a test of it


def small(**changes):
    return transformers.GPT2Config(**(GPT2 | changes))


@pytest.fixture(scope="module")
def design():
    grid = {"initializer_range": [0.05, 0.1, 0.2], "output": [0.5, 1.0, 2.0]}
    return lf.design(small(), tokens=TOKENS, objective=BANDS, grid=grid, samples=100, progress=False)


def drawn(config, seed, patch):
    """Return a model drawn by transformers, with the pasted lines of the design; None leaves it unchanged."""
    namespace = {}
    if patch is not None:
        exec(patch, namespace)
        namespace["change_fields"](config)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if patch is not None:
        namespace["scale_weights"](model)
    return model


def measured(model):
    """Return the values of an objective from the model's outputs and torch's gradients, without limitformer."""
    states, last = [], len(blocks(model)) - 1
    for k, part in enumerate(blocks(model)):
        part.register_forward_pre_hook(lambda m, a, k: states.append(first_tokens(a, k)[0].detach()), with_kwargs=True)
        if k == last:
            part.register_forward_hook(lambda m, a, out: states.append(first(out)[0].detach()))
    ids = torch.arange(3, 3 + TOKENS)[None]
    out = model(input_ids=ids, output_attentions=True, use_cache=False)
    torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:]).backward()
    unit = torch.nn.functional.normalize(states[-1].double(), dim=1)
    rho = (unit @ unit.T)[np.triu_indices(TOKENS, 1)].mean()
    spread = [effective(a[0].detach().double()) for a in attentions_of(out)]
    return {
        "correlation": (float(rho),) * 2,
        "stream": (float(states[-1].norm() / states[0].norm()),) * 2,
        "effective": (min(spread), max(spread)),
        "gradient": (1.0, worst_ratio(model)),
    }


def effective(a):
    """Return exp of the entropy over tokens seen, means over rows that see two tokens or more (heads, m, m)."""
    entropy = -(a * a.clamp(min=1e-300).log()).sum(-1)[:, 1:]
    return float(entropy.exp().mean()) / np.mean(np.arange(2, TOKENS + 1))


def worst_ratio(model):
    """Return the largest over the smallest gradient of like matrices by block."""
    kinds = {}
    for name, parameter in model.named_parameters():
        block = [part for part in name.split(".") if part.isdigit()]
        if block and parameter.dim() > 1:
            kinds.setdefault(name.replace(f".{block[0]}.", ".*."), []).append(float(parameter.grad.norm()))
    return max(max(norms) / min(norms) for norms in kinds.values())


def meets(values, bands):
    bands = bands | {"gradient": (1.0, bands["gradient"])}
    return all(bands[name][0] <= low and high <= bands[name][1] for name, (low, high) in values.items())


@pytest.fixture(scope="module")
def networks(design):
    """Return the values of networks of transformers, with the pasted lines and without."""
    patches = {"chosen": design.python(), "present": None}
    return {
        name: [measured(drawn(small(), seed, patch)) for seed in range(NETWORKS)] for name, patch in patches.items()
    }


def misses(every):
    return sum(not meets(values, BANDS) for values in every)


def same_risk(first, second):
    """Return Fisher's exact p that two counts (misses, networks) have one probability."""
    return fisher_exact([[first[0], first[1] - first[0]], [second[0], second[1] - second[0]]]).pvalue


def test_patched_networks_meet_the_objective(design, networks):
    assert design.found
    assert design.best != {"initializer_range": 0.2, "output": 1.0}
    count = misses(networks["chosen"])
    assert binomtest(count, NETWORKS, design.risk.interval[1], alternative="greater").pvalue > ALPHA
    assert same_risk((count, NETWORKS), (design.risk.misses, design.risk.samples)) > ALPHA
    assert design.allowed == 0.1
    assert binom.cdf(count, NETWORKS, 0.5) < ALPHA


def test_unpatched_networks_miss_the_objective_at_the_stated_risk(design, networks):
    """The wrong twin of the test of patched networks."""
    count = misses(networks["present"])
    present = design.present.risk
    assert binomtest(count, NETWORKS, design.allowed, alternative="greater").pvalue < ALPHA
    assert same_risk((count, NETWORKS), (present.misses, present.samples)) > ALPHA
    assert same_risk((count, NETWORKS), (design.risk.misses, design.risk.samples)) < ALPHA


def test_patched_weights_have_the_stated_deviation(design):
    """The std is the code's at the new field, times the factor of outputs; the wrong twin is √2 times that."""
    patch, model = design.patch(), drawn(small(), 0, design.python())
    laws = lf.weightless.law(small(**patch["settings"]))
    assert patch["settings"] or patch["overrides"]
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            stated = next((std for key, std in patch["overrides"].items() if fnmatchcase(name, key)), laws[name].std)
            expected = laws[name].std * (design.best["output"] if "c_proj" in name else 1.0)
            assert abs(stated / expected - 1) < 1e-12
            ratio, error = float(parameter.detach().std()) / expected, 1 / np.sqrt(2 * parameter.numel())
            assert abs(ratio - 1) < 5 * error < abs(ratio - 2**0.5), name


def test_picture_shows_the_asked_band(design):
    """A band below all curves, too."""
    picture = replace(design, objective=Objective(correlation=(-0.5, -0.3))).draw()
    low, high = picture.axes[1].get_ylim()
    assert low <= -0.5 < -0.3 <= high


def test_outcome_values_match_drawn_networks(design, networks):
    """Medians of the one-number values, before and after, agree within 4.5 standard errors."""
    for name, outcome in (("present", design.present), ("chosen", design.chosen)):
        for part in ("correlation", "stream"):
            values = np.array([one[part][0] for one in networks[name]])
            low, middle, high = outcome.values[part]
            error = 1.2533 * (high - low) / 3.29 * np.sqrt(1 / NETWORKS + 1 / 100)
            assert abs(np.median(values) - middle) < 4.5 * error, part
            other = design.chosen if name == "present" else design.present
            assert abs(np.median(values) - other.values[part][1]) > 4.5 * error, part


def test_check_accepts_the_patch(design):
    report = lf.check(small(), tokens=TOKENS, samples=4, progress=False, **design.patch())
    ratio = report.curves["size"][:, -1] / report.curves["size"][:, 0]
    assert BANDS["stream"][0] < float(ratio.median()) < BANDS["stream"][1]
    unpatched = design.before.curves["size"]
    assert float((unpatched[:, -1] / unpatched[:, 0]).median()) > float(ratio.median())


def test_saved_files_match_the_design(design, tmp_path):
    paths = design.save(tmp_path)
    assert [path.name for path in paths] == ["design.json", "design.png", "design.nc"]
    record = json.loads(paths[0].read_text())
    assert record["found"] is True
    assert record["patch"] == design.patch()
    assert record["python"] == design.python()
    assert Objective(**record["objective"]) == design.objective
    with xr.open_dataset(paths[2]) as region:
        assert np.array_equal(region["probability"].values, design.region["probability"].values)
    assert paths[1].stat().st_size > 20_000
    assert "says nothing about what training makes of it" in record["about"]


def test_design_without_safe_cells_reports_not_safe(design):
    """Equal tokens at the end and a stream of constant size exclude each other."""
    bands = {"correlation": (0.9, 1.0), "stream": (0.99, 1.01), "effective": None, "gradient": None}
    none = lf.design(small(), tokens=5, objective=bands, grid={"output": [0.25, 4.0]}, knobs="output", progress=False)
    assert not none.found
    assert none.risk.interval[1] > 0.1
    assert str(none).splitlines()[0].startswith("gpt2: NOT SAFE. No setting of the grid meets the objective")
    assert not bool(none.region["safe"].any())
    assert none.best["output"] in none.region["output"].values


def test_safe_present_setting_stays():
    bands = {"stream": (0.5, 30.0), "correlation": None, "effective": None, "gradient": None}
    design = lf.design(small(), tokens=5, objective=bands, grid={"output": [0.5, 1.0]}, knobs="output", progress=False)
    assert design.found
    assert design.best == {"output": 1.0}
    assert design.patch() == {"settings": {}, "overrides": {}}
    assert "keep what you have" in str(design)
    assert design.chosen is design.present


# Risk, region, choice


def test_progress_counts_the_networks_of_the_grid_and_of_both_evaluations(monkeypatch, tmp_path):
    """Cells of a store take no time, so that the bar of a resumed design begins after them."""
    shown = []
    monkeypatch.setattr(Bar, "show", lambda bar, done: shown.append((done, bar.progress.tasks[0].total)))
    options = {"tokens": 5, "objective": BANDS, "knobs": "output", "grid": {"output": [0.5, 1.0]}, "scan": 3}
    lf.design(small(), **options, samples=30, store=tmp_path)
    total = 2 * 3 + 2 * (30 + REPORTED)
    assert {each for _, each in shown} == {total}
    done = [each for each, _ in shown]
    assert done[:6] == [1, 2, 3, 4, 5, 6]
    assert done == sorted(set(done))
    assert len(done) == 2 * 3 + 2 * 30
    assert done[-1] == pytest.approx(total)
    shown.clear()
    lf.design(small(), **options, samples=30, store=tmp_path)
    assert [each for each, _ in shown] == done[6:]


@pytest.mark.parametrize(("misses", "samples"), [(0, 64), (1, 64), (3, 64), (63, 64), (64, 64)])
def test_risk_interval_is_clopper_pearson(misses, samples):
    """The binomial's tail beyond each end is 5 %."""
    low, high = Risk(misses, samples).interval
    assert low == 0 if misses == 0 else abs(binom.sf(misses - 1, samples, low) - 0.05) < 1e-9
    assert high == 1 if misses == samples else abs(binom.cdf(misses, samples, high) - 0.05) < 1e-9


def test_distance_is_zero_inside_and_positive_for_nan():
    low, high = np.array([1.0, 2.0, 0.5, np.nan, 2.0]), np.array([1.0, 2.0, 0.5, 1.0, np.inf])
    distance = outside("stream", low, high, (1.0, 1.5))
    assert np.allclose(distance[:3], [0, np.log(2 / 1.5), np.log(2)])
    assert not (distance[3:] <= 0).any()
    objective = Objective(stream=(1.0, 1.5), correlation=None, effective=None, gradient=None)
    assert objective.missed({"stream": (low, high)})["stream"].tolist() == [False, True, True, True, True]
    assert (objective.distance({"stream": (low, high)}) > 0).tolist() == [False, True, True, True, True]


class Plane:
    """A setting meets the objective where x y ≤ 1, and 7 networks of 16 also do where x y is 4 and x at most 4."""

    def values(self, setting, seed, samples):
        product = np.full(samples, setting["x"] * setting["y"])
        product[:7] = 1.0 if setting["x"] * setting["y"] == 4 and setting["x"] <= 4 else product[0]
        return {"stream": (product, product)}

    def exact(self, setting):
        return {}


def test_cells_are_compared_network_by_network():
    """The p-value is that of the sign test; intervals that overlap do not make two cells equal."""
    networks = 40
    distances = np.zeros((4, networks))
    distances[1, :3] = 1.0  # misses of the best cell
    distances[0, :8] = 1.0  # the same networks and five more: p = 2/32
    distances[2, :9] = 1.0  # and six more: p = 2/64
    distances[3, 3:12] = 1.0  # nine others: 9 of 12, p = 0.146
    region = region_of({"x": [1.0, 2.0, 3.0, 4.0]}, distances, Plane(), 0.1, {})
    assert [binomtest(0, 5).pvalue >= 0.05, binomtest(0, 6).pvalue >= 0.05, binomtest(3, 12).pvalue >= 0.05] == [
        True, False, True,
    ]  # fmt: skip
    assert region["best"].values.tolist() == [True, True, False, True]
    assert float(region["low"][2]) < float(region["high"][2]) > float(region["low"][1])
    for k, misses in enumerate((8, 3, 9, 9)):
        low, high = binomtest(networks - misses, networks).proportion_ci(0.9)
        np.testing.assert_allclose([region["low"][k], region["high"][k]], [low, high], rtol=1e-9)


def test_design_and_check_share_the_default_readout():
    """A last norm makes ½|x|² constant: its gradients, and their ratios, are rounding."""
    config = transformers.BertConfig(
        hidden_size=24, num_hidden_layers=3, num_attention_heads=2, intermediate_size=48, vocab_size=60,
        architectures=["BertModel"], initializer_range=0.2,
    )  # fmt: skip
    trials, _ = trials_of(config, None, ["initializer_range"], None, None, 5, None)
    result = trials.values({"initializer_range": 0.2}, 7, 4)["gradient"][0]
    report = lf.check(config, tokens=5, samples=4, seed=7, progress=False)
    checked, _, _ = gradient_ratio(gradient_of_matrices(report.curves).values)
    assert np.allclose(result, checked, rtol=1e-3)
    norms = lf.check(config, tokens=5, samples=4, seed=7, progress=False, loss=chosen_loss(None, "hidden")).curves
    assert not np.allclose(result, gradient_ratio(gradient_of_matrices(norms).values)[0], rtol=0.1)


class Logits(torch.nn.Module):
    """Logits by a head, after blocks whose queries are `times` too large."""

    def __init__(self, times=1.0):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(60, 24), torch.nn.Linear(24, 60)
        torch.nn.init.normal_(self.head.weight, std=3.0)
        names = ("ask", "tell", "say", "back", "up", "down")
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({name: torch.nn.Linear(24, 24) for name in names}) for _ in range(3)
        )
        for each in self.layers:
            torch.nn.init.normal_(each.ask.weight, std=times / 24**0.5)

    def forward(self, ids):
        x = self.table(ids)
        for each in self.layers:
            weights = torch.softmax(each.ask(x) @ each.tell(x).mT / 24**0.5, -1)
            x = x + each.back(weights @ each.say(x))
            x = x + each.down(torch.relu(each.up(x)))
        return self.head(x)


def test_design_takes_the_loss_of_logits():
    """Its gradients are those of `check` with the named loss, and not those of another loss."""
    trials, _ = trials_of(Logits, None, ["output"], None, None, 6, None)
    result = trials.values({"output": 1.0}, 7, 4)["gradient"][0]
    same = {}
    for loss in ("next-token", lambda out, inputs: out[:, -1].sum(-1)):
        report = lf.check(Logits, tokens=6, samples=4, seed=7, progress=False, loss=loss)
        ratios, _, _ = gradient_ratio(gradient_of_matrices(report.curves).values)
        same[loss] = np.allclose(result, ratios, rtol=1e-3)
        asked, _ = trials_of(Logits, None, ["output"], None, None, 6, loss)
        assert np.allclose(asked.values({"output": 1.0}, 7, 4)["gradient"][0], ratios, rtol=1e-3)
    assert list(same.values()) == [True, False]


@pytest.mark.parametrize(("times", "knobs"), [(100.0, ["logits", "output"]), (1.0, ["output"])])
def test_frozen_attention_makes_logits_a_usual_knob(times, knobs):
    trials, _ = trials_of(lambda: Logits(times=times), None, None, None, None, 16, None)
    assert [knob.name for knob in trials.knobs] == knobs


# Shaped networks

SHAPED = lf.Transformer(width=128, depth=32, gamma=0.9, attention=lf.ShapedAttention(tau0=0.5))
START = [[1.0, 0.2], [0.2, 1.5]]


@pytest.fixture(scope="module")
def shaped():
    grid = {"gamma": [0.1, 0.3, 0.9], "tau0": [0.5, 2.0]}
    bands = {"correlation": (-0.5, 0.6), "stream": (0.6, 1.6)}
    return lf.design(SHAPED, START, objective=bands, grid=grid, samples=400, scan=100, progress=False)


def test_explosion_probability_matches_the_theorem(shaped):
    """The test sums Feller's integral itself; γ² ≥ ½ never explodes."""
    for gamma, tau0 in ((0.3, 0.5), (0.1, 2.0)):
        k2, d0 = 8 * tau0**2 * (2 - gamma**2) / gamma**2, 1.0 + 1.5 - 0.4
        u = np.arcsinh(np.sqrt(d0**2 / k2))
        grid, far = np.linspace(0, u, 20001), np.linspace(0, 60, 600001)
        p = 1 / (2 * gamma**2) - 1
        exact = np.trapezoid(np.cosh(grid) ** -p, grid) / np.trapezoid(np.cosh(far) ** -p, far)
        got = float(shaped.region["explosion"].sel(gamma=gamma, tau0=tau0))
        assert abs(got - exact) < 1e-6
    assert float(shaped.region["explosion"].sel(gamma=0.9, tau0=0.5)) == 0
    assert "explode by this depth" in str(shaped)


def test_shaped_choice_matches_the_closed_form(shaped):
    """P(d reaches a radius by the depth) by the limit's PDE, against a wide chain at the chosen γ and τ₀.

    A chain is seen at its layers alone, which moves the radius by exp(0.5826 σ), σ the deviation of log d in a layer
    [Broadie, Glasserman and Kou, Math. Finance 7, 1997]. The twin is the present γ.
    """
    gamma, tau0, radius, n = shaped.best["gamma"], shaped.best["tau0"], 2.6, 4000
    net = lf.Transformer(width=512, depth=128, gamma=gamma, attention=lf.ShapedAttention(tau0=tau0))
    v = lf.simulate(net, START, samples=n, seed=5, progress=False).covariance.values
    reached = int(((v[..., 0, 0] + v[..., 1, 1] - 2 * v[..., 0, 1]).max(1) >= radius).sum())
    seen = radius * np.exp(0.5826 * np.sqrt(2 * gamma**2 * (2 - gamma**2) / 512))

    def exact(net, radius):
        return lf.limit(net).explosion_probability(START, time=0.25, radius=radius)

    assert 0.02 < exact(net, seen) < 0.6
    assert binomtest(reached, n, exact(net, seen)).pvalue > ALPHA
    assert binomtest(reached, n, exact(replace(net, gamma=0.9), seen)).pvalue < ALPHA


# Bad input and the command


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"risk": 0.0}, "risk must lie in"),
        ({"risk": 0.01}, "samples must be at least 299"),
        ({"knobs": ("output", "embedding", "logits")}, "one or two names; got 3"),
        ({"knobs": "outputs"}, "there is no knob 'outputs'.*Nearest: output"),
        ({"knobs": "*.nothing.weight"}, "no random weight has such a name"),
        ({"knobs": ("output", "*.c_proj.weight")}, "both set transformer.h.0.attn.c_proj.weight"),
        ({"grid": {"embedding": [1.0, 2.0]}}, "not a knob of this design"),
        ({"grid": {"output": [0.0, 2.0]}}, "must be positive numbers"),
        ({"objective": {"corelation": (0, 1)}}, "an objective has correlation, stream"),
        ({"objective": {"stream": (3.0, 1.0)}}, "stream must be two numbers in ascending order"),
        ({"objective": {"gradient": 0.5}}, "must be at least 1"),
        ({"settings": {"n_layers": 3}}, "has no field 'n_layers'"),
        ({"tokens": 1}, "tokens must be"),
    ],
)
def test_design_refuses_bad_input(options, says):
    with pytest.raises(lf.InputError, match=says) as caught:
        lf.design(small(), **({"tokens": 5, "progress": False} | options))
    assert "\n" not in str(caught.value)


def test_grid_of_one_value_judges_it(tmp_path):
    """Second route: the same cell of two values has the same probability."""
    options = {"tokens": 5, "samples": 30, "scan": 4, "seed": 0, "risk": 0.1, "progress": False, "knobs": ["output"]}
    one, two = (lf.design(small(), grid={"output": values}, **options) for values in ([0.5], [0.5, 2.0]))
    assert one.region["probability"].item() == two.region["probability"][0].item()
    assert one.chosen.setting == {"output": 0.5}
    assert "cells are safe" in str(one)
    assert (tmp_path / "design.png") in one.save(tmp_path)


def test_design_refuses_other_subjects(tmp_path):
    with pytest.raises(lf.InputError, match="GPT2LMHeadModel has its weights already"):
        lf.design(drawn(small(), 0, None))
    with pytest.raises(lf.InputError, match="has no blocks"):
        lf.design(lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), torch.ones(1, 3, 2))
    with pytest.raises(lf.InputError, match=r"no public shape.*Nearest: gpt2"):
        lf.design("gpt22")
    with pytest.raises(lf.InputError, match=r"or a limitformer\.Transformer; got ShapedAttention"):
        lf.design('{"kind": "ShapedAttention", "tau0": 1.0}')
    with pytest.raises(lf.InputError, match="chain has no effective"):
        lf.design(SHAPED, START, objective=Objective(gradient=None))
    small().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(lf.InputError, match="holds weights"):
        lf.design(str(tmp_path))


def test_design_of_a_function_is_that_of_its_configuration():
    """The argument `initializer_range` is the knob that the field of that name is: the same cells, bit by bit."""

    def build(initializer_range=0.2):
        return resolve(small(initializer_range=initializer_range)).factory()

    options = {"tokens": 5, "scan": 4, "samples": 29, "progress": False, "objective": {"gradient": None}}
    options |= {"knobs": "initializer_range", "grid": {"initializer_range": [0.05, 0.2]}}
    ids = [[3, 4, 5, 6, 7]]
    by_function, by_field = (lf.design(model, ids, **options) for model in (build, small(initializer_range=0.2)))
    assert by_function.region["distance"].equals(by_field.region["distance"])
    assert by_function.changes["settings"] == by_field.changes["settings"]
    other = lf.design(lambda initializer_range=0.3: build(initializer_range), ids, **options)
    assert other.present.setting == {"initializer_range": 0.3}
    preset = lf.design(build, ids, settings={"initializer_range": 0.05}, **options)
    assert preset.present.setting == {"initializer_range": 0.05}
    assert preset.region["distance"].equals(by_field.region["distance"])
    assert preset.name == "build with initializer_range=0.05"
    assert "initializer_range" in preset.patch()["settings"]
    space = {"build": lambda initializer_range=0.4: build(initializer_range)}  # another default than the design's
    exec(preset.python(), space)
    designed = preset.patch()["settings"]["initializer_range"]
    for made, std in ((space["new_build"](), designed), (space["new_build"](initializer_range=0.1), 0.1)):
        assert float(next(made.parameters()).detach().std()) == pytest.approx(std, rel=0.2)
    with pytest.raises(lf.InputError, match="the code of build may change between two calls"):
        lf.design(build, ids, store="cells", **options)


def test_design_refuses_bands_that_were_not_measured():
    class Adds(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x):
            return x + self.linear(x)

    def build():
        return torch.nn.Sequential(torch.nn.Embedding(9, 8), *(Adds() for _ in range(2)))

    with pytest.raises(lf.InputError, match=r"asks for effective, which was not measured .* \(--effective none\)"):
        lf.design(build, tokens=5, knobs="embedding", grid={"embedding": [1, 2]}, progress=False)


class Interrupting:
    """A replacement for a method of trials that raises Ctrl-C at one call."""

    def __init__(self, original, at):
        self.original, self.calls, self.at = original, 0, at

    def __get__(self, trials, kind=None):
        return lambda *arguments: self.call(trials, *arguments)

    def call(self, trials, *arguments):
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return self.original(trials, *arguments)


RESUMED = {
    "chain": (
        replace(SHAPED, width=16, depth=6),
        {"tokens": 2, "scan": 60, "samples": 60, "grid": {"gamma": [0.1, 0.4], "tau0": [0.5, 1.0]}},
    ),
    "network": (
        {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32},
        {
            "tokens": 4,
            "scan": 6,
            "risk": 0.3,
            "samples": 10,
            "knobs": "initializer_range",
            "grid": {"initializer_range": [0.01, 0.9]},
        },
    ),
}


@pytest.mark.parametrize("kind", RESUMED)
def test_interrupted_design_resumes_with_the_same_bits(monkeypatch, tmp_path, kind):
    """Ctrl-C comes among the cells and during the evaluation."""
    from limitformer.designing import trials

    what, options = RESUMED[kind]
    part = trials.ShapedTrials if kind == "chain" else trials.StockTrials
    count = Interrupting(part.values, None)
    monkeypatch.setattr(part, "values", count)
    whole = lf.design(what, **options, progress=False)
    assert count.calls > 3
    for at in (2, count.calls) if kind == "chain" else (2,):
        folder = tmp_path / str(at)
        monkeypatch.setattr(part, "values", Interrupting(count.original, at))
        cells = whole.region["safe"].size
        done = min(at - 1, cells)
        with pytest.raises(SweepInterrupted, match=f"Interrupted with {done} of {cells} cells done"):
            lf.design(what, **options, store=folder, progress=False)
        again = Interrupting(count.original, None)
        monkeypatch.setattr(part, "values", again)
        resumed = lf.design(what, **options, store=folder, progress=False)
        assert again.calls == count.calls - done
        xr.testing.assert_equal(resumed.region, whole.region)
        assert (resumed.chosen.setting, resumed.chosen.values) == (whole.chosen.setting, whole.chosen.values)


def test_store_serves_only_the_same_cells(monkeypatch, tmp_path):
    """Another objective or risk uses the stored cells; another seed, text, count or a damaged file does not."""
    from limitformer.designing import trials

    what, options = RESUMED["chain"]
    runs = Interrupting(trials.ShapedTrials.values, None)
    monkeypatch.setattr(trials.ShapedTrials, "values", runs)

    def computed(**changes):
        """Return how many cells run; the present setting and at most one more are evaluated afterwards."""
        runs.calls = 0
        design = lf.design(what, **options | changes, store=tmp_path, progress=False)
        return runs.calls - (1 if design.chosen is design.present else 2), design

    cells, first = computed()
    assert cells == 4
    assert computed(objective={"stream": (0.9, 1.1)}, risk=0.2)[0] == 0
    assert [computed(**changes)[0] for changes in ({"seed": 1}, {"tokens": 3}, {"scan": 50})] == [4, 4, 4]
    assert computed(grid={"gamma": [0.1, 0.2, 0.4], "tau0": [0.5, 1.0]})[0] == 2
    file = min((tmp_path / "cells").glob("*.nc"))
    file.write_bytes(file.read_bytes()[:-9] + b"123456789")
    total = [computed(**changes) for changes in ({}, {"seed": 1}, {"tokens": 3}, {"scan": 50})]
    total.append(computed(grid={"gamma": [0.1, 0.2, 0.4], "tau0": [0.5, 1.0]}))
    assert sum(cells for cells, _ in total) == 1
    xr.testing.assert_equal(total[0][1].region, first.region)


def test_command_writes_its_files(tmp_path):
    model = lf.to_json(replace(SHAPED, width=16, depth=6))
    arguments = ["design", model, "--tokens", "2", "--knobs", "gamma", "--grid", "gamma=0.1,0.4"]
    arguments += ["--samples", "60"]
    arguments += ["--stream", "0.5,2", "--correlation", "-0.6,0.6", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("Transformer: ")
    assert "model = replace(model" in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cells", "design.json", "design.nc", "design.png"]
    record = json.loads((tmp_path / "design.json").read_text())
    assert record["objective"]["stream"] == [0.5, 2.0]
    assert record["objective"]["effective"] is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gpt2", "--correlation", "low,high"], "--correlation takes numbers, or none; got 'low,high'."),
        (["gpt2", "--stream", "3"], "--stream takes LOW,HIGH; got '3'."),
    ],
)
def test_design_command_refuses_bad_options(arguments, says):
    result = CliRunner().invoke(app, ["design", *arguments])
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_command_takes_the_loss_of_a_file_and_keeps_no_cells(tmp_path, monkeypatch):
    """Its code may change between two runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(GPT2 | {"model_type": "gpt2"}))
    (tmp_path / "mine.py").write_text("def loss(out, inputs):\n    return out.logits[:, -1].square().mean(-1)\n")
    options = ["--loss", "mine.py:loss", "--out", "there", "--tokens", "6", "--samples", "29", "--scan", "1"]
    result = CliRunner().invoke(app, ["design", "config.json", *options, "--knobs", "output", "--grid", "output=0.5,1"])
    assert result.exit_code == 0, result.output
    assert {path.suffix for path in (tmp_path / "there").iterdir()} == {".json", ".nc", ".png"}
