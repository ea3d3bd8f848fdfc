"""The table of faults matches the source; `make faults` applies it."""

import tomllib
from pathlib import Path

import pytest

import faults
from limitformer.numerics.kernels import PACKAGE

pytestmark = pytest.mark.fast

TABLE = tomllib.loads((Path(faults.__file__).parent / "faults.toml").read_text())["fault"]


def test_every_fault_matches_the_source_and_names_tests():
    for fault in TABLE:
        assert (PACKAGE.parent / fault["file"]).read_text().count(fault["text"]) == 1, fault["name"]
        for test in fault["tests"]:
            path, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}" in (Path(faults.__file__).parents[1] / path).read_text(), test


def test_faults_are_caught_by_tests_that_are_not_slow():
    """`make test` must catch them: a test that they name may be slow beyond its first parameter sets only."""
    for fault in TABLE:
        for test in (each for each in fault["tests"] if "::" in each):
            path, _, name = test.partition("::")
            before = (
                (Path(faults.__file__).parents[1] / path).read_text().partition(f"def {name.partition('[')[0]}(")[0]
            )
            decorators = before.rpartition("\n\n\n")[2]
            assert "mark.slow" not in decorators or ("mark.slow(keep=" in decorators and "[" not in name), test


def test_every_package_has_faults():
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {Path(fault["file"]).parts[1] for fault in TABLE} >= packages
    assert len(TABLE) >= 40


def test_verdict_is_caught_only_for_caught_faults(tmp_path, monkeypatch):
    """A missing text, tests that fail anyway and tests that do not run are not caught faults."""
    source = tmp_path / "src" / "limitformer" / "a.py"
    source.parent.mkdir(parents=True)
    source.write_text("x = 1\n")
    fault = {"file": "limitformer/a.py", "text": "x = 1", "replacement": "x = 2", "tests": ["t"]}

    def found(*endings, **changes):
        left = list(endings)
        monkeypatch.setattr(faults, "ending", lambda folder, tests: left.pop(0))
        return faults.verdict(tmp_path, fault | changes, {})

    assert found(0, 1) == "caught"
    assert found(0, 0) == "LET PASS"
    assert found(1) == "the tests fail without it"
    assert found(0, 2) == found(0, 5) == "the tests did not run"
    assert found(text="x = 3") == "the text is there 0 times"
    assert source.read_text() == "x = 1\n"
