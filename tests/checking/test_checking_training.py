"""Looks at a network that trains: the bits of the training stay the same, and each look equals a check."""

import numpy as np
import pytest
import torch
import transformers

import limitformer as lf
from limitformer.checking import CheckTraining, Looks

CONFIG = {
    "vocab_size": 40,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def network():
    torch.manual_seed(3)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG))


def trained(steps, looks=None):
    """Train in a loop with dropout, so that the weights depend on every random number."""
    model = network().train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(4)

    def loop(look):
        for _ in range(steps):
            ids = torch.randint(3, 40, (4, 8))
            optimiser.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimiser.step()
            look()

    if looks is None:
        loop(lambda: None)
        return model, None
    with Looks(model, tokens=6, samples=2, **looks) as watch:
        loop(watch.step)
    return model, watch


def test_looks_change_no_bit_of_the_training():
    model, _ = trained(6)
    watched, looks = trained(6, {"every": 2})
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), watched.state_dict().values(), strict=True)
    )
    assert list(looks.reports) == [0, 2, 4, 6]
    assert watched.training


def test_each_look_equals_a_check(tmp_path):
    model, looks = trained(5, {"every": 2, "out": tmp_path})
    data = looks.dataset()
    assert data.step_of_training.values.tolist() == [0, 2, 4, 5]
    for step, one in ((0, network()), (5, model)):
        direct = lf.check(one, tokens=6, law=False, progress=False).curves
        np.testing.assert_allclose(data["correlation"].sel(step_of_training=step), direct["correlation"][0], rtol=1e-6)
        np.testing.assert_allclose(data["gradient"].sel(step_of_training=step), direct["gradient"][0], rtol=1e-6)
    assert looks.last.against.name == "first look"
    assert looks.last.band is not None
    files = {"looks.nc", *(f"check.{ending}" for ending in ("html", "png", "nc", "json"))}
    assert {path.name for path in tmp_path.iterdir()} == files
    assert lf.load(tmp_path / "looks.nc").sizes["step_of_training"] == 4


def interrupted_loop(model, folder):
    with Looks(model, tokens=6, samples=2, every=2, out=folder) as looks:
        for _ in range(3):
            looks.step()
        raise KeyboardInterrupt


def test_interrupted_loop_writes_its_looks(tmp_path):
    """It takes no last look at the step where it was interrupted."""
    with pytest.raises(KeyboardInterrupt):
        interrupted_loop(network(), tmp_path)
    assert lf.load(tmp_path / "looks.nc").step_of_training.values.tolist() == [0, 2]


def test_trainer_callback_looks_at_its_steps(tmp_path):
    data = [{"input_ids": torch.randint(3, 40, (8,)), "labels": torch.randint(3, 40, (8,))} for _ in range(24)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=5, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    callback = CheckTraining(every=2, tokens=6, samples=2, out=tmp_path / "checks")
    model = network()
    transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback]).train()
    assert list(callback.looks.reports) == [0, 2, 4, 5]
    assert (tmp_path / "checks" / "looks.nc").exists()


@pytest.mark.parametrize(("options", "message"), [({"every": 0}, "every must"), ({"out": "/proc/none"}, "/proc/none")])
def test_looks_refuse_bad_arguments(options, message):
    with pytest.raises(lf.InputError, match=message):
        Looks(network(), **options)
