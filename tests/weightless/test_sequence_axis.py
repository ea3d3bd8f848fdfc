"""Sequences in either dimension of the stream and of the inputs."""

import numpy as np
import pytest
import torch
from torch import nn

import limitformer as lf
from limitformer.checking.module import measure_module
from limitformer.subjects.inputs import inputs_of
from limitformer.subjects.losses import square
from limitformer.subjects.subject import resolve

WIDTH = 8


def encoder(batch_first):
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=batch_first, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Words(nn.Module):
    """Ids (sequences, tokens) into an encoder that may take tokens first; padding is masked."""

    def __init__(self, batch_first):
        super().__init__()
        self.batch_first, self.embed, self.encoder = batch_first, nn.Embedding(30, WIDTH), encoder(batch_first)

    def forward(self, input_ids, attention_mask=None):
        padding = None if attention_mask is None else attention_mask == 0
        x = self.embed(input_ids)
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=padding)
        return x if self.batch_first else x.transpose(0, 1)


def within(data):
    """Return correlations at the end, of tokens of one sequence and of different ones."""
    v, sequence = data.covariance.values[:, -1], data.sequence.values
    size = np.sqrt(np.einsum("sii->si", v))
    rho = v / size[:, :, None] / size[:, None]
    same = sequence[:, None] == sequence
    return rho[:, same], rho[:, ~same]


def both(module, tensors, batch_dim=0):
    """Return the datasets of the law and of a module that exists."""
    law = lf.weightless.simulate(
        module, tensors, samples=4, seed=0, batch_dim=batch_dim, gradients=True, dtype=torch.float64, progress=False
    )
    torch.manual_seed(0)
    module = module()
    inputs = inputs_of(tensors, resolve(lambda: module)).with_batch_dim(batch_dim)
    return law, measure_module(module, inputs, square)


@pytest.mark.parametrize(
    "tokens", [9, 8, 4]
)  # clear by its size, a multiple of the number of sequences, and equal to it
@pytest.mark.parametrize("batch_first", [True, False])
def test_sequences_of_identical_words_have_correlation_one(batch_first, tokens):
    same = torch.arange(4)[:, None].repeat(1, tokens)
    for data in both(lambda: Words(batch_first), same):
        alike, apart = within(data)
        assert alike.min() > 1 - 1e-5
        assert apart.mean() < 0.9


@pytest.mark.parametrize("batch_first", [True, False])
def test_padding_is_excluded_from_its_own_sequence(batch_first):
    ids = torch.arange(4)[:, None].repeat(1, 6)
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[1, 3:], mask[2, 5:] = 0, 0
    ids[mask == 0] = 29
    for data in both(lambda: Words(batch_first), {"input_ids": ids, "attention_mask": mask}):
        assert np.bincount(data.sequence.values).tolist() == [6, 3, 5, 6]
        alike, apart = within(data)
        assert alike.min() > 1 - 1e-5
        assert apart.mean() < 0.9


@pytest.mark.parametrize("batch_first", [True, False])
def test_inputs_of_both_orders_give_the_same_numbers_or_are_refused(batch_first):
    x = torch.randn(3, 1, WIDTH, generator=torch.Generator().manual_seed(0)).repeat(1, 5, 1)
    ordered = x if batch_first else x.transpose(0, 1)
    right = 0 if batch_first else 1
    for data in both(lambda: encoder(batch_first), ordered, right):
        assert within(data)[0].min() > 1 - 1e-5
        assert np.bincount(data.sequence.values).tolist() == [5, 5, 5]
    module = encoder(batch_first)
    for network in (lambda: encoder(batch_first), module):
        with pytest.raises(lf.InputError, match=f"influence each other. Nearest: batch_dim={right} if"):
            lf.check(network, ordered, samples=2, batch_dim=1 - right, progress=False)


@pytest.mark.parametrize("batch_dim", [2, True])
def test_batch_dim_other_than_0_or_1_is_refused(batch_dim):
    with pytest.raises(lf.InputError, match="batch_dim must be 0 or 1"):
        lf.weightless.simulate(lambda: encoder(True), torch.ones(2, 3, 8), samples=1, seed=0, batch_dim=batch_dim)


def test_modules_that_mix_sequences_are_refused():
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.blocks = nn.Embedding(30, WIDTH), nn.ModuleList([Mean(), Mean()])

        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return x

    class Mean(nn.Module):
        def forward(self, x):
            return x + x.mean(0, keepdim=True)

    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    for network in (Mixing, Mixing()):
        with pytest.raises(lf.InputError, match="those of Mixing influence each other"):
            lf.check(network, ids, samples=2, progress=False)
