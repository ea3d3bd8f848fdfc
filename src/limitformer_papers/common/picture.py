"""How a figure is drawn into a file: the format, the width in print, letters of panels, and the typeface."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from limitformer.base.errors import nearest, require
from limitformer.plot import SMALL, STYLE, WIDTH, style

FORMATS = ("png", "pdf", "svg", "pgf")
NARROWEST, WIDEST = 2.0, 40.0  # inches
NARROWEST_PANEL = 2.6  # inches, of panels side by side; legends and labels cover each other in narrower ones
PRINT = 600  # dots per inch of a picture whose width is given
LEAST_POINTS = 6.5  # of numbers at axes, however narrow the figure is
TEX = ("xelatex", "lualatex", "pdflatex")  # that matplotlib can use for PGF


@dataclass(frozen=True)
class Picture:
    """A format of `FORMATS`, a width in inches (None: as on the site), bold letters of panels, and a serif typeface.

    A narrower picture has smaller type in proportion, but never smaller than `LEAST_POINTS`. Panels side by side have
    at least `NARROWEST_PANEL` inches each.

    Raises:
        InputError: an unknown format, a width out of range, or PGF without TeX.
    """

    format: str = "png"
    width: float | None = None
    letters: bool = False
    serif: bool = False

    def __post_init__(self) -> None:
        known = ", ".join(FORMATS)
        require(
            self.format in FORMATS,
            f"format must be one of {known}; got {self.format!r}.{nearest(self.format, FORMATS)}",
        )
        width = self.width
        fits = width is None or (isfinite(width) and NARROWEST <= width <= WIDEST)
        require(fits, f"width must be {NARROWEST:g} to {WIDEST:g} inches; got {width}.")
        lacks = self.format == "pgf" and self.tex() is None
        require(not lacks, f"PGF needs TeX: none of {', '.join(TEX)} is installed. Nearest: format pdf.")

    @staticmethod
    def tex() -> str | None:
        """Return the TeX that sets PGF, or None."""
        return next(filter(shutil.which, TEX), None)

    @contextmanager
    def look(self) -> Iterator[None]:
        """Apply the house style with this width and typeface."""
        size = 1.0 if self.width is None else max(self.width / WIDTH, LEAST_POINTS / SMALL)
        changes = {
            name: value * size
            for name, value in STYLE.items()
            if size < 1.0 and (name.endswith(("size", "fontsize")) or name == "lines.linewidth")
        }
        changes |= {"font.family": "STIXGeneral", "mathtext.fontset": "stix"} if self.serif else {}
        changes |= {"pdf.fonttype": 42, "pgf.texsystem": self.tex() or TEX[0]}  # journals refuse fonts of type 3
        with style(), mpl.rc_context(changes):
            yield

    def write(self, drawing: Figure, path: Path) -> None:
        """Write a drawing that was made under `look`."""
        if self.width is not None:
            wide, high = drawing.get_size_inches()
            places = [axes.get_subplotspec() for axes in drawing.axes]
            columns = max((place.get_gridspec().ncols for place in places if place is not None), default=1)
            width = max(self.width, NARROWEST_PANEL * columns) if columns > 1 else self.width
            drawing.set_size_inches(width, high * width / wide)
        panels = [axes for axes in drawing.axes if axes.get_label() != "<colorbar>"]
        if self.letters and len(panels) > 1:
            for k, axes in enumerate(panels):
                axes.set_title(chr(ord("a") + k), loc="left", fontweight="bold")
        dots: int = mpl.rcParams["savefig.dpi"] if self.width is None else PRINT
        drawing.savefig(path, format=self.format, dpi=dots)
