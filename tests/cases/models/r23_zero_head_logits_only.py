"""A module that returns logits only, with a head that starts at zero (llama2.c, TinyLlama, gpt-fast: no own loss).

Right: the loss of `steps` is the cross-entropy of the next token, ln V before the first step, as in networks that
torch draws and trains. Half the square of the logits, which once ran without a word, is 0 there, and nothing moves.
"""

import numpy as np
import torch
from torch.nn import functional

import limitformer as lf
from cases.networks import LanguageModel
from limitformer.subjects.losses import square

VOCABULARY, IDS = 100, torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])


class LogitsOnly(LanguageModel):
    def forward(self, ids):
        return super().forward(ids)


def build():
    model = LogitsOnly(width=32, depth=2, vocabulary=VOCABULARY, std=0)
    torch.nn.init.zeros_(model.head.weight)
    return model


def really(networks):
    """Return the losses (networks, 3) of AdamW on the cross-entropy of the next token."""
    rows = []
    for seed in range(networks):
        torch.manual_seed(seed)
        model, rows = build(), [*rows, []]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(IDS)[0, :-1], IDS[0, 1:])
            loss.backward()
            optimizer.step()
            rows[-1].append(loss.item())
    return np.array(rows)


def verify():
    options = {"optimizer": "adamw", "rates": [1e-2], "steps": 2, "seed": 0, "progress": False}
    report = lf.steps(build, IDS, samples=12, **options)
    assert "loss: next-token cross-entropy" in report.heading
    mine, theirs = report.data.loss.values[0], really(48)
    np.testing.assert_allclose(mine[:, 0], np.log(VOCABULARY), rtol=1e-6)
    error = np.sqrt(mine.var(0, ddof=1) / len(mine) + theirs.var(0, ddof=1) / len(theirs))
    assert (np.abs(mine.mean(0) - theirs.mean(0)) <= 4 * error + 1e-6).all(), (mine.mean(0), theirs.mean(0))
    twin = lf.steps(build, IDS, samples=2, loss=square, **options)
    assert (twin.data.loss.values == 0).all()
    assert "losses.square" in twin.heading
