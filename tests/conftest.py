"""Settings and fixtures for all tests."""

import os
import signal
import sys

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("COLUMNS", None)  # it would fix the width of consoles in every test

# A shell ignores Ctrl-C for background jobs; tests send it to processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    if getattr(config.option, "numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy is imported: each test process uses one core
    # Torch's compiler would build a test program to detect the processor's instructions, and that build fails here.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config, items):
    """Keep the tests of a file, or of a named group, in one process: they share kernels and samples."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


PROVEN = ("test_cases", "test_documentation", "test_examples")  # files whose tests run the witness


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
def folder_of_figures(tmp_path_factory):
    return tmp_path_factory.mktemp("figures")


@pytest.fixture(scope="session")
def figures(folder_of_figures):
    """Every figure at quick scale, made once."""
    from limitformer_papers import FIGURES, make

    return {name: make(name, scale="quick", out=folder_of_figures, seed=11, threads=2) for name in FIGURES}


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The store of the slow sweep, computed by one process."""
    from sweep_grids import CELLS, run, slow_sweep

    path = tmp_path_factory.mktemp("whole") / "s.zarr"
    run(slow_sweep(CELLS), path)
    return path
