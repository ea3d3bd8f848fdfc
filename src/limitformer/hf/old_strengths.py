"""Checkpoints whose strengths (`limitformer.nn.strengths`) have the names and the shapes of version 0.1: still loaded.

There γ₁ was `gamma1.value`, λ `residual.lam`, and one number had no dimension.
"""

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter

from limitformer.nn.strengths import ENDING

GAINS = tuple(f"{name}.value" for name in ("gamma1", "gamma2", "negative"))
RESIDUALS = tuple(f"{part}.{name}" for part in ("residual", "attention", "feedforward") for name in ("lam", "gamma"))


class AtLeastOneDimension(ConversionOps):
    """A number becomes (1,)."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **_: Any
    ) -> dict[str, Any]:
        """The one tensor, under its new name."""
        (tensors,) = input_dict.values()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        return {target_patterns[0]: torch.atleast_1d(tensor)}


class LoadsOldStrengths:
    """Of a model: takes them under their old names too, and saves them under the new ones."""

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *others: Any, **options: Any
    ) -> Any:
        converters = [
            WeightConverter(name, name + ENDING, operations=[AtLeastOneDimension()]) for name in (*GAINS, *RESIDUALS)
        ]
        load_config = replace(load_config, weight_mapping=[*(load_config.weight_mapping or []), *converters])
        loaded = PreTrainedModel._load_pretrained_model(
            model, state_dict, checkpoint_files, load_config, *others, **options
        )
        model._weight_conversions = [one for one in model._weight_conversions if one not in converters]
        return loaded
