"""`equivalent_rates`: the learning rate at which one optimiser moves the stream as another does."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from scipy import stats

from limitformer.base.errors import require, require_count
from limitformer.base.progress import advance, progress_bar
from limitformer.rates.kinds import ALL, kinds_of, stream_change
from limitformer.rates.rate import RateInterrupted
from limitformer.reports.figures import number
from limitformer.reports.page import Facts, Page, Section, TextTable
from limitformer.reports.report import AnyReport, csv_of, finite_values
from limitformer.reports.verdict import aligned, titled, wrapped
from limitformer.stepping.optimizers import NotUnderstoodError, with_groups
from limitformer.stepping.rules import MOST_RATE, in_words
from limitformer.stepping.simulate import Training, training_of
from limitformer.subjects.inputs import inputs_of
from limitformer.subjects.losses import Loss
from limitformer.subjects.subject import resolve
from limitformer.weightless.simulate import named_errors, provenance

CLOSE = 0.01  # relative difference of two changes that count as equal
TRIALS = 12
SMALLER = "Nearest: a smaller rate, or a loss that is finite before the first step."
LEVEL = 0.95


@dataclass(frozen=True)
class EquivalentRates(AnyReport):
    """The result of `limitformer.equivalent_rates`.

    Attributes:
        name: the network's name.
        data: by kind of weight (the first is that of all weights) and network: the `change` of the stream by the
            optimiser's first step of this kind alone, and the `equal_rate` of the other optimiser, NaN if none up
            to 100 was found.
        about: provenance.
    """

    name: str
    data: xr.Dataset
    about: Mapping[str, Any] = field(default_factory=dict)

    FILES = "equivalent"

    def rate(self, kind: str = ALL) -> tuple[float, float, float]:
        """Return the geometric mean over networks of the equal rate of a kind, and the ends of its 95 % interval."""
        logs = np.log(self.data["equal_rate"].sel(kind=kind).values)
        if np.isnan(logs).any():
            return math.nan, math.nan, math.nan
        middle, count = float(logs.mean()), len(logs)
        half = stats.t.ppf((1 + LEVEL) / 2, count - 1) * float(logs.std(ddof=1)) / math.sqrt(count)
        return math.exp(middle), math.exp(middle - half), math.exp(middle + half)

    @property
    def networks(self) -> int:
        """How many networks were compared."""
        return self.data.sizes["network"]

    @property
    def first(self) -> str:
        """The optimiser and its rate."""
        return f"{self.about['first']} at {number(self.about['rate'], 3)}"

    @property
    def answer(self) -> str:
        """The rates that are equivalent, in a sentence."""
        middle, low, high = self.rate()
        if math.isnan(middle):
            other = self.about["other"]
            return f"No rate of {other} up to {MOST_RATE:g} was found that moves the stream as {self.first} does."
        return (
            f"{self.first} moves the stream as {self.about['other']} at {number(middle, 3)} does "
            f"({number(low, 3)} to {number(high, 3)}, {self.networks} networks)."
        )

    @property
    def caveat(self) -> str:
        """The meaning of the rates, and their limits."""
        return (
            "The rates are equal in what the first step does to the stream at the last layer, for this batch. In the "
            "row of a kind only its weights move. The interval is that of the mean over networks, at 95 %. Later steps "
            "differ: momentum and second moments build up."
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each kind of weight, the change of the stream falling."""
        change = self.data["change"].mean("network")
        rows = []
        for kind in self.data["kind"].values[np.argsort(-change.values, kind="stable")]:
            middle, low, high = self.rate(str(kind))
            row = {"kind": str(kind), "change of the stream": float(change.sel(kind=kind))}
            rows.append(row | {"equal rate": middle, "low": low, "high": high})
        return rows

    def cells(self) -> list[list[str]]:
        """Return the head and the rows of the table as text; numbers that are not known are dashes."""
        head = ["kind", "change of the stream", f"equal rate of {self.about['other']}", "low", "high"]
        return [
            head,
            *(
                [row.pop("kind"), *("–" if math.isnan(each) else number(each, 3) for each in row.values())]
                for row in self.rows()
            ),
        ]

    def __repr__(self) -> str:
        """Return the name and the answer on one line; `print` shows the table."""
        return f"<EquivalentRates {self.name}: {self.answer}>"

    def __str__(self) -> str:
        """Return the answer, and the table by kind of weight."""
        return "\n".join([*wrapped(self.answer, "  "), "", *aligned(self.cells()), "", *wrapped(self.caveat, "")])

    def contents(self) -> Page:
        """Return the page: the answer, the table by kind and the provenance."""
        head, *rows = self.cells()
        sections = [
            Section("By kind of weight", [TextTable("Kinds of weight", head, rows), self.caveat]),
            Section("Provenance", [Facts({key: each for key, each in self.about.items() if key != "laws"})]),
        ]
        return Page("equivalent", self.name, "Which learning rates are equivalent?", (self.answer,), sections)

    def csv(self) -> str:
        """Return a row for each kind of weight."""
        rows = self.rows()
        return csv_of(list(rows[0]), rows)

    def record(self) -> dict[str, Any]:
        """Return the report as JSON holds it."""
        middle, low, high = self.rate()
        return {
            "name": self.name,
            "answer": self.answer,
            "caveat": self.caveat,
            **finite_values({"rate": middle, "low": low, "high": high}),
            "kinds": [finite_values(row) for row in self.rows()],
            "about": finite_values(dict(self.about)),
        }

    def dataset(self) -> xr.Dataset:
        """Return the changes and equal rates, with the provenance."""
        return self.data.assign_attrs(finite_values(dict(self.about)))


def equivalent_rates(
    model: Any,
    inputs: Any = 64,
    *,
    optimizer: Any,
    other: Any,
    after_groups: Any = None,
    rate: float | None = None,
    seed: int,
    networks: int = 4,
    sequences: int | None = None,
    loss: Loss | str | None = None,
    clip: float | None = None,
    settings: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    batch_dim: int = 0,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> EquivalentRates:
    """Compute the learning rate at which one optimiser moves the stream in its first step as another does.

    Args:
        model, inputs, sequences, loss, clip, settings, overrides, batch_dim, trust_remote_code, progress: as for
            `limitformer.steps`.
        optimizer: whose rate is known, as for `limitformer.steps`.
        other: the optimiser whose rate is wanted; rates of its groups keep their ratios.
        after_groups: as for `limitformer.steps`, of those of the two optimisers that are functions.
        rate: the learning rate of `optimizer`; None: its own.
        seed: the same seed gives the same networks.
        networks: the number of networks, at least two.

    Raises:
        InputError: an argument cannot be used, the module's code cannot run, or it makes the same network each time.
        RateInterrupted: Ctrl-C after the second network; it holds the report of the finished networks.

    >>> import limitformer as lf
    >>> small = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 99}
    >>> sgd = {"name": "sgd", "lr": 0.02}
    >>> report = lf.equivalent_rates(small, 16, optimizer=sgd, other="sgd", seed=0, networks=2, progress=False)
    >>> print(report.answer)
    sgd at 0.02 moves the stream as sgd at 0.02 does (0.02 to 0.02, 2 networks).
    """
    require_count("networks", networks, least=2)
    of_user = [each for each in (optimizer, other) if callable(each)]
    require(after_groups is None or bool(of_user), "after_groups needs a function for an optimiser; got two names.")
    optimizer, other = (with_groups(each, after_groups if each in of_user else None) for each in (optimizer, other))
    subject = resolve(model, settings, trust_remote_code=trust_remote_code)
    batch = inputs_of(inputs, subject, sequences)
    two = [
        training_with(
            model=subject, inputs=batch, optimizer=each, rates=at, steps=1, seed=seed, sequences=sequences,
            loss=loss, clip=clip, overrides=None if overrides is None else dict(overrides), batch_dim=batch_dim,
        )
        for each, at in ((optimizer, None if rate is None else [rate]), (other, None))
    ]  # fmt: skip
    two[0].require_different_networks()
    kinds = kinds_of(two[0])
    change, equal = (np.full((len(kinds), networks), np.nan) for _ in range(2))

    def report(done: int) -> EquivalentRates:
        first, second = (each.rules[0] for each in two)
        about = {
            **provenance(two[0].network), "description": "equivalent learning rates", "seed": seed, "first": first.name,
            "rate": first.base, "other": second.name, "optimizer": in_words([first]),
            "other_optimizer": in_words([second]), "loss": two[0].loss.name, "inputs": str(two[0].first),
        }  # fmt: skip
        dimensions = "kind", "network"
        data = xr.Dataset(
            {"change": (dimensions, change[:, :done]), "equal_rate": (dimensions, equal[:, :done])},
            {"kind": list(kinds)},
        )
        return EquivalentRates(titled(subject.name, settings), data, about)

    bar = progress_bar("kinds of weight", networks * len(kinds), 0.0) if progress else None
    starts: dict[str, float] = {}
    try:
        for sample in range(networks):
            for k, (kind, names) in enumerate(kinds.items()):
                call = partial(equal_rate, two, sample, names, starts.get(kind))
                change[k, sample], equal[k, sample] = _, same = named_errors(call, subject, batch)
                require(
                    math.isfinite(change[k, sample]), f"the step of {two[0].rules[0].name} is not finite. {SMALLER}"
                )
                starts |= {kind: same} if math.isfinite(same) else {}
                advance(bar, sample * len(kinds) + k + 1)
    except KeyboardInterrupt as interrupt:
        if sample < 2:
            raise
        raise RateInterrupted(report(sample)) from interrupt
    finally:
        advance(bar, -1)
    return report(networks)


def training_with(**options: Any) -> Training:
    """Return the training by an optimiser; one that is not understood trains drawn networks."""
    try:
        return training_of(**options)
    except NotUnderstoodError as error:
        return training_of(**options, drawn=error.reason)


def equal_rate(two: list[Training], sample: int, names: list[str], start: float | None) -> tuple[float, float]:
    """Return the change of the stream by the first optimiser, and the rate at which the second changes it as much.

    The change is nearly proportional to the rate while it is small, so that each trial is the last one times the ratio
    of the changes. NaN: the second changes nothing, or no rate up to 100 was found.
    """
    first, second = two
    wanted = stream_change(first, first.rules[0], sample, names)
    rate = second.rules[0].base if start is None else start
    if not 0 < wanted < math.inf:
        return wanted, math.nan
    for _ in range(TRIALS):
        now = stream_change(second, second.rules[0].with_rate(rate), sample, names)
        if not 0 < now < math.inf:
            return wanted, math.nan
        if abs(now / wanted - 1) < CLOSE:
            return wanted, rate * wanted / now
        rate *= wanted / now
        if rate > MOST_RATE:
            break
    return wanted, math.nan
