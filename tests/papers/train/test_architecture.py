"""The networks that [ST] trains, as Hugging Face models: their formula, law, initial weights, losses and files."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification

from hf_models import BATCH, MASKS, TEXT, TOKENS, Blocks, added_mask, chain, explicit_matrix, inputs_of, loud, unlike
from hf_models import network as statistics_of
from limitformer import InputError
from limitformer.nn import Residual, without_decay
from limitformer.subjects.folder import load
from limitformer_papers.training.architecture import (
    ShapedTransformerConfig,
    ShapedTransformerForMaskedLM,
    ShapedTransformerForSequenceClassification,
    ShapedTransformerModel,
)
from statistics_checks import assert_same_law

HEADS_OF = {
    "masked": (ShapedTransformerForMaskedLM, AutoModelForMaskedLM),
    "classes": (ShapedTransformerForSequenceClassification, AutoModelForSequenceClassification),
}
IDS = inputs_of("text")["input_ids"]
SEEN = MASKS["right padding"]["attention_mask"]
every_head = pytest.mark.parametrize("head", HEADS_OF)


def largest(one, other):
    return float((one - other).detach().abs().max())


def configuration(**options):
    return ShapedTransformerConfig(**TEXT | options)


def built(head, **options):
    torch.manual_seed(0)
    return unlike(loud(HEADS_OF[head][0](configuration(**options)).double().eval()))


def by_hand(model, bias):
    """Return the tokens of a shaped model from its weights alone, under a mask that is added."""
    config = model.config
    dim = config.hidden_size // config.num_attention_heads
    x = model.tokens.weight[IDS] + model.positions.weight[:TOKENS]
    for block in model.blocks:
        attention, feedforward, residual = block.attention, block.feedforward, block.residual
        query, key, value = (
            (x @ getattr(attention, name).weight.T).unflatten(-1, (-1, dim)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        a = explicit_matrix(query, key, bias, attention.gamma1.value, attention.gamma2.value, dim**-0.5)
        mixed = torch.einsum("bhqk,bhkd->bqhd", a, value).flatten(2) @ attention.output.weight.T
        x = residual.attention.lam * x + residual.attention.gamma * mixed
        hidden = x @ feedforward.pre.weight.T
        hidden = hidden.clamp(min=0) + feedforward.activation.negative.value * hidden.clamp(max=0)
        x = residual.feedforward.lam * x + residual.feedforward.gamma * (hidden @ feedforward.post.weight.T)
    return x


@pytest.mark.parametrize("padded", [False, True])
def test_model_equals_its_formula_written_out(padded):
    """The wrong twin sees the padding, or only earlier tokens."""
    model = built("masked").transformer
    mask = SEEN if padded else None
    out = model(IDS, mask).last_hidden_state
    every = torch.zeros(BATCH, 1, TOKENS, TOKENS, dtype=torch.float64)
    bias = every if mask is None else added_mask(mask[:, None, None].bool(), every, every)
    wanted = by_hand(model, bias)
    assert largest(out, wanted) < 1e-12
    names, parameters = zip(*model.named_parameters(), strict=True)
    one, other = (torch.autograd.grad(each.square().sum(), parameters) for each in (out, wanted))
    for name, a, b in zip(names, one, other, strict=True):
        assert largest(a, b) < 1e-12 * max(1.0, float(b.abs().max())), name
    earlier = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]
    assert largest(out, by_hand(model, every if padded else added_mask(earlier, every, every))) > 1e-3


@pytest.mark.parametrize("kind", ["pre_ln", "post_ln"])
def test_pre_ln_and_post_ln_equal_encoder_layers_of_torch(kind):
    torch.manual_seed(0)
    model = loud(ShapedTransformerModel(configuration(kind=kind)).double().eval())
    x = model.tokens(IDS) + model.positions(torch.arange(TOKENS))
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
        x = layer(x, src_key_padding_mask=SEEN == 0)
    assert largest(model(IDS, SEEN).last_hidden_state, model.norm(x)) < 1e-12


def test_untrained_model_has_the_law_of_the_exact_chain():
    """The model draws its weights with four heads; the wrong twin is the chain at half the width."""
    torch.manual_seed(0)
    model = ShapedTransformerModel(configuration(num_hidden_layers=5, intermediate_size=32, residual_gamma=0.5))
    model = model.double().eval()
    for block in model.blocks:  # the chain has τ₀ = ½
        block.attention.scale *= 2

    def draw(_):
        for module in model.modules():
            model._init_weights(module)

    statistics = statistics_of(Blocks(model.blocks), draw, samples=800, width=16)
    assert_same_law(chain(16), statistics, wrong=chain(8))


@pytest.mark.parametrize("kind", ["shaped", "pre_ln", "post_ln"])
@pytest.mark.parametrize("initial", ["law", "paper"])
def test_initial_weights_have_their_variances(kind, initial):
    """Mean squares are within 4.5 standard errors."""
    n, hidden = 64, 256
    sizes = {"hidden_size": n, "intermediate_size": hidden, "num_hidden_layers": 3}
    torch.manual_seed(0)
    model = ShapedTransformerForMaskedLM(configuration(**sizes, vocab_size=2000, kind=kind, initial=initial))
    law = (2 / (1 + (1 - 1 / 8) ** 2) if kind == "shaped" else 2) / hidden
    logit = n**-1.5 if kind == "shaped" else 1 / n
    stated = {"query": logit, "key": logit, "value": 1 / n, "output": 1 / n, "pre": 1 / n, "head": 1 / n}
    stated |= {"post": law if initial == "law" else 1 / n, "tokens": 0.5, "positions": 0.5}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last in stated and isinstance(module, nn.Linear | nn.Embedding):
            weight = module.weight.detach().double()
            ratio = float(weight.square().mean() / stated[last])
            assert abs(ratio - 1) < 4.5 * (2 / weight.numel()) ** 0.5, (name, ratio)
            assert getattr(module, "bias", None) is None or not module.bias.any()


def test_missing_strengths_have_their_start_values(tmp_path):
    built("masked").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    others = {name: value for name, value in weights.items() if "gamma" not in name and "lam" not in name}
    save_file(others, tmp_path / "model.safetensors", {"format": "pt"})
    again = AutoModelForMaskedLM.from_pretrained(tmp_path)
    for module in again.modules():
        if isinstance(module, Residual):
            assert (module.gamma.item(), module.lam.item()) == pytest.approx((0.2, 0.96**0.5))
    assert all(block.attention.gamma1.value.item() == 1 for block in again.transformer.blocks)


@every_head
def test_auto_classes_load_the_saved_model(head, tmp_path):
    """The loader of `limitformer.check` reads it too, once the class is imported."""
    model = built(head, num_labels=3, kind="pre_ln", initial="paper", residual_gamma=0.1, float32=True)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.kind, config.initial, config.residual_gamma, config.float32) == ("pre_ln", "paper", 0.1, True)
    again, report = HEADS_OF[head][1].from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for other in (again, load(tmp_path)[0]):
        assert type(other) is type(model)
        assert torch.equal(other.eval()(IDS, SEEN).logits, model(IDS, SEEN).logits)


def test_missing_head_is_drawn_with_its_variance(tmp_path):
    """The body is loaded; the head is N(0, 1/n) with bias 0."""
    model = built("masked", hidden_size=64)
    model.float().save_pretrained(tmp_path)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "mid_ln"}, r"kind must be one of shaped, pre_ln, post_ln; got 'mid_ln'"),
        ({"initial": "he"}, r"initial must be one of law, paper; got 'he'"),
        ({"causal": True}, r"The networks of \[ST\] have causal=False; got True"),
        ({"tau0": 0.5}, r"The networks of \[ST\] have tau0=1.0; got 0.5"),
    ],
)
def test_configuration_refuses_other_networks(options, message):
    with pytest.raises(InputError, match=message):
        configuration(**options)


@every_head
def test_padded_model_equals_the_unpadded(head):
    model = built(head, num_labels=3)
    padded, alone = model(IDS, SEEN).logits[2], model(IDS[2:, :4], SEEN[2:, :4]).logits[0]
    ignored = model(IDS, torch.ones_like(SEEN)).logits[2]
    place = slice(None) if head == "classes" else slice(0, 4)
    assert largest(padded[place], alone) < 1e-12
    assert largest(ignored[place], alone) > 1e-3


@every_head
def test_losses_equal_those_of_the_logits(head):
    model, labels = built(head, num_labels=3), torch.tensor([0, 2, 1])
    if head == "masked":
        labels = IDS.clone()
        labels[0, :4] = -100
    out = model(IDS, torch.ones_like(IDS), labels=labels)
    loss = functional.cross_entropy(out.logits.flatten(0, -2), labels.flatten())
    assert abs(float((out.loss - loss).detach())) < 1e-6
    if head == "masked":  # processes that share a batch divide by the words in all of it
        shared = model(IDS, labels=labels, num_items_in_batch=torch.tensor(7)).loss
        count = int((labels != -100).sum())
        assert abs(float((shared - loss * count / 7).detach())) < 1e-5


@pytest.mark.parametrize("kind", ["shaped", "pre_ln", "post_ln"])
def test_strengths_norms_and_biases_have_no_weight_decay(kind):
    model = ShapedTransformerForMaskedLM(configuration(kind=kind))
    decayed = {name for name, _ in model.named_parameters()} - set(without_decay(model))
    assert all(name.endswith("weight") and ".norm" not in name for name in decayed)
    assert not any(word in name for name in decayed for word in ("gamma", "lam", "negative", ".pre.a", ".post.a"))
