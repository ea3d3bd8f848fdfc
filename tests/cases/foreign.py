"""Small modules of unusual code, each with its inputs, for the witness: structures that no type of transformers has."""

import copy
import functools
import random

import numpy as np
import torch
from torch import nn

import limitformer as lf

WIDTH = 8
IDS = torch.tensor([[3, 7, 3, 9, 5], [1, 2, 3, 4, 4]])
IMAGES = torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Block(nn.Module):
    """A hidden layer behind a norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, two blocks and a head."""

    def __init__(self, block=Block):
        super().__init__()
        self.embed = nn.Embedding(12, WIDTH)
        self.blocks = nn.ModuleList([block(), block()])
        self.head = nn.Linear(WIDTH, WIDTH)

    def stream(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids):
        return self.head(self.stream(self.embed(ids)))


class Rotated(Net):
    """A random rotation that is an attribute instead of a buffer."""

    def __init__(self):
        super().__init__()
        self.rotation = torch.empty(WIDTH, WIDTH)
        nn.init.orthogonal_(self.rotation)

    def stream(self, x):
        return super().stream(x @ self.rotation * 1.5)


class Listed(Net):
    """Layers in a Python list."""

    def __init__(self):
        super().__init__()
        self.extra = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]

    def stream(self, x):
        for block, extra in zip(self.blocks, self.extra, strict=True):
            x = x + extra(block(x))
        return x


class Numpy(Net):
    """Entries from NumPy, copied into a parameter."""

    def __init__(self):
        super().__init__()
        self.head.weight.data.copy_(torch.from_numpy(np.random.randn(WIDTH, WIDTH)))

    def stream(self, x):
        return super().stream(self.head(x))


class Scaled(Net):
    """Random numbers as attributes, and a scale of the initialisation that is random."""

    def __init__(self):
        super().__init__()
        self.gain, self.factor = torch.rand(WIDTH) + 0.5, random.random()
        nn.init.normal_(self.head.weight, std=float(torch.rand(())))

    def stream(self, x):
        return super().stream(self.head(x) * self.gain * (0.5 + self.factor))


GLOBAL = {}


class Global(Net):
    """A matrix in a dictionary of the file."""

    def __init__(self):
        super().__init__()
        GLOBAL["matrix"] = torch.randn(WIDTH, WIDTH)

    def stream(self, x):
        return super().stream(x @ GLOBAL["matrix"])


class Slotted:
    """An object with one slot."""

    __slots__ = ("matrix",)

    def __init__(self, matrix):
        self.matrix = matrix


class Closed(Net):
    """Matrices in a closure, in a partial function and in an object within a list within a dictionary."""

    def __init__(self):
        super().__init__()
        one, two, three = (torch.randn(WIDTH, WIDTH) for _ in range(3))
        self.first = lambda x: x @ one
        self.second = functools.partial(torch.matmul, other=two)
        self.third = {"deep": [Slotted(three)]}

    def stream(self, x):
        return super().stream(self.first(x) + self.second(x) + x @ self.third["deep"][0].matrix)


class Changed(Net):
    """A network after `change`, whose tokens pass through `use` first."""

    def __init__(self, change, use):
        super().__init__()
        self.use = use
        with torch.no_grad():
            change(self)

    def stream(self, x):
        return super().stream(self.use(self, x))


def parameters(**given):
    """Return a change that adds parameters, each made by a function of the network."""

    def change(net):
        for name, make in given.items():
            setattr(net, name, nn.Parameter(make(net)))

    return change


def unbound(net):
    net.q, net.k = (nn.Parameter(each) for each in torch.randn(2, WIDTH, WIDTH).unbind())


def overlapping(net):
    vector = torch.randn(2 * WIDTH)
    net.part, net.all = nn.Parameter(vector[:WIDTH]), nn.Parameter(vector)


def square(*_):
    return torch.randn(WIDTH, WIDTH)


def by_head(net, x):
    return net.head(x)


CHANGED = {  # the change, and the use
    "a weight read through a list": (
        lambda net: vars(net).update(listed=[net.head.weight]), lambda net, x: x @ net.listed[0],
    ),
    "entries of torch.normal": (lambda net: net.head.weight.copy_(torch.normal(0.0, 1.0, (WIDTH, WIDTH))), by_head),
    "a matrix divided by its norm": (lambda net: net.head.weight.div_(float(net.head.weight.norm())), by_head),
    "the identity and noise": (lambda net: net.head.weight.copy_(torch.eye(WIDTH) + 0.3 * square()), by_head),
    "the transpose of a copy": (
        parameters(back=lambda net: net.head.weight.detach().T.clone()),
        lambda net, x: x @ net.back @ net.head.weight.T,
    ),
    "a transpose of the same memory": (
        parameters(one=square, two=lambda net: net.one.data.T), lambda net, x: x @ net.one @ net.two,
    ),
    "two parts of one draw": (unbound, lambda net, x: x @ (net.q - net.k)),
    "a vector and a part of it": (overlapping, lambda net, x: x * (1 + net.part * net.all[:WIDTH])),
}  # fmt: skip


def complex_waves():
    """Return a network with a complex parameter."""
    return Changed(
        parameters(waves=lambda _: torch.randn(WIDTH, WIDTH, dtype=torch.cfloat)),
        lambda net, x: (x.to(net.waves.dtype) @ net.waves).real.to(x.dtype),
    )


class Tossed(Net):
    """A coin that the factory tosses, which is likely to fall on one side in both builds."""

    def __init__(self, toss):
        super().__init__()
        toss(self)

    def stream(self, x):
        return super().stream(x * (20.0 if self.side() else 1.0))

    def side(self):
        return bool(self.coin) if isinstance(self.coin, torch.Tensor) else self.coin == "heads"


def by_bool(net):
    net.coin = "heads" if torch.rand(()) < 0.5 else None


def by_list(net):
    net.coin = "heads" if torch.rand(1).tolist()[0] < 0.5 else None


def by_comparison(net):
    net.register_buffer("coin", torch.rand(1) < 0.25)


def by_whole_number(net):
    net.register_buffer("coin", torch.randint(0, 5, (1,)) // 4)


def by_choice(net):
    net.coin = random.choice(["heads", "tails"])


def by_numpy(net):
    net.coin = "heads" if np.random.rand() < 0.5 else "tails"


def by_parameter(net):
    net.coin = nn.Parameter((torch.rand(1) < 0.25).to(torch.get_default_dtype()), requires_grad=False)


TOSSES = [by_bool, by_list, by_comparison, by_whole_number, by_choice, by_numpy, by_parameter]


class Routed(nn.Module):
    """One expert for the whole sequence, a tied head, and no blocks."""

    def __init__(self):
        super().__init__()
        self.embed, self.first = nn.Embedding(20, 12), nn.Linear(12, 12)
        self.router = nn.Linear(12, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(3))
        self.head = nn.Linear(12, 20, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.3)

    def of_experts(self, x):
        return self.experts[int(self.router(x[:, -1])[0].argmax())](x)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + torch.tanh(self.first(x))
        return self.head(x + self.of_experts(x))


class Scattered(Routed):
    """The experts receive the tokens that were routed to them, and no others."""

    def of_experts(self, x):
        best, result = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = best == number
            if chosen.any():
                result[chosen] = expert(x[chosen])
        return result


class Stem(nn.Module):
    """Convolutions of every kind before a stream of tokens."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.by_channel = nn.Conv2d(8, 8, 3, padding="same", groups=8)
        self.back = nn.ConvTranspose2d(8, 6, 2, stride=2, bias=False)
        self.along = nn.Conv1d(6, 8, 5, stride=4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8)) for _ in range(2)])
        nn.init.normal_(self.first.weight, std=0.3)

    def forward(self, x):
        x = self.back(self.by_channel(torch.relu(self.first(x))))
        x = self.along(x.view(len(x), 6, -1)).mT
        for layer in self.layers:
            x = x + layer(x)
        return x


class Layers(nn.Module):
    """Blocks in sequence."""

    def __init__(self, *blocks):
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, function):
        super().__init__()
        self.map = function

    def forward(self, x):
        return x + self.map(x)


class WideStep(nn.Module):
    """A step of 24 entries by a matrix, or, if `turned`, by its transpose."""

    def __init__(self, turned):
        super().__init__()
        self.turned, self.map = turned, nn.Linear(24, 24, bias=False)
        nn.init.normal_(self.map.weight, std=0.2)

    def forward(self, x):
        return x + (x @ self.map.weight if self.turned else self.map(torch.tanh(x)))


def wide(turned=(False, False, False)):
    """Return steps that share one weight."""
    steps = [WideStep(turn) for turn in turned]
    for step in steps[1:]:
        step.map = steps[0].map
    return Layers(*steps)


class Experts(nn.Module):
    """Three experts of stacked matrices, all for each token, the second matrices stored transposed."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Parameter(0.3 * torch.randn(3, 24, width)) for width in (40, 40))

    def forward(self, x):
        return x + self.hidden(x[0].expand(3, -1, -1)).sum(0)[None]

    def hidden(self, x):
        return torch.bmm(torch.tanh(torch.bmm(x, self.up)), self.down.transpose(1, 2))


class ExpertsByOperators(Experts):
    def hidden(self, x):
        return torch.tanh(x @ self.up) @ self.down.mT


class StateSpace(nn.Module):
    """A recurrence with random rates and steps."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.rates = nn.Parameter(torch.empty(16).uniform_(1, 16).log())
        steps = torch.exp(torch.rand(16) * 4 - 4)
        self.steps = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))

    def forward(self, x):
        y, state, out = self.up(x), 0.0, []
        step = nn.functional.softplus(self.steps)
        for t in range(x.shape[1]):
            state = state * torch.exp(-step * self.rates.exp()) + step * y[:, t]
            out.append(state)
        return x + self.down(torch.stack(out, 1))


def linear(std=0.5):
    """Return a random map of 8 entries."""
    layer = nn.Linear(8, 8, bias=False)
    nn.init.normal_(layer.weight, std=std)
    return layer


def deep_copies():
    first = linear()
    return Layers(Residual(first), Residual(copy.deepcopy(first)))


def orthogonal_copies():
    first, second = linear(), linear()
    nn.init.orthogonal_(first.weight)
    second.weight = nn.Parameter(2 * first.weight.detach())
    return Layers(Residual(first), nn.Tanh(), Residual(second), nn.Tanh(), Residual(first))


def orthogonal():
    """Return square, wide and tall maps behind a table."""
    blocks = [nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 12)) for _ in range(2)]
    net = Layers(nn.Embedding(40, 12), nn.Linear(12, 12, bias=False), *map(Residual, blocks), nn.Linear(12, 40))
    for part in net.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.orthogonal_(part.weight, gain=1.2)
    return net


def by_device(net):
    if net.head.weight.device.type != "cpu":
        raise RuntimeError("only on the CPU")


def by_is_cpu(net):
    assert net.head.weight.data.is_cpu
    net.places = torch.zeros(WIDTH, WIDTH, device=net.embed.weight.device) + 1.0


def skipping_matrices_without_entries(net):
    for parameter in net.parameters():
        if parameter.dim() > 1 and not parameter.is_meta:
            nn.init.normal_(parameter, std=0.4)


ASKING = [by_device, by_is_cpu, skipping_matrices_without_entries]


def net_after(change):
    """Return a network after `change`."""
    net = Net()
    change(net)
    return net


PAPER = lf.Transformer(
    width=12, depth=3, gamma=0.6, attention=lf.ShapedAttention(tau0=0.5), feedforward=lf.ReLU(),
    norm=lf.LayerNorm(placement="post"),
)  # fmt: skip
X8, X24 = (torch.randn(1, 3, width, generator=torch.Generator().manual_seed(1)) for width in (8, 24))
DRAWN_WHOLE = [Rotated, Listed, Closed, Scaled, Global, complex_waves]  # with numbers that nobody can fill in
CASES = {each.__name__: (each, IDS) for each in [Net, Numpy, Routed, Scattered, orthogonal]}
CASES |= {name: (functools.partial(Changed, *each), IDS) for name, each in CHANGED.items()}
CASES |= {each.__name__: (functools.partial(Tossed, each), IDS) for each in TOSSES}
CASES |= {each.__name__: (functools.partial(net_after, each), IDS) for each in ASKING}
CASES |= {each.__name__: (each, X8) for each in [deep_copies, orthogonal_copies]}
CASES |= {
    "Stem": (Stem, IMAGES),
    "wide": (wide, X24),
    "wide and turned": (functools.partial(wide, (True, False, True)), X24),
    "Experts": (lambda: Layers(Experts(), Experts()), X24),
    "ExpertsByOperators": (lambda: Layers(ExpertsByOperators(), ExpertsByOperators()), X24),
    "Transformer": (PAPER, lf.from_covariance([[1.0, 0.3], [0.3, 1.4]])),
    "StateSpace": (lambda: Layers(StateSpace(), StateSpace()), X8),
}
