"""Default configurations of the types that read text, at their real size: time and memory of one pass forward."""

import resource
import time
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING

import limitformer as lf
from benchmarks.zoo.children import Limits
from benchmarks.zoo.configurations import TASKS, all_types, task_of
from benchmarks.zoo.examine import ABSENT, FAILS, REFUSED, one_line
from limitformer import InputError
from limitformer.base.errors import first_line
from limitformer.subjects.classes import parameters_of

TOKENS = 32
SECONDS, GIGABYTES = 60, 8  # of CPU time, and of resident memory at its peak
WITHIN, SLOW, LARGE = "within", f"more than {SECONDS} s", f"more than {GIGABYTES} GB"
LIMITS = Limits(cpu=3 * SECONDS, wall=20 * SECONDS, memory=14 << 30)
OVERFLOWS = ("MemoryError", "not enough memory", "can't allocate memory", "more than is free", "Cannot allocate memory")


def text_types() -> list[str]:
    """Return the model types that read ids of a text."""
    return [kind for kind in all_types() if reads_text(CONFIG_MAPPING[kind])]


def reads_text(config_class: Any) -> bool:
    for task, (_, mapping) in TASKS.items():
        classes = getattr(transformers, mapping)
        if config_class in classes:
            return task in ("causal", "masked", "seq2seq") or takes_ids(classes, config_class)
    return False


def takes_ids(classes: Any, config_class: Any) -> bool:
    try:
        entry = classes[config_class]
        model = entry[0] if isinstance(entry, tuple) else entry
        return model.main_input_name == "input_ids" and "input_ids" in parameters_of(model)
    except (ImportError, ValueError):  # classes whose packages are not installed, or that do not exist
        return False


def measure_size(kind: str) -> dict[str, Any]:
    """Return the row of a type: its parameters, CPU time, peak memory, and whether they are within the limits."""
    row, began = dict[str, Any](), time.process_time()
    try:
        config = CONFIG_MAPPING[kind]()
        row |= {"task": task_of(config)[0]}
        data = lf.weightless.simulate(config, TOKENS, samples=1, seed=0, progress=False)
        row |= {"parameters": int(data.attrs["parameters"]), "weights": data.attrs["weights"]}
        row |= {"kept": data.attrs["kept"][:300]}
    except InputError as error:
        row |= {"verdict": REFUSED, "reason": str(error)[:600]}
    except Exception as error:  # of a model of transformers, or a defect  # noqa: BLE001
        row |= {"verdict": FAILS, "reason": one_line(error)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB, with transformers and torch themselves
    row |= {"seconds": round(time.process_time() - began, 1), "gigabytes": round(peak / 2**20, 2)}
    return row | {"verdict": verdict_of(row)} | unbuilt(kind, row)


def unbuilt(kind: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return the verdict of a type whose default configuration transformers itself cannot build or run, else nothing.

    On the meta device a model of any size runs, up to the first operation that needs entries.
    """
    if row.get("verdict") not in (REFUSED, FAILS):
        return {}
    try:
        config = CONFIG_MAPPING[kind]()
        with torch.device("meta"):
            model = getattr(transformers, task_of(config)[1]).from_config(config).eval()
            ids = torch.ones(1, TOKENS, dtype=torch.long)
    except Exception as error:  # as above  # noqa: BLE001
        return {"verdict": ABSENT, "reason": one_line(error)}
    try:
        model(**{name: ids for name in ("input_ids", "decoder_input_ids") if name in parameters_of(type(model))})
    except Exception as error:  # as above  # noqa: BLE001
        if f"{type(error).__name__}: {first_line(error)}" in row["reason"]:
            return {"verdict": ABSENT, "reason": one_line(error)}
    return {}


def verdict_of(row: dict[str, Any]) -> str:
    """Return the verdict of a row, also of one whose process was ended."""
    reason = str(row.get("reason") or row.get("error") or "")
    if any(each in reason for each in OVERFLOWS) or row.get("gigabytes", 0) > GIGABYTES:
        return LARGE
    if reason.startswith("took more than") or row.get("seconds", 0) > SECONDS:
        return SLOW
    return row.get("verdict", FAILS if reason else WITHIN)
