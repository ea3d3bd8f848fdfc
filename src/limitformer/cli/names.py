"""Names that the shell completes: `check lla<Tab>`, `figure st<Tab>`. Nothing large is imported for them."""

from collections.abc import Iterable


def complete_shape(incomplete: str) -> list[str]:
    """Return the public shapes that begin so."""
    from limitformer.weightless.shapes import SHAPES

    return beginning(incomplete, SHAPES)


def complete_recipe(incomplete: str) -> list[str]:
    """Return the published recipes that begin so."""
    from limitformer.initialisation.recipes.recipe import recipes as known

    return beginning(incomplete, known())


def beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
