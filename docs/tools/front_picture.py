"""The pictures of the first pages: panels of [ST, Fig. 1] and of the studies, large enough for a phone.

limitformer figure st-fig1 --out out
limitformer figure foretells --out out
python docs/tools/front_picture.py out    # writes docs/assets/rank-collapse.png and docs/assets/rates.png
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib import rc_context
from matplotlib.figure import Figure

from limitformer.plot import BLACK, panels, style
from limitformer_papers.beyond.foretells import SWEEPS, draw_sweep
from limitformer_papers.shaped_transformer.st_fig1 import LOOKS, SHAPED, UNSHAPED, VANILLA

ASSETS = Path(__file__).resolve().parents[1] / "assets"
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


def draw_rates(data: xr.Dataset) -> Figure:
    """Draw the loss by learning rate at three widths, standard and with muP, from the data of `foretells`."""
    with style(), rc_context(TYPE | {"axes.titlesize": 11.5, "legend.fontsize": 11.5}):
        figure, axes = panels(2, width=WIDTH / 2, height=HEIGHT)
        for panel, (name, rule) in zip(axes, SWEEPS.items(), strict=True):
            draw_sweep(panel, data.sel(setting=name), rule)
            panel.minorticks_off()
        limits = [panel.get_ylim() for panel in axes]
        low, high = np.min(limits), np.max(limits)
        for panel in axes:
            panel.set_ylim(low - 0.1 * (high - low), high)  # also here the bars are below the curves
        axes[0].get_legend().remove()
        axes[1].set(ylabel="", yticklabels=[])
    return figure


def main(folder: str) -> None:
    """Write the pictures with two dots for each pixel of a page."""
    for name, drawing, picture in (("st-fig1", draw, "rank-collapse"), ("foretells", draw_rates, "rates")):
        with xr.open_dataset(Path(folder) / f"{name}.nc") as data:
            drawing(data).savefig(ASSETS / f"{picture}.png", dpi=2 * SHOWN / WIDTH)


if __name__ == "__main__":
    main(sys.argv[1])
