"""microsoft/mup#55: with a tied head MuSharedReadout multiplies the shared matrix by √m, so that the embedding grows.

Right: the stream after the embedding grows like √width, and `transfer` says so; without the factor it is size-free.
"""

import pytest

import limitformer as lf
from cases.mup import OPTIONS, Mup, groups


def result(rescaled):
    def build(width=64):
        return Mup(width, tie=True, rescaled=rescaled, table=0.1)

    def optimizer(module):
        return groups(module, 2e-3, lr=2e-3 / module.m)

    return lf.transfer(build, {"width": [64, 128, 256]}, 16, optimizer=optimizer, samples=4, **OPTIONS)


def verify():
    name, grows = "stream at the start", result(True)
    assert grows.exponents[name].value == pytest.approx(0.5, abs=0.05)
    assert grows.word(name) == "depends"
    assert grows.transfers is not True
    assert result(False).exponents[name].value == pytest.approx(0.0, abs=0.05)
