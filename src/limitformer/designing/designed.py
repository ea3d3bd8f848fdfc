"""What a design found: what to set, how sure that is, and the region; as text, lines of Python, a picture, data."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xarray as xr

from limitformer.base.files import check_writable, write_whole
from limitformer.checking.report import Report
from limitformer.designing.knobs import Knob
from limitformer.designing.objective import Objective
from limitformer.designing.outcome import Outcome, Risk
from limitformer.results.storage import save

LIMITS = "This is about the network at initialisation; it says nothing about what training makes of it."


@dataclass(frozen=True)
class Design:
    """What `limitformer.design` returns.

    Attributes:
        name: of the architecture.
        objective: what was asked.
        allowed: the risk that was asked.
        knobs: what was turned; `weights` says which weights were found.
        present, chosen: what networks do at these settings; the same object if the present setting is kept.
        region: over the knobs: `probability` that the objective is met, `samples` (0: read from the cells around),
            `distance` from meeting it, `safe`; and the exact probability of an explosion, where it is known.
        changes: `settings`, and factor, std before and after by pattern of weights' names.
        kind: "configuration" or "Transformer".
    """

    name: str
    objective: Objective
    allowed: float
    knobs: list[Knob]
    present: Outcome
    chosen: Outcome
    region: xr.Dataset
    changes: dict[str, Any]
    kind: str

    @property
    def found(self) -> bool:
        """Whether the chosen setting is safe: the upper end of its risk's interval is at most what was allowed."""
        return self.chosen.risk.interval[1] <= self.allowed

    @property
    def best(self) -> dict[str, float]:
        """The chosen setting, by knob."""
        return self.chosen.setting

    @property
    def risk(self) -> Risk:
        """Of the chosen setting."""
        return self.chosen.risk

    @property
    def before(self) -> Report:
        """What `check` says of the present setting."""
        return self.present.report

    @property
    def after(self) -> Report:
        """What `check` says of the chosen one."""
        return self.chosen.report

    def patch(self) -> dict[str, Any]:
        """What to change, as `check` and `weightless.simulate` take it.

        `settings`: fields of the configuration. `overrides`: {pattern of weights' names: std}. Laws that are not
        normal keep their kind in `python`, and become normal by these.
        """
        weights: Mapping[str, tuple[float, float, float]] = self.changes["weights"]
        return {
            "settings": dict(self.changes["settings"]),
            "overrides": {pattern: after for pattern, (_, _, after) in weights.items()},
        }

    def python(self) -> str:
        """Lines to paste: they change the configuration's fields, and then the model that was made from it."""
        if self.kind == "Transformer":
            return lines_of_transformer(self.changes["settings"])
        fields = [f'    "{name}": {value!r},' for name, value in self.changes["settings"].items()]
        rows = self.changes["weights"].items()
        weights = [f'    "{name}": {factor!r},  # std {a:.4g} to {b:.4g}' for name, (factor, a, b) in rows]
        return PYTHON.format(fields=block("FIELDS", fields), factors=block("FACTORS", weights))

    def __str__(self) -> str:
        """One screen, what to set first."""
        lines = [f"{self.name}: {self.verdict}", *self.lines_of_changes(), "", f"  asked: {self.objective}"]
        lines += [f"  present  {self.present.risk}", f"  chosen   {self.chosen.risk}", "", *self.table()]
        lines += [f"  {line}" for line in (*self.exact(), self.area(), LIMITS)]
        return "\n".join(lines)

    @property
    def verdict(self) -> str:
        """The first line."""
        if self.chosen is self.present and self.found:
            return f"keep what you have; it meets the objective with a risk of at most {self.allowed:g}"
        if self.found:
            return "set " + ", ".join(f"{name} = {value:.4g}" for name, value in self.best.items())
        if self.region["safe"].any():
            return "NOT SAFE. What the grid found did not hold when judged afresh (nearest: a larger scan):"
        return "NOT SAFE. No setting of the grid meets the objective; the one that comes nearest:"

    def lines_of_changes(self) -> list[str]:
        """Each field, and each kind of weight with its std."""
        fields = [f"  {name} = {value:.4g}" for name, value in self.changes["settings"].items()]
        rows = self.changes["weights"].items()
        weights = [f"  {name}: std {a:.4g} to {b:.4g} (× {factor:.4g})" for name, (factor, a, b) in rows]
        return fields + weights or ["  nothing is changed"]

    def table(self) -> list[str]:
        """What was measured: medians, 5 % to 95 %, and how many miss it."""
        lines = [f"{'':>14}{'present':>36}{'chosen':>36}{'asked':>14}"]
        for name, (low, high) in self.objective.bands.items():
            cells = [cell(outcome, name) for outcome in (self.present, self.chosen)]
            lines.append(f"{name:>14}{cells[0]:>36}{cells[1]:>36}{f'{low:g} to {high:g}':>14}")
        return [*lines, ""]

    def exact(self) -> list[str]:
        """Known in closed form."""
        found = self.chosen.beside
        if "explosion" not in found:
            return []
        return [
            "In the limit of wide networks two tokens explode by this depth with probability "
            f"{found['explosion_by_depth']:.2g}, ever with {found['explosion']:.2g} (exact)."
        ]

    def area(self) -> str:
        """How much of the grid is safe."""
        safe = self.region["safe"]
        spans = ", ".join(f"{name} {safe[name].values[0]:g} to {safe[name].values[-1]:g}" for name in safe.dims)
        return f"{int(safe.sum())} of {safe.size} settings are safe on the grid ({spans})."

    def record(self) -> dict[str, Any]:
        """What JSON holds."""
        return {
            "name": self.name,
            "found": self.found,
            "best": self.best,
            "objective": asdict(self.objective),
            "risk_allowed": self.allowed,
            "patch": self.patch(),
            "python": self.python(),
            "weights": {knob.name: list(knob.weights) for knob in self.knobs if knob.weights},
            **{name: summary(outcome) for name, outcome in (("present", self.present), ("chosen", self.chosen))},
            "about": LIMITS,
            "provenance": dict(self.region.attrs),
        }

    def save(self, folder: str | Path) -> list[Path]:
        """Write design.json, design.png and design.nc into a folder, each whole or not at all; their paths.

        Raises:
            InputError: the folder cannot be written.
        """
        from limitformer.designing.picture import draw
        from limitformer.plot import style

        place = Path(folder)
        check_writable(place)
        record, picture = place / "design.json", place / "design.png"
        text = json.dumps(self.record(), indent=2, ensure_ascii=False)
        write_whole(record, lambda path: path.write_text(text, encoding="utf-8"))
        with style():
            drawing = draw(self)
            write_whole(picture, lambda path: drawing.savefig(path))
        return [record, picture, save(self.region, place / "design.nc")]


PYTHON = '''\
from fnmatch import fnmatchcase

import torch

{fields}
{factors}


def change_fields(config):
    """Before the model is made."""
    for name, value in FIELDS.items():
        setattr(config, name, value)


def scale_weights(model):
    """Once, after the model was made from that configuration and before it is trained."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            factor = next((factor for pattern, factor in FACTORS.items() if fnmatchcase(name, pattern)), 1.0)
            parameter.mul_(factor)
'''


def lines_of_transformer(fields: Mapping[str, float]) -> str:
    """A Transformer with other γ and τ₀."""
    inside = [f"{name}={value!r}" for name, value in fields.items() if name != "tau0"]
    if "tau0" in fields:
        inside.append(f"attention=replace(model.attention, tau0={fields['tau0']!r})")
    return f"from dataclasses import replace\n\nmodel = replace({', '.join(['model', *inside])})\n"


def block(name: str, lines: list[str]) -> str:
    """A dict, one entry a line."""
    return "\n".join([f"{name} = {{", *lines, "}"]) if lines else f"{name} = {{}}"


def cell(outcome: Outcome, name: str) -> str:
    """Median, 5 % to 95 %, and how many networks miss it."""
    low, middle, high = outcome.values[name]
    missed = outcome.missed[name]
    return f"{middle:.3g} ({low:.3g} to {high:.3g}){f', {missed} miss' if missed else ''}"


def summary(outcome: Outcome) -> dict[str, Any]:
    """As JSON has it; numbers that are not finite are left out."""
    low, high = outcome.risk.interval
    values = {name: [v if v - v == 0 else None for v in each] for name, each in outcome.values.items()}
    risk = {"misses": outcome.risk.misses, "samples": outcome.risk.samples, "estimate": outcome.risk.estimate}
    return {
        "setting": outcome.setting,
        "risk": {**risk, "interval": [low, high], "level": 0.9},
        "missed": outcome.missed,
        "values": values,
        "verdicts": [str(verdict) for verdict in outcome.report.verdicts],
        **outcome.beside,
    }
