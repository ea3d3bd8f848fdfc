"""muP recipes scale the rate of the whole optimiser: lr = base/m. `rate` is the rate at the base size.

Right: a rate that is the optimiser's own at the base changes nothing; another one multiplies every group at every size.
"""

import numpy as np
import pytest
import torch

import limitformer as lf
from cases.mup import OPTIONS
from cases.networks import LanguageModel


def optimizer(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-3 * 64 / module.wte.weight.shape[1])


def result(**options):
    def build(width=64):
        return LanguageModel(width, depth=2, std=0)

    return lf.transfer(
        build, {"width": [64, 128, 256]}, 16, optimizer=optimizer, samples=1, **OPTIONS, **options
    )  # fmt: skip


def rates(each):
    return [each.record()["groups"][str(size)][0]["lr"][0] for size in each.sizes]


def verify():
    own, same = result(), result(rate=1e-3)
    for name, values in own.measures.items():
        np.testing.assert_array_equal(same.measures[name], values)
    assert rates(own) == rates(same) == pytest.approx([1e-3, 5e-4, 2.5e-4])
    assert rates(result(rate=1e-2, base=32)) == pytest.approx([5e-3, 2.5e-3, 1.25e-3])
    assert own.heading.count("AdamW (lr ") == 2
