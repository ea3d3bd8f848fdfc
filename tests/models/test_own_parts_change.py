"""Functions of one's own that read what changes: one model or a refusal; the wrong twin is the stale one."""

import ctypes
import pickle
from types import ModuleType

import numba
import numpy as np
import pytest
import torch

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.covariance.chain.own import elementwise_address
from limitformer.models.own_function import function_of
from limitformer.models.readings import reading_of
from limitformer.nn.drawn.own import torch_elementwise

K = 2.0
TABLE = np.array([1.0, 2.0])
NUMBERS = ModuleType("numbers_of_ones_own")
NUMBERS.one, NUMBERS.two = 1.0, 2.0


def bent(x):
    return abs(x) + K * x


def half(x):
    return 0.5 * x


def by_helper(x):
    return half(x) + bent(x)


def of_table(x):
    return TABLE[1] * x


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


def endless(x):
    return times_k(x) if x < np.inf else endless(x)


def of_first(x):
    return NUMBERS.one * x


def of_both(x):
    return of_first(x) + NUMBERS.two * abs(x)


def in_closure(k):
    def function(x):
        return k * x + abs(x)

    def change(value):
        nonlocal k
        k = value

    return function, change


def test_a_changed_number_is_refused_and_a_part_made_again_is_right(monkeypatch):
    old = lf.Elementwise(bent)
    assert old.gain_at(8) == pytest.approx(1 / 5, rel=1e-9)
    address, tensors = elementwise_address(function_of(old)), torch_elementwise(old)
    monkeypatch.setitem(globals(), "K", 5.0)
    message = r":bent reads K, which was 2\.0 when the part was made and is 5\.0 now\. Nearest: make the part again\.$"
    for use in (old.gain_at, lambda _: elementwise_address(function_of(old)), lambda _: torch_elementwise(old)):
        with pytest.raises(InputError, match=message):
            use(8)
    new = lf.Elementwise(bent)
    assert new.gain_at(8) == pytest.approx(1 / 26, rel=1e-9)
    assert elementwise_address(function_of(new)) != address
    torch.testing.assert_close(torch_elementwise(new)(torch.tensor([1.0])), torch.tensor([6.0]))
    monkeypatch.setitem(globals(), "K", 2.0)
    assert elementwise_address(function_of(old)) == address
    assert torch_elementwise(old) is tensors
    assert repr(old)  # by name, whatever it reads


def test_chain_and_gain_are_of_one_number(monkeypatch):
    """E V stays 1 at γ = 1 if the gain is of the compiled function; the twin has the gain of K = 2."""
    lf.Transformer(width=64, depth=1, gamma=1.0, feedforward=lf.Elementwise(bent))
    stale = lf.Elementwise(bent).gain_at(8)
    monkeypatch.setitem(globals(), "K", 5.0)

    def mean(**options):
        model = lf.Transformer(width=64, depth=1, gamma=1.0, feedforward=lf.Elementwise(bent, **options))
        v = lf.simulate(model, [[1.0]], samples=2000, seed=0, progress=False)["covariance"].values[:, 1, 0, 0]
        return v.mean(), v.std() / len(v) ** 0.5

    (right, error), (wrong, wide) = mean(), mean(gain=stale)
    assert abs(right - 1) < 4 * error
    assert abs(wrong - 1) > 10 * wide


def test_closures_arrays_helpers_and_codes_are_read(monkeypatch):
    function, change = in_closure(1.0)
    part = lf.Elementwise(function)
    change(3.0)
    with pytest.raises(InputError, match=r"reads k, which was 1\.0 .* is 3\.0 now"):
        part.gain_at(8)
    array, helped = lf.Elementwise(of_table), lf.Elementwise(by_helper)
    monkeypatch.setitem(globals(), "TABLE", np.array([1.0, 3.0]))
    monkeypatch.setitem(globals(), "half", lambda x: 0.25 * x)
    for one, name in ((array, "TABLE"), (helped, r"half\(\)")):
        with pytest.raises(InputError, match=f"reads {name}, which was "):
            one.gain_at(8)
    monkeypatch.undo()
    monkeypatch.setitem(globals(), "K", 3.0)
    with pytest.raises(InputError, match=r"reads bent\.K, which was 2\.0"):
        helped.gain_at(8)


def in_cell():
    helper = bent_by_numba

    def function(x):
        return helper(x)

    return function


def loop_of(part):
    """σ as kernels have it."""
    address = elementwise_address(function_of(part))
    loop = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_double), ctypes.c_int64, ctypes.c_double)(address)

    def at(x):
        value = ctypes.c_double(x)
        loop(ctypes.pointer(value), 1, 1.0)
        return value.value

    return at


WAYS = {
    "global": lambda: by_numba,
    "module": lambda: by_module,
    "closure": in_cell,
    "vectorized": lambda: by_vectorized,
}


@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)
def test_helpers_that_numba_has_compiled_are_made_again(monkeypatch, make):
    """The wrong twin is what Numba has kept."""
    function = make()
    old = lf.Elementwise(function)
    assert function(1.0) == 3.0
    monkeypatch.setitem(globals(), "K", 5.0)
    assert function(1.0) == 3.0
    with pytest.raises(InputError, match=r"times_k\.K, which was 2\.0"):
        old.gain_at(8)
    new = lf.Elementwise(function)
    assert new.gain_at(8) == pytest.approx(1 / 26, rel=1e-9)
    assert loop_of(new)(1.0) == 6.0
    assert function_of(new) is function_of(lf.Elementwise(function))
    assert function_of(new).__globals__["K"] == 5.0


def test_a_function_that_calls_itself_is_made_again_once():
    assert function_of(lf.Elementwise(endless))(3.0) == 6.0


@pytest.mark.parametrize("name", ["one", "two"])
def test_every_name_of_a_module_is_read(monkeypatch, name):
    part = lf.Elementwise(of_both)
    monkeypatch.setattr(NUMBERS, name, 3.0)
    with pytest.raises(InputError, match=rf"reads \S*NUMBERS\.{name}, which was "):
        part.gain_at(8)


def test_rules_and_norms_are_compared_too(monkeypatch):
    rule = lf.Mixing(lambda logits, visible: K * visible / len(visible))
    norm = lf.RadialNorm(lambda square: K / square, placement="pre")
    monkeypatch.setitem(globals(), "K", 3.0)
    for use in (lambda: function_of(rule), lambda: function_of(norm)):
        with pytest.raises(InputError, match="reads K"):
            use()


def test_what_is_read_travels_between_processes(monkeypatch):
    part = pickle.loads(pickle.dumps(lf.Elementwise(bent)))
    assert function_of(part) is bent
    monkeypatch.setitem(globals(), "K", 3.0)
    with pytest.raises(InputError, match="reads K"):
        pickle.loads(pickle.dumps(part)).gain_at(8)


def torch_bent(x):
    return abs(x) + K * x


def test_the_function_on_tensors_is_compared_again(monkeypatch):
    part = lf.Elementwise(lambda x: abs(x) + 2.0 * x, torch=torch_bent)
    torch_elementwise(part)
    monkeypatch.setitem(globals(), "K", 3.0)
    with pytest.raises(InputError, match="is another function"):
        torch_elementwise(part)


def test_functions_of_the_package_read_nothing_that_changes():
    assert [name for name, _ in reading_of(function_of(lf.SiLU()))] == ["()", "exp"]


# --- far out --------------------------------------------------------------------------------------------------------


def clipped(x):
    return min(max(x, -20.0), 20.0)


def test_functions_that_differ_far_out_alone_are_found():
    with pytest.raises(InputError, match=r"another function on tensors: -1000 in the place of -20 at -1000\."):
        torch_elementwise(lf.Elementwise(clipped, torch=lambda x: x * 1.0))
    assert torch_elementwise(lf.Elementwise(clipped, torch=lambda x: x.clamp(-20, 20)))
