"""Do the first steps foretell the rate? Rules and measured rates are right; the statistic finds nothing by chance."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
from scipy.stats import binom

from limitformer_papers.beyond import foretells_rate, rate_networks
from limitformer_papers.beyond.foretells_rate import (
    BEST,
    CHOOSE,
    DEFAULT,
    DIVERGING,
    PILOTS,
    RULES,
    TEST,
    cases_of,
    held_out_of,
    paper,
    quick,
)  # fmt: skip
from limitformer_papers.beyond.rate_networks import MEASURED, NEW, OPTIMIZERS, SAME, RateCase, RateSizes

SMALL = quick().sizes
CASE = RateCase("normed", 8, 1, "scaled", "sgd")


def random(seed):
    return np.random.Generator(np.random.Philox(seed))


# Rules and measured rates, on invented numbers.


def invented(bearable, best=1.0, diverging=1.0, samples=10, number=25):
    """Return cases whose networks bear the rates `bearable` (case, sample) in every measure, and no larger ones.

    Training of seed 0 and 1 has the rates `best` and `diverging` (case,), powers of two.
    """
    cases, rates = cases_of(paper()), np.geomspace(1e-6, 1e6, number)
    bearable = np.broadcast_to(bearable, (len(cases), samples))
    ratio = rates[:, None] / bearable[:, None]  # (case, rate, sample)
    step = np.arange(4.0)
    losses = 3 * np.exp(step * (np.log(ratio)[..., None] / 10))  # equal to its start where the rate is just borne
    tries = 2.0 ** np.arange(-20, 21)
    best, diverging = (np.broadcast_to(each, len(cases))[:, None] for each in (best, diverging))
    end = np.where(tries >= diverging, np.inf, 1 + np.abs(np.log(tries / best)) / 100)
    parts = {key: (("batches", "case", "place", "sample", "step"), np.array([losses] * 2)) for key in MEASURED}
    parts["stream_change"] = parts["loss"][0], np.array([ratio[..., None] ** (step > 0)] * 2)
    parts |= {
        "law_rate": (("case", "place"), np.tile(rates, (len(cases), 1))),
        "tried": (("case", "try"), np.tile(tries, (len(cases), 1))),
        "first": (("seed", "case"), np.full((2, len(cases)), 3.0)),
        "end": (("seed", "case", "try"), np.array([end, end])),
    }
    along = {key: ("case", [getattr(case, key) for case in cases]) for key in foretells_rate.ATTRIBUTES}
    along["half"] = "case", np.where(held_out_of(cases, 0), TEST, CHOOSE)
    return xr.Dataset(parts, {"batches": [SAME, NEW], **along})


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if not rule.lowest])
def test_rule_predicts_the_rate_that_nine_of_ten_networks_bear(name):
    bearable = np.exp(random(3).normal(0, 2, (40, 11)))
    exact = np.sort(bearable, 1)[:, 1]  # of 11 networks, 10 bear the second lowest
    rates = foretells_rate.predicted(invented(bearable, samples=11), name)
    np.testing.assert_allclose(rates, exact, rtol=1e-6)
    assert (np.median(bearable, 1) / exact > 2).any()  # the wrong twin


def test_rule_of_the_lowest_loss_predicts_its_rate():
    data = invented(1.0)
    rates = data["law_rate"].values[0]
    wanted = rates[[10, 14]]
    bowl = np.abs(np.log(rates[:, None] / wanted[np.arange(10) % 2]))[..., None] * np.arange(4.0) + 1
    data["loss"] = data["loss"].dims, np.broadcast_to(bowl, data["loss"].shape)
    np.testing.assert_allclose(foretells_rate.predicted(data, "lowest loss, same batch"), np.sqrt(wanted.prod()))


def test_overflow_is_too_large_a_rate():
    data = invented(1.0)
    rates = data["law_rate"].values[0]
    data["loss"] = data["loss"].where(data["law_rate"] < rates[8])
    np.testing.assert_allclose(foretells_rate.predicted(data, DEFAULT), rates[7])


def test_rates_that_were_not_tried_are_left_out():
    data = invented(1.0, best=2.0**-3, diverging=2.0**4)
    assert set(foretells_rate.measured(data, BEST).ravel()) == {2.0**-3}
    assert set(foretells_rate.measured(data, DIVERGING).ravel()) == {2.0**4}
    fewer = data.assign(end=data["end"].where(~np.isin(data["tried"], [2.0**-3, 2.0**4])))
    assert set(foretells_rate.measured(fewer, BEST).ravel()) <= {2.0**-4, 2.0**-2}
    assert set(foretells_rate.measured(fewer, DIVERGING).ravel()) == {2.0**5}


def test_return_to_the_start_counts_as_diverging():
    data = invented(1.0, diverging=np.inf)
    data["end"] = data["end"].where(data["tried"] != 2.0, 3.0)
    assert set(foretells_rate.measured(data, DIVERGING).ravel()) == {2.0}


# The statistic.


def judged(data):
    return [claim.holds for claim in foretells_rate.claims(data) if "hypothesis" in claim.name]


def of_optimizers(factor):
    """Return a rate that depends on the optimiser only."""
    cases = cases_of(paper())
    return np.array([factor ** OPTIMIZERS.index(case.optimizer) for case in cases])


def test_hypotheses_hold_where_the_law_decides_and_fail_by_chance(monkeypatch):
    powers = 2.0 ** random(1).integers(-8, 9, 40)
    monkeypatch.setattr(foretells_rate, "interval_within", lambda *_: (0.0, 0.0))  # takes most of the time
    assert judged(invented(powers[:, None], best=powers / 2, diverging=8 * powers)) == [True, True]
    chance = []
    for k in range(4):
        other = 2.0 ** random(20 + k).integers(-8, 9, 40)
        chance += judged(invented(powers[:, None], best=other, diverging=other * 4))
    assert sum(chance) <= 2 * binom.ppf(1 - 1e-4, 4, foretells_rate.LEVEL)


def test_wrong_twin_prediction_that_knows_only_the_optimizer_is_rejected():
    rate = of_optimizers(1 / 16)
    noise = 2.0 ** random(4).integers(-2, 3, 40)
    other = rate * np.exp(random(6).normal(0, 0.1, 40))
    data = invented(other[:, None], best=rate * noise, diverging=rate * noise * 8)
    claims = {claim.name: claim.value for claim in foretells_rate.claims(data)}
    assert claims["best rate: ρ over all optimisers together"] > 0.8
    assert judged(data) == [False, False]


def test_held_out_half_does_not_affect_the_choice():
    """A rule that is right only in one half is chosen if that is the choosing one."""
    powers = 2.0 ** random(1).integers(-8, 9, 40)
    data, wrong = invented(powers[:, None], best=powers, diverging=8 * powers), invented(1 / powers[:, None])
    for side, taken in ((CHOOSE, True), (TEST, False)):
        mixed = data.copy()
        for key in MEASURED:
            right = data["half"] == side
            mixed[key] = wrong[key] if key == "loss_unseen" else wrong[key].where(~right, data[key])
        name = foretells_rate.chosen(mixed)
        rho = foretells_rate.rho_of(foretells_rate.half(mixed, side), name, BEST)
        assert (rho > 0.9) is taken


def test_errors_are_those_of_the_held_out_half():
    """A prediction that is right up to a factor of its optimiser has no error; a constant has that of the spread."""
    powers = 2.0 ** random(1).integers(-8, 9, 40)
    data = invented(1.0, best=powers, diverging=np.inf)
    right = powers * of_optimizers(7.0)
    assert foretells_rate.errors(data, right, BEST) == pytest.approx(np.zeros(20), abs=1e-9)
    assert np.median(foretells_rate.errors(data, np.ones(40), BEST)) > 2


def test_halves_are_balanced_and_pilots_are_in_the_choosing_one():
    cases = cases_of(paper())
    assert len({case.name for case in cases}) == 40
    for seed in range(4):
        held_out = held_out_of(cases, seed)
        assert held_out.sum() == 20
        assert not any(out for case, out in zip(cases, held_out, strict=True) if case.name in PILOTS)
        for key in foretells_rate.ATTRIBUTES:
            values = [getattr(case, key) for case in cases]
            assert foretells_rate.balanced(held_out, values)
    assert not foretells_rate.balanced(np.arange(8) < 4, ["a"] * 4 + ["b"] * 4)
    assert (held_out_of(cases, 0) != held_out_of(cases, 1)).any()


# The networks.


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "optimizer"), [("plain", "sgd"), ("llama", "adamw"), ("gpt2", "muon")])
def test_law_is_that_of_the_trained_network(kind, optimizer):
    """The mean loss of an unseen batch after three steps is the same, in standard errors, and not at another rate."""
    sizes = replace(SMALL, law_rates=((0.5, 1.0, 2), (0.02, 0.04, 2), (0.02, 0.04, 2)))
    case, samples = RateCase(kind, 8, 1, "scaled", optimizer), 16
    law = rate_networks.steps_in_law(case, sizes, samples, 0)["loss_unseen"][1, :, :, -1]  # (rate, sample)
    rate = rate_networks.law_rates_of(optimizer, sizes)[0]
    drawn = [three_steps(case, sizes, float(rate), seed) for seed in range(samples)]

    def distance(one, other):
        return abs(np.mean(one) - np.mean(other)) / np.sqrt((np.var(one) + np.var(other)) / samples)

    assert distance(law[0], drawn) < 4
    lowered = [three_steps(case, sizes, float(rate) / 20, seed) for seed in range(samples)]
    assert distance(law[0], lowered) > 4


def three_steps(case, sizes, rate, seed):
    import torch

    torch.manual_seed(seed)
    module = rate_networks.network_of(case, sizes)
    optimizers = rate_networks.optimizers_of(case.optimizer, rate, module)
    *steps, _, unseen = rate_networks.batches_of_text(sizes, 1000, sizes.predicted_steps + 2)
    for ids in steps:
        rate_networks.sequence_losses(module(ids), {"": ids}).mean().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    return rate_networks.loss_on(module, unseen)


def test_search_finds_the_rates_of_all_tries(monkeypatch):
    sizes, tried = RateSizes(), []

    def trained(case, sizes, rate, seed):
        tried.append(rate)
        return 3.0, np.inf if rate >= edge else 1 + abs(np.log2(rate / least)) / 100

    monkeypatch.setattr(rate_networks, "trained_at", trained)
    for power in (-12, -5, -4, 0):
        least, edge = 2.0**power, 2.0 ** (power + 3)
        tries = rate_networks.tries_of("sgd", sizes)
        start, ends = rate_networks.training_of(CASE, sizes, 0)
        assert (start, tries[np.nanargmin(ends)], tries[np.nanargmax(ends >= start)]) == (3.0, least, edge)
        least, edge = least / 2, edge * 4  # those of another seed
        _, again = rate_networks.training_of(CASE, sizes, 1, ends)
        assert (tries[np.nanargmin(again)], tries[np.nanargmax(again >= start)]) == (least, edge)
        assert np.isfinite(ends).sum() < len(tries) / 1.5
    assert len(tried) < 4 * 1.2 * len(tries)


def test_rate_that_leaves_the_loss_as_it_was_does_not_diverge():
    """A loss that equals its start is diverging above the best rate only, or where no rate improved it."""
    first = rate_networks.first_diverged
    assert first(np.array([3.0, np.nan, 2.5, 2.0, np.nan, 3.0, np.inf]), 3.0) == 5
    assert first(np.array([3.0, 2.5, 2.0]), 3.0) == 3
    assert first(np.array([np.inf, np.inf, np.inf]), 3.0) == 0


def test_finished_case_is_read(tmp_path, monkeypatch):
    sizes = replace(SMALL, law_rates=((0.5, 1.0, 2),) * 3, powers=((-1, 0),) * 3)
    whole = rate_networks.outcome_of(CASE, sizes, 1, 4, tmp_path)
    monkeypatch.setattr(rate_networks, "steps_in_law", lambda *_: pytest.fail("it was computed again"))
    np.testing.assert_equal(rate_networks.outcome_of(CASE, sizes, 1, 4, tmp_path), whole)


def test_text_has_the_chains_frequencies():
    """Each token is followed as its law says; the law of another token, the wrong twin, is rejected."""
    sizes = replace(SMALL, vocabulary=6)
    ids = rate_networks.markov_text(sizes, 3, 4000)
    law = random(0).dirichlet(np.full(6, 0.1), 6)
    counts = np.zeros((6, 6))
    np.add.at(counts, (ids[:, :-1].ravel(), ids[:, 1:].ravel()), 1)
    rows = counts.sum(1, keepdims=True)
    error = np.sqrt(law * (1 - law) / rows) + 1e-3
    assert (np.abs(counts / rows - law) < 5 * error).all()
    assert not (np.abs(counts / rows - law[::-1]) < 5 * error).all()
