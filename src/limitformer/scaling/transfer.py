"""`transfer`: the first training steps at several sizes, and which measures of them depend on the size."""

import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from limitformer.base.errors import about, nearest, require, require_count
from limitformer.base.progress import PartOfBar, advance, progress_bar
from limitformer.reports.page import Page
from limitformer.reports.report import AnyReport
from limitformer.scaling.batches import batch_rule
from limitformer.scaling.exponents import LEAST_SIZES, exponent
from limitformer.scaling.lines import HEAD, Lines, lines_of
from limitformer.scaling.measures import (
    ABOUT,
    LOGITS,
    STANDARD,
    MeasuredSizes,
    measures_of,
    positive_rows,
)
from limitformer.scaling.page import contents, draw
from limitformer.scaling.parametrisation import Parametrisation, parametrise
from limitformer.scaling.roles import kind_of
from limitformer.scaling.sizes import BATCH, at_size, grown_by, others_in, sizes_over
from limitformer.simulation.simulate import Interrupted
from limitformer.stepping.optimizers import NotUnderstoodError, base_rate, made_by, read_optimizer, with_groups
from limitformer.stepping.rules import Factors, StepRules, require_rate
from limitformer.stepping.simulate import BAR, simulate_steps, training_of
from limitformer.weightless.law import build_without_weights
from limitformer.witness import DRAWN, Witness, witness_steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure


LISTED = 8  # measures in the short text
HEADS_UNSEEN = (
    "the size of heads is not visible, so that logits q·k/√d keep their factor, and the rule has q·k/d: if heads have "
    "another size d than the base, multiply queries by √(d of the base/d)"
)


@dataclass(frozen=True)
class Transfer(MeasuredSizes, AnyReport):
    """The result of `limitformer.transfer`.

    Attributes:
        over: what was varied, such as "width".
        sizes: its values, ascending.
        rule: the rule of parametrisation.
        optimizer: the optimiser in words, with the groups that ran; where they differ, at the first and last size.
        data: the dataset of `limitformer.stepping.simulate_steps` at each size.
        measures: values (samples, sizes) by the name of the measure.
        exponents: the power of the size of each measure that is positive, with its interval.
        notes: what the rule assumes, what it changed, and what this model does not allow.
        witness: two steps at the smallest size, compared with the user's own module and optimiser in plain PyTorch;
            None if none were.
        target: the size that is predicted; None: nothing is.
        lines: what to set at the target, or at the largest size: a table, and code to paste; None if the optimiser
            is not understood.
    """

    FILES = "transfer"

    def contents(self) -> Page:
        """Return what the page shows."""
        return contents(self)

    def draw(self) -> "Figure":
        """Return the picture: a panel for each measure."""
        return draw(self)

    def __repr__(self) -> str:
        """Return what was varied and whether the rate transfers; `print` shows the measures."""
        return f"<Transfer over the {self.over} {list(self.sizes)}, {self.rule}: transfers={self.transfers}>"

    def __str__(self) -> str:
        return self.text()

    def text(self, full: bool = True) -> str:
        """Return the conclusion, the heading, the table, what it means, and the notes, wrapped at 80 characters.

        Without `full`, the table has the measures of the verdict that depend most on the size, and what to set is left
        out.
        """
        head_row, *cells = self.cells()
        if not full:
            strongest = sorted(self.deciding, key=lambda name: -abs(self.exponents[name].value))[:LISTED]
            by_name = {row[0]: row for row in cells}
            cells = [by_name[name] for name in strongest]
        lines = aligned([head_row, *cells])
        brief = [self.legend[0], *self.notes]
        brief += [f"What to set at {self.lines.title}, as code: --full"] if self.lines else []
        remarks = [*self.legend, *self.notes, ABOUT] if full else brief
        below = [textwrap.fill(text, 80, subsequent_indent="  ") for text in remarks]
        head = [
            textwrap.fill(text, 80, break_on_hyphens=False)
            for text in (self.conclusion, self.heading, self.proof)
            if text
        ]
        if self.lines is not None and full:
            below += [
                "",
                f"What to set at {self.lines.title}:",
                *aligned([HEAD, *self.lines.rows]),
                "",
                self.lines.code,
            ]
        return "\n".join([*head, "", *lines, "", *below])


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table of texts, whose first and last columns are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for name, *row, word in cells:
        middle = [cell.rjust(width) for cell, width in zip(row, widths[1:-1], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *middle, word]).rstrip())
    return lines


class TransferInterrupted(Interrupted):
    """Ctrl-C during `transfer`; `result` is that of the finished networks, and `partial` has their data.

    A network counts for the exponents if it is finished at every size that has one.
    """

    def __init__(self, result: Transfer) -> None:
        super().__init__(result.dataset())
        self.result, self.pickled_arguments = result, (result,)


def transfer(
    model: Any,
    over: Mapping[str, Sequence[int]],
    inputs: Any = 32,
    *,
    optimizer: Any,
    after_groups: Any = None,
    rate: float | None = None,
    rule: str = "standard",
    base: int | None = None,
    target: int | None = None,
    steps: int = 3,
    samples: int = 8,
    seed: int,
    witness: bool | str = True,
    **options: Any,
) -> Transfer:
    """Simulate the first training steps at several sizes; tell which measures depend on the size, and how.

    Args:
        model: a configuration of transformers, its folder, JSON or public name, a function that builds a module, or a
            `limitformer.Transformer`.
        over: {"width": sizes}, {"depth": sizes}, or a field of the configuration or an argument of the function;
            {"batch": numbers of sequences}; or several such names, whose sizes grow together. Configurations scale by
            their fields: at another width the heads keep their size.
        inputs: the batch, as for `limitformer.weightless.simulate`.
        optimizer, after_groups: as for `limitformer.steps`.
        rate: the learning rate at the base; None: the optimiser's own. The rates of all groups are multiplied by the
            same factor at every size, so that an optimiser's own dependence on the size stays.
        rule: "standard" (one rate, the model's own initialisation), "mup", "completep" or "depth-mup". The rule sets
            initialisation, multipliers and rates of every size relative to the base.
        base: the size at which the rule changes nothing; None: the smallest.
        target: a larger size that does not run: the verdict is about the effects that the sizes predict there. The
            largest size that runs, as None: they are measured there, and the lines to paste are for it.
        steps: number of steps.
        samples: number of networks at each size; a verdict needs four.
        seed: the same seed gives the same numbers.
        witness: as for `limitformer.steps`, at the smallest size. Optimisers that are not understood need the rule
            "standard".
        options: further arguments of `limitformer.stepping.simulate_steps`, such as `loss`.

    Raises:
        InputError: an argument cannot be used; the message says at which size.
        TransferInterrupted: Ctrl-C after a network of the second size; it holds the result of the finished networks.

    >>> import limitformer as lf
    >>> small = {"model_type": "llama", "num_hidden_layers": 1, "intermediate_size": 128, "vocab_size": 64}
    >>> small |= {"hidden_size": 64, "num_attention_heads": 4}
    >>> result = lf.transfer(small, {"width": [64, 128, 256]}, 8, optimizer="adamw", samples=4, seed=0, progress=False)
    >>> result.transfers
    False
    """
    over, others = others_in(over)
    name, sizes = sizes_over(over)
    both = name == BATCH and options.get("sequences") is not None
    require(not both, "over the batch its sizes are the numbers of sequences. Nearest: no sequences.")
    several = "over the batch" if name == BATCH else "over several sizes at once" if others else ""
    require(not several or rule == STANDARD, f"{several} the rule must be standard; got {rule}.")
    optimizer = with_groups(optimizer, after_groups)
    taken = {"rates", "factors", "overrides"} & options.keys()
    require(not taken, f"transfer has no option {', '.join(sorted(taken))}: the rule sets it.")
    known = set(inspect.signature(training_of).parameters) | {"progress"}
    strange = sorted(options.keys() - known)
    require(not strange, f"transfer has no option {', '.join(strange)}.{nearest(''.join(strange[:1]), sorted(known))}")
    require_count("samples", samples)
    base = sizes[0] if base is None else require_count("base", base)
    far = target is None or require_count("target", target) >= sizes[-1]
    require(far, f"target must be the largest {name} that runs or more; got {target}. Nearest: {sizes[-1]}.")
    target = None if target == sizes[-1] else target  # nothing is predicted there, and the lines are for it
    models, factor, proof = {}, 1.0, None
    for size in sizes:
        with about(f"{name} {size}"):
            grown = grown_by(model, {other: values[sizes.index(size)] for other, values in others.items()})
            models[size] = parametrised(grown, name, size, base, rule, optimizer, steps)
    if rate is not None:
        require_rate(rate, "a learning rate")
        with about(f"{name} {base}"):
            of_base = models[base][2] if base in models else read_at(model, name, base, optimizer, steps, rule)[0]
        require(of_base.base > 0, f"the optimiser's own learning rate at {name} {base} is 0, so that none scales it.")
        factor = rate / of_base.base
    at = target or sizes[-1]
    with about(f"{name} {at}"):
        put, _, rules = models.get(at) or parametrised(model, name, at, base, rule, optimizer, steps)
    rules = (rules if rate is None else rules.with_rate(factor * rules.base)).with_factors(factors_of(put))
    lines = lines_of(f"{name} {at:,}, rule {rule}, base {base:,}", put, rules) if rules.rules else None
    notes = list(put.notes)
    stays = dict.fromkeys(field for put, _, _ in models.values() for field in put.stays)  # none at the present size
    if stays:
        notes.insert(
            0, f"stays at every {name}: {', '.join(stays)}. If that should grow, write a function of the {name}"
        )
    notes[:0] = [f"{other} at each {name}: {', '.join(map(str, values))}" for other, values in others.items()]
    bar = progress_bar(BAR, samples * len(sizes), 0.0) if options.pop("progress", True) else None
    work = np.array([each * (size if name == BATCH else 1) for size, (_, each, _) in models.items()])
    works = samples * len(sizes) * work / work.sum()  # networks of the mean size that take as long
    data: dict[int, xr.Dataset] = {}

    def arguments(size: int) -> dict[str, Any]:
        put, _, rules = models[size]
        return options | {
            "model": put.model, "inputs": inputs, "optimizer": optimizer, "seed": seed, "factors": factors_of(put),
            "rates": None if rate is None else [factor * rules.base], "overrides": put.overrides or None,
            "steps": steps, **({"sequences": size} if name == BATCH else {}),
        }  # fmt: skip

    reason = models[sizes[0]][2].not_understood
    batch = sizes[0] if name == BATCH else options.get("sequences")
    if reason:
        proof = Witness(DRAWN, reason)
    elif witness:
        with about(f"{name} {sizes[0]}"):
            proof = witness_steps(
                partial(training_of, **arguments(sizes[0])), optimizer, witness, rule == STANDARD, batch
            )
    drawn = proof.reason if proof is not None and proof.status == DRAWN else ""
    try:
        for k, size in enumerate(sizes):
            words = f"{name} {size}, {k + 1} of {len(sizes)}"
            part = PartOfBar(bar, float(works[:k].sum()), float(works[k]), samples, words)
            advance(part, 0)  # the bar names a size before its first network is finished
            with about(f"{name} {size}"):
                every = simulate_steps(**arguments(size), samples=samples, progress=part, drawn=drawn)
            data[size] = every.isel(rate=0)
    except KeyboardInterrupt as interrupt:
        finished = dict(data)
        if isinstance(interrupt, Interrupted) and (
            len(data) < LEAST_SIZES or interrupt.partial.sizes["sample"] > 1
        ):  # one network would leave the exponents of finished sizes without intervals
            finished[size] = interrupt.partial.isel(rate=0)
        if len(finished) < LEAST_SIZES:
            raise KeyboardInterrupt from interrupt
        notes = [partly(name, finished, samples), *notes]
        raise TransferInterrupted(transfer_of(name, finished, rule, put, notes, proof, target, lines)) from interrupt
    finally:
        advance(bar, -1)
    return transfer_of(name, data, rule, put, notes, proof, target, lines)


def factors_of(put: Parametrisation) -> Factors:
    """Return the factors of learning rate, weight decay and ε of each parameter."""
    return {key: (each, put.decay_factors[key], put.eps_factors[key]) for key, each in put.lr_factors.items()}


def partly(over: str, finished: Mapping[int, xr.Dataset], samples: int) -> str:
    """Return the note about an interrupted run."""
    counts = ", ".join(f"{each.sizes['sample']} of {over} {size}" for size, each in finished.items())
    return f"PARTIAL, as it was interrupted: of {samples} networks at each size, these are finished: {counts}."


def transfer_of(
    over: str,
    data: Mapping[int, xr.Dataset],
    rule: str,
    put: Parametrisation,
    notes: Sequence[str],
    proof: Witness | None,
    target: int | None,
    lines: Lines | None,
) -> Transfer:
    """Fit the exponents of all measures, to the networks that every size has."""
    sizes, measures = tuple(data), measures_of(data)
    exponents = {}
    for key, values in measures.items():
        positive = positive_rows(values)
        if len(positive):
            exponents[key] = exponent(positive, sizes, key)
    unseen = put.heads_unseen and any(key.startswith(LOGITS) for key in measures)
    notes = [*([batch_rule(data)] if over == BATCH else []), *notes, *([HEADS_UNSEEN] if unseen else [])]
    (first, words), *_, (last, others) = 2 * [(size, each.attrs["optimizer"]) for size, each in data.items()]
    if words != others:
        words = f"at {over} {first} {words}, at {over} {last} {others}"
    return Transfer(
        over, sizes, rule, words, data, measures, exponents, [*unmeasured(data), *notes], proof, target, lines
    )


def unmeasured(data: Mapping[int, xr.Dataset]) -> list[str]:
    """Return the note about matrices whose effects were measured at no size, other than tables, if there are any."""
    missing: dict[str, None] = {}
    for one in data.values():
        unknown = np.isnan(one.update_effect.isel(step=0)).all("sample").values & ~one["table"].values
        missing |= {kind_of(str(weight)): None for weight in one.weight.values[one.matrix.values & unknown]}
    if not missing:
        return []
    names = ", ".join(name.removesuffix(".weight") for name in missing)
    return [f"The effects of these matrices are not measured, as other code than linear maps applies them: {names}."]


def parametrised(
    model: Any, over: str, size: int, base: int, rule: str, optimizer: Any, steps: int
) -> tuple[Parametrisation, float, StepRules]:
    """Put the rule into effect for the optimiser of each parameter; return also the work and the rules of steps."""
    rules, work = read_at(model, over, size, optimizer, steps, rule)
    kinds = {key: each.name for key, each in rules.rules.items()}
    return parametrise(model, over, size, base, rule, kinds), work, rules


def read_at(model: Any, over: str, size: int, optimizer: Any, steps: int, rule: str) -> tuple[StepRules, float]:
    """Read the optimiser of the model at a size; return also the work of a network, in a unit of its own."""
    module, _ = build_without_weights(at_size(model, over, size).model, torch.float32)
    work = sum(each.numel() ** 0.5 for each in module.parameters())  # of a matrix: time grows as its side, if at all
    try:
        return read_optimizer(optimizer, module, steps=steps), work
    except NotUnderstoodError as error:
        require(rule == STANDARD, f"{error} The factors of the rule {rule} depend on the optimiser.")
        rate = base_rate(made_by(optimizer, module)[0])
        return StepRules({}, None, (), rate, "", not_understood=error.reason), work
