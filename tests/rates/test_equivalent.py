"""Equivalent rates against plain torch networks, and the change of the stream by kind of weight."""

import json

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch.nn import functional

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.rates import equivalent as module
from limitformer.rates.rate import RateInterrupted
from training_networks import Small

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def sgd(network, rate=0.3):
    return torch.optim.SGD(network.parameters(), lr=rate)


def adam(network, rate=1e-3):
    return torch.optim.Adam(network.parameters(), lr=rate)


def change(seed, make, rate, kind):
    """Return the relative change of the output of a plain network by one step of the weights of a kind."""
    torch.manual_seed(seed)
    network = Small().double()
    for name, each in network.named_parameters():
        each.requires_grad_(name.startswith(kind))
    before = network(IDS)
    functional.cross_entropy(before[0, :-1], IDS[0, 1:]).backward()
    make(network, rate).step()
    return ((network(IDS) - before).norm() / before.norm()).item()


def plain(kind, networks=60):
    """Return the logarithms of the rates of Adam that change plain networks as SGD does at 0.3."""

    def equal(seed):
        wanted = change(seed, sgd, 0.3, kind)
        return brentq(lambda log: change(seed, adam, np.exp(log), kind) - wanted, np.log(1e-6), np.log(1.0), xtol=1e-3)

    return np.array([equal(seed) for seed in range(networks)])


@pytest.fixture(scope="module")
def report():
    return lf.equivalent_rates(Small, IDS, optimizer=sgd, other=adam, networks=12, seed=0, progress=False)


@pytest.mark.parametrize(("kind", "prefix"), [("all weights", ""), ("hidden", "hidden.weight"), ("table", "table")])
def test_rates_are_those_of_plain_networks(report, kind, prefix):
    logs, own = plain(prefix), np.log(report.data["equal_rate"].sel(kind=kind).values)
    error = 4 * np.sqrt(logs.var(ddof=1) / len(logs) + own.var(ddof=1) / len(own))
    assert abs(own.mean() - logs.mean()) < error
    assert abs(own.mean() + np.log(1.5) - logs.mean()) > error  # a twin: rates 1.5 times as large


def test_same_optimizer_at_twice_the_rate_has_equivalent_rates_of_twice_its_own():
    report = lf.equivalent_rates(Small, IDS, optimizer=adam, rate=2e-3, other=adam, networks=2, seed=0, progress=False)
    equal = report.data["equal_rate"]
    np.testing.assert_allclose(equal.sel(kind=["all weights", "head", "hidden", "vectors"]), 2e-3, rtol=0.02)


def test_text_json_and_data_agree(report, tmp_path):
    report.save(tmp_path)
    record = json.loads((tmp_path / "equivalent.json").read_text(encoding="utf-8"))
    middle, low, high = report.rate()
    assert (record["rate"], record["low"], record["high"]) == (middle, low, high)
    assert low < middle < high
    assert f"moves the stream as Adam at {middle:.3g} does" in report.answer
    assert next(row["kind"] for row in record["kinds"]) == "all weights"
    assert len((tmp_path / "equivalent.csv").read_text(encoding="utf-8").splitlines()) == 1 + 5


def test_optimizer_that_moves_nothing_has_no_equivalent_rate():
    report = lf.equivalent_rates(
        Small, IDS, optimizer=sgd, other=lambda m: torch.optim.SGD([m.head.weight], lr=0.1), networks=2, seed=0,
        progress=False,
    )  # fmt: skip
    assert np.isnan(report.rate("hidden")).all()
    assert report.rate("head")[0] == pytest.approx(0.3, rel=0.02)


def test_interruption_keeps_the_finished_networks(report, monkeypatch):
    calls, change_of = [], module.stream_change

    def interrupted(training, rules, sample, names):
        calls.append(sample)
        if sample == 3:
            raise KeyboardInterrupt
        return change_of(training, rules, sample, names)

    monkeypatch.setattr(module, "stream_change", interrupted)
    with pytest.raises(RateInterrupted) as caught:
        lf.equivalent_rates(Small, IDS, optimizer=sgd, other=adam, networks=9, seed=0, progress=False)
    assert caught.value.report.networks == 3
    np.testing.assert_array_equal(caught.value.report.data["equal_rate"], report.data["equal_rate"][:, :3])


def test_one_network_is_too_few():
    with pytest.raises(InputError, match="networks must be at least 2"):
        lf.equivalent_rates(Small, IDS, optimizer=sgd, other=adam, networks=1, seed=0)


def test_functions_of_the_loop_change_the_groups_of_both_optimizers():
    def scaled(network):
        return torch.optim.SGD([{"params": list(network.parameters()), "lr_scale": 0.5}], lr=0.3)

    def scale(optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= group.get("lr_scale", 1.0)

    options = {"networks": 2, "seed": 0, "progress": False}
    halved = lf.equivalent_rates(Small, IDS, optimizer=scaled, other="sgd", after_groups=scale, **options)
    assert halved.rate()[0] == pytest.approx(0.15, rel=1e-4)
    plain = lf.equivalent_rates(Small, IDS, optimizer=sgd, other="sgd", **options)
    assert plain.rate()[0] == pytest.approx(0.3, rel=1e-4)
    with pytest.raises(InputError, match="needs a function"):
        lf.equivalent_rates(Small, IDS, optimizer="sgd", other="adam", after_groups=scale, **options)


def test_step_that_is_not_finite_has_no_equal():
    def broken(out, inputs):
        return out.flatten(1).sum(1) * np.nan

    with pytest.raises(InputError, match="the step of SGD is not finite"):
        lf.equivalent_rates(Small, IDS, optimizer=sgd, other=adam, networks=2, seed=0, progress=False, loss=broken)
