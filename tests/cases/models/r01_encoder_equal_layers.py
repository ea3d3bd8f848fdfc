"""pytorch#72253, #86274, #120396: nn.TransformerEncoder deep-copies its layer, so that all layers start equal.

Right: `initialisation`, with the factory as without it, `compare` and `check` say so; a block that is shared on
purpose is not told to be tied again.
"""

import torch
from torch import nn

import limitformer as lf
from cases.networks import LanguageModel
from limitformer.initialisation import compare, initialisation


class Encoder(nn.Module):
    def __init__(self, equal=True):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        for each in self.encoder.parameters():
            if each.dim() > 1 and not equal:
                nn.init.xavier_uniform_(each)

    def forward(self, x):
        return self.encoder(x)


class Shared(LanguageModel):
    def __init__(self):
        super().__init__(depth=3)
        self.blocks = nn.ModuleList([self.blocks[0]] * 3)


def verify():
    torch.manual_seed(0)
    for report in (initialisation(Encoder(), Encoder), initialisation(Encoder())):
        assert {one.kind for one in report.findings} == {"copies"}
        assert "encoder.layers.2.linear1.weight" in {name for one in report.findings for name in one.names}
    equal = [one for one in compare(lambda: Encoder(False), Encoder).findings if one.kind == "equal layers"]
    assert {len(one.names) for one in equal} == {3}
    assert not initialisation(Shared(), Shared).findings
    assert not compare(Shared, Shared).findings
    assert "again" not in str(compare(lambda: LanguageModel(depth=3), Shared))
    for build, equal in ((Encoder, True), (lambda: Encoder(False), False), (Shared, False)):
        inputs = 16 if build is Shared else torch.randn(2, 16, 64)
        found = {one.name for one in lf.check(build, inputs, samples=2, progress=False).verdicts}
        assert ("equal" in found) is equal
