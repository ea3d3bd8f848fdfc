"""Shaped attention in Hugging Face models against explicit matrices A: masks, caches, compilation."""

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AttentionMaskInterface,
    BertLMHeadModel,
    DynamicCache,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    StaticCache,
)

from hf_models import (
    BATCH,
    CACHE,
    HEADS,
    MASKS,
    POSITIONS,
    TOKENS,
    VOCABULARY,
    config_of,
    inputs_of,
    loud,
    padding,
    restarting,
    shaped,
    unlike,
    written_out,
)
from limitformer import InputError
from limitformer.hf import Shaping, shape_model
from limitformer.hf.attention import check_packing, shaped_attention_forward, shaped_mask
from limitformer.nn import shaped_attention

FAMILIES = {
    "bert": lambda **options: shaped("bert", **options),
    "bert, a decoder": lambda **options: shaped("bert", is_decoder=True, **options),
    "roberta": lambda **options: shaped("roberta", **options),
    "gpt2": lambda **options: shaped("gpt2", scale_attn_by_inverse_layer_idx=True, **options),
    "llama": lambda **options: shaped("llama", **options),
    "vit": lambda **options: shaped("vit", **options),
}
CAUSAL = {"bert, a decoder", "gpt2", "llama"}


def given(family):
    return inputs_of("vit" if family == "vit" else "text")


# Every mask with one family that sees both sides and one that does not, and every family.
PAIRS = [("bert", mask) for mask in MASKS if mask != "packed"] + [("gpt2", mask) for mask in MASKS]
PAIRS += [("bert, a decoder", "left padding"), ("roberta", "right padding"), ("llama", "packed"), ("llama", "added")]
PAIRS += [("vit", "none"), ("vit", "boolean")]


def largest(one, other):
    return float((one - other).detach().abs().max())


def forward_and_backward(model, **inputs):
    """The tokens after every layer, and the gradient of each parameter that has one."""
    out = model(**inputs, use_cache=False, output_hidden_states=True)
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(out.last_hidden_state.shape, generator=generator, dtype=torch.float64)
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad((out.last_hidden_state * weights).sum(), list(named.values()), allow_unused=True)
    return [*out.hidden_states, out.last_hidden_state], dict(zip(named, gradients, strict=True))


def assert_same(actual, expected, tolerance=1e-12):
    for layer, (one, other) in enumerate(zip(actual[0], expected[0], strict=True)):
        assert largest(one, other) < tolerance * max(1.0, float(other.detach().abs().max())), layer
    for name, gradient in actual[1].items():
        assert (gradient is None) == (expected[1][name] is None), name
        if gradient is not None:
            scale = max(1.0, float(expected[1][name].detach().abs().max()))
            assert largest(gradient, expected[1][name]) < tolerance * scale, name


@pytest.mark.parametrize(("family", "mask"), PAIRS)
def test_shaped_models_equal_those_with_explicit_matrices(family, mask, monkeypatch):
    model, inputs = FAMILIES[family](), given(family) | MASKS[mask]
    actual = forward_and_backward(model, **inputs)
    trained = [name for name, gradient in actual[1].items() if gradient is not None and gradient.abs().max() > 1e-6]
    assert sum("shaping.gamma1" in name for name in trained) == len([n for n in actual[1] if "shaping.gamma1" in n]) > 0
    written_out(monkeypatch)
    assert_same(actual, forward_and_backward(model, **inputs))
    with torch.no_grad():  # a wrong twin: another γ₂
        for name, value in model.named_parameters():
            value.mul_(0.999 if "gamma2" in name else 1.0)
    assert largest(model(**inputs, use_cache=False).last_hidden_state, actual[0][-1]) > 1e-6


@pytest.mark.parametrize(
    ("family", "per_head", "left_out"),
    [
        ("gpt2", True, ["gamma1"]), ("llama", False, ["gamma2"]), ("bert", True, ["gamma1", "gamma2"]),
    ],
)  # fmt: skip
def test_shaped_models_without_terms_equal_explicit_ones(family, per_head, left_out, monkeypatch):
    out = dict.fromkeys(left_out)
    model = FAMILIES[family](shaping=Shaping(per_head=per_head, **out))
    inputs = given(family) | MASKS["left padding"]
    actual = forward_and_backward(model, **inputs)
    written_out(monkeypatch)
    assert_same(actual, forward_and_backward(model, **inputs))


@pytest.mark.parametrize(
    ("family", "mask"), [("bert", "added"), ("roberta", "right padding"), ("gpt2", "packed"), ("vit", "none")]
)
def test_output_attentions_equal_those_of_the_reference(family, mask, monkeypatch):
    """`output_attentions` reaches every family, for one call only."""
    model, inputs = FAMILIES[family](), given(family) | MASKS[mask]
    out = model(**inputs, use_cache=False, output_attentions=True)
    assert model(**inputs, use_cache=False).get("attentions") is None
    assert not any(getattr(module, "forms_matrix", False) for module in model.modules())
    written_out(monkeypatch)
    wanted = model(**inputs, use_cache=False, output_attentions=True)
    assert len(out.attentions) == len(wanted.attentions) == 2
    for one, other in zip(out.attentions, wanted.attentions, strict=True):
        assert largest(one, other) < 1e-12
    assert largest(out.last_hidden_state, wanted.last_hidden_state) < 1e-12 * out.last_hidden_state.abs().max()


def unpadded(model, row, left, **options):
    """Return tokens of a text of a padded batch, without its padding."""
    length = TOKENS - 6
    ids = inputs_of("text")["input_ids"][row : row + 1]
    positions = torch.arange(length) + options.pop("first", 0)
    alone = ids[:, TOKENS - length :] if left else ids[:, :length]
    return model(input_ids=alone, position_ids=positions[None], use_cache=False).last_hidden_state[0]


@pytest.mark.parametrize(
    ("family", "left"),
    [("bert", False), ("roberta", True), ("bert, a decoder", True), ("gpt2", False), ("llama", True)],
)
def test_padded_model_needs_the_mask_function_to_equal_the_unpadded(family, left, monkeypatch):
    model = FAMILIES[family]()
    first = 2 if family == "roberta" else 0  # RoBERTa counts from after the padding token
    mask = padding(left)
    positions = (mask.cumsum(-1) - 1).clamp(min=0) + first
    inputs = {"input_ids": inputs_of("text")["input_ids"], "attention_mask": mask, "position_ids": positions}
    place = slice(6, None) if left else slice(0, TOKENS - 6)
    alone = unpadded(model, 2, left, first=first)
    padded = model(**inputs, use_cache=False).last_hidden_state
    assert padded.isfinite().all()
    assert largest(padded[2, place], alone) < 1e-12 * max(1.0, float(alone.detach().abs().max()))
    assert AttentionMaskInterface._global_mapping["shaped"] is shaped_mask
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, "shaped")
    ignored = model(**inputs, use_cache=False).last_hidden_state
    if left or family not in CAUSAL:  # under a causal mask, padding on the right is never seen
        assert largest(ignored[2, place], alone) > 1e-3


# Caches.


def language_model(name, seed=0):
    torch.manual_seed(seed)
    build = {"gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM, "bert": BertLMHeadModel}[name]
    options = {"is_decoder": True} if name == "bert" else {}
    return unlike(shape_model(loud(build(config_of(name, **options)).double().eval())))


def text(batch=BATCH, tokens=TOKENS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=generator)


CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=POSITIONS - 7),
    "static, just long enough": lambda model: StaticCache(config=model.config, max_cache_len=TOKENS),
}
CHUNKS = {
    "one at a time": [1] * TOKENS,
    "all at once": [TOKENS],
    "a prompt, then several": [4, 5, 1],
    "chunked prefill": [3, 3, 3, 1],
}


@torch.no_grad()
def in_chunks(model, ids, cache, chunks, mask=None):
    """Logits, with the cache grown by `chunks`."""
    parts, first = [], 0
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
    for chunk in chunks:
        past = slice(first, first + chunk)
        options = {} if mask is None else {"attention_mask": mask[:, : past.stop], "position_ids": positions[:, past]}
        out = model(input_ids=ids[:, past], **{CACHE: cache}, use_cache=True, **options)
        parts.append(out.logits)
        first += chunk
    return torch.cat(parts, 1)


@pytest.mark.parametrize(
    ("name", "cache", "chunks"),
    [
        ("llama", "dynamic", "one at a time"),
        ("llama", "static", "chunked prefill"),
        ("llama", "static, just long enough", "all at once"),
        ("gpt2", "dynamic", "a prompt, then several"),
        ("gpt2", "static", "one at a time"),
        ("bert", "dynamic", "chunked prefill"),
        ("bert", "static", "a prompt, then several"),
    ],
)
def test_cached_logits_equal_those_of_the_whole_text(name, cache, chunks):
    model, ids = language_model(name), text()
    whole = model(input_ids=ids, use_cache=False).logits
    logits = in_chunks(model, ids, CACHES[cache](model), CHUNKS[chunks])
    assert logits.shape == whole.shape
    assert largest(logits, whole) < 1e-12 * max(1.0, float(whole.detach().abs().max()))


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_cache_may_have_either_name(name):
    """The name depends on the version of transformers."""
    model = language_model("llama")
    model.config.use_cache = False
    with pytest.raises(InputError, match=r"Packed sequences and a cache exclude each other"):
        check_packing(model.model, (), {"position_ids": restarting(), name: CACHES["dynamic"](model)})


def test_wrong_twin_without_hook_misplaces_the_identity():
    """The identity is then at the last positions of the cache."""
    model, ids = language_model("llama"), text()
    whole = model(input_ids=ids, use_cache=False).logits
    for layer in model.model.layers:
        layer.self_attn._forward_pre_hooks.clear()
    logits = in_chunks(model, ids, CACHES["static"](model), CHUNKS["a prompt, then several"])
    assert largest(logits, whole) > 1e-3


@pytest.mark.parametrize(
    ("name", "strategy", "padded"), [("gpt2", "greedy", True), ("llama", "beam", True), ("bert", "greedy", False)]
)
def test_generate_does_not_depend_on_caches(name, strategy, padded):
    model = language_model(name)
    ids, mask = text(2, 6), torch.ones(2, 6, dtype=torch.long)
    if padded:
        ids[1, :3], mask[1, :3] = 0, 0
    options = {
        "attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "num_beams": 3 if strategy == "beam" else 1,
        "disable_compile": True, "pad_token_id": 0,
    }  # fmt: skip
    texts = {
        "none": model.generate(ids, **options, use_cache=False),
        "dynamic": model.generate(ids, **options, use_cache=True),
        "static": model.generate(ids, **options, use_cache=True, cache_implementation="static"),
    }
    assert texts["none"].shape == (2, 12)
    assert torch.equal(texts["none"], texts["dynamic"])
    assert torch.equal(texts["none"], texts["static"])
    if padded:
        alone = model.generate(ids[1:, 3:], **options | {"attention_mask": mask[1:, 3:]})
        assert torch.equal(alone[0, 3:], texts["dynamic"][1, 6:])
    if strategy == "greedy":
        with torch.no_grad():
            grown = torch.cat([mask, torch.ones_like(mask)], 1)
            places = {"attention_mask": grown, "position_ids": (grown.cumsum(-1) - 1).clamp(min=0)}
            logits = model(input_ids=texts["dynamic"], **places, use_cache=False).logits
        assert torch.equal(logits[:, 5:-1].argmax(-1), texts["dynamic"][:, 6:])


def test_assisted_generation_changes_no_token():
    """Prompt lookup takes several tokens at once, and shortens the cache."""
    model, ids = language_model("llama"), text(1, 4).repeat(1, 3)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    guessed = model.generate(ids, **options, prompt_lookup_num_tokens=3)
    assert torch.equal(guessed, model.generate(ids, **options, use_cache=False))


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_generate_fills_a_cache_of_fixed_length(name):
    """The cache is then as long as the prompt, and the mask is made outside the model."""
    model, ids, mask = language_model(name), text(2, 6), torch.ones(2, 6, dtype=torch.long)
    ids[1, :3], mask[1, :3] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 1, "do_sample": False, "disable_compile": True}
    static = model.generate(ids, **options, pad_token_id=0, cache_implementation="static")
    assert torch.equal(static, model.generate(ids, **options, pad_token_id=0))


# A mask of ones, and packed sequences.


def reached(model, monkeypatch, **inputs):
    """(whether there is a mask, whether causality is the kernel's own) of each call of the fused kernel."""
    seen, fused = [], functional.scaled_dot_product_attention

    def spy(*args, **options):
        seen.append((options.get("attn_mask") is not None, options.get("is_causal")))
        return fused(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(functional, "scaled_dot_product_attention", spy)
        model(**inputs)
    return seen


@pytest.mark.parametrize(("name", "cached"), [("gpt2", True), ("bert", False)])
def test_mask_of_ones_reaches_the_kernel_as_none(name, cached, monkeypatch):
    """Stock models do the same; one token of padding keeps the mask."""
    model, ids = language_model(name), text()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": cached}
    assert reached(model, monkeypatch, **inputs) == [(False, True)] * 2
    if name == "gpt2":
        stock = GPT2LMHeadModel(config_of("gpt2", attn_implementation="sdpa")).double().eval()
        assert reached(stock, monkeypatch, **inputs) == [(False, True)] * 2
    assert torch.equal(model(**inputs).logits, model(input_ids=ids, use_cache=cached).logits)
    inputs["attention_mask"][1, 0] = 0
    assert reached(model, monkeypatch, **inputs) == [(True, False)] * 2


@pytest.mark.parametrize(
    ("name", "how"), [("gpt2", "use_cache"), ("llama", "a cache"), ("llama", "by the configuration")]
)
def test_packed_sequences_and_a_cache_are_refused(name, how):
    """A cache knows nothing of packing, and tokens saw the sequences before theirs."""
    model, ids = language_model(name), text()
    options = {"use_cache": {"use_cache": True}, "a cache": {CACHE: CACHES["dynamic"](model)}}.get(how, {})
    model.config.use_cache = how == "by the configuration"
    with pytest.raises(InputError, match=r"Packed sequences and a cache exclude each other: .* use_cache=False"):
        model(input_ids=ids, position_ids=restarting(), **options)
    one_text = torch.arange(TOKENS).expand(BATCH, -1)
    logits = model(input_ids=ids, position_ids=one_text, **options).logits
    assert largest(logits, model(input_ids=ids, use_cache=False).logits) < 1e-12 * logits.detach().abs().max()
    packed = model(input_ids=ids, position_ids=restarting(), use_cache=False).logits
    alone = model(input_ids=ids[:, 4:8], use_cache=False).logits
    assert largest(packed[:, 4:8], alone) < 1e-12 * alone.detach().abs().max()


def test_packed_sequences_of_a_causal_bert_need_a_mask():
    """Its masks are not known to read positions, so that tokens would see the sequences before theirs, cache or not."""
    model, ids = language_model("bert"), text()
    with pytest.raises(
        InputError, match=r"masks are not known to read positions: .* Nearest: an attention_mask \(batch, 1,"
    ):
        model(input_ids=ids, position_ids=restarting(), use_cache=False)
    sequence = torch.arange(TOKENS) // 4
    mask = ((sequence[:, None] == sequence) & torch.ones(TOKENS, TOKENS).tril().bool()).expand(BATCH, 1, -1, -1)
    packed = model(input_ids=ids, position_ids=restarting(), attention_mask=mask, use_cache=False).logits
    alone = model(input_ids=ids[:, 4:8], use_cache=False).logits
    assert largest(packed[:, 4:8], alone) < 1e-12 * alone.detach().abs().max()


# Attentions.


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_output_attentions_may_list_layers(family):
    model = FAMILIES[family]()
    inputs = given(family) | MASKS["left padding" if family != "vit" else "none"]
    every = model(**inputs, output_attentions=True)
    assert [a.shape for a in every.attentions] == [(BATCH, HEADS, *[every.attentions[0].shape[-1]] * 2)] * 2
    for asked, wanted in (([1], [1]), ([-1], [1]), ([0, 1], [0, 1]), ([], [])):
        out = model(**inputs, output_attentions=asked)
        assert torch.equal(out.last_hidden_state, every.last_hidden_state)
        given_back = out.attentions or ()
        assert len(given_back) == len(wanted)
        assert all(torch.equal(a, every.attentions[k]) for a, k in zip(given_back, wanted, strict=True))
    assert torch.equal(model(**inputs).last_hidden_state, every.last_hidden_state)
    with pytest.raises(InputError, match=r"output_attentions must be a flag, or layers from 0 to 1; got \[2\]"):
        model(**inputs, output_attentions=[2])


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_output_attentions_are_part_of_the_gradient_graph(family):
    """Attentions have a gradient, and parameters the same one as without them."""
    model = FAMILIES[family]()
    parameters = [value for value in model.parameters() if value.requires_grad]

    def gradients(out):
        tokens = out.last_hidden_state  # of one norm, in families that end with a normalisation
        weights = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(3), dtype=tokens.dtype)
        loss = (weights * tokens).sum()
        return torch.autograd.grad(loss, [*(out.get("attentions") or ()), *parameters], allow_unused=True)

    with_attentions, wanted = (
        gradients(model(**given(family), output_attentions=True)),
        gradients(model(**given(family))),
    )
    assert all(a.abs().max() > 1e-3 for a in with_attentions[:2])
    for one, other in zip(with_attentions[2:], wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or largest(one, other) < 1e-10 * max(1.0, float(other.abs().max()))


# Compilation.


def compiled(model, backend, **inputs):
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend)(**inputs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of torch's compiler
@pytest.mark.parametrize(("family", "mask"), [("llama", "left padding"), ("bert", "right padding")])
def test_compiled_model_equals_the_model(family, mask):
    model = FAMILIES[family]()
    inputs = given(family) | MASKS[mask]
    out = compiled(model, "aot_eager", **inputs, use_cache=False).last_hidden_state
    wanted = model(**inputs, use_cache=False).last_hidden_state
    assert largest(out, wanted) < 1e-12 * max(1.0, float(wanted.detach().abs().max()))
    parameters = [value for value in model.parameters() if value.requires_grad]
    actual = torch.autograd.grad(out.square().sum(), parameters, allow_unused=True)
    expected = torch.autograd.grad(wanted.square().sum(), parameters, allow_unused=True)
    for one, other in zip(actual, expected, strict=True):
        assert other is None or largest(one, other) < 1e-10 * max(1.0, float(other.detach().abs().max()))


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_compiled_decoding_needs_one_graph():
    model, ids = language_model("llama"), text()
    whole = model(input_ids=ids, use_cache=False).logits
    cache = CACHES["static"](model)
    parts = [model(input_ids=ids[:, :4], **{CACHE: cache}, use_cache=True).logits]
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    for place in range(4, TOKENS):
        positions = torch.full((BATCH, 1), place)
        with torch._dynamo.config.patch(error_on_recompile=place > 5):
            token = ids[:, place : place + 1]
            out = step(input_ids=token, position_ids=positions, **{CACHE: cache}, use_cache=True)
        parts.append(out.logits)
    assert largest(torch.cat(parts, 1), whole) < 1e-12 * max(1.0, float(whole.detach().abs().max()))


# The function itself.


def test_shaped_attention_has_first_and_second_derivatives():
    """Only torch's kernel without fusion has a second derivative."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 2, 3, 2), (2, 1, 3, 2), (2, 1, 3, 2), (2,), (2,))
    inputs = [torch.randn(*x, generator=generator, dtype=torch.float64, requires_grad=True) for x in shapes]
    mask = torch.tensor([[True, True, False], [False, True, True]])[:, None, None]

    def attention(query, key, value, gamma1, gamma2):
        return shaped_attention(query, key, value, gamma1=gamma1, gamma2=gamma2, scale=0.7, mask=mask, is_causal=True)

    assert torch.autograd.gradcheck(attention, inputs)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(attention, inputs)


def test_dropout_preserves_the_mean():
    """Dropout acts on the softmax, not on the identity and C̄. The wrong twin has another γ₂."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 5, 4, generator=generator, dtype=torch.float64)
    options = {"gamma1": 1.3, "gamma2": 0.7, "scale": 0.5, "is_causal": True}
    torch.manual_seed(1)
    many = query.expand(4000, -1, -1, -1), key.expand(4000, -1, -1, -1), value.expand(4000, -1, -1, -1)
    dropped = shaped_attention(*many, **options, dropout=0.25)
    assert largest(dropped[0], dropped[1]) > 1e-3
    wanted = shaped_attention(query, key, value, **options)
    deviations = (dropped.mean(0) - wanted[0]) / (dropped.std(0) / 4000**0.5 + 1e-12)
    assert deviations.abs().max() < 4.5  # the largest of 40
    wrong = shaped_attention(query, key, value, **options | {"gamma2": 0.6})
    assert ((dropped.mean(0) - wrong[0]) / (dropped.std(0) / 4000**0.5 + 1e-12)).abs().max() > 4.5


class Bare(torch.nn.Module):
    is_causal = False


def test_attention_function_refuses_unknown_terms():
    query = torch.randn(1, 2, 3, 4)
    with pytest.raises(InputError, match="This Bare is not shaped: its gains were never loaded"):
        shaped_attention_forward(Bare(), query, query, query, None)
    attention = shaped("llama").layers[0].self_attn
    for name in ("softcap", "position_bias", "s_aux", "cache"):
        with pytest.raises(InputError, match=rf"no meaning for .* \({name}\)"):
            shaped_attention_forward(attention, query, query, query, None, **{name: 1.0})
    with pytest.raises(InputError, match="a sliding window of 2 needs an attention mask"):
        shaped_attention_forward(attention, query, query, query, None, sliding_window=2)


def test_shaped_model_refuses_another_attention():
    model = FAMILIES["bert"]()
    for kind in ("sdpa", "eager"):
        model.set_attn_implementation(kind)
        with pytest.raises(InputError, match=f"its attention is 'shaped' and cannot become '{kind}'"):
            model(**given("bert"), use_cache=False)
    model.set_attn_implementation("shaped")
    model(**given("bert"), use_cache=False)


@pytest.mark.parametrize(("family", "tokens"), [("bert", TOKENS - 1), ("llama", TOKENS + 1)])
def test_model_refuses_padding_of_another_length(family, tokens):
    model = FAMILIES[family]()
    with pytest.raises(InputError, match="mask must have the shape"):
        model(**given(family), attention_mask=torch.ones(BATCH, tokens), use_cache=False)
    with pytest.raises(InputError, match=rf"attention_mask must have the shape \({BATCH}, {TOKENS}\)"):
        model(**given(family), attention_mask=torch.ones(BATCH + 1, TOKENS), use_cache=False)


def test_model_refuses_masks_of_another_shape():
    model = FAMILIES["bert"]()
    with pytest.raises(InputError, match="mask must be boolean"):
        model(**given("bert"), attention_mask=torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.long))
    with pytest.raises(InputError, match="mask must have the shape"):
        model(**given("bert"), attention_mask=torch.ones(BATCH + 1, 1, TOKENS, TOKENS, dtype=torch.bool))
