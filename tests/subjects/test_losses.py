"""The default loss: it is chosen where the shapes leave no doubt, and an error asks for one elsewhere."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import limitformer as lf
from cases.networks import IDS, Stack

WIDTH, WORDS = 24, 20


class Head(Stack):
    """Logits by a head of `words`, tied to the embedding if `tied`."""

    def __init__(self, words=WORDS, tied=False, width=WIDTH):
        super().__init__(depth=1, width=width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.e.weight

    def forward(self, ids):
        return self.head(super().forward(ids))


class Table(Head):
    """The embedding is a parameter, and the tokens are the first dimension."""

    def __init__(self):
        super().__init__()
        self.e = None
        self.table = nn.Parameter(torch.randn(WORDS, WIDTH))

    def forward(self, ids):
        return self.head(self.blocks[0](functional.embedding(ids, self.table)))


class WithTargets(Head):
    def forward(self, ids, targets=None):
        return super().forward(ids)


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x):
        return x + self.blocks[0](x)


def run(build, inputs=IDS, **options):
    data = lf.weightless.simulate_steps(
        build, inputs, optimizer="sgd", steps=1, samples=1, seed=0, progress=False, **options
    )
    return data.attrs["loss"], float(data.loss[0, 0, 0])


NEXT = "next-token cross-entropy"
SQUARE = {"x": torch.randn(2, 3, WIDTH), "targets": torch.randn(2, 3, WIDTH)}


@pytest.mark.parametrize(
    ("build", "inputs", "options", "name"),
    [
        (Head, IDS, {}, NEXT),
        (lambda: Head(tied=True), IDS, {}, NEXT),
        (Table, IDS.T, {"batch_dim": 1}, NEXT),
        (WithTargets, IDS, {}, "cross-entropy with targets"),
        (lambda: Head(words=21), IDS, {"loss": "next-token"}, NEXT),
        (lambda: Head(width=WORDS), IDS, {"loss": "next-token"}, NEXT),
        (Regression, SQUARE, {"loss": "mse"}, "mean squared error"),
        (Stack, IDS, {"loss": lambda out, inputs: out.square().mean()}, "test_losses.<lambda>"),
    ],
)
def test_loss_has_its_name(build, inputs, options, name):
    found, value = run(build, inputs, **options)
    assert found.endswith(name)
    assert np.isfinite(value)


@pytest.mark.parametrize(
    ("build", "inputs", "options", "message"),
    [
        (Stack, IDS, {}, "the 24 numbers of each token may be its hidden units"),
        (lambda: Head(width=WORDS), IDS, {}, "the 20 numbers of each token may be its hidden units"),
        (lambda: Head(words=21), IDS, {}, "no table that it looks up has as many rows as each token has numbers, 21"),
        (lambda: Head(words=9), IDS, {}, "no table that it looks up has as many rows"),
        (Regression, torch.randn(2, 3, WIDTH), {}, "has no numbers for each of its ids"),
        (Regression, SQUARE, {}, r"targets are \(2, 3, 24\) of torch.float32"),
        (Regression, torch.randn(2, 3, WIDTH), {"loss": "mse"}, "needs targets or labels in the inputs.*no targets"),
        (Regression, torch.randn(2, 3, WIDTH), {"loss": "next-token"}, "next-token needs ids"),
        (lambda: Head(words=9), IDS, {"loss": "next-token"}, "the id 9 is beyond the 9 numbers"),
        (Head, IDS, {"loss": "next-tokens"}, "got 'next-tokens'.*Nearest: next-token"),
    ],
)
def test_open_loss_is_asked_for(build, inputs, options, message):
    with pytest.raises(lf.InputError, match=message):
        run(build, inputs, **options)


def test_ids_may_have_any_name():
    assert run(Head, {"ids": IDS}, unseen={"ids": IDS}) == run(Head)


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_next_token_is_the_cross_entropy_of_the_next_id(batch_dim):
    """It is not that of the same id, which the table makes likely, since it is also the head."""
    torch.manual_seed(1)
    module, ids = Head(tied=True), torch.cat([IDS, IDS + 1])
    given = ids if batch_dim == 0 else ids.T
    report = lf.check(module, given, law=False, loss="next-token", batch_dim=batch_dim, progress=False)
    logits = module(ids).detach()
    shifted = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert float(report.curves.loss[0]) == pytest.approx(float(shifted), rel=1e-6)
    assert float(shifted) > 2 * float(functional.cross_entropy(logits.flatten(0, 1), ids.flatten()))


def test_heading_and_data_of_a_check_name_the_loss():
    names = {}
    for build in (lambda: Head(words=9), Head):
        report = lf.check(build, IDS, samples=2, progress=False)
        names[report.about["loss"]] = report
        assert report.heading.endswith(f", loss: {report.about['loss']}")
        assert report.heading in report.page()
        assert report.record()["about"]["loss"] in " ".join(str(report).split())
    assert list(names) == ["a random readout", NEXT]
    assert names[NEXT].about["chance"] == pytest.approx(np.log(WORDS))


@pytest.mark.parametrize("witness", [True, False])
@pytest.mark.parametrize(
    ("build", "inputs", "batch_dim"),
    [(Head, IDS, 0), (Table, IDS.T, 1), (WithTargets, {"": IDS, "targets": IDS}, 0)],
)
def test_check_takes_the_loss_that_steps_take(build, inputs, batch_dim, witness):
    report = lf.check(build, inputs, samples=1, progress=False, witness=witness, batch_dim=batch_dim)
    assert report.about["loss"] == run(build, inputs, batch_dim=batch_dim)[0]
    assert report.about["chance"] == pytest.approx(np.log(WORDS))


def test_check_of_a_module_takes_the_loss_of_its_logits():
    """It is computed here by torch; the twin predicts the same id."""
    torch.manual_seed(1)
    module = Head(tied=True)
    logits = module(IDS).detach()
    report = lf.check(module, IDS, law=False, progress=False)
    shifted = float(functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()))
    assert float(report.curves.loss[0]) == pytest.approx(shifted, rel=1e-6)
    assert shifted > 2 * float(functional.cross_entropy(logits.flatten(0, 1), IDS.flatten()))


def test_a_head_too_large_is_found_where_the_shapes_show_logits():
    """Where they do not, the loss is a random readout, and the report says that it does not test the head."""
    for words, tested in ((WORDS, True), (9, False)):
        torch.manual_seed(0)
        module = Head(words=words)
        with torch.no_grad():
            module.head.weight.mul_(20.0)
        report = lf.check(module, IDS, law=False, progress=False, witness=False)
        assert ("does not test the size of the head: --loss next-token" in " ".join(str(report).split())) is not tested
        assert ("loss" in [each.name for each in report.verdicts]) is tested


def test_failing_user_loss_lists_the_names_of_inputs():
    def wrong(out, ids):
        return out[:, :-1].sum() + ids[:, 1:].sum()

    with pytest.raises(lf.InputError, match=r"wrong fails: TypeError: .* It receives .* the names are '' \(''"):
        lf.check(Head, IDS, loss=wrong, samples=1, progress=False)
