"""Sweeps: grids of simulations that survive anything and run on many machines."""

from limitformer.sweep.describe import Sweep as Sweep
from limitformer.sweep.file import read_sweep as read_sweep
from limitformer.sweep.run import SweepInterrupted as SweepInterrupted
from limitformer.sweep.run import SweepReport as SweepReport
from limitformer.sweep.run import compute_sweep as compute_sweep
from limitformer.sweep.run import run_sweep as run_sweep
from limitformer.sweep.store import OtherSweepError as OtherSweepError
from limitformer.sweep.store import load_sweep as load_sweep
