"""Planted misreadings that the witness must catch: `python -m tests.witness.mutants [--only WORDS]`.

Each of `mutants.toml` is one text replaced in a copy of the source, which a process of its own imports. The unmutated
source must be "witnessed" for every entry. A mutant is caught if its status is another one, or if it raises an error;
it is named if the module or weight in the reason is one of those in `at`. One that is let pass ends the program with 1.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
MOST_SECONDS = 300  # of one process
SMALL = 0.01  # relative change of the losses
NAMED = re.compile(r"(?:output|gradient|update) of (\S+)")  # in a reason
ABOUT = ("name", "file", "text", "replacement", "at", "small")  # keys of a mutant that do not change the call


def call_of(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in ABOUT}


def results(source: Path, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return status, reason and losses of each entry, from one process that imports `source`."""
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.witness.mutants", "--run"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, input=json.dumps([str(source), entries]), capture_output=True, text=True,
        timeout=MOST_SECONDS, check=False,
    )  # fmt: skip
    found = [json.loads(line.removeprefix("result ")) for line in done.stdout.splitlines() if line[:7] == "result "]
    if len(found) == len(entries):
        return found
    last = (done.stderr.strip() or "no output").splitlines()[-1]
    return [*found, {"status": "error", "reason": last, "losses": []}]


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
        print("result", json.dumps(result), flush=True)


def of_mutant(mutant: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a mutant, in a copy of the source."""
    with tempfile.TemporaryDirectory(prefix="limitformer-mutant-") as folder:
        source = Path(shutil.copytree(ROOT / "src", Path(folder) / "src"))
        path = source / mutant["file"]
        text = path.read_text()
        assert text.count(mutant["text"]) == 1, f"{mutant['name']}: the text is there {text.count(mutant['text'])} times"
        path.write_text(text.replace(mutant["text"], mutant["replacement"]))
        Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)
        return results(source, [call_of(mutant)])[0]


def change(losses: list[float], healthy: list[float]) -> float:
    """Return the largest relative change of a loss; NaN if there are none, or not as many."""
    pairs = zip(losses, healthy, strict=True) if len(losses) == len(healthy) else ()
    return max((abs(a - b) / abs(b) for a, b in pairs), default=float("nan"))


def main() -> int:
    """Try the unmutated source, then each mutant; print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="mutants whose names hold one of these")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(*json.load(sys.stdin))
        return 0
    every = tomllib.loads((HERE / "mutants.toml").read_text())["mutant"]
    chosen = [each for each in every if not arguments.only or any(word in each["name"] for word in arguments.only)]
    began, calls = time.monotonic(), []
    for each in map(call_of, chosen):
        calls += [each] if each not in calls else []
    healthy = results(ROOT / "src", calls)
    for entry, result in zip(calls, healthy, strict=False):
        if result["status"] != "witnessed":
            print(f"the unmutated source is {result['status']}: {result['reason']}; {entry}")
    if len(healthy) < len(calls) or any(each["status"] != "witnessed" for each in healthy):
        return 1
    print(f"the unmutated source is witnessed in {len(calls)} calls, {time.monotonic() - began:.0f} s", flush=True)
    caught = named = small = 0
    for mutant in chosen:
        started, result = time.monotonic(), of_mutant(mutant)
        is_caught, name = result["status"] != "witnessed", NAMED.search(result["reason"])
        is_named = is_caught and bool(re.search(mutant["at"], name.group(1) if name else ""))
        moved = change(result["losses"], healthy[calls.index(call_of(mutant))]["losses"])
        caught, named, small = caught + is_caught, named + is_named, small + (moved <= SMALL)
        said = "" if (moved <= SMALL) == mutant["small"] else f", small = {str(mutant['small']).lower()}"
        where = "named" if is_named else "not named" if is_caught else ""
        print(f"{mutant['name']}\n    {'caught' if is_caught else 'LET PASS':9}{where:10} losses change by {moved:.1e}{said}; "
              f"{time.monotonic() - started:.0f} s; {result['reason'][:200]}", flush=True)  # fmt: skip
    print(f"{caught} of {len(chosen)} caught, {named} named right, {small} of small change, {time.monotonic() - began:.0f} s")
    return 0 if chosen and caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
