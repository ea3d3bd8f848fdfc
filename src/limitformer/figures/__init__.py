"""Figures of the papers: one file each, `compute(config, run)` to data and `draw(data)` to a picture."""

from limitformer.figures.make import FIGURES as FIGURES
from limitformer.figures.make import RUN_FIGURES as RUN_FIGURES
from limitformer.figures.make import Made as Made
from limitformer.figures.make import make as make
