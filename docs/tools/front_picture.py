"""The picture of the first page: the left panel of [ST, Fig. 1], large enough for a phone.

limitformer figure st-fig1 --out out
python docs/tools/front_picture.py out/st-fig1.nc     # writes docs/assets/rank-collapse.png
"""

import sys
from pathlib import Path
from typing import Any

import xarray as xr
from matplotlib import rc_context
from matplotlib.figure import Figure

from limitformer.plot import BLACK, panels, style
from limitformer_papers.shaped_transformer.st_fig1 import LOOKS, SHAPED, UNSHAPED, VANILLA

PICTURE = Path(__file__).resolve().parents[1] / "assets/rank-collapse.png"
SHOWN, PHONE = 560, 358  # pixels of CSS: the picture's width on a page, and on a phone of 390
WIDTH, HEIGHT = 5.0, 3.3  # inches
SIZES = ("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize")
TYPE: Any = dict.fromkeys(SIZES, 11.5)
# Names next to the lines: text, the height of its right end, and a colour with a contrast of 4.5 on white.
NAMES = {
    UNSHAPED: ("softmax attention, with and without Pre-LN", 1.045, BLACK),
    VANILLA: ("softmax attention, Pre-LN, λ = γ = 1", 0.83, "#00664b"),
    SHAPED: ("shaped attention", 0.30, "#005a8e"),
}


def draw(data: xr.Dataset) -> Figure:
    """Draw mean |ρ| by layer from the data of `st-fig1`."""
    with style(), rc_context(TYPE):
        figure, (axes,) = panels(1, width=WIDTH, height=HEIGHT)
        for name, look in LOOKS.items():
            axes.plot(data.depth, data["mean_absolute"].sel(model=name), **look)
        for text, height, colour in NAMES.values():
            axes.text(float(data.depth[-1]), height, text, color=colour, ha="right")
        axes.set(xlabel="layer", ylabel="mean absolute correlation", ylim=(0, 1.14), yticks=[0, 0.2, 0.4, 0.6, 0.8, 1])
    return figure


def main(path: str) -> None:
    """Write the picture with two dots for each pixel of a page."""
    with xr.open_dataset(path) as data:
        draw(data).savefig(PICTURE, dpi=2 * SHOWN / WIDTH)


if __name__ == "__main__":
    main(sys.argv[1])
