"""`limitformer.design`: what to set before training, from the law alone.

Names are imported when they are first used, so that options are checked before torch is loaded.
"""

import sys as _sys
from typing import TYPE_CHECKING

from limitformer.base.extras import LazyPackage as _LazyPackage
from limitformer.base.extras import require_packages as _require_packages

_require_packages("hf", "torch", "transformers")

if TYPE_CHECKING:
    from limitformer.designing.design import design as design
    from limitformer.designing.fixes import fix as fix
    from limitformer.designing.objective import Objective as Objective
    from limitformer.designing.report import Design as Design

_HOMES = {
    "Design": "report",
    "Objective": "objective",
    "design": "design",
    "fix": "fixes",
}
_sys.modules[__name__].__class__ = _LazyPackage
