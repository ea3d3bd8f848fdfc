"""Datasets are saved whole or not at all, and loaded with the same bits."""

import errno
import os
import re
import warnings
from contextlib import suppress

import numpy as np
import pytest
import xarray as xr

from limitformer.base.errors import InputError
from limitformer.models import Start
from limitformer.results import storage
from limitformer.results.datasets import correlation, covariance_dataset, package_version
from limitformer.results.storage import load, save

pytestmark = pytest.mark.fast

ENDINGS = [".nc", ".zarr"]
SHAPE = (3, 4, 2, 2)


def start(labels):
    return Start(covariance=np.array([[1.0, 0.2], [0.2, 3.0]]), means=np.array([0.1, -0.2]), labels=labels)


def dataset(seed=0, axis="depth", labels=("grüße", "你好!")):
    """A synthetic dataset: numbers of every magnitude, infinite exits, texts that are not ASCII."""
    rng = np.random.default_rng(seed)
    factors = rng.standard_normal(SHAPE) * 10.0 ** rng.integers(-150, 150, (3, 4, 1, 1))
    points = np.array([0, 1, 5, 70_000]) if axis == "depth" else np.array([0.0, 0.1, 1 / 3, 2.0])
    return covariance_dataset(
        factors @ factors.transpose(0, 1, 3, 2),
        np.array([np.inf, 3.0, 1 / 3]),
        np.array([0, 1, 2], np.int8),
        axis=axis,
        points=points,
        start=start(labels),
        provenance={"model": '{"kind": "Größe"}', "seed": 7, "radius": 1e100, "wall_seconds": 1 / 3},
    )


def assert_bit_equal(one, other):
    """Compare values, dims, coordinates and attributes (without the time of day), and the bits, as -0.0 == 0.0."""
    one, other = (data.assign_attrs(created="") for data in (one, other))
    xr.testing.assert_identical(one, other)
    for name, variable in one.data_vars.items():
        assert other[name].dtype == variable.dtype
        assert other[name].values.tobytes() == variable.values.tobytes()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("axis", ["depth", "time"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_save_and_load_give_the_same_bits(tmp_path, ending, axis):
    saved = dataset(axis=axis)
    path = tmp_path / "new" / "folders" / f"größe{ending}"
    assert save(saved, str(path)) == path
    assert_bit_equal(load(str(path)), saved)
    assert names(path.parent) == [path.name]


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_seed_can_be_saved(tmp_path, ending):
    """NetCDF has no 64-bit attributes; the seed must be saved anyway."""
    loaded = load(save(dataset().assign_attrs(seed=2**63 - 1), tmp_path / f"a{ending}"))
    assert int(loaded.attrs["seed"]) == 2**63 - 1


@pytest.mark.parametrize("ending", ENDINGS)
def test_saving_again_replaces(tmp_path, ending):
    path = tmp_path / f"a{ending}"
    save(dataset(seed=1), path)
    second = dataset(seed=2, axis="time").isel(sample=slice(1))
    save(second, path)
    assert_bit_equal(load(path), second)
    assert names(tmp_path) == [path.name]


@pytest.mark.parametrize("path", [None, "a\0.nc", "s3://bucket/a.nc", "x" * 300 + ".nc", ".nc"])
def test_invalid_paths_are_refused(path):
    for call in (load, lambda path: save(dataset(), path)):
        with pytest.raises(InputError, match=r"^[^\n]+$"):
            call(path)


def test_refusals_name_the_file_the_formats_and_the_kind(tmp_path):
    (tmp_path / "a.zarr").write_text("in the way")
    for call, message in (
        (lambda: load(tmp_path / "b.nc"), f"No such file: {tmp_path / 'b.nc'}."),
        (lambda: save(dataset(), tmp_path / "a.csv"), "Data are saved as .nc (NetCDF) or .zarr; got 'a.csv'."),
        (lambda: save(dataset()["exit"], tmp_path / "a.nc"), "A Dataset can be saved; got DataArray"),
        (lambda: save(dataset(), tmp_path / "a.zarr"), f"Cannot write {tmp_path / 'a.zarr'}: a file is in the way"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            call()
    assert names(tmp_path) == ["a.zarr"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_foreign_folder_is_not_deleted(tmp_path, ending):
    """A NetCDF file does not replace a folder, nor a store a folder that is not a store."""
    path = tmp_path / f"a{ending}"
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=re.escape(f"Cannot write {path}")):
        save(dataset(), path)
    assert (path / "thesis.tex").read_text() == "years of work"
    assert names(tmp_path) == [path.name]


def fail_half_way(error):
    """Return a writer that leaves half a file and then fails."""

    def write(self, path, *arguments, **settings):
        path.write_bytes(b"half")
        raise error

    return write


@pytest.mark.parametrize(
    ("ending", "writer", "error", "raised", "says"),
    [
        (".nc", "to_netcdf", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), InputError, "No space left on device."),
        (".zarr", "to_zarr", KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path, monkeypatch, ending, writer, error, raised, says
):
    path = tmp_path / f"a{ending}"
    old = dataset(seed=1)
    save(old, path)
    monkeypatch.setattr(xr.Dataset, writer, fail_half_way(error))
    with pytest.raises(raised, match=says):
        save(dataset(seed=2), path)
    with pytest.raises(raised):
        save(dataset(seed=2), tmp_path / "new" / f"b{ending}")
    monkeypatch.undo()
    assert_bit_equal(load(path), old)
    assert names(tmp_path) == sorted([path.name, "new"])
    assert names(tmp_path / "new") == []


def test_a_variable_too_large_for_netcdf_names_zarr(tmp_path, monkeypatch):
    size = dataset()["covariance"].nbytes
    monkeypatch.setattr(storage, "NETCDF3_LIMIT", size)
    save(dataset(), tmp_path / "a.nc")
    monkeypatch.setattr(storage, "NETCDF3_LIMIT", size - 1)
    with pytest.raises(InputError, match=f"A variable of {size} bytes does not fit NetCDF; save it as .zarr."):
        save(dataset(), tmp_path / "b.nc")
    assert names(tmp_path) == ["a.nc"]


@pytest.mark.parametrize(("content", "ending"), [(b"", ".nc"), (b"CDF\x02garbage", ".nc"), (b"garbage", ".zarr")])
def test_files_of_something_else_are_refused(tmp_path, ending, content):
    path = tmp_path / f"a{ending}"
    path.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(f"{path} is not a file that limitformer saved")):
        load(path)


@pytest.mark.parametrize("kept", [3, 100, -8])
def test_a_file_that_was_cut_is_refused(tmp_path, kept):
    """The copy is cut in the magic number, the header or the data."""
    path = save(dataset(), tmp_path / "a.nc")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InputError, match=re.escape(f"{path} is not a file that limitformer saved")):
        load(path)


@pytest.mark.parametrize(
    ("ending", "what"),
    [
        (".nc", {"attribute": {"a": 1}}),
        (".zarr", {"attribute": object()}),
        (".nc", {"variable": [2**40, 1]}),
        (".nc", {"variable": [object(), 1]}),
    ],
)
def test_data_that_a_format_cannot_store_are_refused(tmp_path, ending, what):
    """The existing file stays."""
    path = save(dataset(), tmp_path / f"a{ending}")
    data = dataset().assign_attrs(what if "attribute" in what else {})
    data = data.assign(strange=("two", np.array(what["variable"]))) if "variable" in what else data
    with pytest.raises(InputError, match=rf"^a\{ending} cannot store some of the data: [^\n]+$"):
        save(data, path)
    assert names(tmp_path) == [path.name]
    assert set(load(path)) == set(dataset())


@pytest.mark.filterwarnings("ignore:Object at .* is not recognized as a component of a Zarr hierarchy")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"a\.zarr is not a file that limitformer saved: [^\n]+\.$"),
        (None, r"a\.zarr is damaged: exit cannot be read\.$"),
    ],
)
def test_a_store_that_has_lost_a_variable_is_refused(tmp_path, content, message):
    """Zarr itself skips variables that it cannot read."""
    path = save(dataset(), tmp_path / "a.zarr")
    about = path / "exit" / ".zarray"
    about.unlink() if content is None else about.write_text(content)
    with pytest.raises(InputError, match=message):
        load(path)


def test_the_dataset_has_units_and_version():
    data = dataset(axis="time")
    assert data["covariance"].dims == ("sample", "time", "token", "token_")
    assert data["covariance"].attrs["units"] == "1"
    assert data["time"].attrs["units"] == "depth/width"
    assert dataset()["depth"].attrs["units"] == dataset()["exit"].attrs["units"] == "layer"
    assert data.attrs["dtype"] == "float64"
    assert data.attrs["limitformer_version"] == package_version()
    assert np.datetime64(data.attrs["created"][:19]) <= np.datetime64("now")


def covariances_at(v, points):
    none = np.zeros(1)
    return covariance_dataset(
        v, none, none.astype(np.int8), axis="depth", points=np.array(points), start=start(None), provenance={}
    )


def test_correlation_divides_by_both_deviations():
    v = np.array([[[[4.0, 1.0], [1.0, 0.25]], [[1.0, -0.3], [-0.3, 9.0]]]])
    data = covariances_at(v, [0, 2])
    rho = correlation(data)
    np.testing.assert_allclose(rho.values, [[[[1, 1], [1, 1]], [[1, -0.1], [-0.1, 1]]]], rtol=1e-15)
    assert rho.dims == data["covariance"].dims
    assert (rho.name, rho.attrs) == ("correlation", {"long_name": "correlation", "units": "1"})
    np.testing.assert_array_equal(data["covariance"].values, v)


@pytest.mark.parametrize("scale", [1e-150, 1e150])
def test_correlation_does_not_leave_the_range_of_doubles(scale):
    """The product of two variances of 1e-300 or 1e300 is not a double."""
    v = scale**2 * np.array([[[[4.0, 1.0], [1.0, 1.0]]]])
    np.testing.assert_allclose(correlation(covariances_at(v, [0])).values[0, 0], [[1, 0.5], [0.5, 1]], rtol=1e-14)


def silent_flips(path, saved, count):
    """Return how many single flipped bits make `load` return other data without an error or a warning."""
    rng, silent = np.random.default_rng(1), 0
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    sizes = np.array([each.stat().st_size for each in files])
    for _ in range(count):
        file = files[rng.choice(len(files), p=sizes / sizes.sum())]
        whole = file.read_bytes()
        content = bytearray(whole)
        content[rng.integers(len(content))] ^= 1 << rng.integers(8)
        file.write_bytes(content)
        with suppress(InputError), warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always")
            loaded = load(path)
            silent += not (messages or loaded.identical(saved))
        file.write_bytes(whole)
    return silent


@pytest.mark.filterwarnings("ignore")  # Zarr's, of the tasks that failed
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_flipped_bit_is_never_silent(tmp_path, monkeypatch, ending):
    """The wrong twin: without comparing checksums, bits of numbers are."""
    saved = dataset()
    path = save(saved, tmp_path / f"a{ending}")
    assert silent_flips(path, saved, 120) == 0
    with monkeypatch.context() as patch:
        stored = xr.open_dataset(path, engine="zarr" if ending == ".zarr" else "scipy").attrs["sha256"]
        patch.setattr("limitformer.results.storage.checksum", lambda _: stored)
        assert silent_flips(path, saved, 40) > 0


def test_a_file_without_a_checksum_loads_with_one_warning(tmp_path):
    dataset().to_netcdf(tmp_path / "a.nc", engine="scipy", format="NETCDF3_64BIT")
    with pytest.warns(UserWarning, match=r"a\.nc has no checksum.* Nearest: save it again\.$") as messages:
        loaded = load(tmp_path / "a.nc")
    assert len(messages) == 1
    assert_bit_equal(load(save(loaded, tmp_path / "b.nc")), dataset())


def test_load_refuses_a_link_out_of_a_zarr_folder(tmp_path):
    path = save(dataset(), tmp_path / "a.zarr")
    (tmp_path / "secret").write_bytes(bytes(24))
    (path / "exit" / "0").unlink()
    (path / "exit" / "0").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match=r"exit/0 is a link out of a\.zarr\. Nearest: a copy"):
        load(path)
