"""Biohub/esm#338: the paper of ESM-C says that branches are scaled by √L; its code divides.

Right: `grows` if one multiplies; the divided one does not grow.
"""

import limitformer as lf
from cases.networks import LanguageModel


def names(mult):
    report = lf.check(lambda: LanguageModel(depth=24, std=1 / 8, mult=mult), 16, samples=2, progress=False)
    return {one.name for one in report.verdicts}


def verify():
    assert "grows" in names(24**0.5)
    assert "grows" not in names(24**-0.5)
