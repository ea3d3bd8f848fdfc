"""Callbacks write the same numbers about a model as explicit computations."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, TrainerControl, TrainerState

from limitformer import hf
from limitformer.base.errors import InputError
from limitformer.nn import Learn, Logits, Recover, Stack, attention_matrix, entropy, gains, shaped_block, visibility
from limitformer_papers.training import Correlation, Entropy, Gains, GradientNorms, Log, ShapingSchedule
from limitformer_papers.training.architecture import ShapedTransformerConfig, ShapedTransformerForMaskedLM
from limitformer_papers.training.callbacks import mean_correlation

VOCABULARY = 40
SIZES = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 32}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def explicit_entropy(query, key, scale, mask=None):
    """Return −Σ p log p of every row, (b, h, q), from the whole matrix."""
    logits = query.double() @ key.double().repeat_interleave(query.shape[1] // key.shape[1], 1).mT * scale
    p = torch.softmax(logits if mask is None else logits.masked_fill(~mask, -torch.inf), -1)
    return -torch.special.xlogy(p, p).sum(-1)


def qk(queries=70, keys=70):
    return torch.randn(3, 4, queries, 8), torch.randn(3, 2, keys, 8)


@pytest.mark.parametrize(("causal", "padded"), [(False, ""), (True, ""), (False, "left"), (True, "right")])
def test_entropy_equals_explicit(causal, padded):
    query, key = qk()
    lower = torch.ones(70, 70, dtype=torch.bool).tril() if causal else torch.ones(70, 70, dtype=torch.bool)
    seen = torch.arange(70) < torch.tensor([70, 50, 20] if padded else [70] * 3)[:, None]
    seen = seen.flip(1) if padded == "left" else seen
    mask = seen[:, None, None] & lower
    rows = explicit_entropy(query, key, 0.7, mask | ~mask.any(-1, keepdim=True))
    expected = (rows * seen[:, None]).sum((0, 2)) / seen.sum()
    there = seen[:, None, None] if padded else None
    visible = Logits(query, key, 0.7, mask=visibility(there, is_causal=causal, queries=70, keys=70))
    np.testing.assert_allclose(entropy(visible), expected, rtol=1e-12)
    if padded:
        assert not np.allclose(expected, rows.mean((0, 2)), rtol=1e-3)  # padding would have counted
    else:
        np.testing.assert_allclose(entropy(Logits(query, key, 0.7, is_causal=causal)), expected, rtol=1e-12)
        assert not np.allclose(entropy(Logits(query, key, 0.7 * 1.001, is_causal=causal)), expected, rtol=1e-6)


def test_entropy_with_cache_and_additive_mask_equals_explicit():
    query, key = qk(queries=3, keys=10)
    added = torch.randn(3, 1, 3, 10).masked_fill(torch.rand(3, 1, 3, 10) < 0.2, -torch.inf)
    added[..., [0, 1, 2], [7, 8, 9]] = 0.0
    p = torch.softmax(query.double() @ key.double().repeat_interleave(2, 1).mT * 0.5 + added, -1)
    expected = -torch.special.xlogy(p, p).sum(-1).mean((0, 2))
    np.testing.assert_allclose(entropy(Logits(query, key, 0.5, mask=added)), expected, rtol=1e-6)


def explicit_correlation(x, seen):
    values = []
    for row, visible in zip(x.double(), seen, strict=True):
        tokens = row[visible.bool()]
        gram = torch.nn.functional.cosine_similarity(tokens[:, None], tokens[None], dim=-1)
        count = len(tokens)
        values.append(float((gram.sum() - count) / (count * (count - 1))))
    return np.mean(values)


def test_mean_correlation_equals_all_pairs():
    x, seen = torch.randn(3, 9, 5) + 0.5, torch.arange(9) < torch.tensor([9, 6, 2])[:, None]
    assert mean_correlation(x, seen) == pytest.approx(explicit_correlation(x, seen), abs=1e-12)
    assert mean_correlation(x) == pytest.approx(explicit_correlation(x, torch.ones(3, 9)), abs=1e-12)
    assert abs(mean_correlation(x) - mean_correlation(x, seen)) > 1e-3
    same = torch.randn(2, 1, 5).expand(2, 4, 5) * torch.rand(2, 4, 1)
    assert mean_correlation(same) == pytest.approx(1.0)


def models():
    """Return our masked model, a shaped BERT and a shaped Llama."""
    config = ShapedTransformerConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **SIZES)
    bert = BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **SIZES))
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **SIZES))
    return {
        "own": ShapedTransformerForMaskedLM(config),
        "bert": hf.shape_model(bert, hf.Shaping(residual_gamma=0.2, shaped_relu=True)),
        "llama": hf.shape_model(llama),
    }


@pytest.mark.parametrize("kind", ["own", "bert", "llama"])
def test_entropy_callback_writes_every_layer_and_head(kind):
    """Every layer and head is written, and agrees with A's own softmax of the model's logits."""
    model, log = models()[kind], Log()
    ids = torch.randint(5, VOCABULARY, (2, 11))
    seen = torch.arange(11) < torch.tensor([11, 7])[:, None]
    batch = {"input_ids": ids, "attention_mask": seen.long(), "labels": ids}
    caught = []
    probe = Entropy(log, 5, batch)
    before = [p.clone() for p in model.parameters()]
    model.train()
    probe.look(model, 5)
    assert model.training
    rows = log.table().to_pylist()
    assert [(row["layer"], row["head"]) for row in rows] == [(k, h) for k in (1, 2, 3) for h in range(4)]
    for module in model.modules():
        if hasattr(module, "probe"):
            module.probe = caught.append
    with torch.no_grad():
        model.eval()(**batch)
    for layer, logits in enumerate(caught):
        gains_ = {"gamma1": 0.0, "gamma2": 0.0}
        mask = logits.mask.as_mask() if hasattr(logits.mask, "as_mask") else logits.mask
        softmax = attention_matrix(
            logits.query.double(),
            logits.key.double(),
            scale=logits.scale,
            mask=mask,
            is_causal=logits.is_causal,
            **gains_,
        )
        by_row = -torch.special.xlogy(softmax, softmax).sum(-1)
        expected = (by_row * seen[:, None]).sum((0, 2)) / seen.sum()
        values = [row["value"] for row in rows[4 * layer : 4 * layer + 4]]
        np.testing.assert_allclose(values, expected, rtol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["own", "bert", "llama"])
def test_correlation_callback_equals_hidden_states(kind):
    model, log = models()[kind].eval(), Log()
    ids = torch.randint(5, VOCABULARY, (2, 11))
    Correlation(log, 1, {"input_ids": ids}).look(model, 3)
    rows = log.table().to_pylist()
    assert [row["layer"] for row in rows] == [0, 1, 2, 3]
    assert {row["step"] for row in rows} == {3}
    with torch.no_grad():
        if kind == "own":
            x = model.transformer.tokens(ids) + model.transformer.positions.weight[:11]
            states = list(accumulate(model.transformer.blocks, lambda tokens, block: block(tokens), initial=x))
        else:
            states = model(input_ids=ids, output_hidden_states=True).hidden_states
    for row in rows[: 4 if kind != "llama" else 3]:  # Llama's last one has its norm behind it
        expected = explicit_correlation(states[row["layer"]], torch.ones(2, 11))
        assert row["value"] == pytest.approx(expected, abs=1e-6)
    assert not any(module._forward_hooks for module in model.modules() if isinstance(module, torch.nn.Embedding))


def test_gradient_norms_callback_equals_autograd():
    stack, log = Stack([shaped_block(16, 2, gamma=0.5) for _ in range(3)]), Log()
    x = torch.randn(2, 5, 16)
    stack(x).square().sum().backward()
    GradientNorms(log, 4).on_pre_optimizer_step(None, TrainerState(global_step=3), TrainerControl(), model=stack)
    rows = {(row["name"], row["layer"]): row["value"] for row in log.table().to_pylist()}
    assert len(rows) == 9
    for layer, block in enumerate(stack.blocks, 1):
        loss = stack(x).square().sum()
        (value,) = torch.autograd.grad(loss, block.attention.value.weight, retain_graph=True)
        whole = torch.autograd.grad(loss, list(block.parameters()))
        assert rows["gradient_norm_value", layer] == pytest.approx(float(value.norm()), rel=1e-5)
        total = sum(float(part.square().sum()) for part in whole) ** 0.5
        assert rows["gradient_norm", layer] == pytest.approx(total, rel=1e-5)
        assert rows["gradient_norm_query", layer] != rows["gradient_norm_value", layer]
    again = Log()
    GradientNorms(again, 4).on_pre_optimizer_step(None, TrainerState(global_step=4), TrainerControl(), model=stack)
    assert again.table().num_rows == 0  # step 5 is not due


def test_gains_callback_writes_gains_by_name():
    model, log = models()["bert"], Log()
    with torch.no_grad():
        for k, gain in enumerate(gains(model)):
            gain.value.fill_(float(k))
    Gains(log, 1).look(model, 7)
    rows = log.table().to_pylist()
    names = {row["name"] for row in rows}
    assert names == {"gamma1", "gamma2", "slope", "lam", "gamma"}
    first = {row["name"]: row["value"] for row in rows if row["layer"] == 1}
    assert (first["gamma1"], first["gamma2"], first["slope"]) == (0.0, 1.0, 2.0)
    assert first["gamma"] == pytest.approx(0.2)
    assert first["lam"] == pytest.approx((1 - 0.04) ** 0.5)
    assert sum(row["name"] == "gamma1" and row["layer"] == 1 for row in rows) == 4


@pytest.mark.parametrize(("schedule", "expected"), [(Recover(steps=4), 0.25), (Learn(), 1.0)])
def test_schedule_sets_the_gains_of_the_step(schedule, expected):
    model = models()["own"]
    schedule.prepare(model)
    ShapingSchedule(schedule).on_step_end(None, TrainerState(global_step=3), TrainerControl(), model=model)
    shaping = [gain for gain in gains(model) if gain.start == 1.0]
    assert all(torch.all(gain.value == expected) for gain in shaping)
    assert all(gain.value.requires_grad == isinstance(schedule, Learn) for gain in gains(model))


def test_model_without_blocks_is_refused():
    with pytest.raises(InputError, match=r"Linear has no blocks that are known; shape it with hf\.shape_model"):
        Correlation(Log(), 1, {"input": torch.zeros(1)}).look(torch.nn.Linear(2, 2), 0)
