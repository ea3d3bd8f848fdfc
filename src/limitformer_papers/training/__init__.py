"""Training experiments of both papers, on the Trainer of Hugging Face.

Names are imported when they are first used: reading a corpus needs no Trainer, whose import takes seconds.
"""

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING

from limitformer.base.errors import MissingExtraError

# All packages of the extra, as `import` and `pip` name them: some would otherwise fail in the middle of a run.
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
    from limitformer_papers.training.harness import train as train
    from limitformer_papers.training.log import Log as Log
    from limitformer_papers.training.log import read_log as read_log
    from limitformer_papers.training.plan import Plan as Plan
    from limitformer_papers.training.plan import read_runs as read_runs

# Where names are defined; a test compares this with the imports above.
_HOMES = {
    "callbacks": ("Correlation", "Entropy", "Gains", "GradientNorms", "ShapingSchedule"),
    "data.masking": ("MaskedCollator",),
    "harness": ("train",),
    "log": ("Log", "read_log"),
    "plan": ("Plan", "read_runs"),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)

if not TYPE_CHECKING:  # type checkers know only the names above

    def __getattr__(name: str) -> object:
        """Return the public name, or the module of this name, and store it."""
        home = next((home for home, names in _HOMES.items() if name in names), name)
        if home == name and (name.startswith("_") or _find_spec(f"{__name__}.{name}") is None):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _import_module(f"{__name__}.{home}")
        value = globals()[name] = module if home == name else getattr(module, name)
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
