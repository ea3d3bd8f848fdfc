"""A GPT whose head is the table, short sequences and three or more samples: once "another output when called again".

The first call had drawn other weights than later ones. Right: it runs.
"""

from functools import partial

import torch

import limitformer as lf
from cases.networks import LanguageModel


def verify():
    for width, vocabulary, shape in ((128, 500, (2, 32)), (64, 500, (2, 16)), (256, 500, (2, 64))):
        ids = torch.randint(1, vocabulary, shape, generator=torch.Generator().manual_seed(1))
        make = partial(LanguageModel, width, 3, vocabulary=vocabulary, tie=True)
        lf.check(make, ids, samples=8, gradients=False, progress=False)
