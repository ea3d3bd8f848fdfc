"""`rate`: the learning rate that nine of ten networks bear, by a search in each of them."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr

from limitformer.base.errors import require, require_count, require_real
from limitformer.base.progress import advance, duration, progress_bar
from limitformer.rates.critical import (
    ENOUGH,
    HIGHEST,
    RESOLUTION,
    STRIDE,
    BorneRate,
    borne_rate,
    critical_rate,
    networks_needed,
)
from limitformer.rates.kinds import ALL, VECTORS, kinds_of, stream_change
from limitformer.rates.tuning import leave_one_out, tuning_range
from limitformer.reports.figures import Line, Panel, number
from limitformer.reports.page import Card, Facts, Figures, Page, Section, TextTable
from limitformer.reports.report import AnyReport, csv_of, finite_values
from limitformer.reports.verdict import FINE, SIGNS, WATCH, aligned, titled, wrapped
from limitformer.simulation.simulate import Interrupted
from limitformer.stepping.optimizers import NotUnderstoodError, with_groups
from limitformer.stepping.rules import MOST_RATE, in_words
from limitformer.stepping.simulate import Training, training_of
from limitformer.subjects.inputs import inputs_of
from limitformer.subjects.losses import Loss
from limitformer.subjects.subject import resolve
from limitformer.weightless.run import AUTO
from limitformer.weightless.simulate import named_errors, provenance
from limitformer.witness import DRAWN, FULL, Witness, witness_steps

FEWEST, MOST = 4, 40  # networks
NARROW = 2.0  # ratio of the ends of an interval that decides
MEASURED = 2  # networks whose stream is measured by kind of weight
FAR = 10.0  # ratio of a kind's change of the stream to the median, from which it is named
FURTHER = 16.0  # factor of a rate that changes no loss
BAR = "networks whose critical rate is known"
FEW = 10  # critical rates that the short text lists


@dataclass(frozen=True)
class RateReport(AnyReport):
    """The result of `limitformer.rate`.

    Attributes:
        name: the network's name.
        borne: the rate that nine of ten networks bear, with its interval; None if too few critical rates are known.
        data: by network its `critical` rate (0: it bears none; ∞: it bears all), the `seconds` of its search, and by
            network and trial the `tried` rates and the `loss` before each step and after the last; if it decided, the
            relative `stream_change` by the first step of each kind of weight alone, at the rate `stream_rate`.
        about: provenance.
        witness: two steps, compared with the user's own module and optimiser in plain PyTorch; None if none were.
    """

    name: str
    borne: BorneRate | None
    data: xr.Dataset
    about: Mapping[str, Any] = field(default_factory=dict)
    witness: Witness | None = None

    FILES = "rate"

    @property
    def rate(self) -> float:
        """The rate that nine of ten networks bear; NaN if it is not known."""
        return np.nan if self.borne is None else self.borne.rate

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of its 95 % interval; NaN if it is not known."""
        return (np.nan, np.nan) if self.borne is None else (self.borne.low, self.borne.high)

    @property
    def tune(self) -> tuple[float, float]:
        """The ends of the range in which to tune; NaN if critical rates are not known. See `limitformer.rates`."""
        return (np.nan, np.nan) if self.borne is None else tuning_range(self.data["critical"].values.tolist())

    @property
    def networks(self) -> int:
        """The number of networks that were searched."""
        return self.data.sizes["network"]

    @property
    def decided(self) -> bool:
        """Whether the ends of the interval differ by at most a factor of two."""
        return self.borne is not None and self.networks >= FEWEST and self.borne.factor <= NARROW

    @property
    def tunable(self) -> bool:
        """Whether there are enough critical rates for a range to tune in."""
        return self.borne is not None and self.networks >= FEWEST

    @property
    def wide(self) -> str:
        """Why the range to tune in is wider than that of a network whose critical rate is known; empty if it is not."""
        usual, own = (high / low for low, high in (tuning_range([1.0]), self.tune))
        if own < 1.01 * usual:
            return ""
        critical = self.data["critical"].values
        apart = number(float(critical.max() / critical.min()), 2)
        return f" (wide: the critical rates of these {self.networks} networks differ by a factor of up to {apart})"

    @property
    def answer(self) -> str:
        """The answer in a sentence, or what would give one."""
        unusual = self.unusual()
        if unusual:
            return f"Not decided: {unusual}."
        assert self.borne is not None
        low, high = self.interval
        borne = (
            f"nine of ten networks bear {number(low, 2)} or more: estimate {number(self.rate, 2)} "
            f"({number(low, 2)} to {number(high, 2)}, {self.networks} networks)"
        )
        ends = " and ".join(number(each, 2) for each in self.tune)
        if not self.decided:
            needed, seconds = self.missing
            more = f"{needed} more network{'' if needed == 1 else 's'}, {duration(seconds)}"
            if self.hopeless:
                more = f"{ENOUGH} networks would not tell, as critical rates differ too much"
            if self.tunable:
                return (
                    f"Tune between {ends}{self.wide}. Not decided is which rate nine of ten networks bear: {more}. So "
                    f"far {borne}."
                )
            if self.networks == 1:
                borne = f"the critical rate of one network is {number(self.rate, 2)}"
            return f"Not decided: {more}. Provisional: {borne}, and one would tune between {ends}."
        return f"Tune between {ends}; {borne}."

    @property
    def missing(self) -> tuple[int, float]:
        """The number of further networks that would probably decide, and the seconds that they would take."""
        spread = np.nan if self.borne is None else self.borne.spread
        enough = FEWEST if np.isnan(spread) else networks_needed(spread, NARROW)
        needed = max(enough, FEWEST, self.networks + 1) - self.networks
        return needed, needed * float(self.data["seconds"].mean())

    @property
    def hopeless(self) -> bool:
        """Whether critical rates differ so much that `ENOUGH` networks would probably not decide."""
        return self.borne is not None and self.tunable and networks_needed(self.borne.spread, NARROW) >= ENOUGH

    @property
    def next_rate(self) -> float:
        """The middle of the range to tune in; half the smallest critical rate if that is lower."""
        return min(math.sqrt(math.prod(self.tune)), float(self.data["critical"].min()) / 2)

    def unusual(self) -> str:
        """Return why critical rates are not numbers; empty if all are."""
        critical = self.data["critical"].values
        none, every = int((critical == 0).sum()), int(np.isinf(critical).sum())
        if self.networks == 1 and none + every:
            return "the network bears " + (
                "no rate: its loss does not fall" if none else f"every rate up to {HIGHEST:g}"
            )
        if none:
            return f"{none} of {self.networks} networks bear no rate: their loss does not fall"
        if every:
            return f"{every} of {self.networks} networks bear every rate up to {HIGHEST:g}"
        return ""

    @property
    def heading(self) -> str:
        """Optimiser, steps, batch and loss that ran."""
        steps = self.data.sizes["step"] - 1
        parts = [str(self.about["optimizer"]), f"{steps} step{'' if steps == 1 else 's'}", str(self.about["inputs"])]
        return ", ".join([*parts, f"loss: {self.about['loss']}"])

    @property
    def caveat(self) -> str:
        """The meaning of the rate, and its limits."""
        return (
            "A network bears a rate if the loss of this batch is lower after the steps than before. Give the batch of "
            "training: a smaller one has other gradients. The interval is right in 95 of 100 cases if the logarithms "
            f"of critical rates are normal.{self.ratios}{self.source}"
        )

    @property
    def source(self) -> str:
        """The sentence about the range in which to tune; empty if there is none."""
        if not self.tunable:
            return ""
        within, count = leave_one_out()
        return (
            f" The range to tune in is that of the ratio of critical to best rate in a pilot of {count} small language "
            f"models (bytes, widths 48 to 128, 150 steps without warm-up): it held the best rate of {within} of them, "
            "each left out of its own range. In a later study it held that of 12 of 20 other networks, and of none of "
            "the five without norms, whose best rates were 7 to 18 times above it. Other sizes, lengths of training "
            "and data were not tried."
        )

    @property
    def ratios(self) -> str:
        """The sentence about an optimiser with several rates; empty if it has one."""
        own, others = self.about.get("own_rate"), self.about.get("other_rates")
        if not others:
            return ""
        return (
            f" It is the rate that is {own:g} in the optimiser; its others, there {others}, change by the same factor."
        )

    def __repr__(self) -> str:
        """Return the name and the answer on one line; `print` shows the report."""
        return f"<RateReport {self.name}: {self.answer}>"

    def __str__(self) -> str:
        return self.text()

    def text(self, full: bool = True) -> str:
        """Return the answer, what ran, and the critical rates, on lines of at most 80 characters.

        Without `full`, of many critical rates only three, and only the kinds of weight that change the stream much.
        """
        proof = "" if self.witness is None else self.witness.in_words(self.networks)
        lines = [self.answer, f"{self.name}: {self.heading}", proof]
        rates = np.sort(self.data["critical"].values)
        shown = rates if full or len(rates) <= FEW else rates[[0, len(rates) // 2, -1]]
        critical = ("" if len(shown) == len(rates) else "smallest, middle and largest: ") + ", ".join(
            number(each, 2) for each in shown
        )
        kinds = [row for k, row in enumerate(self.kinds()) if full or row[-1] == "much" or not k]
        table = ["", *aligned(kinds), ""] if len(kinds) > 1 else [""]
        return "\n".join(
            [
                *(row for line in lines if line for row in wrapped(line, "  ")),
                "",
                *wrapped(f"Critical rates of the networks: {critical}", "  "),
                *table,
                *wrapped(self.caveat, ""),
            ]
        )

    def kinds(self) -> list[list[str]]:
        """Return the change of the stream by kind of weight as a table, falling; empty if it was not measured."""
        if "stream_change" not in self.data:
            return []
        change = self.data["stream_change"].mean("network")
        single = [kind for kind in change["kind"].values if kind not in (ALL, VECTORS) and change.sel(kind=kind) > 0]
        middle = float(change.sel(kind=single).median()) if single else np.nan
        rows = [
            [f"first step at {number(float(self.data['stream_rate']), 2)}", "change of the stream", "over median", ""]
        ]
        for kind in change["kind"].values[np.argsort(-change.values, kind="stable")]:
            value = float(change.sel(kind=kind))
            ratio = value / middle
            word = "much" if ratio > FAR else "little" if ratio < 1 / FAR else ""
            rows.append([str(kind), number(value, 2), number(ratio, 2), word if kind in single else ""])
        return rows

    def contents(self) -> Page:
        """Return the page: the answer, the losses by rate of each network, and the provenance."""
        grade, word = (FINE, "decided") if self.decided else (WATCH, "not decided")
        trials, kinds = self.trials(), self.kinds()
        head, rows = list(trials[0]), [[number(each) for each in row.values()] for row in trials]
        sections = [
            Section("Answer", [Card(grade, word, self.answer, sign=SIGNS[grade])]),
            Section(
                "Loss by rate", [Figures([self.panel()], [("samples", "a network at a rate"), ("guess", "no change")])]
            ),
            Section("Trials", [TextTable("Trials", head, rows, folded=True)]),
            *([Section("Kinds of weight", [TextTable("Kinds of weight", kinds[0], kinds[1:])])] if kinds else []),
            Section("Limits", [self.caveat]),
            Section("Provenance", [Facts({key: each for key, each in self.about.items() if key != "laws"})]),
        ]
        proof = "" if self.witness is None else self.witness.in_words(self.networks)
        return Page("rate", self.name, f"Which learning rate does {self.name} bear?", (self.heading, proof), sections)

    def panel(self) -> Panel:
        """Return the loss after the steps over that before, or their difference if a loss is not positive, by rate."""
        loss, tried = self.data["loss"].values, self.data["tried"].values
        first, last = loss[..., 0], loss[..., -1]
        positive = not (loss <= 0).any()
        change = last / first if positive else last - first
        lines = []
        for k in range(self.networks):
            order = np.argsort(tried[k])[: int(np.isfinite(tried[k]).sum())]  # unused trials are NaN
            lines.append(Line("samples", f"network {k}", tried[k, order], change[k, order]))
        ends = np.array([np.nanmin(tried), np.nanmax(tried)])
        lines.append(Line("guess", "no change", ends, np.full(2, float(positive))))
        lost = int((np.isfinite(tried) & ~np.isfinite(change)).sum())
        note = f"below {int(positive)} a network bears the rate" + (f"; {lost} diverged, not shown" if lost else "")
        title = "Loss after the steps over loss before" if positive else "Loss after the steps minus loss before"
        return Panel(title, note, "rate", tuple(lines), linear=not positive, log=True, least_span=4.0 * positive)

    def csv(self) -> str:
        """Return a row for each network that was trained for a trial: its rate, and the losses by step."""
        trials = self.trials()
        return csv_of(list(trials[0]), trials)

    def trials(self) -> list[dict[str, float]]:
        """Return a row for each trial: network, rate, whether the network bears it, and the losses by step."""
        rows = []
        for k in range(self.networks):
            one = self.data.isel(network=k)
            for rate, losses in zip(one["tried"].values, one["loss"].values, strict=True):
                if not np.isnan(rate):
                    row = {"network": k, "rate": float(rate), "bears": int(bears(losses))}
                    rows.append(row | {f"loss_{step}": float(each) for step, each in enumerate(losses)})
        return rows

    def record(self) -> dict[str, Any]:
        """Return the report as JSON holds it: numbers that are not finite are left out."""
        low, high = self.interval
        return {
            "name": self.name,
            "answer": self.answer,
            "decided": self.decided,
            "heading": self.heading,
            "caveat": self.caveat,
            **finite_values({"rate": self.rate, "low": low, "high": high, "networks": self.networks}),
            "tune": [each if np.isfinite(each) else None for each in self.tune],
            "critical": [each if np.isfinite(each) else None for each in self.data["critical"].values.tolist()],
            "witness": None if self.witness is None else self.witness.record(),
            "about": finite_values(dict(self.about)),
        }

    def dataset(self) -> xr.Dataset:
        """Return the trials and critical rates, with the provenance."""
        return self.data.assign_attrs(finite_values(dict(self.about)))


class RateInterrupted(Interrupted):
    """Ctrl-C during `rate` or `equivalent_rates`; `report` is that of the networks that are finished."""

    def __init__(self, report: Any) -> None:
        super().__init__(report.data.rename(network="sample"))
        self.report, self.pickled_arguments = report, (report,)


def bears(losses: np.ndarray) -> bool:
    """Whether a network with these losses, by step, bears the rate."""
    return bool(losses[-1] < losses[0])  # false for NaN


def rate(
    model: Any,
    inputs: Any = 64,
    *,
    optimizer: Any,
    after_groups: Any = None,
    steps: int = 3,
    seed: int,
    networks: int = MOST,
    sequences: int | None = None,
    minutes: float | None = None,
    loss: Loss | str | None = None,
    clip: float | None = None,
    warmup: int = 0,
    settings: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    draw: str = AUTO,
    dtype: torch.dtype = torch.float32,
    batch_dim: int = 0,
    trust_remote_code: bool = False,
    progress: bool = True,
    witness: bool | str = True,
) -> RateReport:
    """Search the largest learning rate that nine of ten networks bear in their first steps.

    Each network's critical rate is found by bisection, with the same weights at every rate. Networks are added, at
    least four, until the ends of the interval differ by at most a factor of two. Then all are tried at its lower end,
    and more are added if some do not bear that. A network that bears no rate, or every rate up to 100, ends the search.

    Args:
        model: as for `limitformer.steps`.
        inputs: the batch of every step. The batch of training gives the narrowest answer.
        optimizer, after_groups: as for `limitformer.steps`; the rates of its groups keep their ratios.
        steps: number of steps after which the loss of the batch must be lower than before.
        seed: the same seed gives the same networks.
        networks: the largest number of networks.
        sequences: as for `limitformer.steps`.
        minutes: the time after which no further network begins; None: no limit.
        loss, clip, warmup, settings, overrides, draw, dtype, batch_dim, trust_remote_code, progress, witness: as for
            `limitformer.steps`.

    Raises:
        InputError: an argument cannot be used, the module's code cannot run, or it makes the same network each time.
        RateInterrupted: Ctrl-C after the first network; it holds the report of the finished networks.

    >>> import limitformer as lf
    >>> small = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 99}
    >>> report = lf.rate(small, 16, optimizer="adamw", seed=0, networks=4, progress=False)
    >>> report.networks, 1e-3 < report.rate < 10
    (4, True)
    """
    optimizer = with_groups(optimizer, after_groups)
    require_count("steps", steps)
    require_count("networks", networks)
    if minutes is not None:
        require(require_real("minutes", minutes) > 0, f"minutes must be above 0, or None; got {minutes}.")
    require(witness in (True, False, FULL), f"witness must be True, False or {FULL!r}; got {witness!r}.")
    subject = resolve(model, settings, trust_remote_code=trust_remote_code)
    first = inputs_of(inputs, subject, sequences)
    build = partial(
        training_of, model=subject, inputs=first, optimizer=optimizer, rates=None, steps=steps, seed=seed, loss=loss,
        sequences=sequences, unseen=False, clip=clip, warmup=warmup, draw=draw, dtype=dtype, batch_dim=batch_dim,
        overrides=None if overrides is None else dict(overrides),
    )  # fmt: skip
    proof: Witness | None = None
    try:
        proof = witness_steps(build, optimizer, witness, sequences=sequences) if witness else None
        training = build(drawn=proof.reason if proof is not None and proof.status == DRAWN else "")
    except NotUnderstoodError as error:
        proof = Witness(DRAWN, error.reason)
        training = build(drawn=error.reason)
    training.require_different_networks()
    own = training.rules[0].base
    others = ", ".join(f"{each:g}" for each in sorted(training.own_rates - {own}))
    require(
        0 < own <= MOST_RATE,
        f"the optimiser's own learning rate is {own:g}, and the search begins there: it must be above 0 and at most "
        f"{MOST_RATE:g}. Nearest: lr=1e-3.",
    )
    began, finished = time.perf_counter(), list[NetworkTrials]()

    def report(change: xr.Dataset | None = None) -> RateReport:
        about = {
            **provenance(training.network), "description": "critical learning rates", "seed": seed,
            "optimizer": in_words(training.rules), "own_rate": own, "other_rates": others, "loss": training.loss.name,
            "inputs": str(training.first), "wall_seconds": time.perf_counter() - began,
        }  # fmt: skip
        critical = [each.critical for each in finished]
        known = all(0 < each < np.inf for each in critical)
        data = data_of(finished) if change is None else data_of(finished).merge(change)
        return RateReport(titled(subject.name, settings), borne_rate(critical) if known else None, data, about, proof)

    bar = progress_bar(BAR, networks, 0.0) if progress else None
    if bar is not None and minutes:
        bar.limit = 60 * minutes
    try:
        while len(finished) < networks:
            start = beginning([each.critical for each in finished], own)
            finished.append(search(training, len(finished), start, subject, first))
            advance(bar, len(finished))
            now = report()
            while now.decided and lower(finished, now.interval[0]):
                now = report()
            if now.unusual() or now.decided or (minutes and time.perf_counter() - began > 60 * minutes):
                break
        return report(changes_by_kind(training, now, subject, first)) if now.decided else now
    except KeyboardInterrupt as interrupt:
        if not finished:
            raise
        raise RateInterrupted(report()) from interrupt
    finally:
        advance(bar, -1)


def changes_by_kind(training: Training, found: RateReport, subject: Any, first: Any) -> xr.Dataset:
    """Return the change of the stream by each kind of weight, in the middle of the range to tune in, of two networks.

    Of the others it is NaN.
    """
    rate, kinds = float(np.sqrt(np.prod(found.tune))), kinds_of(training)
    rules, change = training.rules[0].with_rate(rate), np.full((len(kinds), found.networks), np.nan)
    for sample in range(MEASURED):
        for k, names in enumerate(kinds.values()):
            call = partial(stream_change, training, rules, sample, names)
            change[k, sample] = named_errors(call, subject, first)
    dimensions = "kind", "network"
    return xr.Dataset({"stream_change": (dimensions, change), "stream_rate": rate}, {"kind": list(kinds)})


def beginning(critical: Sequence[float], own: float) -> float:
    """Return where the next search begins: lower, by whole strides, than a quarter of the last critical rate if needed.

    A network may bear large rates above smaller ones that it does not bear. A search from the last critical rate alone
    would stay where the first one ended; so the first searches begin no higher than the optimiser's own rate, and none
    above a rate that another network did not bear.
    """
    if not critical:
        return own
    start, highest = critical[-1] / 4, min(critical) / STRIDE
    if len(critical) < FEWEST:
        highest = min(highest, own)
    while start > highest:
        start /= STRIDE  # the search goes up by the same strides, and so ends at the same rate if nothing lies between
    return start


@dataclass
class NetworkTrials:
    """The search for one network's critical rate: the rates that were tried, with the losses of each by step.

    Attributes:
        train: returns the losses by step at a rate.
    """

    train: Callable[[float], np.ndarray]
    tried: list[float] = field(default_factory=list)
    losses: list[np.ndarray] = field(default_factory=list)
    critical: float = np.nan
    seconds: float = 0.0

    def losses_at(self, rate: float) -> np.ndarray:
        if rate not in self.tried:
            began = time.perf_counter()
            self.losses.append(self.train(rate))
            self.tried.append(rate)
            self.seconds += time.perf_counter() - began
        return self.losses[self.tried.index(rate)]

    def bears(self, rate: float) -> bool:
        return bears(self.losses_at(rate))


def lower(finished: list[NetworkTrials], rate: float) -> bool:
    """Try a rate in all networks with a larger critical rate; return whether it is now that of one of them.

    A search doubles the rate, and may step over smaller rates that the network does not bear. A network is not tried
    again at a rate that differs by less than the resolution.
    """
    failing = [
        each for each in finished
        if each.critical > rate
        and not any(rate / RESOLUTION < other < rate * RESOLUTION for other in each.tried)
        and not each.bears(rate)
    ]  # fmt: skip
    for each in failing:
        each.critical = rate
    return bool(failing)


def search(training: Training, network: int, start: float, subject: Any, first: Any) -> NetworkTrials:
    """Find the critical rate of a network."""

    def train(rate: float) -> np.ndarray:
        rules = training.rules[0].with_rate(rate)
        losses: np.ndarray = named_errors(lambda: training.trajectory(rules, network).losses()[0], subject, first)
        return losses

    trials = NetworkTrials(train)
    losses = trials.losses_at(start)
    require(np.isfinite(losses[0]), "the loss is not finite before the first step, so no rate can lower it.")
    while (losses == losses[0]).all() and start * FURTHER <= HIGHEST:  # too small a rate to change it
        start *= FURTHER
        losses = trials.losses_at(start)
    trials.critical = critical_rate(trials.bears, start)
    return trials


def data_of(finished: list[NetworkTrials]) -> xr.Dataset:
    """Return the searches as a dataset; trials that a network did not need are NaN."""
    most = max(len(each.tried) for each in finished)
    steps = len(finished[0].losses[0])
    tried, losses = np.full((len(finished), most), np.nan), np.full((len(finished), most, steps), np.nan)
    for k, each in enumerate(finished):
        tried[k, : len(each.tried)], losses[k, : len(each.losses)] = each.tried, each.losses
    return xr.Dataset(
        {
            "critical": ("network", [each.critical for each in finished]),
            "seconds": ("network", [each.seconds for each in finished]),
            "tried": (("network", "trial"), tried),
            "loss": (("network", "trial", "step"), losses),
        },
        {"step": np.arange(steps)},
    )
