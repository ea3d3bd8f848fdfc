"""`rate`: the share of plain torch networks that bear what it returns, its report and its errors."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import limitformer as lf
from limitformer.rates import rate as module
from limitformer.rates.critical import RESOLUTION
from limitformer.rates.rate import RateInterrupted
from limitformer.reports.figures import number
from training_networks import Small

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def sgd(network):
    return torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.5)


def loss_of(network):
    return functional.cross_entropy(network(IDS)[0, :-1], IDS[0, 1:])


def share_that_bears(rate, networks):
    """Return the share of plain networks whose loss is lower after three steps of torch's optimiser."""
    count = 0
    for k in range(networks):
        torch.manual_seed(k)
        network = Small()
        optimizer = sgd(network)
        optimizer.param_groups[0]["lr"] = rate
        first = loss_of(network).item()
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(network).backward()
            optimizer.step()
        count += loss_of(network).item() < first
    return count / networks


def searched(**options):
    return lf.rate(Small, IDS, **{"optimizer": sgd, "seed": 0, "progress": False, "witness": False, **options})


@pytest.fixture(scope="module")
def report():
    return searched(networks=60)


def test_nine_of_ten_plain_networks_bear_the_rate(report):
    assert report.decided
    low, high = report.interval
    networks = 400
    error = 3 * np.sqrt(0.9 * 0.1 / networks)
    assert share_that_bears(low, networks) > 0.9 - error
    assert share_that_bears(high, networks) < 0.9 + error
    assert share_that_bears(2 * high, networks) < 0.9 - error  # a twin that is twice too large


def test_trials_are_those_of_steps_at_the_same_rates(report):
    one = report.data.isel(network=0)
    rates = one["tried"].values[:3]
    other = lf.steps(Small, IDS, optimizer=sgd, rates=rates, steps=3, samples=1, seed=0, progress=False, witness=False)
    np.testing.assert_allclose(one["loss"].values[:3], other.data["loss"].values[:, 0], rtol=1e-6)


def test_text_json_csv_and_data_agree(report, tmp_path):
    written = report.save(tmp_path)
    record = json.loads((tmp_path / "rate.json").read_text(encoding="utf-8"))
    assert record["rate"] == report.rate
    assert [record["low"], record["high"]] == list(report.interval)
    assert record["answer"] in str(report).replace("\n  ", " ")
    rows = (tmp_path / "rate.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) - 1 == int(report.data["tried"].notnull().sum())
    for each in report.data["critical"].values:  # between the largest rate that is borne and the smallest that is not
        one = [row for row in report.trials() if row["network"] == list(report.data["critical"].values).index(each)]
        above = min(row["rate"] for row in one if not row["bears"])
        assert max(row["rate"] for row in one if row["bears"] and row["rate"] < above) < each < above
    assert {path.suffix for path in written} >= {".json", ".csv", ".nc"}


def test_too_few_networks_do_not_decide():
    report = searched(networks=4)
    assert not report.decided
    assert report.answer.startswith("Not decided: ")
    ends = [number(each, 2) for each in report.record()["tune"]]
    assert report.answer.endswith(f", and one would tune between {' and '.join(ends)}.")
    assert "more networks, about" in report.answer
    fewer = searched(networks=1)
    assert not fewer.decided
    assert np.isnan(fewer.borne.spread)
    np.testing.assert_array_equal(fewer.data["critical"], report.data["critical"][:1])


def test_networks_that_bear_no_rate_or_every_rate():
    def still(out, inputs):
        return (0 * out).flatten(1).sum(1) + 1

    assert "the network bears no rate" in searched(loss=still).answer  # one is enough to say so

    def falling(out, inputs):  # linear: the sign of the gradient never changes
        return out.flatten(1).sum(1)

    class Line(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x):
            return x @ self.weight

    line = lf.rate(Line, torch.ones(1, 2, 3), optimizer=sgd, loss=falling, seed=0, progress=False, witness=False)
    assert "the network bears every rate up to 100" in line.answer


def at(rate):
    return lambda network: torch.optim.SGD(network.parameters(), lr=rate, momentum=0.5)


def test_own_rate_that_changes_no_loss_is_only_a_start():
    one, other = (searched(optimizer=at(rate), networks=1).data["critical"].item() for rate in (1e-30, 0.1))
    assert abs(np.log(one / other)) < np.log(RESOLUTION)


@pytest.mark.parametrize("own", [0.0, 1e12])
def test_own_rate_that_no_search_can_begin_with(own):
    with pytest.raises(lf.InputError, match=r"own learning rate is .*, and the search begins there"):
        searched(optimizer=at(own))


def test_several_rates_say_which_one_is_meant(report):
    def groups(network):
        parts = [{"params": [network.head.weight]}, {"params": [network.table.weight], "lr": 0.01}]
        return torch.optim.SGD(parts, lr=0.1)

    assert (
        "that is 0.1 in the optimiser; its others, there 0.01, change" in searched(optimizer=groups, networks=1).caveat
    )
    assert "others" not in report.caveat


def test_loss_that_is_not_finite_at_the_start():
    def broken(out, inputs):
        return out.flatten(1).sum(1) * np.inf

    with pytest.raises(lf.InputError, match="not finite before the first step"):
        searched(loss=broken)


@pytest.mark.parametrize(
    "option", [{"networks": 0}, {"steps": 0}, {"minutes": 0}, {"minutes": "3"}, {"witness": "no"}, {"draw": "bogus"}]
)
def test_arguments_that_cannot_be_used(option):
    with pytest.raises(lf.InputError, match=next(iter(option))):
        searched(**option)


@pytest.mark.parametrize("call", [lf.rate, lf.steps, lf.equivalent_rates])
@pytest.mark.parametrize("inputs", [[], torch.zeros(0, 8, dtype=torch.long), {"ids": []}, 1.5, None, object()])
def test_inputs_without_sequences(call, inputs):
    needed = {lf.rate: {}, lf.steps: {"samples": 1}, lf.equivalent_rates: {"other": "adam"}}[call]
    words = "must have at least one sequence|must be a number of tokens, texts or an array"
    with pytest.raises(lf.InputError, match=words):
        call(Small, inputs, optimizer="sgd", seed=0, progress=False, **needed)
    with pytest.raises(lf.InputError, match="sequences must be a whole number"):
        call(Small, 8, optimizer="sgd", seed=0, progress=False, sequences="3", **needed)


def test_interruption_keeps_the_finished_networks(monkeypatch, report):
    plain = module.search

    def stopped(training, network, *rest):
        if network == 2:
            raise KeyboardInterrupt
        return plain(training, network, *rest)

    monkeypatch.setattr(module, "search", stopped)
    with pytest.raises(RateInterrupted) as caught:
        searched()
    kept = caught.value.report
    assert kept.networks == 2
    np.testing.assert_array_equal(kept.data["critical"], report.data["critical"][:2])


def test_kinds_of_weight_are_sorted_and_those_far_from_the_median_are_marked(report):
    change = {"all weights": 9.0, "a": 0.4, "b": 0.5, "c": 20.0, "d": 0.01, "e": 0.6, "vectors": 0.001, "head": 0.0}
    values = np.full((len(change), report.networks), np.nan)
    values[:, 0] = list(change.values())
    known = report.data.drop_vars(("stream_change", "stream_rate", "kind"))
    measured = {"stream_change": (("kind", "network"), values), "stream_rate": 0.02}
    sorted_report = replace(report, data=known.assign(measured).assign_coords(kind=list(change)))
    head, *rows = sorted_report.kinds()
    assert head[0] == "first step at 0.02"
    assert [row[0] for row in rows] == ["c", "all weights", "e", "b", "a", "d", "vectors", "head"]
    assert {row[0]: row[3] for row in rows if row[3]} == {"c": "much", "d": "little"}
    assert rows[3][2] == "1"  # the median kind
    short = [
        line.split()[0] for line in sorted_report.text(full=False).splitlines() if line.endswith(("much", "little"))
    ]
    assert short == ["c"]
    assert "\nvectors" in sorted_report.text()
    assert "\nvectors" not in sorted_report.text(full=False)
    assert replace(report, data=known).kinds() == []


def test_interruption_while_kinds_are_measured_keeps_the_search(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "stream_change", interrupted)
    with pytest.raises(RateInterrupted) as caught:
        searched(networks=60)
    assert caught.value.report.decided
