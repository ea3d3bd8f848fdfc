"""Kill sweeps a hundred times: python tests/sweep_torture.py [KILLS].

Any process of a sweep, the parent or a worker, is killed after a random time, and the sweep is started again whenever
its parent has died, until KILLS processes (by default 100) were killed. The sweep is extended when it is complete. Its
store is then compared, bit by bit, with the store of one process that is never killed.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import limitformer as lf
from sweep_grids import assert_complete, assert_same_bits, done_cells, environment, run, slow_sweep, workers_of

PROGRAM = str(Path(__file__).parent / "sweep_program.py")
MORE, SAMPLES = 200, 300  # cells of an extension, and samples in a cell, which takes a few milliseconds


def one_kill(path, process, chance):
    """Kill a process of a run that has begun work, and return what it was; None if the run ends before."""
    before, pause = done_cells(path), chance.uniform(0.0, 0.5)
    while done_cells(path) == before:
        if process.poll() is not None:
            return None
        time.sleep(0.001)
    time.sleep(pause)
    kind, pids = chance.choice([("parent", [process.pid]), ("worker", workers_of(process.pid))])
    if not pids or process.poll() is not None:
        return None
    os.kill(chance.choice(pids), signal.SIGKILL)
    return kind


def tortured(path, kills):
    """Run the program until `kills` processes were killed and it ends by itself; return (deaths, runs, cells)."""
    deaths, runs, cells, chance = Counter(), 0, MORE, random.Random(0)
    while True:
        runs += 1
        command = [sys.executable, PROGRAM, str(path), str(cells), str(SAMPLES)]
        process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
        while deaths.total() < kills and (kind := one_kill(path, process, chance)):
            before = done_cells(path)
            deaths[kind] += 1
            if kind == "parent":
                break
        _, errors = process.communicate()
        done = done_cells(path)
        assert process.returncode in (0, -signal.SIGKILL), errors
        assert done >= before, "a finished cell was lost"
        print(f"run {runs}: {dict(deaths)} killed, {done} of {cells} cells done", flush=True)
        if process.returncode == 0:
            assert done == cells
            if deaths.total() >= kills:
                return deaths, runs, cells
            cells += MORE


if __name__ == "__main__":
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path, whole = Path(folder) / "killed.sweep", Path(folder) / "whole.sweep"
        deaths, runs, cells = tortured(path, int(*sys.argv[1:] or ["100"]))
        seconds = time.monotonic() - began
        run(slow_sweep(cells, SAMPLES), whole)
        assert_complete(path, cells)
        assert_same_bits(path, whole)
        lf.load_sweep(path)
        print(f"{cells} cells, {dict(deaths)} killed in {runs} runs, {seconds:.0f} s: the same bits.")
