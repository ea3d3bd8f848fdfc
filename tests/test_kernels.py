"""Cached kernels: an edited source never runs yesterday's mathematics."""

import os

from limitformer import kernels


def test_every_file_with_kernels_is_watched():
    """An edit of a file that is missing from the list would leave its callers' caches in place."""
    defining = {
        path for path in kernels.PACKAGE.glob("**/*.py") if "from limitformer.kernels import" in path.read_text()
    }
    watched = {path for pattern in kernels.KERNEL_SOURCES for path in kernels.PACKAGE.glob(pattern)}
    assert {"random.py", "factor.py"} <= {path.name for path in defining}
    assert defining <= watched, sorted(path.name for path in defining - watched)


def test_caches_older_than_a_source_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "PACKAGE", tmp_path)
    caches = tmp_path / "chains" / "__pycache__"
    caches.mkdir(parents=True)
    for path, age in ((tmp_path / "random.py", 50), (caches / "old.nbi", 100), (caches / "new.nbi", 10)):
        path.write_text("")
        os.utime(path, (1e9 - age, 1e9 - age))
    kernels.drop_stale_caches()
    assert [path.name for path in caches.iterdir()] == ["new.nbi"]
