"""Rules in effect: stream and logits of weightless networks at several sizes, and other routes to a multiplier."""

import math
from fnmatch import fnmatchcase
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import limitformer as lf
from limitformer import InputError
from limitformer.scaling.exponents import exponent
from limitformer.scaling.parametrisation import parametrise
from limitformer.weightless.law import law

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 200}
LLAMA |= {"num_key_value_heads": 2, "intermediate_size": 128}
GRANITE = {**LLAMA, "model_type": "granite", "logits_scaling": 2.0, "residual_multiplier": 0.5}
GRANITE |= {"embedding_multiplier": 3.0, "attention_multiplier": 0.25}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 4, "vocab_size": 200}
BERT = {**LLAMA, "model_type": "bert"}
NEOX = {**LLAMA, "model_type": "gpt_neox", "hidden_act": "gelu"}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4}
IDS = torch.arange(8)[None]
RUN = {"seed": 0, "progress": False}


def measured(model, over, size, base, rule, samples=24, **changes):
    result = parametrise(model, over, size, base, rule, "adamw")
    return lf.weightless.simulate(result.model, 8, samples=samples, overrides=result.overrides | changes, **RUN)


def stream_sizes(data, layer):
    """The root mean square of the stream by sample."""
    covariance = data.covariance.values[:, layer]
    return np.sqrt(np.trace(covariance, axis1=1, axis2=2) / covariance.shape[-1])


def exponents(model, over, sizes, rule, **changes):
    every = [measured(model, over, size, sizes[0], rule, **changes) for size in sizes]
    first, last = (np.stack([stream_sizes(each, k) for each in every], 1) for k in (0, -1))
    logits = np.stack([each.logits_std.values for each in every], 1)
    parts = {"embedding": first, "stream": last, "growth": last**2 - first**2, "logits": logits}
    return {name: exponent(each.reshape(len(each), len(sizes)), sizes) for name, each in parts.items()}


WIDTHS = [64, 256]
GEMMA2 = {**LLAMA, "model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16}  # tied, √width at its table
MINICPM = {**LLAMA, "model_type": "minicpm3", "dim_model_base": 32, "q_lora_rank": 16, "kv_lora_rank": 16}
MINICPM |= {
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("model", [GRANITE, GEMMA2, LLAMA, MINICPM])
def test_mup_logits_fall_and_stream_does_not_depend_on_width(model):
    result = exponents(model, "width", WIDTHS, "mup")
    assert result["logits"].low - 0.01 < -0.5 < result["logits"].high + 0.01
    assert abs(result["logits"].value + 0.5) < 0.02
    assert abs(result["stream"].value) < 0.03
    assert abs(result["embedding"].value) < 0.01


def test_wrong_twin_multiplier_of_the_root_leaves_logits_constant():
    root = exponents(LLAMA, "width", WIDTHS, "mup")["logits"]
    twin = [
        measured(LLAMA, "width", w, 64, "mup", **{"lm_head.weight": 0.02 * (w / 64) ** 0.5}).logits_std.values
        for w in WIDTHS
    ]
    result = exponent(np.stack(twin, 1), WIDTHS)
    assert abs(result.value) < 0.02
    assert result.low > root.high + 0.4


DEPTHS = [4, 16]


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.map = nn.LayerNorm(width), nn.Linear(width, width, bias=False)

    def forward(self, x):
        return self.map(self.norm(x)) + x


def residual_network(depth):
    return nn.Sequential(nn.Embedding(100, 64), nn.Sequential(*(Residual(64) for _ in range(depth))))


@pytest.mark.parametrize(("rule", "power"), [("standard", 1.0), ("depth-mup", 0.0), ("completep", -1.0)])
def test_growth_of_stream_over_depth_has_the_power_of_the_rule(rule, power):
    # a branch does not depend on the size of its stream: L branches add variances of 1/3 m_L^(-2α)
    every = []
    for depth in DEPTHS:
        own = parametrise(residual_network, "depth", depth, 4, rule, "adamw")
        data = lf.weightless.simulate(own.model, IDS, samples=60, overrides=own.overrides, **RUN)
        every.append(stream_sizes(data, -1) ** 2 - stream_sizes(data, 0) ** 2)
        branches = data.branch.values[..., 0]
        assert np.mean(branches**2) == pytest.approx(own.multipliers.get("residual branches", 1.0) ** 2 / 3, rel=0.02)
    result = exponent(np.stack(every, 1), DEPTHS)
    assert abs(result.value - power) < 0.03
    assert result.low - 0.01 < power < result.high + 0.01


@pytest.mark.slow
def test_depth_mup_stream_does_not_depend_on_depth():
    own, standard = (exponents(LLAMA, "depth", [4, 8, 16, 32], rule)["stream"] for rule in ("depth-mup", "standard"))
    assert abs(own.value) < 0.05
    assert standard.low > 0.4


def same(a, b, *names):
    for name in names:
        np.testing.assert_allclose(a[name].values, b[name].values, rtol=2e-4, err_msg=name)


LAST = {
    "gpt2": (GPT2, ["transformer.h.*.c_proj.weight"]),
    "bert": (BERT, ["bert.encoder.layer.*output.dense.weight"]),  # post-LN
    "gpt_neox": (NEOX, ["*.attention.dense.weight", "*.dense_4h_to_h.weight"]),  # parallel branches
    "mixtral": (MIXTRAL, ["*.o_proj.weight", "*.experts.down_proj"]),
    "granite": (GRANITE, ["*.o_proj.weight", "*.down_proj.weight"]),  # its code has a multiplier of branches
}


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", LAST)
def test_multiplied_branch_is_a_branch_with_smaller_last_matrices(name):
    model, patterns = LAST[name]
    own = measured(model, "depth", 4, 2, "completep", samples=4)
    base = parametrise(model, "depth", 4, 2, "completep", "adamw")
    known = law(parametrise(model, "depth", 2, 2, "standard").model).laws
    smaller = {
        pattern: 0.5 * next(each.std for key, each in known.items() if fnmatchcase(key, pattern))
        for pattern in patterns
    }
    plain = parametrise(model, "depth", 4, 2, "standard").model
    other = lf.weightless.simulate(plain, 8, samples=4, overrides=base.overrides | smaller, **RUN)
    same(own, other, "covariance", "branch", "logits_std")


class Attention(nn.Module):
    """Attention of four heads, which grow with the width."""

    def __init__(self, width, scaled):
        super().__init__()
        self.head_dim = width // 4
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
        if scaled:
            self.scale = self.head_dim**-0.5

    def forward(self, x):
        q, k, v = (
            each(x).unflatten(-1, (4, self.head_dim)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        scale = getattr(self, "scale", self.head_dim**-0.5)
        return scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, width, scaled):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, scaled)

    def forward(self, x):
        return x + self.attention(self.norm(x))


class Network(nn.Module):
    def __init__(self, width, depth=2, scaled=True):
        super().__init__()
        self.tokens = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(Block(width, scaled) for _ in range(depth))
        self.head = nn.Linear(width, 100, bias=False)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("scaled", [True, False])
def test_attention_of_growing_heads_is_scaled_by_their_size(scaled):
    def factory(width):
        return Network(width, scaled=scaled)

    with_rule = parametrise(factory, "width", 256, 64, "mup", "adamw")
    assert with_rule.multipliers == {
        "head": 0.25,
        "blocks.0.attention logits": 0.5,
        "blocks.1.attention logits": 0.5,
    }
    own, plain = (
        lf.weightless.simulate(model, IDS, samples=8, overrides=with_rule.overrides, gradients=True, **RUN)
        for model in (with_rule.model, parametrise(factory, "width", 256, 64, "standard").model)
    )
    np.testing.assert_allclose(own.logit_std.values[:, 0], 0.5 * plain.logit_std.values[:, 0], rtol=1e-3)
    assert np.isfinite(own.weight_gradient.values).all()


def test_heads_of_unknown_size_are_reported_and_known_ones_scaled():
    def factory(width, hidden=True, kind=None):
        module = Network(width, scaled=False)
        for block in module.blocks if kind else ():
            block.attention.__class__ = kind
        for block in module.blocks if hidden else ():
            block.attention.columns = block.attention.__dict__.pop("head_dim")
        return module

    hidden, known = (
        parametrise(build, "width", 256, 64, "mup", "adamw") for build in (factory, lambda width: factory(width, False))
    )

    class Blick(type(Network(64, scaled=False).blocks[0].attention)):
        """Attention whose name does not say so."""

    unnamed = parametrise(partial(factory, hidden=False, kind=Blick), "width", 256, 64, "mup", "adamw")
    for one in (hidden, unnamed):
        assert one.multipliers == {"head": 0.25}
        assert one.heads_unseen
    assert not known.heads_unseen
    assert known.multipliers["blocks.0.attention logits"] == math.sqrt(16 / 64)  # not 16/64, which 1/d alone would be


def test_multiplied_branches_have_the_gradients_of_smaller_matrices():
    own = parametrise(GPT2, "depth", 4, 2, "completep", "adamw")
    patterns = ["*.attn.c_proj.weight", "*.mlp.c_proj.weight"]
    smaller = dict.fromkeys(patterns, 0.5 * 0.02 / 4**0.5)
    with_rule = lf.weightless.simulate(own.model, 8, samples=3, overrides=own.overrides, gradients=True, **RUN)
    plain = parametrise(GPT2, "depth", 4, 2, "standard").model
    other = lf.weightless.simulate(plain, 8, samples=3, overrides=smaller, gradients=True, **RUN)
    same(with_rule, other, "stream_gradient", "loss")
    last = [k for k, name in enumerate(other.weight.values) if "c_proj.weight" in str(name)]
    rest = [k for k, name in enumerate(other.weight.values) if "c_proj" not in str(name)]
    a, b = with_rule.weight_gradient.values, other.weight_gradient.values
    np.testing.assert_allclose(a[:, rest], b[:, rest], rtol=1e-3)
    np.testing.assert_allclose(a[:, last], 0.5 * b[:, last], rtol=1e-3)


class Bare(nn.Module):
    """A block whose sum with the stream is outside of it."""

    def __init__(self, width):
        super().__init__()
        self.map = nn.Linear(width, width)

    def forward(self, x):
        return self.map(x)


class Outside(nn.Module):
    def __init__(self, width, depth, lists=False):
        super().__init__()
        self.tokens = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(
            nn.ModuleList([Bare(width), Bare(width)]) if lists else Bare(width) for _ in range(depth)
        )

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = x + (block[1](block[0](x)) if isinstance(block, nn.ModuleList) else block(x))
        return x


def test_sums_outside_of_blocks_are_refused_by_name():
    own = parametrise(lambda depth: Outside(16, depth), "depth", 4, 2, "completep", "adamw")
    with pytest.raises(InputError, match=r"blocks\.0 has no sum of its input and a branch"):
        lf.weightless.simulate(own.model, IDS, samples=1, **RUN)
    with pytest.raises(InputError, match=r"blocks\.0 is a list of modules, and its sums with the stream are outside"):
        parametrise(lambda depth: Outside(16, depth, lists=True), "depth", 4, 2, "completep", "adamw")
