"""`check`: will this Transformer collapse? Resolve the subject, measure it, summarise, judge, report."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import nn

from limitformer.base.errors import require, require_count
from limitformer.checking.conditions import agreement, size_by_group
from limitformer.checking.curves import band, curves, kind_and_block
from limitformer.checking.module import Passes, copied, evaluating, measure_module, settle_module
from limitformer.checking.report import CheckedNetwork, Report
from limitformer.checking.thresholds import thresholds_with
from limitformer.checking.verdicts import verdicts
from limitformer.formats.measure import Counting
from limitformer.formats.rounding import rounding as rounding_of
from limitformer.formats.table import NumberFormat, formats_of
from limitformer.formats.verdicts import verdicts as format_verdicts
from limitformer.hf import Shaping
from limitformer.initialisation.recipes import Recipe, RecipeComparison, recipe_of
from limitformer.initialisation.recipes.comparison import compare_law
from limitformer.initialisation.recipes.law import ComparedLaw
from limitformer.initialisation.report import InitialisationReport
from limitformer.initialisation.weight_by_weight import check_initialisation
from limitformer.nn.drawn.simulate import resolve_device
from limitformer.reports.verdict import FINE, GRADES, NOTE, TRAINED, Verdict, titled
from limitformer.simulation.simulate import Interrupted
from limitformer.stepping.optimizers import read_optimizer
from limitformer.stepping.simulate import rules_of as rules_of_network
from limitformer.stepping.updates import UpdateRule
from limitformer.subjects.folder import listed
from limitformer.subjects.inputs import Inputs, inputs_for
from limitformer.subjects.losses import TASKS, ChosenLoss, Loss, chosen_loss, readout
from limitformer.subjects.subject import Subject, resolve
from limitformer.weightless.arrays import split_stacks
from limitformer.weightless.law import LawTable
from limitformer.weightless.laws import CONSTANT
from limitformer.weightless.layout import Chosen
from limitformer.weightless.network import Weightless
from limitformer.weightless.run import AUTO
from limitformer.weightless.simulate import accepted_inputs, named_errors, run_passes
from limitformer.weightless.structure import Structure
from limitformer.witness import DRAWN, FULL, Witness, witness_pass

NO_LAW = (
    "recipe needs the law of the model's code, which is not known of this module. Nearest: a configuration, a function "
    "that builds it, and law=True."
)
MOVED = 0.02  # standard deviation given to weights that start at zero, to see what they hold back


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `check` that say how a network is measured."""

    text: Any
    tokens: int
    samples: int
    gradients: bool
    overrides: Mapping[str, Any] | None
    loss: Loss | str | None
    law: bool
    seed: int
    batch_dim: int
    blocks: Chosen | None
    progress: bool
    recipe: Recipe | None = None
    witness: bool | str = True
    formats: tuple[NumberFormat, ...] = ()
    rounding: bool = False
    optimizer: Any = None


@dataclass
class Measured:
    """Measurements of the network that exists, of its law, or of both.

    Attributes:
        module: one sample, of a network that exists.
        law: samples of the law.
        laws: the law of every weight.
        weights: the weights of a network that exists, compared with their law.
        about: the loss, and weights that start at zero.
        agreement: of the outputs for two inputs that differ in one condition.
        group_size: returns the size of the stream by group of tokens.
        recipe: the law of every weight, compared with a published recipe.
        witness: a sample of the law, compared with the user's own module.
        formats: the numbers of one network in each number format.
        rounding: the same network in each number format.
    """

    module: xr.Dataset | None = None
    law: xr.Dataset | None = None
    laws: LawTable | None = None
    weights: InitialisationReport | None = None
    about: dict[str, Any] = field(default_factory=dict)
    agreement: xr.DataArray | None = None
    group_size: Callable[[xr.Dataset], xr.DataArray | None] = lambda data: None
    recipe: RecipeComparison | None = None
    witness: Witness | None = None
    formats: xr.Dataset | None = None
    rounding: xr.Dataset | None = None


def check(
    what: Any,
    text: Any = None,
    *,
    tokens: int = 128,
    samples: int = 8,
    gradients: bool = True,
    against: Any = None,
    overrides: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    shaping: Shaping | None = None,
    thresholds: Mapping[str, float | tuple[float, float]] | None = None,
    loss: Loss | str | None = None,
    law: bool = True,
    seed: int = 0,
    batch_dim: int = 0,
    blocks: Chosen | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
    recipe: Recipe | Callable[..., ComparedLaw | None] | str | None = None,
    witness: bool | str = True,
    formats: Sequence[str] | str | None = None,
    rounding: bool = False,
    optimizer: Any = None,
) -> Report:
    """Measure a Transformer by layer, compare it with its law at initialisation, and return what is wrong.

    Args:
        what: the name of a public shape (`limitformer.shapes()`), a configuration of transformers, its JSON or folder,
            a function that makes a module, or a `limitformer.Transformer`: these are measured by their exact law. A
            module, or a checkpoint's folder, is measured itself and compared with its law.
        text: one or several texts, ids, images or named tensors (an `attention_mask` leaves out padding); a start for a
            `limitformer.Transformer`. None: unrelated tokens.
        tokens: number of tokens; of a text the first ones.
        samples: networks of the law.
        gradients: whether a loss is differentiated.
        against: another subject of the same kinds, shown next to it.
        overrides: laws that replace the model's own: {pattern of weights' names: standard deviation or `Law`}.
        settings: fields of the configuration, or arguments of the function, to change: {"initializer_range": 0.01}.
        shaping: the argument of `limitformer.hf.shape_model`; None: not shaped.
        thresholds: changes to `limitformer.checking.THRESHOLDS`: a number, or (watch, broken).
        loss: "next-token", "mse" (with `targets` or `labels` in the inputs), or a function of output and inputs that
            returns one number for each sequence. None: the loss that the module computes, or that of the model's task;
            for a module that has neither, the cross-entropy that its shapes show, as in `limitformer.steps`, or else a
            random linear readout of its last tokens. The heading says which ran.
        law: whether an existing module is compared with its law, which takes longer than measuring it.
        seed: the same seed gives the same report.
        batch_dim: the dimension of the inputs that counts sequences: 1 for a module that takes (tokens, sequences, …).
        blocks: the modules to measure: a pattern of names such as "h.*", several, or a function that takes the module
            and returns them; None finds the modules that receive the stream and return it.
        trust_remote_code: whether the Python code in the folder of a configuration (`auto_map`) may run.
        progress: whether the terminal shows the progress of work of more than two seconds.
        recipe: a published initialisation (`limitformer.recipes()`), its name, its name with settings, such as
            `megatron,std=0.006`, or your own function: the law of every weight is compared with it.
        witness: whether a sample of the law is compared with the user's own module in plain PyTorch; "full" for the
            full size, whatever its memory. If they differ, the module's own code draws the networks.
        formats: number formats, of "bf16", "fp16", "e4m3" and "e5m2", whose range every tensor of one network is held
            against (`Report.formats`); their verdicts take the place of `range`.
        rounding: whether that network, a new one, also runs in each format with the weights that it has in float32
            (`Report.rounding`). It draws all weights.
        optimizer: as in `limitformer.steps`: with formats, whether its first step changes weights that are kept in
            two bytes alone.

    Raises:
        InputError: an argument cannot be used, or a network cannot run.
        Interrupted: Ctrl-C, with the finished samples of the law.
    """
    require_count("tokens", tokens, least=2)
    require_count("samples", samples)
    limits = thresholds_with(thresholds)
    require(witness in (True, False, FULL), f"witness must be True, False or {FULL!r}; got {witness!r}.")
    require(optimizer is None or gradients, "optimizer needs gradients. Nearest: gradients=True.")
    published = None if recipe is None else recipe_of(recipe)
    chosen = () if formats is None else formats_of(formats)
    useless = "rounding" * rounding or "optimizer" * (optimizer is not None)
    require(bool(chosen) or not useless, f'{useless} needs formats. Nearest: formats=["bf16"].')
    subject = resolve(what, settings, shaping=shaping, trust_remote_code=trust_remote_code, loads=True)
    other = None if against is None else resolve(against, trust_remote_code=trust_remote_code, loads=True)
    existing = "rounding runs a new network; got one that exists. Nearest: its configuration, or what builds it."
    require(not rounding or subject.module is None, existing)
    options = Options(
        text=text,
        tokens=tokens,
        samples=samples,
        gradients=gradients,
        overrides=overrides,
        loss=loss,
        law=law,
        seed=seed,
        batch_dim=batch_dim,
        blocks=blocks,
        progress=progress,
        recipe=published,
        witness=witness,
        formats=chosen,
        rounding=rounding,
        optimizer=optimizer,
    )
    report = with_verdicts(summarise(subject, measure(subject, options)), limits, subject.shaped)
    report = replace(report, name=titled(report.name, settings))
    if other is None:
        return report
    options = replace(options, overrides=None, optimizer=None, rounding=rounding and other.module is None)
    second = summarise(other, measure(other, options))
    second = with_verdicts(second, limits, other.shaped)
    if second.name == report.name:
        paths = all(isinstance(each, str | Path) for each in (what, against)) and str(what) != str(against)
        distinct = paths and str(against) != report.name
        second = replace(second, name=str(against) if distinct else f"{second.name} (against)")
    return replace(report, against=second)


def measure(subject: Subject, options: Options) -> Measured:
    """Measure the network, if it exists, and samples of its law, if that is known."""
    inputs = inputs_for(subject, options.text, options.tokens).with_batch_dim(options.batch_dim)
    own_loss = options.gradients and options.loss is None
    module, result, loss = subject.module, Measured(), None
    known = subject.has_law and (module is None or options.law)
    require(known or options.recipe is None, NO_LAW)
    if module is not None:
        inputs = settle_module(module, inputs, own_loss, options.blocks)
        counting = Counting(options.formats, rules_of(module, options.optimizer)) if options.formats else None
        try:
            with evaluating(module):
                passes = Passes(module, options.blocks)
            loss = (
                loss_of(subject, passes, options.loss, options.seed, options.batch_dim) if options.gradients else None
            )
            result.module = measure_module(module, inputs, loss, options.blocks, counting, passes)
            if counting is not None:
                result.formats = counting.result(module, None)
        finally:
            if counting is not None:
                counting.finish()  # its hooks on the user's parameters
        result.about |= zeros_of_module(module, result.module, inputs, loss, options)
        result.agreement = agreement(
            inputs, subject.config, lambda each: measure_module(module, each, None, options.blocks)
        )
    if not known:
        assert module is not None  # a subject has a module or a law
        result.weights = check_initialisation(module, None)
    else:
        network = weightless_of(subject, options.overrides, options.blocks)
        require(
            not options.gradients or bool(network.trained),
            f"no weight of {subject.name} has a gradient. Nearest: gradients=False.",
        )
        result.laws = network.table
        if options.recipe is not None:
            result.recipe = compare_law(options.recipe, network.module, network.table, subject.config)
        if module is not None:  # before any pass: a module may change its buffers as it runs
            result.weights = check_initialisation(module, network.table, reference=network.module)
        inputs = accepted_inputs(inputs, network, options.seed, own_loss)
        if options.gradients and loss is None:
            if network.foreign and own_loss:  # a pass that shows its shapes
                named_errors(lambda: network.run(options.seed, range(1), inputs, AUTO, None), subject, inputs)
            loss = loss_of(subject, network, options.loss, options.seed, options.batch_dim)
        if options.witness and module is None:
            result.witness = witness_pass(network, inputs, loss, options.seed, how=options.witness)
            if result.witness is not None and result.witness.status == DRAWN and not network.drawn:
                network.draw_whole({"its code": result.witness.reason})
        result.law = run_passes(network, inputs, loss, options.samples, options.seed, progress=options.progress)
        try:
            if options.formats and module is None:
                result.formats = count_numbers(network, inputs, loss, options)
            if options.rounding:
                result.rounding = rounded_network(subject, network, inputs, loss, options)
        except KeyboardInterrupt as interrupt:
            raise Interrupted(result.law) from interrupt
        if module is None:
            result.about |= zeros_of_law(network, result.law, inputs, loss, options)
            result.agreement = agreement(
                inputs, subject.config, lambda each: run_passes(network, each, None, 1, options.seed, progress=False)
            )
        if equal := equal_layers(network):
            result.about["equal"] = equal
    owner = module if module is not None else network.module
    if frozen := sum(not each.requires_grad for each in owner.parameters()):
        result.about["frozen"] = frozen
    if loss is not None:
        result.about |= about_loss(subject, loss)
    result.group_size = lambda data: size_by_group(data, inputs, subject.config)
    if inputs.chosen:
        result.about["chosen"] = str(inputs)
    return result


def loss_of(subject: Subject, passes: Structure, loss: Loss | str | None, seed: int, batch_dim: int) -> ChosenLoss:
    """Return the loss that was asked for, or that of the model's task, its own, or that of its shapes.

    A user's module that leaves it open, and a stack without a head, have a random readout.
    """
    by_shapes = passes.loss_of_shapes(batch_dim, readout(seed))
    foreign = subject.config is None and subject.transformer is None
    return chosen_loss(loss, subject.task, by_shapes if foreign else readout(seed), batch_dim)


def count_numbers(network: Weightless, inputs: Inputs, loss: ChosenLoss | None, options: Options) -> xr.Dataset:
    """Count the numbers of every tensor of the first sample, in a pass of its own."""
    network.more = counting = Counting(options.formats, rules_of(network, options.optimizer))
    try:
        network.run(options.seed, range(1), inputs, AUTO, loss)
    finally:
        network.more = None
    return counting.result(network.module, None if network.drawn or network.rebuilt else network.laws)


def rounded_network(
    subject: Subject, network: Weightless, inputs: Inputs, loss: ChosenLoss | None, options: Options
) -> xr.Dataset:
    """Run the first sample in float32 and in each format."""
    require(bool(network.layout.blocks), f"{subject.name} has no blocks, between which rounding is measured.")

    def make() -> Weightless:
        other = weightless_of(subject, options.overrides, options.blocks)
        if network.drawn:
            other.draw_whole(network.drawn)
        return other

    return rounding_of(make, network.layout, inputs, loss, options.formats, options.seed)


def rules_of(network: Weightless | nn.Module, optimizer: Any) -> Mapping[str, UpdateRule]:
    """Return the optimiser's rules by weight; none without an optimiser."""
    if optimizer is None:
        return {}
    if isinstance(network, Weightless):
        return rules_of_network(network, optimizer, 1, None, 0, None).rules
    return read_optimizer(optimizer, network, steps=1).rules


def summarise(subject: Subject, measured: Measured) -> Report:
    """Return the report without its verdicts: the curves of each stack, the law's band, and provenance.

    The report is about the last stack, such as a decoder, which has the loss; it holds those of the others.
    """
    data = measured.module if measured.module is not None else measured.law
    assert data is not None  # a subject has a module or a law
    parts, laws = split_stacks(data), {} if measured.law is None else split_stacks(measured.law)
    about = {**data.attrs, **({} if measured.law is None else measured.law.attrs), **measured.about}
    if subject.unread:
        about["unread"] = listed(list(subject.unread))
    every = dict[str, xr.Dataset]()
    for name, part in parts.items():
        every[name] = curves(part).assign_attrs({**tokens_of(part), **measured.about})
        if (groups := measured.group_size(part)) is not None:
            every[name] = every[name].assign(group_size=groups)
    if measured.agreement is not None:
        every[name] = every[name].assign(agreement=measured.agreement)
    *others, last = (
        CheckedNetwork(
            name=name,
            exists=measured.module is not None,
            curves=every[name],
            band=band_of(laws.get(name)),
            data=part,
            laws=None,
            about={**about, **tokens_of(part)},
        )
        for name, part in parts.items()
    )
    return Report(
        name=subject.name,
        stack=last.name,
        stacks=tuple(others),
        initialisation=measured.weights,
        exists=last.exists,
        curves=last.curves,
        band=last.band,
        data=last.data,
        laws=measured.laws,
        about=last.about,
        recipe=measured.recipe,
        witness=measured.witness,
        formats=measured.formats,
        rounding=measured.rounding,
    )


def tokens_of(data: xr.Dataset) -> dict[str, int]:
    """Return the number of sequences, and of tokens in each."""
    sequences = len(np.unique(data["sequence"])) if "sequence" in data.coords else 1
    return {"tokens": data.sizes["token"] // sequences, "sequences": sequences}


def band_of(law: xr.Dataset | None) -> xr.Dataset | None:
    return None if law is None or law.sizes["sample"] < 2 else band(curves(law))


def with_verdicts(report: Report, limits: Mapping[str, Any], shaped: bool) -> Report:
    """Return the report with its verdicts; those of other stacks begin with the stack's name."""
    skip = ("range",) * (report.formats is not None)  # verdicts on formats are more exact
    stacks = tuple(replace(each, verdicts=verdicts(each.curves, limits, skip)) for each in report.stacks)
    own = judge(report, limits, shaped)
    every = [report.curves, *(each.curves for each in report.stacks)]
    if report.formats is not None and (found := format_verdicts(report.formats, every)):
        alarms = any(one.grade != NOTE for one in found)
        own = sorted([*(one for one in own if one.grade != FINE or report.trained or not alarms), *found], key=rank)
    if not report.trained:
        theirs = [replace(one, said=f"{each.name}: {one.said}") for each in stacks for one in each.verdicts]
        wrong = [one for one in theirs if one.grade != FINE]
        own = [one for one in own if one.grade != FINE or not wrong] + wrong
        own = sorted(own, key=rank)
    return replace(report, verdicts=own, stacks=stacks, thresholds=limits)


def rank(verdict: Verdict) -> int:
    return -GRADES.index(verdict.grade)


def judge(report: Report, limits: Mapping[str, Any], shaped: bool) -> list[Verdict]:
    """Return the verdicts; a trained network has no verdict on its initialisation."""
    if report.trained:
        weights = report.initialisation
        assert weights is not None
        sentence = (
            f"trained: {weights.differing} of {len(weights.weights)} weights differ from the initial law; what follows "
            "describes the network and does not judge it"
        )
        broken = [one for one in verdicts(report.curves, limits) if one.name == "not finite"]  # at any age
        return [*broken, Verdict(TRAINED, FINE, sentence)]
    # The softmax of shaped attention is uniform by design.
    skip = ("uniform",) * shaped + ("range",) * (report.formats is not None)
    return verdicts(report.curves, limits, skip)


def zeros_of(data: xr.Dataset, zeros: list[str], measure_moved: Callable[[list[str]], xr.Dataset]) -> dict[str, str]:
    """Return the weights that start at zero, and the kinds that have no gradient because of that, a line each.

    Zeros with a gradient move, which may give others a gradient, and so on until nothing changes: a kind that has one
    in the end waits for them. Zeros that never have one block the kinds that have a gradient once these are moved, too.

    Args:
        data: measured with gradients.
        zeros: names of the parameters that are zero.
        measure_moved: measures a network in which these parameters are not zero.
    """
    norms = norms_by_name(data)
    silent = {kind_and_block(name)[0] for name, norm in norms.items() if norm == 0}
    moved, stages, waiting = list[str](), list[str](), set[str]()
    while silent - waiting and (alive := [name for name in zeros if name not in moved and norms.get(name, 0.0) > 0]):
        moved += alive
        norms = norms_by_name(measure_moved(moved))
        woken = silent & {kind_and_block(name)[0] for name, norm in norms.items() if norm > 0}
        stages += [in_words(alive)] if woken - waiting else []
        waiting |= woken
    result = {"zero_weights": ", then ".join(stages), "behind_zero": "\n".join(sorted(waiting))} if waiting else {}
    rest = [name for name in zeros if norms.get(name) == 0]
    if silent - waiting and rest:
        norms = norms_by_name(measure_moved(moved + rest))
        if blocking := [name for name in rest if norms[name] > 0]:
            result["blocking"] = in_words(blocking)
    return result


def in_words(names: list[str]) -> str:
    """Return the names of weights with * for the block, without biases if there are others."""
    weights = [name for name in names if not name.endswith("bias")] or names
    return ", ".join(dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name, count=1) for name in weights))


def equal_layers(network: Weightless) -> str:
    """Return the kinds of trained matrix of which several blocks hold the same draw of the law, with their numbers."""
    drawn = Counter[tuple[str, int]]()
    for name, parameter in network.module.named_parameters():
        law = network.laws[name]
        if parameter.requires_grad and parameter.ndim > 1 and law.random and law.source >= 0:
            drawn[in_words([name]), law.source] += 1
    return ", ".join(f"{number} of {kind}" for (kind, _), number in drawn.items() if number > 1)


def norms_by_name(data: xr.Dataset) -> dict[str, float]:
    return dict(zip(data["weight"].values.tolist(), data["weight_gradient"].values[0].tolist(), strict=True))


def about_loss(subject: Subject, loss: ChosenLoss) -> dict[str, Any]:
    """Return the name of the loss that ran, and the loss of a uniform guess among its tokens or classes."""
    count = getattr(subject.config, "num_labels" if subject.task == "image" else "vocab_size", None)
    count = count if loss.name == TASKS.get(subject.task, ("",))[0] else loss.classes
    return {"loss": loss.name} | ({"chance": float(np.log(count))} if isinstance(count, int) and count > 0 else {})


def zeros_of_law(
    network: Weightless, data: xr.Dataset, inputs: Inputs, loss: ChosenLoss | None, options: Options
) -> dict[str, str]:
    """Return `zeros_of` a network without weights, from one sample in which the zeros have another law."""
    if loss is None:
        return {}

    def measure_moved(names: list[str]) -> xr.Dataset:
        other = weightless_of(
            network.subject, {**(options.overrides or {}), **dict.fromkeys(names, MOVED)}, options.blocks
        )
        if network.drawn:
            other.draw_whole(network.drawn)
        return run_passes(other, inputs, loss, 1, options.seed, progress=False)

    zeros = [name for name, law in network.laws.items() if law.kind == CONSTANT and law.shift == 0]
    return zeros_of(data, zeros, measure_moved)


def zeros_of_module(
    module: nn.Module, data: xr.Dataset, inputs: Inputs, loss: ChosenLoss | None, options: Options
) -> dict[str, str]:
    """Return `zeros_of` a module, from a copy of it."""
    if loss is None:
        return {}

    def measure_moved(names: list[str]) -> xr.Dataset:
        other = copied(module)
        chance = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name in names:
                parameter = other.get_parameter(name)
                parameter.copy_(MOVED * torch.randn(parameter.shape, generator=chance))
        return measure_module(other, inputs, loss, options.blocks)

    zeros = [name for name, parameter in module.named_parameters() if not parameter.detach().any()]
    return zeros_of(data, zeros, measure_moved)


def weightless_of(
    subject: Subject, overrides: Mapping[str, Any] | None = None, blocks: Chosen | None = None
) -> Weightless:
    """Return the network without weights, on a GPU if there is one."""
    return Weightless(subject, torch.float32, torch.device(resolve_device(None)), dict(overrides or {}), blocks)
