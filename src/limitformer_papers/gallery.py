"""Make all figures of a folder again, or resume where that was stopped.

    python -m limitformer_papers.gallery docs/figures

The record of each picture (`limitformer_papers.making`) has a *stamp*: the figure's claims at quick scale, seed 11,
when the picture was made. They take seconds, so a test computes them again and finds the figures whose numbers have
moved.

A stamp shows any change of a claim, from random numbers to the claim's formula. It does not show a change that is
visible only at the paper's scale, in numbers outside of the claims, or in the drawing. On the processor that made
the stamp, a number has moved if it differs by a thousandth of itself. Another processor differs in last digits, and
a median of few samples or the end of a long path can then differ by half of itself: there a figure has moved if more
than half of its numbers have.
"""

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from limitformer.base.extras import package_version
from limitformer.base.files import write_whole
from limitformer.sweep.store import processor
from limitformer_papers.catalogue import FIGURES
from limitformer_papers.common.claims import Claim
from limitformer_papers.making import json_number, make

QUICK_SEED = 11
NEAR, NOTHING = 1e-3, 1e-12  # relative and absolute tolerance


def stamp(claims: list[Claim]) -> dict[str, Any]:
    """Return the claims at quick scale, for a record."""
    values = {claim.name: json_number(claim.value) for claim in claims}
    return {"scale": "quick", "seed": QUICK_SEED, "processor": processor(), "claims": values}


def moved(record: dict[str, Any], claims: list[Claim]) -> list[str]:
    """Return the names of claims that differ from the record's stamp; all of them without a stamp."""
    stored, current = record.get("stamp", {}), stamp(claims)
    before, after = stored.get("claims", {}), current["claims"]
    names = [name for name in {**before, **after} if not same(before.get(name), after.get(name))]
    elsewhere = stored.get("processor") != current["processor"] and before.keys() == after.keys()
    return [] if elsewhere and len(names) <= len(after) / 2 else names


def same(one: float | str | None, other: float | str | None) -> bool:
    """Return whether two values of a claim are equal up to rounding.

    >>> same(0.5, 0.5001), same(0.5, 0.51), same("inf", "inf"), same(0.5, None)
    (True, False, True, False)
    """
    if isinstance(one, float | int) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=NEAR, abs_tol=NOTHING)
    return one == other and one is not None


def is_current(folder: Path, name: str, quick: list[Claim]) -> bool:
    """Return whether the folder has the figure of this version, at the paper's scale, with these numbers."""
    path = folder / f"{name}.json"
    if not (path.is_file() and (folder / f"{name}.png").is_file()):
        return False
    record = json.loads(path.read_text(encoding="utf-8"))
    ours = (record["limitformer_version"], record["scale"], record["seed"]) == (package_version(), "paper", 0)
    return ours and not moved(record, quick)


def remake(name: str, folder: Path) -> bool:
    """Make one figure with its stamp, unless it is current; return whether it was made."""
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
    """Make the figures of these names, or all, and print a line for each."""
    for name in names or FIGURES:
        print(name, "made" if remake(name, Path(folder)) else "is current", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
