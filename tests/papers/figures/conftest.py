"""Fixtures of the tests of figures."""

import pytest

from quick_figures import QuickFigures


@pytest.fixture(scope="session")
def figures(tmp_path_factory):
    return QuickFigures(tmp_path_factory.mktemp("figures"))
