"""Time budgets, TF32 and compiled steps: budgets stop runs as Ctrl-C does, and compiled steps equal plain ones."""

import multiprocessing
import os
import signal
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from forks import forking
from limitformer.base.errors import InputError
from limitformer.cli.app import app
from limitformer_papers.commands import train as commands
from limitformer_papers.training import grid, harness, interrupts, plan
from limitformer_papers.training.data.batches import Batches, BatchesInEpochs, InEpochs
from limitformer_papers.training.grid import GridInterrupted, run_all
from limitformer_papers.training.interrupts import UNFINISHED, Budget, TrainingInterrupted, within
from limitformer_papers.training.log import curve, read_log
from limitformer_papers.training.plan import read_json
from limitformer_papers.training.tasks.mlm import MlmRun, preset, run_mlm
from limitformer_papers.training.tasks.vit import run_vit
from train_program import BATCH, EXAMPLES, STEPS, At, Small, collate, items, plan_of, small_run
from train_states import assert_same_run

pytestmark = [
    pytest.mark.xdist_group("training"),  # they share a process to fork
    pytest.mark.usefixtures("one_thread"),  # bits are compared, which depend on the number of threads
]

IMAGES = {"layers": 2, "dim": 8, "patch": 4, "epochs": 2, "batch": 256, "tensorboard": False, "threads": 1}
WORDS = {"width": 32, "depth": 2, "heads": 2, "hidden": 64, "length": 16, "batch": 8, "vocabulary": 300, "steps": 12}


@dataclass
class Ticks:
    """A clock that advances by a second at every reading, so that a budget is a number of steps."""

    now: float = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def budget(seconds: float) -> Budget:
    return Budget(seconds / 60, clock=Ticks())


def test_run_cut_by_budgets_equals_the_uninterrupted_run(tmp_path):
    small_run(tmp_path / "whole")
    ends = []
    for seconds in (13, 1):
        with within(budget(seconds)), pytest.raises(TrainingInterrupted, match=r"The .* min are over: stop") as ended:
            small_run(tmp_path / "run")
        assert ended.value.exit_code == UNFINISHED
        ends.append(ended.value.pickled_arguments[1])
    assert ends == [13, 14]
    assert TrainingInterrupted(tmp_path, 3, 50).exit_code is None  # Ctrl-C
    with within(budget(1000)):
        small_run(tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert interrupts.BUDGETS == []


def test_budgets_that_are_not_positive_are_refused():
    for minutes in (0, float("nan")):
        with pytest.raises(InputError, match="minutes must be"):
            Budget(minutes)


def seeded_run(seed, out):
    return dict(small_run(out / str(seed), seed=seed, threads=1))


def test_grid_begins_no_run_after_its_budget(tmp_path):
    ended = []
    with within(budget(STEPS + 2)), pytest.raises(KeyboardInterrupt) as stopped:
        # The first run reads the clock at its begin and at 50 steps; the second one is due after that.
        ended += run_all(range(3), partial(seeded_run, out=tmp_path))
    assert isinstance(stopped.value, GridInterrupted)
    assert (tmp_path / "0" / "summary.json").exists()
    assert not (tmp_path / "1").exists()
    assert str(stopped.value) == "The 0.866667 min are over; runs: 2 not begun. Start it again to resume."
    assert stopped.value.exit_code == UNFINISHED


def test_workers_stop_and_begin_no_run_after_the_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(grid, "spawning", forking)
    with within(budget(20)), pytest.raises(GridInterrupted) as stopped:  # each worker has its own copy of the clock
        list(run_all(range(5), partial(seeded_run, out=tmp_path), workers=2))
    assert "runs: 2 stopped and saved, 3 not begun." in str(stopped.value)


def test_train_command_with_minutes_resumes(tmp_path, monkeypatch):
    options = ["train", "vit", "--variant", "random", "--epochs", "1", "--layers", "2", "--threads", "1"]
    monkeypatch.setattr(commands, "budget_of", lambda minutes: minutes and budget(60 * minutes))
    first = CliRunner().invoke(app, [*options, "--out", str(tmp_path), "--minutes", "0.5"])
    assert first.exit_code == UNFINISHED
    assert "The 0.5 min are over: stopped at step 29 of 44, which is saved" in first.stderr
    again = CliRunner().invoke(app, [*options, "--out", str(tmp_path), "--minutes", "9"])
    assert again.exit_code == 0
    assert "Resumes from step 29 of 44" in again.stderr


def test_tf32_needs_ampere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, has in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=capability: _)
        assert plan.has_tf32() == has


def test_products_are_exact_again_after_a_run_with_tf32(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "check_device", lambda plan: None)
    seen = []
    monkeypatch.setattr(harness, "check_compiled", lambda *_: seen.append(torch.get_float32_matmul_precision()))
    monkeypatch.setattr(harness, "BACKEND", "eager")
    small_run(tmp_path / "tf32", tf32=True, compile=True, steps=5)
    assert seen == ["high"]
    assert torch.get_float32_matmul_precision() == "highest"
    assert read_json(tmp_path / "tf32" / "run.json")["plan"]["tf32"] is True
    with pytest.raises(InputError, match="tf32 is True there, False here"):
        small_run(tmp_path / "tf32", compile=True, steps=5)


def language_run(out, variant, **options):
    config = preset("tiny", **WORDS, bf16=options.pop("bf16", None))
    gamma = 0.2 if variant.startswith("shaped") else 0.0
    run = MlmRun(config=config, variant=variant, learning_rate=3e-3, gamma=gamma)
    run_mlm(run, out, documents=40, tensorboard=False, threads=1, **options)
    return out / run.name


def image_run(out, variant, **options):
    run_vit("tiny", variant=variant, seed=0, out=out, **IMAGES, **options)
    return out / "vit-tiny" / f"{variant}-0"


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("make", "variant", "options", "near"),
    [
        (image_run, "random", {}, 1e-5),
        (language_run, "shaped-recover", {}, 1e-5),
        (language_run, "shaped-recover", {"bf16": True}, 1e-2),
    ],
)
def test_compiled_run_equals_the_plain_one(make, variant, options, near, tmp_path, monkeypatch):
    """The compiler is called once, although gains fall, callbacks look into the model, and the run is evaluated.

    The backend does everything but generate code, which would take a minute on a CPU.
    """
    monkeypatch.setattr(plan, "check_device", lambda plan: None)
    backend = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(harness, "BACKEND", backend)
    torch._dynamo.reset()
    logs = [read_log(make(tmp_path / str(on), variant, compile=on, **options)) for on in (False, True)]
    assert backend.frame_count == 1
    plain, compiled = (curve(log, "loss")[1] for log in logs)
    assert len(plain) >= 10
    assert abs(plain - compiled).max() < near
    assert logs[0].drop(["value"]).equals(logs[1].drop(["value"]))


def doubling(graph, inputs):
    """Return a graph whose every output is twice as large, as a faulty compiler might."""
    return lambda *arguments: [2 * one for one in graph(*arguments)]


def test_wrong_twin_compiler_that_changes_the_loss_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "check_device", lambda plan: None)
    monkeypatch.setattr(harness, "BACKEND", doubling)
    torch._dynamo.reset()
    with pytest.raises(InputError, match=r"The compiled model has the loss .*, the plain one .*Nearest: compile=False"):
        small_run(tmp_path / "run", dropout=0.0, compile=True)
    assert not (tmp_path / "run" / "summary.json").exists()


def test_losses_of_diverged_steps_are_not_compared():
    plan.check_compiled(float("nan"), float("nan"))
    plan.check_compiled(2.0, 2.01)
    with pytest.raises(InputError, match="has the loss"):
        plan.check_compiled(2.0, 2.03)


def test_run_that_changes_its_device_prints_both(tmp_path, monkeypatch, capfd):
    with pytest.raises(TrainingInterrupted), within(budget(3)):
        small_run(tmp_path)
    assert read_json(tmp_path / "run.json")["device"].startswith("CPU ")
    monkeypatch.setattr(harness, "device_name", lambda: "NVIDIA X")
    with pytest.raises(TrainingInterrupted), within(budget(1)):
        small_run(tmp_path)
    assert "and has NVIDIA X now: the same run, but not to the last bit." in capfd.readouterr().err


class Shifted(list):
    """Points that move by the epoch, as augmented images do."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index):
        item = super().__getitem__(index)
        return item | {"x": item["x"] + 0.1 * self.epoch}


def shifted_run(folder, callbacks=(), **changes):
    parts = {"eval_data": None, "collate": collate, "about": {"experiment": "shifted"}, "callbacks": callbacks}
    return harness.train(Small(0.2), plan_of(folder, **changes), train_data=Shifted(items()), **parts)


def ctrl_c_to_all():
    """Send Ctrl-C to all processes, as a terminal does."""
    for process in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
        os.kill(process, signal.SIGINT)


def test_processes_that_prepare_batches_change_no_bit(tmp_path):
    shifted_run(tmp_path / "whole")
    with pytest.raises(TrainingInterrupted, match="step 29 of 50"):
        shifted_run(tmp_path / "run", [At(29, ctrl_c_to_all)], loaders=2)
    shifted_run(tmp_path / "run", loaders=1)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_batches_prepared_ahead_have_their_epoch():
    data, still = Shifted(items()), items()
    order = Batches(data, BATCH, 30, seed=5)
    loader = DataLoader(InEpochs(data), batch_sampler=BatchesInEpochs(order), collate_fn=collate)
    assert len(loader) == 30
    for step, (batch, places) in enumerate(zip(loader, Batches(still, BATCH, 30, seed=5), strict=True)):
        points = torch.stack([still[k]["x"] for k in places])
        torch.testing.assert_close(batch["x"], points + 0.1 * (step // (EXAMPLES // BATCH)))
