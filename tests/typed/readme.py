# The README's code, for mypy (`test_documentation.py` holds it against the page).
import limitformer as lf


def block_0() -> None:
    # model.py
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width: int = 256) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            wide = nn.Linear(width, 4 * width)
            self.mlp = nn.Sequential(wide, nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm1(x + self.attention(x, x, x)[0])
            x = self.norm2(x + self.mlp(x))
            return x

    def build(width: int = 256, depth: int = 36) -> nn.Module:
        return nn.Sequential(nn.Embedding(1000, width), *[Block(width) for _ in range(depth)], nn.Linear(width, 1000))


def block_1() -> None:
    from scipy.stats import ks_2samp

    import limitformer as lf

    shaped = lf.ShapedAttention(tau0=1.0)
    net = lf.Transformer(width=200, depth=150, gamma=8**-0.5, attention=shaped)
    twin = lf.Transformer(width=200, depth=150, gamma=0.5, attention=shaped)

    start = lf.equicorrelated(tokens=2, correlation=0.2)
    ends = {}
    for name, model in {"SDE": lf.limit(net), "network": net, "wrong twin": twin}.items():
        paths = lf.simulate(model, start, samples=4096, seed=0)
        ends[name] = lf.correlation(paths)[:, -1, 0, 1].values
    for name in ("network", "wrong twin"):
        print(f"{name} against SDE: p = {ks_2samp(ends[name], ends['SDE']).pvalue:.1g}")
