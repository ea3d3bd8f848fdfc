"""The gallery: all figures of a folder made again, from nothing or from where that was stopped.

    python -m limitformer_papers.gallery docs/figures

Beside each picture its record (`figures.making`) keeps a *stamp*: what the figure's claims were at quick scale, seed
11, when the picture was made. That takes seconds, so a test computes it again and finds the figures whose numbers
have moved since.

What a stamp sees: whatever changes a claim, from random numbers to the formula of a claim. What it does not see: a
change that shows at the size of the paper alone, in what no claim measures, or in the drawing. On the processor that
made the stamp, a number counts as moved from a thousandth of itself on. Another one differs in last digits, and a
median of few samples, or the end of a long path, can then jump by half of itself: there a figure has moved if more than
half of its numbers have.
"""

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from limitformer.base.files import write_whole
from limitformer.results.datasets import package_version
from limitformer.sweep.origin import processor
from limitformer_papers import FIGURES
from limitformer_papers.common.claims import Claim
from limitformer_papers.making import make, plain

QUICK_SEED = 11
NEAR, NOTHING = 1e-3, 1e-12  # relative; and what counts as rounding alone


def stamp(claims: list[Claim]) -> dict[str, Any]:
    """What a record keeps of the claims at quick scale."""
    values = {claim.name: plain(claim.value) for claim in claims}
    return {"scale": "quick", "seed": QUICK_SEED, "processor": processor(), "claims": values}


def moved(record: dict[str, Any], claims: list[Claim]) -> list[str]:
    """The claims that are not what the record's stamp says; all of them where it has none."""
    there, here = record.get("stamp", {}), stamp(claims)
    kept, found = there.get("claims", {}), here["claims"]
    names = [name for name in {**kept, **found} if not same(kept.get(name), found.get(name))]
    elsewhere = there.get("processor") != here["processor"] and kept.keys() == found.keys()
    return [] if elsewhere and len(names) <= len(found) / 2 else names


def same(one: float | str | None, other: float | str | None) -> bool:
    """Whether two values of a claim are one number.

    >>> same(0.5, 0.5001), same(0.5, 0.51), same("inf", "inf"), same(0.5, None)
    (True, False, True, False)
    """
    if isinstance(one, float | int) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=NEAR, abs_tol=NOTHING)
    return one == other and one is not None


def is_current(folder: Path, name: str, quick: list[Claim]) -> bool:
    """Whether the folder has the figure, by this version, at the paper's size, and with these numbers."""
    path = folder / f"{name}.json"
    if not (path.is_file() and (folder / f"{name}.png").is_file()):
        return False
    record = json.loads(path.read_text(encoding="utf-8"))
    ours = (record["limitformer_version"], record["scale"], record["seed"]) == (package_version(), "paper", 0)
    return ours and not moved(record, quick)


def remake(name: str, folder: Path) -> bool:
    """Make one figure with its stamp, unless it is current; whether it was made."""
    with tempfile.TemporaryDirectory() as aside:
        quick = make(name, scale="quick", out=aside, seed=QUICK_SEED).claims
    if is_current(folder, name, quick):
        return False
    make(name, out=folder)
    record = folder / f"{name}.json"
    report = json.loads(record.read_text(encoding="utf-8")) | {"stamp": stamp(quick)}
    text = json.dumps(report, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    write_whole(record, lambda path: path.write_text(text, encoding="utf-8"))
    return True


def main(folder: str, *names: str) -> None:
    """Make the figures of these names, or all; a line for each."""
    for name in names or FIGURES:
        print(name, "made" if remake(name, Path(folder)) else "is current", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
