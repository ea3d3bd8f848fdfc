"""A sweep as a program for tests to start and kill: sweep_program.py STORE CELLS SAMPLES [ADDRESS of Dask]."""

import sys

import limitformer as lf
from sweep_grids import slow_sweep

if __name__ == "__main__":
    path, cells, samples, *dask = sys.argv[1:]
    engine = {"dask": dask[0]} if dask else {"workers": 2}
    lf.run_sweep(slow_sweep(int(cells), int(samples)), path, extend=True, progress=False, **engine)
