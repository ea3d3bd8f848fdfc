"""Models whose attention is found by structure: every accepted type against the formula, refusals, caches, loading."""

import copy

import pytest
import torch
import transformers
from benchmarks.zoo.configurations import small_config, task_of

from hf_models import CACHE, loud, unlike, written_out
from limitformer import InputError
from limitformer.hf import Shaping, load_shaped, shape_model

FIRST = (  # one for each path of an attention, each kind of its maps, and each field of the activation
    "gpt_bigcode", "mistral", "aimv2_vision_model", "beit", "camembert", "clip_text_model", "gptj", "dinov2",
    "distilbert", "yolos", "embedding_gemma2_text", "gte", "gemma3_text", "gpt_neox", "modernbert",
    "modernbert-decoder", "whisper",
)  # fmt: skip
OTHERS = (
    "gpt-sw3", "afmoe", "apertus", "apertus1p5_text", "arcee", "aria_text", "beam", "bert-generation", "biogpt",
    "bitnet", "chameleon", "chinese_clip_vision_model", "clip_vision_model", "codegen", "cohere", "cohere2",
    "cohere2_moe", "cohere_compass_text", "cosmos3_edge_text", "cwm", "data2vec-text", "deit",
    "dinov2_with_registers", "dory", "dots1", "dpt", "electra", "emu3", "ernie", "ernie4_5", "ernie4_5_moe", "esmc",
    "eurobert", "exaone", "exaone4", "exaone_moe", "falcon_h1", "flex_olmo", "gemma", "gemma3n_text", "gemma4_text",
    "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4v_moe_text", "glm4v_text", "glm_image_text",
    "glm_ocr_text", "granite", "granite_docling_text", "granitemoe", "granitemoeshared", "helium", "higgs_audio_v2",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "hy_v3", "hyperclovax", "ijepa", "internlm3",
    "internvl_vision", "iquestcoder", "jais2", "jina_embeddings_v3", "kolibri1", "laguna", "layoutlm", "markuplm",
    "mellum", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mixtral", "mlcd_vision_model",
    "mobilebert", "molmo2_text", "moshi", "muse_glimmer_text", "muse_spark_text", "nanochat", "nemotron",
    "nomic_bert", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phi4_multimodal", "phimoe",
    "pixio", "qianfan_ocr_vision", "qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3", "qwen3_moe",
    "qwen3_vl_moe_text", "qwen3_vl_text", "radio", "roberta-prelayernorm", "roc_bert", "sam3_vit_model",
    "sarvam_moe", "seed_oss", "siglip_vision_model", "smollm3", "solar_open", "splinter", "stablelm", "starcoder2",
    "tipsv2_text_model", "tipsv2_vision_model", "ultrabert", "vit_msn", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
IDS = torch.tensor([[5, 6, 7, 8, 9, 5, 3, 11], [9, 8, 7, 3, 4, 6, 9, 9]])
PADDED = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])


def built(kind, **changes):
    config = small_config(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    config._experts_implementation = "eager"  # the other is for float32 alone
    torch.manual_seed(0)
    model = getattr(transformers, task_of(config)[1]).from_config(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)  # else attention is nearly C̄
    return model.base_model


def given(model):
    if model.main_input_name == "pixel_values":
        size = model.config.image_size
        size = (size, size) if isinstance(size, int) else size
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(2, model.config.num_channels, *size, generator=generator, dtype=torch.float64)
        return {"pixel_values": images}
    return {"input_ids": IDS, "attention_mask": PADDED}


def visible(out, model):
    """The tokens of a pass that are not padding."""
    tokens = out.last_hidden_state
    return tokens if model.main_input_name == "pixel_values" else tokens[PADDED.bool()]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.slow(keep=len(FIRST))
@pytest.mark.parametrize("kind", FIRST + OTHERS)
@torch.no_grad()
def test_found_attention_follows_the_formula(kind, monkeypatch):
    """A is that of the formula, with the library's own masks of numbers; γ₁ = γ₂ = 0 changes nothing."""
    model = built(kind)
    wanted = visible(model(**given(model)), model)
    same = visible(shape_model(copy.deepcopy(model), Shaping(gamma1=0.0, gamma2=0.0))(**given(model)), model)
    scale = float(wanted.abs().max())
    assert float((same - wanted).abs().max()) < 1e-5 * scale
    shaped = unlike(shape_model(model, Shaping(tau0=0.8)))
    ours = visible(shaped(**given(shaped)), shaped)
    assert float((ours - wanted).abs().max()) > 1e-3 * scale
    written_out(monkeypatch)
    by_hand = visible(shaped(**given(shaped)), shaped)
    assert float((ours - by_hand).abs().max()) < 1e-4 * float(by_hand.abs().max())


CACHED = {"gemma3_text": {"sliding_window": 4}, "gpt_neox": {}}


@pytest.mark.parametrize("kind", CACHED)
@torch.no_grad()
def test_generation_is_the_same_with_and_without_a_cache(kind):
    """Twelve tokens after five, with windows of four: the keys of a cache then begin later than the text."""
    config = small_config(kind)
    for name, value in CACHED[kind].items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model = unlike(shape_model(loud(model, std=0.3)))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = IDS[:, :5]
    with_cache = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=True, **options)
    without = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=False, **options)
    assert torch.equal(with_cache, without)
    cache = transformers.DynamicCache(config=model.config)
    whole = model(with_cache, use_cache=False).logits
    parts = [model(part, **{CACHE: cache}, use_cache=True).logits for part in with_cache.split([5, 3, 1, 8], 1)]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=2e-4 * float(whole.abs().max()))


@pytest.mark.parametrize("kind", ["gpt_neox", "gpt_bigcode"])
@torch.no_grad()
def test_static_caches_know_the_places_of_queries(kind):
    """A cache of fixed length has room behind the queries; GPT-NeoX gives it to its attention under another name."""
    config = small_config(kind)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model = unlike(shape_model(loud(model, std=0.3)))
    ids = IDS[:, :7]
    whole = model(ids, use_cache=False).logits
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    parts = [model(part, **{CACHE: cache}, use_cache=True).logits for part in ids.split([4, 1, 2], 1)]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=2e-4 * float(whole.abs().max()))


def test_bias_that_is_zero_so_far_is_refused():
    """BEiT's relative positions start at zero, and its softmax has them once they are trained."""
    config = small_config("beit")
    config.use_relative_position_bias = True
    model = transformers.BeitModel(config).eval()
    with pytest.raises(InputError, match="a bias of the logits"):
        shape_model(model)


@torch.no_grad()
def test_means_are_over_the_window():
    """Queries of zero give A = I + uniform − C̄ = I in any window; a mean over all earlier tokens does not."""
    model = built("mistral", sliding_window=3)
    for layer in model.layers:
        layer.self_attn.q_proj.weight.zero_()
    shaped = shape_model(copy.deepcopy(model))
    states = shaped(IDS, output_attentions=True).attentions
    assert torch.allclose(states[0], torch.eye(8, dtype=torch.float64).expand_as(states[0]), atol=1e-6)
    mean = torch.ones(8, 8).tril() / torch.arange(1, 9)[:, None]
    window = torch.ones(8, 8).tril().triu(-2)
    window = window / window.sum(1, keepdim=True)
    assert float((window - mean).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gpt_oss", "an attention sink"),
        ("gemma2", "a soft cap"),
        ("doge", "reads the mask itself"),
        ("deepseek_v3", "values of the size of queries"),
        ("falcon", "reads the mask itself"),
        ("diffllama", "was called 4 times for 2 blocks"),
        ("mamba2", "no attention was found"),
        ("convbert", "reads the mask itself"),
        ("vit_mae", "random numbers"),
    ],
)
def test_attention_that_cannot_be_shaped_is_refused_by_name(kind, message):
    """The model does not change."""
    model = built(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kept = model.config._attn_implementation
    with pytest.raises(InputError, match=message):
        shape_model(model)
    assert model.config._attn_implementation == kept
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_encoders_with_decoders_are_refused():
    with pytest.raises(InputError, match=r"cannot be shaped|cross-attention|found in the blocks"):
        shape_model(built("bart"))


@pytest.mark.parametrize(
    ("shaping", "name"),
    [
        (Shaping(residual_gamma=0.3), "residual_gamma"),
        (Shaping(shaped_relu=True), "shaped_relu"),
        (Shaping(float32=True), "float32"),
    ],
)
def test_only_the_attention_of_found_families_is_shaped(shaping, name):
    with pytest.raises(InputError, match=f"{name}.*only the attention"):
        shape_model(built("mistral"), shaping)
    with pytest.raises(InputError, match="redraw"):
        shape_model(built("mistral"), redraw=True)


@pytest.mark.parametrize("kind", ["mistral", "distilbert"])
@torch.no_grad()
def test_found_models_are_saved_and_loaded(kind, tmp_path):
    """`from_pretrained` fails, since it would load an unshaped model."""
    model = unlike(shape_model(built(kind)))
    model.save_pretrained(tmp_path)
    again = load_shaped(tmp_path)
    assert torch.equal(visible(again(**given(again)), again), visible(model(**given(model)), model))
    with pytest.raises((KeyError, ValueError, ImportError), match="shaped"):
        type(model).from_pretrained(tmp_path)
