"""Shaped attention without A against A itself, and against loops over rows that are written out here."""

import math

import pytest
import torch

from limitformer import InputError
from limitformer.nn import attention_matrix, shaped_attention
from limitformer.nn.visibility import visibility

BATCH, HEADS, KV_HEADS, TOKENS, DIM = 3, 6, 2, 19, 5  # 19: more than one block of the causal sum, and not whole blocks
SCALE = 0.7
LEAST = torch.finfo(torch.float64).min


def made(seed=0, queries=TOKENS, keys=TOKENS, kv_heads=KV_HEADS):
    generator = torch.Generator().manual_seed(seed)
    options = {"generator": generator, "dtype": torch.float64}
    query = torch.randn(BATCH, HEADS, queries, DIM, **options)
    key, value = torch.randn(2, BATCH, kv_heads, keys, DIM, **options)
    gains = {"gamma1": 1.3 + torch.randn(HEADS, **options), "gamma2": 0.6 + torch.randn(HEADS, **options)}
    return query, key, value, {**gains, "scale": SCALE}


def padded(left):
    """A boolean mask (b, 1, 1, k) with 0, 4 and 11 tokens of padding."""
    lengths = TOKENS - torch.tensor([0, 4, 11])
    seen = torch.arange(TOKENS) < lengths[:, None]
    return (seen.flip(-1) if left else seen)[:, None, None]


def packed():
    """A boolean mask (1, 1, q, k) of three texts in one row."""
    text = torch.arange(TOKENS) // 7
    return (text[:, None] == text)[None, None]


def arbitrary(heads=1, batch=BATCH):
    """A boolean mask with rows that see nothing."""
    generator = torch.Generator().manual_seed(7)
    mask = torch.rand(batch, heads, TOKENS, TOKENS, generator=generator) < 0.4
    mask[..., 3, :] = False
    return mask


def biased(heads):
    generator = torch.Generator().manual_seed(8)
    bias = torch.randn(1, heads, TOKENS, TOKENS, generator=generator, dtype=torch.float64)
    return bias.masked_fill(~arbitrary(batch=1), -torch.inf)


MASKS = {
    "none": None,
    "right padding": padded(left=False),
    "left padding": padded(left=True),
    "packed, two axes": packed()[0, 0],
    "arbitrary": arbitrary(),
    "arbitrary, a mask a head": arbitrary(HEADS),
    "added -inf": torch.zeros(arbitrary().shape, dtype=torch.float64).masked_fill(~arbitrary(), -torch.inf),
    "added least number": torch.zeros(arbitrary().shape, dtype=torch.float64).masked_fill(~arbitrary(), LEAST),
    "a bias": biased(1),
    "a bias a head": biased(HEADS),
}
CASES = [
    pytest.param(mask, causal, id=f"{name}{', causal' * causal}") for name, mask in MASKS.items() for causal in (0, 1)
]
cases = pytest.mark.parametrize(("mask", "causal"), CASES)


def rows(query, key, value, gamma1, gamma2, scale, mask=None, causal=False, zero_logits=False):
    """Compute A V row by row, from the formula and the meaning of the masks."""
    batch, heads, queries, dim = query.shape
    keys, first = key.shape[2], key.shape[2] - query.shape[2]
    out = torch.zeros(batch, heads, queries, dim, dtype=query.dtype)
    for b in range(batch):
        for h in range(heads):
            k, v = key[b, h * key.shape[1] // heads], value[b, h * key.shape[1] // heads]
            for i in range(queries):
                bias = torch.zeros(keys, dtype=query.dtype)
                if mask is not None:
                    row = torch.broadcast_to(mask, (batch, heads, queries, keys))[b, h, i]
                    bias = torch.where(row, 0.0, -math.inf).to(bias) if row.dtype == torch.bool else row.to(bias)
                    bias[bias < -1e30] = -math.inf
                if causal:
                    bias[first + i + 1 :] = -math.inf
                out[b, h, i] = gamma1[h] * v[first + i]
                if (bias > -math.inf).any():
                    logits = scale * (k @ query[b, h, i]) * (not zero_logits)
                    weights = torch.softmax(logits + bias, 0) - gamma2[h] * torch.softmax(bias, 0)
                    out[b, h, i] += weights @ v
    return out


def formed(query, key, value, gamma1, gamma2, scale, mask=None, causal=False):
    a = attention_matrix(query, key, gamma1=gamma1, gamma2=gamma2, scale=scale, mask=mask, is_causal=bool(causal))
    return a @ value.repeat_interleave(HEADS // value.shape[1], 1)


@cases
def test_shaped_attention_is_a_times_values(mask, causal):
    query, key, value, options = made()
    found = shaped_attention(query, key, value, mask=mask, is_causal=bool(causal), **options)
    wanted = rows(query, key, value, **options, mask=mask, causal=causal)
    assert (found - wanted).abs().max() < 1e-12
    assert (formed(query, key, value, **options, mask=mask, causal=causal) - wanted).abs().max() < 1e-12


@cases
def test_at_zero_logits_a_is_the_identity(mask, causal):
    """It holds exactly if A is formed, otherwise to rounding."""
    query, key, value, _ = made()
    options = {"gamma1": 1.0, "gamma2": 1.0, "scale": SCALE, "mask": mask, "is_causal": bool(causal)}
    a = attention_matrix(0 * query, key, **options)
    assert torch.equal(a, torch.eye(TOKENS, dtype=a.dtype).expand_as(a))
    found = shaped_attention(0 * query, key, value, **options)
    assert (found - value.repeat_interleave(HEADS // KV_HEADS, 1)).abs().max() < 1e-13


@cases
def test_gradients_are_those_of_a_times_values(mask, causal):
    query, key, value, options = made(kv_heads=HEADS if causal else KV_HEADS)
    leaves = [query, key, value, options["gamma1"], options["gamma2"]]
    weights = torch.randn(query.shape, generator=torch.Generator().manual_seed(5), dtype=query.dtype)
    for leaf in leaves:
        leaf.requires_grad_()
    found = (shaped_attention(query, key, value, mask=mask, is_causal=bool(causal), **options) * weights).sum()
    wanted = (formed(query, key, value, **options, mask=mask, causal=causal) * weights).sum()
    for one, other in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves), strict=True):
        assert one.isfinite().all()
        assert (one - other).abs().max() < 1e-12 * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize(
    ("mask", "causal", "kv_heads"),
    [(None, True, HEADS), (padded(left=True), False, KV_HEADS), (arbitrary(), True, HEADS)],
)
def test_gradients_in_bfloat16(mask, causal, kv_heads):
    """They agree to 2 %, those of the float32 gains included; without γ₂ they differ."""
    *inputs, options = made(kv_heads=kv_heads)

    def gradients(dtype, **changed):
        merged = {**options, **changed}
        gains = [merged[name].to(torch.promote_types(dtype, torch.float32)) for name in ("gamma1", "gamma2")]
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        leaves += [gain.detach().requires_grad_() for gain in gains]
        a = dict(zip(("gamma1", "gamma2"), leaves[3:], strict=True))
        found = shaped_attention(*leaves[:3], **a, scale=SCALE, mask=mask, is_causal=causal)
        return torch.autograd.grad(found.double().square().sum(), leaves[2:])

    def error(found):
        return max(float((a - b).norm() / b.norm()) for a, b in zip(found, gradients(torch.float64), strict=True))

    assert error(gradients(torch.bfloat16)) < 0.02
    assert error(gradients(torch.float64, gamma2=torch.zeros(HEADS))) > 0.1


def test_a_bias_that_trains_has_the_gradient_of_both_softmaxes():
    query, key, value, options = made()
    bias = biased(HEADS).clamp(min=-5.0).requires_grad_()
    found = shaped_attention(query, key, value, mask=bias, **options).square().sum()
    wanted = formed(query, key, value, **options, mask=bias).square().sum()
    (one,), (other,) = torch.autograd.grad(found, [bias]), torch.autograd.grad(wanted, [bias])
    assert (one - other).abs().max() < 1e-11


@pytest.mark.parametrize("wrong", ["mean over all tokens", "centre without the mask", "aligned at the top left"])
def test_wrong_twins_differ(wrong):
    """Three likely mistakes are far outside the tolerance on these inputs."""
    queries = 6 if wrong == "aligned at the top left" else TOKENS
    query, key, value, options = made(queries=queries)
    mask = None if wrong == "aligned at the top left" else padded(left=True)
    causal = wrong != "mean over all tokens"
    right = shaped_attention(query, key, value, mask=mask, is_causal=causal, **options)
    wide = value.repeat_interleave(HEADS // KV_HEADS, 1)
    plain = shaped_attention(query, key, value, mask=mask, is_causal=causal, **{**options, "gamma2": 0.0})
    gamma2 = options["gamma2"][:, None, None]
    if wrong == "mean over all tokens":
        twin = plain - gamma2 * wide.mean(-2, keepdim=True)
    elif wrong == "centre without the mask":
        twin = plain - gamma2 * wide.cumsum(-2) / torch.arange(1, TOKENS + 1)[:, None]
    else:
        lower = torch.ones(queries, TOKENS, dtype=torch.bool).tril()
        twin = shaped_attention(query, key, value, mask=lower, **options)
    assert (right - twin).abs().max() > 0.1


def test_a_query_that_sees_nothing_keeps_its_own_value():
    query, key, value, options = made()
    for mask in (arbitrary(), MASKS["added -inf"], MASKS["added least number"]):
        found = shaped_attention(query, key, value, mask=mask, **options)
        wanted = options["gamma1"][:, None] * value.repeat_interleave(HEADS // KV_HEADS, 1)[:, :, 3]
        assert (found[:, :, 3] - wanted).abs().max() < 1e-15


def test_padding_changes_nothing():
    """Each text by itself equals the three padded on either side to one length, causal or not."""
    query, key, value, options = made()
    for left in (False, True):
        for causal in (False, True):
            mask = padded(left)
            together = shaped_attention(query, key, value, mask=mask, is_causal=causal, **options)
            for b in range(BATCH):
                seen = mask[b, 0, 0]
                q, k, v = (x[b : b + 1, :, seen] for x in (query, key, value))
                alone = shaped_attention(q, k, v, is_causal=causal, **options)
                assert (together[b : b + 1, :, seen] - alone).abs().max() < 1e-13


@pytest.mark.parametrize(("chunk", "mask"), [(1, padded(left=True)), (7, None)], ids=["left padding", "none"])
def test_decoding_with_a_growing_cache(chunk, mask):
    query, key, value, options = made()
    whole = shaped_attention(query, key, value, mask=mask, is_causal=True, **options)
    for first in range(0, TOKENS, chunk):
        end = min(first + chunk, TOKENS)
        found = shaped_attention(
            query[:, :, first:end],
            key[:, :, :end],
            value[:, :, :end],
            mask=None if mask is None else mask[..., :end],
            is_causal=True,
            **options,
        )
        assert (found - whole[:, :, first:end]).abs().max() < 1e-13


@pytest.mark.parametrize(("as_mask", "each"), [(True, False), (False, True), (False, False)])
def test_decoding_with_a_cache_of_fixed_length(as_mask, each):
    """Slots behind the query contain numbers that must not matter; texts share their positions or each has its own."""
    query, key, value, options = made()
    whole = shaped_attention(query, key, value, is_causal=True, **options)
    empty = torch.full((BATCH, KV_HEADS, 4, DIM), 1e3, dtype=torch.float64)
    key, value = torch.cat([key, empty], -2), torch.cat([value, empty], -2)
    for first, end in ((0, 5), (5, 6), (6, TOKENS)):
        positions = torch.arange(first, end)
        mask = (torch.arange(TOKENS + 4) <= positions[:, None])[None, None] if as_mask else None
        positions = positions.expand(BATCH, -1) if each else positions
        call = {**options, "mask": mask, "is_causal": not as_mask, "positions": positions}
        found = shaped_attention(query[:, :, first:end], key, value, **call)
        assert (found - whole[:, :, first:end]).abs().max() < 1e-12
        wide = value.repeat_interleave(HEADS // KV_HEADS, 1)
        assert (attention_matrix(query[:, :, first:end], key, **call) @ wide - found).abs().max() < 1e-12


def test_visibility_equals_its_mask():
    query, key, value, options = made()
    for mask in (None, padded(True), arbitrary(), biased(1)):
        ready = visibility(mask, is_causal=True, queries=TOKENS, keys=TOKENS)
        found = shaped_attention(query, key, value, mask=ready, **options)
        assert torch.equal(found, shaped_attention(query, key, value, mask=mask, is_causal=True, **options))


def test_shaped_attention_without_gains_is_the_kernel():
    query, key, value, _ = made(kv_heads=HEADS)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=SCALE)
    for zero in (0.0, torch.zeros(()), torch.zeros(HEADS, dtype=torch.float64)):
        assert torch.equal(shaped_attention(query, key, value, gamma1=zero, gamma2=zero, scale=SCALE), wanted)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 0.1)], ids=str)
@pytest.mark.parametrize(("mask", "causal"), [(None, True), (padded(True), False), (biased(HEADS), True)])
def test_lower_precision(mask, causal, dtype, tolerance):
    query, key, value, options = made()
    wanted = shaped_attention(query, key, value, mask=mask, is_causal=bool(causal), **options)
    lowered = [x.to(dtype) for x in (query, key, value)]
    found = shaped_attention(*lowered, mask=mask, is_causal=bool(causal), **options)
    assert found.dtype == dtype
    assert (found - wanted).abs().max() < tolerance


@pytest.mark.parametrize(("mask", "causal"), [(padded(True), False), (None, True)], ids=["padding", "causal"])
def test_compiled_call_is_the_same(mask, causal):
    query, key, value, options = made()
    leaves = [x.requires_grad_() for x in (query, key, value, options["gamma1"], options["gamma2"])]

    def loss(*inputs):
        q, k, v, gamma1, gamma2 = inputs
        call = {"gamma1": gamma1, "gamma2": gamma2, "scale": SCALE, "mask": mask, "is_causal": causal}
        return shaped_attention(q, k, v, **call).square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found, wanted = compiled(*leaves), loss(*leaves)
    assert (found - wanted).abs() < 1e-12 * wanted
    for one, other in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves), strict=True):
        assert (one - other).abs().max() < 1e-12 * other.abs().max()


@pytest.mark.slow
def test_call_compiled_for_any_sizes_is_the_same():
    _, _, _, options = made()

    def call(query, key):
        return shaped_attention(query, key, key, is_causal=True, **options)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for kv_heads in (KV_HEADS, HEADS):
        query, key, _, _ = made(kv_heads=kv_heads)
        assert (compiled(query, key) - call(query, key)).abs().max() < 1e-12


@pytest.mark.parametrize("what", ["mask", "positions"])
def test_masks_and_positions_changed_before_backward_are_refused(what):
    query, key, value, options = made(kv_heads=HEADS)
    tensor = {"mask": padded(True), "positions": torch.arange(TOKENS).roll(3)}[what]
    call = {what: tensor, "is_causal": what == "mask", **options}
    found = shaped_attention(query, key, value.requires_grad_(), **call)
    tensor.fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": torch.ones(3, 1, 4, TOKENS, dtype=torch.bool)}, "mask must have the shape .* got \\(3, 1, 4, 19\\)"),
        ({"mask": torch.ones(3, 1, 1, 7, dtype=torch.bool)}, "for 19 queries and 19 keys; got \\(3, 1, 1, 7\\)"),
        ({"mask": torch.ones(2, 1, 1, TOKENS, dtype=torch.bool)}, "mask must have the shape \\(3 or 1"),
        ({"mask": torch.ones(TOKENS, TOKENS, dtype=torch.long)}, "mask must be boolean .* got torch.int64"),
        ({"gamma1": torch.ones(4)}, "must be numbers, \\(\\) or \\(6,\\); got \\(4,\\)"),
        ({"positions": torch.arange(3)}, "positions must be \\(19,\\) or \\(3, 19\\); got \\(3,\\)"),
        (
            {"key": torch.ones(3, 4, TOKENS, DIM).double(), "value": torch.ones(3, 4, TOKENS, DIM).double()},
            "must divide heads; got 4 and 6",
        ),
        (
            {"key": torch.ones(3, 2, 7, DIM).double(), "value": torch.ones(3, 2, 7, DIM).double()},
            "19 queries cannot be the last of 7 keys",
        ),
        ({"value": torch.ones(3, 2, TOKENS, 4).double()}, "query must be"),
        ({"query": [[1.0]]}, "query must be a tensor; got list. Nearest: torch.as_tensor"),
        (
            {"key": torch.ones(3, 2, TOKENS, DIM)},
            "one dtype and device; got torch.float64 on cpu, torch.float32",
        ),
        ({"query": torch.ones(3, 6, TOKENS, DIM).long()}, "query must be of real numbers; got torch.int64"),
        ({"gamma1": [1.0, 2.0]}, "gamma1 must be a number; got"),
        ({"gamma2": float("nan")}, "gamma2 must be finite; got nan"),
        ({"gamma2": torch.ones(6, device="meta")}, "gamma2 is on meta, query on cpu"),
        ({"scale": None}, "scale must be a number; got None"),
        ({"dropout": 2.0}, "dropout must be a probability; got 2.0"),
        (
            {"mask": visibility(None, queries=TOKENS, keys=TOKENS), "is_causal": True},
            "is_causal is part of",
        ),
        ({"is_causal": "no"}, "is_causal must be True or False; got 'no'"),
        ({"mask": [[True]]}, "mask must be a tensor, a Visibility or None; got list"),
        ({"positions": torch.arange(19.0)}, "positions must be whole numbers; got torch.float32"),
    ],
    ids=lambda x: x[:20] if isinstance(x, str) else "",
)
def test_arguments_that_cannot_be_used(change, message):
    query, key, value, options = made()
    call = {"query": query, "key": key, "value": value, **options, **change}
    with pytest.raises(InputError, match=message):
        shaped_attention(**call)
