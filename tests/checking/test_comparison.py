"""Several networks in one table, page and dataset, and the numbers under the names of monitors."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
import xarray as xr
from typer.testing import CliRunner

import limitformer as lf
from limitformer.checking.metrics import Metric, scalars
from limitformer.cli.app import app

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 99,
    "num_hidden_layers": 2,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 4, "n_head": 2, "vocab_size": 99, "bos_token_id": 1}
OPTIONS = {"tokens": 8, "samples": 3, "progress": False}


@pytest.fixture(scope="module")
def both():
    return lf.compare({"a": LLAMA, "b <i>": GPT2 | {"eos_token_id": 2}}, **OPTIONS)


def test_comparison_holds_the_reports_of_single_checks(both):
    single = lf.check(LLAMA, **OPTIONS)
    row = both.rows()["a"]
    assert xr.testing.assert_identical(single.curves["correlation"], both.reports["a"].curves["correlation"]) is None
    correlation, size, gradient = (np.median(single.curves[n], 0) for n in ("correlation", "size", "stream_gradient"))
    assert row["correlation"] == correlation[-1]
    assert row["stream"] == size[-1] / size[0]
    assert row["gradient_ratio"] == gradient[1] / gradient[-1]
    assert row["loss"] == np.median(single.curves["loss"])
    spread = np.median(single.curves["logit_std"].mean("head"), 0)
    assert row["logit_std"] == spread.max()
    assert (row["blocks"], row["grade"]) == (2, single.grade)


def test_table_as_frame_csv_and_json(both, tmp_path):
    frame = both.frame()
    assert frame.loc["a", "blocks"] == 2
    assert both.csv().splitlines()[0].startswith("model,grade,verdicts,blocks")
    assert len(both.csv().splitlines()) == 3
    paths = both.save(tmp_path)
    assert [path.name for path in paths] == ["compare.html", "compare.csv", "compare.json", "compare.nc"]
    record = json.loads((tmp_path / "compare.json").read_text())
    assert record["table"]["a"]["correlation"] == both.rows()["a"]["correlation"]
    loaded = lf.load(tmp_path / "compare.nc")
    assert loaded["model"].values.tolist() == ["a", "b <i>"]
    page = (tmp_path / "compare.html").read_text()
    assert "b &lt;i&gt;" in page
    assert "<i>" not in page
    assert page.count("b &lt;i&gt; from ") >= 6  # the descriptions of its lines


def test_networks_with_and_without_attention_share_a_dataset(tmp_path):
    """Three of them, as the second one lacks heads."""
    ssm = {"model_type": "mamba2", "hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1}
    ssm |= {"num_hidden_layers": 2, "vocab_size": 64, "chunk_size": 8}
    result = lf.compare({"z": LLAMA, "b": ssm, "a": LLAMA}, **OPTIONS | {"samples": 1})
    data = result.dataset()
    assert data["model"].values.tolist() == ["z", "b", "a"]
    assert data["logit_std"].sel(model="b").isnull().all()
    assert (data["logit_std"].sel(model="a") == data["logit_std"].sel(model="z")).all()
    assert (data["longest_memory"].sel(model="b") > 0).all()
    result.save(tmp_path)


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        ([], {}, "at least one"),
        ("llama-3-8b", {}, "a list or a dictionary"),
        ([LLAMA], {"against": LLAMA}, "one more model"),
        (LLAMA, {}, "got one configuration"),
        ({1: LLAMA}, {}, "text of one line"),
        ({"a\nb": LLAMA}, {}, "text of one line"),
    ],
)
def test_wrong_arguments_are_refused(models, options, message):
    with pytest.raises(lf.InputError, match=message):
        lf.compare(models, **options)


def test_failed_names_the_models(both):
    assert set(both.failed("watch")) == {name for name, report in both.reports.items() if report.grade != "fine"}
    assert both.failed("collapsed") == {}


def test_metrics_have_the_band_of_new_networks():
    report = lf.check(LLAMA, **OPTIONS)
    metrics = report.metrics()
    names = {name.partition("/")[0] for name in metrics}
    assert {"loss", "attention_entropy", "max_attention_logit", "massive_activation", "token_similarity"} <= names
    entropy = metrics["attention_entropy/block_02"]
    assert entropy.value == float(report.curves["entropy"].isel(block=1).mean("head").median())
    assert entropy.low < entropy.value < entropy.high
    assert entropy.low == float(report.band["entropy"].sel(edge="low").isel(block=1).mean("head"))
    assert str(Metric(4.1, 3.9, 4.3)) == "4.1 (3.9 to 4.3)"
    assert str(Metric(4.1, np.nan, np.nan)) == "4.1"


def test_looks_send_numbers_to_a_monitor():
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**LLAMA))
    seen = {}
    with lf.checking.Looks(model, every=2, tokens=6, samples=2, log=lambda v, step: seen.update({step: v})) as looks:
        for _ in range(4):
            looks.step()
    assert sorted(seen) == [0, 2, 4]
    assert seen[0]["limitformer/loss"] == pytest.approx(float(looks.dataset()["loss"][0]))
    low, high = (seen[0][f"limitformer/expected/loss/{edge}"] for edge in ("low", "high"))
    assert low < seen[0]["limitformer/loss"] < high
    assert not any("expected" in name for name in seen[4])


def test_monitors_get_scalars(monkeypatch):
    logged, added = [], []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=SimpleNamespace(log=logged.append)))
    lf.checking.to_wandb()({"limitformer/loss": 1.5}, 7)
    assert logged == [{"limitformer/loss": 1.5, "limitformer/step": 7}]
    lf.checking.to_tensorboard(SimpleNamespace(add_scalar=lambda *each: added.append(each)))({"a": 2.0}, 3)
    assert added == [("a", 2.0, 3)]
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    with pytest.raises(lf.InputError, match=r"wandb\.init"):
        lf.checking.to_wandb()
    with pytest.raises(lf.InputError, match="a run of wandb has log"):
        lf.checking.to_wandb(3)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(lf.InputError, match="not installed"):
        lf.checking.to_wandb()
    with pytest.raises(lf.InputError, match="log must be a function"):
        lf.checking.Looks(torch.nn.Linear(2, 2), log="wandb")
    with pytest.raises(lf.InputError, match="add_scalar"):
        lf.checking.to_tensorboard("runs")
    metrics = {"loss": Metric(1.0, np.nan, np.nan)}
    assert scalars(metrics, metrics) == {"limitformer/loss": 1.0}


def test_command_line_checks_several(tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(json.dumps(LLAMA))
    second.write_text(json.dumps(GPT2 | {"eos_token_id": 2}))
    run = CliRunner()
    small = ["--tokens", "8", "--samples", "2"]
    result = run.invoke(app, ["check", str(first), str(second), *small, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "a.json" in result.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"compare.{end}" for end in ("html", "csv", "json", "nc")
    }
    varied = run.invoke(
        app, ["check", str(first), "--vary", "initializer_range=0.02,0.5", *small, "--fail-on", "broken"]
    )
    assert varied.exit_code == 1
    assert "a.json with initializer_range=0.5" in varied.output
    refused = run.invoke(app, ["check", str(first), str(second), "--against", str(first)])
    assert refused.exit_code == 2
    assert "one more WHAT" in refused.output
    twice = run.invoke(app, ["check", str(first), "--set", "hidden_size=16", "--vary", "hidden_size=32,64"])
    assert twice.exit_code == 2
    assert "--set and --vary both give hidden_size" in twice.output
