"""The names of cells: those with files are found among all cells of the grid, at little cost for missing ones."""

import numpy as np

import limitformer as lf
from limitformer.sweep.cells import Names


class CountedHash:
    """A hash that counts the values it takes."""

    def __init__(self, inner, count):
        self.inner, self.count = inner, count

    def copy(self):
        return CountedHash(self.inner.copy(), self.count)

    def update(self, value):
        self.count[0] += 1
        self.inner.update(value)

    def digest(self):
        return self.inner.digest()

    def hexdigest(self):
        return self.inner.hexdigest()


def wide_names():
    """Return the names of a grid of 30 x 1 x 40 cells, and the hash that counts for them."""
    over = {"gamma": np.linspace(0.1, 0.5, 30).tolist(), "depth": [4], "seed": list(range(40))}
    base = lf.Transformer(width=8, depth=4, gamma=0.5, feedforward=lf.ReLU())
    names = Names(lf.Sweep(base, over=over, simulate={"samples": 2, "start": {"tokens": 2, "correlation": 0.2}}))
    count = [0]
    names.sweep = CountedHash(names.sweep, count)
    return names, count


def test_cells_among_names_are_those_of_the_grid_in_its_order():
    names, _ = wide_names()
    every = [(index, names.of(index)) for index in np.ndindex(30, 1, 40)]
    foreign = [f"{32 * '0'}.cell", "0.cell", "x" * 32 + ".cell", every[0][1].upper(), every[0][1] + "x"]
    assert list(names.among([name for _, name in reversed(every)] + foreign)) == every
    assert list(names.among([every[7][1], every[5][1], *foreign])) == [every[5], every[7]]
    assert list(names.among(foreign)) == []


def test_missing_cells_share_their_hashes():
    names, count = wide_names()
    last = names.of((29, 0, 39))
    count[0] = 0
    assert list(names.among([last])) == [((29, 0, 39), last)]
    assert count[0] == 30 + 30 + 30 * 40  # not three for each cell
    first = names.of((0, 0, 0))
    count[0] = 0
    assert list(names.among([first])) == [((0, 0, 0), first)]
    assert count[0] == 3  # no cell comes after the last file
    count[0] = 0
    assert list(names.among([])) == []
    assert count[0] == 0
