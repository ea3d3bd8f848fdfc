"""The same measures while a network trains: a look every so many steps, all in one dataset, each beside the last.

A look is one pass forward and backward on fixed tokens, without dropout. It touches no gradient, no weight and no
random number of the training, whose bits are the same with looks and without.
"""

from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xarray as xr
from torch import nn

from limitformer.base.errors import require_count
from limitformer.base.files import check_writable
from limitformer.checking.check import check
from limitformer.checking.report import Report
from limitformer.results.storage import save


class Looks:
    """Looks at a module that trains, for any loop: `with Looks(model, every=100) as looks:`, and `looks.step()` in it.

    Args:
        module: what trains.
        text: as of `check`: what it is looked at with.
        every: steps between two looks.
        out: a folder for looks.nc and the page of the last look beside the first; None writes nothing.
        options: further arguments of `check`, such as tokens or thresholds.

    Raises:
        InputError: an argument that cannot be used.
    """

    def __init__(
        self, module: nn.Module, text: Any = None, *, every: int = 100, out: str | Path | None = None, **options: Any
    ) -> None:
        self.module, self.text, self.every = module, text, require_count("every", every)
        self.out = None if out is None else Path(out)
        if self.out is not None:
            check_writable(self.out)
        self.options = {"progress": False, **options}
        self.reports: dict[int, Report] = {}
        self.steps = 0

    def __enter__(self) -> "Looks":
        """The first look, before any step; it alone has the law's band."""
        self.look(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A last look, unless the loop was broken off; what was seen is written in any case."""
        if kind is None:
            self.look(self.steps)
        self.write()

    def step(self) -> None:
        """One step of training is done."""
        self.steps += 1
        if self.steps % self.every == 0:
            self.look(self.steps)

    def look(self, step: int) -> None:
        """Measure the module as it is now; once a step is enough."""
        if step in self.reports:
            return
        first = next(iter(self.reports.values()), None)
        self.reports[step] = check(self.module, self.text, law=first is None, **self.options)

    @property
    def last(self) -> Report:
        """The last look, with the first one beside it."""
        first, last = next(iter(self.reports.values())), list(self.reports.values())[-1]
        beside = None if last is first else replace(first, name="first look")
        return replace(last, band=first.band, laws=first.laws, against=beside)

    def dataset(self) -> xr.Dataset:
        """Curves by step."""
        steps = xr.Variable("step_of_training", list(self.reports))
        return xr.concat([report.curves.isel(sample=0) for report in self.reports.values()], steps, join="outer")

    def changes(self) -> xr.Dataset:
        """Of each curve: the largest ratio to the look before, by step; correlations as differences."""
        data, by = self.dataset(), "step_of_training"
        found = {}
        for name, each in data.items():
            now = each.isel({by: slice(1, None)})
            before = each.isel({by: slice(None, -1)}).assign_coords({by: now[by]})
            ratio = xr.apply_ufunc(np.log, abs(now) / abs(before))
            change = abs(now - before if "correlation" in str(name) else ratio)
            found[name] = change.max([dim for dim in now.dims if dim != by])
        return xr.Dataset(found)

    def write(self) -> list[Path]:
        """Write looks.nc and the last look's files, if there is a folder; their paths."""
        if self.out is None or not self.reports:
            return []
        return [save(self.dataset(), self.out / "looks.nc"), *self.last.save(self.out)]
