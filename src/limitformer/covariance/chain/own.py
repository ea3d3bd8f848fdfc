r"""User functions in kernels, called by their addresses.

A user's scalar σ, or a rule that maps a matrix of logits, is compiled into a small C function. The kernels of the
chains call the function at the address in their constants, so they are compiled once, not once for each function. Any
number of threads may call such a function.

* σ:     values (count,), in place: x ← gain σ(x);
* rule:  logits (m, m, LANES) of eight replicas, in place: Y/τ to A, one replica after the other.
"""

from collections.abc import Callable
from threading import Lock
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from limitformer.models import Transformer
from limitformer.models.functions import FrozenFunction, is_user_part, refuse_uncompilable
from limitformer.numerics.lanes import LANES, require_matrix
from limitformer.sampling.exits import LEFT_BALL, NO_NUMBER
from limitformer.sampling.recording import Outputs

# Numba passes the typing context first, which its annotations leave out.
extension: Any = intrinsic
njit: Any = numba.njit
cfunc: Any = numba.cfunc

NOTHING = 0  # the address that stands for "no function"
MARGIN = 1 - 1e-6  # share of the radius, because a recorded V is rounded to float32
TAME = 1e10  # |V| from which no layer with finite outputs reaches infinity

NUMBER, WHOLE, MEMORY = ir.DoubleType(), ir.IntType(64), ir.IntType(8).as_pointer()
ELEMENTWISE = types.void(types.CPointer(types.float64), types.int64, types.float64)
MIXING = types.void(types.CPointer(types.float64), types.voidptr, types.int64, types.float64)

# A compiled function must live as long as a kernel may call it.
COMPILED: dict[tuple[FrozenFunction, Callable[[Any], Any]], Any] = {}
LOCK = Lock()


def elementwise_address(function: FrozenFunction) -> int:
    """Return the address of the compiled loop of σ.

    Raises:
        InputError: Numba cannot compile it.
    """
    return address_of(function, compiled_elementwise)


def mixing_address(function: FrozenFunction) -> int:
    """Return the address of the compiled rule; raises as above."""
    return address_of(function, compiled_mixing)


def address_of(function: FrozenFunction, compile_loop: Callable[[Any], Any]) -> int:
    with LOCK:
        if (function, compile_loop) not in COMPILED:
            with refuse_uncompilable(function):
                COMPILED[function, compile_loop] = compile_loop(function.compiled)
        return int(COMPILED[function, compile_loop].address)


def compiled_elementwise(scalar: Any) -> Any:
    """Return the loop of `ELEMENTWISE`. It writes NaN, which ends the path, where σ raises an exception."""

    @njit(error_model="numpy")
    def value(x, gain):
        y = np.nan
        try:
            y = gain * scalar(x)
        except Exception:  # noqa: BLE001  compiled code catches nothing else
            y = np.nan
        return y

    def loop(values, count, gain):
        row = carray(values, count)
        for k in range(count):
            row[k] = value(row[k], gain)

    return cfunc(ELEMENTWISE, error_model="numpy")(loop)


def compiled_mixing(rule: Any) -> Any:
    """Return the rule of `MIXING`. It writes NaN, which ends the path, if the rule raises or returns another shape."""

    def mix(matrix, visible, tokens, inverse_temperature):
        entries = carray(matrix, (tokens, tokens, LANES))
        mask = carray(visible, (tokens, tokens), np.bool_)
        for lane in range(LANES):
            logits, seen = np.empty((tokens, tokens)), np.empty((tokens, tokens), np.bool_)
            for i in range(tokens):
                for j in range(tokens):
                    logits[i, j], seen[i, j] = inverse_temperature * entries[i, j, lane], mask[i, j]
                    entries[i, j, lane] = np.nan
            try:
                a = rule(logits, seen)
                if a.shape[0] == tokens and a.shape[1] == tokens:
                    for i in range(tokens):
                        for j in range(tokens):
                            entries[i, j, lane] = a[i, j]
            except Exception:  # noqa: BLE001  compiled code catches nothing else
                pass

    return cfunc(MIXING, error_model="numpy")(mix)


def emit_call(builder: Any, address: Any, arguments: list[Any]) -> None:
    """Emit a call of the C function at an address."""
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(builder.inttoptr(address, kind.as_pointer()), arguments)


def require_contiguous(array: Any) -> None:
    """Raise `TypingError`, at compilation, unless the matrices are contiguous."""
    require_matrix(array)
    if array.layout != "C":
        raise TypingError(f"a user function needs an array in C order; got {array}.")


@extension
def call_elementwise(typing_context: Any, address: Any, array: Any, i: Any, first: Any, last: Any, gain: Any) -> Any:
    """Set array[i, first:last, :] to gain σ(array[i, first:last, :]), for σ at an address."""
    require_contiguous(array)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        address_value, whole, row, begin, end, factor = arguments
        entries = make_array(array)(context, builder, whole)
        zero = context.get_constant(types.intp, 0)
        pointer = cgutils.get_item_pointer(context, builder, array, entries, [row, begin, zero], wraparound=False)
        count = builder.mul(builder.sub(end, begin), ir.Constant(WHOLE, LANES))
        emit_call(builder, address_value, [pointer, count, factor])
        return context.get_dummy_value()

    return types.void(types.int64, array, types.int64, types.int64, types.int64, types.float64), generate


@extension
def call_mixing(typing_context: Any, address: Any, array: Any, visible: Any, inverse_temperature: Any) -> Any:
    """Turn logits Y (m, m, LANES) into A = rule(Y · inverse_temperature, visible), for the rule at an address."""
    require_contiguous(array)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        address_value, whole, seen, factor = arguments
        entries, mask = make_array(array)(context, builder, whole), make_array(visible)(context, builder, seen)
        tokens = builder.extract_value(entries.shape, 0)
        emit_call(builder, address_value, [entries.data, builder.bitcast(mask.data, MEMORY), tokens, factor])
        return context.get_dummy_value()

    return types.void(types.int64, array, visible, types.float64), generate


def mark_own_exits(model: Transformer, outputs: Outputs, last: float, radius: float) -> None:
    """Set the exit cause `NO_NUMBER` where a model with user functions turns a tame V into one that is not finite.

    Such a path keeps V before that layer, inside the ball of this radius; a path that left the ball keeps V outside.
    Paths that end after the `last` recorded layer are not distinguished.
    """
    record = outputs["covariance"] if outputs["covariance"].size else outputs["variance"]
    activation = getattr(model.feedforward, "activation", model.feedforward)
    own = any(is_user_part(part) for part in (model.attention, activation, model.norm))
    gain = 0.0 if model.feedforward is None else model.feedforward.gain_at(model.width)
    # Larger strengths and gains make V infinite by themselves.
    if not (own and max(gain, model.strengths.max()) < TAME and record.size):
        return
    end = np.abs(record[:, -1].reshape(len(record), -1).astype(np.float64))
    norm = np.sqrt((end**2).sum(-1)) if outputs["covariance"].size else end.sum(-1)  # |V| ≤ tr V
    tame = norm < min(TAME, MARGIN * radius)
    outputs["causes"][(outputs["causes"] == LEFT_BALL) & (outputs["exits"] <= last) & tame] = NO_NUMBER
