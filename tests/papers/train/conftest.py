"""Fixtures of the tests that train."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """Let torch use one thread during the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
