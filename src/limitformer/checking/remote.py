"""Folders whose configuration names Python code of its own (`auto_map`), which runs only if the user allows it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from limitformer.base.errors import InputError, require
from limitformer.base.foreign import one_line, readable_name
from limitformer.weightless.classes import AUTO_CLASSES, task_of
from limitformer.weightless.configurations import quiet_transformers
from limitformer.weightless.models import Blueprint, as_plain_formulas


def has_code(path: Path) -> bool:
    """Whether a folder, or its config.json, names code of its own."""
    file = path / "config.json" if path.is_dir() else path
    try:
        return isinstance(json.loads(file.read_text(encoding="utf-8")).get("auto_map"), dict)
    except (OSError, ValueError, AttributeError):
        return False


def with_code(path: Path, weights: bool) -> Blueprint | nn.Module:
    """Return how the code in a folder makes its network, or the network of its weights.

    Raises:
        InputError: it names no class of a model, cannot be built, or its files lack weights.
    """
    folder = path if path.is_dir() else path.parent
    name, options = readable_name(folder.absolute()), {"trust_remote_code": True, "local_files_only": True}
    with quiet_transformers(), one_line(f"the code in {name} cannot be run"):
        config: Any = as_plain_formulas(transformers.AutoConfig.from_pretrained(folder, **options))
        auto = next((each for _, each, _ in AUTO_CLASSES if each in config.auto_map), None)
        if auto is None:
            raise InputError(f"auto_map of {name} must name a class for a task, such as 'AutoModelForCausalLM'.")
        maker: Any = getattr(transformers, auto)
        if weights:
            module, report = maker.from_pretrained(folder, config=config, output_loading_info=True, **options)
            missing = sorted(report["missing_keys"])
            require(not missing, f"{name} lacks the weight {''.join(missing[:1])}.")
            return as_module(module)
        make = partial(maker.from_config, config, trust_remote_code=True)
        with torch.device("meta"):
            kind: Any = type(make())
    return Blueprint(make, name, task_of(kind, config), config, kind=kind)


def as_module(module: Any) -> nn.Module:
    result: nn.Module = module
    return result
