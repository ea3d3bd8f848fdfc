"""Reduced copies of public shapes: few parameters, the same sizes of heads, and every kind of layer."""

import pytest
import torch
import transformers

from limitformer.base.errors import InputError
from limitformer.subjects.configurations import config_of
from limitformer.subjects.subject import subject_of_config
from limitformer.witness.reduce import reduced

SHAPES = ["gpt2-xl", "vit-huge", "modernbert-large", "llama-3-405b", "gemma-3-1b", "t5-large", "deepseek-v3"]


def head_sizes(config):
    names = ("head_dim", "d_kv", "qk_nope_head_dim", "v_head_dim")
    return config.hidden_size // config.num_attention_heads, [getattr(config, name, None) for name in names]


@pytest.mark.parametrize("name", SHAPES)
def test_reduced_keeps_heads_and_kinds_of_layers_of_a_public_shape(name):
    config = config_of(name)
    before = config.to_dict()
    small = reduced(config)
    assert config.to_dict() == before
    with torch.device("meta"):
        model = subject_of_config(small).factory()
    assert sum(each.numel() for each in model.parameters()) <= 12_000_000
    assert head_sizes(small) == head_sizes(config)
    assert set(getattr(small, "layer_types", [])) == set(getattr(config, "layer_types", []))
    assert 2 <= small.num_hidden_layers == len(getattr(small, "layer_types", [0] * small.num_hidden_layers))
    ids = [getattr(small, f"{word}_token_id", None) for word in ("pad", "bos", "eos", "cls", "sep")]
    assert all(0 <= i < small.vocab_size <= 1024 for i in ids if i is not None)


def test_reduced_moves_equal_ids_together_and_keeps_others_distinct():
    small = reduced(config_of("modernbert-large"))
    assert small.bos_token_id == small.cls_token_id != small.eos_token_id == small.sep_token_id != small.pad_token_id


def test_reduced_keeps_one_period_of_layers_and_wrong_twin_with_two_layers_has_one_kind():
    config, kinds = config_of("gemma-3-1b"), {"sliding_attention", "full_attention"}
    assert set(reduced(config).layer_types) == kinds
    assert set(config.layer_types[:2]) != kinds  # of its period of six


def test_reduced_keeps_dense_and_expert_layers_and_more_experts_than_a_token_takes():
    small = reduced(config_of("deepseek-v3"))
    assert (small.first_k_dense_replace, small.num_hidden_layers) == (1, 2)
    assert small.num_experts_per_tok < small.n_routed_experts <= 4


@pytest.mark.parametrize(("name", "why"), [("recurrent_gemma", "no RecurrentGemmaAttention"), ("convnext", "param")])
def test_reduced_refuses_copies_without_a_kind_of_layer_or_with_too_many_parameters(name, why):
    with pytest.raises(InputError, match=why):
        reduced(transformers.CONFIG_MAPPING[name]())
