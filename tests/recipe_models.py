"""Small modules whose weights are drawn as the sources of the recipes say, with torch's own initialisations.

They are written from the sources and share nothing with `limitformer.initialisation.recipes`: neither formulas nor the
search for roles. A draw is a function of a weight and its sizes.
"""

import math
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import init

WIDTH, HIDDEN, DEPTH, HEADS, VOCABULARY, POSITIONS = 48, 80, 3, 4, 96, 24
SIZES = SimpleNamespace(width=WIDTH, hidden=HIDDEN, depth=DEPTH, head_dim=WIDTH // HEADS, vocabulary=VOCABULARY)


class Attention(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=bias))


class Mlp(nn.Module):
    def __init__(self, gated, bias):
        super().__init__()
        if gated:
            self.w1, self.w2, self.w3 = (
                nn.Linear(*pair, bias=bias) for pair in ((WIDTH, HIDDEN), (HIDDEN, WIDTH), (WIDTH, HIDDEN))
            )
        else:
            self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN, bias=bias), nn.Linear(HIDDEN, WIDTH, bias=bias)


class Block(nn.Module):
    def __init__(self, gated, bias, router):
        super().__init__()
        self.attn_norm, self.ffn_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed_forward = Attention(bias), Mlp(gated, bias)
        if router:
            self.router = nn.Linear(WIDTH, 4, bias=False)


class Transformer(nn.Module):
    """Blocks with the names of many libraries; `draws` has a draw for each role."""

    def __init__(self, draws, gated, bias, tied, relative):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        if "position embedding" in draws:
            self.pos_emb = nn.Embedding(POSITIONS, WIDTH)
        if relative:
            self.relative_attention_bias = nn.Embedding(32, HEADS)
        self.layers = nn.ModuleList(Block(gated, bias, "router" in draws) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.tok_embeddings.weight
        for role, layer, weight in weights_of(self):
            if role in draws and not (tied and role == "head"):
                draws[role](weight, SimpleNamespace(**vars(SIZES), layer=layer))


def weights_of(model):
    """Return role, index of the block and tensor of each weight of a `Transformer`."""
    yield "embedding", None, model.tok_embeddings.weight
    if hasattr(model, "pos_emb"):
        yield "position embedding", None, model.pos_emb.weight
    if hasattr(model, "relative_attention_bias"):
        yield "relative bias", None, model.relative_attention_bias.weight
    for layer, block in enumerate(model.layers):
        roles = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "attention output"}
        roles |= {
            "w1": "gate",
            "w3": "feed-forward in",
            "w2": "feed-forward out",
            "fc1": "feed-forward in",
            "fc2": "feed-forward out",
        }
        for part in (block.attention, block.feed_forward):
            for name, linear in part.named_children():
                yield roles[name], layer, linear.weight
                if linear.bias is not None:
                    yield "bias", layer, linear.bias
        if hasattr(block, "router"):
            yield "router", layer, block.router.weight
    yield "head", None, model.lm_head.weight


def normal(std):
    """Draw N(0, std²); `std` is a number or a function of the sizes."""
    return lambda weight, s: init.normal_(weight, 0.0, std(s) if callable(std) else std)


def cut(std, bounds):
    """Draw a normal law between ±bounds."""

    def draw(weight, s):
        size = std(s) if callable(std) else std
        edge = bounds(size)
        init.trunc_normal_(weight, 0.0, size, -edge, edge)

    return draw


def zeros(weight, s):
    init.zeros_(weight)


def divided(draw, factor):
    """Draw, then divide by a function of the sizes."""

    def both(weight, s):
        draw(weight, s)
        with torch.no_grad():
            weight.div_(factor(s))

    return both


def for_roles(draw, *roles):
    return dict.fromkeys(roles, draw)


IN = ("query", "key", "value", "gate", "feed-forward in")
OUT = ("attention output", "feed-forward out")
ENDS = ("embedding", "position embedding", "head")


def residual(std):
    return lambda s: std / math.sqrt(2 * s.depth)


def own_depth(std):
    return lambda s: std / (2 * (s.layer + 1)) ** 0.5


def three(std):
    return 3 * std


def jax_truncated(weight, s):
    """Draw as jax's truncated_normal of variance_scaling: cut at two, and divided by the std of what is left."""
    std = weight.shape[1] ** -0.5 / 0.87962566103423978
    init.trunc_normal_(weight, 0.0, std, -2 * std, 2 * std)


def torch_linear(weight, s):
    init.kaiming_uniform_(weight, a=math.sqrt(5))


def xavier(gain, law=init.xavier_normal_):
    return lambda weight, s: law(weight, gain=gain(s) if callable(gain) else gain)


T5 = {
    "embedding": normal(1.0),
    "query": normal(lambda s: (s.width * s.head_dim) ** -0.5),
    **for_roles(normal(lambda s: s.width**-0.5), "key", "value", "attention output"),
    **for_roles(jax_truncated, "gate", "feed-forward in", "feed-forward out"),
    "relative bias": lambda weight, s: init.uniform_(weight, -((3 / 18) ** 0.5), (3 / 18) ** 0.5),  # fan_avg (32 + 4)/2
}
MITCHELL = {
    **for_roles(cut(lambda s: 1 / math.sqrt(s.width), three), *IN, *ENDS),
    "attention output": cut(lambda s: 1 / math.sqrt(2 * s.width * (s.layer + 1)), three),
    "feed-forward out": cut(lambda s: 1 / math.sqrt(2 * s.hidden * (s.layer + 1)), three),
}
BETA = lambda s: (8 * s.depth) ** -0.25  # noqa: E731

# Recipe → draws by role, and the form of the module.
DRAWS = {
    "gpt2": (
        {
            **for_roles(normal(0.02), *IN, "embedding"),
            "position embedding": normal(0.01),
            **for_roles(normal(residual(0.02)), *OUT),
        },
        {"gated": False, "bias": True, "tied": True},
    ),
    "megatron": (
        {**for_roles(normal(0.02), *IN, *ENDS, "router"), **for_roles(normal(residual(0.02)), *OUT)},
        {"bias": True},
    ),
    "mitchell": (MITCHELL, {}),
    "torchtitan": (
        {
            "embedding": normal(1.0),
            **for_roles(cut(0.02, lambda std: 2.0), "query", "key", "value", "gate"),
            **for_roles(cut(own_depth(0.02), lambda std: 2.0), "feed-forward in", *OUT),
            "head": cut(lambda s: s.width**-0.5, three),
        },
        {},
    ),
    "t5-v1.1": ({**T5, "head": jax_truncated}, {"relative": True}),
    "deepnorm": (
        {
            **for_roles(xavier(1.0), "query", "key"),
            **for_roles(xavier(BETA), "value", "gate", "feed-forward in", *OUT),
        },
        {},
    ),
    "torchscale-deepnorm": (
        {
            **for_roles(normal(lambda s: s.width**-0.5), "embedding", "head"),
            **for_roles(xavier(1 / math.sqrt(2), init.xavier_uniform_), "query", "key"),
            "value": divided(xavier(1 / math.sqrt(2), init.xavier_uniform_), lambda s: (8.0 * s.depth) ** 0.25),
            "attention output": divided(xavier(1.0, init.xavier_uniform_), lambda s: (8.0 * s.depth) ** 0.25),
            **for_roles(
                divided(torch_linear, lambda s: (8.0 * s.depth) ** 0.25), "feed-forward in", "feed-forward out"
            ),
        },
        {"gated": False},
    ),
    "clip": (
        {
            "embedding": normal(0.02),
            "position embedding": normal(0.01),
            **for_roles(normal(lambda s: s.width**-0.5), "query", "key", "value"),
            **for_roles(normal(lambda s: s.width**-0.5 * (2 * s.depth) ** -0.5), *OUT),
            "feed-forward in": normal(lambda s: (2 * s.width) ** -0.5),
        },
        {"gated": False},
    ),
    "mup": (
        {
            "embedding": normal(1.0),
            **for_roles(zeros, "query", "head"),
            **for_roles(normal(lambda s: (1 / s.width) ** 0.5), "key", "value", "feed-forward in", *OUT),
        },
        {"gated": False, "bias": True},
    ),
    "nanochat": (
        {
            "embedding": normal(0.8),
            "head": normal(0.001),
            **for_roles(
                lambda w, s: init.uniform_(w, -(3**0.5) * s.width**-0.5, 3**0.5 * s.width**-0.5),
                "query",
                "key",
                "value",
            ),
            "feed-forward in": lambda w, s: init.uniform_(
                w, -0.4 * 3**0.5 * s.width**-0.5, 0.4 * 3**0.5 * s.width**-0.5
            ),
            **for_roles(zeros, *OUT),
        },
        {"gated": False},
    ),
}


def factory(recipe, wrong=None):
    """Return a function that builds the module of a recipe; weights of the role `wrong` are √2 times too large."""
    draws, form = DRAWS[recipe]
    form = {"gated": True, "bias": False, "tied": False, "relative": False, **form}
    biases = {"bias": zeros} if form["bias"] else {}
    draws = {**draws, **biases}
    if wrong is not None:
        if draws[wrong] is zeros:
            draws[wrong] = normal(0.01)
        else:
            draws[wrong] = divided(draws[wrong], lambda s: 0.5**0.5)
    return lambda: Transformer(draws, **form)


# Recurrent and other modules, whose weights have names of their own.


class Rwkv7(nn.Module):
    """The parameters of RWKV-7, written from the source's loops."""

    def __init__(self, width=64, depth=3, vocabulary=200):
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        init.uniform_(self.emb.weight, -1e-4, 1e-4)
        self.blocks = nn.ModuleList(rwkv7_block(width, layer, depth) for layer in range(depth))
        self.ln_out, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        init.orthogonal_(self.head.weight, gain=0.5 * math.sqrt(vocabulary / width))


def rwkv7_block(width, layer, depth):
    block, att, ffn = nn.Module(), nn.Module(), nn.Module()
    block.ln1, block.ln2, block.att, block.ffn = nn.LayerNorm(width), nn.LayerNorm(width), att, ffn
    first, late = layer / (depth - 1), 1 - layer / depth
    place = torch.arange(width, dtype=torch.float32)
    for name, power in (("r", 0.2), ("w", 0.9), ("k", 0.7), ("v", 0.7), ("a", 0.9), ("g", 0.2)):
        setattr(att, f"x_{name}", nn.Parameter((1 - (place / width) ** (power * late)).reshape(1, 1, -1)))
    linear = place / (width - 1) - 0.5
    zigzag = torch.tensor([((n % 64) - 31.5) / 31.5 for n in range(width)])
    zigzag = zigzag * zigzag.abs()
    decay = -6 + 6 * (place / (width - 1)) ** (1 + first**0.3)
    vectors = {"w0": decay + 0.5 + zigzag * 2.5, "a0": -0.19 + zigzag * 0.3 + linear * 0.4}
    vectors |= {"v0": 0.73 - linear * 0.4, "k_k": 0.71 - linear * 0.1, "k_a": torch.full((width,), 1.02)}
    for name, numbers in vectors.items():
        setattr(att, name, nn.Parameter(numbers.reshape(1, 1, -1)))
    att.r_k = nn.Parameter(torch.full((width // 64, 64), -0.04))
    for name in "wavg":
        setattr(att, f"{name}1", nn.Parameter(torch.zeros(width, 32)))
        setattr(att, f"{name}2", nn.Parameter(init.orthogonal_(torch.zeros(32, width), gain=0.1)))
    for name, gain in (("receptance", 1.0), ("key", 0.1), ("value", 1.0), ("output", 0.0)):
        setattr(att, name, nn.Linear(width, width, bias=False))
        weight = getattr(att, name).weight
        init.orthogonal_(weight, gain=gain) if gain else init.zeros_(weight)
    att.ln_x = nn.GroupNorm(width // 64, width)
    init.constant_(att.ln_x.weight, ((1 + layer) / depth) ** 0.7)
    ffn.x_k = nn.Parameter((1 - (place / width) ** (late**4)).reshape(1, 1, -1))
    ffn.key, ffn.value = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
    init.orthogonal_(ffn.key.weight, gain=1.0)
    init.zeros_(ffn.value.weight)
    return block


class HyperConnections(nn.Module):
    """The logits of manifold-constrained hyper-connections, in three layers."""

    def __init__(self, streams=4):
        super().__init__()
        self.layers = nn.ModuleList(self.layer(index, streams) for index in range(3))

    @staticmethod
    def layer(index, streams):
        part = nn.Module()
        part.H_res_logits = nn.Parameter(torch.full((streams, streams), -8.0).fill_diagonal_(0.0))
        reading = torch.full((1, streams), -8.0)
        reading[0, index % streams] = 0.0
        part.H_pre_logits, part.H_post_logits = nn.Parameter(reading), nn.Parameter(torch.zeros(1, streams))
        part.H_res_alpha_logit = nn.Parameter(torch.tensor(math.log(0.01 / 0.99)))
        return part


class Mamba2(nn.Module):
    """The parameters of Mamba-2 as its authors' code draws them."""

    def __init__(self, width=32, depth=2, heads=24, vocabulary=50):
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.embedding = nn.Embedding(vocabulary, width)
        init.normal_(self.backbone.embedding.weight, std=0.02)
        self.backbone.layers = nn.ModuleList()
        for _ in range(depth):
            block, mixer = nn.Module(), nn.Module()
            block.norm, block.mixer = nn.LayerNorm(width), mixer
            mixer.in_proj, mixer.out_proj = nn.Linear(width, 150, bias=False), nn.Linear(64, width, bias=False)
            mixer.conv1d = nn.Conv1d(80, 80, 4, groups=80)
            step = torch.exp(torch.rand(heads) * (math.log(0.1) - math.log(0.001)) + math.log(0.001)).clamp(min=1e-4)
            mixer.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
            mixer.A_log = nn.Parameter(torch.log(torch.empty(heads).uniform_(1, 16)))
            mixer.D = nn.Parameter(torch.ones(heads))
            init.kaiming_uniform_(mixer.out_proj.weight, a=math.sqrt(5))
            with torch.no_grad():
                mixer.out_proj.weight /= math.sqrt(depth)
            self.backbone.layers.append(block)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.backbone.embedding.weight


class Rwkv4(nn.Module):
    """The parameters of RWKV-4, written from the source's loops."""

    def __init__(self, width=32, depth=3, vocabulary=100):
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        init.orthogonal_(self.emb.weight, gain=1e-4 * math.sqrt(vocabulary))
        self.blocks = nn.Sequential(*(self.block(width, layer, depth) for layer in range(depth)))
        self.ln_out, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        init.orthogonal_(self.head.weight, gain=0.5 * math.sqrt(vocabulary / width))

    @staticmethod
    def block(width, layer, depth):
        block, att, ffn = nn.Module(), nn.Module(), nn.Module()
        block.ln1, block.ln2, block.att, block.ffn = nn.LayerNorm(width), nn.LayerNorm(width), att, ffn
        first, late = layer / (depth - 1), 1 - layer / depth
        x = (torch.arange(width) / width).reshape(1, 1, -1)
        att.time_decay = nn.Parameter(
            torch.tensor([-5 + 8 * (h / (width - 1)) ** (0.7 + 1.3 * first) for h in range(width)])
        )
        att.time_first = nn.Parameter(torch.tensor([math.log(0.3) + ((i + 1) % 3 - 1) * 0.5 for i in range(width)]))
        att.time_mix_k, att.time_mix_v = nn.Parameter(x**late), nn.Parameter(x**late + 0.3 * first)
        att.time_mix_r = nn.Parameter(x ** (0.5 * late))
        ffn.time_mix_k, ffn.time_mix_r = nn.Parameter(x**late), nn.Parameter(x**late)
        for name in ("key", "value", "receptance", "output"):
            setattr(att, name, nn.Linear(width, width, bias=False))
            init.orthogonal_(att.value.weight) if name == "value" else init.zeros_(getattr(att, name).weight)
        ffn.key, ffn.value = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        ffn.receptance = nn.Linear(width, width, bias=False)
        init.orthogonal_(ffn.key.weight, gain=2.0)
        init.zeros_(ffn.value.weight)
        init.zeros_(ffn.receptance.weight)
        return block


OTHERS = {"rwkv-7": Rwkv7, "rwkv-4": Rwkv4, "mamba-2": Mamba2, "mhc": HyperConnections}
