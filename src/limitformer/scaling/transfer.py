"""`transfer`: the first training steps at several sizes, and which measures of them depend on the size."""

import csv
import inspect
import io
import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray

from limitformer.base.errors import InputError, nearest, require, require_count
from limitformer.base.files import Paged, local_path, write_texts, write_whole
from limitformer.base.progress import PartOfBar, advance, progress_bar
from limitformer.results.storage import save
from limitformer.scaling.exponents import LEAST_SIZES, LEVEL, SIZE_FREE, Exponent, exponent, is_size_free
from limitformer.scaling.parametrisation import Parametrisation, parametrise
from limitformer.scaling.roles import kind_of
from limitformer.scaling.rules import ADAM, ADAMW
from limitformer.scaling.sizes import DEPTH, WIDTH, at_size, sizes_over
from limitformer.simulation.simulate import Interrupted
from limitformer.stepping.optimizers import NotUnderstoodError, base_rate, made_by, read_optimizer
from limitformer.stepping.rules import StepRules, require_rate
from limitformer.stepping.simulate import BAR, simulate_steps, training_of
from limitformer.weightless.law import build_without_weights
from limitformer.witness import DRAWN, Witness, witness_steps

STREAM, OUTPUT, EFFECT = "stream change at the end", "output change", "effect of "
FALL = "fall of the loss"
STANDARD = "standard"  # the rule
LEAST_NETWORKS = 4  # at each size, for a verdict; a choice of limitformer's
GROWS, FREE = 0.2, 0.25  # |exponent| of effects beyond which a rate does not transfer, and within which it does
ROUNDING = 100  # epsilons of the floating type: a stream that changes by less at every size counts as unchanged
WORDS = {True: "size-free", False: "depends", None: "unclear"}
ABOUT = (
    "Gradients come from these tokens alone: a larger batch has other gradients, under Adam other signs, under Muon "
    "other directions. Nothing is said about steps that were not computed."
)


@dataclass(frozen=True)
class Transfer(Paged):
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
    """

    over: str
    sizes: tuple[int, ...]
    rule: str
    optimizer: str
    data: Mapping[int, xr.Dataset]
    measures: Mapping[str, NDArray[np.float64]]
    exponents: Mapping[str, Exponent]
    notes: Sequence[str] = field(default_factory=tuple)
    witness: Witness | None = None

    @property
    def proof(self) -> str:
        """The sentence of the witness; empty without one."""
        if self.witness is None:
            return ""
        said = self.witness.in_words(sum(each.sizes["sample"] for each in self.data.values()))
        return said.replace("witnessed:", f"witnessed at {self.over} {self.sizes[0]}:", 1)

    @property
    def deciding(self) -> dict[str, Exponent]:
        """The exponents that decide whether the rate transfers: of effects of updates, and of the stream's change."""
        return {name: each for name, each in self.exponents.items() if name.startswith((EFFECT, STREAM))}

    def is_known(self, name: str) -> bool:
        """Whether enough networks have positive values of a measure at every size."""
        return len(self.positive(name)) >= LEAST_NETWORKS

    @property
    def transfers(self) -> bool | None:
        """Whether the rate transfers, as far as these steps show; None if more samples are needed.

        It does not if the interval of a deciding exponent is beyond ± `GROWS`. It does if all of them are within
        ± `FREE`. An exponent of fewer than `LEAST_NETWORKS` networks decides nothing.
        """
        if self.not_finite:
            return None
        if self.depending():
            return False
        every = self.deciding
        free = all(self.is_known(name) and each.low >= -FREE and each.high <= FREE for name, each in every.items())
        return True if every and free else None

    @property
    def not_finite(self) -> dict[int, int]:
        """The number of networks at each size whose loss or stream is not finite after the steps; {} without any."""
        found = {}
        for size, data in self.data.items():
            each = measures_at(data)
            found[size] = int((~np.isfinite(each.get(STREAM, each[OUTPUT]) + each[FALL])).sum())
        return {size: count for size, count in found.items() if count}

    def depending(self) -> dict[str, Exponent]:
        """Return the deciding measures that depend on the size, the head first, then by their exponents."""
        beyond = {name: each for name, each in self.deciding.items() if each.low > GROWS or each.high < -GROWS}
        found = {name: each for name, each in beyond.items() if self.is_known(name)}
        return dict(sorted(found.items(), key=lambda item: ("head" not in item[0], -abs(item[1].value))))

    @property
    def conclusion(self) -> str:
        """Whether the learning rate transfers, in a few words."""
        if self.not_finite:
            counts = ", ".join(
                f"{count} of {self.data[size].sizes['sample']} networks at {self.over} {size}"
                for size, count in self.not_finite.items()
            )
            return (
                f"At this rate the loss or the stream is not finite after the steps in {counts}: nothing can be "
                "said of its transfer. Nearest: a smaller rate."
            )
        few = min((len(self.positive(name)) for name in self.deciding), default=LEAST_NETWORKS)
        if self.transfers is None and few < LEAST_NETWORKS:
            return (
                f"No verdict on the learning rate over the {self.over}: it needs {LEAST_NETWORKS} networks at each "
                f"size that have all measures, and there {'is' if few == 1 else 'are'} {few}. Nearest: more samples."
            )
        if self.transfers is None:
            return (
                f"These networks do not tell whether the learning rate transfers over the {self.over}. "
                f"Nearest: more networks at each {self.over}, or sizes further apart."
            )
        if self.transfers:
            return (
                f"No effect of these steps depends on the {self.over}: nothing in them speaks against the transfer of "
                "the learning rate."
            )
        (name, each), *others = self.depending().items()
        grows = "grows" if each.value > 0 else "falls"
        said = f"The {name} {grows} like {self.over}^({each})"
        more = ""
        if others:
            several = f"{len(others)} other measures" if len(others) > 1 else "one other measure"
            more = f" ({several} of the verdict depend{'s' * (len(others) == 1)} on it, too)"
        hint = ""
        if each.value < 0:
            hint = ""
        elif self.rule == "standard" and self.over == WIDTH:
            hint = " muP divides the head's output and the rates of hidden matrices by the width (rule mup)."
        elif self.rule == "standard" and self.over == DEPTH:
            hint = " CompleteP divides the branches by the depth (rule completep)."
        return f"{said}{more}, so that the learning rate does not transfer.{hint}"

    @property
    def heading(self) -> str:
        """The sizes, rule, optimiser, steps, networks, and the loss that ran."""
        counts = sorted({each.sizes["sample"] for each in self.data.values()})
        steps = next(iter(self.data.values())).sizes["step"] - 1
        sizes = ", ".join(map(str, self.sizes))
        networks = " to ".join(map(str, (counts[0], counts[-1])[: len(counts)]))
        return (
            f"{self.over} {sizes}; rule {self.rule}; {self.optimizer}; {steps} step{'' if steps == 1 else 's'}; "
            f"{networks} network{'' if counts == [1] else 's'} at each size; loss: {self.loss}"
        )

    @property
    def loss(self) -> str:
        """The name of the loss that ran."""
        return next((str(each.attrs["loss"]) for each in self.data.values()), "")

    @property
    def about(self) -> str:
        """The limits of these numbers."""
        return ABOUT

    @property
    def legend(self) -> list[str]:
        """The meaning of the columns and words of the table."""
        return [
            f"Numbers are medians over networks. Exponent a ± b: the measure is like {self.over}^a, so that it is 2^a "
            f"times as large at twice the {self.over}; ± b is the {LEVEL:.0%} interval.",
            f"size-free: the interval is within ± {SIZE_FREE:g}, so that the measure does not depend on the "
            f"{self.over}. depends: the interval is beyond ± {SIZE_FREE:g}. unclear: it is neither; more networks "
            "(samples) decide. –: a value is zero or not finite.",
            f"The verdict is about the effects of updates and the change of the stream: the rate does not transfer if "
            f"one of their intervals is beyond ± {GROWS:g}; it does if all are within ± {FREE:g}. It is not "
            f"known where the loss or the stream of a network is not finite, or with fewer than {LEAST_NETWORKS} "
            "networks. k of n networks: the exponent is that of the networks with positive values at every size.",
        ]

    def word(self, name: str) -> str:
        """Return "size-free", "depends" or "unclear"; "" for a measure without an exponent."""
        each = self.exponents.get(name)
        return "" if each is None else WORDS[is_size_free(each)]

    def positive(self, name: str) -> NDArray[np.float64]:
        """Return the values (samples, sizes) of a measure in the networks where all are positive."""
        return positive_rows(self.measures[name])

    def cells(self) -> list[list[str]]:
        """Return the table of measures as text, its head first."""
        head = ["measure", *(f"{self.over} {size}" for size in self.sizes), "exponent", ""]
        result = [head]
        for row in self.rows():
            each, name = self.exponents.get(row["measure"]), row["measure"]
            values = [row[str(size)] for size in self.sizes]
            shown = [f"{value:.3g}" if math.isfinite(value) else "–" for value in values]
            some = each is not None and row["networks"] < len(self.measures[name])
            count = f" ({row['networks']} of {len(self.measures[name])} networks)" if some else ""
            result.append([name, *shown, "–" if each is None else str(each), self.word(name) + count])
        return result

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each measure: medians by size, exponent and interval, and whether it is size-free."""
        rows = []
        for name, values in self.measures.items():
            each = self.exponents.get(name)
            row: dict[str, Any] = {"measure": name}
            row |= {str(size): median(values[:, k]) for k, size in enumerate(self.sizes)}
            row |= {"exponent": each.value, "low": each.low, "high": each.high} if each else {}
            row["size-free"] = None if each is None else is_size_free(each)
            row["networks"] = len(self.positive(name))
            rows.append(row)
        return rows

    def csv(self) -> str:
        """Return the rows as comma-separated values."""
        text = io.StringIO()
        columns = ["measure", *map(str, self.sizes), "exponent", "low", "high", "size-free", "networks"]
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows())
        return text.getvalue()

    def record(self) -> dict[str, Any]:
        """Return the result as JSON holds it."""
        rows = [{key: finite_or_none(value) for key, value in row.items()} for row in self.rows()]
        return {
            "over": self.over, "sizes": list(self.sizes), "rule": self.rule, "optimizer": self.optimizer,
            "groups": {str(size): json.loads(each.attrs["groups"]) for size, each in self.data.items()},
            "loss": self.loss, "conclusion": self.conclusion, "transfers": self.transfers, "measures": rows,
            "notes": list(self.notes), "witness": None if self.witness is None else self.witness.record(),
        }  # fmt: skip

    def dataset(self) -> xr.Dataset:
        """Return the measures (measure, sample, size)."""
        values = np.stack(list(self.measures.values()))
        data = xr.Dataset({"value": (("measure", "sample", "size"), values)})
        return data.assign_coords(measure=list(self.measures), size=list(self.sizes)).assign_attrs(
            over=self.over, rule=self.rule, optimizer=self.optimizer, loss=self.loss
        )

    def page(self) -> str:
        """Return the result as one HTML page that needs no other file."""
        from limitformer.scaling.page import page

        return page(self)

    def save(self, folder: str | Path) -> list[Path]:
        """Write transfer.html, .json, .csv, .nc and .png into a folder, each whole or not at all; return paths.

        Raises:
            InputError: the folder cannot be written.
        """
        from limitformer.scaling.page import draw

        texts = {"transfer.html": self.page(), "transfer.json": self.record(), "transfer.csv": self.csv()}
        place, written = local_path(folder), write_texts(folder, texts)
        data = save(self.dataset(), place / "transfer.nc")
        write_whole(place / "transfer.png", partial(draw, self))
        return [*written, data, place / "transfer.png"]

    def __repr__(self) -> str:
        """Return what was varied and whether the rate transfers; `print` shows the measures."""
        return f"<Transfer over the {self.over} {list(self.sizes)}, {self.rule}: transfers={self.transfers}>"

    def __str__(self) -> str:
        """Return the conclusion, the heading, the table, what it means, and the notes, wrapped at 80 characters."""
        cells = self.cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = []
        for name, *row, word in cells:
            middle = [cell.rjust(width) for cell, width in zip(row, widths[1:-1], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *middle, word]).rstrip())
        below = [textwrap.fill(text, 80, subsequent_indent="  ") for text in (*self.legend, *self.notes, ABOUT)]
        head = [
            textwrap.fill(text, 80, break_on_hyphens=False)
            for text in (self.conclusion, self.heading, self.proof)
            if text
        ]
        return "\n".join([*head, "", *lines, "", *below])


class TransferInterrupted(Interrupted):
    """Ctrl-C during `transfer`; `result` is that of the finished networks, and `partial` has their data.

    A network counts for the exponents if it is finished at every size that has one.
    """

    def __init__(self, result: Transfer) -> None:
        super().__init__(result.dataset())
        self.result, self.pickled_arguments = result, (result,)


def positive_rows(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[np.isfinite(values).all(1) & (values > 0).all(1)]


def median(values: NDArray[np.float64]) -> float:
    """Return the median of the finite values; NaN without any."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def transfer(
    model: Any,
    over: Mapping[str, Sequence[int]],
    inputs: Any = 32,
    *,
    optimizer: Any,
    rate: float | None = None,
    rule: str = "standard",
    base: int | None = None,
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
        over: {"width": sizes}, {"depth": sizes}, or a field of the configuration or an argument of the function.
            Configurations scale by their fields: at another width the heads keep their size.
        inputs: the batch, as for `limitformer.weightless.simulate`.
        optimizer: as for `limitformer.stepping.simulate_steps`.
        rate: the learning rate at the base; None: the optimiser's own. The rates of all groups are multiplied by the
            same factor at every size, so that an optimiser's own dependence on the size stays.
        rule: "standard" (one rate, the model's own initialisation), "mup", "completep" or "depth-mup". The rule sets
            initialisation, multipliers and rates of every size relative to the base.
        base: the size at which the rule changes nothing; None: the smallest.
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
    name, sizes = sizes_over(over)
    taken = {"rates", "factors", "overrides"} & options.keys()
    require(not taken, f"transfer has no option {', '.join(sorted(taken))}: the rule sets it.")
    known = set(inspect.signature(training_of).parameters) | {"progress"}
    strange = sorted(options.keys() - known)
    require(not strange, f"transfer has no option {', '.join(strange)}.{nearest(''.join(strange[:1]), sorted(known))}")
    require_count("samples", samples)
    base = sizes[0] if base is None else require_count("base", base)
    models, factor, proof = {}, 1.0, None
    for size in sizes:
        with naming(name, size):
            models[size] = parametrised(model, name, size, base, rule, optimizer, steps)
    if rate is not None:
        require_rate(rate, "a learning rate")
        with naming(name, base):
            of_base = models[base][2] if base in models else read_at(model, name, base, optimizer, steps, rule)[0]
        require(of_base.base > 0, f"the optimiser's own learning rate at {name} {base} is 0, so that none scales it.")
        factor = rate / of_base.base
    notes = list(models[sizes[-1]][0].notes)
    stays = dict.fromkeys(field for put, _, _ in models.values() for field in put.stays)  # none at the present size
    if stays:
        notes.insert(
            0, f"stays at every {name}: {', '.join(stays)}. If that should grow, write a function of the {name}"
        )
    bar = progress_bar(BAR, samples * len(sizes), 0.0) if options.pop("progress", True) else None
    entries = np.array([count for _, count, _ in models.values()], float)
    works = samples * len(sizes) * entries / entries.sum()  # networks of the mean size that take as long
    data: dict[int, xr.Dataset] = {}

    def arguments(size: int) -> dict[str, Any]:
        put, _, rules = models[size]
        factors = {key: (put.lr_factors[key], put.decay_factors[key], put.eps_factors[key]) for key in put.lr_factors}
        return options | {
            "model": put.model, "inputs": inputs, "optimizer": optimizer, "seed": seed, "factors": factors,
            "rates": None if rate is None else [factor * rules.base], "overrides": put.overrides or None,
            "steps": steps,
        }  # fmt: skip

    reason = models[sizes[0]][2].not_understood
    if reason:
        proof = Witness(DRAWN, reason)
    elif witness:
        with naming(name, sizes[0]):
            proof = witness_steps(partial(training_of, **arguments(sizes[0])), optimizer, witness, rule == STANDARD)
    drawn = proof.reason if proof is not None and proof.status == DRAWN else ""
    try:
        for k, size in enumerate(sizes):
            words = f"{name} {size}, {k + 1} of {len(sizes)}"
            part = PartOfBar(bar, float(works[:k].sum()), float(works[k]), samples, words)
            advance(part, 0)  # the bar names a size before its first network is finished
            with naming(name, size):
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
        raise TransferInterrupted(transfer_of(name, finished, rule, notes, proof)) from interrupt
    finally:
        advance(bar, -1)
    return transfer_of(name, data, rule, notes, proof)


@contextmanager
def naming(over: str, size: int) -> Iterator[None]:
    """Name the size in an `InputError` of the block."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{over} {size}: {error}") from error


def partly(over: str, finished: Mapping[int, xr.Dataset], samples: int) -> str:
    """Return the note about an interrupted run."""
    counts = ", ".join(f"{each.sizes['sample']} of {over} {size}" for size, each in finished.items())
    return f"PARTIAL, as it was interrupted: of {samples} networks at each size, these are finished: {counts}."


def transfer_of(
    over: str, data: Mapping[int, xr.Dataset], rule: str, notes: Sequence[str], proof: Witness | None
) -> Transfer:
    """Fit the exponents of all measures, to the networks that every size has."""
    sizes, measures = tuple(data), measures_of(data)
    exponents = {}
    for key, values in measures.items():
        positive = positive_rows(values)
        if len(positive):
            exponents[key] = exponent(positive, sizes, key)
    (first, words), *_, (last, others) = 2 * [(size, each.attrs["optimizer"]) for size, each in data.items()]
    if words != others:
        words = f"at {over} {first} {words}, at {over} {last} {others}"
    return Transfer(over, sizes, rule, words, data, measures, exponents, [*unmeasured(data), *notes], proof)


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
) -> tuple[Parametrisation, int, StepRules]:
    """Put the rule into effect for the optimiser of each parameter; return also the entries and the rules of steps."""
    rules, entries = read_at(model, over, size, optimizer, steps, rule)
    kinds = {key: ADAMW if each.kind == ADAM and each.decoupled else each.kind for key, each in rules.rules.items()}
    return parametrise(model, over, size, base, rule, kinds), entries, rules


def read_at(model: Any, over: str, size: int, optimizer: Any, steps: int, rule: str) -> tuple[StepRules, int]:
    """Read the optimiser of the model at a size; return also the number of the model's entries."""
    module, _ = build_without_weights(at_size(model, over, size).model, torch.float32)
    entries = sum(each.numel() for each in module.parameters())
    try:
        return read_optimizer(optimizer, module, steps=steps), entries
    except NotUnderstoodError as error:
        require(rule == STANDARD, f"{error} The factors of the rule {rule} depend on the optimiser.")
        rate = base_rate(made_by(optimizer, module)[0])
        return StepRules({}, None, (), rate, "", not_understood=error.reason), entries


def measures_of(data: Mapping[int, xr.Dataset]) -> dict[str, NDArray[np.float64]]:
    """Return the measures (samples, sizes) after the first step and after the last, by name; NaN for missing ones."""
    each = [measures_at(one) for one in data.values()]
    names = [name for name in each[0] if all(name in one for one in each)]
    most = max(one.sizes["sample"] for one in data.values())
    result = {
        name: np.stack([np.pad(one[name], (0, most - len(one[name])), constant_values=np.nan) for one in each], 1)
        for name in names
    }
    rounding = ROUNDING * np.finfo(next(iter(data.values())).attrs["dtype"]).eps
    for name in (STREAM, f"{STREAM}, first step"):
        if name in result and not (result[name] >= rounding * result["stream at the end"]).any():
            result[name] = result[name] * 0.0  # at no size is it more than rounding
    return result


def measures_at(data: xr.Dataset) -> dict[str, NDArray[np.float64]]:
    """Return the measures (samples,) of one size; changes of stream and output are root mean squares."""
    last, first, start = data.isel(step=-1), data.isel(step=1), data.isel(step=0)
    steps = {"": last} | ({", first step": first} if data.sizes["step"] > 2 else {})
    result: dict[str, Any] = {}
    if "stream" in data:
        size = start.stream.isel(layer=-1)  # a rule may change it: the change itself must not depend on the size
        result |= {"stream at the start": start.stream.isel(layer=0), "stream at the end": size}
        result |= {f"{STREAM}{when}": each.stream_change.isel(layer=-1) * size for when, each in steps.items()}
        result["largest activation"] = last.largest.max("layer")
    result |= {"output": data.output.isel(step=0), "gradient": data.gradient_norm.isel(step=0)}
    result |= {f"{OUTPUT}{when}": each.output_change for when, each in steps.items()}
    result[FALL] = data.loss.isel(step=0) - last.loss
    if "logit_std" in data:
        result["attention logits"] = last.logit_std.mean(["block", "head"])
    kinds: dict[str, list[str]] = {}
    for weight in data.weight.values[data.matrix.values]:
        kinds.setdefault(kind_of(str(weight)), []).append(str(weight))
    for kind, names in kinds.items():
        effect = (first.update_effect.sel(weight=names) ** 2).mean("weight") ** 0.5
        if bool(np.isfinite(effect).all()):
            result[f"{EFFECT}{kind.removesuffix('.weight')}, first step"] = effect
    return {name: np.asarray(value, float) for name, value in result.items()}
