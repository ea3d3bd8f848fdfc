"""maxtext#1370: the softmax scale of MLA reversed, logits times √d in place of over it ("instability").

Right: `frozen`, broken, as logits and attention agree; the right scale has no such verdict.
"""

import limitformer as lf
from cases.networks import LanguageModel


def grades(scale):
    report = lf.check(lambda: LanguageModel(width=128, std=128**-0.5, scale=scale), 64, samples=2, progress=False)
    return {one.name: one.grade for one in report.verdicts}


def verify():
    assert grades(32**0.5)["frozen"] == "broken"
    assert "frozen" not in grades(32**-0.5)
