"""Faults that the tests must catch: `python tests/faults.py` tries all of `faults.toml`, `--only NAME …` some.

Each fault is one line of the source made wrong in a temporary copy of the repository. The tests named for it pass
there without it, and must fail with it. One that they let pass ends the program with 1, after the table.
A fault in a kernel costs a compilation, so that the whole table takes about an hour; Ctrl-C prints what was found.
"""

import argparse
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COPIED = ("src", "tests", "benchmarks", "docs", "pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")
HEAVY = ("numba", "scipy.stats", "xarray", "torch")  # what takes seconds to import, and does not change
INTERRUPTED = 2
VERDICTS = {0: "LET PASS", 1: "caught"}  # of pytest's endings; any other says that the tests did not run


def faults(wanted):
    """Return the faults whose names contain one of the `wanted` words, or all."""
    table = tomllib.loads((HERE / "faults.toml").read_text())["fault"]
    names = [fault["name"] for fault in table]
    assert len(set(names)) == len(names), "two faults have one name"
    return [fault for fault in table if not wanted or any(word in fault["name"] for word in wanted)]


def copied(folder):
    """Copy the repository to `folder` without caches."""
    for name in COPIED:
        source, left_out = HERE.parent / name, shutil.ignore_patterns("__pycache__")
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / name, **({"ignore": left_out} if source.is_dir() else {}))
    return folder


def ending(folder, tests):
    """Run these tests of the copy in a fork with the heavy packages imported, and return pytest's exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.environ["PYTHONPATH"] = str(folder / "src")
        sys.path.insert(0, str(folder / "src"))
        os._exit(int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests])))
    except BaseException:  # noqa: BLE001  a fork must not go on as its parent
        sys.excepthook(*sys.exc_info())
        os._exit(INTERRUPTED)


def verdict(folder, fault, healthy):
    """Say whether the tests catch the fault. `healthy` caches the tests that pass without it."""
    path, tests = folder / "src" / fault["file"], tuple(fault["tests"])
    text = path.read_text()
    if text.count(fault["text"]) != 1:
        return f"the text is there {text.count(fault['text'])} times"
    if tests not in healthy:
        healthy[tests] = ending(folder, tests)
    if healthy[tests] != 0:
        return "the tests fail without it"
    try:
        write(path, text.replace(fault["text"], fault["replacement"]))
        return VERDICTS.get(ending(folder, tests), "the tests did not run")
    finally:
        write(path, text)


def write(path, text):
    """Write the file and delete its bytecode, which Python would reuse for a text of equal length and time."""
    path.write_text(text)
    Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)


def main():
    """Apply the faults one after the other and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="faults whose names hold one of these")
    assert "limitformer" not in sys.modules, "a copy is what is tested"
    for name in HEAVY:
        importlib.import_module(name)
    chosen, healthy, found = faults(parser.parse_args().only), {}, []
    with tempfile.TemporaryDirectory(prefix="limitformer-faults-") as folder:
        copy = copied(Path(folder))
        for fault in chosen:
            began = time.monotonic()
            found.append(verdict(copy, fault, healthy))
            print(f"{fault['name']:44} {time.monotonic() - began:5.0f} s  {found[-1]}", flush=True)
    caught = found.count("caught")
    print(f"{caught} of {len(chosen)} faults caught")
    return 0 if chosen and caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
