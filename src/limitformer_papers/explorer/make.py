"""Compute the numbers of the explorer's pages, all or those named; run again, the same command resumes.

    python -m limitformer_papers.explorer.make docs/explorer [covariance sphere stock]

A page is skipped if its JSON is of this version and these settings. While a page is computed, its finished cells are in
`.NAME.cells` next to it.
"""

import json
import shutil
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from limitformer.base.errors import nearest, require
from limitformer.base.extras import package_version
from limitformer.base.files import check_writable, write_whole
from limitformer.base.lock import only_one
from limitformer_papers.explorer.parts import as_json

PAGES = ("covariance", "sphere", "stock")
SEED = 0


def module_of(name: str) -> Any:
    require(name in PAGES, f"There is no page {name!r}; there are {', '.join(PAGES)}.{nearest(name, PAGES)}")
    return import_module(f"limitformer_papers.explorer.{name}")


def make_page(name: str, folder: Path, config: Any = None) -> bool:
    """Write the data of a page, unless they are current; return whether they were written."""
    module = module_of(name)
    config = module.Config() if config is None else config
    path, cells = folder / f"{name}.json", folder / f".{name}.cells"
    if is_current(path, config):
        return False
    check_writable(folder)
    with only_one(folder / f".{name}.lock", f"Page {name} in {folder}"):
        text = as_json(data_of(name, module.compute(config, SEED, cells)))
        write_whole(path, lambda place: place.write_text(text, encoding="utf-8"))
        shutil.rmtree(cells, ignore_errors=True)
    return True


def data_of(name: str, found: dict[str, Any]) -> dict[str, Any]:
    about = {
        "limitformer_version": package_version(),
        "seed": SEED,
        "samples": found.pop("samples"),
        "command": f'make explorer ONLY="{name}"',
        "settings": found.pop("settings"),
    }
    return {"page": name, "about": about, **found}


def is_current(path: Path, config: Any) -> bool:
    """Return whether the file exists, with this version and these settings."""
    if not path.is_file():
        return False
    about = json.loads(path.read_text(encoding="utf-8"))["about"]
    ours = json.loads(json.dumps(asdict(config)))
    return bool((about["limitformer_version"], about["settings"]) == (package_version(), ours))


def main(folder: str, *names: str) -> None:
    """Print a line for each page."""
    for name in names or PAGES:
        print(name, "made" if make_page(name, Path(folder)) else "is current", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
