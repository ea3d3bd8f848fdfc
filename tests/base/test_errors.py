"""Errors that are pickled, and optional packages that are missing."""

import copy
import importlib
import pickle
import pkgutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import limitformer as lf
import limitformer_papers
from limitformer.base.errors import PicklesArguments
from limitformer.checking.steps import StepsInterrupted, StepsReport
from limitformer.rates.rate import RateInterrupted, RateReport
from limitformer.scaling.transfer import Transfer, TransferInterrupted
from limitformer.sweep import SweepInterrupted
from limitformer.weightless.lengths import RowsMeasured
from limitformer.weightless.observers.stream import UnclearBlocksError
from limitformer.weightless.run import DrawWholeError, KeepWeightsError
from limitformer_papers.training.interrupts import TrainingInterrupted

pytestmark = pytest.mark.fast

PART = xr.Dataset({"exit": ("sample", [1.0, 2.0])})
# Exceptions that are made of something else than a message, each with a part that has to arrive.
MADE = {
    lf.MissingExtraError: (lambda: lf.MissingExtraError("torch", "hf"), lambda error: (error.package, error.extra)),
    lf.Interrupted: (lambda: lf.Interrupted(PART), lambda error: error.partial.to_dict()),
    DrawWholeError: (lambda: DrawWholeError({"a.weight": "F uses it"}), lambda error: error.reasons),
    KeepWeightsError: (lambda: KeepWeightsError({"a.weight": "used twice"}), lambda error: error.reasons),
    StepsInterrupted: (
        lambda: StepsInterrupted(StepsReport("small", xr.Dataset({"loss": ("sample", [1.0])}), [])),
        lambda error: (error.report.name, error.partial.to_dict()),
    ),
    RateInterrupted: (
        lambda: RateInterrupted(RateReport("small", None, xr.Dataset({"critical": ("network", [1.0])}))),
        lambda error: (error.report.name, error.partial.to_dict()),
    ),
    SweepInterrupted: (lambda: SweepInterrupted(Path("a.zarr"), 1, 3), lambda error: error.resumes),
    RowsMeasured: (lambda: RowsMeasured({"seen": torch.ones(2)}), lambda error: error.values["seen"].tolist()),
    UnclearBlocksError: (lambda: UnclearBlocksError(measured=True), lambda error: error.measured),
    TransferInterrupted: (
        lambda: TransferInterrupted(Transfer("width", (1, 2), "mup", "sgd", {}, {"output": np.ones((3, 2))}, {})),
        lambda error: (error.result.rule, error.partial.to_dict()),
    ),
    TrainingInterrupted: (lambda: TrainingInterrupted(Path("run"), 2, 9), lambda error: error.resumes),
}  # fmt: skip
LEFT_OUT = "limitformer.__main__"  # importing it runs the command line


def exceptions():
    packages = (lf, limitformer_papers)
    names = {m.name for each in packages for m in pkgutil.walk_packages(each.__path__, f"{each.__name__}.")} - {
        LEFT_OUT
    }
    members = [value for name in names for value in vars(importlib.import_module(name)).values()]
    classes = {value for value in members if isinstance(value, type) and issubclass(value, BaseException)}
    ours = {kind for kind in classes if kind.__module__.startswith(("limitformer.", "limitformer_papers."))} - {
        PicklesArguments
    }
    return sorted(ours, key=lambda kind: kind.__qualname__)


def test_table_lists_every_exception_with_own_constructor_arguments():
    assert set(MADE) == {kind for kind in exceptions() if kind.__init__ not in plain_beginnings()}
    assert len(exceptions()) > 10


def plain_beginnings():
    """Return the constructors that take only a message."""
    return {kind.__init__ for kind in (BaseException, Exception, ValueError, OSError, UserWarning, KeyboardInterrupt)}


@pytest.mark.parametrize("through", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kind", exceptions(), ids=lambda kind: kind.__name__)
def test_exceptions_survive_pickle_and_copy(kind, through):
    """Message, notes and arguments survive."""
    make, part = MADE.get(kind, (lambda: kind("a message"), str))
    error = make()
    error.add_note("a note")
    copied = through(error)
    assert type(copied) is kind
    assert str(copied) == str(error)
    assert copied.__notes__ == ["a note"]
    assert part(copied) == part(error)


def test_exceptions_build_their_messages_from_their_arguments():
    messages = {kind: str(make()) for kind, (make, _) in MADE.items()}
    assert messages[lf.MissingExtraError] == "This needs torch, which is not installed: pip install 'limitformer[hf]'."
    assert messages[lf.Interrupted] == "interrupted after 2 samples"
    assert messages[SweepInterrupted] == "Interrupted with 1 of 3 cells done; start it again to go on: a.zarr"
    assert messages[TrainingInterrupted] == "Interrupted at step 2 of 9, which is saved; start it again to resume: run"


def test_package_lacks_nn_without_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "limitformer.nn", raising=False)
    monkeypatch.delitem(vars(lf), "nn", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert not hasattr(lf, "nn")
    with pytest.raises(AttributeError, match=r"^This needs torch, .*: pip install 'limitformer\[torch\]'\.$"):
        _ = lf.nn
    with pytest.raises(lf.MissingExtraError, match="This needs torch"):
        from limitformer import nn  # noqa: F401
