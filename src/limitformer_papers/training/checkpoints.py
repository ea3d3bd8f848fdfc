r"""Checkpoints that are complete or absent.

A checkpoint is written under another name, then a manifest with the length and the SHA-256 of each file, and at last
the folder is renamed. A process that is killed half-way leaves no folder with a checkpoint's name. A file damaged on
disk does not match the manifest, and the next older checkpoint is used.
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
    """A complete checkpoint: its folder, its step, and the notes stored with it."""

    folder: Path
    step: int
    notes: Mapping[str, Any]


def digest(path: Path) -> list[Any]:
    """Return [bytes, SHA-256] of a file."""
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def seal(staged: Path, target: Path, notes: Mapping[str, Any]) -> None:
    """Write the manifest of the files in `staged` and move it to `target`."""
    files = {path.name: digest(path) for path in sorted(staged.iterdir())}
    try:
        (staged / MANIFEST).write_text(json.dumps({"files": files, "notes": dict(notes)}, indent=1))
        if target.exists():  # a damaged checkpoint
            shutil.rmtree(target)
        staged.replace(target)
    except OSError as error:
        raise InputError(f"Cannot write {target}: {error.strerror}.") from error


def opened(folder: Path) -> Checkpoint | None:
    """Return the checkpoint in a folder, or None if it is not complete."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        whole = all(digest(folder / name) == known for name, known in manifest["files"].items())
        return Checkpoint(folder, step_of(folder), manifest["notes"]) if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix(PREFIX))


def listed(folder: Path) -> list[Path]:
    """Return all checkpoints by name, newest first."""
    named = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdecimal()]
    return sorted(named, key=step_of, reverse=True)


def newest(folder: Path) -> tuple[Checkpoint | None, list[Path]]:
    """Return the newest complete checkpoint, or None, and the damaged ones that are newer."""
    damaged: list[Path] = []
    for path in listed(folder):
        checkpoint = opened(path)
        if checkpoint is not None:
            return checkpoint, damaged
        damaged.append(path)
    return None, damaged


def thin(folder: Path, number: int) -> None:
    """Remove all checkpoints but the newest `number`."""
    for path in listed(folder)[number:]:
        shutil.rmtree(path, ignore_errors=True)
