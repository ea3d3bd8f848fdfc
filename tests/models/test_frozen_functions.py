"""A part uses its function as that was when the part was made; the wrong twin reads the new values."""

import copy
import ctypes
import pickle

import numba
import numpy as np
import pytest
import torch

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.covariance.chain.own import elementwise_address, mixing_address
from limitformer.models.functions import freeze, function_of
from limitformer.nn.drawn.own import torch_elementwise, torch_mixing, torch_scale

K = 2.0
TABLE = np.array([1.0, 2.0])


def bent(x):
    return abs(x) + K * x


def of_table(x):
    return abs(x) + TABLE[1] * x


@numba.njit
def times_k(x):
    return K * x


def by_helper(x):
    return abs(x) + times_k(x)


def by_closure():
    k = K

    def function(x):
        return abs(x) + k * x

    def change():
        nonlocal k
        k = 5.0

    return function, change


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


@pytest.mark.parametrize("read", ["global", "closure", "array"])
def test_part_ignores_later_changes_of_globals_closures_and_arrays(monkeypatch, read):
    """E (|g| + K g)² = 1 + K²."""
    of_closure, change = by_closure()
    monkeypatch.setitem(globals(), "TABLE", TABLE.copy())
    function = {"global": bent, "closure": of_closure, "array": of_table}[read]
    old = lf.Elementwise(function)
    monkeypatch.setitem(globals(), "K", 5.0)
    change()
    TABLE[1] = 5.0
    new = lf.Elementwise(function)
    assert values_at_one(old) == (pytest.approx(1 / 5, rel=1e-9), 3.0, 3.0)
    assert values_at_one(new) == (pytest.approx(1 / 26, rel=1e-9), 6.0, 6.0)
    assert function_of(new) is function_of(lf.Elementwise(function))
    assert old != new


def test_gain_and_chain_read_a_compiled_helper_alike(monkeypatch):
    """Numba keeps K in a helper that was compiled before; a helper of the same name is another one."""
    old = lf.Elementwise(by_helper)
    monkeypatch.setitem(globals(), "K", 5.0)
    assert values_at_one(lf.Elementwise(by_helper)) == (pytest.approx(1 / 5, rel=1e-9), 3.0, 3.0)
    monkeypatch.setitem(globals(), "times_k", numba.njit(times_k.py_func))
    new = lf.Elementwise(by_helper)
    assert values_at_one(new) == (pytest.approx(1 / 26, rel=1e-9), 6.0, 6.0)
    assert old.function.digest == new.function.digest


def reads_builtins(x):
    """Read what C code reads that imports a module while the function runs."""
    return x if globals()["__builtins__"] else 0.0


def test_copy_has_builtins_among_its_globals():
    assert freeze(reads_builtins)(2.0) == 2.0


def test_digests_differ_where_a_set_in_the_code_does():
    first, second, third = (lambda x: x in {1, 2}), (lambda x: x in {1, 3}), (lambda x: x in {2, 1})
    assert freeze(first).digest == freeze(third).digest != freeze(second).digest


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


def clipped(x):
    return min(max(x, -20.0), 20.0)


def test_torch_functions_that_differ_only_far_out_are_refused():
    with pytest.raises(InputError, match=r"another function on tensors: -1000 instead of -20 at -1000\."):
        torch_elementwise(lf.Elementwise(clipped, torch=lambda x: x * 1.0))
    assert torch_elementwise(lf.Elementwise(clipped, torch=lambda x: x.clamp(-20, 20)))
