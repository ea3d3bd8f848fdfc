"""The training harness: exact resuming, kills, damage, and messages on bad input."""

import importlib
import importlib.util
import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from torch import nn
from transformers import Trainer, TrainingArguments

import limitformer_papers.training
from forks import forked
from limitformer.base.errors import InputError, MissingExtraError
from limitformer_papers.training import checkpoints
from limitformer_papers.training.harness import ResumableTrainer, arguments, evaluate, train
from limitformer_papers.training.interrupts import TrainingInterrupted
from limitformer_papers.training.log import Log, curve, read_log, read_table
from limitformer_papers.training.plan import differences, read_runs
from train_program import BATCH, EXAMPLES, STEPS, At, Small, collate, items, plan_of, run_and_die, small_run
from train_states import assert_same_run, weights

pytestmark = [
    pytest.mark.xdist_group("training"),  # they share a process to fork
    pytest.mark.usefixtures("one_thread"),  # bits are compared, which depend on the number of threads
]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    small_run(folder)
    torch.set_num_threads(threads)
    return folder


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def interrupted(folder: Path, step: int, **changes) -> None:
    with pytest.raises(TrainingInterrupted, match=f"Interrupted at step {step} of {STEPS}"):
        small_run(folder, [At(step, ctrl_c)], **changes)


# 12 steps are an epoch, 7 an evaluation and 10 a checkpoint.
@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("step", [25, 28, 30])
def test_interrupted_run_resumes_to_the_last_bit(step, unbroken, tmp_path):
    interrupted(tmp_path / "run", step)
    assert (tmp_path / "run" / "checkpoints" / f"checkpoint-{step}").is_dir()
    assert not (tmp_path / "run" / "summary.json").exists()
    small_run(tmp_path / "run")
    assert_same_run(tmp_path / "run", unbroken)


def test_wrong_twin_resuming_without_generators_is_detected(unbroken, tmp_path, monkeypatch):
    interrupted(tmp_path / "run", 25)
    monkeypatch.setattr(ResumableTrainer, "_load_rng_state", lambda self, folder: None)
    small_run(tmp_path / "run")
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "run", unbroken)


def test_second_ctrl_c_ends_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt) as ended:
        small_run(tmp_path / "run", [At(26, lambda: (ctrl_c(), ctrl_c()))])
    assert not isinstance(ended.value, TrainingInterrupted)
    assert [path.name for path in checkpoints.listed(tmp_path / "run" / "checkpoints")] == [
        "checkpoint-20",
        "checkpoint-10",
    ]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_run_killed_while_it_saves_resumes_to_the_last_bit(unbroken, tmp_path):
    killed = forked(run_and_die, str(tmp_path / "run"), 30)
    killed.join(300)
    assert killed.exitcode == -signal.SIGKILL
    checkpoint, damaged = checkpoints.newest(tmp_path / "run" / "checkpoints")
    assert (checkpoint and checkpoint.step, damaged) == (20, [])
    small_run(tmp_path / "run")
    assert_same_run(tmp_path / "run", unbroken)


def truncate(folder: Path) -> None:
    file = folder / "weights.pt"
    file.write_bytes(file.read_bytes()[:-100])


def flip(folder: Path) -> None:
    content = bytearray((folder / "optimizer.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "optimizer.pt").write_bytes(content)


@pytest.mark.parametrize(("damage", "all_of_them"), [(truncate, True), (flip, False)])
def test_damaged_checkpoints_are_skipped(damage, all_of_them, unbroken, tmp_path, capfd):
    interrupted(tmp_path / "run", 25)
    folders = checkpoints.listed(tmp_path / "run" / "checkpoints")
    for folder in folders if all_of_them else folders[:1]:
        damage(folder)
    small_run(tmp_path / "run")
    line = capfd.readouterr().err
    assert "checkpoint-25" in line
    assert ("the beginning" if all_of_them else "resumes from checkpoint-20") in line
    assert_same_run(tmp_path / "run", unbroken)


def test_full_disk_keeps_earlier_checkpoints(unbroken, tmp_path):
    save, calls = torch.save, iter(range(100))

    def full(content, target):
        if next(calls) >= 6:  # the second of the files of the second checkpoint
            raise RuntimeError("file write failed")
        save(content, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(InputError, match=r"Cannot write a checkpoint into .*failed"):
            small_run(tmp_path / "run")
    assert [path.name for path in checkpoints.listed(tmp_path / "run" / "checkpoints")] == ["checkpoint-10"]
    small_run(tmp_path / "run")
    assert_same_run(tmp_path / "run", unbroken)


def test_training_equals_adamw_by_hand(tmp_path):
    small_run(tmp_path / "run", dropout=0.0, weight_decay=0.1, schedule="linear", clip=0.5)
    assert difference(by_hand((0.9, 0.999)), weights(tmp_path / "run")) < 1e-6
    assert difference(by_hand((0.9, 0.99)), weights(tmp_path / "run")) > 1e-4


def by_hand(betas: tuple[float, float]) -> dict[str, torch.Tensor]:
    """Return the weights of the run, written out."""
    model, data = Small(0.0), items()
    decaying = [model.first.weight, model.last.weight]
    groups = [{"params": decaying}, {"params": [model.first.bias, model.last.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=betas, weight_decay=0.1)
    for step in range(STEPS):
        rate = step / 5 if step < 5 else (STEPS - step) / (STEPS - 5)
        order = np.random.default_rng([0, 1, step // 12]).permutation(EXAMPLES)
        place = step % 12 * BATCH
        loss = model(**collate([data[k] for k in order[place : place + BATCH]]))["loss"]
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * rate
        optimizer.step()
    return model.state_dict()


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def test_diverged_run_ends_with_a_message(tmp_path, capfd):
    summary = small_run(tmp_path, learning_rate=1e30, warmup=0, schedule="constant")
    assert summary["diverged"]
    assert np.isnan(summary["train_loss"])
    assert summary["steps"] < STEPS
    assert f"the loss of step {summary['steps']} is" in capfd.readouterr().err
    assert not (tmp_path / "model").exists()
    assert json.loads((tmp_path / "summary.json").read_text())["train_loss"] is None
    again = small_run(tmp_path, learning_rate=1e30, warmup=0, schedule="constant")
    np.testing.assert_equal(dict(again), dict(summary))


def test_finished_run_is_not_repeated(unbroken):
    class Untouched(Small):
        def forward(self, x, labels):
            pytest.fail("it was finished")

    summary = small_run(unbroken, model=Untouched(0.2))
    losses = curve(read_log(unbroken), "loss")[1]
    assert len(losses) == STEPS
    assert summary["train_loss"] == pytest.approx(losses[-5:].mean(), rel=1e-12)
    assert summary["parameters"] == 6 * 16 + 16 + 16 * 3 + 3
    assert not summary["diverged"]


def test_evaluation_is_over_all_examples(unbroken):
    model = Small(0.2)
    model.load_state_dict(weights(unbroken))
    model.eval()
    whole = collate(items()[:35])
    steps, losses = curve(read_log(unbroken), "eval_loss")
    assert list(steps) == [7, 14, 21, 28, 35, 42, 49, 50]
    assert losses[-1] == pytest.approx(model(**whole)["loss"].item(), rel=1e-6)
    right = float((model(**whole)["logits"].argmax(-1) == whole["labels"]).float().mean())
    assert curve(read_log(unbroken), "eval_accuracy")[1][-1] == pytest.approx(right, rel=1e-6)


def test_evaluation_weights_batches_by_labels():
    class Mean(nn.Module):
        def forward(self, x, labels):
            return (x[labels != -100].mean(),)

    data = [{"x": torch.arange(4.0) + 10 * k, "labels": torch.arange(4) % (k + 2) - 100} for k in range(3)]
    chosen = torch.cat([one["x"][one["labels"] != -100] for one in data])
    result = evaluate(Mean(), data, batch=1, collate=collate, place=lambda x: x)
    assert result["loss"] == pytest.approx(float(chosen.mean()))


def test_differing_fields_of_a_nested_setting_are_named_alone():
    there, here = ({"about": {"config": {"width": width, "layers": 2}}} for width in (96, 128))
    assert differences(there, here) == ["config.width is 96 there, 128 here"]


def test_newest_checkpoints_are_kept(unbroken):
    names = [path.name for path in checkpoints.listed(unbroken / "checkpoints")]
    assert names == ["checkpoint-50", "checkpoint-40"]
    assert [path.name for path in (unbroken / "checkpoints" / "unfinished").iterdir()] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1; got 0"),
        ({"batch": 2.5}, "batch must be a whole number"),
        ({"learning_rate": -1.0}, "learning_rate must be positive"),
        ({"warmup": 51}, "warmup must be at most steps = 50; got 51. Nearest: 50"),
        ({"schedule": "cubic"}, "schedule must be one of constant, linear, cosine; got 'cubic'"),
        ({"clip": 0.0}, "clip must be positive, or None"),
        ({"weight_decay": float("nan")}, "weight_decay must be finite"),
        ({"threads": 0}, "threads must be at least 1"),
    ],
)
def test_bad_plans_are_refused(changes, message, tmp_path):
    with pytest.raises(InputError, match=message):
        plan_of(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 101}, r"100 examples; got 101\. Nearest: 100"),
        ({"learning_rate": 0.5}, r"holds another run: learning_rate is 0\.01 there, 0\.5 here"),
        ({"dropout": 0.5}, r"holds another run: dropout is 0\.2 there"),
        ({"environment": "3"}, r"A run has one process; torchrun has started 3\. Nearest: several runs, by --workers"),
        ({"tf32": True}, r"holds another run: tf32 is False there"),
        ({"run.json": b"{"}, r"run\.json cannot be read"),
        ({"run.json": None, "tf32": True}, r"tf32 needs a GPU.* this is CPU .*Nearest: .*--no-tf32"),
        ({"run.json": None, "compile": True}, r"compile needs a GPU.* this is CPU .*Nearest: .*--no-compile"),
    ],
)
def test_bad_runs_are_refused(changes, message, unbroken, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", changes.pop("environment", "1"))
    shutil.copytree(unbroken, tmp_path / "run")
    content = changes.pop("run.json", (unbroken / "run.json").read_bytes())
    (tmp_path / "run" / "run.json").unlink() if content is None else (tmp_path / "run" / "run.json").write_bytes(
        content
    )
    before = [path.read_bytes() for path in sorted(tmp_path.rglob("*.*")) if path.is_file()]
    with pytest.raises(InputError, match=message):
        small_run(tmp_path / "run", **changes)
    assert [path.read_bytes() for path in sorted(tmp_path.rglob("*.*")) if path.is_file()] == before


def test_folders_logs_and_descriptions_that_cannot_be_used_are_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(InputError, match="Cannot write"):
        small_run(tmp_path / "run")
    with pytest.raises(InputError, match="No such log"):
        read_log(tmp_path)
    (tmp_path / "log.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="not a log that limitformer wrote"):
        read_log(tmp_path)
    options = {"train_data": items(), "eval_data": None, "collate": collate}
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(InputError, match="must go to JSON"):
        train(Small(0.0), plan_of(tmp_path), about={"x": object()}, **options)


def test_read_runs_returns_finished_runs(unbroken, tmp_path):
    with pytest.raises(InputError, match="No such folder"):
        read_runs(tmp_path / "none")
    with pytest.raises(InputError, match=f"No finished runs in {tmp_path}. Nearest"):
        read_runs(tmp_path)
    interrupted(tmp_path / "a" / "b", 3)
    with pytest.raises(InputError, match="1 unfinished"):
        read_runs(tmp_path)
    shutil.copytree(unbroken, tmp_path / "c")
    (run,) = read_runs(tmp_path)
    assert run.path == tmp_path / "c"
    assert run.about == {"experiment": "small", "dropout": 0.2}
    assert run.plan["batch"] == BATCH
    assert run.summary["steps"] == STEPS


class Measure(At):
    """A callback that adds rows."""

    def __init__(self, log: Log) -> None:
        super().__init__(12, lambda: log.record(12, "entropy", 1.5, layer=3, head=1))


def test_callback_rows_are_in_log_and_tensorboard(tmp_path):
    log = Log()
    small_run(tmp_path, [Measure(log), log], steps=14, tensorboard=True)
    steps, values = curve(read_log(tmp_path), "entropy", layer=3, head=1)
    assert (list(steps), list(values)) == ([12], [1.5])
    with pytest.raises(InputError, match="no 'entropy' at layer -1, head -1; it has entropy, eval_accuracy"):
        curve(read_log(tmp_path), "entropy")
    assert tensorboard_scalars(tmp_path / "tensorboard", "entropy/layer 3/head 1") == {12: 1.5}
    losses = dict(zip(*map(list, curve(read_log(tmp_path), "loss")), strict=True))
    assert tensorboard_scalars(tmp_path / "tensorboard", "loss") == pytest.approx(losses)


def tensorboard_scalars(folder: Path, name: str) -> dict[int, float]:
    reader = "tensorboard.backend.event_processing.event_accumulator"
    events = pytest.importorskip(reader).EventAccumulator(str(folder))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}


class Stop(At):
    """A crash of the Trainer after a checkpoint and rows that it does not have."""

    def __init__(self, step: int) -> None:
        super().__init__(step, lambda: (_ for _ in ()).throw(OSError("crash")))


def test_user_trainer_resumes_its_log(tmp_path):
    options = {"max_steps": 6, "save_steps": 2, "logging_steps": 1, "report_to": "none", "use_cpu": True}
    arguments = TrainingArguments(output_dir=str(tmp_path), disable_tqdm=True, **options)

    def trained(log: Log, others=(), resume=None) -> None:
        trainer = Trainer(Small(0.0), arguments, collate, items(), callbacks=[*others, log])
        trainer.train(resume_from_checkpoint=resume)

    whole, log = Log(), Log(tmp_path / "own.parquet")
    trained(whole)
    with pytest.raises(OSError, match="crash"):
        trained(log, [Stop(6)])
    log.write()  # five steps, of which the checkpoint has four
    assert max(curve(read_table(tmp_path / "own.parquet"), "loss")[0]) == 5
    again = Log(tmp_path / "own.parquet")
    trained(again, resume=str(tmp_path / "checkpoint-4"))
    assert curve(read_table(tmp_path / "own.parquet"), "loss")[0].tolist() == [1, 2, 3, 4, 5, 6]
    assert again.table().equals(whole.table())


def test_second_process_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"):
        with pytest.raises(InputError, match=f"Another process is training this run: {tmp_path / 'run'}"):
            small_run(tmp_path / "run", steps=6)
        assert not (tmp_path / "run" / "run.json").exists()
    assert small_run(tmp_path / "run", steps=6)["steps"] == 6
    with FileLock(tmp_path / "run" / ".lock", timeout=0):  # free again
        assert small_run(tmp_path / "run", steps=6)["steps"] == 6  # a finished run is only read


def test_start_and_resumption_are_printed(tmp_path, capfd):
    """A plan of an older version, which lacks an option, has its default."""
    interrupted(tmp_path, 3)
    output = capfd.readouterr().err
    assert output.split("\n")[1] == "Finishing the current step; Ctrl-C again to stop at once."
    assert "Resumes" not in output
    content = json.loads((tmp_path / "run.json").read_text())
    del content["plan"]["clip"]
    (tmp_path / "run.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"clip is None there, 0\.5 here"):
        small_run(tmp_path, clip=0.5)
    capfd.readouterr()
    assert small_run(tmp_path)["steps"] == STEPS
    assert capfd.readouterr().err == f"Resumes from step 3 of 50: {tmp_path}\n"
    small_run(tmp_path, save_every=3, keep_checkpoints=1, threads=1)  # options that may change
    assert capfd.readouterr().err == f"Already finished: {tmp_path}\n"


def test_missing_bf16_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: False)
    with pytest.raises(InputError, match=r"bf16 is not available here: .*Nearest: bf16=False \(--no-bf16\)") as refused:
        arguments(plan_of(tmp_path, bf16=True), evaluates=True)
    assert "\n" not in str(refused.value)


def test_missing_package_is_named(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "PIL" else find_spec(name))
    with pytest.raises(MissingExtraError, match=r"needs pillow, .*pip install 'limitformer\[train\]'"):
        importlib.reload(limitformer_papers.training)


def test_number_of_threads_is_restored(tmp_path):
    before = torch.get_num_threads()
    during = []
    small_run(tmp_path, [At(1, lambda: during.append(torch.get_num_threads()))], threads=2, steps=1, warmup=0)
    assert during == [2]
    assert torch.get_num_threads() == before
