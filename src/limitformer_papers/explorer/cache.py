"""Cells of a page, stored one by one while it is made, so that a second call resumes."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from limitformer.base.files import write_whole
from limitformer.base.version import package_version


class CellCache:
    """Results as JSON in a folder (None: not stored), keyed by their inputs and the version that made them."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def get(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Return the value stored under `key`, or else call `compute()` and store its result."""
        if self.folder is None:
            return compute()
        name = hashlib.sha256(json.dumps([package_version(), key], sort_keys=True).encode()).hexdigest()[:32]
        path = self.folder / f"{name}.json"
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))
        value = compute()
        text = json.dumps(value)
        write_whole(path, lambda place: place.write_text(text, encoding="utf-8"))
        return value
