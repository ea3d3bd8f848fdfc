"""`design`: what to set before training, from the law at initialisation alone."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from limitformer.base.errors import require, require_count, require_real
from limitformer.base.extras import package_version
from limitformer.base.progress import PartOfBar, advance, progress_bar
from limitformer.designing.grid import choose, distances_on, region_of
from limitformer.designing.knobs import SHAPED, NoKnobError, axes_of
from limitformer.designing.objective import Objective, Values
from limitformer.designing.report import Design, Outcome, Risk
from limitformer.designing.trials import REPORTED, Setting, ShapedTrials, StockTrials, Trials
from limitformer.reports.verdict import titled
from limitformer.results.datasets import stamp
from limitformer.subjects.checkpoints import holds_weights
from limitformer.subjects.losses import Loss, name_of
from limitformer.subjects.subject import resolve
from limitformer.sweep.run import SweepInterrupted
from limitformer.sweep.store import DONE, Store, store_path

UNSAFE = 0.05  # probability that an unsafe setting is called safe
SCANNED = {StockTrials: 16, ShapedTrials: 200}  # networks in a cell
FEW = 4  # networks that show whether attention is frozen
CONFIRMED = {StockTrials: 64, ShapedTrials: 1000}


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
    loss: Loss | str | None = None,
    seed: int = 0,
    store: str | Path | None = None,
    progress: bool = True,
) -> Design:
    """Find settings with which a network at initialisation meets an objective with probability 1 − risk.

    All cells of a grid over the knobs have the same number of networks, with the same random numbers (`grid`). The
    present setting and the chosen one are then evaluated with networks of a fresh seed, so that the choice is not
    biased. A setting is safe if the upper end of its risk's interval (Clopper and Pearson, 90 %) is at most `risk`: an
    unsafe setting is called safe with a probability of at most 5 %. A present setting that is safe stays.

    All of this is about networks before training; it says nothing about what training makes of them.

    Args:
        what, text, tokens, loss, progress: as for `limitformer.check`. `what` has no weights; it may be the JSON of a
            `limitformer.Transformer`.
        knobs: one or two of initializer_range, embedding, output, logits and patterns of weights' names (`knobs`);
            gamma and tau0 for a `Transformer`. None: initializer_range and output, where they are knobs, and logits in
            place of a missing initializer_range where attention is frozen; gamma and tau0. For a function,
            initializer_range is its argument of that name.
        objective: the objective; None: `Objective()`, for a `Transformer` only its correlation and stream. A mapping
            changes some of these bands.
        risk: allowed probability that a network misses the objective, in (0, 1).
        samples: networks that evaluate a setting; None: 64, for a `Transformer` 1,000.
        scan: networks in each cell of the grid; None: 16, for a `Transformer` 200.
        grid: values of a knob; without them its present value times 1/16, 1/4, 1, 4, 16.
        settings: fields of the configuration, or arguments of the function, to change first: {"n_layer": 48}.
        seed: the same seed gives the same design.
        store: a folder that keeps each finished cell, so that an interrupted design resumes, with the same bits; cells
            serve any objective and risk. None keeps nothing; a function has no store, as its code may change.

    Raises:
        InputError: an argument cannot be used, the family lacks a knob, a network cannot run, or another process uses
            the store.
        SweepInterrupted: Ctrl-C with a store, which has the finished cells.
    """
    risk = require_real("risk", risk)
    require(0 < risk < 1, f"risk must lie in (0, 1); got {risk}.")
    least = math.ceil(math.log(UNSAFE) / math.log(1 - risk))
    if samples is not None:  # before any network is built
        require_enough(require_count("samples", samples), least, risk)
    trials, asked = trials_of(what, text, knobs, objective, settings, require_count("tokens", tokens, least=2), loss)
    axes, present = axes_of(trials.knobs, grid), {knob.name: knob.present for knob in trials.knobs}
    count = CONFIRMED[type(trials)] if samples is None else samples
    require_enough(count, least, risk)
    scan = SCANNED[type(trials)] if scan is None else require_count("scan", scan)
    if isinstance(trials, StockTrials):
        trials.require_room()
    is_function = isinstance(trials, StockTrials) and trials.kind == "function"
    own = name_of(loss) if callable(loss) else trials.name
    keeps = f"store keeps cells of configurations; the code of {own} may change between two calls."
    require(store is None or not (is_function or callable(loss)), f"{keeps} Nearest: no store.")
    asked_of = None if is_function else trials.question()
    question = [asked_of, [asdict(knob) for knob in trials.knobs], scan, seed, package_version()]
    record = {"over": axes, "design": json.loads(json.dumps(question, default=str))}
    place = None if store is None else Store(store_path(store), record)
    about = {
        **stamp("float64" if isinstance(trials, ShapedTrials) else "float32"),
        "model": trials.name,
        "objective": str(asked),
        "risk": risk,
        "scan": scan,
        "seed": seed,
        "tokens": tokens,
        "judged_by": count,
    }
    cells, each = scan * math.prod(map(len, axes.values())), count + REPORTED
    bar = progress_bar("networks", cells + 2 * each) if progress else None
    parts = [PartOfBar(bar, cells + k * each, each, count) for k in range(2)]
    try:
        distances = distances_on(axes, trials, asked, scan, seed, place, bar)
        region = region_of(axes, distances, trials, risk, about)
        best = choose(region, present)
        before = evaluate(trials, present, asked, count, seed + 1, parts[0])
        stays = before.risk.interval[1] <= risk or best == present
        after = before if stays else evaluate(trials, best, asked, count, seed + 1, parts[1])
    except KeyboardInterrupt as interrupt:
        if place is None:
            raise
        done = place.status() == DONE
        raise SweepInterrupted(place.path, int(done.sum()), done.size) from interrupt
    finally:
        advance(bar, -1)
    return Design(
        name=titled(trials.name, settings),
        objective=asked,
        allowed=risk,
        knobs=trials.knobs,
        present=before,
        chosen=after,
        region=region,
        changes=trials.patch(after.setting),
        settings=dict(settings or {}),
        kind=trials.kind,
    )


def require_enough(count: int, least: int, risk: float) -> None:
    require(count >= least, f"samples must be at least {least} to be sure of a risk of {risk:g}; got {count}.")


def evaluate(
    trials: Trials, setting: Setting, objective: Objective, samples: int, seed: int, bar: PartOfBar
) -> Outcome:
    """Evaluate a setting by networks of a fresh seed, with the report of eight more."""
    values = trials.values(setting, seed, samples, bar)
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
    loss: Loss | str | None,
) -> tuple[StockTrials | ShapedTrials, Objective]:
    """Return the trials of a network, and the objective.

    Raises:
        InputError: `what` has its weights already, or none of the knobs.
    """
    require(not holds_weights(what), f"{what} holds weights; a design is for a configuration: its config.json.")
    subject = resolve(what, settings)
    model = subject.transformer
    if model is not None:
        require(loss is None, "a Transformer's chain has no loss. Nearest: no loss.")
        asked = objective_of(objective, Objective(effective=None, gradient=None))
        return ShapedTrials(model, SHAPED if knobs is None else knobs, text, tokens, asked), asked
    new = subject.module is None
    require(
        new, f"design is for networks before training; {subject.name} has its weights already. Nearest: a function."
    )
    asked = objective_of(objective, Objective())
    make = partial(StockTrials, subject, text=text, tokens=tokens, objective=asked, loss=loss)
    if knobs is not None:
        return make(knobs), asked
    trials = first_of(make, (("initializer_range", "output"), ("initializer_range",), ("output",)))
    if not any(knob.field for knob in trials.knobs) and is_frozen(trials, asked):  # outputs do not thaw attention
        with suppress(NoKnobError):
            trials = first_of(make, (("logits", "output"), ("logits",)))
    return trials, asked


def first_of(make: Callable[[tuple[str, ...]], StockTrials], choices: Iterable[tuple[str, ...]]) -> StockTrials:
    """Return the trials of the first knobs that the network has.

    Raises:
        NoKnobError: it has none of them.
    """
    for names in choices:
        try:
            return make(names)
        except NoKnobError as error:  # its outputs are normalised, or it has no such argument
            missing = error
    raise missing


def is_frozen(trials: StockTrials, objective: Objective) -> bool:
    """Whether most of a few networks at the present setting look at fewer tokens than the objective asks."""
    if objective.effective is None:
        return False
    values = trials.values({knob.name: knob.present for knob in trials.knobs}, seed=0, samples=FEW)
    return "effective" in values and bool(np.median(values["effective"][0]) < objective.effective[0])


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
