"""The GitHub Action: its shell steps, run by bash as a runner does, on models that pass and that fail.

The step that installs the package is not run: there is no network, and the package is here.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = ACTION["runs"]["steps"]
SOUND = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99, "initializer_range": 0.1}
FROZEN = SOUND | {"initializer_range": 2.0}
CONDITIONS = {  # of steps, by (inputs.base, whether a step before it failed)
    None: lambda base, failed: not failed,
    "${{ inputs.base != '' && !cancelled() }}": lambda base, failed: base != "",
    "${{ always() }}": lambda base, failed: True,
}


def git(folder, *arguments):
    who = [
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b",
        "-c",
        "init.defaultBranch=main",
        "-c",
        "protocol.file.allow=always",
    ]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def pull_request(tmp_path):
    """Return a function that commits a model to main and another to a clone, as a runner has them."""

    def make(before, after):
        origin, clone = tmp_path / "origin", tmp_path / "clone"
        origin.mkdir()
        git(origin, "init", "--quiet")
        (origin / ("model.json" if before else "other.json")).write_text(json.dumps(before), encoding="utf-8")
        git(origin, "add", ".")
        git(origin, "commit", "--quiet", "-m", "model")
        git(tmp_path, "clone", "--quiet", "--depth", "1", origin.as_uri(), "clone")
        (clone / "model.json").write_text(json.dumps(after), encoding="utf-8")
        return clone

    return make


def run_action(folder, steps=tuple(STEPS[1:]), **given):
    """Run steps as a runner does; return the exit codes of those that ran, the summary and the report's files."""
    inputs = {name: each.get("default", "") for name, each in ACTION["inputs"].items()} | given
    temp, summary = folder.parent / "temp", folder.parent / "summary.md"
    temp.mkdir(exist_ok=True)
    summary.write_text("", encoding="utf-8")

    def filled(text):
        values = {f"inputs.{name}": value for name, value in inputs.items()} | {"runner.temp": str(temp)}
        return re.sub(r"\$\{\{ ([\w.-]+) \}\}", lambda match: values[match[1]], text)

    codes = {}
    for step in steps:
        failed = any(codes.values())
        if "run" not in step or not CONDITIONS[step.get("if")](inputs["base"], failed):
            continue
        assert step["shell"] == "bash"
        assert "${{" not in step["run"]  # inputs are not pasted into the script
        own = {name: filled(value) for name, value in step["env"].items()}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        every = {**os.environ, "PATH": path, "GITHUB_STEP_SUMMARY": str(summary), "COLUMNS": "100", **own}
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        codes[step["name"]] = subprocess.run(
            command, cwd=folder, env=every, check=False, capture_output=True
        ).returncode
    report = temp / inputs["report"]
    return codes, summary.read_text(encoding="utf-8"), {each.name for each in report.iterdir()}


def test_sound_model_passes(pull_request):
    folder = pull_request(SOUND, SOUND)
    more = {"base": "main", "tokens": "8", "arguments": "--samples 2 --blocks *.h.* --witness no"}
    (folder / "a.h.1").touch()  # a file that the star must not find
    codes, summary, files = run_action(folder, model="model.json", **more)
    assert codes == {"Check": 0, "Compare with the base": 0}, summary
    assert "### limitformer check model.json" in summary
    assert "✓ fine: no threshold is reached" in summary
    assert "### Compared with main" in summary
    assert "✓ no verdict changes: fine" in summary
    assert {"check.html", "check.json", "check.txt", "paired.html", "compare.txt"} <= files


def test_frozen_model_fails_and_is_worse(pull_request):
    folder = pull_request(SOUND, FROZEN)
    (folder / "words.txt").write_text("a rose is a rose is a rose", encoding="utf-8")
    more = {
        "base": "main",
        "text": "words.txt",
        "fail-on": "frozen",
        "arguments": "--samples 2 --witness no",
        "report": "mine",
    }
    codes, summary, files = run_action(folder, model="model.json", **more)
    assert codes == {"Check": 1, "Compare with the base": 1}, summary
    assert "✗ broken: attention frozen" in summary
    assert "✗ worse: loss: fine → broken; frozen: fine → broken" in summary
    assert summary.count("```") == 4
    assert {"check.html", "paired.html"} <= files


def test_nothing_to_compare_and_wrong_inputs(pull_request):
    folder = pull_request(None, FROZEN)
    codes, summary, _ = run_action(folder, STEPS[2:], model="model.json", base="main")
    assert codes == {"Compare with the base": 0}, summary
    assert "main has no model.json: nothing to compare." in summary
    codes, summary, _ = run_action(folder, model="nowhere.json")
    assert codes == {"Check": 2}
    assert "Error: there is no public shape, file or folder 'nowhere.json'" in summary


def test_steps_keep_the_report_whatever_happens():
    assert {step.get("if") for step in STEPS} == set(CONDITIONS)
    assert STEPS[0]["run"] == 'python -m pip install --quiet "$HERE[hf]"'
    assert STEPS[-1]["if"] == "${{ always() }}"
    assert STEPS[-1]["with"]["path"] == STEPS[1]["env"]["REPORT"] == STEPS[2]["env"]["REPORT"]


def test_workflow_on_the_page_uses_inputs_that_exist():
    page = (ROOT / "docs" / "continuous-integration.md").read_text(encoding="utf-8")
    workflow = yaml.safe_load(re.search(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1])
    (step,) = [each for each in workflow["jobs"]["check"]["steps"] if "limitformer" in each.get("uses", "")]
    assert set(step["with"]) <= set(ACTION["inputs"])
    assert {name for name, each in ACTION["inputs"].items() if each.get("required")} <= set(step["with"])
    assert all(f"`{name}`" in page for name in ACTION["inputs"])
