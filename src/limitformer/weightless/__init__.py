"""Weightless networks: any architecture, forward and backward, exact in law and without drawing most weights.

A pass through a module, in the order in which it is computed:

* `building` and `watching` read the law of each parameter from the module's own code; `law` is their table, `tape`
  records how each matrix was computed, and `reachable` yields what else a module holds;
* `network` replaces random weights by tensors without entries (`implicit`), and runs passes (`run`: the state of one);
* `maps` has the formulas: U = R N forward, D Wᵀ backward, |∂W|², and `orthogonal` those of orthogonal weights; `roots`
  factorises tokens, `numbers` draws N;
* `shared` forms the gradients of parameters with entries, by sample;
* `layout` finds the blocks; `measure` watches them and the stream (`blocks`); `masks` follows the visible pairs;
* `simulate` combines passes to a dataset (`arrays`); `lengths` measures the first attention of long texts alone.

Names are imported on first use: the table of public shapes needs no torch.
"""

import sys as _sys
from typing import TYPE_CHECKING

from limitformer.base.extras import LazyPackage as _LazyPackage
from limitformer.base.extras import require_packages as _require_packages

_require_packages("torch", "torch", "threadpoolctl")

if TYPE_CHECKING:
    from limitformer.subjects.shapes import shapes as shapes
    from limitformer.weightless.arrays import split_stacks as split_stacks
    from limitformer.weightless.law import LawTable as LawTable
    from limitformer.weightless.law import law as law
    from limitformer.weightless.laws import Law as Law
    from limitformer.weightless.lengths import attention_by_length as attention_by_length
    from limitformer.weightless.simulate import simulate as simulate

_HOMES = {"Law": "laws", "LawTable": "law", "law": "law", "simulate": "simulate"}
_HOMES |= {"attention_by_length": "lengths", "split_stacks": "arrays", "shapes": "limitformer.subjects.shapes"}
_HOMES |= {"simulate_steps": "limitformer.stepping.simulate"}
_sys.modules[__name__].__class__ = _LazyPackage
