"""Make a figure: compute, check its claims, draw, and write picture, NetCDF and JSON, each whole or not at all."""

import json
import math
import shutil
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import xarray as xr

from limitformer.base.errors import require
from limitformer.base.extras import package_version
from limitformer.base.files import check_writable, write_whole
from limitformer.base.lock import only_one
from limitformer.results.storage import save
from limitformer_papers.catalogue import FIGURES, FOLDERS, RUN_FIGURES, STORED
from limitformer_papers.common.claims import Claim, FigureRun
from limitformer_papers.common.picture import Picture

SCALES = ("paper", "quick")
BEGIN, END = "<!-- claims -->", "<!-- end of claims -->"
MARKS = {True: "yes", False: "**no**"}
# Figures that need the extra `train`.
NEED_TRAINING = ("st-fig2", "feedforward-branch", *RUN_FIGURES)


@dataclass(frozen=True)
class Made:
    """A figure that was made: its data, claims and files, and the seconds it took."""

    data: xr.Dataset
    claims: list[Claim]
    paths: list[Path]
    seconds: float


def make(
    name: str,
    *,
    scale: str = "paper",
    out: str | Path = "out",
    seed: int = 0,
    threads: int | None = None,
    runs: str | Path | None = None,
    module: Any = None,
    picture: Picture | None = None,
) -> Made:
    """Make the figure `name` at `scale` ("paper" or "quick") and write NAME.png, NAME.nc and NAME.json into `out`.

    `picture` chooses another format than PNG, the width, letters of panels and a serif typeface.

    A figure of a grid that is interrupted leaves `.NAME.sweeps` in `out` and resumes from it when it is made again. A
    figure of `RUN_FIGURES` is drawn from the finished runs in `runs`, at their scale; `foretells` also from those that
    the package has. If `out` has a page NAME.md with the marks for a table of claims, the table is updated.

    A user-defined figure has a new name and a `module`, or any object with the attributes of a figure's module: `paper`
    and `quick`, which return a dataclass; `compute(config, run)`; `claims(data)`; `draw(data)`; a docstring.

    Raises:
        InputError: an unknown figure or scale, runs that are missing or not used, a folder that cannot be written, or
            one in which another process makes the same figure; all before any work is done.
    """
    own, names = module is not None, [*FIGURES, *RUN_FIGURES]
    require(not (own and name in names), f"{name} is a figure of the package; give your figure another name.")
    require(own or name in names, f"Unknown figure {name!r}; there are {', '.join(names)}.")
    require(scale in SCALES, f"Unknown scale {scale!r}; there are {', '.join(SCALES)}.")
    missing = name in RUN_FIGURES and name not in STORED and runs is None
    require(not missing, f"{name} is drawn from finished runs: give their folder (--runs).")
    require(own or name in RUN_FIGURES or runs is None, f"{name} is not drawn from runs; leave out --runs.")
    folder = Path(out)
    check_writable(folder)
    if name in NEED_TRAINING:
        import_module("limitformer_papers.training")  # its error names the missing extra
    module = module if own else module_of(name)
    stores = folder / f".{name}.sweeps"
    run = FigureRun(seed=seed, threads=threads, stores=stores, runs=None if runs is None else Path(runs))
    with only_one(folder / f".{name}.lock", f"Figure {name} in {folder}"):
        return make_unlocked(name, scale, module, run, folder, picture or Picture())


def module_of(name: str) -> Any:
    """Return the module of a figure; that of `st-fig1` is `limitformer_papers.shaped_transformer.st_fig1`."""
    folder = FOLDERS.get(name.split("-")[0], "beyond")
    return import_module(f"limitformer_papers.{folder}.{name.replace('-', '_')}")


def make_unlocked(name: str, scale: str, module: Any, run: FigureRun, folder: Path, picture: Picture) -> Made:
    """Make the figure; the caller holds the folder's lock."""
    began = time.perf_counter()
    config = getattr(module, scale)()
    data = module.compute(config, run)
    data.attrs |= {
        "figure": name,
        "scale": scale if name not in RUN_FIGURES else "as the runs were",
        "seed": run.seed,
        "config": json.dumps(asdict(config)),
        "limitformer_version": package_version(),
    }
    claims = module.claims(data)
    paths = write(name, folder, module, data, claims, picture, seconds=time.perf_counter() - began)
    if run.stores is not None:
        shutil.rmtree(run.stores, ignore_errors=True)
    return Made(data, claims, paths, time.perf_counter() - began)


def write(
    name: str, folder: Path, module: Any, data: xr.Dataset, claims: list[Claim], picture: Picture, seconds: float
) -> list[Path]:
    """Write the three files, and the table of claims into the figure's page if it exists; return their paths."""
    drawn, record = folder / f"{name}.{picture.format}", folder / f"{name}.json"
    with picture.look():
        drawing = module.draw(data)
        write_whole(drawn, lambda path: picture.write(drawing, path))
    numbers = save(data, folder / f"{name}.nc")
    report = {
        "figure": name,
        "shows": (FIGURES | RUN_FIGURES).get(name) or (module.__doc__ or "").strip().partition("\n")[0],
        "scale": data.attrs["scale"],
        "seed": data.attrs["seed"],
        "limitformer_version": data.attrs["limitformer_version"],
        "seconds": round(seconds, 3),  # wall time of this call; a resumed figure counts from its resumption
        "config": json.loads(data.attrs["config"]),
        "claims": [asdict(claim) | {"value": json_number(claim.value)} for claim in claims],
    }
    text = json.dumps(report, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    write_whole(record, lambda path: path.write_text(text, encoding="utf-8"))
    return [drawn, numbers, record, *renew(folder / f"{name}.md", report)]


def json_number(value: float) -> float | str:
    """Return `value`, as text if it is not finite, which JSON cannot express."""
    return value if math.isfinite(value) else str(value)


def table(record: dict[str, Any]) -> str:
    """Return the claims of a record that hold or do not, as a Markdown table, and where its other numbers are."""
    rows = []
    for one in record["claims"]:
        if one["holds"] is not None:
            value = one["value"] if isinstance(one["value"], str) else f"{one['value']:.4g}"
            rows.append(f"| {one['name'].replace('|', chr(92) + '|')} | {value} | {MARKS[one['holds']]} |")
    others, name = len(record["claims"]) - len(rows), f"{record['figure']}.json"
    header = ["| claim | value | holds |", "|---|---|---|"]
    return "\n".join([*header, *rows, *(["", f"Other numbers: {others}, in [{name}]({name})."] if others else [])])


def with_table(text: str, record: dict[str, Any]) -> str:
    """Return the text of a page with the record's table between the two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(record)}\n\n{END}{after}"


def renew(page: Path, record: dict[str, Any]) -> list[Path]:
    """Write the table into the page, if it exists and has the marks; return the paths written."""
    if not page.is_file():
        return []
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        return []
    write_whole(page, lambda path: path.write_text(with_table(text, record), encoding="utf-8"))
    return [page]
