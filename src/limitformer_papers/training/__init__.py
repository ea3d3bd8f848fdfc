"""Experiments of both papers that train networks, on the Trainer of Hugging Face.

Names are looked up where they are defined when they are first asked for: what reads a corpus needs no Trainer, which
takes seconds to import.
"""

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING

from limitformer.base.errors import MissingExtraError

# All of the extra, by the names that `import` and `pip` have for them: some are imported late, in the middle of a run.
if _missing := [
    package
    for module, package in {
        "torch": "torch",
        "transformers": "transformers",
        "accelerate": "accelerate",
        "datasets": "datasets",
        "tokenizers": "tokenizers",
        "pyarrow": "pyarrow",
        "tensorboard": "tensorboard",
        "sklearn": "scikit-learn",
        "PIL": "pillow",
        "filelock": "filelock",
    }.items()
    if _find_spec(module) is None
]:
    raise MissingExtraError(_missing[0], "train")

if TYPE_CHECKING:
    from limitformer_papers.training.callbacks import Correlation as Correlation
    from limitformer_papers.training.callbacks import Entropy as Entropy
    from limitformer_papers.training.callbacks import Gains as Gains
    from limitformer_papers.training.callbacks import GradientNorms as GradientNorms
    from limitformer_papers.training.callbacks import ShapingSchedule as ShapingSchedule
    from limitformer_papers.training.data.masking import MaskedCollator as MaskedCollator
    from limitformer_papers.training.harness import read_runs as read_runs
    from limitformer_papers.training.harness import train as train
    from limitformer_papers.training.log import Log as Log
    from limitformer_papers.training.log import read_log as read_log
    from limitformer_papers.training.plan import Plan as Plan

# Where names are defined; a test holds this against the imports above.
_HOMES = {
    "callbacks": ("Correlation", "Entropy", "Gains", "GradientNorms", "ShapingSchedule"),
    "data.masking": ("MaskedCollator",),
    "harness": ("read_runs", "train"),
    "log": ("Log", "read_log"),
    "plan": ("Plan",),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)

if not TYPE_CHECKING:  # a checker should know the names above alone

    def __getattr__(name: str) -> object:
        """What the name stands for, or the module of this name, kept from then on."""
        home = next((home for home, names in _HOMES.items() if name in names), name)
        if home == name and (name.startswith("_") or _find_spec(f"{__name__}.{name}") is None):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _import_module(f"{__name__}.{home}")
        found = globals()[name] = module if home == name else getattr(module, name)
        return found


def __dir__() -> list[str]:
    """Names for users."""
    return sorted({*__all__, *globals()})
