"""Verdicts on number formats: public reports in small, networks that have none, the command line, and bad input."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.checking.thresholds import FORMAT_VERDICTS
from limitformer.cli.app import app
from limitformer.formats.verdicts import WHY

QUICK = {"tokens": 16, "samples": 1, "progress": False}
SMALL = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 32}


class Block(nn.Module):
    def __init__(self, width, mask, branch, gain):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mask, self.branch, self.gain = mask, branch, gain

    def forward(self, x):
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        logits = self.gain * (q @ k.mT) / q.shape[-1] ** 0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.out(logits.masked_fill(future, self.mask).softmax(-1) @ v)
        return x + self.branch * self.down(torch.relu(self.up(self.second(x))))


class Model(nn.Module):
    """A Transformer of two blocks whose mask, branches and logits are chosen."""

    def __init__(self, width=32, mask=-math.inf, branch=1.0, gain=1.0, stream=1.0):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(50, width), nn.LayerNorm(width), nn.Linear(width, 50)
        self.blocks = nn.ModuleList(Block(width, mask, branch, gain) for _ in range(2))
        self.stream = stream

    def forward(self, ids):
        x = self.stream * self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Adapter(nn.Module):
    """A product with an adapter that starts at zero."""

    def __init__(self, width):
        super().__init__()
        self.whole, self.down, self.up = nn.Linear(width, width), nn.Linear(width, 4), nn.Linear(4, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.whole(x) + self.up(self.down(x))


def with_adapters():
    model = Model()
    for block in model.blocks:
        block.out = Adapter(32)
    return model


def with_a_large_channel():
    model = Model()
    with torch.no_grad():
        model.blocks[0].second.weight[0] = 1e7
    return model


def named(report):
    """Return the verdicts on formats by name."""
    return {one.name: one for one in report.verdicts if one.name in FORMAT_VERDICTS}


ADAMW = {"name": "adamw", "lr": 6e-4}
REPORTS = {  # public reports of trouble at the start: arguments of check, the verdict, its grade, and words of it
    "facebookresearch/fairseq#3575: a mask of -1e8": (
        lambda: Model(mask=-1e8), {"formats": "fp16"}, "overflow", "broken", "masked_fill (forward) reaches 1e+08",
    ),
    "huggingface/transformers#5651: a branch beyond 65,504": (
        lambda: Model(branch=1e6), {"formats": "fp16"}, "overflow", "broken", "the format ends at 65,504",
    ),
    "engichang1467/Open-Rig3R#35: gradients round to zero": (
        Model, {"formats": "fp16", "loss": lambda out, _: 1e-6 * out.square().mean((1, 2))},
        "underflow", "note", "a loss scale from 2^1",
    ),
    "NVIDIA/apex#452: a loss scale below 1": (
        Model, {"formats": "fp16", "loss": lambda out, _: 1e4 * out.square().sum((1, 2))},
        "overflow", "watch", "at most 2^-",
    ),
    "pytorch/ao#1124: bf16 weights do not move": (
        Model, {"formats": "bf16", "optimizer": ADAMW}, "unchanged", "watch", "leaves 100% of norm.weight as it is",
    ),
    "Nerogar/OneTrainer#996: no weight decay in bf16": (
        Model, {"formats": "bf16", "optimizer": ADAMW}, "unchanged", "watch", "weight decay changes nothing",
    ),
    "pytorch/ao#3356: a scale of a tensor of zeros": (
        with_adapters, {"formats": "e4m3"}, "no scale", "note", "blocks.*.out.up is all zeros",
    ),
    "an output with one channel that is 10⁷ times as large": (
        with_a_large_channel, {"formats": "e4m3"}, "swallowed", "watch", "with one scale for it",
    ),
    "a branch that the stream swallows": (
        lambda: Model(branch=1e-3, stream=1e2), {"formats": "bf16"}, "lost", "watch", "changes nothing there",
    ),
}  # fmt: skip


@pytest.mark.parametrize("report", REPORTS)
def test_public_reports_are_named(report):
    build, options, name, grade, words = REPORTS[report]
    found = lf.check(build, **QUICK, **options)
    every = [one for one in found.verdicts if one.name == name]
    assert any(one.grade == grade and words in one.said for one in every), [one.said for one in found.verdicts]
    assert not any(one.name == "range" for one in found.verdicts)


def test_logits_of_gemma_4_have_the_size_that_its_scale_of_1_gives():
    """Normed queries and keys of size √256 each, without a scale (huggingface/transformers#45676): std 16."""
    config = {
        "model_type": "gemma4_text", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 64, "vocab_size": 100,
    }  # fmt: skip
    report = lf.check(config, tokens=64, samples=1, formats="bf16", rounding=True, progress=False)
    assert float(report.curves["logit_std"].isel(block=0).mean()) == pytest.approx(16, rel=0.05)
    assert "are rounded by up to 0.25" in named(report)["coarse"].said
    assert (
        float(report.rounding["gradient"].isel(format=0, layer=0, sample=0)) > 0.3
    )  # bf16 leaves little of the gradient
    assert "coarse" not in named(lf.check(SMALL, **QUICK, formats="bf16"))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a_sound_model_has_no_alarm(name):
    assert not named(lf.check(Model, **QUICK, formats=name))
    ends = lf.check(Model, **QUICK, formats="fp16").formats["loss_scale"].values[0]
    assert ends[0] < 0 < 10 < ends[1]


def test_loss_scales_move_with_the_loss():
    """A loss 2^k times as large has the window k lower: the exact answer, and what a wrong sign would give."""
    ends = [
        lf.check(Model, **QUICK, formats="fp16", loss=lambda out, _, k=k: 2.0**k * out.square().mean((1, 2)))
        .formats["loss_scale"].values[0]
        for k in (0, 7)
    ]  # fmt: skip
    assert np.array_equal(ends[1], ends[0] - 7)


def test_the_largest_loss_scale_is_the_last_whose_gradients_are_finite():
    """A plain network in which the loss is scaled, and its gradients are cast."""
    torch.manual_seed(0)
    module = Model().eval()
    ids = torch.randint(0, 50, (1, 16), generator=torch.Generator().manual_seed(1))
    report = lf.check(module, ids, formats="fp16", loss=lambda out, _: out.square().mean((1, 2)), progress=False)
    most = int(report.formats["loss_scale"].sel(end="most").values[0])
    kept = []

    def keep(part, args, out):
        out.register_hook(kept.append)

    for part in module.modules():
        part.register_forward_hook(keep)
    (2.0**most * module(ids).square().mean()).backward()
    every = [*kept, *(one.grad for one in module.parameters())]
    assert all(torch.isfinite(each.half()).all() for each in every)
    assert any(torch.isinf((2 * each).half()).any() for each in every)


class Kept(Block):
    """A block that keeps what its own operations make, with its gradient."""

    def forward(self, x):
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        self.weights = (q @ k.mT).softmax(-1)
        self.mean = self.weights @ v
        self.squares = self.up(self.second(x)).square()
        for each in (self.weights, self.mean, self.squares):
            if each.requires_grad:
                each.retain_grad()
        return x + self.out(self.mean) + self.down(self.squares)


def test_operations_inside_a_module_have_their_numbers_and_gradients():
    """Number by number, against tensors that the module keeps."""
    torch.manual_seed(0)
    module = Model().eval()
    module.blocks = nn.ModuleList(Kept(32, 0.0, 1.0, 1.0) for _ in range(2))
    ids = torch.randint(0, 50, (1, 16), generator=torch.Generator().manual_seed(1))

    def loss(out, _):
        return out.square().mean((1, 2))

    amax = lf.check(module, ids, formats="fp16", loss=loss, progress=False).formats["amax"]
    loss(module(ids), None).mean().backward()
    for number, block in enumerate(module.blocks):
        for name, kept in (("softmax", block.weights), ("pow", block.squares)):
            at = amax.sel(tensor=f"blocks.{number} {name}")
            assert float(at.sel(direction="forward")) == float(kept.detach().abs().max())
            assert float(at.sel(direction="backward")) == pytest.approx(float(kept.grad.abs().max()), rel=1e-5)


def test_tables_page_and_files(tmp_path):
    report = lf.check(SMALL, **QUICK, formats=["bf16", "e4m3"], rounding=True)
    text = str(report)
    assert "difference from float32, layer" in text
    assert "gradient in e4m3" in text
    assert max(map(len, text.splitlines())) <= 80
    report.save(tmp_path)
    assert {"formats.nc", "rounding.nc"} <= {each.name for each in tmp_path.iterdir()}
    record = json.loads((tmp_path / "check.json").read_text())["formats"]
    assert record["e4m3"]["zero"] == pytest.approx(float(report.formats["zero"].sel(format="e4m3").max()))
    page = (tmp_path / "check.html").read_text()
    assert page.count("Number formats") >= 1
    assert "Numbers by kind of tensor" in page
    assert lf.check(SMALL, **QUICK).formats is None


def test_a_limit_of_the_command_line(tmp_path):
    (tmp_path / "model.py").write_text("import torch\n" + SOURCE)
    place = f"{tmp_path / 'model.py'}:build"
    arguments = ["check", place, "--tokens", "8", "--samples", "1", "--witness", "no"]
    run = CliRunner().invoke(app, [*arguments, "--number-format", "fp16,bf16", "--fail-on", "overflow"])
    assert run.exit_code == 1
    assert "broken: fp16: blocks.*" in run.output
    assert CliRunner().invoke(app, [*arguments, "--number-format", "bf16", "--fail-on", "overflow"]).exit_code == 0


SOURCE = """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)
    def forward(self, x):
        return x + 1e6 * self.out(self.norm(x))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(40, 16), torch.nn.Linear(16, 40)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def build():
    return Model()
"""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--number-format", "fp61"], "no number format 'fp61'"),
        (["--round"], "--round needs --number-format"),
        (["--optimizer", "adamw"], "--optimizer needs --number-format"),
        (["--number-format", "bf16", "--optimizer", "adamx"], "unknown optimizer 'adamx'"),
    ],
)
def test_bad_options_are_named_in_one_line(arguments, says):
    run = CliRunner().invoke(app, ["check", "gpt2", *arguments])
    assert run.exit_code == 2
    assert says in run.output
    assert len(run.output.strip().splitlines()) <= 3


@pytest.mark.parametrize("options", [{"rounding": True}, {"optimizer": "adamw"}])
def test_options_that_need_formats(options):
    with pytest.raises(InputError, match="needs formats"):
        lf.check(SMALL, **QUICK, **options)


class PerSequence(Model):
    """A head for each sequence, which takes one vector."""

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return torch.stack([self.head(each[0]) for each in self.norm(x)])


def test_products_of_vectors_and_tensors_of_zeros():
    report = lf.check(PerSequence, tokens=8, samples=1, formats="e4m3", loss=lambda out, _: out.square().mean(1))
    assert float(report.formats["amax"].sel(direction="weight gradient", tensor="head.weight")) > 0
    assert not named(report)


def test_hooks_leave_the_module_when_a_check_fails():
    module = Model()
    with pytest.raises(InputError, match=r"the loss .* fails: AttributeError"):
        lf.check(module, tokens=8, formats="fp16", loss=lambda out, _: out.missing)
    assert not any(one._backward_hooks for one in module.parameters())


def test_coarse_logits_of_an_encoder_are_seen():
    config = {
        "model_type": "t5",
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 40,
    }
    overrides = {"encoder.*.SelfAttention.q.weight": 30.0}
    report = lf.check(config, tokens=8, samples=1, formats="bf16", overrides=overrides, progress=False)
    assert "coarse" in named(report)
    assert not any("largest logit" in one.said for one in report.verdicts)


def test_loss_scales_need_gradients():
    report = lf.check(SMALL, **QUICK, formats="fp16", gradients=False)
    assert "none" not in str(report)
    with pytest.raises(InputError, match="optimizer needs gradients"):
        lf.check(SMALL, **QUICK, formats="fp16", gradients=False, optimizer="adamw")


def test_every_verdict_has_words_and_an_example():
    assert set(WHY) == set(FORMAT_VERDICTS) == {name for *_, name, _, _ in REPORTS.values()} | {"coarse"}
