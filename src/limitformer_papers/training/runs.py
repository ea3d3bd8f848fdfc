"""The folder of a run: `run.json` describes it, and `summary.json` has the result of a finished run."""

import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from math import isfinite, nan
from pathlib import Path
from typing import Any

from limitformer.base.errors import InputError, require
from limitformer.base.files import write_whole
from limitformer.base.version import package_version
from limitformer_papers.training.device import device_name
from limitformer_papers.training.plan import FREE, Plan, processes

RUN, SUMMARY = "run.json", "summary.json"


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its description, its plan, its summary and its folder."""

    about: Mapping[str, Any]
    plan: Mapping[str, Any]
    summary: Mapping[str, float]
    path: Path


def finite(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return `content` with None for values that are not finite, which JSON cannot express."""
    return {
        name: None if isinstance(value, float) and not isfinite(value) else value for name, value in content.items()
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all; values that are not finite become null."""
    write_whole(path, lambda whole: whole.write_text(json.dumps(finite(content), indent=2) + "\n"))


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that `write_json` wrote, or raise `InputError`."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}. Nearest: another folder, or without that file.") from error
    require(isinstance(content, dict), f"{path} is not a file that limitformer wrote.")
    return dict(content)


def versions() -> dict[str, str]:
    packages = ("torch", "transformers", "accelerate", "numpy")
    return {"limitformer": package_version(), "python": platform.python_version()} | {n: version(n) for n in packages}


def opened(plan: Plan, about: Mapping[str, Any]) -> dict[str, float] | None:
    """Check that the plan's folder holds no other run; return the summary if it holds this one, finished.

    Raises:
        InputError: another run is there, or a damaged `run.json`.
    """
    requested = {"about": json_copy(about), "plan": plan.as_record()}
    path = plan.folder / RUN
    if not path.exists():
        return None
    stored = read_json(path)
    differing = differences(stored, requested)
    require(not differing, f"{plan.folder} holds another run: {'; '.join(differing)}. Nearest: another folder.")
    return read_summary(plan.folder) if (plan.folder / SUMMARY).exists() else None


def json_copy(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return `about` after a round trip through JSON."""
    try:
        return dict(json.loads(json.dumps(dict(about))))
    except (TypeError, ValueError) as error:
        raise InputError(f"The description of a run must go to JSON: {error}.") from error


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return the differences that change results: "learning_rate is 0.1 there, 0.2 here".

    A field that the plan of an older version lacks has its default.
    """
    lines, defaults = [], {field.name: field.default for field in fields(Plan) if field.default is not MISSING}
    for part, known in (("about", {}), ("plan", defaults)):
        there, here = (dict(flat(known | dict(run.get(part, {})))) for run in (found, wanted))
        names = [name for name in {**here, **there} if part == "about" or name not in FREE]
        lines += [
            f"{name} is {there.get(name, 'missing')!r} there, {here.get(name, 'missing')!r} here"
            for name in names
            if there.get(name, "missing") != here.get(name, "missing")
        ]
    return lines


def flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested settings under their full names, such as "data.source"."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def write_run(plan: Plan, about: Mapping[str, Any]) -> None:
    """Write `run.json`, unless it exists."""
    if not (plan.folder / RUN).exists():
        started = datetime.now(UTC).isoformat(timespec="seconds")
        content = {"about": json_copy(about), "plan": plan.as_record(), "versions": versions(), "started": started}
        write_json(plan.folder / RUN, content | {"processes": processes(), "device": device_name()})


def read_summary(folder: Path) -> dict[str, float]:
    """Read the summary of the run in `folder`."""
    return {name: nan if value is None else value for name, value in read_json(folder / SUMMARY).items()}


def read_runs(folder: str | Path) -> list[FinishedRun]:
    """Return all finished runs in `folder` and below, by path.

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
    run = read_json(path / RUN)
    require("about" in run and "plan" in run, f"{path / RUN} is not a file that limitformer wrote.")
    return FinishedRun(run["about"], run["plan"], read_summary(path), path)
