"""The figures at quick scale. `make test` makes a few of different kinds, `make test-all` all."""

import pytest

from limitformer_papers import FIGURES, make

SEED = 11
FIRST = (  # of different kinds: curves, densities, maps, arrows, a diagram, bars, bands, errors, many panels
    *("st-fig1", "st-fig4", "st-fig7", "st-fig8", "text-fate"),
    *("ct-fig1", "ct-fig5", "ct-fig7", "ct-table1", "large-beta", "stock-models"),
)


class QuickFigures(dict):
    """The figures by name, each made when a test asks for it first."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def __missing__(self, name):
        return self.setdefault(name, make(name, scale="quick", out=self.folder, seed=SEED, threads=2))


def in_tiers(names=FIGURES, figure_of=str):
    """Return the parameters `names`; those of figures other than the first ones are slow."""
    slow = pytest.mark.slow
    return [pytest.param(name, marks=() if figure_of(name) in FIRST else slow) for name in names]
