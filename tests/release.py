"""The checks before a release: `make release-check`, or some of them by name.

    python tests/release.py [version] [build] [wheel] [site] [sdist]

version: one version and one date in pyproject.toml, CITATION.cff and the changelog, and nothing under *Unreleased*.
build: wheel and sdist, and what the registry asks of them. wheel: it is installed in a clean environment for each
extra, and what the extra is for is imported. site: built strictly. sdist: unpacked, its two commands are run, and with
them every test, which follow the links of all pages.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Extra → what is imported with it; without any, torch must not be there.
EXTRAS = {
    "": "import limitformer as lf, importlib.util as u; assert u.find_spec('torch') is None; lf.limit",
    "torch": "import limitformer as lf; lf.nn.simulate",
    "hf": "import limitformer as lf; lf.hf.shape_model; lf.weightless.shapes; lf.check; lf.design",
    "train": "import limitformer_papers.training as t; t.train",
    "cluster": "import limitformer, distributed",
    "all": "import limitformer as lf; import limitformer_papers.training as t; t.train; lf.check; import distributed",
}


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command or exit. Variables that would leak this environment into a clean one are removed."""
    print("$", *command, flush=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    subprocess.run([str(part) for part in command], cwd=cwd, env=clean, check=True)


def version(_: Path) -> None:
    """Check that version and date agree everywhere and that the installed package has pyproject.toml's version."""
    said = tomllib.loads(text_of("pyproject.toml"))["project"]["version"]
    cited = dict(re.findall(r"^(version|date-released): (\S+)$", text_of("CITATION.cff"), re.MULTILINE))
    released, day = newest_release(text_of("CHANGELOG.md"))
    if cited != {"version": said, "date-released": day} or released != said:
        sys.exit(f"pyproject.toml has {said}, CITATION.cff {cited}, CHANGELOG.md {released} of {day}.")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def newest_release(changelog: str) -> tuple[str, str]:
    """Return version and date of the newest release; exit if the changelog has unreleased entries."""
    _, unreleased, newest, *_ = re.split(r"^## ", changelog, flags=re.MULTILINE)
    if unreleased.split() != ["Unreleased"]:
        sys.exit("CHANGELOG.md must begin with an empty section Unreleased.")
    version, day = newest.splitlines()[0].split(", ")
    return version, day


def build(folder: Path) -> None:
    run(sys.executable, "-m", "build", "--outdir", folder)
    run(sys.executable, "-m", "twine", "check", "--strict", *folder.glob("limitformer-*"))


def built(folder: Path, ending: str) -> Path:
    """Return the distribution with this ending, and build it if necessary."""
    if not list(folder.glob(f"*{ending}")):
        build(folder)
    return next(folder.glob(f"*{ending}"))


def wheel(folder: Path) -> None:
    """Install the wheel in a clean environment for each extra."""
    file = built(folder, ".whl")
    for extra, code in EXTRAS.items():
        place = folder / "environment"
        shutil.rmtree(place, ignore_errors=True)
        run(sys.executable, "-m", "venv", place)
        run(place / "bin/pip", "install", "--quiet", f"{file}[{extra}]" if extra else file)
        run(place / "bin/python", "-W", "error::ImportWarning", "-c", code, cwd=folder)
        run(place / "bin/limitformer", "figure", "list", cwd=folder)


def site(folder: Path) -> None:
    run(sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder / "site")


def sdist(folder: Path) -> None:
    """Run the two commands from the unpacked archive."""
    with tarfile.open(built(folder, ".tar.gz")) as archive:
        archive.extractall(folder, filter="data")
    place = next(path for path in folder.glob("limitformer-*") if path.is_dir())
    run("make", "demo", cwd=place)
    run("make", "test", cwd=place)


CHECKS = {check.__name__: check for check in (version, build, wheel, site, sdist)}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as aside:
        for name in sys.argv[1:] or CHECKS:
            CHECKS[name](Path(aside))
            print(name, "passed", flush=True)
