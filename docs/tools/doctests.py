"""Examples in docstrings as code: griffe knows them under a heading of their own alone."""

import re

from griffe import Extension, Module, Object

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1(?:(?!```).*\S.*))*", re.MULTILINE)


class Doctests(Extension):
    """Every `>>>` up to the next empty line stands between fences."""

    def on_package(self, *, pkg: Module, **_: object) -> None:
        """Called once, when all files are read."""
        fence(pkg)


def fence(place: Object) -> None:
    """In its docstring, and in those of all that is in it."""
    if place.docstring:
        place.docstring.value = EXAMPLE.sub(fenced, place.docstring.value)
    for member in place.members.values():
        if not member.is_alias:
            fence(member)


def fenced(found: re.Match[str]) -> str:
    """The example, with a fence as far in as it is."""
    return f"{found[1]}```pycon\n{found[0]}\n{found[1]}```"
