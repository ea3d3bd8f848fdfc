"""Names of version 0.2 that are elsewhere now, so that an old spelling gives one line with its replacement.

`docs/from-0.2-to-0.3.md` lists them, and `tests/test_old_spellings.py` tries every spelling of that page.
"""

from typing import TYPE_CHECKING

HEADS = ("Config", "Model", "ForMaskedLM", "ForSequenceClassification")
MOVED = {
    "limitformer.train": "limitformer_papers.training",
    "limitformer.figures": "limitformer_papers",
    "limitformer.running": "limitformer.simulation and limitformer.results",
    "limitformer.recording": "limitformer.sampling",
    "limitformer.models.elementwise": "elsewhere; make parts pickled by 0.2 again",
    "limitformer.checking.initialisation": "limitformer.initialisation",
    "limitformer.checking.designing": "limitformer.designing",
    **{f"limitformer.checking.{name}": f"limitformer.designing.{name}" for name in ("design", "Design", "Objective")},
    "limitformer.checking.DesignInterrupted": "KeyboardInterrupt; limitformer.design(store=…) keeps finished cells",
    **{
        f"limitformer.hf.ShapedTransformer{head}": f"limitformer_papers.training.architecture.ShapedTransformer{head}"
        for head in HEADS
    },
    "limitformer.hf.ShapedTransformerForCausalLM": "a stock model with limitformer.hf.shape_model",
    "Threshold.value": "Threshold.watch and Threshold.broken",
    "Report.healthy": 'Report.grade == "fine"',
}


def moved(full: str, otherwise: str) -> str:
    """Return a line that says where the name is now, or `otherwise` if it was never there."""
    return f"{full} is now {MOVED[full]}" if full in MOVED else otherwise


class OldAttributes:
    """A class whose attributes of version 0.2 are named with their replacement."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            own = type(self).__name__
            raise AttributeError(moved(f"{own}.{name}", f"{own!r} object has no attribute {name!r}"))
