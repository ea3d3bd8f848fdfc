"""Shaped attention for the stock models of Hugging Face."""

# ruff: noqa: E402 - what an extra installs is required first

import sys as _sys

from limitformer.base.extras import LazyPackage as _LazyPackage
from limitformer.base.extras import require_packages as _require_packages

_require_packages("hf", "torch", "transformers")

from limitformer.hf.attention import ATTENTION as ATTENTION
from limitformer.hf.checkpoint import load_shaped as load_shaped
from limitformer.hf.settings import Shaping as Shaping
from limitformer.hf.shaping import shape_model as shape_model

_HOMES: dict[str, str] = {}
_sys.modules[__name__].__class__ = _LazyPackage  # names what is elsewhere now
