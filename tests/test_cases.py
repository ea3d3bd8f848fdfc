"""Cases that were once answered wrongly: each file of tests/cases says what is right, and asserts it."""

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "cases"
FILES = sorted(file for kind in ("adversary", "models", "witness") for file in (FOLDER / kind).glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(FOLDER)) for file in FILES])
def test_case_has_its_right_answer(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    specification = importlib.util.spec_from_file_location(f"case_{file.stem}", file)
    case = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(case)
    case.verify()
