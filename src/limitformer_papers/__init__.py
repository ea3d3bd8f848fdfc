"""Figures of the papers: one file each, `compute(config, run)` to data and `draw(data)` to a picture.

What makes them, and all that computes and draws, is imported when it is first asked for: a list needs none of it.
"""

from typing import TYPE_CHECKING

from limitformer_papers.names import FIGURES as FIGURES
from limitformer_papers.names import RUN_FIGURES as RUN_FIGURES

if TYPE_CHECKING:
    from limitformer_papers.making import Made as Made
    from limitformer_papers.making import make as make

__all__ = ["FIGURES", "RUN_FIGURES", "Made", "make"]


if not TYPE_CHECKING:  # a checker should know the names above alone

    def __getattr__(name: str) -> object:
        """`make`, and what it gives."""
        if name not in ("Made", "make"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from limitformer_papers import making

        return getattr(making, name)


def __dir__() -> list[str]:
    """Names for users."""
    return sorted({*__all__, *globals()})
