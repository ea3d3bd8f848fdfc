r"""The random numbers of passes: functions of (seed, purpose, sample, row, column) only.

Purposes are names such as `model.layers.3.mlp.up_proj.weight: forward`. A row of n numbers is ⌈n/4⌉ blocks of Philox
(`numerics.random`). The row and the sample are the counter, so that any rows of a matrix can be drawn again, in any
order and by any number of threads, with the same result.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import gammaincinv, ndtri
from torch import Tensor

from limitformer.numerics.elementary import LEAST_TAIL, U64, normal_quantile
from limitformer.numerics.kernels import driver, inlined, strict_kernel
from limitformer.numerics.random import box_muller, key, uniform, words_of
from limitformer.sampling.replicas import usable_cores
from limitformer.weightless.laws import TRUNCATED, UNIFORM, Law

PIECE = 2**18  # numbers that a thread draws at a time
LEAST_UNIFORM = 2.0**-33  # the smallest number that `uniform` returns


@cache
def key_words(seed: int, purpose: str) -> NDArray[np.uint64]:
    """Return the key of all numbers for one purpose."""
    return np.array(key(seed, f"weightless {purpose}"), np.uint64)


Rows = Sequence[int] | Tensor  # row numbers
Fill = Callable[[NDArray[np.uint64], np.uint64, NDArray[np.uint64], NDArray[Any]], None]


def normals(seed: int, purpose: str, samples: range, rows: Rows, columns: int, dtype: torch.dtype) -> Tensor:
    """Draw N(0, 1) (samples, rows, columns)."""
    return fill_all(fill_rows, seed, purpose, samples, rows, columns, dtype)


def entries(law: Law, seed: int, purpose: str, samples: range, rows: Rows, columns: int, dtype: torch.dtype) -> Tensor:
    """Draw independent entries of a random law (samples, rows, columns).

    An entry that is not normal takes one word of Philox.
    """
    where = seed, purpose, samples, rows, columns
    if law.kind == UNIFORM:
        return fill_all(functools.partial(fill_uniform_rows, float(law.shift), float(law.scale)), *where, dtype)
    if law.kind == TRUNCATED:
        below, mass, above = law.probabilities()
        if min(below, above) + mass * LEAST_UNIFORM < LEAST_TAIL:
            between = fill_all(functools.partial(fill_uniform_rows, 0.0, 1.0), *where, torch.float64).numpy()
            lower, upper = below + mass * between, above + mass * (1 - between)  # beyond `normal_quantile`
            points = np.where(upper < lower, -ndtri(upper), ndtri(lower))
            return torch.from_numpy(law.scale * points + law.shift).to(dtype)
        numbers = np.array([below, mass, above, law.scale, law.shift])
        return fill_all(functools.partial(fill_truncated_rows, numbers), *where, dtype)
    g = normals(*where, dtype).mul_(law.scale)
    return g.add_(law.shift) if law.shift else g


def wishart_root(seed: int, purpose: str, samples: range, rows: int, freedom: int, dtype: torch.dtype) -> Tensor:
    """Draw T (samples, rows, min(rows, freedom)), of which T Tᵀ is a Wishart matrix with `freedom` degrees of freedom.

    It is the triangular factor of a Gaussian matrix (rows × freedom): N(0, 1) below a diagonal of χ with `freedom`,
    `freedom` − 1, … degrees of freedom [M. S. Bartlett, Proc. R. Soc. Edinburgh 53 (1933)]. Each χ takes one word.
    """
    columns = min(rows, freedom)
    lower = normals(seed, purpose, samples, range(rows), columns, dtype).tril_(-1)
    shares = fill_all(
        functools.partial(fill_uniform_rows, 0.0, 1.0), seed, f"{purpose}, lengths", samples, range(1), columns,
        torch.float64,
    )  # fmt: skip
    squares = 2 * gammaincinv((freedom - np.arange(columns)) / 2, shares[:, 0].numpy())
    lower.diagonal(dim1=-2, dim2=-1).copy_(torch.from_numpy(np.sqrt(squares)))
    return lower


def fill_all(
    fill: Fill, seed: int, purpose: str, samples: range, rows: Rows, columns: int, dtype: torch.dtype
) -> Tensor:
    """Return numbers (samples, rows, columns) that `fill` writes, by several threads if they are many."""
    out = torch.empty(len(samples), len(rows), columns, dtype=dtype if dtype == torch.float64 else torch.float32)
    array, numbers = out.numpy(), np.asarray(rows, np.uint64)
    words, first = key_words(seed, purpose), U64(samples.start)
    if out.numel() <= PIECE or usable_cores() == 1:
        fill(words, first, numbers, array)
    else:
        some_rows = max(1, PIECE // max(columns, 1))
        some_samples = max(1, some_rows // max(len(rows), 1))
        parts = product(slices(len(samples), some_samples), slices(len(rows), some_rows))
        list(pool().map(lambda at: fill(words, first + U64(at[0].start), numbers[at[1]], array[at]), parts))
    return out.to(dtype)


def slices(size: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


@cache
def pool() -> ThreadPoolExecutor:
    """Threads that draw numbers; kernels run without the interpreter's lock."""
    return ThreadPoolExecutor(usable_cores(), thread_name_prefix="limitformer-numbers")


@driver
def fill_rows(words, sample, rows, out):
    """Fill `out` (samples, rows, columns) with N(0, 1); `sample` is the first sample."""
    blocks = U64((out.shape[2] + 3) // 4)
    for s in range(out.shape[0]):
        for i in range(len(rows)):
            fill_row(words[0], words[1], sample + U64(s), rows[i] * blocks, out[s, i])


@strict_kernel
def fill_row(k0, k1, sample, block, out):
    """Fill a row; the four normals of a block go to four runs, so that all stores are contiguous."""
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


@driver
def fill_uniform_rows(low, width, words, sample, rows, out):
    """Fill `out` (samples, rows, columns) with U(low, low + width)."""
    blocks = U64((out.shape[2] + 3) // 4)
    for s in range(out.shape[0]):
        for i in range(len(rows)):
            fill_uniform_row(low, width, words[0], words[1], sample + U64(s), rows[i] * blocks, out[s, i])


@strict_kernel
def fill_uniform_row(low, width, k0, k1, sample, block, out):
    """Fill a row, in the order of `fill_row`."""
    run = len(out) // 4
    a, b, c, d = out[:run], out[run : 2 * run], out[2 * run : 3 * run], out[3 * run : 4 * run]
    for i in range(run):
        w0, w1, w2, w3 = words_of(block + U64(i), sample, k0, k1)
        a[i] = low + width * uniform(w0)
        b[i] = low + width * uniform(w1)
        c[i] = low + width * uniform(w2)
        d[i] = low + width * uniform(w3)
    for i in range(4 * run, len(out)):
        w0, w1, w2, _ = words_of(block + U64(run), sample, k0, k1)
        place = i - 4 * run
        out[i] = low + width * uniform(w0 if place == 0 else w1 if place == 1 else w2)


@driver
def fill_truncated_rows(law, words, sample, rows, out):
    """Fill `out` (samples, rows, columns) with entries of a truncated normal law.

    `law` holds P(g < low), P(low < g < high) and P(g > high) for g ~ N(0, 1), then the scale and the shift of an entry.
    """
    blocks = U64((out.shape[2] + 3) // 4)
    for s in range(out.shape[0]):
        for i in range(len(rows)):
            fill_truncated_row(law, words[0], words[1], sample + U64(s), rows[i] * blocks, out[s, i])


@inlined
def truncated(word, below, mass, above):
    """Return the point of N(0, 1) with probability `below` plus the word's share of `mass` to its left."""
    u = uniform(word)
    return normal_quantile(below + mass * u, above + mass * (1.0 - u))


@strict_kernel
def fill_truncated_row(law, k0, k1, sample, block, out):
    """Fill a row, in the order of `fill_row`."""
    below, mass, above, scale, shift = law[0], law[1], law[2], law[3], law[4]
    run = len(out) // 4
    a, b, c, d = out[:run], out[run : 2 * run], out[2 * run : 3 * run], out[3 * run : 4 * run]
    for i in range(run):
        w0, w1, w2, w3 = words_of(block + U64(i), sample, k0, k1)
        a[i] = shift + scale * truncated(w0, below, mass, above)
        b[i] = shift + scale * truncated(w1, below, mass, above)
        c[i] = shift + scale * truncated(w2, below, mass, above)
        d[i] = shift + scale * truncated(w3, below, mass, above)
    for i in range(4 * run, len(out)):
        w0, w1, w2, _ = words_of(block + U64(run), sample, k0, k1)
        place = i - 4 * run
        out[i] = shift + scale * truncated(w0 if place == 0 else w1 if place == 1 else w2, below, mass, above)
