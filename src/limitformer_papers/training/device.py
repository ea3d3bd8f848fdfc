"""The device that trains: its name, TF32 and compilation.

TF32 rounds the factors of a float32 product to 10 bits on GPUs of NVIDIA's generation Ampere and later ones.
Compilation (`torch.compile`) fuses the small operations between products. It is for GPUs only: on a CPU it takes
minutes of a C++ compiler and gains little. Compiled steps are equal to plain ones up to rounding, so a run keeps what
it was begun with, and `check_compiled` compares the first loss of every command.
"""

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from limitformer.base.errors import require
from limitformer_papers.training.plan import Plan, processes

AMPERE = (8, 0)  # the compute capability from which on GPUs have TF32
BACKEND = "inductor"
NEAR = 1e-2  # relative difference of a plain and a compiled loss: bfloat16 has 8 bits


def has_gpu() -> bool:
    return torch.cuda.is_available()


def has_tf32() -> bool:
    return has_gpu() and torch.cuda.get_device_capability() >= AMPERE


def device_name() -> str:
    """Return the name of the GPU that this process uses, or the kind of its CPU."""
    return torch.cuda.get_device_name() if has_gpu() else f"CPU {platform.machine()}"


def check_device(plan: Plan) -> None:
    """Raise `InputError` if the plan needs more than this device has."""
    here = f"this is {device_name()}"
    require(
        has_tf32() or not plan.tf32,
        f"tf32 needs a GPU of NVIDIA's generation Ampere or later; {here}. Nearest: tf32=False (--no-tf32).",
    )
    require(has_gpu() or not plan.compile, f"compile needs a GPU; {here}. Nearest: compile=False (--no-compile).")
    require(
        processes() == 1 or not plan.compile,
        "compile is for runs of one process; with torchrun take compile=False (--no-compile).",
    )


@contextmanager
def matrix_products(tf32: bool) -> Iterator[None]:
    """Compute products of float32 matrices inside the block in TF32, or exactly."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def check_compiled(plain: float, compiled: float) -> None:
    """Raise `InputError` if the loss of a compiled step is not that of the plain one, up to rounding."""
    apart = abs(plain - compiled)  # NaN if the run diverges, which is not the compiler's fault
    require(
        not apart > NEAR * abs(plain),
        f"The compiled model has the loss {compiled:.6g}, the plain one {plain:.6g}. Nearest: compile=False "
        "(--no-compile).",
    )
