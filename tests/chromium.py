"""A headless Chromium for tests of pages. Without one they are skipped."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def executable(playwright: Any) -> str | None:
    """Return the path of a Chromium on this machine, or None."""
    own = playwright.chromium.executable_path
    found = [os.environ.get("CHROMIUM"), *map(shutil.which, NAMES), own if Path(own).exists() else None]
    return next(filter(None, found), None)


@contextmanager
def launched() -> Iterator[Any]:
    """Launch the browser, or skip the test if there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        path = executable(driver)
        if path is None:
            pytest.skip("no Chromium was found: install one, or name it in CHROMIUM")
        found = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()
