"""Functions with the name of their file: `limitformer.checking.check` is the function once it has been imported.

Python gives the name to what the package imports last, the reader of sources (griffe) to the file. Here the function
comes back.
"""

from typing import Any

from griffe import Alias, Extension, GriffeLoader, Module


class Shadows(Extension):
    """An extension that restores names that a package imports from a file of the same name."""

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **_: object) -> None:
        """Restore the names after griffe has read the package."""
        loader.resolve_aliases(implicit=True, external=False)
        hidden = [(place, name, file) for place in packages(pkg) for name, file in shadowing(place)]
        for place, name, file in hidden:
            place.members[name] = Alias(name, file.members[name], parent=place)
        for place in packages(pkg):
            for name, member in place.members.items():
                if (
                    member.is_alias
                    and member.resolved
                    and is_file_of(name, member.target)
                    and not is_own(place, member)
                ):
                    place.members[name] = Alias(name, member.target.members[name], parent=place)


def packages(place: Module) -> list[Module]:
    """Yield the package and all packages in it."""
    inner = [each for each in place.members.values() if not each.is_alias and each.is_module and each.is_init_module]
    return [place, *(package for each in inner for package in packages(each))]


def shadowing(place: Module) -> list[tuple[str, Module]]:
    """Return the names that the package imports from files of the same name."""
    own = {name for name, source in place.imports.items() if source == f"{place.path}.{name}"}
    return [
        (name, member)
        for name, member in place.members.items()
        if not member.is_alias and is_file_of(name, member) and name in place.imports and name not in own
    ]


def is_file_of(name: str, member: Any) -> bool:
    """Whether the module defines an object of its own name."""
    return member.is_module and name in member.members


def is_own(place: Module, member: Any) -> bool:
    return member.target.path == f"{place.path}.{member.name}"
