"""A sweep as a program for tests to start and kill: sweep_program.py STORE CELLS SAMPLES [processes or dask]."""

import sys
from contextlib import nullcontext

import limitformer as lf
from limitformer.sweep.cluster import local_cluster
from sweep_grids import slow_sweep

if __name__ == "__main__":
    path, cells, samples, engine = (*sys.argv[1:], "processes")[:4]
    with local_cluster(2) if engine == "dask" else nullcontext() as cluster:
        address = cluster and cluster.scheduler_address
        description = slow_sweep(int(cells), int(samples))
        lf.run_sweep(description, path, workers=2, cluster=address, extend=True, progress=False)
