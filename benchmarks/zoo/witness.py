"""One type of transformers by the witness: a pass with and without drawn weights, and two steps of AdamW."""

import time
from typing import Any

import torch
import transformers

import limitformer as lf
from benchmarks.zoo.configurations import small_config, task_of
from benchmarks.zoo.examine import inputs_that_run, one_line
from benchmarks.zoo.inputs import TOKENS
from limitformer import InputError
from limitformer.subjects.inputs import inputs_of
from limitformer.subjects.losses import chosen_loss
from limitformer.subjects.subject import resolve
from limitformer.weightless.network import Weightless
from limitformer.weightless.run import AUTO, NEVER
from limitformer.weightless.simulate import accepted_inputs
from limitformer.witness import witness_pass


def witness_type(kind: str) -> dict[str, Any]:
    """Return the row of a type: its status in a pass that draws weights, in one that does not, and in two steps."""
    began, row = time.perf_counter(), dict[str, Any]()
    try:
        config = small_config(kind)
        task, auto = task_of(config)
        subject = resolve(config)
        images = task == "image" and getattr(subject.kind, "main_input_name", "") == "pixel_values"
        network = weightless(config)
        batch: Any = 1 if images else TOKENS
        try:
            inputs = accepted_inputs(inputs_of(batch, network.subject).with_batch_dim(0), network, 3, own_loss=True)
        except InputError:
            torch.manual_seed(0)
            batch = inputs_that_run(config, getattr(transformers, auto).from_config(config).eval())
            inputs = accepted_inputs(inputs_of(batch, network.subject).with_batch_dim(0), network, 3, own_loss=True)
    except Exception as error:  # a model of transformers may raise anything  # noqa: BLE001
        return row | {"verdict": "none", "reason": one_line(error)}
    for draw in (AUTO, NEVER):
        row |= status_of(draw, lambda draw=draw: witness_pass(network, inputs, chosen_loss(None, task), 3, draw))
    config = small_config(kind)
    row |= status_of("steps", lambda: two_steps(config, batch, chosen_loss(None, task)))
    row["verdict"] = ", ".join(row[key] for key in (AUTO, NEVER, "steps"))
    row["reason"] = "; ".join(reason for key in (AUTO, NEVER, "steps") if (reason := row[f"{key}_reason"]))
    return row | {"seconds": round(time.perf_counter() - began, 1)}


def two_steps(config: Any, given: Any, loss: Any) -> Any:
    return lf.steps(
        config, given, optimizer="adamw", loss=loss, steps=2, samples=1, seed=3, clip=1.0, progress=False
    ).witness


def weightless(config: Any) -> Weightless:
    return Weightless(resolve(config), torch.float32, torch.device("cpu"))


def status_of(key: str, call: Any) -> dict[str, Any]:
    """Return the status of a comparison, its reason, its format and its largest ratio to the tolerance."""
    try:
        result = call()
    except Exception as error:  # as above  # noqa: BLE001
        return {key: "refused" if isinstance(error, InputError) else "fails", f"{key}_reason": one_line(error)}
    known = {"reason": result.reason, "format": result.number_format, "ratio": result.ratio, "hidden": result.hidden}
    return {key: result.status} | {f"{key}_{name}": value for name, value in known.items()}
