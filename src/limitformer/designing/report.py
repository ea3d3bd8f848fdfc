"""The result of a design: what to set, how certain that is, and the region; as text, Python, a picture and data."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from scipy import special

from limitformer.checking.report import Report
from limitformer.designing.knobs import Knob
from limitformer.designing.objective import Array, Band, Objective
from limitformer.reports.report import AnyReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEVEL = 0.9  # of the interval of a risk


def clopper_pearson(misses: Any, samples: int) -> tuple[Array, Array]:
    """Return the ends of the 90 % interval of the probability of a miss; arrays of any shape."""
    k, n, tail = np.asarray(misses), samples, (1 - LEVEL) / 2
    low = np.where(k == 0, 0.0, special.betaincinv(k, n - k + 1, tail))
    return low, np.where(k == n, 1.0, special.betaincinv(k + 1, n - k, 1 - tail))


@dataclass(frozen=True)
class Risk:
    """The share of independent networks that miss an objective.

    The interval is that of Clopper and Pearson [Biometrika 26, 1934]. It holds the probability with a confidence of at
    least 90 %; its upper end is too low with a probability of at most 5 %.
    """

    misses: int
    samples: int

    @property
    def estimate(self) -> float:
        """The part that misses."""
        return self.misses / self.samples

    @property
    def interval(self) -> Band:
        """The ends of the 90 % interval."""
        low, high = clopper_pearson(self.misses, self.samples)
        return float(low), float(high)

    def __str__(self) -> str:
        """Return text such as `3 of 64 networks miss it: risk 0.047 (0.013 to 0.12)`."""
        low, high = self.interval
        return f"{self.misses} of {self.samples} networks miss it: risk {self.estimate:.2g} ({low:.2g} to {high:.2g})"


@dataclass(frozen=True)
class Outcome:
    """How networks at one setting do, from a seed that had no part in choosing the setting.

    Attributes:
        setting: the value of each knob.
        risk: how many networks miss the objective.
        missed: how many miss each part of it.
        values: 5 %, median and 95 % of each measured value.
        report: the report of `check`.
        exact: numbers that are known exactly, such as the probability of an explosion.
    """

    setting: dict[str, float]
    risk: Risk
    missed: dict[str, int]
    values: dict[str, tuple[float, float, float]]
    report: Report
    exact: dict[str, float]

    def cell(self, name: str) -> str:
        """Return the median of a value, its 5 % and 95 %, and how many networks miss it."""
        low, middle, high = self.values[name]
        missed = self.missed[name]
        return f"{middle:.3g} ({low:.3g} to {high:.3g}){f', {missed} miss' if missed else ''}"

    def record(self) -> dict[str, Any]:
        """Return the outcome as JSON holds it; numbers that are not finite become None."""
        low, high = self.risk.interval
        values = {name: [v if v - v == 0 else None for v in each] for name, each in self.values.items()}
        risk = {"misses": self.risk.misses, "samples": self.risk.samples, "estimate": self.risk.estimate}
        return {
            "setting": self.setting,
            "risk": {**risk, "interval": [low, high], "level": LEVEL},
            "missed": self.missed,
            "values": values,
            "verdicts": [str(verdict) for verdict in self.report.verdicts],
            **self.exact,
        }


LIMITS = "This is about the network at initialisation; it says nothing about what training makes of it."


@dataclass(frozen=True)
class Design(AnyReport):
    """The result of `limitformer.design`.

    Attributes:
        name: the name of the architecture.
        objective: the objective of the design.
        allowed: the largest risk that is allowed.
        knobs: the knobs that were varied, with the weights that each multiplies.
        present, chosen: how networks do at these settings; the same object if the present setting stays.
        region: over the knobs: `probability` that the objective is met, with its 90 % interval `low` to `high`; the
            mean `distance` from meeting it; `safe`, whether an allowed share of networks misses it; `best`, whether
            the cell is not distinguishable from the best one; and the exact probability of an explosion, if known.
        changes: `settings`, and factor, std before and after by pattern of weights' names.
        kind: "configuration", "function" or "Transformer".
        settings: the fields or arguments that were set beforehand.
    """

    FILES = "design"

    name: str
    objective: Objective
    allowed: float
    knobs: list[Knob]
    present: Outcome
    chosen: Outcome
    region: xr.Dataset
    changes: dict[str, Any]
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def found(self) -> bool:
        """Whether the chosen setting is safe: the upper end of its risk's interval is at most the allowed risk."""
        return self.chosen.risk.interval[1] <= self.allowed

    @property
    def best(self) -> dict[str, float]:
        """The chosen setting, by knob."""
        return self.chosen.setting

    @property
    def risk(self) -> Risk:
        """The risk of the chosen setting."""
        return self.chosen.risk

    @property
    def before(self) -> Report:
        """The report of `check` at the present setting."""
        return self.present.report

    @property
    def after(self) -> Report:
        """The report of `check` at the chosen setting."""
        return self.chosen.report

    def patch(self) -> dict[str, Any]:
        """Return the changes as `check` and `weightless.simulate` take them.

        `settings`: fields or arguments, also those that were set beforehand. `overrides`: {pattern of weights' names:
        std}. Laws that are not normal keep their kind in `python`, but become normal by these overrides.
        """
        weights: Mapping[str, tuple[float, float, float]] = self.changes["weights"]
        return {
            "settings": {**self.settings, **self.changes["settings"]},
            "overrides": {pattern: after for pattern, (_, _, after) in weights.items()},
        }

    def python(self) -> str:
        """Return lines to paste: they change fields or arguments, then the model that is made with them."""
        if self.kind == "Transformer":
            return transformer_lines(self.changes["settings"])
        return lines_of(self.kind, self.name.partition(" with ")[0], self.patch()["settings"], self.changes["weights"])

    def __str__(self) -> str:
        """Return one screen of text, what to set first."""
        fields = [f"  {name} = {value:.4g}" for name, value in self.changes["settings"].items()]
        rows = self.changes["weights"].items()
        weights = [f"  {name}: std {a:.4g} to {b:.4g} (× {factor:.4g})" for name, (factor, a, b) in rows]
        lines = [f"{self.name}: {self.verdict}", *(fields + weights or ["  nothing is changed"]), ""]
        lines += [f"  asked: {self.objective}", f"  present  {self.present.risk}", f"  chosen   {self.chosen.risk}", ""]
        lines.append(f"{'':>14}{'present':>36}{'chosen':>36}{'asked':>14}")
        for name, (low, high) in self.objective.bands.items():
            present, chosen = self.present.cell(name), self.chosen.cell(name)
            lines.append(f"{name:>14}{present:>36}{chosen:>36}{f'{low:g} to {high:g}':>14}")
        return "\n".join([*lines, "", *(f"  {line}" for line in (*self.explosion(), self.area(), LIMITS))])

    @property
    def verdict(self) -> str:
        """The first line of the text."""
        if self.chosen is self.present and self.found:
            return f"keep what you have; it meets the objective with a risk of at most {self.allowed:g}"
        if self.found:
            return "set " + ", ".join(f"{name} = {value:.4g}" for name, value in self.best.items())
        if self.region["safe"].any():
            return "NOT SAFE. What the grid found did not hold when judged afresh (nearest: a larger scan):"
        return "NOT SAFE. No setting of the grid meets the objective; the one that comes nearest:"

    def explosion(self) -> list[str]:
        """Return a line on the exact probability of an explosion, if it is known."""
        exact = self.chosen.exact
        if "explosion" not in exact:
            return []
        return [
            "In the limit of wide networks two tokens explode by this depth with probability "
            f"{exact['explosion_by_depth']:.2g}, ever with {exact['explosion']:.2g} (exact)."
        ]

    def area(self) -> str:
        """Return how much of the grid is safe."""
        safe, best = self.region["safe"], int(self.region["best"].sum())
        spans = ", ".join(f"{name} {safe[name].values[0]:g} to {safe[name].values[-1]:g}" for name in safe.dims)
        text = f"Grid ({spans}): {int(safe.sum())} of {safe.size} cells are safe; as good as the best: {best}."
        return f"{text} That is the end of the grid." if self.beyond() else text

    def beyond(self) -> str:
        """Return KNOB=VALUES beyond the end of the grid at which the nearest setting lies; empty if there are none."""
        if self.found:
            return ""
        for knob in self.knobs:
            values, best = self.region[knob.name].values, self.best[knob.name]
            for end, inner in (values[:2], values[:-3:-1]) if len(values) > 1 else ():
                more = sorted(float(f"{end * (end / inner) ** k:.4g}") for k in range(3))
                if best == end and more[-1] <= knob.most:
                    return f"{knob.name}={','.join(map(str, more))}"
        return ""

    def record(self) -> dict[str, Any]:
        """Return the design as JSON holds it."""
        return {
            "name": self.name,
            "found": self.found,
            "best": self.best,
            "objective": asdict(self.objective),
            "risk_allowed": self.allowed,
            "patch": self.patch(),
            "python": self.python(),
            "weights": {knob.name: list(knob.weights) for knob in self.knobs if knob.weights},
            "present": self.present.record(),
            "chosen": self.chosen.record(),
            "about": LIMITS,
            "provenance": dict(self.region.attrs),
        }

    def dataset(self) -> xr.Dataset:
        """Return the region of settings."""
        return self.region

    def draw(self) -> "Figure":
        """Return the picture: the region of settings, and curves before and after."""
        from limitformer.designing.picture import draw  # with Matplotlib, which printing a design does not need

        title = f"{self.name}: {self.verdict}"
        return draw(title, self.region, self.objective, self.allowed, self.present, self.chosen)


SCALE = '''

def scale_weights(model):
    """Scale the weights once, after the model was made and before it is trained."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            factor = next((factor for pattern, factor in FACTORS.items() if fnmatchcase(name, pattern)), 1.0)
            parameter.mul_(factor)
'''
IMPORTS = "from fnmatch import fnmatchcase\n\nimport torch\n\n"
PYTHON = f"{IMPORTS}{{fields}}\n{{factors}}\n\n\n{{setter}}\n{SCALE}"

NEW = "new_build"
SETTERS = {
    "configuration": '''\
def change_fields(config):
    """Set the fields, before the model is made."""
    for name, value in FIELDS.items():
        setattr(config, name, value)''',
    "function": '''\
import functools


@functools.wraps(functools.partial({name}, **FIELDS))
def new_build(*args, **options):
    """Make the model with these arguments, and scale its weights."""
    model = {name}(*args, **{{**FIELDS, **options}})
    scale_weights(model)
    return model''',
}


def lines_of(kind: str, name: str, fields: Mapping[str, Any], weights: Mapping[str, tuple[float, float, float]]) -> str:
    """Return lines that set the fields of a configuration, or the arguments of the function `name`, and factors."""
    rows = [f'    "{key}": {value!r},' for key, value in fields.items()]
    parts = {"fields": block("FIELDS", rows), "factors": block("FACTORS", factor_lines(weights))}
    text, new = PYTHON.format(**parts, setter=SETTERS[kind].format(name=name)), name_after(name)
    if new == NEW:
        return text
    names = r"\b(FACTORS|FIELDS|scale_weights)\b"  # those of the earlier lines stay
    return re.sub(names, rf"\1{new.removeprefix(NEW)}", text).replace(f"def {NEW}(", f"def {new}(")


def name_after(name: str) -> str:
    """Return the name of the function that the lines for `name` make.

    >>> name_after("build"), name_after("new_build"), name_after("new_build_2")
    ('new_build', 'new_build_2', 'new_build_3')
    """
    again = re.fullmatch(rf"{NEW}(?:_(\d+))?", name)
    return f"{NEW}_{int(again[1] or 1) + 1}" if again else NEW


def transformer_lines(fields: Mapping[str, float]) -> str:
    """Return lines that replace γ and τ₀ of a Transformer."""
    inside = [f"{name}={value!r}" for name, value in fields.items() if name != "tau0"]
    if "tau0" in fields:
        inside.append(f"attention=replace(model.attention, tau0={fields['tau0']!r})")
    return f"from dataclasses import replace\n\nmodel = replace({', '.join(['model', *inside])})\n"


def factor_lines(weights: Mapping[str, tuple[float, float, float]]) -> list[str]:
    """Return the entries of FACTORS, each with the std before and after it."""
    return [f'    "{name}": {factor!r},  # std {a:.4g} to {b:.4g}' for name, (factor, a, b) in weights.items()]


def block(name: str, lines: list[str]) -> str:
    """Return a dict, one entry a line."""
    return "\n".join([f"{name} = {{", *lines, "}"]) if lines else f"{name} = {{}}"
