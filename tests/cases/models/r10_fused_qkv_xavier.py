"""NVIDIA/apex#910: a fused (3d, d) matrix drawn by xavier_uniform_ has another fan: std 1/√(2d) and not 1/√d.

Right: `compare` says that the std is 0.0884 for 0.125, by the wrong fan.
"""

from torch import nn

from cases.networks import LanguageModel
from limitformer.initialisation import compare


def build(gain=1.0):
    model = LanguageModel(depth=2)
    for block in model.blocks:
        block.attn.qkv = nn.Linear(64, 192, bias=False)
        nn.init.xavier_uniform_(block.attn.qkv.weight, gain=gain)
    return model


def verify():
    (one,) = compare(lambda: build(2**0.5), build).findings
    assert one.names == ("blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight")
    assert ("0.125" in one.in_a, "0.08839" in one.in_b) == (True, True)
    assert "Wrong fan" in one.detail or "wrong fan" in one.detail
