"""The vision experiment: the network has the settings of its variant, data are read correctly, and the figure shows the
runs.
"""

import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from limitformer.base.errors import InputError
from limitformer_papers.training.data import cifar
from limitformer_papers.training.data.autoaugment import OPERATIONS, POLICY, RANGES, augmented, by_policy
from limitformer_papers.training.data.images import read_images
from limitformer_papers.training.log import curve, read_log
from limitformer_papers.training.tasks import vit
from limitformer_papers.training.tasks.vit import PRESETS, VisionTransformer, VitConfig, run_vit

SMALL = {"layers": 3, "dim": 8, "epochs": 2, "warmup_epochs": 1, "batch": 256, "patch": 4, "tensorboard": False}


def test_values_start_as_one_identity_or_independent_draws():
    config = VitConfig(data="digits", patch=2, layers=50, dim=40, beta=1.5, sigma=0.8, epochs=1, warmup_epochs=0)
    built = (VisionTransformer(config, variant, channels=1, side=8, seed=0).stack for variant in vit.VARIANTS)
    constant, untied, random = built
    assert torch.equal(untied.values.detach(), torch.eye(40).expand(50, 1, 40, 40))
    assert torch.equal(constant.values.detach(), torch.eye(40)[None, None])
    assert random.values.shape == (50, 1, 40, 40)
    assert not torch.equal(random.values[0], random.values[1])
    assert float(random.values.detach().std()) == pytest.approx(0.8, abs=0.01)
    for stack in (constant, untied, random):
        assert all(parameter.requires_grad for parameter in stack.parameters())
        assert torch.equal(stack.query.detach(), torch.eye(40)[None, None])
        assert (stack.layers, stack.model.beta, stack.model.layers_per_unit_time) == (50, 1.5, 50)


def test_token_is_its_patch_and_position():
    config = VitConfig(data="digits", patch=2, layers=2, dim=6, epochs=1, warmup_epochs=0)
    model = VisionTransformer(config, "random", channels=3, side=4, seed=0)
    image = torch.arange(48.0).reshape(1, 3, 4, 4)
    corner = image[0, :, 0:2, 2:4].flatten()  # the second patch
    word = model.embedding(corner) + model.positions[0, 2]
    torch.testing.assert_close(model.tokens(image)[0, 2], word / word.norm())
    assert set(model(image)) == {"logits"}


def test_paper_preset_has_the_papers_parameters():
    config = PRESETS["paper"]
    said = (config.layers, config.dim, config.batch, config.epochs, config.warmup_epochs, config.sigma, config.augment)
    assert said == (128, 96, 128, 300, 8, 1.0, True)


@pytest.mark.parametrize(("epochs", "warmup"), [(1, 0), (4, 1), (16, 2)])
def test_short_run_warms_up_for_at_most_a_quarter(epochs, warmup, tmp_path):
    config, _ = vit.with_changes(PRESETS["tiny"], {"epochs": epochs})
    assert config.warmup_epochs == warmup
    assert vit.plan_of(config, read_images("digits", None)[0], tmp_path, 0, {}).warmup == 44 * warmup
    assert vit.with_changes(PRESETS["tiny"], {"epochs": 100, "warmup_epochs": 9})[0].warmup_epochs == 9


def test_accuracy_is_logged_by_epoch(tmp_path):
    run_vit("tiny", variant="random", seed=1, out=tmp_path, **SMALL)
    folder = tmp_path / "vit-tiny" / "random-1"
    steps, accuracies = curve(read_log(folder), "eval_accuracy")
    assert list(steps) == [5, 10]
    config = vit.with_changes(PRESETS["tiny"], SMALL)[0]
    model = VisionTransformer(config, "random", channels=1, side=8, seed=1)
    from safetensors.torch import load_file

    model.load_state_dict(load_file(folder / "model" / "model.safetensors"))
    held_out = read_images("digits", None)[1]
    with torch.no_grad():
        logits = model(torch.stack([held_out[k]["pixel_values"] for k in range(len(held_out))]))["logits"]
    assert accuracies[-1] == pytest.approx(float((logits.argmax(-1).numpy() == held_out.labels).mean()))


def test_held_out_digits_are_not_in_the_training_set():
    training, held_out = read_images("digits", None)
    assert (len(training), len(held_out)) == (1438, 359)
    seen = {image.tobytes() for image in training.images}
    assert not any(image.tobytes() in seen for image in held_out.images)
    pixels = torch.stack([training[k]["pixel_values"] for k in range(len(training))])
    assert float(pixels.mean()) == pytest.approx(0, abs=1e-5)
    assert float(pixels.std()) == pytest.approx(1, abs=1e-3)


def write_cifar(folder, images: int = 20):
    """Write a small set in CIFAR-10's binary format."""
    inner = folder / cifar.FOLDER
    inner.mkdir()
    generator = np.random.default_rng(0)
    for name in (*cifar.TRAINING, cifar.TEST):
        records = generator.integers(256, size=(images, cifar.RECORD), dtype=np.uint8)
        records[:, 0] %= 10
        (inner / name).write_bytes(records.tobytes())
    return inner


def test_cifar_is_read_as_it_was_written(tmp_path):
    inner = write_cifar(tmp_path)
    training, held_out = read_images("cifar10", tmp_path)
    assert training.images.shape == (100, 32, 32, 3)
    record = (inner / "data_batch_2.bin").read_bytes()[3 * 3073 : 4 * 3073]
    assert training.labels[23] == record[0]
    assert training.images[23, 5, 7, 2] == record[1 + 2 * 1024 + 5 * 32 + 7]
    assert read_images("cifar10", inner)[1].fingerprint() == held_out.fingerprint() != training.fingerprint()


DAMAGES = {
    "missing": (
        lambda file: file.unlink(),
        r"lacks data_batch_3\.bin\. Nearest: unpack cifar-10-binary\.tar\.gz again",
    ),
    "truncated": (
        lambda file: os.truncate(file, 20 * cifar.RECORD - 1000),
        r"data_batch_3\.bin is not a file of CIFAR-10: it needs records of 3,073 bytes",
    ),
    "labels": (lambda file: file.write_bytes(b"\x0a" + file.read_bytes()[1:]), "a label of 0 to 9"),
    "cut": (lambda file: os.truncate(file, 19 * cifar.RECORD), r"differ in length\. Nearest"),
    "folder": (lambda file: shutil.rmtree(file.parent), "there is no folder cifar-10-batches-bin"),
    "python": (
        lambda file: file.parent.rename(file.parents[1] / "cifar-10-batches-py"),
        r"cifar-10-batches-py is the Python version.* Nearest: unpack cifar-10-binary\.tar\.gz",
    ),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_cifar_is_refused_before_any_work(how, tmp_path):
    damage, message = DAMAGES[how]
    damage(write_cifar(tmp_path) / "data_batch_3.bin")
    with pytest.raises(InputError, match=message) as refused:
        run_vit("paper", variant="random", seed=0, out=tmp_path / "out", data=tmp_path)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def picture() -> np.ndarray:
    return np.random.default_rng(3).integers(40, 200, size=(32, 32, 3), dtype=np.uint8)


def test_augmentation_depends_on_seed_epoch_and_example():
    image = picture()
    first = augmented(image, 1, 2, 3)
    np.testing.assert_array_equal(first, augmented(image, 1, 2, 3))
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (3, 2, 1)):
        assert not np.array_equal(first, augmented(image, *other))


def test_sub_policies_are_drawn_equally_often(monkeypatch):
    counts = dict.fromkeys(OPERATIONS, 0)

    def counted(name):
        def operation(image, strength):
            counts[name] += 1
            return image

        return operation

    monkeypatch.setattr(
        "limitformer_papers.training.data.autoaugment.OPERATIONS", {name: counted(name) for name in OPERATIONS}
    )
    generator, draws, image = np.random.default_rng(0), 4_000, Image.fromarray(picture())
    for _ in range(draws):
        by_policy(image, generator)
    for name, count in counts.items():
        probabilities = [p for both in POLICY for one, p, _ in both if one == name]
        mean = draws * sum(probabilities) / 25
        assert abs(count - mean) < 5 * (draws / 25 * sum(probabilities)) ** 0.5, name


def test_operations_at_largest_magnitude():
    image = Image.fromarray(picture())
    pixels = np.asarray(image)
    done = {name: np.asarray(OPERATIONS[name](image, RANGES[name].at(9, 1))) for name in OPERATIONS}
    np.testing.assert_array_equal(done["Invert"], 255 - pixels)
    np.testing.assert_array_equal(done["Solarize"], 255 - pixels)
    np.testing.assert_array_equal(done["Posterize"], pixels & 0xF0)
    np.testing.assert_array_equal(done["TranslateX"][:, :18], pixels[:, 14:])
    np.testing.assert_array_equal(done["TranslateY"][18:], 0)
    assert abs(done["Brightness"].astype(float).mean() / pixels.mean() - 1.9) < 0.3
    unchanged = ("Rotate", "ShearY", "TranslateX", "TranslateY", "Color", "Contrast", "Brightness", "Sharpness")
    for name in (*unchanged, "Posterize"):
        np.testing.assert_array_equal(np.asarray(OPERATIONS[name](image, RANGES[name].at(0, 1))), pixels)
    assert RANGES["Rotate"].at(9, -1) == -30 == -RANGES["Rotate"].at(9, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "huge"}, "preset must be one of tiny, digits, fashion, paper; got 'huge'"),
        ({"variant": "both"}, "variant must be one of constant, untied, random; got 'both'"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"depth": 3}, "A preset has .*layers.*; got depth"),
        ({"layers": 0}, "layers must be at least 1"),
        ({"patch": 3}, "patch must divide the images' 8 pixels; got 3. Nearest: 2"),
        ({"epochs": 1, "warmup_epochs": 2}, "warmup_epochs must be at most epochs = 1; got 2. Nearest: 1"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"augment": True}, "the digits have none"),
        ({"sigma": 0.0}, "sigma must be positive"),
        ({"preset": "paper"}, "CIFAR-10 needs the folder"),
        ({"data": "somewhere"}, "The digits come with scikit-learn"),
        ({"batch": 5000}, "1438 examples; got 5000"),
    ],
)
def test_bad_vit_options_are_refused(changes, message, tmp_path):
    options = {"preset": "tiny", "variant": "random", "seed": 0, "out": tmp_path / "out", **changes}
    with pytest.raises(InputError, match=message):
        run_vit(options.pop("preset"), **options)
    assert not (tmp_path / "out").exists()
