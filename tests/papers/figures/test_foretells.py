"""Does the law foretell training? The statistic detects a built-in relation and nothing else; the halves stay
separate.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
from scipy.stats import binom, rankdata, spearmanr

from limitformer_papers.beyond import foretells, ranks, tiny_networks
from limitformer_papers.beyond.foretells import CHOOSE, TEST, cells_of, halves, paper, quick
from limitformer_papers.beyond.tiny_networks import TinyNetwork
from limitformer_papers.training import harness
from limitformer_papers.training.data.text_data import text_data

N = 24
TIED = [3.0, 1.0, 1.0, 2.0, 5.0, 8.0, 8.0, -1.0]
OTHER = [0.1, 0.7, -0.2, 0.4, 0.4, 3.0, 2.0, 0.1]
ALL = np.zeros(N)


def random(seed):
    return np.random.Generator(np.random.Philox(seed))


def related(seed, noise=0.5, n=N):
    """Return x and y, which rises with x on another scale, with noise."""
    x, e = random(seed).standard_normal((2, n))
    return x, np.exp(x + noise * e)


# The statistic.


def test_spearman_equals_scipys_with_ties():
    assert ranks.spearman(TIED, OTHER) == pytest.approx(spearmanr(TIED, OTHER).statistic, abs=1e-14)


def test_nan_and_infinity_rank_last_and_tied():
    large = [1e9 if not np.isfinite(v) else v for v in (1.0, np.inf, 2.0, np.nan, 0.0)]
    assert ranks.spearman([1.0, np.inf, 2.0, np.nan, 0.0], [1, 5, 3, 4, 2]) == ranks.spearman(large, [1, 5, 3, 4, 2])


def test_p_value_equals_that_of_all_orders():
    """All 720 orders of six values can be listed."""
    x, y = np.array(TIED[:6]), np.array(OTHER[:6])
    orders = np.array(list(itertools.permutations(rankdata(y))))
    every = np.abs(np.corrcoef(np.vstack([rankdata(x), orders]))[0, 1:])
    exact = np.mean(every >= abs(spearmanr(x, y).statistic) - 1e-12)
    p = ranks.p_value(x, y, np.zeros(6), 3)
    assert abs(p - exact) < 5 * np.sqrt(exact * (1 - exact) / ranks.DRAWS)


def test_rho_within_groups_ignores_differences_between_groups():
    """The groups are far apart in both, so ρ is nearly 1 over all and near 0 within."""
    groups = np.repeat([0, 1, 2], 8)
    x, y = random(7).standard_normal((2, N)) + 100 * groups
    assert ranks.spearman(x, y) > 0.8
    assert ranks.p_value(x, y, ALL, 1) < 1e-3
    assert ranks.p_value(x, y, groups, 1) > 0.05
    assert ranks.p_value(x, x - 200 * groups, groups, 1) < 1e-3  # a relation within groups is detected


def test_rho_within_groups_is_the_mean_over_groups():
    groups = [0, 1, 0, 1, 0, 1, 1, 0]
    own = [spearmanr(*(np.array(v)[np.array(groups) == g] for v in (TIED, OTHER))).statistic for g in (0, 1)]
    assert ranks.within(TIED, OTHER, groups) == pytest.approx(np.mean(own), abs=1e-14)


def test_interval_contains_the_true_correlation():
    """ρ of a large sample lies in about 95 % of the intervals of small ones, and with the sign turned in almost
    none.
    """
    truth, trials = spearmanr(*related(99, n=200_000)).statistic, 100
    ends = np.array([ranks.interval(*related(seed, n=60), seed, 400) for seed in range(trials)])
    inside = ((ends[:, 0] < truth) & (truth < ends[:, 1])).sum()
    assert inside >= binom.ppf(1e-4, trials, 0.93)  # percentiles are a little short
    assert ((ends[:, 0] < -truth) & (-truth < ends[:, 1])).sum() == 0


# The halves.


def test_halves_split_each_kind_and_depth_equally():
    cells, (held_out, again) = cells_of(paper()), halves(paper(), 0)
    assert (held_out != halves(paper(), 1)[0]).any()
    assert len(set(cells)) == len(cells) == len(held_out) == 48
    for group in itertools.product(paper().kinds, paper().depths):
        inside = np.array([(cell.kind, cell.depth) == group for cell in cells])
        assert (held_out[inside].sum(), (~held_out)[inside].sum(), again[inside].sum()) == (2, 2, 1)


# The study, on invented numbers.


def study(outcome, seed=0):
    """Return 48 networks whose law is known; `outcome` maps the first predictor to losses."""
    cells, (held_out, again) = cells_of(paper()), halves(paper(), seed)
    numbers = random(seed).standard_normal((3, len(cells)))
    loss = np.array([outcome(numbers[0]), np.where(again, outcome(numbers[0]), np.nan)])
    along = {name: ("cell", [getattr(cell, name) for cell in cells]) for name in ("kind", "depth", "scale")}
    along["half"] = ("cell", np.where(held_out, TEST, CHOOSE))
    names = ["a", foretells.DISTANCE, foretells.START]
    parts = {"foretold": (("predictor", "cell"), numbers), "loss": (("seed", "cell"), loss)}
    parts |= {"first": (("seed", "cell"), numbers[[2, 2]]), "frequencies": 0.5}
    return xr.Dataset(parts, {"predictor": names, **along})


def judged(data):
    return {claim.name.split(":")[0]: claim.holds for claim in foretells.claims(data) if "hypothesis" in claim.name}


def test_hypotheses_hold_where_the_law_decides_and_fail_by_chance():
    decided = judged(study(lambda x: np.exp(-x)))
    assert decided == {"over all": True, "at one s": True}
    chance = [judged(study(lambda x, k=k: random(50 + k).standard_normal(len(x)), seed=k)) for k in range(15)]
    for name in decided:
        assert sum(one[name] for one in chance) <= binom.ppf(1 - 1e-4, 15, foretells.LEVEL)


def test_held_out_half_does_not_affect_the_choice():
    data, noise = study(lambda x: x), random(5).standard_normal(48)
    names = foretells.predictors(data)
    for side, same in ((TEST, True), (CHOOSE, False)):
        best = set()
        for shift in range(8):
            other = np.where(data["half"] == side, np.roll(noise, shift), data["loss"].values[0])
            best.add(foretells.chosen(data.assign(loss=(("seed", "cell"), [other, other])), names))
        assert (best == {"a"}) is same


def test_hypotheses_are_not_judged_with_few_networks():
    data = study(lambda x: x)
    few = data.isel(cell=np.concatenate([np.flatnonzero(data["half"] == side)[:9] for side in (CHOOSE, TEST)]))
    assert set(judged(few).values()) == {None}


def test_runs_that_diverged_are_drawn_and_counted():
    data = study(lambda x: np.where(x > 1, np.inf, x))
    lost = int(np.isinf(data["loss"].values).sum())
    assert lost > 0
    assert [claim.value for claim in foretells.claims(data) if claim.name == "runs that diverged"] == [lost]
    foretells.draw(data)


# The networks.


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    sizes = quick().sizes
    return text_data(foretells.SOURCE, sizes.vocabulary, sizes.length, tmp_path_factory.mktemp("data"), sizes.documents)


def test_finished_run_is_read_and_equals_a_new_one(data, tmp_path, monkeypatch):
    cell, sizes = TinyNetwork("shaped", 2, 0.1), quick().sizes
    whole = tiny_networks.trained(cell, sizes, data, 4, tmp_path)
    assert whole == tiny_networks.trained(cell, sizes, data, 4, tmp_path / "elsewhere")
    assert whole != tiny_networks.trained(cell, sizes, data, 5, tmp_path)
    monkeypatch.setattr(harness, "ResumableTrainer", lambda *_: pytest.fail("it was trained again"))
    assert whole == tiny_networks.trained(cell, sizes, data, 4, tmp_path)


@pytest.mark.parametrize("kind", ["post", "shaped"])
def test_checked_law_is_that_of_the_trained_network(kind):
    """The law's standard deviations are those of the drawn weights; the network has its kind's norms and is causal."""
    cell, sizes = TinyNetwork(kind, 2, 0.05), quick().sizes
    subject = tiny_networks.resolve(
        tiny_networks.configuration(cell, sizes), shaping=tiny_networks.shaping_of(cell, sizes)
    )
    model = subject.factory()
    embedding = model.get_input_embeddings().weight.detach().numpy()
    assert abs(embedding.std() / 0.05 - 1) < 5 / np.sqrt(2 * embedding.size)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    blocks = model.base_model.encoder.layer if kind == "post" else model.base_model.h
    norms = [name for name, part in blocks[0].named_modules() if type(part).__name__ == "LayerNorm"]
    assert len(norms) == (2 if kind == "post" else 0)
    assert any("shaping" in name for name, _ in blocks[0].named_parameters()) == (kind == "shaped")
    assert not sees_ahead(model.eval(), sizes.length)
    if kind == "post":
        model.config.is_decoder = False
        assert sees_ahead(type(model)(model.config).eval(), sizes.length)


def sees_ahead(model, length):
    """Whether a later token changes an earlier logit."""
    import torch

    ids = torch.arange(length)[None]
    other = ids.clone()
    other[0, -1] = 77
    with torch.no_grad():
        return bool((model(ids).logits - model(other).logits)[0, :-1].abs().max() > 1e-6)


def test_loss_of_frequencies_is_near_the_entropy(data):
    """On the counted text itself, the loss is the entropy of its tokens, the least that any law reaches."""
    own = replace(data, evaluation=data.train)
    part = np.bincount(np.concatenate([data.train[k]["input_ids"][1:] for k in range(len(data.train))]))
    entropy = -np.sum(part[part > 0] / part.sum() * np.log(part[part > 0] / part.sum()))
    loss = tiny_networks.loss_of_frequencies(own, replace(quick().sizes, evaluated=10**6))
    assert entropy <= loss < entropy + 0.02
    assert loss < np.log(quick().sizes.vocabulary) - 0.5  # the wrong twin: all tokens alike
