"""Settings and fixtures for all tests."""

import os
import signal
import sys

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("COLUMNS", None)  # it would fix the width of consoles in every test

# A shell ignores Ctrl-C for background jobs, and nohup SIGHUP; tests send both to processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure(config):
    if getattr(config.option, "numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy is imported: each test process uses one core
    # Torch's compiler would build a test program to detect the processor's instructions, and that build fails here.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also what is marked as slow, as `make test-all`")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config, items):
    """Leave out what is slow, and keep the tests of a file, or of a named group, in one process: they share kernels."""
    if not config.getoption("--all") and not any("::" in each for each in config.args):
        leave_out_slow(config, items)
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


def leave_out_slow(config, items):
    """Keep the first parameter sets only of tests that are marked as slow; none by default."""
    counts, kept, left_out = {}, [], []
    for item in items:
        mark = item.get_closest_marker("slow")
        if mark is None:
            kept.append(item)
            continue
        test = item.nodeid.partition("[")[0]
        counts[test] = counts.get(test, 0) + 1
        (kept if counts[test] <= mark.kwargs.get("keep", 0) else left_out).append(item)
    items[:] = kept
    if left_out:
        config.hook.pytest_deselected(items=left_out)


PROVEN = ("test_cases", "test_documentation", "test_examples", "test_what_others_computed")  # files with a witness


@pytest.fixture(autouse=True)
def without_witness(request, monkeypatch):
    """Leave out the witness of `check`, `steps` and `transfer`, except in tests about it: it doubles their time."""
    if "witness" in request.node.path.parts:
        return
    if request.node.path.stem in PROVEN:
        for name in ("witness", "training"):  # what is compared must not depend on the free memory
            monkeypatch.setattr(f"limitformer.witness.{name}.available_memory", lambda: None)
        return
    if {"checking", "cli", "scaling", "hf"} & set(request.node.path.parts):
        for place in ("checking.steps", "scaling.transfer"):  # else a first test would run with it, a second without
            pytest.importorskip(f"limitformer.{place}")
    places = {"checking.check": "witness_pass", "checking.steps": "witness_steps", "scaling.transfer": "witness_steps"}
    for place, function in places.items():
        module = sys.modules.get(f"limitformer.{place}")
        if module is not None:
            monkeypatch.setattr(module, function, lambda *_, **__: None)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The store of the slow sweep, computed by one process."""
    from sweep_grids import CELLS, run, slow_sweep

    path = tmp_path_factory.mktemp("whole") / "s.zarr"
    run(slow_sweep(CELLS), path)
    return path
