"""`rate`: the share of plain torch networks that bear what it returns, its report and its errors."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import limitformer as lf
from limitformer.rates import rate as module
from limitformer.rates.critical import RESOLUTION, borne_rate, critical_rate
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


def test_all_networks_are_tried_at_the_lower_end(report):
    low, data = report.interval[0], report.data
    above = data.isel(network=np.flatnonzero(data["critical"] > low))
    assert above.sizes["network"] > 3
    near = np.abs(np.log(above["tried"] / low)) <= np.log(RESOLUTION)
    losses = above["loss"].where(near).min("trial").values  # NaN where it was not tried
    assert (losses[:, -1] < losses[:, 0]).all()


def test_window_below_the_critical_rate_lowers_it():
    """The first network does not bear 0.04, over which its search stepped; 0.042 is as good as 0.04 for the last."""
    asked = []

    def trials(name, critical, borne, tried=()):
        def train(rate):
            asked.append(name)
            return np.array([1.0, 0.5 if borne else 2.0])

        return module.NetworkTrials(train, list(tried), [None] * len(tried), critical)

    every = [
        trials("a", 0.06, False),
        trials("b", 0.05, True),
        trials("c", 0.03, False),
        trials("d", 0.06, False, [0.042]),
    ]
    assert module.lower(every, 0.04)
    assert asked == ["a", "b"]
    assert [each.critical for each in every] == [0.04, 0.05, 0.03, 0.06]
    assert not module.lower(every, 0.04)


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


def test_range_to_tune_in_is_known_before_the_rate_that_nine_of_ten_bear(report):
    """The mean logarithm of two groups of critical rates is known well, their tenth percentile is not."""
    groups = np.tile([0.003, 0.04], 30)
    apart = replace(report, borne=borne_rate(groups), data=report.data.isel(network=np.arange(60) % report.networks)
                    .assign(critical=("network", groups)))  # fmt: skip
    assert not apart.decided
    ends = [number(each, 2) for each in apart.tune]
    assert apart.answer.startswith(f"Tune between {ends[0]} and {ends[1]}. Not decided is which rate nine of ten")
    few = replace(apart, borne=borne_rate(groups[:8]), data=apart.data.isel(network=slice(8)))
    ends = [number(each, 2) for each in few.tune]
    wide = "wide: the critical rates of these 8 networks differ by a factor of up to 13"
    assert few.answer.startswith(
        f"Tune between {ends[0]} and {ends[1]} ({wide}). Not decided is which rate nine of ten"
    )
    assert few.tune[0] < apart.tune[0] < apart.tune[1] < few.tune[1]


def test_critical_rates_that_differ_too_much_are_not_answered_by_more_networks(report):
    """The next rate is below every critical rate, also where the middle of the range is not."""
    critical = np.array([0.3, 0.0004, 2.0, 0.03])
    data = report.data.isel(network=slice(4)).assign(critical=("network", critical))
    apart = replace(report, borne=borne_rate(critical), data=data)
    assert "bear: 500 networks would not tell, as critical rates differ too much. So far" in apart.answer
    assert apart.next_rate == 0.0002 < np.sqrt(np.prod(apart.tune))
    assert report.next_rate == pytest.approx(np.sqrt(np.prod(report.tune)))
    assert not report.hopeless


def test_too_few_networks_do_not_decide():
    report = searched(networks=3)
    assert not report.decided
    assert report.answer.startswith("Not decided: ")
    ends = [number(each, 2) for each in report.record()["tune"]]
    assert report.answer.endswith(f", and one would tune between {' and '.join(ends)}.")
    assert "more networks, about" in report.answer
    fewer = searched(networks=1)
    assert not fewer.decided
    assert np.isnan(fewer.borne.spread)
    np.testing.assert_array_equal(fewer.data["critical"], report.data["critical"][:1])
    critical, ends = float(fewer.data["critical"][0]), [number(each, 2) for each in fewer.tune]
    provisional = f"Provisional: the critical rate of one network is {number(critical, 2)}, and one would tune between "
    assert fewer.answer.endswith(f". {provisional}{' and '.join(ends)}.")
    assert 61 * fewer.tune[0] == pytest.approx(critical, rel=0.02)  # the page: a 61st to a 13th
    assert 13 * fewer.tune[1] == pytest.approx(critical, rel=0.04)


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


def test_search_does_not_begin_above_rates_that_a_network_does_not_bear():
    """Three of four networks bear 0.0085 to 0.04 but nothing from 0.0035 on, as in a post-norm decoder."""

    def searches(begin, networks=8, own=1e-3):
        found = []
        for k in range(networks):
            top = 0.04 * 1.05**k
            island = k % 4 > 0
            bears = partial(lambda rate, top, island: rate < top and not (island and 0.0035 < rate < 0.0085), top=top,
                            island=island)  # fmt: skip
            found.append(critical_rate(bears, begin(found, own)))
        return np.array(found)

    found = searches(module.beginning)
    low = np.arange(8) % 4 > 0
    assert found[low] == pytest.approx(0.0035, rel=RESOLUTION - 1)
    assert found[~low] == pytest.approx(0.04 * 1.05 ** np.arange(8)[~low], rel=RESOLUTION - 1)
    twin = searches(lambda found, own: found[-1] / 4 if found else own)
    assert (twin[low] > 0.02).any()


def test_lower_beginning_ends_at_the_same_rate():
    ends = {critical_rate(lambda rate: rate < 0.123, 0.1 / 2**k) for k in range(6)}
    assert len(ends) == 1
    assert module.beginning([0.4], 1.0) == 0.1
    assert module.beginning([0.4], 0.02) == 0.1 / 8
    assert module.beginning([0.4] * 4, 0.02) == 0.1
    assert module.beginning([0.01, 0.4, 0.4, 0.4], 0.02) == 0.1 / 32


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
