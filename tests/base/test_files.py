"""Paths from users, and files that are written whole."""

import pytest
import xarray as xr

import limitformer as lf
from limitformer.base.files import SHOWN, write_whole
from limitformer.results.storage import check_target

LONG = 300 * "a"  # a name may have 255 bytes


@pytest.mark.parametrize("name", [62 * "🙂" + ".nc", "a.nc"], ids=["emoji", "short"])
def test_write_whole_takes_any_name_that_the_system_takes(tmp_path, name):
    write_whole(tmp_path / name, lambda path: path.write_text("whole"))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "whole"


def test_temporary_folder_is_hidden_and_shows_the_name(tmp_path):
    seen = []
    write_whole(tmp_path / LONG[:200], lambda path: (seen.append(path.parent.name), path.write_text("")))
    assert seen[0].startswith(f".{LONG[:SHOWN]}.")
    assert len(seen[0]) < 100


@pytest.mark.parametrize("name", [f"{LONG}.nc", f"{LONG}/a.nc"], ids=["nc", "folder"])
def test_save_names_a_path_that_is_too_long(tmp_path, name):
    data = xr.Dataset({"x": ("sample", [1.0])})
    with pytest.raises(lf.InputError, match=r"^Cannot use .*: File name too long\. Nearest: a shorter name\.$"):
        lf.save(data, tmp_path / name)
    with pytest.raises(lf.InputError, match=r"^Cannot use .*: File name too long\. Nearest: a shorter name\.$"):
        check_target(tmp_path / name)  # of a command, before its work
