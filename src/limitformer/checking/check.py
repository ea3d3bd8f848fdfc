"""`check`: will this Transformer collapse? Its curves by layer, the law's band, and verdicts."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import nn

from limitformer.base.errors import require_count
from limitformer.checking.band import band
from limitformer.checking.curves import curves, place_of
from limitformer.checking.folder import listed
from limitformer.checking.module import measured
from limitformer.checking.report import Report
from limitformer.checking.subject import Subject, about_loss, inputs_for, loss_of, subject_of, task_and_config
from limitformer.checking.thresholds import FINE, Threshold, thresholds_with
from limitformer.checking.verdicts import TRAINED, Verdict, verdicts
from limitformer.hf import Shaping
from limitformer.initialisation.report import InitialisationReport
from limitformer.initialisation.weight_by_weight import check_initialisation
from limitformer.nn.drawn.simulate import resolve_device
from limitformer.weightless.inputs import Inputs, Loss
from limitformer.weightless.law import LawTable
from limitformer.weightless.laws import CONSTANT
from limitformer.weightless.models import Blueprint
from limitformer.weightless.network import Weightless
from limitformer.weightless.simulate import run_passes

MOVED = 0.02  # standard deviation of a weight that started at zero, once it has moved


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
    loss: Loss | None = None,
    law: bool = True,
    seed: int = 0,
    batch_dim: int = 0,
    progress: bool = True,
) -> Report:
    """Measure a Transformer by layer, hold it against its law at initialisation, and say what is wrong.

    Args:
        what: the name of a public shape (`limitformer.shapes()`), a configuration of transformers, its JSON or folder,
            a function that makes a module, or a `limitformer.Transformer`: then it is the exact law; or a module that
            exists, or a checkpoint's folder: then that one network is measured, and held against its law.
        text: one or several texts, ids, images or named tensors (an `attention_mask` leaves out padding); a start for a
            `limitformer.Transformer`. None: unrelated tokens.
        tokens: how many of them; of a text the first ones.
        samples: networks of the law.
        gradients: whether a loss is differentiated.
        against: another of the same kinds, shown beside it.
        overrides: laws in the place of the model's own: {pattern of weights' names: standard deviation or `Law`}.
        settings: fields of the configuration to change: {"initializer_range": 0.01}.
        shaping: what `limitformer.hf.shape_model` is given; None: not shaped.
        thresholds: some of `limitformer.checking.THRESHOLDS`, changed: a number, or (watch, broken).
        loss: from the output and the inputs to one number a sequence; None: that of the model's task, or of a module
            without one a random linear readout of its last tokens.
        law: whether a module that exists is held against its law, which takes longer than to measure it.
        seed: the same seed gives the same report.
        batch_dim: the dimension of the inputs in which sequences lie: 1 for a module that takes (tokens, sequences, …).
        progress: whether work of more than two seconds shows on the terminal.

    Raises:
        InputError: an argument that cannot be used, or a network that cannot run.
        Interrupted: Ctrl-C, with the finished samples of the law.
    """
    require_count("tokens", tokens, least=2)
    require_count("samples", samples)
    limits = thresholds_with(thresholds)
    subject = subject_of(what, settings, shaping)
    other = None if against is None else subject_of(against)
    options = {
        "law": law,
        "gradients": gradients,
        "overrides": overrides,
        "seed": seed,
        "progress": progress,
        "loss": loss,
        "batch_dim": batch_dim,
    }
    report = with_verdicts(measure(subject, text, tokens, samples, options), subject, limits)
    if settings:
        report = replace(report, name=f"{report.name} with {', '.join(f'{k}={v}' for k, v in settings.items())}")
    if other is None:
        return report
    beside = with_verdicts(measure(other, text, tokens, samples, options | {"overrides": None}), other, limits)
    return replace(report, against=told_apart(report, beside, what, against))


def told_apart(report: Report, beside: Report, what: Any, against: Any) -> Report:
    """The second report, under a name that the first does not have."""
    if beside.name != report.name:
        return beside
    paths = all(isinstance(each, str | Path) for each in (what, against)) and str(what) != str(against)
    return replace(beside, name=str(against) if paths and str(against) != report.name else f"{beside.name} (against)")


def with_verdicts(report: Report, subject: Subject, limits: Mapping[str, Threshold]) -> Report:
    """The report with its verdicts; those on initialisation are not given of a trained network."""
    if report.trained:
        weights = report.initialisation
        assert weights is not None
        said = (
            f"trained: {weights.differing} of {len(weights.weights)} weights differ from the initial law; what follows "
            "describes the network and does not judge it"
        )
        broken = [one for one in verdicts(report.curves, limits) if one.name == "not finite"]  # at any age
        return replace(report, verdicts=[*broken, Verdict(TRAINED, FINE, said)], thresholds=limits)
    # Shaped attention takes the mean of its softmax away, so that a uniform one is what it should be.
    return replace(
        report, verdicts=verdicts(report.curves, limits, ("uniform",) if subject.shaped else ()), thresholds=limits
    )


def measure(subject: Subject, text: Any, tokens: int, samples: int, options: dict[str, Any]) -> Report:
    """The curves of the network that exists, if one does, and of its law, if that is known."""
    blueprint = task_and_config(subject)
    inputs = inputs_for(subject, text, tokens).with_batch_dim(options["batch_dim"])
    loss = (options["loss"] or loss_of(blueprint, options["seed"])) if options["gradients"] else None
    held = None if subject.module is None else measured(subject.module, inputs, loss)
    about: dict[str, Any] = {}
    if loss is not None:
        about = {"loss": "the user's"} if options["loss"] is not None else about_loss(blueprint)
    if held is not None and subject.module is not None:
        about |= zeros_of_module(subject.module, held, inputs, loss)
    if subject.blueprint is None or not (held is None or options["law"]):
        return report_of(subject, held, None, None, weights_of(subject.module, None), about)
    found = weightless_of(subject.blueprint, options["overrides"])
    weights = weights_of(subject.module, found)  # before any pass: a module may change its buffers as it runs
    lawful = run_passes(found, inputs, loss, samples, options["seed"], progress=options["progress"])
    if held is None:
        about |= zeros_of_law(found, lawful, inputs, loss, options)
    return report_of(subject, held, lawful, found.table, weights, about)


def zeros_of(data: xr.Dataset, zeros: list[str], measure_moved: Callable[[list[str]], xr.Dataset]) -> dict[str, str]:
    """The kinds of weight that start at zero, and those that have no gradient because of that, a line for each.

    A kind waits for the zeros if it has a gradient once they have moved.

    Args:
        data: what was measured, with gradients.
        zeros: names of the parameters that are zero.
        measure_moved: measures a network in which these parameters are not zero.
    """
    norms = norms_by_name(data)
    alive = [name for name in zeros if not name.endswith("bias") and norms.get(name, 0.0) > 0]
    silent = {place_of(name)[0] for name, norm in norms.items() if norm == 0}
    if not alive or not silent:
        return {}
    after = norms_by_name(measure_moved(alive))
    woken = {place_of(name)[0] for name, norm in after.items() if norm > 0}
    kinds = list(dict.fromkeys(place_of(name)[0] for name in alive))
    return {"zero_weights": ", ".join(kinds), "behind_zero": "\n".join(sorted(silent & woken))}


def norms_by_name(data: xr.Dataset) -> dict[str, float]:
    return dict(zip(data["weight"].values.tolist(), data["weight_gradient"].values[0].tolist(), strict=True))


def zeros_of_law(
    found: Weightless, lawful: xr.Dataset, inputs: Inputs, loss: Loss | None, options: Mapping[str, Any]
) -> dict[str, str]:
    """`zeros_of` a network without weights, by one sample in which zeros have another law."""
    if loss is None:
        return {}

    def moved(names: list[str]) -> xr.Dataset:
        other = weightless_of(found.blueprint, {**(options["overrides"] or {}), **dict.fromkeys(names, MOVED)})
        return run_passes(other, inputs, loss, 1, options["seed"], progress=False)

    zeros = [name for name, law in found.laws.items() if law.kind == CONSTANT and law.shift == 0]
    return zeros_of(lawful, zeros, moved)


def zeros_of_module(module: nn.Module, held: xr.Dataset, inputs: Inputs, loss: Loss | None) -> dict[str, str]:
    """`zeros_of` a module that exists, by a copy of it."""
    if loss is None:
        return {}

    def moved(names: list[str]) -> xr.Dataset:
        other = deepcopy(module)
        chance = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name in names:
                one = other.get_parameter(name)
                one.copy_(MOVED * torch.randn(one.shape, generator=chance))
        return measured(other, inputs, loss)

    return zeros_of(held, [name for name, one in module.named_parameters() if not one.detach().any()], moved)


def weightless_of(blueprint: Blueprint, overrides: Mapping[str, Any] | None = None) -> Weightless:
    """The network without weights, on a GPU where there is one."""
    return Weightless(blueprint, torch.float32, torch.device(resolve_device(None)), dict(overrides or {}))


def report_of(
    subject: Subject,
    held: xr.Dataset | None,
    lawful: xr.Dataset | None,
    laws: LawTable | None,
    weights: InitialisationReport | None,
    more: Mapping[str, Any],
) -> Report:
    """The report of the network that exists, of its law, or of both."""
    shown = held if held is not None else lawful
    assert shown is not None  # a subject has a module or a blueprint
    sequences = len(np.unique(shown["sequence"])) if "sequence" in shown.coords else 1
    about: dict[str, Any] = {"tokens": shown.sizes["token"] // sequences, "sequences": sequences, **more}
    if subject.unread:
        about["unread"] = listed(list(subject.unread))
    return Report(
        name=subject.name,
        initialisation=weights,
        exists=held is not None,
        curves=curves(shown).assign_attrs(about),
        band=None if lawful is None or lawful.sizes["sample"] < 2 else band(curves(lawful)),
        data=shown,
        laws=laws,
        about={**shown.attrs, **({} if lawful is None else lawful.attrs), **about},
    )


def weights_of(module: nn.Module | None, law: Weightless | None) -> InitialisationReport | None:
    """The weights of a module that exists, beside their law where that is known."""
    if module is None or law is None:
        return None if module is None else check_initialisation(module, None)
    return check_initialisation(module, law.table, reference=law.module)
