"""XLM#159: a post-LN BERT trains with 6 layers and not with 12 (Adam 1e-4, no warm-up).

Right: that it runs; a forecast is not asked for.
"""

from torch.nn import functional

import limitformer as lf
from cases.networks import Block, LanguageModel, mean_square


class Post(Block):
    def forward(self, x):
        x = self.n1(x + self.attn(x))
        return self.n2(x + self.down(functional.gelu(self.up(x))))


def verify():
    for depth in (2, 8):
        report = lf.steps(
            lambda depth=depth: LanguageModel(depth=depth, block=Post, std=0, causal=False), 16, optimizer="adam",
            rates=[1e-4], steps=2, samples=1, seed=0, loss=mean_square, progress=False,
        )  # fmt: skip
        assert report.verdicts
