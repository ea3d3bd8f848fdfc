"""Cached kernels: an edited source never runs yesterday's mathematics."""

import re

import numba

from limitformer import kernels


def test_every_file_with_kernels_is_watched():
    """An edit of a file that is missing from the list would leave its callers' caches in place.

    What kernels are made of counts too: the types and functions that other files add to the compiler.
    """
    sign = re.compile(r"^(from limitformer\.kernels import|from numba|import numba)", re.MULTILINE)
    defining = {path for path in kernels.PACKAGE.glob("**/*.py") if sign.search(path.read_text())}
    watched = {path for pattern in kernels.KERNEL_SOURCES for path in kernels.PACKAGE.glob(pattern)}
    assert {"random.py", "factor.py", "lanes.py", "elementary.py", "recording.py"} <= {path.name for path in defining}
    assert defining <= watched, sorted(path.name for path in defining - watched)


def test_an_edit_of_any_kernel_source_changes_the_cache(tmp_path, monkeypatch):
    """One byte in one file: another fingerprint; back again: the same."""
    for pattern in kernels.KERNEL_SOURCES:
        for path in kernels.PACKAGE.glob(pattern):
            copy = tmp_path / path.relative_to(kernels.PACKAGE)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(kernels, "PACKAGE", tmp_path)
    before = kernels.fingerprint()
    for path in sorted(tmp_path.glob("**/*.py")):
        text = path.read_bytes()
        path.write_bytes(text + b"#")
        assert kernels.fingerprint() != before, path.name
        path.write_bytes(text)
    assert kernels.fingerprint() == before


def test_kernels_are_cached_in_the_folder_of_their_fingerprint():
    from limitformer.factor import gram
    from limitformer.random import next_normal

    for compiled in (gram, next_normal):
        assert str(kernels.CACHE) in compiled.stats.cache_path
    assert kernels.CACHE.name == f"kernels-{kernels.fingerprint()}"


def test_numbas_own_setting_is_left_as_it_was():
    before = numba.config.CACHE_DIR
    kernels.kernel(lambda: None)
    assert before == numba.config.CACHE_DIR
