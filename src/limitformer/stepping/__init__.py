"""The first training steps of any module, in law: weights without entries that an optimiser updates.

* `updates` are the optimisers, `optimizers` reads the user's, `rules` are those of all parameters;
* `weights` are trained weights without entries, `entrywise` those of rules that act on each entry;
* `trajectory` trains one network, `simulate` many.

Names are imported on first use: the command line reads those of the optimisers, and they need no torch.
"""

import sys as _sys
from typing import TYPE_CHECKING

from limitformer.base.extras import LazyPackage as _LazyPackage

if TYPE_CHECKING:
    from limitformer.stepping.simulate import simulate_steps as simulate_steps
    from limitformer.stepping.updates import OPTIMIZERS as OPTIMIZERS

_HOMES = {"simulate_steps": "simulate", "OPTIMIZERS": "updates"}
_sys.modules[__name__].__class__ = _LazyPackage
