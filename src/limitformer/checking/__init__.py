"""`limitformer.check`: what a Transformer does at depth, held against its law, with a verdict."""

from typing import TYPE_CHECKING

from limitformer.base.extras import of_extra as _of_extra

with _of_extra("hf"):
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401

    from limitformer.checking.check import check as check
    from limitformer.checking.designing.design import DesignInterrupted as DesignInterrupted
    from limitformer.checking.designing.design import design as design
    from limitformer.checking.designing.designed import Design as Design
    from limitformer.checking.designing.objective import Objective as Objective
    from limitformer.checking.report import Report as Report
    from limitformer.checking.thresholds import THRESHOLDS as THRESHOLDS
    from limitformer.checking.thresholds import Threshold as Threshold
    from limitformer.checking.training import Looks as Looks
    from limitformer.checking.verdicts import Verdict as Verdict

if TYPE_CHECKING:
    from limitformer.checking.trainer import CheckTraining as CheckTraining


def __getattr__(name: str) -> object:
    """The Trainer's callback is imported when it is first asked for: with it come peft and more, for a second."""
    if name != "CheckTraining":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from limitformer.checking.trainer import CheckTraining

    return CheckTraining
