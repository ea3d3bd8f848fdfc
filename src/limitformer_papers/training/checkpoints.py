r"""Checkpoints that are whole or not there.

One is written under another name, then a manifest with the length and the SHA-256 of each of its files, and at last the
folder is renamed. What is killed half-way has no name that is looked for; what a disk has damaged does not fit its
manifest, and the next older one is taken.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from limitformer.base.errors import InputError

MANIFEST = "manifest.json"
PREFIX = "checkpoint-"


@dataclass(frozen=True)
class Checkpoint:
    """A complete one: its folder, its step, and what was noted with it."""

    folder: Path
    step: int
    notes: Mapping[str, Any]


def digest(path: Path) -> list[Any]:
    """[bytes, SHA-256] of a file."""
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def seal(staged: Path, target: Path, notes: Mapping[str, Any]) -> None:
    """Write the manifest of what lies in `staged` and move it to `target`."""
    files = {path.name: digest(path) for path in sorted(staged.iterdir())}
    try:
        (staged / MANIFEST).write_text(json.dumps({"files": files, "notes": dict(notes)}, indent=1))
        if target.exists():  # one that was found damaged
            shutil.rmtree(target)
        staged.replace(target)
    except OSError as error:
        raise InputError(f"Cannot write {target}: {error.strerror}.") from error


def opened(folder: Path) -> Checkpoint | None:
    """The checkpoint in a folder, None if it is not complete."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        whole = all(digest(folder / name) == known for name, known in manifest["files"].items())
        return Checkpoint(folder, step_of(folder), manifest["notes"]) if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(folder.name.removeprefix(PREFIX))


def listed(folder: Path) -> list[Path]:
    """All checkpoints by name, newest first."""
    named = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdecimal()]
    return sorted(named, key=step_of, reverse=True)


def newest(folder: Path) -> tuple[Checkpoint | None, list[Path]]:
    """The newest complete checkpoint, None if there is none, and the damaged ones that are newer."""
    damaged: list[Path] = []
    for path in listed(folder):
        found = opened(path)
        if found is not None:
            return found, damaged
        damaged.append(path)
    return None, damaged


def thin(folder: Path, number: int) -> None:
    """Remove all but the newest `number`."""
    for path in listed(folder)[number:]:
        shutil.rmtree(path, ignore_errors=True)
