r"""The rule by which the learning rate follows the batch, as far as the first steps show.

The squared norm of a batch's gradient is |G|² + tr Σ/B (`stepping.noise`). It falls like B^(−1/2) while noise
dominates, and not at all at a large batch; where its exponent is −1/4 both parts are equal. Let the first update at
one rate have a size like B^x. In a training on N sequences the noise of N/B steps adds up like a random walk, to
√(N/B) η B^x, which does not depend on B if the rate η is like B^(1/2 − x). For SGD, whose x is −1/2 in noise, this is
the rule B; for Adam and Muon, whose updates hardly depend on the gradient's size, √B. Without noise the rate stays.
"""

from collections.abc import Mapping

import numpy as np
import xarray as xr

from limitformer.scaling.exponents import exponent

HALF_NOISE = -0.25  # exponent of the gradient's norm where its noise is as large as its mean
NEAR = 0.25  # of a power to that of a rule with a name
RULES = {0.5: "√B", 1.0: "B"}


def batch_rule(data: Mapping[int, xr.Dataset]) -> str:
    """Return the rule (none, √B, B or another power) that the steps at several batches speak for, in a sentence."""
    sizes, count = tuple(data), min(each.sizes["sample"] for each in data.values())
    updates = [(each.weight_change * each.weight_size).isel(step=1) for each in data.values()]  # biases at 0 have none
    squares = [(each.where(np.isfinite(each)) ** 2).sum("weight") for each in updates]
    both = [[each.gradient_norm.isel(step=0) for each in data.values()], [square**0.5 for square in squares]]
    values = np.stack([np.stack([each.values[:count] for each in some], 1) for some in both])
    gradient, moved = values[:, np.isfinite(values).all((0, 2)) & (values > 0).all((0, 2))]
    if not len(gradient):
        return "The gradient is not finite, so that nothing is said of a rule for the batch."
    local = np.diff(np.log(gradient).mean(0)) / np.diff(np.log(sizes))
    count = len(local) if (local < HALF_NOISE).all() else int(np.argmax(local >= HALF_NOISE))
    if count == 0:
        return (
            f"The gradient's norm is like batch^{local[0]:.2f} between {sizes[0]} and {sizes[1]}: noise is less than "
            "half of it, and these steps speak for one rate at every batch."
        )
    noisy = sizes[: count + 1]
    falls, size = (exponent(each[:, : count + 1], noisy) for each in (gradient, moved))
    power = 0.5 - size.value
    rule = next((name for each, name in RULES.items() if abs(power - each) < NEAR), f"B^{power:.2f}")
    above = "the largest here" if count == len(local) else "above which noise is less than half of the gradient"
    return (
        f"Up to batch {noisy[-1]}, {above}, the gradient's norm is like batch^({falls}), so that noise dominates it, "
        f"and at one rate the first update has a size like batch^({size}). The noise of later steps, if it adds "
        f"up like a random walk, then stays the same for a rate like batch^{power:.2f}: these steps speak for the rule "
        f"{rule}."
    )
