"""The rules for words in CONTRIBUTING that a machine can check, over all Python files and pages.

Each limit counts hits that are right; lower it when you remove one.
"""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sorted(path for folder in ("src", "tests", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

HALF_SENTENCES = frozenset(
    (
        *(
            "of",
            "by",
            "for",
            "as",
            "and",
            "with",
            "which",
            "who",
            "whose",
            "whom",
            "that",
            "or",
            "but",
            "so",
            "besides",
        ),
        *("from", "what", "whatever", "whoever"),
    )
)
NOT_ENGLISH = re.compile(
    r"(?<!there )\b(?:is|are) no\b(?! longer)|"
    r"\b(?:beside|besides|so many|one's own|of your own|gone on|goes on with|go on with|told apart|for good|meant over|"
    r"somebody|whoever|in another than|in the place of)\b",
    re.IGNORECASE,
)
NEITHER_NOUN_NOR_VERB = frozenset(
    ["found", "kept", "held", "told", "judged", "described", "looked_at", "given", "said", "shown", "meant", "beside"]
)
UNCLEAR_TEST = re.compile(r"^test_(so|and|what|who|which|then|those|these|it)_|_(what|who|nobody|somebody|is_no)_")


@pytest.fixture(scope="module")
def trees():
    """The syntax tree of every file, by its path."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in PYTHON}


def docstrings(trees):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text:
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text


def is_half_sentence(text):
    return re.sub(r"\W", "", text.split()[0]).lower() in HALF_SENTENCES


def assert_at_most(limit, places):
    assert len(places) <= limit, "\n".join(map(str, places))


def test_docstrings_are_whole_sentences(trees):
    assert_at_most(1, [f"{place} {text[:80]}" for place, text in docstrings(trees) if is_half_sentence(text)])
    assert is_half_sentence("Of what it is a report.")
    assert not is_half_sentence("Return the first line.")


def test_docstrings_and_pages_use_english_idioms(trees):
    texts = [*docstrings(trees), *((path.name, part) for path in PAGES for part in prose(path).split("\n\n"))]
    assert_at_most(2, [f"{place}: {match[0]}" for place, text in texts if (match := NOT_ENGLISH.search(text))])


def prose(path):
    """Return a page without code, formulas and addresses."""
    text = path.read_text(encoding="utf-8")
    return re.sub(r"```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$\n]*\$|\]\([^)]*\)", " ", text, flags=re.DOTALL)


def test_class_names_are_unique(trees):
    packages = ((path, tree) for path, tree in trees.items() if "src" in path.parts)
    names = Counter(node.name for _, tree in packages for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert_at_most(5, [name for name, count in names.items() if count > 1])


def test_functions_of_the_packages_are_named_by_verbs_or_nouns(trees):
    packages = ((path, tree) for path, tree in trees.items() if "src" in path.parts)
    functions = (
        (path, node) for path, tree in packages for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    )
    assert_at_most(1, [f"{path} {node.name}" for path, node in functions if node.name in NEITHER_NOUN_NOR_VERB])


def test_names_of_tests_stand_alone(trees):
    files = ((path, tree) for path, tree in trees.items() if "tests" in path.parts)
    tests = ((path, node.name) for path, tree in files for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    assert_at_most(
        0, [f"{path} {name}" for path, name in tests if name.startswith("test_") and UNCLEAR_TEST.search(name)]
    )
