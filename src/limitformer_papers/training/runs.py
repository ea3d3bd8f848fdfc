"""The folder of a run: `run.json` says what it is, `summary.json` how it ended, and is there once it has."""

import json
import platform
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from math import isfinite, nan
from pathlib import Path
from typing import Any

from limitformer.base.errors import InputError, require
from limitformer.base.files import write_whole
from limitformer.base.version import package_version
from limitformer_papers.training.plan import FREE, Plan, processes

RUN, SUMMARY = "run.json", "summary.json"


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended: what it was, its plan, how it ended, and its folder."""

    about: Mapping[str, Any]
    plan: Mapping[str, Any]
    summary: Mapping[str, float]
    path: Path


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A JSON file, whole or not at all; a value that is not finite becomes null."""
    finite = {
        name: None if isinstance(value, float) and not isfinite(value) else value for name, value in content.items()
    }
    write_whole(path, lambda whole: whole.write_text(json.dumps(finite, indent=2) + "\n"))


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote, or `InputError`."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}. Nearest: another folder, or without that file.") from error
    require(isinstance(content, dict), f"{path} is not a file that limitformer wrote.")
    return dict(content)


def versions() -> dict[str, str]:
    """What a run is made with."""
    packages = ("torch", "transformers", "accelerate", "numpy")
    return {"limitformer": package_version(), "python": platform.python_version()} | {n: version(n) for n in packages}


def opened(plan: Plan, about: Mapping[str, Any]) -> dict[str, float] | None:
    """Check that the plan's folder holds no other run; the summary if it holds this one, finished.

    Raises:
        InputError: another run is there, or a damaged `run.json`.
    """
    wanted = {"about": plain(about), "plan": plan.described()}
    path = plan.folder / RUN
    if not path.exists():
        return None
    found = read_json(path)
    differing = differences(found, wanted)
    require(
        not differing,
        f"{plan.folder} holds another run: {'; '.join(differing)}. Nearest: another folder.",
    )
    return read_summary(plan.folder) if (plan.folder / SUMMARY).exists() else None


def plain(about: Mapping[str, Any]) -> dict[str, Any]:
    """`about` as it comes back from JSON."""
    try:
        return dict(json.loads(json.dumps(dict(about))))
    except (TypeError, ValueError) as error:
        raise InputError(f"What is said of a run must go to JSON: {error}.") from error


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What differs that changes results: "learning_rate is 0.1 there, 0.2 here".

    A run of an older version may lack a field of the plan: it did what the field's default does.
    """
    lines, defaults = [], {field.name: field.default for field in fields(Plan) if field.default is not MISSING}
    for part, known in (("about", {}), ("plan", defaults)):
        there, here = (known | dict(run.get(part, {})) for run in (found, wanted))
        names = [name for name in {**here, **there} if part == "about" or name not in FREE]
        lines += [
            f"{name} is {there.get(name, 'missing')!r} there, {here.get(name, 'missing')!r} here"
            for name in names
            if there.get(name, "missing") != here.get(name, "missing")
        ]
    return lines


def write_run(plan: Plan, about: Mapping[str, Any]) -> None:
    """Say what the run is, unless it has been said."""
    if not (plan.folder / RUN).exists():
        started = datetime.now(UTC).isoformat(timespec="seconds")
        content = {"about": plain(about), "plan": plan.described(), "versions": versions(), "started": started}
        write_json(plan.folder / RUN, content | {"processes": processes()})


def read_summary(folder: Path) -> dict[str, float]:
    """How the run in `folder` ended."""
    return {name: nan if value is None else value for name, value in read_json(folder / SUMMARY).items()}


def read_runs(folder: str | Path) -> list[FinishedRun]:
    """All finished runs in `folder` and below, by path.

    Raises:
        InputError: there are none.
    """
    folder = Path(folder)
    require(folder.is_dir(), f"No such folder of runs: {folder}.")
    begun = sorted(path.parent for path in folder.rglob(RUN))
    runs = [finished(path) for path in begun if (path / SUMMARY).exists()]
    require(
        bool(runs),
        f"No finished runs in {folder}{f', {len(begun)} unfinished' if begun else ''}. "
        "Nearest: start some with `limitformer train`; the same command finishes one that was interrupted.",
    )
    return runs


def finished(path: Path) -> FinishedRun:
    """One of them."""
    run = read_json(path / RUN)
    require("about" in run and "plan" in run, f"{path / RUN} is not a file that limitformer wrote.")
    return FinishedRun(run["about"], run["plan"], read_summary(path), path)
