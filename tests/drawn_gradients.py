"""Networks of the paper with explicit weights and autograd, the slow second route to gradients.

Only the declarations come from `limitformer`. Shapes: S networks, m tokens, width n, h heads of dimension k.
"""

from functools import partial

import numpy as np
import torch

import limitformer as lf

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "hyperbolic_tangent": torch.tanh,
    "squared_relu": lambda x: torch.relu(x) ** 2,
}


class Fresh(torch.autograd.Function):
    """X W whose backward pass uses another matrix: a wrong twin."""

    @staticmethod
    def forward(ctx, x, w, other):
        ctx.save_for_backward(x, other)
        return x @ w

    @staticmethod
    def backward(ctx, gradient):
        x, other = ctx.saved_tensors
        return gradient @ other.mT, x.mT @ gradient, None


def gradients_of(model, v0, samples, seed, fresh=()):
    """Return covariance, loss, stream_gradient and weight_gradient as `lf.simulate` does, as arrays and a dict.

    The matrices named in `fresh` are drawn anew for the backward pass.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(samples, *shape, generator=generator, dtype=torch.float64)

    n, m = model.width, len(v0)
    directions = torch.linalg.qr(normal(n, min(m, n)))[0].mT
    values, vectors = np.linalg.eigh(v0)
    root = (vectors * np.sqrt(np.maximum(values, 0)))[:, ::-1][:, : min(m, n)]
    x = (n**0.5 * torch.tensor(root.copy()) @ directions).requires_grad_()
    stream, weights = [x], {}

    def linear(x, name, *shape):
        weights[name] = w = normal(*shape).requires_grad_()
        if name.rpartition(".")[2] in fresh:
            return Fresh.apply(x, w, normal(*shape)) / shape[0] ** 0.5
        return x @ w / shape[0] ** 0.5

    for layer in range(model.depth):
        if model.attention is not None:
            x = add(model, x, partial(attention, model, linear=linear, name=f"layers.{layer}.attention."))
        if model.feedforward is not None:
            x = add(model, x, partial(feedforward, model, linear=linear, name=f"layers.{layer}.feedforward."))
        x.retain_grad()
        stream.append(x)
    loss = x.square().sum((1, 2)) / (2 * m)
    loss.sum().backward()
    return {
        "covariance": np.stack([(y @ y.mT / n).detach().numpy() for y in stream], 1),
        "loss": loss.detach().numpy(),
        "stream_gradient": np.stack([norms(y.grad) for y in stream], 1),
        "weight_gradient": {name: norms(w.grad) for name, w in weights.items()},
    }


def norms(gradient):
    return gradient.square().sum((1, 2)).sqrt().numpy()


def add(model, x, branch):
    """Return λx + γ f(x), with a Pre-norm or a Post-norm."""
    norm = model.normalisation
    pre, post = (norm is not None and norm.placement == place for place in ("pre", "post"))
    y = model.skip * x + model.gamma * branch(normal_of(norm, x) if pre else x)
    return normal_of(norm, y) if post else y


def normal_of(norm, x):
    if type(norm) is lf.LayerNorm:
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()


def attention(model, x, linear, name):
    """Return A X W_V of [ST, eqs. 1, 9], or heads and their output matrix."""
    part, m = model.attention, x.shape[1]
    identity, center, temperature = part.interventions
    heads, k = part.heads or 1, part.head_dim or model.width // (part.heads or 1)
    tau = part.tau0 * k**0.5 * (model.width**0.5 if temperature == "shaped" else 1.0)
    q, key = (linear(x, name + what, model.width, heads * k) for what in ("query", "key"))
    v = linear(x, name + "value", model.width, heads * k if part.heads else model.width)
    seen = torch.ones(m, m, dtype=torch.bool)
    seen = seen.tril() if model.mask == "causal" else seen
    mixed = []
    for y, z, values in zip(q.chunk(heads, -1), key.chunk(heads, -1), v.chunk(heads, -1), strict=True):
        a = torch.softmax((y @ z.mT / tau).masked_fill(~seen, -torch.inf), -1)
        a = a + identity * torch.eye(m) - center * seen / seen.sum(1, keepdim=True)
        mixed.append(a @ values)
    joined = torch.cat(mixed, -1)
    return linear(joined, name + "output", heads * k, model.width) if part.heads else joined


def feedforward(model, x, linear, name):
    """Return the branch of [ST, eq. 4]."""
    part, hidden = model.feedforward, model.feedforward.hidden or model.width
    units = linear(x, name + "pre", model.width, hidden)
    if type(part) is lf.GELU:
        active = units * 0.5 * (1 + torch.erf(units / 2**0.5))
    elif isinstance(part, lf.Elementwise):
        active = ACTIVATIONS[part.function.__name__](units)
        if type(part) is lf.Gated:
            active = active * linear(x, name + "gate", model.width, hidden)
    else:
        positive, negative = part.slopes(model.width)
        active = torch.where(units > 0, positive * units, negative * units)
    return part.gain_at(model.width) ** 0.5 * linear(active, name + "post", hidden, model.width)
