"""Small configurations at twice their width and twice their depth, with the rules muP and CompleteP in effect.

A type works if its parameters grow as `limitformer.transfer` expects, on the meta device, and if its stream is measured
with the rule in effect.
"""

from typing import Any

import limitformer as lf
from benchmarks.zoo.configurations import small_config
from benchmarks.zoo.examine import ABSENT, FAILS, REFUSED, WORKS, one_line
from limitformer import InputError
from limitformer.scaling.parametrisation import parametrise
from limitformer.scaling.sizes import DEPTH, WIDTH, at_size, present_size, shapes_of
from limitformer.subjects.subject import resolve

TOKENS = 8
RULES = {WIDTH: "mup", DEPTH: "completep"}


def scale(kind: str) -> dict[str, Any]:
    """Return the row of a type: verdicts of its width, its depth, and of the rules in effect."""
    row: dict[str, Any] = {"type": kind}
    try:
        config = small_config(kind)
        shapes_of(resolve(config))
    except Exception as error:  # a configuration or model of transformers may raise anything  # noqa: BLE001
        return row | {"verdict": ABSENT, "reason": one_line(error)}
    for over, rule in RULES.items():
        row |= {over: FAILS}
        try:
            size = present_size(config, over)
            assert size is not None
            row[f"changes of {over}"] = [*at_size(config, over, 2 * size).changes]
            row[over] = WORKS
            row[rule] = in_effect(config, over, size, rule)
        except InputError as error:
            row |= {over: row[over] if row[over] == WORKS else REFUSED, f"reason of {over}": str(error)[:300]}
        except Exception as error:  # as above, or a defect  # noqa: BLE001
            row |= {f"reason of {over}": one_line(error)}
    return row | {"verdict": WORKS if row[WIDTH] == row[DEPTH] == WORKS else REFUSED}


def in_effect(config: Any, over: str, size: int, rule: str) -> str:
    """Return whether a network is measured with the rule in effect; absent: not without it either."""
    result = parametrise(config, over, 2 * size, size, rule)
    try:
        lf.weightless.simulate(config, TOKENS, samples=1, seed=0, progress=False)
    except Exception:  # as above  # noqa: BLE001
        return ABSENT
    lf.weightless.simulate(result.model, TOKENS, samples=1, seed=0, overrides=result.overrides, progress=False)
    return WORKS
