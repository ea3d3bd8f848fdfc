"""The processes that the tests themselves run in."""

import os

import pytest

threadpoolctl = pytest.importorskip("threadpoolctl")


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process has all cores")
def test_each_of_several_processes_has_one_core():
    """NumPy and torch have read what they are told: set after their import, it is not heard, and their threads wait."""
    threads = {pool["filepath"]: pool["num_threads"] for pool in threadpoolctl.threadpool_info()}
    assert set(threads.values()) == {int(os.environ["OMP_NUM_THREADS"])}, threads
