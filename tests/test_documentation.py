"""The documentation is correct: its Python runs, its links lead somewhere, the tests that it names exist."""

import re
import shlex
import sys
from functools import cache
from pathlib import Path
from textwrap import indent

import pytest
import typer
from typer.testing import CliRunner

from limitformer.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
FRONT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = FRONT + sorted(ROOT.glob("docs/**/*.md"))

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^```python\n((?:(?!```).*\n)*)```\n\n```text\n((?:(?!```).*\n)*)```$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"""(?:!?\[[^\]]*\]\(|<img src=")([^)"\s]+)[)"]""")
HERE = re.compile(r"https://(github\.com|raw\.githubusercontent\.com)/limitformer/limitformer/(blob/)?main/")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def relative(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """Yield the first line and the code of each block."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in BLOCK.finditer(text)]


def links(page: Path) -> list[str]:
    """Return the targets of links and images, except addresses of other sites."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return [target for target in map(from_here, LINK.findall(text)) if not re.match(r"[a-z]+:", target)]


def from_here(target: str) -> str:
    """Map full addresses to local files: the README is also shown on package indexes and uses full addresses."""
    return HERE.sub("", target)


def test_readme_links_are_complete_addresses():
    targets = LINK.findall(FENCE.sub("", FRONT[0].read_text(encoding="utf-8")))
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    assert len(links(FRONT[0])) > 10  # and these are looked up below


def anchors(page: Path) -> set[str]:
    """Return the headings as they appear in addresses."""
    text = FENCE.sub("", page.read_text(encoding="utf-8")).lower()
    headings = [re.sub(r"[^\w\s-]", "", heading) for heading in HEADING.findall(text)]
    return {re.sub(r"[\s-]+", "-", heading).strip("-") for heading in headings}


SHOWN_IN_DOCS = (
    *("start-engineer", "start-researcher", "sphere", "unequal-clusters", "many-tokens", "equal-clusters"),
    *("sweeps", "check-initialisation", "recipes", "which-learning-rate"),
)
SHOWING = ["README.md", *(f"docs/{page}.md" for page in SHOWN_IN_DOCS)]
ONLY_RUN = [page for page in PAGES if python_blocks(page) and relative(page) not in SHOWING]


@pytest.mark.parametrize("page", ONLY_RUN, ids=relative)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """All blocks of a page run in order, in one namespace and an empty folder."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "documentation"}
    for line, code in python_blocks(page):
        # Empty lines first, so that a traceback names the line of the page.
        exec(compile("\n" * line + code, page, "exec"), namespace)


HEAD = "# The README's code, for mypy (`test_documentation.py` holds it against the page).\nimport limitformer as lf"


def typed_readme() -> str:
    """Return the README's code as a module for mypy, with each block in its own function."""
    blocks = [code for _, code in python_blocks(ROOT / "README.md")]
    bodies = [f"def block_{k}() -> None:\n{indent(code, '    ')}" for k, code in enumerate(blocks)]
    return "\n\n".join([HEAD, *bodies])


def test_mypy_checks_the_readmes_code():
    """`make lint` checks it as a user's code: annotated calls, and no `Any` from the package."""
    kept = ROOT / "tests" / "typed" / "readme.py"
    ours = re.sub(r"\s+", "", typed_readme())
    assert re.sub(r"\s+", "", kept.read_text(encoding="utf-8")) == ours, (
        "write typed_readme() into tests/typed/readme.py"
    )


def printed_after(page: Path, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str]]:
    """Yield (printed output, output on the page) for each block of code that is followed by its output."""
    shown = dict(SHOWN.findall(page.read_text(encoding="utf-8")))
    namespace: dict[str, object] = {"__name__": "documentation"}
    pairs = []
    for line, code in python_blocks(page):
        capsys.readouterr()
        exec(compile("\n" * line + code, page, "exec"), namespace)
        if code in shown:
            pairs.append((capsys.readouterr().out, shown[code]))
    return pairs


@pytest.mark.parametrize("name", SHOWING)
def test_code_on_pages_prints_the_shown_output(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write_files(ROOT / name, tmp_path)
    monkeypatch.setitem(sys.modules, "model", None)  # so that the page's own is forgotten afterwards
    del sys.modules["model"]
    pairs = printed_after(ROOT / name, capsys)
    assert pairs
    for printed, shown in pairs:
        assert printed == shown


@pytest.mark.parametrize("page", [page for page in PAGES if links(page)], ids=relative)
def test_links_of_pages_lead_somewhere(page):
    broken = []
    for target in links(page):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def test_every_page_is_in_the_navigation():
    named = re.findall(r"(?:: |- )(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    present = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES if ROOT / "docs" in page.parents]
    present += [f"examples/{path.stem}.md" for path in ROOT.glob("examples/*.ipynb")]
    assert sorted(named) == sorted(present)


SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPERATOR = re.compile(r"[|;&<>]|\$\(")  # what ends a command for a shell


def shell_commands(page: Path) -> list[str]:
    """Return the lines of the page's shell blocks that begin with `limitformer`."""
    lines = [line.strip() for block in SHELL.findall(page.read_text(encoding="utf-8")) for line in block.splitlines()]
    return [OPERATOR.split(line.split("  #")[0])[0].strip() for line in lines if line.startswith("limitformer ")]


@pytest.mark.parametrize("page", [page for page in PAGES if shell_commands(page)], ids=relative)
def test_commands_on_pages_parse(page):
    """The command line parses each command's names, options and types, without running it."""
    for line in shell_commands(page):
        parse(shlex.split(line)[1:])


def parse(words: list[str]) -> None:
    """Parse a command line as `limitformer` does. Raises for an unknown command, option or type."""
    command, name = typer.main.get_command(app), "limitformer"
    while hasattr(command, "get_command"):
        with command.make_context(name, [], resilient_parsing=True) as context:
            context.resilient_parsing = False  # so that a command that there is not is an error
            name, command, words = command.resolve_command(context, words)
    with command.make_context(name, list(words)):
        pass


PRINTED = re.compile(r"^```sh\n(limitformer .*)\n```\n\n```text\n((?:(?!```).*\n)*)```$", re.MULTILINE)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
NAMED = re.compile(r"^# (\w+\.py)$", re.MULTILINE)


def write_files(page: Path, folder: Path) -> None:
    """Write the page's blocks of Python that begin with the name of a file, as a comment."""
    for _, code in python_blocks(page):
        if name := NAMED.match(code):
            (folder / name[1]).write_text(code, encoding="utf-8")


WITH_OUTPUT = [page for page in PAGES if PRINTED.search(page.read_text(encoding="utf-8"))]


def without_omissions(printed: str, shown: str) -> tuple[str, str]:
    """Leave out of both texts what the line … stands for on the page."""
    before, omission, after = shown.partition("\n…\n")
    if not omission:
        return printed, shown
    lines, first = printed.splitlines(), before.count("\n") + 1
    words, length = NUMBER.sub("#", after), after.count("\n")
    starts = range(first, len(lines) - length + 1)
    parts = ["".join(line + "\n" for line in lines[start : start + length]) for start in starts]
    found = [part for part in parts if NUMBER.sub("#", part) == words]
    return "\n".join(lines[:first]) + "\n" + "".join(found[:1]), before + "\n" + after


def same_output(printed: str, shown: str) -> bool:
    """Whether the words are equal, and the numbers up to the rounding of another processor: 1 %, or 0.005."""
    printed, shown = without_omissions(printed, shown)
    if NUMBER.sub("#", printed) != NUMBER.sub("#", shown):
        return False
    numbers = [[float(each.replace(",", "")) for each in NUMBER.findall(text)] for text in (printed, shown)]
    return all(abs(a - b) <= max(0.01 * abs(b), 0.005) for a, b in zip(*numbers, strict=True))


@cache
def output_of(command: str) -> tuple[int, str]:
    """Return the exit code and the output of a command, which several pages may show."""
    done = CliRunner().invoke(app, shlex.split(command)[1:])
    return done.exit_code, done.stdout if done.exit_code == 0 else done.output


@pytest.mark.parametrize("page", WITH_OUTPUT, ids=relative)
def test_commands_on_pages_print_the_shown_output(page, tmp_path, monkeypatch):
    """Each block with one command that is followed by its output is run, in a folder with the files of the page."""
    monkeypatch.chdir(tmp_path)
    write_files(page, tmp_path)
    for command, shown in PRINTED.findall(page.read_text(encoding="utf-8")):
        code, printed = output_of(command)
        assert code == 0, printed
        assert same_output(printed, shown), printed


@pytest.mark.slow
def test_readmes_model_is_fine_with_the_norms_before_the_branches(tmp_path, monkeypatch):
    """The README says that it is fine, and what its correlation is."""
    monkeypatch.chdir(tmp_path)
    write_files(FRONT[0], tmp_path)
    file = tmp_path / "model.py"
    assert "its correlation ends at 0.412" in " ".join(FRONT[0].read_text(encoding="utf-8").split())
    code = file.read_text(encoding="utf-8")
    for old, new in (
        ("x = self.norm1(x + self.attention(x, x, x)[0])", "y = self.norm1(x); x = x + self.attention(y, y, y)[0]"),
        ("self.norm2(x + self.mlp(x))", "x + self.mlp(self.norm2(x))"),
    ):
        assert old in code
        code = code.replace(old, new)
    file.write_text(code, encoding="utf-8")
    done = CliRunner().invoke(app, ["check", "model.py:build", "--no-gradients"])
    assert "✓ fine: no threshold is reached" in done.stdout
    assert re.search(r"correlation .* 0\.412$", done.stdout, re.MULTILINE)


def test_readme_shows_the_output_of_its_first_command():
    assert "limitformer check bert-large" in PRINTED.findall(FRONT[0].read_text(encoding="utf-8"))[0][0]


def test_errata_and_their_tests_name_each_other():
    page = (ROOT / "docs/errata.md").read_text(encoding="utf-8")
    tests = "".join(
        (ROOT / f"tests/{folder}/test_errata_{paper}.py").read_text(encoding="utf-8")
        for folder, paper in (("covariance", "st"), ("sphere", "ct"))
    )
    assert set(re.findall(r"`(test_\w+)`", page)) == set(re.findall(r"^def (test_\w+)", tests, re.MULTILINE))
    for paper, count in (("ST", 17), ("CT", 19)):
        rows = re.findall(rf"^\| \*\*{paper} (\d+)\*\* .* \| (.+) \|$", page, re.MULTILINE)
        assert [int(number) for number, _ in rows] == list(range(1, count + 1))
        assert [number for number, shown in rows if not re.match(r"`test_\w+`|\[.+\]\(figures/", shown)] == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_named_test_files_exist(page):
    named = re.findall(r"\btests/(?:\w+/)?test_\w+\.py\b", page.read_text(encoding="utf-8"))
    assert not [name for name in named if not (ROOT / name).exists()]
