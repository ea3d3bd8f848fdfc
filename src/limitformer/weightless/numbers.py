r"""The numbers that take the place of weights: a function of (seed, purpose, sample, row, column) alone.

Purposes are names such as `model.layers.3.mlp.up_proj.weight: forward`. A row of n numbers is ⌈n/4⌉ blocks of Philox
(`numerics.random`); its row number and the sample are the counter, so that any rows of a matrix can be drawn again,
in any order, by any number of threads, with the same result.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitformer.numerics.elementary import U64
from limitformer.numerics.kernels import driver, strict_kernel
from limitformer.numerics.random import box_muller, key, words_of
from limitformer.running.replicas import usable_cores

PIECE = 2**18  # numbers that a thread draws at a time


@cache
def key_words(seed: int, purpose: str) -> NDArray[np.uint64]:
    """The key of all numbers for one purpose."""
    return np.array(key(seed, f"weightless {purpose}"), np.uint64)


def normals(
    seed: int, purpose: str, samples: range, rows: Sequence[int] | Tensor, columns: int, dtype: torch.dtype
) -> Tensor:
    """N(0, 1) (samples, rows, columns)."""
    out = torch.empty(len(samples), len(rows), columns, dtype=dtype if dtype == torch.float64 else torch.float32)
    array, numbers = out.numpy(), np.asarray(rows, np.uint64)
    words, first = key_words(seed, purpose), U64(samples.start)
    if out.numel() <= PIECE or usable_cores() == 1:
        fill_rows(words, first, numbers, array)
    else:
        parts = pieces(array.shape)
        list(pool().map(lambda at: fill_rows(words, first + U64(at[0].start), numbers[at[1]], array[at]), parts))
    return out.to(dtype)


def pieces(shape: tuple[int, ...]) -> list[tuple[slice, slice]]:
    """Samples and rows of about `PIECE` numbers."""
    samples, rows, columns = shape
    some_rows = max(1, PIECE // max(columns, 1))
    some_samples = max(1, some_rows // max(rows, 1))
    return [
        (slice(i, min(i + some_samples, samples)), slice(j, min(j + some_rows, rows)))
        for i in range(0, samples, some_samples)
        for j in range(0, rows, some_rows)
    ]


@cache
def pool() -> ThreadPoolExecutor:
    """Threads that draw; kernels run without the interpreter's lock."""
    return ThreadPoolExecutor(usable_cores(), thread_name_prefix="limitformer-numbers")


@driver
def fill_rows(words, sample, rows, out):
    """`out` (samples, rows, columns) with the numbers of these rows, from `sample` on."""
    blocks = U64((out.shape[2] + 3) // 4)
    for s in range(out.shape[0]):
        for i in range(len(rows)):
            fill_row(words[0], words[1], sample + U64(s), rows[i] * blocks, out[s, i])


@strict_kernel
def fill_row(k0, k1, sample, block, out):
    """One row; the four normals of a block stand in four runs, so that all stores are contiguous."""
    run = len(out) // 4
    a, b, c, d = out[:run], out[run : 2 * run], out[2 * run : 3 * run], out[3 * run : 4 * run]
    for i in range(run):
        w0, w1, w2, w3 = words_of(block + U64(i), sample, k0, k1)
        a[i], b[i] = box_muller(w0, w1)
        c[i], d[i] = box_muller(w2, w3)
    for i in range(4 * run, len(out)):  # at most three, from the row's last block
        w0, w1, w2, w3 = words_of(block + U64(run), sample, k0, k1)
        first, second = box_muller(w0, w1)
        third, _ = box_muller(w2, w3)
        place = i - 4 * run
        out[i] = first if place == 0 else second if place == 1 else third
