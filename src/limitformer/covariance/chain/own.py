r"""Functions of one's own in kernels, called by their addresses.

A user's scalar σ, or a rule that makes a matrix of logits, is compiled once into a small C function, and the kernels of
the chains call whatever lies at the address that their constants have: so they are compiled once, not once for each
function. The functions are pure and hold no lock of Python: any number of threads may call them.

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
from limitformer.models.compiled import refuse_uncompilable
from limitformer.models.frozen import FrozenFunction, is_user_part
from limitformer.numerics.lanes import LANES, require_matrix
from limitformer.paths.exits import LEFT_BALL, NO_NUMBER
from limitformer.paths.recording import Outputs

# Numba passes the typing context first, which its annotations leave out.
extension: Any = intrinsic
njit: Any = numba.njit
cfunc: Any = numba.cfunc

NOTHING = 0  # the address of no function
TAME = 1e10  # |V|: no layer that gives numbers takes it beyond all bounds from there

NUMBER, WHOLE, MEMORY = ir.DoubleType(), ir.IntType(64), ir.IntType(8).as_pointer()
ELEMENTWISE = types.void(types.CPointer(types.float64), types.int64, types.float64)
MIXING = types.void(types.CPointer(types.float64), types.voidptr, types.int64, types.float64)

# A compiled function must live as long as a kernel may call it.
COMPILED: dict[FrozenFunction, Any] = {}
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
        if function not in COMPILED:
            with refuse_uncompilable(function):
                COMPILED[function] = compile_loop(function.compiled)
        return int(COMPILED[function].address)


def compiled_elementwise(scalar: Any) -> Any:
    """The loop of `ELEMENTWISE`; a number for which σ raises something becomes NaN, which stops its own path."""

    @njit(error_model="numpy")
    def value(x, gain):
        y = np.nan
        try:
            y = gain * scalar(x)
        except Exception:  # noqa: BLE001  compiled: there is no other
            y = np.nan
        return y

    def loop(values, count, gain):
        row = carray(values, count)
        for k in range(count):
            row[k] = value(row[k], gain)

    return cfunc(ELEMENTWISE, error_model="numpy")(loop)


def compiled_mixing(rule: Any) -> Any:
    """The rule of `MIXING`; a matrix of another shape, or none, becomes NaN, which stops a path."""

    def mix(matrix, visible, tokens, inverse_temperature):
        entries = carray(matrix, (tokens, tokens, LANES))
        shown = carray(visible, (tokens, tokens), np.bool_)
        for lane in range(LANES):
            logits, seen = np.empty((tokens, tokens)), np.empty((tokens, tokens), np.bool_)
            for i in range(tokens):
                for j in range(tokens):
                    logits[i, j], seen[i, j] = inverse_temperature * entries[i, j, lane], shown[i, j]
                    entries[i, j, lane] = np.nan
            try:
                a = rule(logits, seen)
                if a.shape[0] == tokens and a.shape[1] == tokens:
                    for i in range(tokens):
                        for j in range(tokens):
                            entries[i, j, lane] = a[i, j]
            except Exception:  # noqa: BLE001  compiled: there is no other
                pass

    return cfunc(MIXING, error_model="numpy")(mix)


def called(builder: Any, address: Any, arguments: list[Any]) -> None:
    """Call the C function at an address."""
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(builder.inttoptr(address, kind.as_pointer()), arguments)


def require_contiguous(array: Any) -> None:
    """Refuse, when a kernel is compiled, matrices whose memory is not in one row."""
    require_matrix(array)
    if array.layout != "C":
        raise TypingError(f"a function of one's own needs an array in C order; got {array}.")


@extension
def call_elementwise(typing_context: Any, address: Any, array: Any, i: Any, first: Any, last: Any, gain: Any) -> Any:
    """array[i, first:last, :] = gain σ(…), for σ at that address."""
    require_contiguous(array)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        where, whole, row, begin, end, factor = arguments
        entries = make_array(array)(context, builder, whole)
        zero = context.get_constant(types.intp, 0)
        pointer = cgutils.get_item_pointer(context, builder, array, entries, [row, begin, zero], wraparound=False)
        count = builder.mul(builder.sub(end, begin), ir.Constant(WHOLE, LANES))
        called(builder, where, [pointer, count, factor])
        return context.get_dummy_value()

    return types.void(types.int64, array, types.int64, types.int64, types.int64, types.float64), generate


@extension
def call_mixing(typing_context: Any, address: Any, array: Any, visible: Any, inverse_temperature: Any) -> Any:
    """array (m, m, LANES) of logits Y to A = rule(Y · inverse_temperature, visible), for the rule at that address."""
    require_contiguous(array)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        where, whole, seen, factor = arguments
        entries, mask = make_array(array)(context, builder, whole), make_array(visible)(context, builder, seen)
        tokens = builder.extract_value(entries.shape, 0)
        called(builder, where, [entries.data, builder.bitcast(mask.data, MEMORY), tokens, factor])
        return context.get_dummy_value()

    return types.void(types.int64, array, visible, types.float64), generate


def mark_own_exits(model: Transformer, outputs: Outputs, last: float) -> None:
    """Give paths that one layer took from a tame V to no finite one `NO_NUMBER` as their cause, where a part is own.

    Such a path keeps V before that layer. Paths that left behind the `last` recorded layer are not told apart.
    """
    kept = outputs["covariance"] if outputs["covariance"].size else outputs["variance"]
    if not (has_own_parts(model) and is_ordinary(model) and kept.size):
        return
    largest = np.abs(kept[:, -1].reshape(len(kept), -1)).max(-1)
    outputs["causes"][(outputs["causes"] == LEFT_BALL) & (outputs["exits"] <= last) & (largest < TAME)] = NO_NUMBER


def has_own_parts(model: Transformer) -> bool:
    """Whether a function of somebody's is in it."""
    activation = getattr(model.feedforward, "activation", model.feedforward)
    return any(is_user_part(part) for part in (model.attention, activation, model.norm))


def is_ordinary(model: Transformer) -> bool:
    """Whether neither strengths nor gain alone take V beyond all bounds."""
    gain = 0.0 if model.feedforward is None else model.feedforward.gain_at(model.width)
    return bool(max(gain, model.strengths.max()) < TAME)
