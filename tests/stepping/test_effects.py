"""Effects of the updates of matrices that begin with given entries: they are the change of the output."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import widths_of_gpt
from limitformer.weightless import simulate_steps

WIDTH, WORDS = 32, widths_of_gpt.VOCABULARY


class Headed(widths_of_gpt.GPT):
    """A GPT with a head of given entries, (words, width) or, `turned`, (width, words), that is applied by `form`."""

    def __init__(self, form, turned, size=0.0):
        super().__init__(WIDTH)
        self.form, self.head = form, None
        entries = size * torch.arange(WIDTH * WORDS).cos()
        self.readout = nn.Parameter(entries.view(WIDTH, WORDS) if turned else entries.view(WORDS, WIDTH))

    def forward(self, ids):
        x = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.form(self.norm(x), self.readout)


FORMS = {
    "linear": (lambda x, w: functional.linear(x, w), False),
    "product": (lambda x, w: x @ w, True),
    "product with the transpose": (lambda x, w: torch.matmul(x, w.T), False),
    "addmm": (lambda x, w: torch.addmm(torch.ones(WORDS), x.flatten(0, 1), w).view(*x.shape[:2], WORDS), True),
    "slices": (lambda x, w: torch.cat([functional.linear(x, part) for part in w.split(100)], -1), False),
    "sum of products": (lambda x, w: torch.einsum("btn,vn->btv", x, w), False),
    "after a multiplier": (lambda x, w: 0.25 * functional.linear(x, w), False),
}


@pytest.mark.parametrize("name", FORMS)
def test_effect_of_a_head_of_zeros_is_the_change_of_the_output(name):
    data = simulate_steps(
        lambda: Headed(*FORMS[name]), 12, optimizer={"name": "adam", "lr": 1e-2}, steps=2, samples=2, seed=0,
        loss=widths_of_gpt.next_token, progress=False,
    )  # fmt: skip
    effect, change = data.update_effect.sel(weight="readout").values[0], data.output_change.values[0]
    np.testing.assert_allclose(effect, change, rtol=1e-5)
    assert np.all(change[:, 1] > 0.01)


@pytest.mark.parametrize("name", FORMS)
def test_effect_of_a_head_of_other_entries_is_the_change_of_the_output(name):
    """All other weights are frozen; the whole output is another number."""

    def build():
        model = Headed(*FORMS[name], size=0.3)
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(key == "readout")
        return model

    data = simulate_steps(
        build, 12, optimizer={"name": "adam", "lr": 1e-2}, steps=2, samples=2, seed=0, loss=widths_of_gpt.next_token,
        progress=False,
    )  # fmt: skip
    effect, change = data.update_effect.sel(weight="readout").values[0], data.output_change.values[0]
    np.testing.assert_allclose(effect, change, rtol=1e-4)
    assert np.all(abs(data.output.values[0][:, 1:] / effect[:, 1:] - 1) > 0.01)
    assert np.all(change[:, 1] > 0.01)


def test_matrix_that_no_linear_map_uses_has_no_effect_of_its_own():
    data = simulate_steps(
        lambda: Headed(lambda x, w: (x[..., None, :] * w).sum(-1), False), 12, optimizer="sgd", steps=1, samples=1,
        seed=0, loss=widths_of_gpt.next_token, progress=False,
    )  # fmt: skip
    assert np.isnan(data.update_effect.sel(weight="readout").values).all()


class Added(nn.Module):
    """A block that adds a function of its linear map, a row of zeros, and the stream."""

    def __init__(self, function, zeros):
        super().__init__()
        self.norm, self.function, self.row = nn.LayerNorm(WIDTH), function, nn.Parameter(torch.zeros(2, WIDTH))
        self.map = nn.Linear(WIDTH, WIDTH, bias=False)
        if zeros:
            nn.init.zeros_(self.map.weight)

    def forward(self, x):
        return x + self.function(self, self.norm(x))


SPARSE = torch.eye(WIDTH).to_sparse()
CALLS = {
    "vmap": lambda block, x: torch.vmap(lambda a: a @ block.map.weight.mT)(x),
    "products inside vmap": lambda block, x: block.map(torch.vmap(lambda a: a @ a.mT @ a)(x)),
    "sparse": lambda block, x: block.map((x[0] @ SPARSE)[None]),
    "sparse by the matrix": lambda block, x: x @ (SPARSE @ block.map.weight),
    "checkpoint": lambda block, x: checkpoint(block.map, x, use_reentrant=False),
    "row": lambda block, x: block.map(x) + x * functional.linear(x, block.row[0])[..., None],
    "complex": lambda block, x: torch.view_as_real(x[..., :16].cfloat() @ complex_of(block.map.weight)).flatten(-2),
}


def complex_of(matrix):
    return torch.view_as_complex(matrix.unflatten(-1, (-1, 2)))[:16]


TENSORS = {"vmap", "sparse by the matrix", "complex"}  # these read the matrix as a tensor, which a random one is not


@pytest.mark.parametrize(
    ("name", "zeros"), [(name, zeros) for name in CALLS for zeros in (True, False) if zeros or name not in TENSORS]
)
def test_other_code_runs_as_it_would_without_measuring(name, zeros):
    """Tensors without a storage, rows, other types, and a checkpoint that counts saved tensors."""

    def build():
        return nn.Sequential(
            nn.Embedding(50, WIDTH), *(Added(CALLS[name], zeros) for _ in range(2)), nn.Linear(WIDTH, 50)
        )

    data = simulate_steps(build, 6, optimizer="adam", steps=1, samples=1, seed=0, progress=False)
    assert np.isfinite(data.loss.values).all()


class Lookup(nn.Module):
    """A table whose rows are the output."""

    def __init__(self, given=False):
        super().__init__()
        self.table = nn.Embedding(9, WIDTH)
        if given:
            self.table.weight.data = torch.arange(9.0 * WIDTH).cos().view(9, WIDTH)

    def forward(self, ids):
        return self.table(ids)


TABLES = {  # the forms of a table
    "rows": (Lookup, {"name": "sgd", "lr": 0.5}),
    "undrawn": (Lookup, lambda module: torch.optim.Muon(module.parameters(), lr=0.1, weight_decay=0.0)),
    "entries": (Lookup, {"name": "adam", "lr": 0.1, "weight_decay": 0.1}),
    "of the module": (lambda: Lookup(given=True), {"name": "sgd", "lr": 0.5}),
}


@pytest.mark.parametrize("name", TABLES)
def test_effect_of_a_table_is_the_change_of_the_rows_that_tokens_read(name):
    model, optimizer = TABLES[name]

    def loss(out, inputs):
        return (out[..., :4] - 1).square().mean((-2, -1)) * 50

    ids = torch.tensor([[3, 3, 3, 3, 5, 1]])
    samples = 1 if name == "of the module" else 2  # which is the same each time
    data = simulate_steps(model, ids, optimizer=optimizer, steps=2, samples=samples, seed=0, loss=loss, progress=False)
    effect, change = data.lookup_effect.values[0, :, :, 0], data.output_change.values[0]
    np.testing.assert_allclose(effect, change, rtol=1e-4, atol=1e-7)
    assert np.all(change[:, 1] > 1e-3)
    np.testing.assert_array_equal(data.update_effect.values, data.lookup_effect.values)
    if name == "rows":  # a mean over rows, not over tokens, is another number
        by_row = data.weight_change.values[0, :, 1, 0] * float(data.weight_size[0]) / (3 * WIDTH) ** 0.5
        assert np.all(abs(by_row / effect[:, 1] - 1) > 0.1)


def test_tied_table_has_the_effect_of_the_head_and_that_of_the_lookup():
    shape = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 50}
    optimizer = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.0}
    data = simulate_steps(shape, 16, optimizer=optimizer, steps=1, samples=1, seed=0, progress=False)
    table = data.sel(weight="transformer.wte.weight").isel(rate=0, sample=0, step=1)
    assert float(table.lookup_effect) == pytest.approx(1e-3, rel=1e-3)  # Adam's first step, with a gradient everywhere
    assert float(table.update_effect) > 3e-3
    assert np.isnan(data.lookup_effect.sel(weight="transformer.h.0.mlp.c_fc.weight").values).all()
