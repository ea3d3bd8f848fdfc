"""What all tests share."""

import os
import signal
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("COLUMNS", None)  # which would fix the width of consoles for good

# A shell switches Ctrl-C off for what runs in the background; tests send it, and what they start must hear it.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Groups of tests that are begun first, so that no worker is left alone with a long one; and those that wait for pages,
# processes and disks take turns with those that compute on both cores.
LONG = (
    *("test_site", "figures", "training", "test_limit", "test_sweep_processes", "test_sphere_clusters"),
    *("test_sweep_cluster", "test_sphere_merging", "test_sweep_damage", "test_explosion", "test_sweep_cli", "inductor"),
    *("test_sweep_store", "test_sphere_limits", "test_chain_network", "test_drawn_overlap", "test_weightless_families"),
    *("test_hf_attention", "test_sphere_chains", "test_phase", "test_cli", "test_documentation"),
)
# `make check`, for every edit: what is said in a minute, kernels of an edited file included.
FAST = (
    "tests/models",
    "tests/base/test_errors.py",
    "tests/numerics/test_kernels.py",
    "tests/covariance/test_limit.py::test_theorem",
    "tests/covariance/test_limit.py::test_corollary",
    "tests/covariance/test_limit.py::test_what_has_no_limit",
    "tests/sphere/test_overlap.py",
    "tests/sphere/test_sphere_models.py",
    "tests/simulation/test_results.py",
    "tests/papers/figures/test_figure_pages.py",
    "tests/test_faults.py",
    "src/limitformer/models",
)
COMPILING = ("test_own_parts",)  # of models, but they compile and train
# Tests of several files who share what takes long to make: figures, a process to fork, what torch's compiler asks of a
# machine.
TOGETHER = {
    "figures": ("test_figures", "test_figure_looks", "test_gallery"),
    "training": ("test_train_mlm", "test_train_grid", "test_train_harness", "test_hf_fsdp"),
}
BY_INDUCTOR = "test_inductor_gives_the_same_block"


def pytest_configure(config):
    """Each of several processes has a core, and is told so before it imports NumPy, whose threads would wait."""
    if getattr(config.option, "numprocesses", None):
        config.option.loadscopereorder = False  # in the order below, rather than by their number
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Torch's compiler need not try out what this processor can do, in builds of its own: the test of it would fail.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups, and pytest what is asked for
def pytest_collection_modifyitems(config, items):
    """`pytest -n 2`: a file's tests share kernels and samples, and stay in one process; `-m fast`: the fast tier."""
    for item in items:
        if item.nodeid.startswith(FAST) and not item.path.stem.startswith(COMPILING):
            item.add_marker(pytest.mark.fast)
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
    items.sort(key=lambda item: turn_of(group_of(item)))


def group_of(item):
    """Those who stay in one process: a file's tests, and those who share what takes long to make."""
    shared = [group for group, files in TOGETHER.items() if item.path.stem in files]
    if item.name == BY_INDUCTOR:
        return "inductor"
    return shared[0] if shared else str(item.path)


def turn_of(group):
    """Its place among the long ones; all others come after them."""
    name = Path(group).stem
    return LONG.index(name) if name in LONG else len(LONG)


def pytest_collection_finish(session):
    """Without groups every process makes every fixture again, and nobody sees why tests take twice as long."""
    grouped = getattr(session.config.option, "loadgroup", False)
    if grouped and session.items and "@" not in session.items[0].nodeid:
        raise pytest.UsageError("pytest-xdist does not group tests with this version of pytest; 9.1 and 3.8 do.")


@pytest.fixture(scope="session")
def folder_of_figures(tmp_path_factory):
    """Where `figures` are."""
    return tmp_path_factory.mktemp("figures")


@pytest.fixture(scope="session")
def figures(folder_of_figures):
    """Every figure at quick scale, made once."""
    from limitformer_papers import FIGURES, make

    return {name: make(name, scale="quick", out=folder_of_figures, seed=11, threads=2) for name in FIGURES}


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The store of the slow sweep, as one process makes it."""
    from sweep_grids import CELLS, run, slow_sweep

    path = tmp_path_factory.mktemp("whole") / "s.zarr"
    run(slow_sweep(CELLS), path)
    return path
