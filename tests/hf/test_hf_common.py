"""The common tests of transformers (`test_modeling_common`, which is not installed with it) for shaped models.

They cover each family and the paper's architecture.
"""

import copy
import inspect

import pytest
import torch
import transformers
from torch import nn

from hf_models import BATCH, FOUND, HEADS, KV_HEADS, LAYERS, TEXT, TOKENS, VOCABULARY, WIDTH, config_of, inputs_of, loud
from limitformer.hf import (
    ShapedTransformerConfig,
    ShapedTransformerForCausalLM,
    ShapedTransformerForMaskedLM,
    ShapedTransformerForSequenceClassification,
    ShapedTransformerModel,
    Shaping,
    load_shaped,
    shape_model,
)
from limitformer.nn import Gain, Residual

OWN = {
    "own": ShapedTransformerModel,
    "own, masked": ShapedTransformerForMaskedLM,
    "own, causal": ShapedTransformerForCausalLM,
    "own, classes": ShapedTransformerForSequenceClassification,
}
STOCK = {
    "bert, masked": "BertForMaskedLM",
    "bert, classes": "BertForSequenceClassification",
    "roberta, masked": "RobertaForMaskedLM",
    "gpt2, causal": "GPT2LMHeadModel",
    "gpt2, classes": "GPT2ForSequenceClassification",
    "llama, causal": "LlamaForCausalLM",
    "llama, classes": "LlamaForSequenceClassification",
    "vit, classes": "ViTForImageClassification",
    "mistral, causal": "MistralForCausalLM",
    "qwen3, causal": "Qwen3ForCausalLM",
    "electra, masked": "ElectraForMaskedLM",
}
TEXTS = [name for name in (*OWN, *STOCK) if not name.startswith("vit")]
every_model = pytest.mark.parametrize("name", [*OWN, *STOCK])
every_text = pytest.mark.parametrize("name", TEXTS)
every_loss = pytest.mark.parametrize("name", [name for name in (*OWN, *STOCK) if name != "own"])
every_vocabulary = pytest.mark.parametrize("name", [name for name in TEXTS if name.endswith(("masked", "causal"))])
every_class = pytest.mark.parametrize("name", [name for name in (*OWN, *STOCK) if name.endswith("classes")])


def family(name):
    return name.partition(",")[0]


def config(name, **options):
    if name in OWN:
        return ShapedTransformerConfig(**(TEXT | {"num_key_value_heads": KV_HEADS} | options))
    return config_of(family(name), **options)


def plain_class(name):
    return OWN[name] if name in OWN else getattr(transformers, STOCK[name])


def built(name, seed=0, **options):
    """A small model, in evaluation mode, whose attention is far from uniform."""
    torch.manual_seed(seed)
    model = plain_class(name)(config(name, **options))
    model = model if name in OWN else shape_model(model, shaping_of(name))
    return loud(model.eval(), std=0.2)


def shaping_of(name):
    """Only the attention of families that are found by structure can be shaped."""
    return Shaping() if family(name) in FOUND else Shaping(residual_gamma=0.3)


def loaded(name, folder, **options):
    return OWN[name].from_pretrained(folder, **options) if name in OWN else load_shaped(folder, **options)


def given(name, batch=BATCH):
    inputs = inputs_of("vit" if family(name) == "vit" else "text", batch=batch)
    return {key: x.float() if x.is_floating_point() else x for key, x in inputs.items()}


def labels(name, batch=BATCH):
    return torch.arange(batch) % 2 if name.endswith("classes") else given(name, batch)["input_ids"]


def first(out):
    """The logits, or the tokens of a model without a head."""
    return out.logits if "logits" in out else out.last_hidden_state


def run(model, name, **options):
    return first(model(**given(name), **options))


def trainable(model):
    return {key: value for key, value in model.named_parameters() if value.requires_grad}


# Saving and loading.


@every_model
def test_saved_model_loads_unchanged(name, tmp_path):
    """The model is saved in one file and in shards, and a second time."""
    model = built(name)
    model.save_pretrained(tmp_path / "a", max_shard_size="6KB")
    again, report = loaded(name, tmp_path / "a", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(run(again, name), run(model, name))
    assert all(value.is_contiguous() for value in again.parameters())
    other = built(name, seed=1)
    other.load_state_dict(model.state_dict())
    assert torch.equal(run(other, name), run(model, name))


@every_model
def test_torch_save_load_and_deepcopy(name, tmp_path):
    """Attentions are not requested, as the hooks of the library for them cannot be pickled."""
    model = built(name)
    run(model, name)
    torch.save(model, tmp_path / "whole.pt")
    run(model, name, output_attentions=True)
    for again in (torch.load(tmp_path / "whole.pt", weights_only=False), copy.deepcopy(model)):
        assert type(again) is type(model)
        assert torch.equal(run(again, name), run(model, name))


@every_model
def test_loading_casts_to_a_dtype(name, tmp_path):
    """A dtype may be a name; a model that was saved in 16 bits loads in 16 bits."""
    built(name).save_pretrained(tmp_path / "a")
    half = loaded(name, tmp_path / "a", dtype="float16")
    assert half.dtype == torch.float16
    half.save_pretrained(tmp_path / "b")
    again = loaded(name, tmp_path / "b")
    assert again.dtype == torch.float16
    assert {key: value.dtype for key, value in again.state_dict().items()} == {
        key: value.dtype for key, value in half.state_dict().items()
    }


@every_model
def test_model_can_be_built_on_the_meta_device(name):
    """All parameters are then on the meta device."""
    with torch.device("meta"):
        model = plain_class(name)(config(name))
        model = model if name in OWN else shape_model(model, shaping_of(name))
    assert {value.device.type for value in model.parameters()} == {"meta"}
    assert set(model.state_dict()) == set(built(name).state_dict())


@every_class
def test_from_pretrained_with_mismatched_sizes(name, tmp_path):
    model = built(name)
    model.save_pretrained(tmp_path)
    with pytest.raises((RuntimeError, ValueError), match="ignore_mismatched_sizes"):
        loaded(name, tmp_path, num_labels=42)
    other = loaded(name, tmp_path, num_labels=42, ignore_mismatched_sizes=True)
    assert run(other, name).shape == (BATCH, 42)
    for key, value in model.base_model.state_dict().items():
        assert torch.equal(other.base_model.state_dict()[key], value), key
    assert all(value.isfinite().all() for value in other.parameters())


# Initialisation.


@every_model
def test_initialisation_reaches_every_parameter_of_our_own(name):
    """Initialisation replaces every NaN; gains, λ and γ have their start values."""
    if name not in OWN:
        name = {"masked": "own, masked", "causal": "own, causal", "classes": "own, classes"}[name.rpartition(" ")[2]]
    model = built(name)
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(torch.nan)
    for module in model.modules():
        model._init_weights(module)
    assert all(value.isfinite().all() for value in model.parameters())
    for module in model.modules():
        if isinstance(module, Gain):
            assert (module.value == module.start).all()
        if isinstance(module, Residual):
            assert (module.gamma.item(), module.lam.item()) == pytest.approx((0.2, 0.96**0.5))


@pytest.mark.parametrize("name", STOCK)
def test_loading_draws_missing_weights(name, tmp_path):
    """A new head is drawn, and no weight is uninitialised memory."""
    model = built(name)
    model.save_pretrained(tmp_path)
    heads = ("Bert", "Roberta", "GPT2", "Llama", "Mistral", "Qwen3", "Electra")
    other = {kind.lower(): f"{kind}ForTokenClassification" for kind in heads} | {"vit": "ViTModel"}
    again = load_shaped(tmp_path, getattr(transformers, other[family(name)]))
    assert all(value.isfinite().all() and value.abs().max() < 1e3 for value in again.parameters())


# Outputs.


@every_model
def test_outputs_do_not_depend_on_the_batch(name):
    """Two calls agree, and a text or image has the same outputs alone."""
    model = built(name)
    together = run(model, name)
    assert torch.equal(run(model, name), together)
    for k in range(BATCH):
        alone = first(model(**{key: x[k : k + 1] for key, x in given(name).items()}))
        assert torch.allclose(alone[0], together[k], atol=1e-5)


@every_model
def test_forward_has_the_arguments_of_transformers(name):
    names = list(inspect.signature(plain_class(name).forward).parameters)
    wanted = "pixel_values" if family(name) == "vit" else "input_ids"
    assert names[1] == plain_class(name).main_input_name == wanted


@every_model
def test_hidden_states_output(name):
    """The argument and the configuration return the same states, of the right shapes."""
    model = built(name)
    out = model(**given(name), output_hidden_states=True)
    tokens = out.hidden_states[0].shape[1]
    assert [state.shape for state in out.hidden_states] == [(BATCH, tokens, WIDTH)] * (LAYERS + 1)
    assert model(**given(name)).get("hidden_states") is None
    model.config.output_hidden_states = True
    by_configuration = model(**given(name)).hidden_states
    assert all(torch.equal(a, b) for a, b in zip(by_configuration, out.hidden_states, strict=True))


@every_model
def test_attention_outputs(name):
    """There is one a layer, for all heads, also together with hidden states."""
    model = built(name)
    out = model(**given(name), output_attentions=True, output_hidden_states=True)
    tokens = out.hidden_states[0].shape[1]
    assert [a.shape for a in out.attentions] == [(BATCH, HEADS, tokens, tokens)] * LAYERS
    plain = model if name in OWN else plain_class(name)(config(name, attn_implementation="eager"))
    assert list(out) == list(plain(**given(name), output_attentions=True, output_hidden_states=True))
    assert torch.equal(first(out), run(model, name))
    assert torch.equal(first(model(**given(name), output_attentions=True)), first(out))


@every_model
def test_retain_grad_of_hidden_states_and_attentions(name):
    model = built(name)
    out = model(**given(name), output_attentions=True, output_hidden_states=True)
    out.hidden_states[0].retain_grad()
    out.attentions[0].retain_grad()
    first(out).flatten()[0].backward()
    assert out.hidden_states[0].grad.abs().max() > 0
    assert out.attentions[0].grad.abs().max() > 0


def flat(outputs):
    """Return all tensors in outputs, in order."""
    for value in outputs:
        if isinstance(value, tuple | list):
            yield from flat(value)
        elif isinstance(value, torch.Tensor):
            yield value


@every_model
def test_outputs_as_tuple_and_by_name_are_equal(name):
    model = built(name)
    for options in ({}, {"output_hidden_states": True}, {"output_hidden_states": True, "output_attentions": True}):
        by_name, as_tuple = (model(**given(name), return_dict=named, **options) for named in (True, False))
        assert isinstance(as_tuple, tuple)
        pairs = list(zip(flat(by_name.to_tuple()), flat(as_tuple), strict=True))
        assert len(pairs) > sum(len(by_name[key]) for key in ("hidden_states", "attentions") if key in by_name)
        assert all(torch.equal(one, other) for one, other in pairs)


@every_text
def test_embeddings_in_place_of_ids(name):
    model = built(name)
    embedded = model.get_input_embeddings()(given(name)["input_ids"])
    if family(name) in ("gpt2", "llama") and name.endswith("classes"):  # these look for the last token by its id
        model.config.pad_token_id = None
        actual, wanted = (
            model.base_model(**x, use_cache=False).last_hidden_state for x in ({"inputs_embeds": embedded}, given(name))
        )
        assert torch.equal(actual, wanted)
    else:
        assert torch.equal(first(model(inputs_embeds=embedded)), run(model, name))


@every_model
def test_feed_forward_in_chunks(name):
    """Families that support it split; the others return the same."""
    wanted = run(built(name), name)
    assert torch.allclose(run(built(name, chunk_size_feed_forward=1), name), wanted, atol=1e-6)


# Training.


@every_loss
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_every_parameter_has_a_gradient_with_checkpointing(name, reentrant):
    """Activation checkpointing of either kind changes no gradient, and can be switched off."""

    def gradients(checkpointing):
        model = built(name).train()
        parameters = trainable(model)
        if checkpointing is not None:
            model.activation_checkpointing_enable({"use_reentrant": checkpointing})
            assert model.is_activation_checkpointing
        options = {"use_cache": False} if name.endswith("causal") else {}
        model(**given(name), labels=labels(name), **options).loss.backward()
        model.activation_checkpointing_disable()
        assert not model.is_activation_checkpointing
        return {key: value.grad for key, value in parameters.items()}

    recomputed = gradients(reentrant)
    unused = {key for key, value in recomputed.items() if value is None}
    assert not any(word in key for key in unused for word in ("gamma", "lam", "query", "attn"))
    assert all("pooler" in key or "layernorm" in key.lower() or "ln_" in key or "token_type" in key for key in unused)
    if reentrant is not None:
        for key, wanted in gradients(None).items():
            assert (wanted is None) == (recomputed[key] is None), key
            assert wanted is None or torch.allclose(recomputed[key], wanted, atol=1e-6), key


@every_class
@pytest.mark.parametrize(
    ("problem", "number", "target"),
    [
        ("regression", 1, torch.tensor([0.3, -1.0, 2.0])),
        ("single_label_classification", 4, torch.tensor([0, 3, 1])),
        ("multi_label_classification", 4, torch.tensor([[1.0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]])),
    ],
    ids=["numbers", "one label", "many labels"],
)
def test_problem_types(name, problem, number, target):
    model = built(name, num_labels=number, problem_type=problem)
    out = model(**given(name), labels=target)
    assert out.logits.shape == (BATCH, number)
    losses = {1: nn.functional.mse_loss, 4: nn.functional.cross_entropy}
    measure = nn.functional.binary_cross_entropy_with_logits if target.dim() == 2 else losses[number]
    assert torch.allclose(out.loss, measure(out.logits.squeeze(-1) if number == 1 else out.logits, target))
    out.loss.backward()


# Embeddings and heads.


@every_text
def test_get_and_set_input_embeddings(name):
    model = built(name)
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding)
    new = nn.Embedding(VOCABULARY, WIDTH)
    before = run(model, name)
    model.set_input_embeddings(new)
    assert model.get_input_embeddings() is new
    assert not torch.equal(run(model, name), before)


@every_text
@pytest.mark.parametrize("number", [VOCABULARY + 10, VOCABULARY - 5])
def test_resize_embeddings(name, number):
    """The vocabulary grows and shrinks; common ids have the same outputs."""
    model, ids = built(name), given(name)["input_ids"] % (VOCABULARY - 5)
    before, weight = first(model(ids)), model.get_input_embeddings().weight.detach().clone()
    resized = model.resize_token_embeddings(number, mean_resizing=False)
    common = min(number, VOCABULARY)
    assert model.config.vocab_size == resized.weight.shape[0] == number
    assert torch.equal(resized.weight[:common], weight[:common])
    after = first(model(ids))
    if name.endswith(("masked", "causal")):
        assert after.shape[-1] == model.get_output_embeddings().weight.shape[0] == number
        assert torch.allclose(after[..., :common], before[..., :common], atol=1e-6)
    else:
        assert torch.allclose(after, before, atol=1e-6)
    assert model.resize_token_embeddings(number, pad_to_multiple_of=16, mean_resizing=False).weight.shape[0] % 16 == 0


@every_vocabulary
@pytest.mark.parametrize("tied", [False, True])
def test_tied_weights(name, tied, tmp_path):
    """Tied weights stay one parameter after saving, resizing and loading."""
    torch.manual_seed(0)
    model = built(name, tie_word_embeddings=tied)

    def same(one):
        return one.get_output_embeddings().weight is one.get_input_embeddings().weight

    assert same(model) == tied
    model.save_pretrained(tmp_path)
    again, report = loaded(name, tmp_path, output_loading_info=True)
    assert same(again) == tied
    assert not report["missing_keys"]
    assert torch.equal(run(again, name), run(model, name))
    again.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    assert same(again) == tied


@pytest.mark.parametrize("name", ["own, causal", "gpt2, causal", "llama, causal"])
def test_logits_to_keep(name):
    """Equality is up to rounding, as a product of fewer rows may use another kernel."""
    model = built(name).double()
    whole = run(model, name)
    places = torch.tensor([1, 4, TOKENS - 1])
    for positions, wanted in ((1, whole[:, -1:]), (3, whole[:, -3:]), (places, whole[:, places])):
        logits = run(model, name, logits_to_keep=positions)
        assert logits.shape == wanted.shape
        assert (logits - wanted).abs().max() < 1e-13 * whole.abs().max()


@every_text
def test_models_take_masks_of_four_dimensions(name):
    """A causal mask (batch, 1, queries, keys) does not change a causal model."""
    model = built(name)
    lower = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().expand(BATCH, 1, -1, -1)
    if name.endswith("classes") or name == "own":
        model = model.base_model
    actual = first(
        model(**given(name), attention_mask=lower, **({} if family(name) != "gpt2" else {"use_cache": False}))
    )
    wanted = first(model(**given(name)))
    causal = name.endswith("causal") or family(name) in ("gpt2", "llama")
    assert torch.allclose(actual, wanted, atol=1e-5) == causal
