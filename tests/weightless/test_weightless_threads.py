"""Passes multiply matrices on one thread, so that bits do not depend on the number of threads."""

from collections import deque

import pytest
import torch
import transformers
from threadpoolctl import ThreadpoolController

import limitformer as lf
from limitformer.weightless.threads import one_thread


def threads():
    """Return the number of threads of torch and of each library of linear algebra."""
    return [
        torch.get_num_threads(),
        *(one["num_threads"] for one in ThreadpoolController().select(user_api="blas").info()),
    ]


@pytest.fixture
def several():
    """Set three threads for torch, NumPy and SciPy."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    with ThreadpoolController().limit(limits=3, user_api="blas"):
        yield
    torch.set_num_threads(before)


def test_one_thread_restores_the_number_of_threads(several):
    assert set(threads()) == {3}
    with one_thread():
        assert set(threads()) == {1}
        with one_thread():
            pass
        assert set(threads()) == {1}
    assert set(threads()) == {3}
    with pytest.raises(ZeroDivisionError), one_thread():
        raise ZeroDivisionError
    assert set(threads()) == {3}


def passes(threads):
    config = transformers.GPT2Config(n_embd=768, n_layer=2, n_head=12, vocab_size=200, bos_token_id=0, eos_token_id=0)
    torch.set_num_threads(threads)
    return lf.weightless.simulate(config, 128, samples=1, seed=3, gradients=True, progress=False)


def test_pass_has_the_same_bits_for_any_number_of_threads(several):
    """Gradients would differ in their last bits if two threads shared a product of matrices."""
    of_three, of_one = passes(3), passes(1)
    for name in ("covariance", "weight_gradient", "stream_gradient"):
        assert of_one[name].equals(of_three[name]), name


def test_check_measures_an_existing_network_with_one_thread(several):
    seen = deque()  # a list in a hook would be restored
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
    )
    model.transformer.h[0].register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    lf.check(model, tokens=4, samples=1, law=False, progress=False)
    assert set(seen) == {1}
