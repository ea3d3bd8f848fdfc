"""Initialisation, weight by weight: a module compared with the law that its code draws, and with published recipes.

Names are imported on first use: the recipes need no torch.
"""

import sys as _sys
from typing import TYPE_CHECKING

from limitformer.base.extras import LazyPackage as _LazyPackage

if TYPE_CHECKING:
    from limitformer.initialisation.report import InitialisationReport as InitialisationReport
    from limitformer.initialisation.weight_by_weight import check_initialisation as check_initialisation
    from limitformer.initialisation.weight_by_weight import initialisation as initialisation

_HOMES = {
    "InitialisationReport": "report",
    "check_initialisation": "weight_by_weight",
    "initialisation": "weight_by_weight",
}
_sys.modules[__name__].__class__ = _LazyPackage
