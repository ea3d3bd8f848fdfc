"""Planted misreadings that the witness must catch: `python -m tests.witness.mutants [--only WORDS]`.

Each of `mutants.toml` is one text replaced in a copy of the source, which a process of its own imports. The unmutated
source must be "witnessed" for every entry. A mutant is caught if its status is another one, or if it raises an error;
it is named if the module or weight in the reason is one of those in `at`. One that is let pass ends the program with 1.
"""

import argparse
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
WITNESSED = "witnessed"
MOST_SECONDS = 300  # of one process
SMALL = 0.01  # relative change of the losses
NAME = re.compile(r"(?:output|gradient|update) of (\S+)")  # in a reason
ABOUT = ("name", "file", "text", "replacement", "at", "small")  # keys of a mutant that do not change the call
RESULT = "result "  # begins a line of a process


def call_of(mutant: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mutant.items() if key not in ABOUT}


def results(source: Path, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return status, reason and losses of each entry, from one process that imports `source`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.witness.mutants", "--run"], cwd=ROOT, text=True, capture_output=True, check=False,
        env=os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}, timeout=MOST_SECONDS,
        input=json.dumps([str(source), entries]),
    )  # fmt: skip
    found = [json.loads(line.removeprefix(RESULT)) for line in done.stdout.splitlines() if line.startswith(RESULT)]
    last = (done.stderr.strip() or "no output").splitlines()[-1]
    return found + [{"status": "error", "reason": last, "losses": []}] * (len(entries) - len(found))


def run(source: str, entries: list[dict[str, Any]]) -> None:
    """Print the results of the entries, as `results` reads them."""
    import limitformer

    assert Path(limitformer.__file__).is_relative_to(source), "another source was imported"
    from tests.witness.networks import witness_of

    for entry in entries:
        try:
            found, losses = witness_of(entry)
            result = {"status": found.status, "reason": found.reason, "losses": losses}
        except Exception as error:  # a mutant may raise anything  # noqa: BLE001
            result = {"status": "error", "reason": f"{type(error).__name__}: {error}", "losses": []}
        print(RESULT + json.dumps(result), flush=True)


def of_mutant(mutant: dict[str, Any], source: Path, copy: Path) -> dict[str, Any]:
    """Return the result of a mutant in a new copy of the source, always at one place, by which kernels are cached."""
    shutil.rmtree(copy)
    shutil.copytree(source, copy)
    path, text = copy / mutant["file"], (copy / mutant["file"]).read_text()
    assert text.count(mutant["text"]) == 1, f"{mutant['name']}: the text is there {text.count(mutant['text'])} times"
    path.write_text(text.replace(mutant["text"], mutant["replacement"]))
    Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)
    return results(copy, [call_of(mutant)])[0]


def change(losses: list[float], healthy: list[float]) -> float:
    """Return the largest relative change of a loss; infinite for another number of losses."""
    same = len(losses) == len(healthy)
    return max(abs(a - b) / abs(b) for a, b in zip(losses, healthy, strict=True)) if same else math.inf


def tried(chosen: list[dict[str, Any]], folder: Path) -> int:
    """Try the unmutated source, then each mutant; print a row for each, and return the number that are caught."""
    every, caught, named, small = [call_of(each) for each in chosen], 0, 0, 0
    source, copy = (shutil.copytree(ROOT / "src", folder / name) for name in ("source", "copy"))
    calls = [each for k, each in enumerate(every) if each not in every[:k]]
    healthy = results(copy, calls)
    for entry, result in zip(calls, healthy, strict=True):
        if result["status"] != WITNESSED:
            print(f"the unmutated source is {result['status']} in {entry}: {result['reason']}", flush=True)
    print(f"{'':18}largest change of a loss, ! above {SMALL:.0%} where `small` says less")
    for mutant, call in zip(chosen, every, strict=True):
        before = healthy[calls.index(call)]
        if before["status"] != WITNESSED:
            print(f"{'NOT TRIED':27} {mutant['name']}")
            continue
        result = of_mutant(mutant, source, copy)
        is_caught, name = result["status"] != WITNESSED, NAME.search(result["reason"])
        is_named = is_caught and bool(re.search(mutant["at"], name.group(1) if name else ""))
        moved = change(result["losses"], before["losses"])
        caught, named, small = caught + is_caught, named + is_named, small + (moved <= SMALL)
        verdict = "caught, named" if is_named else "caught, not named" if is_caught else "LET PASS"
        print(f"{verdict:18}{moved:8.1e}{'!' if mutant['small'] and not moved <= SMALL else ' '} {mutant['name']}")
        print(f"{'':28}{result['reason']:.200}", flush=True)
    print(f"{caught} of {len(chosen)} caught, {named} named right, {small} change no loss by more than {SMALL:.0%}")
    return caught


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="mutants whose names hold one of these")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        sys.exit(run(*json.load(sys.stdin)))
    table = tomllib.loads((HERE / "mutants.toml").read_text())["mutant"]
    some = [each for each in table if not arguments.only or any(word in each["name"] for word in arguments.only)]
    with tempfile.TemporaryDirectory(prefix="limitformer-mutants-") as place:
        sys.exit(not some or tried(some, Path(place)) < len(some))
