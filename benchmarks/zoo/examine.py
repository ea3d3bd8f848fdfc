"""One type of transformers through `weightless.simulate` and `check`: what works as called, and what is refused."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

import limitformer as lf
from benchmarks.zoo.configurations import small_config, task_of
from benchmarks.zoo.inputs import TOKENS, Named, candidates
from limitformer import InputError

WORKS, NAMED, REFUSED, FAILS, ABSENT = "works", "works with named inputs", "refused", "fails", "transformers"
SAMPLES = 2


def examine(kind: str) -> dict[str, Any]:
    """Return the row of a type.

    Its verdict is `works`, `works with named inputs`, `refused` (an `InputError` says why), `fails` (another exception,
    or numbers that are not finite), or `transformers` (which itself builds or runs no small model).
    """
    began = time.perf_counter()
    row = dict[str, Any]()
    try:
        config = small_config(kind)
        task, auto = task_of(config)
        row |= {"task": task}
        torch.manual_seed(0)
        model = getattr(transformers, auto).from_config(config).eval()
        row |= {"class": type(model).__name__}
        named = inputs_that_run(config, model)
    except Exception as error:  # a model of transformers may raise anything  # noqa: BLE001
        return row | {"verdict": ABSENT, "reason": one_line(error)}
    row |= {"named": {name: list(each.shape) for name, each in named.items() if isinstance(each, Tensor)}}
    images = task == "image" and getattr(model, "main_input_name", "") == "pixel_values"
    row |= both(small_config(kind), 1 if images else TOKENS)
    if row["verdict"] in (REFUSED, FAILS):
        again = both(small_config(kind), named)
        row["named_verdict"], row["named_reason"] = again["verdict"], again.get("reason", "")
        if again["verdict"] == WORKS and row["verdict"] == REFUSED:
            row |= again | {"verdict": NAMED, "reason": row["reason"]}
    return row | {"seconds": round(time.perf_counter() - began, 1)}


def inputs_that_run(config: Any, model: Any) -> Named:
    """Return the first inputs with which the model runs."""
    first: Exception | None = None
    for inputs in candidates(config, model):
        for options in ({}, {"use_cache": False}):
            try:
                with torch.no_grad():
                    model(**inputs, **options)
                return inputs
            except Exception as error:  # as above  # noqa: BLE001
                first = first or error
    raise first or ValueError("no inputs are known")


def both(config: Any, inputs: Any) -> dict[str, Any]:
    """Return what `simulate` with gradients and `check` give for these inputs."""
    text = None if isinstance(inputs, int) else inputs
    result = attempt(
        lambda: measured(
            lf.weightless.simulate(config, inputs, samples=SAMPLES, seed=0, gradients=True, progress=False)
        )
    )
    report = attempt(lambda: {"report": bool(str(lf.check(config, text, tokens=TOKENS, samples=1, progress=False)))})
    return result if result["verdict"] != WORKS else result | report


def attempt(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"verdict": WORKS} | call()
    except InputError as error:
        return {"verdict": REFUSED, "reason": str(error)[:600]}
    except Exception as error:  # what the zoo looks for  # noqa: BLE001
        return {"verdict": FAILS, "reason": one_line(error)}


def measured(data: Any) -> dict[str, Any]:
    """Return what was measured, and whether it is numbers."""
    covariance, gradients = data["covariance"].values, data["weight_gradient"].values
    result = {
        "inputs": data.attrs.get("inputs", ""),
        "stacks": data.attrs.get("blocks", f"{data.sizes['block']} blocks"),
        "loss": float(data["loss"].mean()),
        "zero_gradients": int((gradients == 0).all(0).sum()),
    }
    finite = bool(np.isfinite(covariance[:, 0]).any() and np.isfinite(data["loss"].values).all())
    stream = data["stream_gradient"].values  # a weight without a gradient has NaN, so that the stream must tell
    finite &= not np.isinf(gradients).any() and bool(np.isfinite(stream).all() or np.isnan(stream).all())
    wrong = not finite or not (gradients > 0).any()
    return result | ({"verdict": FAILS, "reason": "no finite loss, stream or gradients"} if wrong else {})


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]
