"""The processes in which the tests run."""

import os

import pytest

threadpoolctl = pytest.importorskip("threadpoolctl")


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process has all cores")
def test_each_test_process_uses_one_core():
    """NumPy and torch read the variable at import; later changes have no effect, and their threads would wait."""
    threads = {pool["filepath"]: pool["num_threads"] for pool in threadpoolctl.threadpool_info()}
    assert set(threads.values()) == {int(os.environ["OMP_NUM_THREADS"])}, threads
