"""The names of the verdicts, in a module that imports nothing large: options are checked against them at once."""

from limitformer.base.errors import nearest, require
from limitformer.checking.thresholds import BROKEN, WATCH

VERDICTS = (  # those of `verdicts.RULES`, as a test sees to
    *("not finite", "loss", "dead", "collapsed", "grows", "dies", "frozen", "uniform", "vanishing", "exploding"),
    *("swamped", "range"),
)
ANY = "any"


def failing(text: str | None) -> tuple[str, ...]:
    """Return the names in "collapsed,frozen", "broken", "watch" or "any".

    Raises:
        InputError: there is no verdict or grade of a name.
    """
    names = () if text is None else tuple(name.strip() for name in text.split(","))
    known = (*VERDICTS, WATCH, BROKEN, ANY)
    for name in names:
        require(name in known, f"there is no verdict {name!r}; there are {', '.join(known)}.{nearest(name, known)}")
    return names
