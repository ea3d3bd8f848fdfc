"""The witness: number by number against the module in plain PyTorch, with small errors that it must see."""

import math
import tomllib
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import limitformer as lf
from cases.fresh.modules import IDS, Looped, lm_loss
from cases.fresh_witness.modules import CASES
from limitformer.nn.drawn.simulate import torch_seed
from limitformer.stepping import trajectory
from limitformer.subjects.inputs import inputs_for
from limitformer.subjects.losses import chosen_loss
from limitformer.subjects.subject import resolve
from limitformer.weightless.building import drawn_module
from limitformer.weightless.network import Weightless
from limitformer.weightless.simulate import accepted_inputs
from limitformer.witness import DRAWN, NOT_WITNESSED, WITNESSED
from limitformer.witness import training as witness_training
from limitformer.witness import witness as witness_module
from limitformer.witness.complete import Known, completed, identity_error, solved
from limitformer.witness.real import CastsAsCopies

SMALL = {"vocab_size": 101, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 32, **SMALL}
LLAMA = {
    "model_type": "llama", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 80, "pad_token_id": 0, **SMALL,
}  # fmt: skip
QUIET = {"samples": 1, "progress": False}


def adamw(module, **options):
    groups = [[p for p in module.parameters() if p.dim() > 1], [p for p in module.parameters() if p.dim() < 2]]
    decays = zip(groups, (0.1, 0.0), strict=True)
    return torch.optim.AdamW([{"params": each, "weight_decay": decay} for each, decay in decays], 1e-3, **options)


def error(a, b):
    return float((a - b).norm() / b.norm())


def test_completed_weights_have_the_products_and_any_remainder():
    """Z W = U and D Wᵀ = B of a drawn W, with repeated rows and rows of zeros; another remainder is another W."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(40, 24, generator=generator, dtype=torch.float64)
    z, d = (torch.randn(12, size, generator=generator, dtype=torch.float64) for size in w.shape)
    z[3], z[5], d[2] = z[4], 0.0, 1e-9 * d[1]
    left, right = solved(z, z @ w), solved(d, d @ w.T)
    first, second = (completed(left, right, 1.0, torch.float64, "w", seed) for seed in (0, 1))
    assert error(first, second) > 0.1
    for each in (first, second):
        assert error(z @ each, z @ w) < 1e-12
        assert error(d @ each.T, d @ w.T) < 1e-12
    products = {False: (z, z @ w), True: (d, d @ w.T)}
    assert identity_error(products) < 1e-15
    other = {False: (z, z @ w), True: (d, d @ (1.001 * w).T)}  # answers of two matrices
    assert identity_error(other) > 1e-5
    contradictory = completed(left, solved(*other[True]), 1.0, torch.float64, "w", 0)
    assert max(error(z @ contradictory, z @ w), error(d @ contradictory.T, other[True][1])) > 1e-5


def test_rounding_in_a_small_direction_of_one_side_leaves_the_other_side():
    """Products with Z keep their digits in a direction that nearly cancels in D."""
    generator = torch.Generator().manual_seed(0)
    w, d = (torch.randn(size, 16, generator=generator, dtype=torch.float64) for size in (20, 6))
    z = torch.randn(6, 20, generator=generator, dtype=torch.float64)
    d[5] = d[0] + d[1] + 1e-9 * d[5]
    noise = 1e-15 * torch.randn(6, 20, generator=generator, dtype=torch.float64)
    known = solved(z, z @ w), solved(d, d @ w.T + noise)
    assert error(z @ completed(*known, 1.0, torch.float64, "w", 0), z @ w) < 1e-13
    trusting = [Known(each.directions, each.images, torch.ones(len(each.shares))) for each in known[::-1]]
    twin = completed(*trusting, 1.0, torch.float64, "w", 0).T
    assert error(z @ twin, z @ w) > 1e-9


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("model", "draw"), [(LLAMA, "auto"), (GPT2, "never")], ids=["llama", "gpt2"])
def test_steps_are_witnessed_and_small_errors_are_seen(model, draw, monkeypatch):
    def status(optimizer=adamw):
        return lf.steps(model, 12, optimizer=optimizer, steps=2, seed=0, clip=1.0, draw=draw, **QUIET).witness

    sound = status()
    assert (sound.status, sound.number_format, sound.steps) == (WITNESSED, "float64", 2)
    assert sound.ratio < 1
    assert max(sound.differences.values()) < 1e-9
    built = witness_training.real_module

    def with_error(change):
        @contextmanager
        def build(*arguments):
            with built(*arguments) as module:
                change(module)
                yield module

        monkeypatch.setattr(witness_training, "real_module", build)
        found = status()
        monkeypatch.setattr(witness_training, "real_module", built)
        return found

    norm = "transformer.h.1.ln_2" if model is GPT2 else "model.layers.1.post_attention_layernorm"
    eps = "eps" if model is GPT2 else "variance_epsilon"
    head = dict.fromkeys(("transformer.ln_f.weight", "model.norm.weight"))

    def other_eps(module):
        part = module.get_submodule(norm)
        setattr(part, eps, 1.001 * getattr(part, eps))

    def hooked(module):
        weight = next(each for name, each in module.named_parameters() if name in head)
        weight.register_hook(lambda gradient: (1 + 1e-6) * gradient)

    found = with_error(other_eps)
    assert found.status == DRAWN
    assert norm in found.reason
    found = with_error(hooked)
    assert found.status == DRAWN
    assert "norm.weight" in found.reason or "ln_f.weight" in found.reason
    made = witness_training.made_at
    monkeypatch.setattr(
        witness_training, "made_at", lambda _, *where: made(lambda m: adamw(m, betas=(0.9, 0.9991)), *where)
    )
    found = status()
    assert found.status == DRAWN
    assert "the update of" in found.reason


# Structures that `make test` witnesses as types of transformers.
REPEATED = {"GPT-2", "Llama", "BERT", "Swin", "Whisper", "Mamba", "encoder-decoder", "mixture of experts"}
FIRST = sorted(CASES, key=lambda case: case.name in REPEATED)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about what the cases do
@pytest.mark.slow(keep=len(CASES) - len(REPEATED))
@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.name.replace(" ", "_"))
def test_forty_modules_of_fresh_eyes(case):
    """No sound module is drawn; a trap is witnessed, drawn with torch's own numbers, or refused."""
    options = {"optimizer": case.optimizer, "loss": case.loss, "steps": 2, "seed": 0, **QUIET}
    if case.name in ("max norm", "remembered keys", "recomputed", "backward in forward", "alternating build"):
        with pytest.raises(lf.InputError):
            lf.steps(case.build, case.inputs, **options)
        return
    report = lf.steps(case.build, case.inputs, **options)
    assert report.witness.status in ((WITNESSED, DRAWN) if case.trap else (WITNESSED,))
    if report.witness.status == DRAWN:
        losses = report.data.loss.values[0, 0].tolist()
        assert losses == pytest.approx(trained(case), rel=1e-5)


def trained(case):
    """Return the losses of two steps in plain torch, of the first network that is drawn."""
    module = drawn_module(case.build, torch.float32, torch_seed(0, "weightless build 0")).eval()
    made = case.optimizer(module)
    named = case.inputs if isinstance(case.inputs, dict) else {"": case.inputs}
    losses = []
    for step in range(3):
        module.zero_grad()
        out = module(**named) if "" not in named else module(named[""])
        value = case.loss(out, named).mean()
        losses.append(value.item())
        if step < 2:
            value.backward()
            made.step()
    return losses


def test_misread_module_is_drawn_by_check():
    """A parameter whose products are not those that its shape says: the report is that of drawn networks."""
    case = next(each for each in CASES if each.name == "__torch_function__")
    report = lf.check(case.build, case.inputs, loss=case.loss, **QUIET)
    assert report.witness.status == DRAWN
    assert "drawn: 1 whole network, because on the same weights the output of blocks.0.attention.v" in " ".join(
        str(report).split()
    )
    module = drawn_module(case.build, torch.float32, torch_seed(0, "weightless build 0")).eval()
    real = case.loss(module(case.inputs), {"": case.inputs}).mean().item()
    assert float(report.curves.loss[0]) == pytest.approx(real, rel=1e-5)
    assert report.record()["witness"]["status"] == DRAWN
    assert report.proof in report.page().replace("&#x27;", "'")


def test_wrong_law_is_drawn(monkeypatch):
    """The entries of a real build are held against the law that was read."""
    built = witness_module.real_module

    @contextmanager
    def wider(*arguments):
        with built(*arguments) as module:
            with torch.no_grad():
                module.transformer.h[0].mlp.c_fc.weight.mul_(1.1)
            yield module

    assert lf.check(GPT2, tokens=12, **QUIET).witness.status == WITNESSED
    monkeypatch.setattr(witness_module, "real_module", wider)
    found = lf.check(GPT2, tokens=12, **QUIET).witness
    assert found.status == DRAWN
    assert "mlp.c_fc.weight" in found.reason


def test_module_without_room_is_reduced_or_not_witnessed(monkeypatch):
    monkeypatch.setattr(witness_module, "available_memory", lambda: 10_000)
    found = lf.check(LLAMA | {"vocab_size": 3000}, tokens=12, **QUIET).witness
    assert (found.status, found.reduced) == (WITNESSED, True)
    assert "of a copy with" in str(found)
    case = next(each for each in CASES if each.name == "Llama")
    found = lf.check(case.build, case.inputs, loss=case.loss, **QUIET).witness
    assert found.status == NOT_WITNESSED
    assert "the module needs" in found.reason
    assert lf.check(case.build, case.inputs, loss=case.loss, witness="full", **QUIET).witness.status == WITNESSED
    assert lf.check(LLAMA, tokens=12, witness=False, **QUIET).witness is None


def test_map_that_few_tokens_use_before_many_is_kept_for_both():
    """ProphetNet's order: fresh numbers answer for one token, then the others would read the entries."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.blocks = nn.Embedding(50, 16), nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
            for block in self.blocks:
                nn.init.normal_(block.weight, std=0.25)

        def forward(self, ids):
            x = self.e(ids)
            for block in self.blocks:
                x = x + torch.cat((block(x[:, :1]), block(x[:, 1:])), dim=1).tanh()
            return x

    report = lf.check(Twice, torch.arange(40)[None] + 1, **QUIET)
    assert report.witness.status == WITNESSED
    assert report.witness.ratio < 1e-2


def test_network_that_rounding_changes_is_not_witnessed():
    """A weight of 1e9 turns a change of 1e-10 into another output: nothing is said."""

    class Chaotic(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.blocks = nn.Embedding(50, 16), nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])

        def forward(self, ids):
            x = self.e(ids)
            for block in self.blocks:
                x = x + (1e9 * block(x)).sin()
            return x

    found = lf.check(Chaotic, torch.arange(8)[None], **QUIET).witness
    assert found.status == NOT_WITNESSED
    assert "change" in found.reason
    assert math.isfinite(found.ratio)


def test_rates_in_float32_are_rates():
    """Torch would compute bias corrections in float32."""
    found = lf.steps(
        GPT2, 8, optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01)), steps=2, seed=0, **QUIET
    ).witness  # fmt: skip
    assert (found.status, found.steps) == (WITNESSED, 2)


def test_steps_that_rounding_changes_do_not_count():
    """The gate's first step has the sign of a chaotic gradient: the passes before it are compared, and no step."""

    class Waking(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.block, self.gate = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Parameter(torch.zeros(16))

        def forward(self, ids):
            x = self.e(ids)
            return x + self.gate * (1e12 * self.block(x)).sin()

    options = {"optimizer": "adam", "rates": [0.1], "loss": squares, "steps": 2, "seed": 0, **QUIET}
    found = lf.steps(Waking, torch.arange(8)[None], **options).witness
    assert (found.status, found.steps, found.counts["gradient"]) == (WITNESSED, 0, 4)
    assert found.hidden > 0
    assert "step" not in str(found)
    assert max(found.differences.values()) < 1e-6


def squares(out, _):
    return out.square().mean((1, 2))


def test_steps_of_a_module_without_blocks():
    """Nothing is said of a stream; all else is, and an optimiser that is not understood trains drawn networks."""
    loss, rms = (lambda out, inputs: lm_loss(out, inputs[""])), lambda module: torch.optim.RMSprop(module.parameters())
    report = lf.steps(Looped, IDS, optimizer=adamw, loss=loss, steps=2, seed=0, **QUIET)
    assert report.witness.status == WITNESSED
    assert not {"stream", "branch"} & set(report.data)
    assert "stream_change" not in report.rows()[0]
    assert "nothing is said of its stream" in " ".join(str(report).split())
    assert "stream at the last layer" not in report.page()
    drawn = lf.steps(Looped, IDS, optimizer=rms, loss=loss, steps=2, seed=0, **QUIET)
    assert drawn.witness.status == DRAWN
    plain = trained(SimpleNamespace(build=Looped, inputs=IDS, optimizer=rms, loss=loss))
    assert drawn.data.loss.values[0, 0].tolist() == pytest.approx(plain, rel=1e-5)


def test_transfer_is_witnessed_with_the_factors_of_its_rule(monkeypatch):
    """The user's groups are divided by factor; without that the first updates differ."""
    model = LLAMA | {"hidden_size": 64, "num_key_value_heads": 4}
    options = {"optimizer": adamw, "rule": "mup", "base": 32, "seed": 0, "steps": 2, **QUIET}
    result = lf.transfer(model, {"width": [64, 128]}, 8, **options)
    assert (result.witness.status, result.witness.steps) == (WITNESSED, 2)
    assert "witnessed at width 64: your own module" in " ".join(str(result).split())
    assert result.record()["witness"]["status"] == WITNESSED
    assert result.proof in result.page()
    monkeypatch.setattr(trajectory, "by_factors", lambda group, factors: [group])
    twin = lf.transfer(model, {"width": [64, 128]}, 8, **options)
    assert "the update of" in twin.witness.reason


def test_transfer_draws_networks_for_an_optimiser_that_is_not_understood():
    model = LLAMA | {"hidden_size": 64, "num_key_value_heads": 4}

    def rms(module):
        return torch.optim.RMSprop(module.parameters(), 1e-3)

    options = {"optimizer": rms, "rate": 2e-3, "seed": 0, "steps": 1, **QUIET}
    result = lf.transfer(model, {"width": [64, 128]}, 8, **options)
    assert "drawn: 2 whole networks, because the optimiser RMSprop" in " ".join(str(result).split())
    (own,) = lf.steps(model, 8, **options | {"rates": [options.pop("rate")]}).data.loss.values[0]
    np.testing.assert_allclose(result.data[64].loss.values[0], own)
    with pytest.raises(lf.InputError, match=r"width 64: .*RMSprop is not .* rule mup depend on the optimiser\.$"):
        lf.transfer(model, {"width": [64, 128]}, 8, rule="mup", **options)


def test_factory_that_does_not_run_in_float64_is_compared_in_float32():
    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            if torch.get_default_dtype() == torch.float64:
                raise TypeError("float32 only")
            self.e, self.blocks = nn.Embedding(50, 16), nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])

        def forward(self, ids):
            x = self.e(ids)
            for block in self.blocks:
                x = x + block(x).tanh()
            return x

    found = lf.check(Single, torch.arange(8)[None], **QUIET).witness
    assert (found.status, found.number_format) == (WITNESSED, "float32")


def test_casts_as_copies_draw_no_weights():
    """Else the second comparison, which decides a small difference, would be of another form of the weights."""
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    subject = resolve(config)
    network = Weightless(subject, torch.float64, torch.device("cpu"))
    inputs = accepted_inputs(inputs_for(subject, None, 8), network, 0, own_loss=False)
    with CastsAsCopies(torch.float32):
        network.run(1, range(1), inputs, "never", chosen_loss(None, subject.task))
    assert not any("__eq__" in reason for reason in network.reasons.values()), network.reasons
    assert network.uses["transformer.h.0.mlp.c_fc.weight"] == "never drawn"


def test_every_mutant_is_in_the_source_once():
    """`python -m tests.witness.mutants` plants them, in minutes; a text that has moved would plant nothing."""
    table = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text(encoding="utf-8"))["mutant"]
    source = Path(lf.__file__).parents[1]
    assert len({each["name"] for each in table}) == len(table) == 40
    assert [each["name"] for each in table if (source / each["file"]).read_text().count(each["text"]) != 1] == []


def test_numbers_that_networks_share_with_the_caller_are_put_back(monkeypatch):
    """In float32 the module's weights are the caller's memory. The twin copies it in every network."""
    monkeypatch.setattr(witness_training, "MOST_IN_FLOAT64", 0)
    table = torch.randn(61, 48, generator=torch.Generator().manual_seed(0))
    before, loss = table.clone(), lambda out, inputs: lm_loss(out, IDS)

    def shared(make=lambda: table):
        module = Looped()
        module.embed = nn.Embedding.from_pretrained(make(), freeze=False)
        return module

    def found(function):
        report = lf.steps(function, IDS, optimizer="sgd", rates=[0.5], seed=0, loss=loss, **QUIET)
        assert report.witness.number_format == "float32"
        return report.witness.status, *report.data.loss.values.ravel()

    ours = found(shared)
    assert torch.equal(table, before)
    assert ours == found(lambda: shared(lambda: table.clone()))


def test_parameter_that_all_networks_share_is_refused():
    table = nn.Embedding(61, 48)

    def shared():
        module = Looped()
        module.embed = table
        return module

    with pytest.raises(lf.InputError, match=r"share embed\.weight, .* Nearest: a copy in each \(copy.deepcopy\)"):
        lf.steps(shared, IDS, optimizer="sgd", seed=0, loss=lm_loss, **QUIET)


def test_module_with_an_expanded_buffer_is_witnessed():
    class Expanded(Looped):
        def __init__(self):
            super().__init__()
            self.register_buffer("ones", torch.ones(1, 1, 48).expand(2, 24, 48))

        def forward(self, ids):
            return super().forward(ids) + self.ones.sum()

    report = lf.steps(Expanded, IDS, optimizer="sgd", seed=0, loss=lambda out, _: lm_loss(out, IDS), **QUIET)
    assert report.witness.status == WITNESSED
