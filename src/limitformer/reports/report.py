"""The result of every command: one object whose text, page, table, picture and data say the same, with one `save`."""

import csv
import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xarray as xr

from limitformer.base.errors import require
from limitformer.base.files import local_path, write_texts, write_whole
from limitformer.reports.page import Page, html_of
from limitformer.results.storage import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class AnyReport(ABC):
    """The result of a command. A subclass has `record`, `dataset`, and what it needs of `contents`, `csv` and `draw`.

    Attributes:
        FILES: the name of its files, without their endings.
    """

    FILES: ClassVar[str]

    def text(self, full: bool = True) -> str:
        """Return the report as `print` shows it; without `full` its answer and the numbers that decide it."""
        return str(self)

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Return the report as JSON holds it."""

    @abstractmethod
    def dataset(self) -> xr.Dataset:
        """Return what was measured, as NetCDF holds it."""

    def contents(self) -> Page | None:
        """Return what the page shows; None: there is no page."""
        return None

    def page(self) -> str:
        """Return the report as one HTML page that needs no other file; empty: it has none."""
        contents = self.contents()
        return "" if contents is None else html_of(contents)

    def csv(self) -> str:
        """Return the table as comma-separated values; empty: it has none."""
        return ""

    def draw(self) -> "Figure | None":
        """Return the picture; None: it has none."""
        return None

    def datasets(self) -> dict[str, xr.Dataset]:
        """Return the datasets by the name of their file, without its ending."""
        return {self.FILES: self.dataset()}

    def save(self, folder: str | Path) -> list[Path]:
        """Write page (.html), picture (.png), table (.csv), JSON and data (.nc), those that there are; return paths.

        Each file is written whole or not at all.

        Raises:
            InputError: the folder cannot be written.
        """
        require(str(folder) != "", "the folder must have a name; got an empty one. Nearest: '.' for this one.")
        place, texts = local_path(folder), {".html": self.page(), ".csv": self.csv(), ".json": self.record()}
        written = write_texts(place, {f"{self.FILES}{ending}": each for ending, each in texts.items() if each})
        if type(self).draw is not AnyReport.draw:
            from limitformer.plot import style  # with Matplotlib, which other reports do not need

            with style():
                figure = self.draw()
                if figure is not None:
                    write_whole(place / f"{self.FILES}.png", figure.savefig)
                    written.append(place / f"{self.FILES}.png")
        return [*written, *(save(data, place / f"{name}.nc") for name, data in self.datasets().items())]

    def _repr_html_(self) -> str | None:
        """Return the page in a frame, for notebooks."""
        page = self.page()
        return f'<iframe srcdoc="{escape(page)}" width="100%" height="900" style="border:0"></iframe>' if page else None


def csv_of(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as comma-separated values; a number that is not finite is written as nan or inf."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def finite_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers and texts as JSON and NetCDF hold them, without None and numbers that are not finite."""
    native = {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}
    infinite = {name for name, value in native.items() if isinstance(value, float) and not np.isfinite(value)}
    return {name: value for name, value in native.items() if name not in infinite and value is not None}
