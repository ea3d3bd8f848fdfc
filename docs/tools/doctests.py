"""Fences around examples in docstrings: griffe recognises examples only under their own heading."""

import re

from griffe import Extension, Module, Object

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1(?:(?!```).*\S.*))*", re.MULTILINE)


class Doctests(Extension):
    """An extension that fences every `>>>` up to the next empty line."""

    def on_package(self, *, pkg: Module, **_: object) -> None:
        """Fence all examples after griffe has read the package."""
        fence(pkg)


def fence(place: Object) -> None:
    """Fence the examples in an object's docstring and in those of its members."""
    if place.docstring:
        place.docstring.value = EXAMPLE.sub(fenced, place.docstring.value)
    for member in place.members.values():
        if not member.is_alias:
            fence(member)


def fenced(found: re.Match[str]) -> str:
    """Return the example inside a fence with the same indentation."""
    return f"{found[1]}```pycon\n{found[0]}\n{found[1]}```"
