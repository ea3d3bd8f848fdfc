"""Recipes against the code of the library that claims them: differences that are known, and those of docs/recipes.md.

Every number is a ratio of laws, and the ones that the page reports are also measured on drawn models, in standard
errors, with a wrong twin.
"""

import functools
import math

import pytest
import torch
import transformers

from limitformer.base.errors import InputError
from limitformer.checking.check import check
from limitformer.initialisation.recipes import compare_with_recipe
from limitformer.subjects.subject import resolve

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 80}
T5_11 = {
    "model_type": "t5", "d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_decoder_layers": 12,
    "num_heads": 12, "vocab_size": 32128, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "gpt2": lambda: transformers.GPT2Config(vocab_size=96, n_embd=48, n_layer=4, n_head=4, n_positions=24, **IDS),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**LLAMA, **IDS),
    "olmo": lambda: transformers.OlmoConfig(**LLAMA, **IDS),
    "llama": lambda: transformers.LlamaConfig(**LLAMA, num_key_value_heads=2),
    "nanochat": lambda: transformers.NanoChatConfig(**LLAMA, num_key_value_heads=4, **IDS),
    "t5": lambda: transformers.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=96),
    "switch": lambda: transformers.SwitchTransformersConfig(
        d_model=64, d_kv=16, d_ff=128, num_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
        num_heads=4, vocab_size=96, num_experts=4,
    ),
    "mamba2": lambda: transformers.Mamba2Config(
        num_hidden_layers=2, hidden_size=64, num_heads=8, head_dim=16, vocab_size=96, **IDS
    ),
    "rwkv": lambda: transformers.RwkvConfig(
        num_hidden_layers=3, hidden_size=64, attention_hidden_size=64, vocab_size=96, **IDS
    ),
    "clip": lambda: transformers.CLIPTextConfig(
        vocab_size=96, hidden_size=48, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=24, **IDS,
    ),
}  # fmt: skip


@functools.cache
def compared(family, recipe):
    return compare_with_recipe(MODELS[family](), recipe)


def ratios(comparison):
    """Return the ratio of each kind of weight that differs."""
    return {row.kind: row.ratio for row in comparison.differences}


def one(ratio):
    return pytest.approx((ratio, ratio), rel=1e-4)


def test_gpt2_of_the_library_scales_residual_weights_and_not_positions():
    comparison = compared("gpt2", "gpt2")
    assert ratios(comparison) == {"position embedding": one(2.0)}
    scaled = {row.kind: row.ratio for row in comparison.rows}
    assert scaled["attention output"] == scaled["feed-forward out"] == one(1.0)


def test_gpt2_without_the_residual_scaling_is_named():
    """Earlier releases never applied the scaling: they sought c_proj.weight among qualified names."""

    def unscaled():
        model = transformers.GPT2LMHeadModel(MODELS["gpt2"]())
        for block in model.transformer.h:
            for part in (block.attn, block.mlp):
                torch.nn.init.normal_(part.c_proj.weight, std=0.02)
        return model

    expected = {"position embedding": one(2.0), "attention output": one(8**0.5), "feed-forward out": one(8**0.5)}
    assert ratios(compare_with_recipe(unscaled, "gpt2")) == expected


def test_head_of_t5_is_the_embedding_where_the_configuration_asks_for_its_own():
    comparison = compare_with_recipe(T5_11, "t5-v1.1")
    assert ratios(comparison) == {"head": one(768**0.5), "relative bias": one(768**-0.5 / (2 / 44) ** 0.5)}
    assert "lm_head.weight shares the weights of shared.weight" in comparison.remarks[0]
    head = next(row for row in comparison.rows if row.kind == "head")
    assert head.remark.startswith("tied to shared.weight; std 27.71 times the recipe's")


def test_neox_and_olmo_draw_other_laws_than_the_repositories_that_trained_them():
    neox = ratios(compared("gpt_neox", "gpt-neox"))
    assert neox["query, key, value"] == one(0.02 / math.sqrt(2 / (5 * 48)))
    assert neox["attention output"] == neox["feed-forward out"] == one(0.02 / (2 / 3 / math.sqrt(48)))
    olmo = ratios(compared("olmo", "mitchell"))
    low, high = (0.02 * math.sqrt(2 * 48 * layer) / 0.986578392558108 for layer in (1, 3))
    assert olmo["attention output"] == pytest.approx((low, high))
    assert ratios(compared("olmo", "olmo-normal")) == {}


def test_mamba2_of_the_library_differs_in_five_kinds():
    comparison = compared("mamba2", "mamba-2")
    off = ratios(comparison)
    assert off["output projection"] == one(math.sqrt(2))  # √L: rescale_prenorm_residual is off
    assert off["embedding"] == one(5.0)
    assert off["input projection"] == one(0.1 * math.sqrt(3 * 64))
    assert off["log of A"][0] == pytest.approx(0.9772, abs=1e-3)
    assert "computed, not drawn" in next(row.remark for row in comparison.rows if row.kind == "log of A")


def test_rwkv_of_the_library_draws_weights_that_are_zero_in_the_recipe():
    off = ratios(compared("rwkv", "rwkv-4"))
    zero = {"keys", "receptance", "outputs", "channel values", "channel receptance"}
    assert off.keys() == zero | {"time first"}
    assert all(math.isinf(off[kind][0]) for kind in zero)


def test_nanochat_of_the_library_has_another_initialisation():
    off = ratios(compared("nanochat", "nanochat"))
    assert off["embedding"] == one(0.025)
    assert off["head"] == one(20.0)
    assert math.isinf(off["attention output"][0])
    assert math.isinf(off["feed-forward out"][0])


def test_clip_of_the_library_exchanges_queries_and_outputs():
    off = ratios(compared("clip", "clip"))
    assert off == {
        "query": one(8**-0.5), "key": one(8**-0.5), "value": one(8**-0.5), "attention output": one(8**0.5),
        "position embedding": one(2.0),
    }  # fmt: skip


def test_router_of_switch_is_fifty_times_too_large():
    off = ratios(compared("switch", "switch"))
    assert off["router"] == one(50.0)
    assert off["query"] == off["key"] == off["value"] == off["expert in"] == one(10**0.5)
    assert off["expert out"] == one(20**0.5)  # 1/√d_model, and not 1/√d_ff


DRAWN = {  # family, recipe → ending of a name, std of the recipe for a model of that size
    ("gpt2", "gpt2"): {"wpe.weight": 0.01},
    ("gpt_neox", "gpt-neox"): {"dense_4h_to_h.weight": 2 / 3 / 48**0.5},
    ("olmo", "mitchell"): {"embed_tokens.weight": 0.986578392558108 / 48**0.5},
    ("t5", "t5-v1.1"): {"lm_head.weight": 64**-0.5},
    ("clip", "clip"): {"q_proj.weight": 48**-0.5, "out_proj.weight": 48**-0.5 * 8**-0.5},
    ("switch", "switch"): {"router.classifier.weight": 0.02},
    ("t5", "t5"): {"relative_attention_bias.weight": (2 / 36) ** 0.5},
    ("mamba2", "mamba-2"): {"out_proj.weight": (3 * 128) ** -0.5 * 2**-0.5},
    ("nanochat", "nanochat"): {"lm_head.weight": 0.001, "embed_tokens.weight": 0.8},
}


@pytest.mark.parametrize(("family", "recipe"), DRAWN)
def test_differences_are_those_of_drawn_models(family, recipe):
    """Entries of three models that the library draws have the std of its law, and not the recipe's."""
    comparison = compared(family, recipe)
    for ending, published in DRAWN[family, recipe].items():
        numbers = torch.cat([entries(family, ending, seed) for seed in range(3)])
        row = next(row for row in comparison.differences if any(name.endswith(ending) for name in row.names))
        std, error = float(numbers.std()), relative_error(numbers)
        assert abs(math.log(std / (published * row.ratio[0]))) < 4 * error
        assert abs(math.log(std / published)) > 5 * error  # the wrong twin: a model that follows the recipe


def entries(family, ending, seed):
    torch.manual_seed(seed)
    model = resolve(MODELS[family]()).factory()
    every = model.named_parameters(remove_duplicate=False)  # a tied head has a name of its own
    return torch.cat([each.detach().flatten() for name, each in every if name.endswith(ending)]).double()


def relative_error(numbers):
    """Return the standard error of log std."""
    centred = numbers - numbers.mean()
    kurtosis = float((centred**4).mean() / (centred**2).mean() ** 2)
    return math.sqrt((kurtosis - 1) / (4 * len(numbers)))


# In a report.


@pytest.fixture(scope="module")
def report():
    return check(MODELS["gpt2"](), tokens=8, samples=2, recipe="gpt2", gradients=False, progress=False)


def test_report_has_the_table(report):
    text = str(report)
    assert max(map(len, text.splitlines())) <= 80
    assert "1 of 9 kinds of weight differ from recipe gpt2: position embedding" in text
    row = next(line for line in text.splitlines() if line.startswith("  ≠  position embedding"))
    assert row.split()[1:] == ["position", "embedding", "normal", "0.02", "normal", "0.01", "2"]
    assert "source: Radford et al. 2019" in text


def test_report_is_saved_with_the_comparison(report, tmp_path):
    import json

    report.save(tmp_path)
    record = json.loads((tmp_path / "check.json").read_text(encoding="utf-8"))["recipe"]
    assert record["recipe"] == "gpt2"
    assert [row["kind"] for row in record["rows"] if row["mark"] == "≠"] == ["position embedding"]
    page = (tmp_path / "check.html").read_text(encoding="utf-8")
    assert "against a published recipe: GPT-2" in page
    assert "<td>std 2 times the recipe&#x27;s</td>" in page or "std 2 times the recipe" in page


def test_recipe_needs_a_law():
    with pytest.raises(InputError, match="recipe needs the law of the model's code"):
        check(torch.nn.Linear(4, 4), torch.ones(2, 4), recipe="gpt2", progress=False)
    with pytest.raises(InputError, match="recipe must be one of 23 names; got 'gpt3'"):
        check(MODELS["gpt2"](), recipe="gpt3")
