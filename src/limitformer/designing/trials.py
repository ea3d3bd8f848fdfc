"""Trials of a design: networks of the law at one setting, and the values that an objective can ask for.

Every setting uses the same random numbers, so that values change little where a setting does.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from limitformer.base.errors import NoLimitError, require, require_count
from limitformer.base.progress import PartOfBar, advance
from limitformer.checking.check import check, loss_of, weightless_of
from limitformer.checking.curves import curves
from limitformer.checking.report import Report
from limitformer.covariance.limit import CovarianceLimit
from limitformer.designing.knobs import (
    SCALES,
    Knob,
    NoKnobError,
    factors_at,
    knobs_of,
    patterns_of,
    scale_laws,
    shaped_knobs,
)
from limitformer.designing.matrix_uses import MatrixUses
from limitformer.designing.objective import Objective, Values, values_of, values_of_stacks
from limitformer.models import Transformer
from limitformer.simulation.processes import limit
from limitformer.simulation.simulate import simulate as simulate_chain
from limitformer.subjects.inputs import Inputs, inputs_for, start_of
from limitformer.subjects.losses import Loss
from limitformer.subjects.subject import Subject, resolve
from limitformer.weightless.arrays import Arrays, dataset, require_same_blocks
from limitformer.weightless.laws import Law
from limitformer.weightless.layout import Chosen
from limitformer.weightless.network import Weightless
from limitformer.weightless.observers.stream import Streams
from limitformer.weightless.simulate import (
    accepted_inputs,
    check_scratch,
    largest_layer,
    named_errors,
    require_recordings,
    token_count,
)
from limitformer.weightless.structure import Structure

Setting = Mapping[str, float]
REPORTED = 8  # networks in a report before and after
LEAST_EFFECT = 0.1  # relative change by half the standard deviation; the ε of a norm leaves less


class StockTrials:
    """Trials of a configuration of transformers, or of a function that builds a module, by weightless networks."""

    def __init__(
        self, subject: Subject, knobs: Any, text: Any, tokens: int, objective: Objective, batch_dim: int = 0,
        blocks: Chosen | None = None, loss: Loss | str | None = None,
    ) -> None:  # fmt: skip
        self.name, self.what, self.text, self.tokens = subject.name, subject, text, tokens
        self.kind = "function" if subject.config is None else "configuration"
        self.inputs = inputs_for(subject, text, tokens).with_batch_dim(batch_dim)
        self.gradients, self.loss, self.batch_dim = objective.gradient is not None, loss, batch_dim
        self.built: dict[float | None, Weightless] = {}
        first = weightless_of(subject, blocks=blocks)
        self.inputs = accepted_inputs(self.inputs, first, 0, own_loss=self.gradients and loss is None)
        scale_laws(first, {})  # raises an error for laws that are not understood
        self.knobs = knobs_of(knobs, first, uses_of(first, lambda: first_pass(first, self.inputs)))
        self.field = next((knob for knob in self.knobs if knob.field), None)
        self.built[self.field.present if self.field else None] = first
        if self.field is not None:
            check_field(self, self.field, first)
        for knob in self.knobs:
            if knob.name in SCALES:
                check_effect(self, knob)

    def network(self, setting: Setting) -> Weightless:
        """Return the weightless network at one setting, cached by the value of the field."""
        value = setting[self.field.name] if self.field else None
        if value not in self.built:
            assert self.field is not None
            self.built[value] = weightless_of(resolve(self.what, {str(self.field.field): value}))
        network = self.built[value]
        scale_laws(network, factors_at(self.knobs, setting))
        return network

    def values(self, setting: Setting, seed: int, samples: int, bar: PartOfBar | None = None) -> Values:
        """Return the values of `samples` networks, each (sample,), which are the steps of the bar."""
        network = self.network(setting)
        loss = loss_of(network.subject, network, self.loss, seed, self.batch_dim) if self.gradients else None
        tokens = self.inputs.rows * token_count(self.inputs)
        check_scratch(largest_layer(network, tokens, self.gradients), "One layer of it", "fewer tokens")
        first, every = Arrays(), list[Values]()
        for sample in range(samples):  # one at a time in memory
            call = partial(network.run, seed, range(sample, sample + 1), self.inputs, "auto", loss)
            arrays = named_errors(call, network.subject, self.inputs)
            first = first or arrays
            require_same_blocks(first, arrays)
            data = dataset([arrays], network.trained, network.read_where, network.stacks, self.inputs, {})
            every.append(values_of_stacks(data))
            advance(bar, sample + 1)
        low, high = ({name: np.concatenate([each[name][k] for each in every]) for name in every[0]} for k in (0, 1))
        return {name: (low[name], high[name]) for name in low}

    def require_room(self) -> None:
        """Raise `InputError` unless the results of the networks of a report fit into memory."""
        require_recordings(next(iter(self.built.values())), self.inputs, REPORTED)

    def laws(self, setting: Setting) -> dict[str, Law]:
        """Return the laws of the weights that factors change."""
        network = self.network(setting)
        factors = factors_at(self.knobs, setting).items()
        return {name: network.laws[name].times(factor) for name, factor in factors if factor != 1}

    def report(self, setting: Setting, seed: int) -> Report:
        options: dict[str, Any] = {
            "tokens": self.tokens,
            "gradients": self.gradients,
            "samples": REPORTED,
            "progress": False,
            "loss": self.loss,
        }
        report = check(
            self.what,
            self.text,
            settings=self.fields(setting),
            overrides=self.laws(setting),
            seed=seed,
            witness=False,
            **options,
        )
        return replace(report, name=self.name)

    def fields(self, setting: Setting) -> dict[str, float]:
        """Return the fields of the configuration that differ from the present ones."""
        knob = self.field
        return {} if knob is None or setting[knob.name] == knob.present else {str(knob.field): setting[knob.name]}

    def patch(self, setting: Setting) -> dict[str, Any]:
        factors = {name: factor for name, factor in factors_at(self.knobs, setting).items() if factor != 1}
        table = replace(self.network(setting).table, laws=self.network(setting).laws)
        return {"settings": self.fields(setting), "weights": patterns_of(factors, table)}

    def exact(self, setting: Setting) -> dict[str, float]:
        return {}

    def question(self) -> list[Any]:
        """Return the configuration, the arguments of the network, whether there are gradients, and the loss."""
        called = self.inputs.of(0, range(1), torch.float32)
        arguments = {name: one.tolist() if isinstance(one, torch.Tensor) else repr(one) for name, one in called.items()}
        return [self.what.config.to_dict(), arguments, self.gradients, self.loss, torch.__version__]


class ShapedTrials:
    """Trials of a `limitformer.Transformer`, by the exact chain of its covariance."""

    def __init__(self, model: Transformer, knobs: Any, text: Any, tokens: int, objective: Objective) -> None:
        strange = [name for name in ("effective", "gradient") if getattr(objective, name) is not None]
        require(not strange, f"a Transformer's chain has no {' or '.join(strange)}; set that to None.")
        require_count("tokens", tokens, least=2)
        self.kind = "Transformer"
        self.name, self.model, self.knobs, self.tokens = "Transformer", model, shaped_knobs(knobs, model), tokens
        self.start = start_of(text, model, tokens)

    def at(self, setting: Setting) -> Transformer:
        """Return the Transformer at a setting."""
        model = self.model
        if "tau0" in setting and model.attention is not None:
            model = replace(model, attention=replace(model.attention, tau0=setting["tau0"]))
        return replace(model, gamma=setting.get("gamma", model.gamma))

    def values(self, setting: Setting, seed: int, samples: int, bar: PartOfBar | None = None) -> Values:
        record = [0, self.model.depth]
        data = simulate_chain(self.at(setting), self.start, samples=samples, seed=seed, record=record, progress=False)
        advance(bar, samples)
        return values_of(curves(data), data)

    def report(self, setting: Setting, seed: int) -> Report:
        """Return the report of the network without weights, for its curves by layer."""
        return check(
            self.at(setting), self.start, samples=REPORTED, gradients=False, seed=seed, progress=False, witness=False
        )

    def patch(self, setting: Setting) -> dict[str, Any]:
        different = {knob.name: setting[knob.name] for knob in self.knobs if setting[knob.name] != knob.present}
        return {"settings": different, "weights": {}}

    def exact(self, setting: Setting) -> dict[str, float]:
        """Return the probability that two tokens explode in the limit, if the theorem holds (theory, `explosion`)."""
        model = self.at(setting)
        theorem = (
            model.feedforward is None
            and model.mask is None
            and model.norm is None
            and model.lam is None
            and model.uniform
        )
        if not theorem or len(self.start.covariance) != 2 or model.branch == 0:
            return {}
        try:
            process = limit(model)
        except NoLimitError:
            return {}
        assert isinstance(process, CovarianceLimit)  # where λ² + γ² = 1
        time = model.depth / model.width
        return {
            "explosion": process.explosion_probability(self.start),
            "explosion_by_depth": process.explosion_probability(self.start, time=time),
        }

    def question(self) -> list[Any]:
        return [repr(self.model), self.start.covariance.tolist()]


Trials = StockTrials | ShapedTrials


def first_pass(network: Weightless, inputs: Inputs) -> Arrays:
    return named_errors(lambda: network.run(0, range(1), inputs, "auto", None), network.subject, inputs)


def uses_of(network: Structure, call: Callable[[], Any]) -> MatrixUses:
    """Return the uses of the matrices in a pass, which `call` runs."""
    passes = list[MatrixUses]()

    def observer(stream: Streams) -> MatrixUses:
        passes.append(MatrixUses(stream))
        return passes[-1]

    network.more = observer
    try:
        call()
    finally:
        network.more = None
    return passes[-1]


def check_field(trials: StockTrials, knob: Knob, first: Weightless) -> None:
    """Check that the model's code reads the field.

    Raises:
        InputError: it draws the same weights with another value.
    """
    other = trials.network({one.name: one.present * (0.5 if one is knob else 1.0) for one in trials.knobs})
    alike = all(other.laws[name].std == law.std for name, law in first.laws.items())
    require(not alike, f"{trials.name} draws the same weights whatever its {knob.field} is: it is not a knob there.")
    trials.built.pop(knob.present * 0.5)


def check_effect(trials: StockTrials, knob: Knob) -> None:
    """Check that the product of the scaled weights is not normalised at once, where it first enters.

    Raises:
        InputError: one network is the same there with half the factor.
    """
    present = {one.name: one.present for one in trials.knobs}
    whole, half = (seen_first(trials, knob.name, present | {knob.name: factor}) for factor in (1.0, 0.5))
    if np.nanmax(np.abs(half - whole)) < LEAST_EFFECT * np.nanmax(np.abs(whole)):
        raise NoKnobError(
            f"{trials.name} has no knob {knob.name}: what it multiplies is normalised at once, so that its size has no "
            "effect."
        )


def seen_first(trials: StockTrials, knob: str, setting: Setting) -> NDArray[np.float64]:
    """Return one network's initial stream, or the sizes of its first block's branches or logits."""
    arrays = first_pass(trials.network(setting), trials.inputs)
    name, block = {
        "embedding": ("covariance", 0),
        "output": ("branch", 0),
        "logits": ("logit_std", 0),
    }[knob]
    require(name in arrays, f"{trials.name} has no {name} to see the knob {knob} by.")
    return np.asarray(arrays[name][:, block])
