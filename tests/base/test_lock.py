"""Locks on folders: one process at a time, and a second one is refused with the name of the first."""

import os
import re
import shutil
import socket

import pytest

from limitformer.base.errors import InputError
from limitformer.base.lock import only_one

NEAREST = "Nearest: wait until it has ended, or another folder."


def test_second_lock_is_refused_with_the_name_of_the_holder(tmp_path):
    place, who = tmp_path / "lock", re.escape(f"process {os.getpid()} on {socket.gethostname()}")
    with only_one(place, "the thing"):
        says = rf"^the thing is in use by {who} since \d{{4}}-\d\d-\d\d \d\d:\d\d\. {NEAREST}$"
        with pytest.raises(InputError, match=says), only_one(place, "the thing"):
            pass
    assert list(tmp_path.iterdir()) == []
    with only_one(place, "the thing"):
        assert place.exists()


def test_lock_is_free_after_an_interrupt_or_a_deleted_folder(tmp_path):
    with pytest.raises(KeyboardInterrupt), only_one(tmp_path / "lock", "it"):
        raise KeyboardInterrupt
    with only_one(tmp_path / "lock", "it"):
        shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    with only_one(tmp_path / "lock", "it"):
        pass


def test_a_lock_whose_file_the_holder_has_removed_is_not_a_lock(tmp_path):
    """The file of a holder that has ended guards nothing: a second process makes a new one, and a third is refused."""
    place = tmp_path / "lock"
    with only_one(place, "it"):
        place.rename(tmp_path / "removed")
        with only_one(place, "it"):
            assert not place.samefile(tmp_path / "removed")
            with pytest.raises(InputError, match="in use by process"), only_one(place, "it"):
                pass


@pytest.mark.parametrize(
    ("text", "says"), [(b"", "another process"), (b"\x1b[31m\nme\0\xff\n", "[31m me \ufffd"), (9999 * b"x", 200 * "x")]
)
def test_any_content_of_a_lock_gives_one_line(tmp_path, text, says):
    with only_one(tmp_path / "lock", "it"):
        (tmp_path / "lock").write_bytes(text)
        with pytest.raises(InputError) as raised, only_one(tmp_path / "lock", "it"):
            pass
    assert str(raised.value) == f"it is in use by {says}. {NEAREST}"
