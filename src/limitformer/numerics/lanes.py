r"""Lanes: a vector type with which kernels run eight replicas at a time.

A matrix of a kernel is an array (rows, columns, LANES): entry (i, j) of eight replicas. `load` reads such an entry as
one value, `store` writes one, and +, −, ×, ÷ act on the eight replicas separately. The compiler keeps a value in one
vector register (or two, or four, depending on the machine), so a kernel that is written like a scalar one runs eight
replicas at about the cost of one, at every matrix size. The operators have the fastmath flags of the kernel that
contains them.

Replicas never mix: the result of a lane does not depend on its neighbours, so the bits of a result do not depend on
which replicas run together.
"""

import operator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model
from numba.np.arrayobj import make_array
from numpy.typing import NDArray

from limitformer.numerics.kernels import allocator, strict_kernel

LANES = 8
VECTOR = ir.VectorType(ir.DoubleType(), LANES)

# Numba passes the typing context first, which its annotations leave out.
extension: Any = intrinsic


class Lanes(types.Type):
    """The Numba type of a value of eight replicas."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


lanes = Lanes()


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    """The representation of `Lanes` in compiled code: <8 x double>."""

    def __init__(self, data_models: Any, numba_type: Any) -> None:
        super().__init__(data_models, numba_type, VECTOR)


def in_lanes(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `matrix` (rows, columns) in all lanes: (rows, columns, LANES)."""
    return np.repeat(matrix[:, :, np.newaxis], LANES, axis=2)


@allocator
def lane_matrix(rows, columns):
    """Return a matrix (rows, columns, LANES) of zeros, whose entries are aligned to their size in memory.

    Without alignment a load or store touches two lines of the cache, which halves the speed.
    """
    size = rows * columns * LANES
    padded = np.zeros(size + LANES)
    skip = (LANES - np.int64(padded.ctypes.data) // 8 % LANES) % LANES
    return padded[skip : skip + size].reshape((rows, columns, LANES))


def spread(builder: Any, number: Any) -> Any:
    """Return the vector whose lanes are all `number`."""
    first = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def as_vector(builder: Any, value: Any, numba_type: Any) -> Any:
    """Return a vector unchanged, or a number in all lanes."""
    return value if numba_type is lanes else spread(builder, value)


def define_operator(symbol: Any, instruction: str) -> None:
    """Let `symbol` act on two values of which at least one has lanes."""

    class Template(ConcreteTemplate):
        key = symbol
        cases = [  # noqa: RUF012
            signature(lanes, lanes, lanes),
            signature(lanes, lanes, types.float64),
            signature(lanes, types.float64, lanes),
        ]

    def lower(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        left, right = (as_vector(builder, *pair) for pair in zip(arguments, sig.args, strict=True))
        return getattr(builder, instruction)(left, right)

    infer_global(symbol)(Template)
    for pair in ((lanes, lanes), (lanes, types.float64), (types.float64, lanes)):
        lower_builtin(symbol, *pair)(lower)


for _symbol, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    define_operator(_symbol, _instruction)


def require_matrix(array: Any) -> None:
    """Raise `TypingError`, at compilation, unless `array` is an array (rows, columns, LANES) of doubles."""
    good = isinstance(array, types.Array) and array.ndim == 3 and array.dtype is types.float64
    if not good:
        raise TypingError(f"load and store need an array (rows, columns, {LANES}) of float64; got {array}.")


def entry_pointer(context: Any, builder: Any, array_type: Any, array: Any, indices: Any, index_types: Any) -> Any:
    """Return a pointer to the lanes of an entry."""
    whole = make_array(array_type)(context, builder, array)
    numbers = [context.cast(builder, i, t, types.intp) for i, t in zip(indices, index_types, strict=True)]
    zero = context.get_constant(types.intp, 0)
    pointer = cgutils.get_item_pointer(context, builder, array_type, whole, [*numbers, zero], wraparound=False)
    return builder.bitcast(pointer, VECTOR.as_pointer())


@extension
def load(typing_context: Any, array: Any, i: Any, j: Any) -> Any:
    """Return array[i, j, :] of an array (rows, columns, LANES)."""
    require_matrix(array)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        pointer = entry_pointer(context, builder, sig.args[0], arguments[0], arguments[1:], sig.args[1:])
        return builder.load(pointer, align=8)

    return lanes(array, i, j), generate


@extension
def store(typing_context: Any, array: Any, i: Any, j: Any, value: Any) -> Any:
    """array[i, j, :] = value: lanes, or a number for all of them."""
    require_matrix(array)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        pointer = entry_pointer(context, builder, sig.args[0], arguments[0], arguments[1:3], sig.args[1:3])
        builder.store(as_vector(builder, arguments[3], sig.args[3]), pointer, align=8)
        return context.get_dummy_value()

    value_type = lanes if value is lanes else types.float64
    return types.void(array, i, j, value_type), generate


@extension
def everywhere(typing_context: Any, number: Any) -> Any:
    """Return `number` in all lanes."""

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        return spread(builder, arguments[0])

    return lanes(types.float64), generate


@strict_kernel
def product(left, right):
    """Return left × right without reassociation.

    With `*` the compiler may turn (x a) a into x a², depending on the processor; use this where a² could overflow.
    """
    return left * right


def unary(name: str, documentation: str) -> Any:
    """Return an LLVM intrinsic that acts lane by lane."""

    def function(typing_context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
            kind = ir.FunctionType(VECTOR, [VECTOR])
            callee = cgutils.get_or_insert_function(builder.module, kind, f"{name}.v{LANES}f64")
            return builder.call(callee, arguments)

        return lanes(lanes), generate

    function.__doc__ = documentation
    return extension(function)


square_root = unary("llvm.sqrt", "Return the square root, lane by lane.")
magnitude = unary("llvm.fabs", "Return the absolute value, lane by lane.")


def choice(comparison: str, documentation: str) -> Any:
    """Return an intrinsic for the left value where `left comparison right` holds, and the right one elsewhere."""

    def function(typing_context: Any, left: Any, right: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
            if lanes in sig.args:
                arguments = [as_vector(builder, *pair) for pair in zip(arguments, sig.args, strict=True)]
            return builder.select(builder.fcmp_ordered(comparison, *arguments), *arguments)

        value_types = [lanes if value is lanes else types.float64 for value in (left, right)]
        return (lanes if lanes in value_types else types.float64)(*value_types), generate

    function.__doc__ = documentation
    return extension(function)


larger = choice(">", "Return the larger of two values, lane by lane if they have lanes; with NaN, the second.")
smaller = choice("<", "Return the smaller of two values, lane by lane if they have lanes; with NaN, the second.")


@extension
def where_positive(typing_context: Any, condition: Any, value: Any) -> Any:
    """Return `value` in the lanes where `condition` > 0, and 0 in the others."""

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        zero = ir.Constant(VECTOR, [0.0] * LANES)
        return builder.select(builder.fcmp_ordered(">", arguments[0], zero), arguments[1], zero)

    return lanes(lanes, lanes), generate


@extension
def choose(typing_context: Any, condition: Any, left: Any, right: Any) -> Any:
    """Return `left` in the lanes where `condition` > 0, and `right` in the others."""

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        zero = ir.Constant(VECTOR, [0.0] * LANES)
        return builder.select(builder.fcmp_ordered(">", arguments[0], zero), arguments[1], arguments[2])

    return lanes(lanes, lanes, lanes), generate


@extension
def all_below(typing_context: Any, value: Any, bound: Any) -> Any:
    """Return whether every lane is below the number `bound`; NaN is not."""

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        below = builder.fcmp_ordered("<", arguments[0], spread(builder, arguments[1]))
        bits = builder.bitcast(below, ir.IntType(LANES))
        return builder.icmp_unsigned("==", bits, ir.Constant(ir.IntType(LANES), 2**LANES - 1))

    return types.boolean(lanes, types.float64), generate
