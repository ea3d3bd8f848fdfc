"""The first training steps of any module, in law: weights without entries that an optimiser updates.

* `optimizers` reads the user's optimiser, `rules` are the update rules of its parameters, `updates` one update;
* `weights` are trained weights without entries, `entrywise` those of rules that act on each entry;
* `trajectory` trains one network, `simulate` many.
"""

from limitformer.stepping.simulate import simulate_steps as simulate_steps
