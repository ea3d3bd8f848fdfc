"""`initialisation` of sound modules: what their own factory does is not a finding.

An orthogonal parametrisation, two weights that share memory by `.data`, and a constructor that reads a number that it
has drawn. Right: no finding; a weight that really deviates is one.
"""

import torch
from torch import nn
from torch.nn.utils import parametrizations

from limitformer.initialisation import compare, initialisation


def orthogonal():
    return nn.Sequential(*[parametrizations.orthogonal(nn.Linear(24, 24)) for _ in range(2)])


class Alias(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(24, 24), nn.Linear(24, 24)
        self.b.weight.data = self.a.weight.data


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(24, 24)
        with torch.no_grad():
            self.a.weight.normal_(0, 0.2)
            self.a.weight.mul_(3.0 if float(self.a.weight[0, 0]) > 0 else 0.3)


def verify():
    for factory in (orthogonal, Alias, Reads):
        for seed in (1, 2, 3):
            torch.manual_seed(seed)
            assert not initialisation(factory(), factory).findings, (factory, seed)
        assert not compare(factory, factory).findings
    wrong = nn.Linear(24, 24)
    with torch.no_grad():
        wrong.weight.mul_(3)
    assert initialisation(wrong, lambda: nn.Linear(24, 24)).findings
