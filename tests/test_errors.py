"""Errors between processes, and optional packages that are not there."""

import pickle
import sys

import pytest

import limitformer as lf


def test_a_missing_extra_goes_through_a_pickle():
    error = pickle.loads(pickle.dumps(lf.MissingExtraError("torch", "torch")))
    assert type(error) is lf.MissingExtraError
    assert str(error) == "This needs torch, which is not installed: pip install 'limitformer[torch]'."


def test_without_torch_the_package_has_no_nn(monkeypatch):
    monkeypatch.delitem(sys.modules, "limitformer.nn", raising=False)
    monkeypatch.delitem(vars(lf), "nn", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert not hasattr(lf, "nn")
    with pytest.raises(AttributeError, match=r"^This needs torch, .*: pip install 'limitformer\[torch\]'\.$"):
        _ = lf.nn
    with pytest.raises(lf.MissingExtraError, match="This needs torch"):
        from limitformer import nn  # noqa: F401
