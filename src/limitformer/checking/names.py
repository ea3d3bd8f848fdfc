"""The names of the verdicts, in a module that imports nothing large: options are checked against them at once."""

from limitformer.base.errors import nearest, require

VERDICTS = (
    *("not finite", "collapsed", "grows", "dies", "frozen", "uniform", "vanishing", "exploding", "swamped", "range"),
)  # those of `verdicts.RULES`, as a test sees to


def names_in(text: str | None) -> tuple[str, ...]:
    """Names of verdicts, from "collapsed,frozen" or "any".

    Raises:
        InputError: there is no verdict of a name.
    """
    if text == "any":
        return VERDICTS
    names = () if text is None else tuple(name.strip() for name in text.split(","))
    for name in names:
        hint = nearest(name, VERDICTS)
        require(name in VERDICTS, f"there is no verdict {name!r}; there are {', '.join(VERDICTS)}, or any.{hint}")
    return names
