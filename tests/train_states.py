"""The end of a run, for comparisons to the last bit."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from limitformer_papers.training import checkpoints
from limitformer_papers.training.log import read_log


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def generators(folder: Path) -> bytes:
    """Return torch's generator in the newest checkpoint; b"" if checkpoints were removed."""
    for newest in checkpoints.listed(folder / "checkpoints")[:1]:
        return bytes(torch.load(newest / "rng_state.pth", weights_only=False)["cpu"].numpy())
    return b""


def assert_same_run(folder: Path, other: Path) -> None:
    """Compare weights, every row of the log and the generators to the last bit."""
    assert read_log(folder).equals(read_log(other))
    ours, theirs = weights(folder), weights(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert generators(folder) == generators(other)
    summary, wanted = (json.loads((one / "summary.json").read_text()) for one in (folder, other))
    assert summary | {"seconds": 0} == wanted | {"seconds": 0}
