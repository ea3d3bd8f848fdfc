"""Many matrices in one piece of memory, so that kernels hand on two arrays rather than a hundred.

What a kernel is given is compiled into each of its callers; a workspace of a hundred arrays takes minutes. Here every
name has a row in a table: where its matrices begin, their rows and columns, in entries of LANES.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array
from numpy.typing import NDArray

from limitformer.numerics.kernels import allocator
from limitformer.numerics.lanes import LANES, lane_matrix

# Numba passes the typing context first, which its annotations leave out.
extension: Any = intrinsic


class Scratch(NamedTuple):
    """`memory` (all entries, 1, LANES) and `table` (names, 3): first entry, rows, columns."""

    memory: np.ndarray
    table: np.ndarray


def table_of(shapes: Sequence[tuple[int, int, int]]) -> NDArray[np.int64]:
    """The table of names that have so many matrices each, (count, rows, columns); its last row is the memory's end."""
    sizes = [count * rows * columns for count, rows, columns in shapes]
    first = np.cumsum([0, *sizes])
    return np.array([[f, *shape[1:]] for f, shape in zip(first, [*shapes, (0, 0, 0)], strict=True)], np.int64)


@allocator
def open_scratch(table):
    """Zeros."""
    return Scratch(lane_matrix(table[-1, 0], 1), table)


def found(context: Any, builder: Any, kind: Any, scratch: Any, name: Any) -> tuple[Any, ...]:
    """Of the first matrix of this name: pointer to its first number, rows, columns."""
    memory = make_array(kind.types[0])(context, builder, builder.extract_value(scratch, 0))
    table = make_array(kind.types[1])(context, builder, builder.extract_value(scratch, 1))
    row = builder.mul(name, ir.Constant(ir.IntType(64), 3))
    first, rows, columns = (
        builder.load(builder.gep(table.data, [builder.add(row, ir.Constant(ir.IntType(64), k))])) for k in range(3)
    )
    return builder.gep(memory.data, [builder.mul(first, ir.Constant(ir.IntType(64), LANES))]), rows, columns


def array_at(context: Any, builder: Any, kind: Any, data: Any, shape: list[Any]) -> Any:
    """An array in C order that begins there; it must not outlive the memory."""
    size = ir.Constant(ir.IntType(64), 8)
    strides = [size]
    for extent in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], extent))
    made = make_array(kind)(context, builder)
    packed = (cgutils.pack_array(builder, part) for part in (shape, strides))
    populate_array(made, data=data, shape=next(packed), strides=next(packed), itemsize=size, meminfo=None)
    return made._getvalue()


@extension
def matrix_of(typing_context: Any, scratch: Any, name: Any, k: Any) -> Any:
    """The k-th matrix of this name, (rows, columns, LANES)."""
    kind = types.Array(types.float64, 3, "C")

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        data, rows, columns = found(context, builder, sig.args[0], arguments[0], arguments[1])
        lanes = ir.Constant(ir.IntType(64), LANES)
        size = builder.mul(builder.mul(rows, columns), lanes)
        data = builder.gep(data, [builder.mul(arguments[2], size)])
        return array_at(context, builder, kind, data, [rows, columns, lanes])

    return kind(scratch, types.int64, types.int64), generate


@extension
def matrix(typing_context: Any, scratch: Any, name: Any) -> Any:
    """The only matrix of this name, (rows, columns, LANES)."""
    kind = types.Array(types.float64, 3, "C")

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        data, rows, columns = found(context, builder, sig.args[0], *arguments)
        return array_at(context, builder, kind, data, [rows, columns, ir.Constant(ir.IntType(64), LANES)])

    return kind(scratch, types.int64), generate


@extension
def flat_of(typing_context: Any, scratch: Any, name: Any, k: Any) -> Any:
    """The memory of the k-th matrix of this name in one row."""
    kind = types.Array(types.float64, 1, "C")

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        data, rows, columns = found(context, builder, sig.args[0], arguments[0], arguments[1])
        size = builder.mul(builder.mul(rows, columns), ir.Constant(ir.IntType(64), LANES))
        data = builder.gep(data, [builder.mul(arguments[2], size)])
        return array_at(context, builder, kind, data, [size])

    return kind(scratch, types.int64, types.int64), generate
