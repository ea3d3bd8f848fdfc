"""Shaped models that `fully_shard` shards over two processes, against one process."""

import json

import pytest
import torch

import fsdp_program
from forks import forked

pytestmark = pytest.mark.xdist_group("training")  # they share a process to fork


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Return {kind: strengths after training} of the first of two processes."""
    folder = tmp_path_factory.mktemp("fsdp")
    both = [forked(fsdp_program.main, rank, 2, str(folder)) for rank in (0, 1)]
    for process in both:
        process.join(600)
    assert [process.exitcode for process in both] == [0, 0]
    strengths = json.loads((folder / "strengths.json").read_text())
    return {kind: torch.tensor(numbers, dtype=torch.float64) for kind, numbers in strengths.items()}


@pytest.mark.parametrize(("kind", "tolerance"), [("own", 1e-6), ("float32", 1e-6), ("bfloat16", 1e-3)])
def test_fsdp_trains_strengths_as_one_process_does(kind, tolerance, sharded):
    """Gains for all heads, λ, γ and slopes are parameters that FSDP2 can shard."""
    start = fsdp_program.strengths_of(fsdp_program.model_of(kind)).detach().double()
    wanted = fsdp_program.trained(kind, 0, 1, None).double()
    actual = sharded[kind]
    moved = (wanted - start).abs()
    assert moved.max() > 1e-3
    assert (actual - wanted).abs().max() < tolerance * (1 if tolerance < 1e-3 else moved.max() / 1e-2)
    half = fsdp_program.trained(kind, 0, 2, None).double()  # half the batch, the wrong twin
    assert (half - wanted).abs().max() > 20 * tolerance * moved.max()
