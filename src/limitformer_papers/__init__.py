"""Figures of the papers: one file each, with `compute(config, run)` for the data and `draw(data)` for the picture.

Code that computes and draws is imported when `make` is first used; a list of figures needs none of it.
"""

from typing import TYPE_CHECKING

from limitformer_papers.catalogue import FIGURES as FIGURES
from limitformer_papers.catalogue import RUN_FIGURES as RUN_FIGURES

if TYPE_CHECKING:
    from limitformer_papers.common.picture import Picture as Picture
    from limitformer_papers.making import Made as Made
    from limitformer_papers.making import make as make

__all__ = ["FIGURES", "RUN_FIGURES", "Made", "Picture", "make"]


if not TYPE_CHECKING:  # type checkers know only the names above

    def __getattr__(name: str) -> object:
        if name not in ("Made", "Picture", "make"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from limitformer_papers import making

        return getattr(making, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
