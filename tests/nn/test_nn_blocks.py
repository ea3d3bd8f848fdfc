"""Blocks that train: the scales of the theory in their weights, its law, masks, caches, Learn and Recover."""

import copy
from functools import partial
from math import sqrt

import numpy as np
import pytest
import torch
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import limitformer as lf
from limitformer.nn.blocks import (
    Stack,
    post_ln_block,
    pre_ln_block,
    shaped_block,
    stack_of,
    variances_of,
    without_decay,
)
from limitformer.nn.drawn.simulate import TokenLaw, gram
from limitformer.nn.gains import Gain, Learn, Recover, TrainableShapedReLU, gains
from limitformer.nn.initialisation import InitialVariances, draw
from limitformer.nn.self_attention import ShapedSelfAttention
from limitformer.nn.strengths import Residual
from many_networks import many
from statistics_checks import assert_same_law

SHAPED_RELU = lf.ShapedReLU(c_plus=0.2, c_minus=-1.0)
PARTS = {
    "shaped, four heads": {"attention": lf.ShapedAttention(tau0=0.5, heads=4), "feedforward": SHAPED_RELU},
    "shaped, causal, wide heads": {
        "attention": lf.ShapedAttention(tau0=0.5, heads=2, head_dim=16),
        "feedforward": lf.ShapedReLU(c_plus=0.0, c_minus=-1.0, hidden=40),
        "mask": "causal",
    },
    "standard temperature": {"attention": lf.ShapedAttention(tau0=2.0, heads=2, temperature="standard")},
    "Pre-LN": {"attention": lf.SoftmaxAttention(heads=4), "feedforward": lf.ReLU(), "norm": "pre", "lam": 1.0},
    "Post-RMS": {
        "attention": lf.SoftmaxAttention(heads=1),
        "feedforward": lf.GELU(hidden=24),
        "norm": lf.RMSNorm(placement="post"),
    },
}
V0 = np.array([[1.0, 0.3, -0.4], [0.3, 1.6, 0.2], [-0.4, 0.2, 0.7]])


def declared(name, width=16, depth=3):
    return lf.Transformer(width=width, depth=depth, gamma=0.5, **PARTS[name])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def tokens(*shape, seed=1):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


@torch.no_grad()
def with_weights_of(network, model):
    """Build the stack of `model` with the N(0, 1) weights of the theory's network, scaled by hand."""
    stack, n = stack_of(model).double(), model.width
    logit = n**-0.75 if model.attention.interventions[2] == "shaped" else n**-0.5
    for block, layer in zip(stack.blocks, network.layers, strict=True):
        scales = {"query": logit, "key": logit, "value": n**-0.5, "output": layer.attention.output.shape[-2] ** -0.5}
        for name, scale in scales.items():
            getattr(block.attention, name).weight.copy_(scale * getattr(layer.attention, name).mT)
        if layer.feedforward is not None:
            hidden = layer.feedforward.post.shape[-2]
            block.feedforward.pre.weight.copy_(layer.feedforward.pre.mT / n**0.5)
            block.feedforward.post.weight.copy_(layer.feedforward.gain / hidden**0.5 * layer.feedforward.post.mT)
    return stack


@pytest.mark.parametrize("name", PARTS)
def test_stack_equals_the_theorys_network_with_the_same_weights(name):
    model = declared(name)
    network = lf.nn.Network(model, seeded()).double()
    x = tokens(2, 5, 16)
    stack = with_weights_of(network, model)
    assert (stack(x) - network(x)).abs().max() < 1e-6 * network(x).abs().max()  # gains are float32 numbers
    wrong = copy.deepcopy(stack)
    with torch.no_grad():
        wrong.blocks[1].attention.query.weight.mul_(2.0)
    assert (wrong(x) - network(x)).abs().max() > 1e-3


def test_block_has_its_shapes_on_the_meta_device():
    """The meta device has no autocast that could be disabled."""
    block = shaped_block(16, 2, gamma=0.5, float32=True).to("meta")
    assert block(torch.empty(3, 5, 16, device="meta"), is_causal=True).shape == (3, 5, 16)


def test_lam_completes_gamma_to_a_variance_of_one():
    assert float(Residual(0.6).lam.detach()) == pytest.approx(0.8)
    assert float(Residual(0.6, 0.5).lam.detach()) == 0.5


@torch.no_grad()
def last_covariances(model, samples, seed):
    """Return V (samples, m, m) after the last layer of networks that `draw` draws, with random tokens."""
    stack = stack_of(model, trained=False).double().eval()
    generator, variances = seeded(seed), variances_of(model)
    weights = many(stack, lambda: draw(stack, variances, generator), samples)
    x = TokenLaw(lf.models.as_start(V0), model).tokens(samples, generator)
    with sdpa_kernel(SDPBackend.MATH):  # the only kernel with a rule for vmap
        found = vmap(lambda w, one: functional_call(stack, w, (one[None],))[0])(weights, x)
    return gram(found).numpy()


def summary(v):
    rho = v / np.sqrt(np.einsum("naa,nbb->nab", v, v))
    names = {"ρ_01": rho[:, 0, 1], "ρ_12": rho[:, 1, 2], "V_00": v[:, 0, 0], "V_22": v[:, 2, 2]}
    return {**names, "log det V": np.linalg.slogdet(v)[1]}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap, which only the test needs
def test_untrained_stack_has_the_law_of_the_exact_chain():
    """The wrong twin is the chain at half the width."""

    def chain(width):
        model = declared("shaped, four heads", width, depth=6)
        return summary(lf.simulate(model, V0, samples=30_000, seed=1, record=[6])["covariance"].values[:, -1])

    network = summary(last_covariances(declared("shaped, four heads", depth=6), 4000, seed=2))
    assert_same_law(chain(16), network, wrong=chain(8))


@pytest.mark.parametrize("build", [shaped_block, pre_ln_block, post_ln_block])
def test_blocks_have_the_stated_variances(build):
    """Mean squares of entries are within 4 standard errors, √(2/entries); the wrong twin is half the variance."""
    width, hidden = 64, 256
    torch.manual_seed(3)
    shaped = build is shaped_block
    block = build(width, 4, hidden=hidden, **({"gamma": 0.2} if shaped else {}))
    slope = 1 - 1 / 8
    logit, gain = (width**-1.5, 2 / (1 + slope**2)) if shaped else (1 / width, 2.0)
    stated = {
        "attention.query": logit,
        "attention.key": logit,
        "attention.value": 1 / width,
        "attention.output": 1 / width,
        "feedforward.pre": 1 / width,
        "feedforward.post": gain / hidden,
    }
    for name, variance in stated.items():
        weight = block.get_submodule(name).weight.detach().double()
        error = sqrt(2 / weight.numel())
        assert abs(weight.square().mean() / variance - 1) < 4 * error, name
        assert abs(weight.square().mean() / (variance / 2) - 1) > 4 * error, name


def stack(is_causal=False, **options):
    torch.manual_seed(0)
    blocks = [shaped_block(16, 4, gamma=0.5, kv_heads=2, **options) for _ in range(3)]
    return Stack(blocks, is_causal=is_causal).double()


@pytest.mark.parametrize(("left", "is_causal"), [(False, False), (True, True)])
def test_padding_does_not_change_a_stack(left, is_causal):
    network, x = stack(is_causal), tokens(2, 9, 16)
    alone = network(x[1:, :6])
    padded = x.clone()
    padded[1] = torch.cat([x[1, 6:], x[1, :6]] if left else [x[1, :6], x[1, 6:]])
    place = slice(3, 9) if left else slice(0, 6)
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[1, ..., : 3 if left else 9] = not left
    mask[1, ..., 6:9] = left
    assert (network(padded, mask)[1, place] - alone[0]).abs().max() < 1e-12
    assert (network(padded)[1, place] - alone[0]).abs().max() > 1e-3


def test_decoding_step_by_step_equals_one_pass():
    torch.manual_seed(0)
    attention, x = ShapedSelfAttention(16, 4, kv_heads=2).double(), tokens(2, 9, 16)
    whole, past, parts = attention(x, is_causal=True), None, []
    for part in x.split([4, 1, 4], 1):
        out, past = attention.step(part, past)
        parts.append(out)
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-13


def test_matrix_returns_a():
    torch.manual_seed(0)
    attention, x = ShapedSelfAttention(16, 4).double(), tokens(2, 5, 16)
    a = attention.matrix(x, is_causal=True)
    assert (a.sum(-1) - 1).abs().max() < 1e-14
    values = attention.split(attention.value(x))
    wanted = attention.output((a @ values).transpose(1, 2).flatten(2))
    assert (attention(x, is_causal=True) - wanted).abs().max() < 1e-13
    torch.nn.init.zeros_(attention.query.weight)
    assert torch.equal(attention.matrix(x), torch.eye(5, dtype=torch.float64).expand(2, 4, 5, 5))


class AttentionAndActivation(torch.nn.Module):
    """The parts of a block that this library defines; compiling the others takes seconds each."""

    def __init__(self, block):
        super().__init__()
        self.attention, self.activation = block.attention, block.feedforward.activation

    def forward(self, x, mask):
        return self.activation(self.attention(x, mask))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # from inductor
@pytest.mark.slow  # `make test` compiles the attention of stock models without inductor
def test_inductor_gives_the_same_block():
    network, x = AttentionAndActivation(stack().blocks[0]), tokens(2, 9, 16)
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[1, ..., :4] = False
    torch._dynamo.reset()
    found = torch.compile(network, fullgraph=True)(x, mask)
    wanted = network(x, mask)
    assert (found - wanted).abs().max() < 1e-12
    names = [name for name, _ in network.named_parameters()]
    one = torch.autograd.grad(found.square().sum(), list(network.parameters()))
    other = torch.autograd.grad(wanted.square().sum(), list(network.parameters()))
    for name, a, b in zip(names, one, other, strict=True):
        assert (a - b).abs().max() < 1e-10 * max(1.0, float(b.abs().max())), name


def test_the_slope_of_the_relu_trains_and_zero_has_one_slope():
    relu = TrainableShapedReLU(negative=0.75, positive=1.05).double()
    x = torch.tensor([-2.0, -0.5, 0.0, 3.0], dtype=torch.float64, requires_grad=True)
    out = relu(x)
    out.sum().backward()
    torch.testing.assert_close(out.detach(), torch.tensor([-1.5, -0.375, 0.0, 3.15], dtype=torch.float64))
    torch.testing.assert_close(x.grad, torch.tensor([0.75, 0.75, 0.75, 1.05], dtype=torch.float64))
    assert relu.negative.value.grad == -2.5
    torch.autograd.gradcheck(lambda y: relu(y), [tokens(7).requires_grad_()])


def test_learn_trains_every_gain():
    network = stack()
    x, target = tokens(2, 5, 16), tokens(2, 5, 16, seed=2)
    Learn().prepare(network)
    optimiser = torch.optim.Adam(network.parameters(), lr=0.01)
    losses = []
    for step in range(20):
        Learn().apply(network, step)
        optimiser.zero_grad()
        loss = (network(x) - target).square().mean()
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.parameters())
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert all((gain.value != gain.start).all() for gain in gains(network))


def test_recover_is_a_function_of_the_step():
    recover = Recover(steps=4000)
    assert [recover.fraction(step) for step in (0, 1000, 3999, 4000, 10**6)] == [1.0, 0.75, 1 / 4000, 0.0, 0.0]
    straight, resumed = stack(), stack()
    for network in (straight, resumed):
        recover.prepare(network)
        assert not any(gain.value.requires_grad for gain in gains(network))
        assert all(module.gamma.requires_grad for module in network.modules() if isinstance(module, Residual))
    for step in range(0, 3001, 500):
        recover.apply(straight, step)
    resumed.load_state_dict(straight.state_dict())
    recover.apply(resumed, 3000)
    for one, other in zip(gains(straight), gains(resumed), strict=True):
        assert torch.equal(one.value, other.value)
        assert torch.equal(one.value, torch.full_like(one.value, one.start * 0.25))


def test_recovered_stack_has_softmax_attention_and_relu():
    """The results are the same bits from step 4,000 on."""
    network, x = stack(), tokens(2, 5, 16)
    Recover().apply(network, 4000)
    plain = copy.deepcopy(network)
    for block in plain.blocks:
        block.attention.gamma1 = block.attention.gamma2 = None
        block.feedforward.activation = torch.nn.ReLU()
    assert torch.equal(network(x), plain(x))
    Recover().apply(network, 3999)
    assert not torch.equal(network(x), plain(x))


def test_weight_decay_leaves_gains_alone():
    block = shaped_block(16, 4, gamma=0.2, bias=True)
    undecayed = set(without_decay(block))
    weights = {name for name, value in block.named_parameters() if value.dim() == 2}
    assert undecayed | weights == {name for name, _ in block.named_parameters()}
    assert not undecayed & weights
    strengths = {"attention.gamma1.value", "feedforward.activation.negative.value", "residual.attention.lam"}
    assert {f"{name}_as_norm" for name in strengths} < undecayed
    assert "pre.attention.weight" in without_decay(pre_ln_block(16, 4))


def test_pre_and_post_ln_have_their_places():
    x = 3.0 + tokens(2, 5, 16)
    torch.manual_seed(0)
    pre, post = pre_ln_block(16, 4).double(), post_ln_block(16, 4).double()
    after = post(x)
    assert after.mean(-1).abs().max() < 1e-12
    assert (pre(x) - pre(x + 5.0) + 5.0).abs().max() < 1e-12  # the branch does not see the shift
    assert pre(x).mean(-1).abs().max() > 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ShapedSelfAttention(10, 4), "heads must divide width; got width=10, heads=4. Nearest: 2 or 5"),
        (lambda: ShapedSelfAttention(16, 4, kv_heads=3), "kv_heads must divide heads; got heads=4, kv_heads=3"),
        (lambda: ShapedSelfAttention(16, 4, tau0=0.0), "tau0 must be positive; got 0.0"),
        *[(partial(ShapedSelfAttention, 16, 2, dropout=p), "^dropout must ") for p in (1.0, -0.1, float("nan"), "0")],
        (lambda: shaped_block(16, 4, gamma=1.5), "gamma must lie in \\[0, 1\\]; got 1.5"),
        (lambda: Residual(0.5, -1.0), "lam must be at least 0; got -1.0"),
        (lambda: Recover(steps=0), "steps must be at least 1; got 0"),
        (lambda: Recover().fraction(-1), "step must be at least 0; got -1"),
        (lambda: Gain(float("nan")), "start must be finite"),
        (lambda: InitialVariances.shaped(0), "width must be at least 1; got 0"),
        (lambda: stack_of(lf.Transformer(width=4, depth=1, gamma=0.5, attention=lf.SoftmaxAttention())), "heads=None"),
        (lambda: lf.nn.Block(None, None), "attention, feedforward or both; got neither"),
    ],
)
def test_arguments_that_cannot_be_used(make, message):
    with pytest.raises(lf.InputError, match=message):
        make()
