"""limitformer: what a Transformer does at depth, before you train it.

Names are imported when they are first used: declaring a model does not load the code that simulates it, and only
names that need torch load torch.
"""

import sys as _sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from limitformer import checking as checking
    from limitformer import designing as designing
    from limitformer import hf as hf
    from limitformer import initialisation as initialisation
    from limitformer import models as models
    from limitformer import nn as nn
    from limitformer import plot as plot
    from limitformer import weightless as weightless
    from limitformer.base.errors import InputError as InputError
    from limitformer.base.errors import MissingExtraError as MissingExtraError
    from limitformer.base.errors import NoLimitError as NoLimitError
    from limitformer.checking.check import check as check
    from limitformer.checking.comparison import compare as compare
    from limitformer.checking.steps import steps as steps
    from limitformer.covariance.limit import CovarianceFlow as CovarianceFlow
    from limitformer.covariance.limit import CovarianceLimit as CovarianceLimit
    from limitformer.designing import design as design
    from limitformer.designing import fix as fix
    from limitformer.initialisation.recipes.recipe import recipes as recipes
    from limitformer.models import GELU as GELU
    from limitformer.models import Elementwise as Elementwise
    from limitformer.models import Gated as Gated
    from limitformer.models import GeGLU as GeGLU
    from limitformer.models import HybridTransformer as HybridTransformer
    from limitformer.models import LayerNorm as LayerNorm
    from limitformer.models import Mixing as Mixing
    from limitformer.models import OneMatrix as OneMatrix
    from limitformer.models import RadialNorm as RadialNorm
    from limitformer.models import ReLU as ReLU
    from limitformer.models import RMSNorm as RMSNorm
    from limitformer.models import ShapedAttention as ShapedAttention
    from limitformer.models import ShapedReLU as ShapedReLU
    from limitformer.models import ShapedSmooth as ShapedSmooth
    from limitformer.models import SiLU as SiLU
    from limitformer.models import SoftmaxAttention as SoftmaxAttention
    from limitformer.models import SquaredReLU as SquaredReLU
    from limitformer.models import Start as Start
    from limitformer.models import StochasticTransformer as StochasticTransformer
    from limitformer.models import SwiGLU as SwiGLU
    from limitformer.models import Tanh as Tanh
    from limitformer.models import Transformer as Transformer
    from limitformer.models import equicorrelated as equicorrelated
    from limitformer.models import from_covariance as from_covariance
    from limitformer.models import from_json as from_json
    from limitformer.models import from_text as from_text
    from limitformer.models import from_tokens as from_tokens
    from limitformer.models import to_json as to_json
    from limitformer.rates.equivalent import equivalent_rates as equivalent_rates
    from limitformer.rates.rate import rate as rate
    from limitformer.results.datasets import correlation as correlation
    from limitformer.results.outcomes import outcomes as outcomes
    from limitformer.results.outputs import outputs as outputs
    from limitformer.results.storage import load as load
    from limitformer.results.storage import save as save
    from limitformer.scaling.transfer import transfer as transfer
    from limitformer.simulation.processes import limit as limit
    from limitformer.simulation.simulate import Interrupted as Interrupted
    from limitformer.simulation.simulate import recording_size as recording_size
    from limitformer.simulation.simulate import simulate as simulate
    from limitformer.sphere.limit import TokenLimit as TokenLimit
    from limitformer.sphere.overlap import OverlapDiffusion as OverlapDiffusion
    from limitformer.sphere.overlap import overlap as overlap
    from limitformer.subjects.shapes import shapes as shapes
    from limitformer.sweep import Sweep as Sweep
    from limitformer.sweep import compute_sweep as compute_sweep
    from limitformer.sweep import load_sweep as load_sweep
    from limitformer.sweep import read_sweep as read_sweep
    from limitformer.sweep import run_sweep as run_sweep
    from limitformer.sweep.phase import phase_diagram as phase_diagram

    __version__: str

# The names of the core; `from limitformer import *` needs no extra.
__all__ = [
    "GELU",
    "CovarianceFlow",
    "CovarianceLimit",
    "Elementwise",
    "Gated",
    "GeGLU",
    "HybridTransformer",
    "InputError",
    "Interrupted",
    "LayerNorm",
    "MissingExtraError",
    "Mixing",
    "NoLimitError",
    "OneMatrix",
    "OverlapDiffusion",
    "RMSNorm",
    "RadialNorm",
    "ReLU",
    "ShapedAttention",
    "ShapedReLU",
    "ShapedSmooth",
    "SiLU",
    "SoftmaxAttention",
    "SquaredReLU",
    "Start",
    "StochasticTransformer",
    "Sweep",
    "SwiGLU",
    "Tanh",
    "TokenLimit",
    "Transformer",
    "__version__",
    "compute_sweep",
    "correlation",
    "equicorrelated",
    "from_covariance",
    "from_json",
    "from_text",
    "from_tokens",
    "limit",
    "load",
    "load_sweep",
    "outcomes",
    "outputs",
    "overlap",
    "phase_diagram",
    "plot",
    "read_sweep",
    "recording_size",
    "run_sweep",
    "save",
    "simulate",
    "to_json",
]

# The module that defines each name; a test compares it with the imports above.
HOMES = {
    "simulation.simulate": ("Interrupted", "recording_size", "simulate"),
    "base.errors": ("InputError", "MissingExtraError", "NoLimitError"),
    "covariance.limit": ("CovarianceFlow", "CovarianceLimit"),
    "sphere.limit": ("TokenLimit",),
    "simulation.processes": ("limit",),
    "sphere.overlap": ("OverlapDiffusion", "overlap"),
    "models": (
        *("Elementwise", "Gated", "GeGLU", "Mixing", "RadialNorm", "SiLU", "SquaredReLU", "SwiGLU", "Tanh"),
        *("GELU", "HybridTransformer", "LayerNorm", "OneMatrix", "ReLU", "RMSNorm", "ShapedAttention", "ShapedReLU"),
        *("ShapedSmooth", "SoftmaxAttention", "Start", "StochasticTransformer", "Transformer", "equicorrelated"),
        *("from_covariance", "from_json", "from_text", "from_tokens", "to_json"),
    ),
    "results.outcomes": ("outcomes",),
    "sweep.phase": ("phase_diagram",),
    "results.outputs": ("outputs",),
    "results.datasets": ("correlation",),
    "results.storage": ("load", "save"),
    "sweep": ("Sweep", "compute_sweep", "load_sweep", "read_sweep", "run_sweep"),
    "designing": ("design", "fix"),  # these, and three of the modules below, need an extra
    "checking.check": ("check",),
    "checking.comparison": ("compare",),
    "checking.steps": ("steps",),
    "initialisation.recipes.recipe": ("recipes",),
    "rates.equivalent": ("equivalent_rates",),
    "rates.rate": ("rate",),
    "scaling.transfer": ("transfer",),
    "subjects.shapes": ("shapes",),
}
MODULES = ("checking", "designing", "hf", "initialisation", "models", "nn", "plot", "weightless")

if not TYPE_CHECKING:  # type checkers know only the names above

    def __getattr__(name: str) -> object:
        value = globals()[name] = _version() if name == "__version__" else _import_public(name)
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_homes(), *MODULES, *(name for name in globals() if name.startswith("__"))})


def _homes() -> dict[str, str]:
    return {name: home for home, names in HOMES.items() for name in names}


def _import_public(name: str) -> object:
    """Import a module of the package, or the module that defines the name; `AttributeError` if an extra is missing."""
    import importlib

    from limitformer.base.errors import MissingExtraError

    home = _homes().get(name, name)
    if home == name and not _is_module(name):
        raise AttributeError(_unknown(name))
    try:
        module = importlib.import_module(f"limitformer.{home}")
    except MissingExtraError as error:
        raise AttributeError(str(error)) from error  # so that `hasattr` returns False
    return module if home == name else getattr(module, name)


def _is_module(name: str) -> bool:
    from importlib.util import find_spec

    from limitformer.base.moved import MOVED

    full = f"limitformer.{name}"
    return not name.startswith("_") and full not in MOVED and find_spec(full) is not None


def _unknown(name: str) -> str:
    from difflib import get_close_matches

    from limitformer.base.moved import moved

    near = get_close_matches(name, __dir__(), n=1)
    line = f"module 'limitformer' has no attribute {name!r}" + (f"; nearest: {near[0]}" if near else "")
    return moved(f"limitformer.{name}", line)


def _version() -> str:
    from limitformer.base.extras import package_version

    return package_version()


class _MovedModules:
    """The last finder of modules: it finds none, and refuses those of version 0.2 that are elsewhere now."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name.startswith("limitformer."):
            from limitformer.base.moved import MOVED, moved

            if name in MOVED:
                raise ImportError(moved(name, ""), name=name)


_sys.meta_path.append(_MovedModules)
