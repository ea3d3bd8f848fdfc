"""A sweep on processes, as a program that tests start and kill: sweep_program.py STORE CELLS SAMPLES."""

import sys

import limitformer as lf
from sweep_grids import slow_sweep

if __name__ == "__main__":
    lf.run_sweep(slow_sweep(int(sys.argv[2]), int(sys.argv[3])), sys.argv[1], workers=2, progress=False)
