"""Initialisation: a module compared with its law and with published recipes, and two builds of one model.

Names are imported on first use: the recipes need no torch.
"""

import sys as _sys
from typing import TYPE_CHECKING

from limitformer.base.extras import LazyPackage as _LazyPackage

if TYPE_CHECKING:
    from limitformer.initialisation.comparison import compare as compare
    from limitformer.initialisation.report import KINDS as KINDS
    from limitformer.initialisation.report import BuildComparison as BuildComparison
    from limitformer.initialisation.report import ComparedTensor as ComparedTensor
    from limitformer.initialisation.report import Difference as Difference
    from limitformer.initialisation.report import InitialisationReport as InitialisationReport
    from limitformer.initialisation.weight_by_weight import check_initialisation as check_initialisation
    from limitformer.initialisation.weight_by_weight import initialisation as initialisation

_HOMES = {
    **dict.fromkeys(("KINDS", "BuildComparison", "ComparedTensor", "Difference", "InitialisationReport"), "report"),
    **dict.fromkeys(("check_initialisation", "initialisation"), "weight_by_weight"),
    "compare": "comparison",
}
_sys.modules[__name__].__class__ = _LazyPackage
