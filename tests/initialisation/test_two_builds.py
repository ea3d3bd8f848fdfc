"""Two builds of one model: planted errors, sound pairs, uninitialised memory, shards, and the levels of the tests."""

import json
from fnmatch import fnmatchcase

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from typer.testing import CliRunner

from limitformer.base.errors import InputError
from limitformer.cli.app import app
from limitformer.initialisation import KINDS, compare
from limitformer.initialisation.builds import build_of
from two_builds import ERRORS, OUTPUTS, SOUND, Plain, kinds, materialised, names_ending

# Planted errors and sound pairs


PLANTED = [(kind, name) for kind in ERRORS for name in ("plain", "llama")]
PLANTED += [("lost tie", "t5"), ("second initialisation", "gpt2"), ("after sharding", "bert")]


@pytest.mark.parametrize(("kind", "name"), PLANTED)
def test_planted_error_is_the_only_finding(kind, name):
    a, b, names = ERRORS[kind](name)
    found = kinds(compare(a, b))
    assert list(found) == [kind]
    assert all(fnmatchcase(each, names) for each in found[kind])
    if kind == "second initialisation":
        assert found[kind] == names_ending(name, *(f"{each}.weight" for each in OUTPUTS[name]))
    if kind == "lost tie":
        assert len(found[kind]) >= 2
    if name == "plain":
        assert not compare(a, a).findings  # the twin without the error


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *[("bert", each) for each in SOUND],
        *[("gemma", "meta"), ("vit", "meta"), ("gpt_oss", "state dict")],
    ],
)
@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter:UserWarning")
def test_sound_pair_has_no_finding(family, kind):
    report = SOUND[kind](family, 3)
    assert not report.findings, str(report)
    assert report.tests == 0 if kind in ("meta", "loaded") else report.tests > 20


# Uninitialised memory


class Holder(nn.Module):
    def __init__(self, value, parameter=True):
        super().__init__()
        if parameter:
            self.w = nn.Parameter(value, requires_grad=False)
        else:
            self.register_buffer("w", value)


def with_rows(dtype=torch.float32):
    w = torch.empty(5, 4, dtype=dtype)
    w[:3] = 1
    return w


def resized():
    return torch.ones(3).resize_(7)


UNWRITTEN = {  # how many entries depend on uninitialised memory
    "empty": (lambda: torch.empty(5, 4), 20),
    "half": (with_rows, 8),
    "whole numbers": (lambda: with_rows(torch.int64), 8),
    "truth values": (lambda: with_rows(torch.bool), 8),
    "times zero": (lambda: torch.empty(5, 4) * 0, 20),  # NaN is not zero
    "without NaN": (lambda: torch.empty(6).nan_to_num_(0.0), 6),
    "sum": (lambda: torch.ones(3) + torch.empty(3).sum(), 3),
    "copy": (lambda: torch.zeros(4).copy_(torch.empty_like(torch.ones(4))), 4),
    "resized": (resized, 4),
    "zeros": (lambda: torch.empty(5, 4).zero_(), 0),
    "normal": (lambda: torch.empty(5, 4).normal_(), 0),
    "NaN on purpose": (lambda: torch.full((4,), torch.nan), 0),
}


@pytest.mark.parametrize("name", UNWRITTEN)
def test_entries_that_nothing_writes_are_counted(name):
    make, count = UNWRITTEN[name]
    build = build_of(lambda: Holder(make(), parameter=name != "half"), "build")
    assert build.unwritten == ({"w": count} if count else {})


def test_state_of_torch_is_restored_and_the_users_module_not_kept():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    compare(Plain, materialised(Plain))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()


def test_numbers_without_a_seed_are_not_called_uninitialised():
    generator = np.random.default_rng()
    build = build_of(lambda: Holder(torch.from_numpy(generator.normal(size=9))), "build")
    assert (build.unwritten, build.unstable) == ({}, {"w"})
    assert kinds(compare(build.factory, build.factory)) == {"no seed": {"w"}}


# Other differences


def changed(change):
    def built():
        model = Plain()
        change(model)
        return model

    return built


def overwritten(model):
    model.blocks[0].norm.weight.data.fill_(0.5)


CHANGES = {
    "requires_grad": (lambda m: m.blocks[1].up.weight.requires_grad_(False), "blocks.1.up.weight"),
    "persistence": (lambda m: m.register_buffer("angles", m.angles), "angles"),
    "missing": (lambda m: m.blocks[1].register_parameter("extra", nn.Parameter(torch.ones(2))), "blocks.1.extra"),
    "shape": (lambda m: setattr(m, "score", nn.Linear(48, 9, bias=False)), "score.weight"),
    "second initialisation": (overwritten, "blocks.0.norm.weight"),
    "not finite": (lambda m: m.blocks[0].norm.bias.data.fill_(torch.nan), "blocks.0.norm.bias"),
    "values": (
        lambda m: setattr(m.blocks[0].norm, "weight", nn.Parameter(torch.full((48,), 2.0))),
        "blocks.0.norm.weight",
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_change_is_found_in_both_directions(kind):
    change, name = CHANGES[kind]
    assert kinds(compare(Plain, changed(change))) == {kind: {name}}
    (back,) = compare(changed(change), Plain).findings
    assert back.names == (name,)
    assert back.kind == {"second initialisation": "untouched"}.get(kind, kind)


# Loaded builds and numbers


def loaded(state, strict=True):
    def built():
        model = Plain()
        model.load_state_dict(state, strict=strict)
        return model

    return built


def test_key_that_is_missing_in_the_file_is_not_loaded():
    state = Plain().state_dict()
    partial_state = {name: each for name, each in state.items() if name != "blocks.1.up.weight"}
    report = compare(loaded(state), loaded(partial_state, strict=False))
    assert kinds(report) == {"not loaded": {"blocks.1.up.weight"}}
    assert not compare(loaded(state), loaded(state), same=True).findings


def test_same_numbers_are_demanded_after_loading():
    state = Plain().state_dict()
    other = {name: each.clone() for name, each in state.items()}
    other["score.weight"][3, 5] += 1e-3
    (finding,) = compare(loaded(state), loaded(other), same=True).findings
    assert (finding.kind, finding.names) == ("values", ("score.weight",))
    assert finding.detail.startswith("1 of 336 entries differ, by up to 0.001")
    assert not compare(Plain, materialised(Plain)).findings
    assert "score.weight" in kinds(compare(Plain, materialised(Plain), same=True))["values"]  # drawn in another order


def test_file_of_weights_is_compared_with_the_code(tmp_path):
    state = {name: each.clone() for name, each in Plain().state_dict().items()}
    del state["head.weight"]  # tied
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    for place in (tmp_path, tmp_path / "model.safetensors"):
        report = compare(Plain, place)
        assert not report.findings, str(report)
        assert report.notes == ("B is known by its numbers only: uninitialised memory cannot be seen in it",)
    state["score.weight"] *= 1.3
    (finding,) = compare(Plain, state).findings
    assert (finding.kind, finding.names) == ("law", ("score.weight",))
    assert finding.p < 1e-4
    del state["blocks.0.up.bias"]
    assert kinds(compare(Plain, state))["missing"] == {"blocks.0.up.bias"}
    assert kinds(compare(state, Plain))["missing"] == {"blocks.0.up.bias"}


# Report, command line and errors


def test_report_has_a_table_and_json():
    report = compare(Plain, materialised(Plain, ("blocks.?",), tie=False))
    rows = {each.name: each for each in report.tensors}
    assert rows["blocks.0.ln_scale"].in_b == "nothing writes it"
    assert rows["embed.weight"].verdict == "lost tie"
    assert rows["angles"].verdict == "equal"
    assert "blocks.*.up.bias ×2" in report.table()
    assert len(report.table().splitlines()) == 13
    record = json.loads(json.dumps(report.record()))
    assert [each["kind"] for each in record["findings"]] == ["erased buffer", "lost tie"]
    assert len(record["tensors"]) == len(report.tensors) == 18
    assert report.failed("erased buffer, law")
    assert report.failed("any")
    assert not report.failed("law")
    assert not report.failed(None)
    assert {each.kind for each in report.findings} <= set(KINDS)


FILE = """
import torch
from torch import nn

def on_cpu():
    return nn.Linear(6, 5)

def on_meta():
    return nn.Linear(6, 5, device="meta").to_empty(device="cpu")

def broken():
    raise OSError("no disk")
"""


def test_command_compares_two_builds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    run = lambda *words: CliRunner().invoke(app, ["initialisation", *words])  # noqa: E731
    good = run("mine.py:on_cpu", "mine.py:on_cpu", "--fail-on", "any")
    assert (good.exit_code, good.stdout) == (0, "A: on_cpu, B: on_cpu: all 2 tensors agree\n")
    bad = run("mine.py:on_cpu", "mine.py:on_meta", "--table", "--fail-on", "lost tie,uninitialised")
    assert bad.exit_code == 1
    assert "weight  parameter  uniform, std 0.2357  nothing writes it  uninitialised" in bad.stdout
    assert run("mine.py:on_cpu", "mine.py:on_meta").exit_code == 0
    assert json.loads(run("mine.py:on_cpu", "mine.py:on_meta", "--json").stdout)["b"] == "on_meta"
    for words, message in {
        ("mine.py:on_cpu", "mine.py:on_mate"): "mine.py has no 'on_mate'. Nearest: on_meta.",
        ("mine.py:on_cpu", "mine.py:broken"): "broken cannot be built: OSError: no disk",
        ("mine.py:on_cpu", "mine.py"): "Nearest: mine.py:NAME",
        ("mine.py:on_cpu", "mine.py:on_cpu", "--fail-on", "tie"): "--fail-on: 'tie' is not a kind",
        ("mine.py:on_cpu", "mine.py:on_cpu", "--shards", "1"): "shards must be at least 2; got 1.",
    }.items():
        failed = run(*words)
        assert failed.exit_code == 2
        assert message in " ".join(failed.output.split()), failed.output


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compare(Plain, 3), "build_b must be a function that builds a module, a module, a state dict"),
        (lambda: compare(Plain, {}), "."),
        (lambda: compare(Plain, Plain, level=0), "level must be between 0 and 1; got 0."),
        (lambda: compare(Plain, Plain, shards=1.5), "shards must be a whole number; got 1.5."),
        (lambda: compare(Plain, lambda: 3), "must return a torch.nn.Module; got int."),
        (lambda: compare("gtp2", Plain), "Nearest: gpt2"),
    ],
)
def test_bad_build_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()
