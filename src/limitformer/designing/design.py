"""`design`: what to set before training, from the law at initialisation alone."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from hashlib import sha256
from math import log
from typing import Any

import numpy as np
import xarray as xr

from limitformer.base.errors import InputError, PicklesArguments, require, require_count, require_real
from limitformer.base.version import package_version
from limitformer.checking.subject import holds_weights, subject_of
from limitformer.designing.designed import Design
from limitformer.designing.knobs import SHAPED, NoKnobError, axes_of
from limitformer.designing.objective import Objective, Values
from limitformer.designing.outcome import Outcome, Risk
from limitformer.designing.search import Region, choose, search
from limitformer.designing.trials import Setting, ShapedTrials, StockTrials, Trials
from limitformer.results.datasets import stamp

UNSAFE = 0.05  # probability that an unsafe setting is called safe
SCANNED = {StockTrials: 16, ShapedTrials: 200}  # largest number of networks in a cell
CONFIRMED = {StockTrials: 64, ShapedTrials: 1000}


class DesignInterrupted(PicklesArguments, KeyboardInterrupt):
    """Ctrl-C during `design`; `partial` holds the region so far, NaN where nothing was sampled."""

    def __init__(self, partial: xr.Dataset) -> None:
        sampled = int((partial["samples"] > 0).sum())
        super().__init__(f"interrupted after {sampled} settings of {partial['samples'].size}")
        self.partial, self.pickled_arguments = partial, (partial,)


def design(
    what: Any,
    text: Any = None,
    *,
    knobs: Iterable[str] | None = None,
    objective: Objective | Mapping[str, Any] | None = None,
    risk: float = 0.1,
    tokens: int = 32,
    samples: int | None = None,
    scan: int | None = None,
    grid: Mapping[str, Iterable[float]] | None = None,
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
    partial: xr.Dataset | None = None,
    progress: bool = True,
) -> Design:
    """Find settings with which a network at initialisation meets an objective with probability 1 − risk.

    All cells of a grid over the knobs are sampled with the same random numbers (`search`). The present setting and the
    chosen one are then evaluated with networks of a fresh seed, so that the choice is not biased. A setting is safe if
    the upper end of its risk's interval (Clopper and Pearson, 90 %) is at most `risk`: an unsafe setting is called safe
    with a probability of at most 5 %. A present setting that is safe stays.

    All of this is about networks before training; it says nothing about what training makes of them.

    Args:
        what: the name of a public shape (`limitformer.shapes()`), a configuration of transformers, its JSON or folder,
            or a `limitformer.Transformer` or its JSON.
        text: one or several texts, ids, images or named tensors; a start for a `Transformer`. None: unrelated tokens.
        knobs: one or two of initializer_range, embedding, output, logits and patterns of weights' names (`knobs`);
            gamma and tau0 for a `Transformer`. None: initializer_range, and output if it is a knob; gamma and tau0.
        objective: the objective; None: `Objective()`, for a `Transformer` only its correlation and stream. A mapping
            changes some of these bands.
        risk: allowed probability that a network misses the objective, in (0, 1).
        tokens: number of tokens.
        samples: networks that evaluate a setting; None: 64, for a `Transformer` 1,000.
        scan: largest number of networks in a cell of the grid; None: 16, for a `Transformer` 200.
        grid: values of a knob; without them its present value times 1/16, 1/4, 1, 4, 16.
        settings: fields of the configuration to change first, such as its depth.
        seed: the same seed gives the same design.
        partial: `DesignInterrupted.partial` of the same design: its cells are not sampled again, and the design is the
            same as without the interruption.
        progress: whether the terminal shows the progress of work of more than two seconds.

    Raises:
        InputError: an argument cannot be used, the family lacks a knob, a network cannot run, or the region belongs to
            another design.
        DesignInterrupted: Ctrl-C, with the region so far.
    """
    risk = require_real("risk", risk)
    require(0 < risk < 1, f"risk must lie in (0, 1); got {risk}.")
    trials, asked = trials_of(what, text, knobs, objective, settings, require_count("tokens", tokens, least=2))
    region = Region.over(axes_of(trials.knobs, grid))
    count = CONFIRMED[type(trials)] if samples is None else require_count("samples", samples)
    least = int(np.ceil(log(UNSAFE) / log(1 - risk)))
    require(count >= least, f"samples must be at least {least} to be sure of a risk of {risk:g}; got {count}.")
    most = SCANNED[type(trials)] if scan is None else require_count("scan", scan)
    if isinstance(trials, StockTrials):
        trials.require_room(max(count, most))
    present = {knob.name: knob.present for knob in trials.knobs}
    about = {
        **stamp("float64" if isinstance(trials, ShapedTrials) else "float32"),
        "model": trials.name,
        "objective": str(asked),
        "risk": risk,
        "scan": most,
        "seed": seed,
        "question": question_of(trials, region, asked, risk, most, seed),
    }
    if partial is not None:
        check_same(partial, about)
        region.resume(partial)
        trials.steps.update((key, step) for key, step in json.loads(partial.attrs["steps"]))
    try:
        search(region, trials, asked, risk, most, seed, progress)
        best = region.setting(choose(region, present))
        before = evaluate(trials, present, asked, count, seed + 1)
        safe = before.risk.interval[1] <= risk
        after = before if safe or best == present else evaluate(trials, best, asked, count, seed + 1)
    except KeyboardInterrupt as interrupt:
        steps = json.dumps(list(trials.steps.items()))
        raise DesignInterrupted(region.dataset({**about, "unfinished": 1, "steps": steps})) from interrupt
    chart = region.dataset({**about, "tokens": tokens, "judged_by": count})
    return Design(
        name=trials.name,
        objective=asked,
        allowed=risk,
        knobs=trials.knobs,
        present=before,
        chosen=after,
        region=chart,
        changes=trials.patch(after.setting),
        kind="Transformer" if isinstance(trials, ShapedTrials) else "configuration",
    )


def question_of(trials: Trials, region: Region, objective: Objective, risk: float, scan: int, seed: int) -> str:
    """Return a digest of everything that the region depends on."""
    knobs = [asdict(knob) for knob in trials.knobs]
    asked = [trials.question(), knobs, region.axes, str(objective), risk, scan, seed, package_version()]
    return sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()


def check_same(partial: xr.Dataset, about: Mapping[str, Any]) -> None:
    """Raise `InputError` unless `partial` belongs to the design that `about` describes."""
    unfinished = isinstance(partial, xr.Dataset) and "steps" in partial.attrs
    require(unfinished, "partial must be the region of an interrupted design: DesignInterrupted.partial.")
    for name in ("model", "objective", "risk", "scan", "seed", "question"):
        then, now = partial.attrs.get(name), about[name]
        what = f"{name} was {then}, and is {now} now" if name != "question" else "tokens, knobs or the version differ"
        require(then == now, f"The interrupted design is another one: {what}. Nearest: another folder.")


def evaluate(trials: Trials, setting: Setting, objective: Objective, samples: int, seed: int) -> Outcome:
    """Evaluate a setting by networks of a fresh seed, with the report of eight more."""
    values = trials.values(setting, seed, range(samples))
    misses = int((objective.distance(values) > 0).sum())
    parts = {name: int(each.sum()) for name, each in objective.missed(values).items()}
    report = trials.report(setting, seed + 1)
    return Outcome(dict(setting), Risk(misses, samples), parts, spread(values), report, trials.exact(setting))


def spread(values: Values) -> dict[str, tuple[float, float, float]]:
    """Return 5 %, median and 95 % of each value over networks; of a range of values, its middle."""
    middles = {name: (low + high) / 2 for name, (low, high) in values.items()}
    return {name: tuple(np.quantile(each, (0.05, 0.5, 0.95)).tolist()) for name, each in middles.items()}


def trials_of(
    what: Any,
    text: Any,
    knobs: Any,
    objective: Objective | Mapping[str, Any] | None,
    settings: Mapping[str, Any] | None,
    tokens: int,
) -> tuple[StockTrials | ShapedTrials, Objective]:
    """Return the trials of a configuration or a Transformer, and the objective.

    Raises:
        InputError: `what` is neither.
    """
    require(not holds_weights(what), f"{what} holds weights; a design is for a configuration: its config.json.")
    subject = subject_of(what, settings)
    model = subject.blueprint.transformer if subject.blueprint is not None else None
    if model is not None:
        asked = objective_of(objective, Objective(effective=None, gradient=None))
        return ShapedTrials(model, SHAPED if knobs is None else knobs, text, tokens, asked), asked
    if subject.module is not None or subject.blueprint is None or subject.blueprint.config is None:
        raise InputError(
            "design takes a configuration of transformers, its JSON or folder, the name of a public shape, or a "
            f"limitformer.Transformer; got {type(what).__name__}."
        )
    asked = objective_of(objective, Objective())
    if knobs is not None:
        return StockTrials(subject, knobs, text, tokens, asked), asked
    try:
        return StockTrials(subject, ("initializer_range", "output"), text, tokens, asked), asked
    except NoKnobError:  # its outputs are normalised, or their names are unknown
        return StockTrials(subject, ("initializer_range",), text, tokens, asked), asked


def objective_of(objective: Objective | Mapping[str, Any] | None, usual: Objective) -> Objective:
    """Return the usual objective, the usual one with some bands changed, or the user's.

    Raises:
        InputError: the argument is not an objective, or names an unknown band.
    """
    if objective is None or isinstance(objective, Objective):
        return objective or usual
    require(isinstance(objective, Mapping), f"objective must be an Objective or {{name: band}}; got {objective!r}.")
    names = [field.name for field in fields(Objective)]
    strange = [name for name in objective if name not in names]
    require(not strange, f"an objective has {', '.join(names)}; got {strange[:1]}.")
    return replace(usual, **objective)
