"""Measure a network while it trains: a look every few steps, all in one dataset.

A look is one pass forward and backward on fixed tokens, without dropout. It changes no gradient, no weight and no
random number of the training: its bits are the same with and without looks.
"""

from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xarray as xr
from torch import nn

from limitformer.base.errors import require, require_count
from limitformer.base.files import check_writable
from limitformer.checking.check import check
from limitformer.checking.metrics import Log, scalars
from limitformer.checking.report import Report
from limitformer.results.storage import save


class Looks:
    """Look at a module while it trains, in any loop: `with Looks(model, every=100) as looks:`, then `looks.step()`.

    Args:
        module: the module that trains.
        text: the tokens to look with, as in `check`.
        every: steps between two looks.
        out: a folder for looks.nc and the page of the last look next to the first; None writes nothing.
        log: a function of scalars by name and the step, which sends them to a monitor: `to_wandb()`,
            `to_tensorboard(writer)`, or your own. The first look also has the interval of new networks.
        options: further arguments of `check`, such as tokens or thresholds.

    Raises:
        InputError: an argument cannot be used.
    """

    def __init__(
        self,
        module: nn.Module,
        text: Any = None,
        *,
        every: int = 100,
        out: str | Path | None = None,
        log: Log | None = None,
        **options: Any,
    ) -> None:
        require(log is None or callable(log), f"log must be a function of scalars and the step; got {log!r}.")
        self.log = log
        self.module, self.text, self.every = module, text, require_count("every", every)
        self.out = None if out is None else Path(out)
        if self.out is not None:
            check_writable(self.out)
        self.options = {"progress": False, **options}
        require("law" not in options, "Looks has no option law: the first look has the law's band.")
        self.reports: dict[int, Report] = {}
        self.steps = 0

    def __enter__(self) -> "Looks":
        """Take the first look, before any step; only this one has the law's band."""
        self.look(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take a last look, unless the loop raised an exception, and write all looks in any case."""
        if kind is None:
            self.look(self.steps)
        self.write()

    def step(self) -> None:
        """Count one step of training, and look if it is due."""
        self.steps += 1
        if self.steps % self.every == 0:
            self.look(self.steps)

    def look(self, step: int) -> None:
        """Measure the module as it is now, at most once a step."""
        if step in self.reports:
            return
        first = next(iter(self.reports.values()), None)
        self.reports[step] = report = check(self.module, self.text, law=first is None, **self.options)
        if self.log is not None:
            metrics = report.metrics()
            self.log(scalars(metrics, metrics if first is None else None), step)

    @property
    def last(self) -> Report:
        """The last look, with the first one next to it."""
        require(bool(self.reports), "There is no look yet. Nearest: look(0).")
        first, last = next(iter(self.reports.values())), list(self.reports.values())[-1]
        against = None if last is first else replace(first, name="first look")
        return replace(last, band=first.band, laws=first.laws, against=against)

    def dataset(self) -> xr.Dataset:
        """Return the curves of all looks, along `step_of_training`."""
        require(bool(self.reports), "There is no look yet. Nearest: look(0).")
        steps = xr.Variable("step_of_training", list(self.reports))
        return xr.concat([report.curves.isel(sample=0) for report in self.reports.values()], steps, join="outer")

    def changes(self) -> xr.Dataset:
        """Return each curve's largest change since the look before: a log ratio, or a difference of correlations."""
        data, by = self.dataset(), "step_of_training"
        result = {}
        for name, each in data.items():
            now = each.isel({by: slice(1, None)})
            before = each.isel({by: slice(None, -1)}).assign_coords({by: now[by]})
            ratio = xr.apply_ufunc(np.log, abs(now) / abs(before))
            change = abs(now - before if "correlation" in str(name) else ratio)
            result[name] = change.max([dim for dim in now.dims if dim != by])
        return xr.Dataset(result)

    def write(self) -> list[Path]:
        """Write looks.nc and the last look's files, if there is a folder; return their paths."""
        if self.out is None or not self.reports:
            return []
        return [save(self.dataset(), self.out / "looks.nc"), *self.last.save(self.out)]
