"""Roles of weights in models of several libraries: names, shapes, depths; and what is not clear."""

import pytest
import torch
import transformers
from torch import nn

from limitformer.initialisation.recipes.roles import places_of
from limitformer.subjects.subject import resolve
from limitformer.weightless.law import build_without_weights, table_of

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BASE = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, **IDS}
SIZE = {**BASE, "intermediate_size": 80}
BART = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 80, "decoder_ffn_dim": 80}

# A configuration, and for each kind of weight in the blocks the end of its names; + joins the roles of a fused one.
FAMILIES = {
    "gpt2": (
        transformers.GPT2Config(vocab_size=96, n_embd=48, n_layer=2, n_head=4, n_positions=24, **IDS),
        {
            "query+key+value": "attn.c_attn", "attention output": "attn.c_proj", "feed-forward in": "mlp.c_fc",
            "feed-forward out": "mlp.c_proj",
        },
    ),
    "bert": (
        transformers.BertConfig(**SIZE, max_position_embeddings=24),
        {
            "query": "self.query", "key": "self.key", "value": "self.value",
            "attention output": "attention.output.dense", "feed-forward in": "intermediate.dense",
            "feed-forward out": "output.dense",
        },
    ),
    "modernbert": (
        transformers.ModernBertConfig(**SIZE, cls_token_id=1, sep_token_id=2),
        {
            "query+key+value": "attn.Wqkv", "attention output": "attn.Wo", "gate+feed-forward in": "mlp.Wi",
            "feed-forward out": "mlp.Wo",
        },
    ),
    "mixtral": (
        transformers.MixtralConfig(**SIZE, num_key_value_heads=2, num_local_experts=4),
        {
            "query": "q_proj", "key": "k_proj", "value": "v_proj", "attention output": "o_proj", "router": "mlp.gate",
            "gate+feed-forward in": "experts.gate_up_proj", "feed-forward out": "experts.down_proj",
        },
    ),
    "vit": (
        transformers.ViTConfig(
            hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80, image_size=16,
            patch_size=8,
        ),
        {
            "query": "q_proj", "key": "k_proj", "value": "v_proj", "attention output": "o_proj",
            "feed-forward in": "fc1", "feed-forward out": "fc2",
        },
    ),
    "t5": (
        transformers.T5Config(d_model=48, d_kv=12, d_ff=80, num_layers=2, num_heads=4, vocab_size=96),
        {
            "query": ".q", "key": ".k", "value": ".v", "attention output": ".o", "feed-forward in": "wi",
            "feed-forward out": "wo", "relative bias": "relative_attention_bias",
        },
    ),
}  # fmt: skip


def places(model, config=None):
    """Return the places of a model's parameters."""
    subject = resolve(model)
    module, known = build_without_weights(subject, torch.float32)
    return places_of(module, table_of(subject, module, known).shapes, {}, config)


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_and_sizes_in_blocks_are_those_of_names_and_configuration(family):
    config, expected = FAMILIES[family]
    inside = {name: place for name, place in places(config, config).items() if place.stack}
    seen = {}
    for name, place in inside.items():
        if len(place.shape) >= 2:
            seen.setdefault("+".join(place.roles), set()).add(name.removesuffix(".weight"))
    assert seen.keys() == expected.keys()
    for role, names in seen.items():
        assert all(name.endswith(expected[role]) for name in names), (role, names)
    for size, values in {"depth": {2}, "layer": {0, 1}, "width": {48}}.items():
        assert {place.sizes[size] for place in inside.values()} == values


def test_stacks_have_depths_of_their_own():
    config = transformers.BartConfig(
        vocab_size=96, d_model=48, encoder_layers=2, decoder_layers=3, max_position_embeddings=24, **BART, **IDS,
        decoder_start_token_id=1, forced_eos_token_id=2,
    )  # fmt: skip
    depths = {place.stack: place.sizes["depth"] for place in places(config, config).values()}
    assert depths == {"": None, "model.encoder.layers": 2, "model.decoder.layers": 3}


def test_depth_of_nested_or_shared_blocks_is_not_known():
    swin = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[1, 2], num_heads=[2, 4], window_size=4
    )
    albert = transformers.AlbertConfig(**SIZE, embedding_size=24, max_position_embeddings=24)
    for config in (swin, albert):
        inside = [place for place in places(config, config).values() if "query" in place.roles]
        assert inside
        assert {place.sizes["depth"] for place in inside} == {None}


class Named(nn.Module):
    """Two blocks with a matrix of these names and (inputs, outputs), a norm and an embedding."""

    def __init__(self, matrices, outside=()):
        super().__init__()
        self.embed_tokens = nn.Embedding(96, 48)
        self.layers = nn.ModuleList()
        for _ in range(2):
            block = nn.Module()
            block.norm = nn.LayerNorm(48)
            for name, pair in matrices.items():
                part = block
                *path, last = name.split(".")
                for each in path:
                    if not hasattr(part, each):
                        setattr(part, each, nn.Module())
                    part = getattr(part, each)
                setattr(part, last, nn.Linear(*pair, bias=False))
            self.layers.append(block)
        for name, pair in dict(outside).items():
            setattr(self, name, nn.Linear(*pair, bias=False))


@pytest.mark.parametrize(
    ("name", "pair", "role"),
    [
        ("attn.to_q", (48, 48), "query"),
        ("self_attn.q_proj.linear", (48, 48), "query"),
        ("attention.wo", (48, 48), "attention output"),
        ("mlp.wo", (80, 48), "feed-forward out"),
        ("ff_proj", (48, 80), "feed-forward in"),
        ("mlp.router", (48, 4), "router"),
        ("router_mlp.fc1", (48, 80), ""),
        ("indexer.wk", (48, 48), ""),
        ("mlp.merger.linear_fc1", (48, 80), ""),
        ("something.dense", (48, 48), ""),
        ("mlp.down_proj", (80, 40), ""),
        ("attn.q_proj", (40, 48), ""),
    ],
)
def test_role_of_a_name_and_shape(name, pair, role):
    seen = places(lambda: Named({name: pair}))[f"layers.0.{name}.weight"]
    assert seen.roles == ((role,) if role else ())
    misfit = f"{pair[0]} inputs and {pair[1]} outputs do not fit its name at width 48"
    assert seen.reason == ("" if role else misfit if 48 not in pair or "q_proj" in name else "its role is not known")


def test_shape_decides_which_of_three_numbered_matrices_writes_to_the_stream():
    """The names of w1 and w2 are exchanged."""
    pairs = {"feed_forward.w1": (80, 48), "feed_forward.w2": (48, 80), "feed_forward.w3": (48, 80)}
    seen = places(lambda: Named(pairs))
    roles = {name: seen[f"layers.1.{name}.weight"].roles for name in pairs}
    into = ("feed-forward in",)
    assert roles == {"feed_forward.w1": ("feed-forward out",), "feed_forward.w2": into, "feed_forward.w3": into}
