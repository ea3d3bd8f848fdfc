"""`limitformer.check`: a Transformer at depth compared with its law, with verdicts.

Names are imported on first use: options are validated before torch and transformers are loaded, and the callback of
Trainer takes a second to import.
"""

import sys as _sys
from typing import TYPE_CHECKING

from limitformer.base.extras import LazyPackage as _LazyPackage
from limitformer.base.extras import require_packages as _require_packages

_require_packages("hf", "torch", "transformers")

if TYPE_CHECKING:
    from limitformer.checking.check import check as check
    from limitformer.checking.comparison import Comparison as Comparison
    from limitformer.checking.comparison import compare as compare
    from limitformer.checking.metrics import Metric as Metric
    from limitformer.checking.metrics import to_tensorboard as to_tensorboard
    from limitformer.checking.metrics import to_wandb as to_wandb
    from limitformer.checking.paired import PairedComparison as PairedComparison
    from limitformer.checking.report import Report as Report
    from limitformer.checking.steps import StepsInterrupted as StepsInterrupted
    from limitformer.checking.steps import StepsReport as StepsReport
    from limitformer.checking.steps import steps as steps
    from limitformer.checking.thresholds import STEP_THRESHOLDS as STEP_THRESHOLDS
    from limitformer.checking.thresholds import THRESHOLDS as THRESHOLDS
    from limitformer.checking.thresholds import Threshold as Threshold
    from limitformer.checking.trainer import CheckTraining as CheckTraining
    from limitformer.checking.training import Looks as Looks
    from limitformer.checking.verdicts import Verdict as Verdict

_HOMES = {
    "CheckTraining": "trainer",
    "Comparison": "comparison",
    "Looks": "training",
    "Metric": "metrics",
    "PairedComparison": "paired",
    "Report": "report",
    "STEP_THRESHOLDS": "thresholds",
    "StepsInterrupted": "steps",
    "StepsReport": "steps",
    "THRESHOLDS": "thresholds",
    "Threshold": "thresholds",
    "Verdict": "verdicts",
    "check": "check",
    "compare": "comparison",
    "steps": "steps",
    "to_tensorboard": "metrics",
    "to_wandb": "metrics",
}
_sys.modules[__name__].__class__ = _LazyPackage
