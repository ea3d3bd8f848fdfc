"""User-defined parts in their own file, which does not import the package."""

import math

import numpy as np
import torch

# --- activations ---


def silu(x):
    return x / (1.0 + math.exp(-x))


def x_tanh(x):
    return x * math.tanh(x)


def torch_x_tanh(x):
    return x * torch.tanh(x)


def bent(x):
    """A function with a kink and a mean other than zero, written only with operators; it takes numbers and tensors."""
    return abs(x + 0.5) - 0.25 * x


def tanh(x):
    return math.tanh(x)


def shifted_tanh(x):
    """tanh with its point at 0.4 moved to the origin, where its slope is 1."""
    shift = math.tanh(0.4)
    return (math.tanh(x + 0.4) - shift) / (1.0 - shift * shift)


def torch_shifted_tanh(x):
    shift = math.tanh(0.4)
    return (torch.tanh(x + 0.4) - shift) / (1.0 - shift * shift)


# --- attention ---


def sigmoid_attention(logits, visible):
    """σ(Y − log m) [Ramapuram et al., 2024]."""
    return visible / (1.0 + len(logits) * np.exp(-logits))


def torch_sigmoid_attention(logits, visible):
    return torch.sigmoid(logits - math.log(len(visible))) * visible


def linear_attention(logits, visible):
    """1 + Y in place of exp Y, plus the token itself, written only with operators."""
    return (1.0 + logits) * visible / len(visible) + np.eye(len(visible))


def torch_linear_attention(logits, visible):
    return (1.0 + logits) * visible / len(visible) + torch.eye(len(visible), dtype=logits.dtype)


# --- norm ---


def bounded(square):
    """Scale tokens longer than √n down to that length."""
    return 1.0 / math.sqrt(max(square, 1.0))


def torch_bounded(square):
    return square.clamp(min=1.0).rsqrt()
