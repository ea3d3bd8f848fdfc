"""What all tests share."""

import signal

import pytest

# A shell switches Ctrl-C off for what runs in the background; tests send it, and what they start must hear it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def folder_of_figures(tmp_path_factory):
    """Where `figures` are."""
    return tmp_path_factory.mktemp("figures")


@pytest.fixture(scope="session")
def figures(folder_of_figures):
    """Every figure at quick scale, made once."""
    from limitformer.figures import FIGURES, make

    return {name: make(name, scale="quick", out=folder_of_figures, seed=11, threads=2) for name in FIGURES}


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The store of the slow sweep, as one process makes it."""
    from sweep_grids import CELLS, run, slow_sweep

    path = tmp_path_factory.mktemp("whole") / "s.zarr"
    run(slow_sweep(CELLS), path)
    return path
