"""Fashion-MNIST: its files are read as they were written, others are refused, and its runs use what the preset says."""

import gzip
import json
import os
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from limitformer.base.errors import InputError
from limitformer.cli.app import app
from limitformer_papers.training.data import idx
from limitformer_papers.training.data.autoaugment import OPERATIONS, augmented
from limitformer_papers.training.data.images import read_images
from limitformer_papers.training.tasks.vit import PRESETS, Variant, run_vit

SMALL = {"layers": 2, "dim": 8, "epochs": 2, "warmup_epochs": 1, "batch": 20, "tensorboard": False}
SIDE = 28
TRAINING, LABELS, TEST, TEST_LABELS = idx.NAMES


def idx_file(array: np.ndarray, kind: int = 8) -> bytes:
    return bytes([0, 0, kind, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


def write_fashion(folder, images: int = 60, held_out: int = 30, packed: bool = True) -> dict[str, np.ndarray]:
    """Write a small set in the format of Fashion-MNIST."""
    generator = np.random.default_rng(0)
    arrays = {}
    for pictures, labels, count in ((TRAINING, LABELS, images), (TEST, TEST_LABELS, held_out)):
        arrays[pictures] = generator.integers(256, size=(count, SIDE, SIDE), dtype=np.uint8)
        arrays[labels] = generator.integers(10, size=count, dtype=np.uint8)
    for name, array in arrays.items():
        content = idx_file(array)
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return arrays


@pytest.mark.parametrize("packed", [True, False])
def test_images_are_read_as_they_were_written(packed, tmp_path):
    arrays = write_fashion(tmp_path, packed=packed)
    training, held_out = read_images("fashion", tmp_path)
    np.testing.assert_array_equal(training.images[..., 0], arrays[TRAINING])
    np.testing.assert_array_equal(training.labels, arrays[LABELS])
    np.testing.assert_array_equal(held_out.images[..., 0], arrays[TEST])
    np.testing.assert_array_equal(held_out.labels, arrays[TEST_LABELS])
    assert training[7]["pixel_values"].shape == (1, SIDE, SIDE)


def test_first_images_alone_are_taken_and_set_the_scale(tmp_path):
    arrays = write_fashion(tmp_path)
    training, held_out = read_images("fashion", tmp_path, first=(40, 20))
    assert (len(training), len(held_out)) == (40, 20)
    pixels = arrays[TRAINING][:40] / 255
    expected = (arrays[TRAINING][3] / 255 - pixels.mean()) / pixels.std()
    np.testing.assert_allclose(training[3]["pixel_values"][0], expected, rtol=1e-6)


def as_gzip(folder, content: bytes) -> None:
    (folder / TRAINING).unlink()
    (folder / f"{TRAINING}.gz").write_bytes(content)


# The files to write, by name, or what to do with the folder; and the message.
DAMAGES = {
    "missing": (
        lambda folder: (folder / LABELS).unlink(),
        r"No file train-labels-idx1-ubyte or .*\.gz in .* Nearest: install Debian",
    ),
    "empty": ({TRAINING: b""}, "is not an IDX file of unsigned bytes; it begins with nothing"),
    "cut in the sizes": (lambda folder: os.truncate(folder / TRAINING, 9), "ends within its sizes"),
    "longer": (
        {TRAINING: idx_file(np.zeros((60, SIDE, SIDE), np.uint8)) + b"\0"},
        r"must hold 60 × 28 × 28 = 47,040 bytes after its sizes; got more\. Nearest",
    ),
    "swapped": (
        {TRAINING: idx_file(np.zeros(60, np.uint8))},
        "must hold n square images and n labels; got 60 pixels and 60 labels",
    ),
    "floats": (
        {TRAINING: idx_file(np.zeros((2, 2), ">f4"), kind=13)},
        "not an IDX file of unsigned bytes; it begins with 00 00 0d 02",
    ),
    "label 10": ({LABELS: idx_file(np.full(60, 10, np.uint8))}, "must be 0 to 9; got 10"),
    "other size": (
        {TRAINING: idx_file(np.zeros((60, 32, 32), np.uint8))},
        r"must have one size; got \(32, 32\) and \(28, 28\)",
    ),
    "huge": (
        {TRAINING: bytes([0, 0, 8, 3]) + b"\xff" * 12},
        "claims 79,228,162,458,924,105,385,300,197,375 entries; at most 268,435,456 are read",
    ),
    "no gzip": (lambda folder: as_gzip(folder, b"plain"), "is damaged: Not a gzipped file"),
    "cut gzip": (
        lambda folder: as_gzip(folder, gzip.compress(idx_file(np.zeros((60, SIDE, SIDE), np.uint8)))[:-20]),
        "is damaged: Compressed file ended",
    ),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_and_foreign_files_are_refused_before_any_work(how, tmp_path):
    write_fashion(tmp_path, packed=False)
    damage, message = DAMAGES[how]
    if callable(damage):
        damage(tmp_path)
    else:
        for name, content in damage.items():
            (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as refused:
        run_vit("fashion", variant="random", seed=0, out=tmp_path / "out", data=tmp_path)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_grey_images_have_the_policy_of_colours():
    """A grey image in three equal channels ends as the same grey image: every operation but Color, which is none."""
    grey = np.random.default_rng(1).integers(256, size=(SIDE, SIDE, 1), dtype=np.uint8)
    for example in range(200):
        one, three = augmented(grey, 0, 0, example), augmented(np.repeat(grey, 3, axis=2), 0, 0, example)
        assert one.shape == grey.shape
        assert np.abs(one.astype(int) - three).max() <= 2  # colours are rounded on their way to grey
    np.testing.assert_array_equal(np.asarray(OPERATIONS["Color"](Image.fromarray(grey[..., 0]), 0.9)), grey[..., 0])


def test_each_variant_has_its_own_rate_and_the_images_of_the_preset(tmp_path):
    write_fashion(tmp_path)
    changes = {
        **SMALL,
        "training_images": 40,
        "held_out_images": 20,
        "learning_rate": 1e-3,
        "untied_learning_rate": 2e-3,
        "random_learning_rate": 4e-3,
    }
    rates: dict[Variant, float] = {"constant": 1e-3, "untied": 2e-3, "random": 4e-3}
    for variant, rate in rates.items():
        run_vit("fashion", variant=variant, seed=0, out=tmp_path / "out", data=tmp_path, **changes)
        about = json.loads((tmp_path / "out" / "vit-fashion" / f"{variant}-0" / "run.json").read_text())
        assert about["about"]["examples"] == {"training": 40, "held_out": 20, "epoch": 2}
        assert about["plan"]["learning_rate"] == rate


def test_learning_rate_of_the_command_is_that_of_all_variants(tmp_path, monkeypatch):
    own = replace(PRESETS["tiny"], untied_learning_rate=2e-3, random_learning_rate=4e-3)
    monkeypatch.setitem(PRESETS, "tiny", own)
    options = ["train", "vit", "--epochs", "1", "--layers", "2", "--threads", "1", "--learning-rate", "0.01"]
    assert CliRunner().invoke(app, [*options, "--out", str(tmp_path)]).exit_code == 0
    runs = [json.loads(each.read_text())["plan"]["learning_rate"] for each in tmp_path.glob("*/*/run.json")]
    assert runs == [0.01] * 3


def test_fashion_preset_has_the_papers_depth_and_width():
    config = PRESETS["fashion"]
    assert (config.layers, config.dim, config.sigma, config.augment) == (128, 96, 1.0, True)
    assert config.training_images is not None
    assert config.training_images >= 10_000


def test_fewer_images_than_the_preset_has_are_refused(tmp_path):
    write_fashion(tmp_path)
    with pytest.raises(InputError, match=r"first 10000 training images, and .* has 60\. Nearest: the whole data set"):
        run_vit("fashion", variant="random", seed=0, out=tmp_path / "out", data=tmp_path)


def test_images_of_one_colour_are_refused(tmp_path):
    write_fashion(tmp_path, packed=False)
    (tmp_path / TRAINING).write_bytes(idx_file(np.full((60, SIDE, SIDE), 7, np.uint8)))
    with pytest.raises(InputError, match=r"All pixels of the training images in .* are equal"):
        read_images("fashion", tmp_path)
