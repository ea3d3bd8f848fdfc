"""Cases that were once answered wrongly: each file of tests/cases says what is right, and asserts it."""

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "cases"
FILES = sorted(file for kind in ("adversary", "models", "witness") for file in (FOLDER / kind).glob("*.py"))


SLOW = ("r14_read_law", "r22_rate_overrides_own_scaling", "r07_embedding_std1_times_sqrt_d")  # more than three seconds
NAMES = {str(file.relative_to(FOLDER)): file for file in FILES}


def verify(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    specification = importlib.util.spec_from_file_location(f"case_{file.stem}", file)
    case = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(case)
    case.verify()


@pytest.mark.parametrize("name", [name for name, file in NAMES.items() if file.stem not in SLOW])
def test_case_has_its_right_answer(name, tmp_path, monkeypatch):
    verify(NAMES[name], tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, file in NAMES.items() if file.stem in SLOW])
def test_slow_case_has_its_right_answer(name, tmp_path, monkeypatch):
    verify(NAMES[name], tmp_path, monkeypatch)
