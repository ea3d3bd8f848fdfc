"""Train shaped models for a few steps on one process, or on several with `fully_shard`, and write their strengths."""

import json
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GPT2LMHeadModel

from hf_models import config_of, inputs_of
from limitformer.hf import Shaping, shape_model
from limitformer.nn import Gain, Residual, gains, shaped_block

STEPS = 3


def model_of(kind):
    """Return a stock model with one number for all heads, or two of our blocks, in float32 or bfloat16."""
    torch.manual_seed(0)
    if kind == "own":
        return torch.nn.Sequential(*[shaped_block(16, 4, gamma=0.3, per_head=False) for _ in range(2)])
    shaping = Shaping(per_head=False, residual_gamma=0.3, shaped_relu=True, float32=kind == "bfloat16")
    model = shape_model(GPT2LMHeadModel(config_of("gpt2")), shaping, redraw=True)
    return model.to(torch.bfloat16) if kind == "bfloat16" else model


def shard(model, kind, mesh):
    """Shard blocks, then the rest; strengths separately if their dtype differs from that of the weights."""
    if kind == "bfloat16":
        for module in model.modules():
            if isinstance(module, Gain | Residual):
                fully_shard(module, mesh=mesh, reshard_after_forward=False)
    for block in model if kind == "own" else model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def loss_of(model, kind, step, part):
    if kind == "own":
        x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(step))[part]
        return (model(x) ** 4).mean()
    ids = inputs_of("text", seed=step, batch=2)["input_ids"][part]
    return model(ids, labels=ids).loss


def trained(kind, rank, processes, mesh):
    """Train and return the strengths at the end."""
    model = model_of(kind)
    if mesh is not None:
        shard(model, kind, mesh)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    size = 2 // processes
    for step in range(STEPS):
        optimiser.zero_grad()
        loss_of(model, kind, step, slice(rank * size, (rank + 1) * size)).backward()
        optimiser.step()
    return strengths_of(model).detach()


def strengths_of(model):
    strengths = [gain.value for gain in gains(model)]
    for module in model.modules():
        strengths += [module.lam, module.gamma] if isinstance(module, Residual) else []
    return torch.cat([x.full_tensor() if hasattr(x, "full_tensor") else x for x in strengths])


def main(rank, processes, folder):
    """Train in one of several processes, which meet in `folder`; the first one writes all strengths."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", timedelta(seconds=300), processes, rank)
    mesh = init_device_mesh("cpu", (processes,))
    kinds = ("own", "float32", "bfloat16")
    strengths = {kind: trained(kind, rank, processes, mesh).double().tolist() for kind in kinds}
    if rank == 0:
        (Path(folder) / "strengths.json").write_text(json.dumps(strengths))
    dist.destroy_process_group()
