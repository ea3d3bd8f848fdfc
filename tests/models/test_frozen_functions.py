"""A part uses its function as that was when the part was made; the wrong twin reads the new values."""

import collections
import copy
import ctypes
import functools
import math
import pickle
from types import ModuleType

import numba
import numpy as np
import pytest
import torch

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.covariance.chain.own import elementwise_address, mixing_address
from limitformer.models.frozen import FROZEN, cells_of, freeze, function_of
from limitformer.nn.drawn.own import torch_elementwise, torch_mixing, torch_scale

K = 2.0
TABLE = np.array([1.0, 2.0])
NUMBERS = ModuleType("user_numbers")
NUMBERS.one, NUMBERS.two = 1.0, 2.0


def bent(x):
    return abs(x) + K * x


@numba.njit
def times_k(x):
    return K * x


@numba.njit(fastmath=True)
def bent_by_numba(x):
    return abs(x) + times_k(x)


NUMBERS.bent = bent_by_numba


def by_numba(x):
    return bent_by_numba(x)


def by_module(x):
    return NUMBERS.bent(x)


@numba.vectorize
def bent_vectorized(x):
    return abs(x) + times_k(x)


def by_vectorized(x):
    return float(bent_vectorized(x))


def by_cell():
    helper = bent_by_numba

    def function(x):
        return helper(x)

    return function


def by_closure():
    k = K

    def function(x):
        return abs(x) + k * x

    def change():
        nonlocal k
        k = K

    return function, change


def of_table(x):
    return abs(x) + TABLE[1] * x


@numba.njit
def of_one(x):
    return NUMBERS.one * abs(x)


def of_module(x):
    return of_one(x) + NUMBERS.two * x


@numba.njit
def endless(x):
    return times_k(x) + abs(x) if x < np.inf else endless(x)


def by_recursion(x):
    return endless(x)


def loop_of(part):
    """Return σ as kernels call it."""
    address = elementwise_address(function_of(part))
    loop = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_double), ctypes.c_int64, ctypes.c_double)(address)

    def at(x):
        value = ctypes.c_double(x)
        loop(ctypes.pointer(value), 1, 1.0)
        return value.value

    return at


def values_at_one(part):
    """Return the gain, and σ(1) of the copy in Python and of the chain."""
    return part.gain_at(8), part.function(1.0), loop_of(part)(1.0)


GLOBALS = {
    "global": bent,
    "compiled helper": by_numba,
    "module of helpers": by_module,
    "helper in a closure": by_cell(),
    "vectorized helper": by_vectorized,
    "helper that calls itself": by_recursion,
}


@pytest.mark.parametrize("function", GLOBALS.values(), ids=GLOBALS)
def test_part_ignores_later_changes_of_a_global(monkeypatch, function):
    """E (|g| + K g)² = 1 + K². Numba itself keeps K = 2 in a helper that was compiled before."""
    old = lf.Elementwise(function)
    assert function(1.0) == 3.0
    monkeypatch.setitem(globals(), "K", 5.0)
    new = lf.Elementwise(function)
    assert values_at_one(old) == (pytest.approx(1 / 5, rel=1e-9), 3.0, 3.0)
    assert values_at_one(new) == (pytest.approx(1 / 26, rel=1e-9), 6.0, 6.0)
    assert function_of(new) is function_of(lf.Elementwise(function))
    assert old != new


def test_part_ignores_later_changes_of_closures_arrays_and_modules(monkeypatch):
    function, change = by_closure()
    monkeypatch.setitem(globals(), "TABLE", TABLE.copy())
    parts = [lf.Elementwise(one) for one in (function, of_table, of_module)]
    monkeypatch.setitem(globals(), "K", 5.0)
    change()
    TABLE[1] = 5.0
    monkeypatch.setattr(NUMBERS, "two", 5.0)
    assert [part.function(1.0) for part in parts] == [loop_of(part)(1.0) for part in parts] == [3.0] * 3
    assert [lf.Elementwise(one).function(1.0) for one in (function, of_table, of_module)] == [6.0] * 3


def test_freeze_copies_containers():
    pair = ([2.0], {"k": 1.0})
    frozen = freeze(lambda x, pair=pair: pair[0][0] * x + pair[1]["k"])
    pair[0][0], pair[1]["k"] = 7.0, 7.0
    assert frozen(1.0) == 3.0


def test_freeze_copies_keyword_defaults():
    slopes = [2.0]

    def function(x, *, slopes=slopes):
        return slopes[0] * x

    frozen = freeze(function)
    slopes[0] = 7.0
    assert frozen(1.0) == 2.0
    assert freeze(function)(1.0) == 7.0


class Scale:
    """An object that is not copied."""

    def __init__(self, value):
        self.value = value

    def __call__(self, x):
        return self.value * x


class CompiledScale(Scale):
    """An object that looks like a function of another compiler."""

    py_func = staticmethod(bent)


@pytest.mark.parametrize("scale", [Scale, CompiledScale, lambda k: functools.lru_cache(lambda x: k * x)])
def test_freeze_distinguishes_objects_that_it_does_not_copy(scale):
    """Their texts, and so the digests, are equal."""
    by = scale(2.0)

    def function(x):
        return by(x)

    first = freeze(function)
    assert freeze(function) is first
    by = scale(7.0)
    second = freeze(function)
    assert (first(1.0), second(1.0)) == (2.0, 7.0)
    assert first.digest == second.digest


def test_function_that_changes_an_array_is_refused():
    def counts(x):
        TABLE[0] += 1.0
        return x

    with pytest.raises(InputError, match="raised ValueError: assignment destination is read-only"):
        lf.Elementwise(counts)


def test_chain_and_gain_use_the_same_function(monkeypatch):
    """E V stays 1 at γ = 1 with the gain of the compiled function; the twin has the gain for K = 2."""
    stale = lf.Elementwise(bent).gain_at(8)
    monkeypatch.setitem(globals(), "K", 5.0)

    def mean(**options):
        model = lf.Transformer(width=64, depth=1, gamma=1.0, feedforward=lf.Elementwise(bent, **options))
        v = lf.simulate(model, [[1.0]], samples=2000, seed=0, progress=False)["covariance"].values[:, 1, 0, 0]
        return v.mean(), v.std() / len(v) ** 0.5

    (right, error), (wrong, wide) = mean(), mean(gain=stale)
    assert abs(right - 1) < 4 * error
    assert abs(wrong - 1) > 10 * wide


def torch_bent(x):
    return abs(x) + K * x


def test_networks_ignore_later_changes_of_a_global(monkeypatch):
    """This holds for the function itself on tensors, and for `torch`."""
    rule = lf.Mixing(lambda logits, visible: K * visible / len(visible) * (logits * 0 + 1))
    norm = lf.RadialNorm(lambda square: K / square, placement="pre")
    parts = [lf.Elementwise(bent), lf.Elementwise(bent, torch=torch_bent), lf.Elementwise(lambda x: abs(x) + K * x)]
    monkeypatch.setitem(globals(), "K", 5.0)
    one = torch.tensor([1.0])
    assert [torch_elementwise(part)(one).item() for part in parts] == [3.0] * 3
    assert torch_scale(norm)(one).item() == 2.0
    assert torch_mixing(rule)(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)).item() == 2.0
    assert torch_elementwise(lf.Elementwise(bent, torch=torch_bent))(one).item() == 6.0
    assert mixing_address(function_of(rule))


def test_torch_function_named_by_path_is_compared_at_each_use(monkeypatch):
    part = lf.Elementwise(bent, torch=f"{__name__}:torch_bent")
    torch_elementwise(part)
    monkeypatch.setitem(globals(), "K", 5.0)
    with pytest.raises(InputError, match="is another function"):
        torch_elementwise(part)


def test_pickled_part_is_refused_where_its_function_reads_other_values(monkeypatch):
    """Another process reads its own values, which may differ."""
    part = lf.Elementwise(bent)
    assert pickle.loads(pickle.dumps(part)) == part
    sent = pickle.dumps(part)
    monkeypatch.setitem(globals(), "K", 3.0)
    assert copy.deepcopy(part) == part
    with pytest.raises(InputError, match=r":bent has other code, or reads other values, than when the part was made"):
        pickle.loads(sent)


def test_freeze_does_not_copy_functions_of_the_package():
    silu = function_of(lf.SiLU())
    assert silu.py_func is silu.original
    assert function_of(lf.SiLU()) is silu
    assert silu in FROZEN.values()


# --- far out --------------------------------------------------------------------------------------------------------


def clipped(x):
    return min(max(x, -20.0), 20.0)


def test_torch_functions_that_differ_only_far_out_are_refused():
    with pytest.raises(InputError, match=r"another function on tensors: -1000 instead of -20 at -1000\."):
        torch_elementwise(lf.Elementwise(clipped, torch=lambda x: x * 1.0))
    assert torch_elementwise(lf.Elementwise(clipped, torch=lambda x: x.clamp(-20, 20)))


# What is copied, and how.


def leaky(slope):
    @numba.njit
    def function(x):
        return max(x, slope * x)

    return function


@pytest.mark.filterwarnings("ignore:.*First-class function type")  # Numba calls tuples of functions experimental
def test_part_copies_functions_in_containers():
    helpers = (leaky(0.1),)

    def function(x):
        return helpers[0](x)

    part = lf.Elementwise(function)
    helpers = (leaky(0.5),)
    assert part.function(-1.0) == -0.1
    assert lf.Elementwise(function).function(-1.0) == -0.5


def test_part_copies_arrays_in_named_tuples():
    constants = collections.namedtuple("Constants", "slope")(np.array([0.1]))

    def function(x):
        return max(x, constants.slope[0] * x)

    part = lf.Elementwise(function)
    constants.slope[0] = 0.5
    assert part.function(-1.0) == part.function.compiled(-1.0) == -0.1


def test_part_freezes_a_function_that_wraps_one_of_a_library():
    scale = 1.0

    @functools.wraps(math.tanh)
    def function(x):
        return x + scale * math.tanh(x)

    part = lf.Elementwise(function)
    scale = 3.0
    assert part.function(1.0) == 1.0 + math.tanh(1.0) != 1.0 + scale * math.tanh(1.0)
    assert part.gain_at(8) == lf.Elementwise(lambda x: x + math.tanh(x)).gain_at(8)


def test_part_keeps_the_signature_of_a_helper():
    @numba.njit("float64(int64)")
    def whole(n):
        return 1.0 * n

    def function(x):
        return x + whole(x)

    part = lf.Elementwise(function)
    assert part.function(0.7) == part.function.compiled(0.7) == 0.7


def test_part_keeps_the_numba_options_of_a_helper():
    @numba.njit(error_model="numpy", fastmath=True)
    def inverse(x):
        return 1.0 / x

    @numba.njit(locals={"whole": numba.int64})
    def floor(x):
        whole = x
        return 1.0 * whole

    @numba.vectorize(nopython=True, fastmath=True)
    def twice(x):
        return 2.0 * x

    def function(x):
        return inverse(x) + floor(x) + float(twice(x))

    copies = cells_of(freeze(function).py_func)
    assert copies["inverse"](0.0) == np.inf  # Python's model raises ZeroDivisionError
    assert copies["inverse"].targetoptions["fastmath"] is True
    assert copies["floor"](2.7) == 2
    assert copies["twice"].targetoptions == twice.targetoptions
    assert copies["twice"] is not twice


def test_one_function_serves_as_activation_and_as_attention_rule():
    def function(x, visible=1.0):
        return x * visible

    model = lf.Transformer(
        width=8, depth=2, gamma=0.5, attention=lf.Mixing(function), feedforward=lf.Elementwise(function)
    )
    paths = lf.simulate(model, [[1.0, 0.2], [0.2, 1.0]], samples=16, seed=0, progress=False)
    assert bool((paths.exit_cause == 0).all())
