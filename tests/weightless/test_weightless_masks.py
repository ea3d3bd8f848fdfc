"""Masks are recognised by the operations that apply them, and large logits are not masks."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import limitformer as lf
from limitformer.weightless.observers.attention import visible_by_offset

WIDTH, HEADS, TOKENS, SAMPLES = 16, 2, 6, 3
MEASURES = ("entropy", "effective_tokens", "tokens_seen", "logit_std", "largest_logit")
HIDDEN = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
PADDED = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
BIAS = torch.randn(1, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0))


def additive(hidden, low):
    return torch.zeros(hidden.shape).masked_fill(hidden, low)


def by_row(x, low):
    """Causal, and the last two tokens of every second sequence are hidden."""
    hidden = HIDDEN | PADDED.repeat(len(x) // 2, 1)[:, None, None]
    return x + additive(hidden, low)


def in_place(x, low):
    x += additive(HIDDEN, low)
    return x


def filled_in_place(x, low):
    x.masked_fill_(HIDDEN, low)
    return x


def by_flat_heads(x, low):
    return (x.flatten(0, 1).view(x.shape) + additive(HIDDEN, low)).double().float().clone() * 1.0


WAYS = {
    "+": lambda x, low: x + additive(HIDDEN, low),
    "+=": in_place,
    "-": lambda x, low: x - additive(HIDDEN, -low),
    "add": lambda x, low: torch.add(input=x, other=additive(HIDDEN, low)),
    "alpha": lambda x, low: torch.add(x, additive(HIDDEN, low / 2), alpha=2),
    "all heads": lambda x, low: additive(HIDDEN, low).expand(x.shape) + x,
    "masked_fill": lambda x, low: x.masked_fill(HIDDEN, low),
    "masked_fill_": filled_in_place,
    "where": lambda x, low: torch.where(HIDDEN, low, x),
    "where, a method": lambda x, low: x.where(~HIDDEN, torch.full_like(x, low)),
    "flat": by_flat_heads,
    "twice": lambda x, low: x + additive(HIDDEN, low) + additive(HIDDEN, low),
}


def split(x, linear):
    b, m, _ = x.shape
    return (t.view(b, m, HEADS, -1).transpose(1, 2) for t in linear(x).chunk(3, -1))


class Block(nn.Module):
    """Attention with logits or, if `fused`, outputs by `attend`."""

    def __init__(self, attend, fused=False):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.qkv.weight, std=0.4)
        self.attend, self.fused = attend, fused

    def forward(self, x):
        q, k, v = split(x, self.qkv)
        mixed = self.attend(q, k, v) if self.fused else self.attend(q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class MultiHead(nn.Module):
    """Torch's multi-head attention."""

    def __init__(self, need_weights, **masks):
        super().__init__()
        self.attention, self.masks, self.need_weights = (
            nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
            masks,
            need_weights,
        )
        nn.init.normal_(self.attention.in_proj_weight, std=0.4)

    def forward(self, x):
        masks = dict(self.masks)
        if "key_padding_mask" in masks:
            masks["key_padding_mask"] = masks["key_padding_mask"].repeat(len(x) // 2, 1)
        return x + self.attention(x, x, x, need_weights=self.need_weights, **masks)[0]


def measured(make, sequences=2):
    x = torch.randn(sequences, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    data = lf.weightless.simulate(
        lambda: nn.Sequential(make(), make()), x, samples=SAMPLES, seed=0, dtype=torch.float32, progress=False
    )
    return {key: data[key].values for key in MEASURES}


def assert_same(actual, wanted):
    for key in MEASURES:
        np.testing.assert_allclose(actual[key], wanted[key], rtol=2e-5, err_msg=key)


@pytest.fixture(scope="module")
def causal():
    measures = measured(lambda: Block(lambda x: x.masked_fill(HIDDEN, -torch.inf)))
    assert (measures["tokens_seen"] == (TOKENS + 2) / 2).all()
    assert not np.allclose(measures["logit_std"], measured(lambda: Block(lambda x: x))["logit_std"], rtol=1e-2)
    return measures


@pytest.mark.parametrize("way", WAYS)
def test_mask_is_recognised_at_any_size(causal, way):
    low = {"+": -torch.inf, "where": torch.finfo(torch.float32).min, "masked_fill": -1e9, "flat": -1e4}.get(way, -50.0)
    assert_same(measured(lambda: Block(lambda x: WAYS[way](x, low))), causal)


@pytest.mark.parametrize("low", [-50.0, -1e9])
def test_mask_of_fused_attention_is_recognised(causal, low):
    def fused(**masks):
        return measured(
            lambda: Block(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, **masks), fused=True)
        )

    assert_same(fused(attn_mask=additive(HIDDEN, low)), causal)
    assert_same(fused(attn_mask=additive(HIDDEN, low).expand(1, HEADS, -1, -1)), causal)
    assert_same(fused(attn_mask=~HIDDEN), causal)
    assert_same(fused(is_causal=True), causal)


@pytest.mark.parametrize(("need_weights", "low"), [(True, -50.0), (False, -50.0), (True, -torch.inf), (False, -1e9)])
def test_mask_of_multi_head_attention_is_recognised(need_weights, low):
    def run(attention, padding):
        return measured(lambda: MultiHead(need_weights, attn_mask=attention, key_padding_mask=padding))

    wanted = run(HIDDEN, PADDED)
    assert_same(run(additive(HIDDEN, low), additive(PADDED, low)), wanted)
    rows = np.concatenate([np.arange(2, 7), [2, 3, 4, 4, 4]])  # seen by the rows that see two tokens or more
    np.testing.assert_allclose(wanted["tokens_seen"], rows.mean())
    assert_same(measured(lambda: MultiHead(need_weights, attn_mask=additive(HIDDEN, low))), run(HIDDEN, PADDED & False))


@pytest.mark.parametrize("low", [-50.0, -1e9])
def test_mask_by_sequence_is_recognised(low):
    wanted = measured(lambda: Block(lambda x: by_row(x, -torch.inf)))
    assert_same(measured(lambda: Block(lambda x: by_row(x, low))), wanted)
    np.testing.assert_allclose(wanted["tokens_seen"], np.mean([2, 3, 4, 5, 6, 2, 3, 4, 4, 4]))


@pytest.mark.parametrize("low", [-50.0, -1e9])
def test_mask_added_to_a_bias_by_head_is_recognised(low):
    def both(low):
        return lambda x: x + (BIAS + additive(HIDDEN, low)[None, None])

    wanted = measured(lambda: Block(lambda x: (x + BIAS).masked_fill(HIDDEN, -torch.inf)))
    assert_same(measured(lambda: Block(both(low))), wanted)
    assert_same(measured(lambda: Block(lambda x: x + BIAS + additive(HIDDEN, low))), wanted)


def test_mask_by_unknown_operations_is_recognised_by_size(causal):
    def written(x):
        x[..., HIDDEN] = -1e4
        return x

    assert_same(measured(lambda: Block(written)), causal)


def test_rows_without_visible_tokens_do_not_count():
    nothing = HIDDEN.clone()
    nothing[3] = True
    for low in (-50.0, -1e9):
        measures = measured(lambda low=low: Block(lambda x: x + additive(nothing, low)))
        np.testing.assert_allclose(measures["tokens_seen"], np.mean([2, 3, 5, 6]))


@pytest.mark.parametrize("attend", [lambda x: 1e6 * x, lambda x: 1e6 * x + 0 * HIDDEN.float()])
def test_large_logits_are_not_masks(attend):
    large, plain = measured(lambda: Block(attend)), measured(lambda: Block(lambda x: x))
    assert (large["tokens_seen"] == TOKENS).all()
    np.testing.assert_allclose(large["logit_std"][:, 0], 1e6 * plain["logit_std"][:, 0], rtol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("scale", [5.0, 100.0])
def test_large_logits_of_gpt2_have_their_spread(scale, implementation):
    transformers = pytest.importorskip("transformers")
    heads, tokens = 4, 16
    sizes = {"n_layer": 4, "n_embd": 32, "n_head": heads, "vocab_size": 50, "n_positions": 32}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    config = transformers.GPT2Config(**sizes, **ends, initializer_range=scale, attn_implementation=implementation)
    model, ids, seen = transformers.GPT2LMHeadModel(config).eval(), torch.arange(tokens)[None], []
    data = lf.check(model, ids, law=False, progress=False).data
    assert (data["tokens_seen"] == (tokens + 2) / 2).all()
    assert (data["effective_tokens"] >= 1 - 1e-6).all()
    for layer in model.transformer.h:
        layer.attn.c_attn.register_forward_hook(lambda part, given, out: seen.append(out[0].double()))
    with torch.no_grad():
        model(ids)
    for block, out in enumerate(seen):
        q, k, _ = (t.view(tokens, heads, -1).transpose(0, 1) for t in out.chunk(3, -1))
        logits = q @ k.mT / q.shape[-1] ** 0.5
        spread = torch.stack([logits[:, i, : i + 1].var(-1, correction=0) for i in range(1, tokens)])
        np.testing.assert_allclose(data["logit_std"].values[0, block], spread.mean(0).sqrt(), rtol=1e-4)


def test_steep_bias_of_positions_hides_nothing():
    """A bias that grows by 20 a token in the first head; the same bias in both heads is a mask."""
    positions = torch.arange(TOKENS).float().expand(TOKENS, TOKENS)
    slopes = torch.tensor([20.0, 0.1])[:, None, None]
    assert (measured(lambda: Block(lambda x: x + slopes * positions))["tokens_seen"] == TOKENS).all()
    assert (measured(lambda: Block(lambda x: x + 20 * positions))["tokens_seen"] == 2).all()


def test_mask_that_depends_on_the_logits_is_the_real_one():
    """Each row sees its two largest logits; zeros for the products would show all."""

    def two_largest(x):
        return x.masked_fill(x < x.topk(2).values[..., -1:], -50.0)

    assert (measured(lambda: Block(two_largest))["tokens_seen"] == 2).all()


def test_logits_copied_into_another_tensor_are_not_changed():
    """The operation that copies them does not run a second time on what it writes to."""

    def copied(x):
        whole = torch.ones_like(x)
        whole += x
        return (whole - 1).masked_fill(HIDDEN, -1e4)

    assert_same(measured(lambda: Block(copied)), measured(lambda: Block(lambda x: x.masked_fill(HIDDEN, -1e4))))


def test_biases_of_distance_that_are_never_positive_hide_nothing():
    """MPT's form of ALiBi; a mask by head is a mask, with such biases too."""
    tokens = 256
    slopes = 2.0 ** -torch.arange(1.0, 9.0)[:, None, None]
    causal = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    places = torch.arange(tokens, dtype=torch.float32)
    for bias in (slopes * (places - tokens + 1), slopes * (places - places[:, None])):
        visible = visible_by_offset(bias.masked_fill(causal, -torch.inf)[None])
        assert bool((visible == ~causal).all())
        hidden = torch.zeros(8, 1, tokens, dtype=torch.bool)
        hidden[3, :, :5] = True  # keys that one head does not see
        visible = visible_by_offset((bias + additive(hidden, -1e4)).masked_fill(causal, -torch.inf)[None])
        assert bool((visible == ~(causal | hidden)).all())
    by_head = additive(hidden, -60.0).expand(8, tokens, tokens)  # without biases
    assert bool((visible_by_offset(by_head[None]) == ~hidden).all())
