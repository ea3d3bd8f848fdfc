"""`limitformer.check`: what a Transformer does at depth, held against its law, with a verdict.

Names are imported when they are first asked for: options are checked before torch and transformers are loaded, and the
Trainer's callback brings peft and more, for a second.
"""

import sys as _sys
from typing import TYPE_CHECKING

from limitformer.base.extras import LazyPackage as _LazyPackage
from limitformer.base.extras import require_packages as _require_packages

_require_packages("hf", "torch", "transformers")

if TYPE_CHECKING:
    from limitformer.checking.check import check as check
    from limitformer.checking.report import Report as Report
    from limitformer.checking.thresholds import THRESHOLDS as THRESHOLDS
    from limitformer.checking.thresholds import Threshold as Threshold
    from limitformer.checking.trainer import CheckTraining as CheckTraining
    from limitformer.checking.training import Looks as Looks
    from limitformer.checking.verdicts import Verdict as Verdict

_HOMES = {
    "CheckTraining": "trainer",
    "Looks": "training",
    "Report": "report",
    "THRESHOLDS": "thresholds",
    "Threshold": "thresholds",
    "Verdict": "verdicts",
    "check": "check",
}
_sys.modules[__name__].__class__ = _LazyPackage
