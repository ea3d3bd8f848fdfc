"""`check`: will this Transformer collapse? Its curves by layer, the law's band, and verdicts."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from limitformer.base.errors import require, require_count
from limitformer.checking.band import band
from limitformer.checking.curves import curves
from limitformer.checking.existing import measured
from limitformer.checking.initialisation.report import InitialisationReport
from limitformer.checking.initialisation.weight_by_weight import check_initialisation
from limitformer.checking.report import Report
from limitformer.checking.subject import Subject, subject_of, task_and_config
from limitformer.checking.thresholds import thresholds_with
from limitformer.checking.verdicts import verdicts
from limitformer.hf import Shaping
from limitformer.models import equicorrelated, from_text
from limitformer.models.text import words_of
from limitformer.nn.drawn.simulate import known_device, torch_seed
from limitformer.weightless.inputs import Inputs, Loss, default_loss, inputs_of
from limitformer.weightless.law import LawTable
from limitformer.weightless.models import Blueprint
from limitformer.weightless.network import Weightless
from limitformer.weightless.simulate import passes


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
    thresholds: Mapping[str, float] | None = None,
    loss: Loss | None = None,
    law: bool = True,
    seed: int = 0,
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
        thresholds: some of `limitformer.checking.THRESHOLDS`, changed.
        loss: from the output and the inputs to one number a sequence; None: that of the model's task, or of a module
            without one a random linear readout of its last tokens.
        law: whether a module that exists is held against its law, which takes longer than to measure it.
        seed: the same seed gives the same report.
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
    }
    found = looked_at(subject, text, tokens, samples, options)
    report = replace(found, verdicts=judged(found, subject, limits), thresholds=limits)
    if other is None:
        return report
    beside = looked_at(other, text, tokens, samples, options | {"overrides": None})
    return replace(report, against=replace(beside, verdicts=judged(beside, other, limits), thresholds=limits))


def judged(report: Report, subject: Subject, limits: Any) -> list[Any]:
    """A softmax that is uniform is no fault of shaped attention."""
    return verdicts(report.curves, limits, ("uniform",) if subject.shaped else ())


def looked_at(subject: Subject, text: Any, tokens: int, samples: int, options: dict[str, Any]) -> Report:
    """The curves of the network that exists, if one does, and of its law, if that is known."""
    blueprint = task_and_config(subject)
    inputs = inputs_for(subject, text, tokens)
    loss = (options["loss"] or loss_of(blueprint, options["seed"])) if options["gradients"] else None
    held = None if subject.module is None else measured(subject.module, inputs, loss)
    if subject.blueprint is None or not (held is None or options["law"]):
        return report_of(subject, blueprint, held, None, None, weights_of(subject.module, None))
    found = weightless_of(subject.blueprint, options["overrides"])
    weights = weights_of(subject.module, found)  # before any pass: a module may change its buffers as it runs
    lawful = passes(found, inputs, loss, samples, options["seed"], progress=options["progress"])
    return report_of(subject, blueprint, held, lawful, found.table, weights)


def weightless_of(blueprint: Blueprint, overrides: Mapping[str, Any] | None = None) -> Weightless:
    """The network without weights, on a GPU where there is one."""
    return Weightless(blueprint, torch.float32, torch.device(known_device(None)), dict(overrides or {}))


def report_of(
    subject: Subject,
    blueprint: Blueprint,
    held: xr.Dataset | None,
    lawful: xr.Dataset | None,
    laws: LawTable | None,
    weights: InitialisationReport | None,
) -> Report:
    """Of both, or of one."""
    shown = held if held is not None else lawful
    assert shown is not None  # a subject has a module or a blueprint
    sequences = len(np.unique(shown["sequence"])) if "sequence" in shown.coords else 1
    about: dict[str, Any] = {"tokens": shown.sizes["token"] // sequences, "sequences": sequences}
    vocabulary = getattr(blueprint.config, "vocab_size", None)
    if vocabulary and blueprint.task in ("causal", "masked", "seq2seq"):
        about["chance"] = float(np.log(vocabulary))
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


def inputs_for(subject: Subject, text: Any, tokens: int) -> Inputs:
    """What the network is called with.

    Raises:
        InputError: a text that is too short, or inputs that do not fit.
    """
    blueprint = task_and_config(subject)
    if blueprint.transformer is not None:
        return inputs_of(start_of(text, tokens, blueprint.transformer.width), blueprint)
    if text is None:
        return inputs_of(1 if blueprint.task == "image" else tokens, blueprint)
    if is_text(text):
        text = first_words(text, tokens) if subject.tokenizer is None else encoded(subject.tokenizer, text, tokens)
    found = inputs_of(text, blueprint)
    ids = found.fixed.get("input_ids")
    if ids is None or found.counted is not None:
        return found
    require(ids.shape[1] >= 2, f"a text must have two tokens or more; got {ids.shape[1]}.")
    short = {name: each[:, :tokens] if each.shape == ids.shape else each for name, each in found.fixed.items()}
    return replace(found, fixed=short, labels=found.labels[:tokens])


def start_of(text: Any, tokens: int, width: int) -> Any:
    """Of a Transformer: unrelated tokens, a text's words as random vectors, or what was given."""
    if text is None:
        return equicorrelated(min(tokens, width), 0.0)
    return from_text(text, width=width) if isinstance(text, str | Path) else text


def loss_of(blueprint: Blueprint, seed: int) -> Loss:
    """That of the task; where there is none, ⟨x, g⟩ of the last tokens with a direction g ~ N(0, I) for each.

    ½|x|² would have no gradient behind a norm, which makes it a constant.
    """
    if blueprint.task != "hidden":
        return default_loss(blueprint.task)

    def readout(out: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        x = out if isinstance(out, Tensor) else out[0]
        g = torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(torch_seed(seed, "readout")))
        return (x * g.to(x.device, x.dtype)).flatten(1).sum(1) / max(1, x.shape[1:-1].numel())

    return readout


def is_text(text: Any) -> bool:
    """One or several."""
    several = isinstance(text, list | tuple) and all(isinstance(one, str | Path) for one in text)
    return isinstance(text, str | Path) or (several and bool(text))


def first_words(text: Any, tokens: int) -> list[str]:
    """The first words of each text, so that a long one is neither read whole nor numbered whole."""
    every = [text] if isinstance(text, str | Path) else text
    return [" ".join(words_of(one, tokens)) for one in every]


def encoded(tokenizer: Any, text: Any, tokens: int) -> Any:
    """Ids by the checkpoint's own tokenizer, as many of each text as the shortest has."""
    every = [tokenizer.ids(one, tokens) for one in ([text] if isinstance(text, str | Path) else text)]
    shortest = min(map(len, every))
    return [one[:shortest] for one in every]
