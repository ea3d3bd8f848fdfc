"""The paper's architecture as a Hugging Face model: its formula, law, heads and the Trainer."""

import copy
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    DynamicCache,
    Trainer,
    TrainingArguments,
)

from hf_models import (
    BATCH,
    KV_HEADS,
    MASKS,
    POSITIONS,
    TEXT,
    TOKENS,
    VOCABULARY,
    Blocks,
    added_mask,
    by_hand,
    chain,
    inputs_of,
    loud,
    network,
    ours,
    padding,
    unlike,
)
from limitformer import InputError
from limitformer.hf import (
    ShapedTransformerConfig,
    ShapedTransformerForCausalLM,
    ShapedTransformerForMaskedLM,
    ShapedTransformerForSequenceClassification,
    ShapedTransformerModel,
)
from limitformer.nn import Residual, RoundingWarning, gains, rounding, without_decay
from statistics_checks import assert_same_law

HEADS_OF = {
    "masked": (ShapedTransformerForMaskedLM, AutoModelForMaskedLM, False),
    "causal": (ShapedTransformerForCausalLM, AutoModelForCausalLM, True),
    "classes": (ShapedTransformerForSequenceClassification, AutoModelForSequenceClassification, False),
}


def largest(one, other):
    return float((one - other).detach().abs().max())


def configuration(**options):
    return ShapedTransformerConfig(**(TEXT | {"num_key_value_heads": KV_HEADS} | options))


def built(kind, seed=0, **options):
    torch.manual_seed(seed)
    return unlike(loud(HEADS_OF[kind][0](configuration(**options)).double().eval()))


def bias_of(mask, causal):
    """Return the term that is added to the logits."""
    bias = torch.zeros(BATCH, 1, TOKENS, TOKENS, dtype=torch.float64)
    attention_mask = MASKS[mask].get("attention_mask")
    if attention_mask is not None and attention_mask.dim() == 4:  # stands for itself
        return added_mask(attention_mask, bias, bias)
    for b in range(BATCH):
        for i in range(TOKENS):
            for j in range(TOKENS):
                unseen = attention_mask is not None and not attention_mask[b, j]
                unseen |= causal and j > i
                unseen |= mask == "packed" and i // 4 != j // 4
                if unseen:
                    bias[b, 0, i, j] = -torch.inf
    return bias


@pytest.mark.parametrize(
    ("mask", "causal"), [(mask, causal) for mask in MASKS for causal in (False, True) if mask != "packed" or causal]
)
@pytest.mark.parametrize("per_head", [False, True])
def test_model_equals_its_formula_written_out(mask, causal, per_head):
    model = ours(causal, per_head=per_head, tau0=0.7)
    inputs = inputs_of("text") | MASKS[mask]
    out = model(**inputs, output_hidden_states=True)
    positions = MASKS[mask].get("position_ids", torch.arange(TOKENS))
    wanted = by_hand(model, inputs["input_ids"], bias_of(mask, causal), positions)
    assert len(out.hidden_states) == len(wanted) == 3
    for one, other in zip(out.hidden_states, wanted, strict=True):
        assert largest(one, other) < 1e-12
    assert torch.equal(out.last_hidden_state, out.hidden_states[-1])
    names, parameters = zip(*model.named_parameters(), strict=True)
    one = torch.autograd.grad(out.last_hidden_state.square().sum(), parameters)
    other = torch.autograd.grad(wanted[-1].square().sum(), parameters)
    for name, a, b in zip(names, one, other, strict=True):
        assert largest(a, b) < 1e-12 * max(1.0, float(b.abs().max())), name
    wrong = by_hand(model, inputs["input_ids"], bias_of(mask, not causal), positions)[-1]
    assert largest(out.last_hidden_state, wrong) > 1e-3 or mask in ("boolean", "added", "packed")


@pytest.mark.parametrize("causal", [False, True])
def test_token_without_logits_attends_only_to_itself(causal):
    model = ours(causal)
    with torch.no_grad():
        for gain in gains(model):
            gain.value.fill_(gain.start)
        for block in model.blocks:
            block.attention.query.weight.zero_()
    ids = inputs_of("text")["input_ids"]
    for mask in ("none", "right padding", "left padding"):
        out = model(ids, **MASKS[mask]).last_hidden_state
        for token in range(TOKENS):
            alone = model(ids[:, token : token + 1], position_ids=torch.full((BATCH, 1), token)).last_hidden_state
            assert largest(out[:, token], alone[:, 0]) < 1e-13


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", HEADS_OF)
def test_padded_model_equals_the_unpadded(kind, left):
    model, mask = built(kind, num_labels=3), padding(left)
    ids = inputs_of("text")["input_ids"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    place = slice(6, None) if left else slice(0, TOKENS - 6)
    padded = model(ids, attention_mask=mask, position_ids=positions).logits[2]
    alone = model(ids[2:, place]).logits[0]
    assert largest(padded if kind == "classes" else padded[place], alone) < 1e-12
    ignored = model(ids, attention_mask=torch.ones_like(mask), position_ids=positions).logits[2]
    if left or kind != "causal":
        assert largest(ignored if kind == "classes" else ignored[place], alone) > 1e-3


def test_untrained_model_has_the_law_of_the_exact_chain():
    """The model draws its weights with four heads; the wrong twin is the chain at half the width."""
    options = {"hidden_size": 16, "num_hidden_layers": 5, "num_key_value_heads": 4, "intermediate_size": 32}
    model = ShapedTransformerModel(configuration(**options, residual_gamma=0.5, tau0=0.5)).double().eval()

    def draw(_):
        for module in model.modules():
            model._init_weights(module)

    statistics = network(Blocks(model.blocks), draw, samples=2000, width=16)
    assert_same_law(chain(16), statistics, wrong=chain(8))


def test_initial_weights_have_their_variances():
    """Mean squares are within 4.5 standard errors for all kinds, also with `initial="paper"`."""
    n, hidden = 64, 256
    sizes = {"hidden_size": n, "num_key_value_heads": 4, "intermediate_size": hidden, "num_hidden_layers": 3}
    sizes |= {"vocab_size": 2000, "max_position_embeddings": 200}
    law = {"shaped": 2 / (1 + (1 - 1 / 8) ** 2) / hidden, "pre_ln": 2 / hidden, "post_ln": 2 / hidden}
    for kind in ("shaped", "pre_ln", "post_ln"):
        for initial in ("law", "paper"):
            torch.manual_seed(0)
            config = configuration(**sizes, kind=kind, initial=initial)
            model = ShapedTransformerForMaskedLM(config)
            logit = n**-1.5 if kind == "shaped" else 1 / n
            stated = {"query": logit, "key": logit, "value": 1 / n, "output": 1 / n, "pre": 1 / n}
            stated |= {"post": law[kind] if initial == "law" else 1 / n}
            stated |= {"tokens": 0.5, "positions": 0.5, "head": 1 / n}
            for name, module in model.named_modules():
                last = name.rpartition(".")[2]
                if last in stated and isinstance(module, nn.Linear | nn.Embedding):
                    weight = module.weight.detach().double()
                    error = (2 / weight.numel()) ** 0.5
                    ratio = float(weight.square().mean() / stated[last])
                    assert abs(ratio - 1) < 4.5 * error, (kind, initial, name, ratio)
                    assert getattr(module, "bias", None) is None or not module.bias.any()
            for module in model.modules():
                if isinstance(module, Residual):
                    assert (module.gamma.item(), module.lam.item()) == pytest.approx((0.2, 0.96**0.5))


def test_tokens_keep_their_norm_at_every_depth():
    torch.manual_seed(0)
    model = ShapedTransformerModel(configuration(hidden_size=64, num_hidden_layers=12, num_key_value_heads=4))
    states = model(inputs_of("text", batch=16)["input_ids"], output_hidden_states=True).hidden_states
    norms = torch.stack([state.square().mean((-1, -2, -3)) for state in states])
    assert (norms - 1).abs().max() < 0.25


# Configuration.


def test_configuration_has_the_defaults_of_the_paper():
    config = ShapedTransformerConfig()
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (18, 768, 8)
    assert (config.intermediate_size, config.max_position_embeddings, config.vocab_size) == (3072, 128, 32000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_attention_heads": 3}, r"heads must divide width; got width=16, heads=3. Nearest: 2 or 4"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads must divide num_attention_heads; got 3"),
        ({"hidden_size": 0}, r"hidden_size must be at least 1; got 0"),
        ({"vocab_size": 1.5}, r"vocab_size must be a whole number; got 1.5"),
        ({"num_hidden_layers": -1}, r"num_hidden_layers must be at least 1"),
        ({"intermediate_size": 0}, r"intermediate_size must be at least 1"),
        ({"max_position_embeddings": 0}, r"max_position_embeddings must be at least 1"),
        ({"kind": "mid_ln"}, r"kind must be one of shaped, pre_ln, post_ln; got 'mid_ln'"),
        ({"initial": "he"}, r"initial must be one of law, paper; got 'he'"),
        ({"residual_gamma": 1.2}, r"residual_gamma must lie in \[0, 1\]; got 1.2"),
        ({"tau0": 0.0}, r"tau0 must be positive; got 0.0"),
        ({"tau0": float("nan")}, r"tau0 must be finite"),
    ],
    ids=range(12),
)
def test_configuration_refuses_bad_values(options, message):
    with pytest.raises(InputError, match=message):
        configuration(**options)


@pytest.mark.parametrize(("name", "value"), [("kind", "preln"), ("initial", "papers")])
def test_model_refuses_unknown_words_set_after_configuration(name, value):
    config = configuration(kind="pre_ln")
    setattr(config, name, value)
    with pytest.raises(InputError, match=f"{name} must be one of .*; got '{value}'"):
        ShapedTransformerModel(config)


def test_saved_configuration_loads_unchanged(tmp_path):
    config = configuration(kind="pre_ln", residual_gamma=0.1, per_head=True, tau0=0.5, float32=True, initial="paper")
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(again, ShapedTransformerConfig)
    for name in ("kind", "residual_gamma", "per_head", "tau0", "float32", "initial", "causal", *TEXT):
        assert getattr(again, name) == getattr(config, name), name


def test_heads_do_not_change_their_configuration():
    config = configuration()
    masked, causal = ShapedTransformerForMaskedLM(config), ShapedTransformerForCausalLM(config)
    assert config.causal is None
    assert not masked.config.causal
    assert causal.config.causal
    assert causal.transformer.config is causal.config
    ids = inputs_of("text")["input_ids"]
    other = torch.cat([ids[:, :-1], (ids[:, -1:] + 1) % VOCABULARY], 1)
    for model, moves in ((masked, True), (causal, False)):
        difference = largest(model(ids).logits[:, 0], model(other).logits[:, 0])
        assert (difference > 0) == moves


def test_causal_head_refuses_causal_false(tmp_path):
    with pytest.raises(InputError, match="must be causal; got causal=False"):
        ShapedTransformerForCausalLM(configuration(causal=False))
    built("masked").save_pretrained(tmp_path)
    with pytest.raises(InputError, match="must be causal"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert ShapedTransformerForCausalLM.from_pretrained(tmp_path, causal=True).config.causal


# Use.


def test_model_refuses_more_tokens_than_positions():
    model = built("causal")
    long = torch.ones(1, POSITIONS + 1, dtype=torch.long)
    message = rf"The model has {POSITIONS} positions \(max_position_embeddings\); got {POSITIONS + 1} tokens"
    with pytest.raises(InputError, match=message):
        model(long)
    with pytest.raises(InputError, match=rf"The model has {POSITIONS} positions .*; got position {POSITIONS}"):
        model(long, position_ids=torch.arange(POSITIONS + 1)[None])
    cache = DynamicCache(config=model.config)
    model(long[:, :-1], cache=cache)
    with pytest.raises(InputError, match=message):
        model(long[:, :1], cache=cache)
    with pytest.raises(InputError, match=rf"The model has {POSITIONS} positions"):
        model.generate(long[:, :-2], max_new_tokens=8, attention_mask=torch.ones_like(long[:, :-2]), pad_token_id=0)


def test_model_refuses_unsupported_arguments():
    masked, ids = built("masked"), inputs_of("text")["input_ids"]
    with pytest.raises(InputError, match="A model that is not causal has no use for a cache"):
        masked(ids, use_cache=True)
    with pytest.raises(InputError, match=r"output_attentions must be a flag, or layers from 0 to 1; got \[2\]"):
        masked(ids, output_attentions=[2])
    with pytest.raises(InputError, match="Give input_ids or inputs_embeds"):
        masked()
    with pytest.raises(InputError, match="mask must have the shape"):
        masked(ids, attention_mask=torch.ones(BATCH, 1, TOKENS, TOKENS - 1, dtype=torch.bool))
    with pytest.raises(InputError, match=r"attention_mask must be \(batch, tokens\)"):
        built("classes")(ids, attention_mask=torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool))


@pytest.mark.parametrize("kind", HEADS_OF)
def test_losses_equal_those_of_the_logits(kind):
    model, ids = built(kind, num_labels=3), inputs_of("text")["input_ids"]
    labels = ids.clone()
    labels[0, :4] = -100
    labels = torch.tensor([0, 2, 1]) if kind == "classes" else labels
    out = model(ids, labels=labels)
    logits, wanted = (out.logits[:, :-1], labels[:, 1:]) if kind == "causal" else (out.logits, labels)
    loss = functional.cross_entropy(logits.flatten(0, -2), wanted.flatten())
    assert abs(float((out.loss - loss).detach())) < 1e-6
    assert isinstance(model(ids, return_dict=False), tuple)
    assert torch.equal(model(ids, return_dict=False)[0], out.logits)
    if kind != "classes":
        scaled = model(ids, labels=labels, num_items_in_batch=torch.tensor(7)).loss
        count = int((wanted != -100).sum())
        assert abs(float((scaled - loss * count / 7).detach())) < 1e-5


def test_one_label_is_a_regression():
    model, ids = built("classes", num_labels=1), inputs_of("text")["input_ids"]
    target = torch.randn(BATCH, dtype=torch.float64)
    out = model(ids, labels=target)
    assert out.logits.shape == (BATCH, 1)
    assert abs(float((out.loss - (out.logits[:, 0] - target).square().mean()).detach())) < 1e-12


def test_configuration_may_set_output_hidden_states():
    model, ids = ours(), inputs_of("text")["input_ids"]
    assert model(ids).hidden_states is None
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == 3


def test_model_takes_embeddings_instead_of_ids():
    model, ids = built("causal"), inputs_of("text")["input_ids"]
    logits = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    assert torch.equal(model(ids).logits, logits)


@pytest.mark.parametrize("kind", HEADS_OF)
def test_gradient_checkpointing_changes_nothing(kind):
    model, ids = built(kind).train(), inputs_of("text")["input_ids"]
    inputs = {"input_ids": ids, "attention_mask": padding(left=True)}
    parameters = list(model.parameters())
    out = model(**inputs).logits
    wanted = torch.autograd.grad(out.square().sum(), parameters)
    model.activation_checkpointing_enable()
    calls = []
    hook = model.transformer.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    again = model(**inputs).logits
    recomputed = torch.autograd.grad(again.square().sum(), parameters)
    hook.remove()
    assert len(calls) == 2  # computed again in the backward
    assert torch.equal(out, again)
    assert all(torch.equal(one, other) for one, other in zip(recomputed, wanted, strict=True))
    if kind == "causal":
        with pytest.raises(InputError, match="Gradient checkpointing would fill a cache twice"):
            model(**inputs, use_cache=True)


@pytest.mark.parametrize("kind", HEADS_OF)
def test_auto_classes_load_the_saved_model(kind, tmp_path):
    model, auto = built(kind, num_labels=3).float(), HEADS_OF[kind][1]
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is type(model)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.config.causal == HEADS_OF[kind][2]
    ids = inputs_of("text")["input_ids"]
    assert torch.equal(again(ids).logits, model(ids).logits)
    base = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(base(ids).last_hidden_state, model.transformer(ids).last_hidden_state)
    for kind_of_attention in ("sdpa", "eager"):  # it has one of its own
        other = auto.from_pretrained(tmp_path, attn_implementation=kind_of_attention)
        assert torch.equal(other(ids).logits, model(ids).logits)
    assert auto.from_pretrained(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16
    for one, other in zip(gains(model), gains(again), strict=True):
        assert one.start == other.start
    assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)
    torch.save(model, tmp_path / "whole.pt")
    assert torch.equal(torch.load(tmp_path / "whole.pt", weights_only=False)(ids).logits, model(ids).logits)


def test_missing_head_is_drawn_with_its_variance(tmp_path):
    """The body is loaded; the head is N(0, 1/n) with bias 0."""
    torch.manual_seed(0)
    model = ShapedTransformerForMaskedLM(configuration(hidden_size=64, num_key_value_heads=4))
    unlike(model).save_pretrained(tmp_path)
    other, report = ShapedTransformerForSequenceClassification.from_pretrained(
        tmp_path, num_labels=40, output_loading_info=True
    )
    assert set(report["missing_keys"]) == {"classifier.weight", "classifier.bias"}
    assert set(report["unexpected_keys"]) == {"head.weight", "head.bias"}
    for name, value in model.transformer.state_dict().items():
        assert torch.equal(value, other.transformer.state_dict()[name]), name
    weight = other.classifier.weight.detach()
    assert abs(float(weight.square().mean()) * 64 - 1) < 4 * (2 / weight.numel()) ** 0.5
    assert not other.classifier.bias.any()
    assert other.classifier.out_features == 40


def test_missing_gains_have_their_start_values(tmp_path):
    model = built("masked")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    others = {name: value for name, value in weights.items() if "gamma" not in name and "lam" not in name}
    save_file(others, tmp_path / "model.safetensors", {"format": "pt"})
    again = AutoModelForMaskedLM.from_pretrained(tmp_path)
    for module in again.modules():
        if isinstance(module, Residual):
            assert (module.gamma.item(), module.lam.item()) == pytest.approx((0.2, 0.96**0.5))
    for block in again.transformer.blocks:
        assert torch.equal(block.attention.gamma1.value, torch.ones_like(block.attention.gamma1.value))


@pytest.mark.parametrize("kind", ["masked", "causal"])
def test_vocabulary_can_grow(kind):
    model, ids = built(kind), inputs_of("text")["input_ids"]
    before = model(ids).logits
    model.resize_token_embeddings(VOCABULARY + 7, mean_resizing=False)
    after = model(ids).logits
    assert after.shape == (*before.shape[:-1], VOCABULARY + 7)
    assert largest(after[..., :VOCABULARY], before) < 1e-12
    assert model.config.vocab_size == VOCABULARY + 7


def test_saved_configuration_names_the_model(tmp_path):
    built("causal").save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "shaped_transformer"
    assert saved["architectures"] == ["ShapedTransformerForCausalLM"]
    assert saved["causal"] is True


def test_strengths_norms_and_biases_have_no_weight_decay():
    for kind in ("shaped", "pre_ln", "post_ln"):
        model = ShapedTransformerForMaskedLM(configuration(kind=kind))
        decayed = {name for name, _ in model.named_parameters()} - set(without_decay(model))
        assert all(name.endswith("weight") and ".norm" not in name for name in decayed)
        assert not any(word in name for name in decayed for word in ("gamma", "lam", "negative", ".pre.a", ".post.a"))


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = inputs_of("text", seed=index, batch=1)["input_ids"][0]
        return {"input_ids": ids, "labels": ids}


def arguments(folder, **options):
    return TrainingArguments(
        str(folder), max_steps=6, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], use_cpu=True,
        save_steps=3, logging_steps=3, disable_tqdm=True, dataloader_pin_memory=False, **options,
    )  # fmt: skip


def test_trainer_trains_and_resumes(tmp_path):
    """3 + 3 steps equal 6 to the last bit, with gradient checkpointing and accumulation."""
    options = {"gradient_accumulation_steps": 2, "activation_checkpointing": True}

    def trained(folder, **resume):
        torch.manual_seed(0)
        model = ShapedTransformerForMaskedLM(configuration())
        trainer = Trainer(model, arguments(folder, **options), train_dataset=Texts())
        trainer.train(**resume)
        return model

    whole = trained(tmp_path / "whole")
    resumed = trained(tmp_path / "again", resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    fresh = ShapedTransformerForMaskedLM(configuration())
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert any(not torch.equal(value, fresh.state_dict()[name]) for name, value in whole.state_dict().items())
    assert all((gain.value != gain.start).all() for gain in gains(whole))


@pytest.mark.parametrize("head", ["masked", "causal"])
def test_trainer_evaluates_and_predicts(head, tmp_path):
    """Predictions are logits only, although a model also returns a cache."""
    model, texts = HEADS_OF[head][0](configuration()), Texts()
    trainer = Trainer(model, arguments(tmp_path))
    with torch.no_grad():
        wanted = model.eval()(input_ids=torch.stack([texts[k]["input_ids"] for k in range(16)]), use_cache=False).logits
    prediction = trainer.predict(texts)
    assert prediction.predictions.shape == wanted.shape
    assert np.abs(prediction.predictions - wanted.numpy()).max() < 1e-5
    assert trainer.evaluate(texts)["eval_loss"] == pytest.approx(prediction.metrics["test_loss"])


def test_classifier_leaves_the_division_of_losses_to_the_trainer(tmp_path):
    """The loss is a mean over a batch, so that the Trainer must divide by the accumulation steps."""
    model = ShapedTransformerForSequenceClassification(configuration(num_labels=2))
    trainer = Trainer(model, arguments(tmp_path, gradient_accumulation_steps=2), train_dataset=Texts())
    assert trainer.model_accepts_loss_kwargs is False


def test_model_in_16_bits_warns_without_float32():
    torch.manual_seed(0)
    config = configuration(hidden_size=64, num_key_value_heads=4, num_hidden_layers=1)
    exact = ShapedTransformerModel(config).eval()
    ids = inputs_of("text")["input_ids"]
    wanted = copy.deepcopy(exact).double()(ids).last_hidden_state
    rounding.warn.cache_clear()
    with pytest.warns(RoundingWarning, match="bfloat16 resolves 1 part in 256") as caught:
        copy.deepcopy(exact).to(torch.bfloat16)(ids)
    assert len(caught) == 1
    copy.deepcopy(exact).to(torch.bfloat16)(ids)  # once a process
    config.float32 = True
    with_float32 = ShapedTransformerModel(config).eval()
    with_float32.load_state_dict(exact.state_dict())
    rounding.warn.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        with_float32(ids)  # does not warn
        with pytest.warns(RoundingWarning):
            exact(ids)
    assert largest(wanted, exact(ids).last_hidden_state) < 1e-4


@pytest.mark.parametrize("kind", ["pre_ln", "post_ln"])
def test_pre_ln_and_post_ln_equal_encoder_layers_of_torch(kind):
    torch.manual_seed(0)
    model = loud(ShapedTransformerModel(configuration(kind=kind, num_key_value_heads=4)).double().eval())
    ids, x = inputs_of("text")["input_ids"], None
    mask = padding(left=False)
    x = model.tokens(ids) + model.positions(torch.arange(TOKENS))
    for block in model.blocks:
        layer = nn.TransformerEncoderLayer(
            16, 4, 24, 0.0, batch_first=True, norm_first=kind == "pre_ln", dtype=torch.float64
        )
        attention = block.attention
        joined = torch.cat([attention.query.weight, attention.key.weight, attention.value.weight])
        norms = block.pre if kind == "pre_ln" else block.post
        weights = {
            "self_attn.in_proj_weight": joined, "self_attn.out_proj.weight": attention.output.weight,
            "linear1.weight": block.feedforward.pre.weight, "linear2.weight": block.feedforward.post.weight,
            "norm1.weight": norms["attention"].weight, "norm2.weight": norms["feedforward"].weight,
        }  # fmt: skip
        zeros = {name: torch.zeros_like(value) for name, value in layer.state_dict().items() if "bias" in name}
        layer.load_state_dict(weights | zeros)
        x = layer(x, src_key_padding_mask=mask == 0)
    x = model.norm(x)
    assert largest(model(ids, attention_mask=mask).last_hidden_state, x) < 1e-12
