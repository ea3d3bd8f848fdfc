"""The first training steps of networks, by learning rate, with the verdicts on them."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from limitformer.checking.curves import edges, kind_and_block
from limitformer.checking.network import frozen_in_words
from limitformer.checking.step_verdicts import by_rate, stated_rate
from limitformer.checking.thresholds import STEP_THRESHOLDS, STEP_VERDICTS, failing
from limitformer.reports.page import TextTable
from limitformer.reports.report import csv_of, finite_values
from limitformer.reports.verdict import ANY, BROKEN, FINE, GRADES, NOTE, WATCH, Verdict, number_text
from limitformer.stepping.noise import noise_rows
from limitformer.stepping.simulate import SAME
from limitformer.witness import Witness

COLUMNS: Mapping[str, tuple[str, str]] = {  # of the table by rate: the head in the terminal, and the meaning
    "rate": ("rate", "learning rate"),
    "falls": ("falls", "networks whose loss falls, while that of the unseen batch does not explode"),
    "falls_alone": ("falls alone", "networks whose loss falls, whatever that of the unseen batch does"),
    "share": ("share", "their share"),
    "low": ("low", "of Wilson's interval of the share, approximately 95 % before a rate is selected"),
    "high": ("high", "of that interval"),
    "explodes": ("explodes", "networks whose loss is not finite, or above a multiple of its start, at some step"),
    "unseen_explodes": ("unseen explodes", "networks for which the same is true of the loss of the unseen batch"),
    "loss_first": ("before", "of the batch of the first step, before it; median over networks, as all that follow"),
    "loss_last": ("after", "loss of the batch after the last step"),
    "unseen_first": ("before", "loss of a batch that no step sees, before the first step"),
    "unseen_last": ("after", "loss of that batch after the last step"),
    "gradient_first": ("gradient", "norm of all gradients together, before the first step"),
    "clipping_least": ("clipping", "smallest factor of clipped gradients; 1: they are not clipped"),
    "stream_change": ("stream", "change of the stream at the last layer over its size at the start"),
    "output_change": ("output", "root mean square of the change of the output"),
    "largest": ("largest", "largest |x| of the stream of all layers, after the last step"),
    "largest_logit": ("logit", "largest logit of all heads, after the last step"),
}
SHOWN = ("falls", "explodes", "loss_first", "loss_last", "unseen_first", "unseen_last", "stream_change", "largest")
WATCHED = {
    "loss": "loss of the batch",
    "gradient_norm": "gradient norm",
    "correlation": "correlation",
    "largest_logit": "attention logit",
}
WATCHED_AT = (0, 1, 3, 10, 30)  # steps done, and the last


@dataclass(frozen=True)
class TrainedNetworks:
    """The first training steps of networks, and the verdicts on them; `StepsReport` lists the attributes."""

    name: str
    data: xr.Dataset
    verdicts: list[Verdict]
    about: Mapping[str, Any] = field(default_factory=dict)
    witness: Witness | None = None

    @property
    def proof(self) -> str:
        """The sentence of the witness; empty without one."""
        return "" if self.witness is None else self.witness.in_words(self.data.sizes["sample"])

    @property
    def grade(self) -> str:
        """fine, watch or broken, the worst of all verdicts; note if the rate is not decided."""
        worst = max((one.grade for one in self.verdicts), key=GRADES.index, default=FINE)
        return FINE if worst == NOTE and self.verdicts[0].grade != NOTE else worst

    @property
    def partial(self) -> bool:
        """Whether networks that were asked for are missing."""
        return self.data.sizes["sample"] < int(self.about.get("asked", 0))

    @property
    def heading(self) -> str:
        """Optimiser, rates, steps, networks, tokens and the loss that ran."""
        rates, steps, count = (self.data.sizes[name] for name in ("rate", "step", "sample"))
        of = f" of {self.about['asked']}" if self.partial else ""
        parts = [
            f"{self.about.get('optimizer', 'an optimiser')}, {rates} rate{'' if rates == 1 else 's'}",
            f"{steps - 1} step{'' if steps == 2 else 's'}",
            f"{count}{of} network{'' if count == 1 and not of else 's'}",
            f"{self.about.get('batch', 'a batch')}, {self.about.get('batches', SAME)} batches",
        ]
        parts += [f"loss: {self.about['loss']}"] if "loss" in self.about else []
        partly = "; PARTIAL, as it was interrupted" if self.partial else ""
        return ", ".join(parts) + partly

    @property
    def caveat(self) -> str:
        """The limits of these numbers."""
        size = str(self.about.get("batch", "tokens"))
        notes = [
            f"Gradients come from {'this' if size.startswith('1 ') else 'these'} {size}; a larger batch has other "
            "gradients (Adam's signs, Muon's directions), and nothing is said about later steps."
        ]
        if frozen := int(self.about.get("frozen", 0)):
            notes.append(f"{frozen_in_words(frozen)}.")
        if "stream" not in self.data:
            notes.append("No blocks were found in the module, so nothing is said of its stream.")
        return " ".join(notes)

    def noise(self) -> list[dict[str, Any]]:
        """Return |G|², tr Σ and the noise scale with its interval, by kind of weight and step, at the stated rate."""
        return noise_rows(self.data.isel(rate=stated_rate(self.table())), lambda name: kind_and_block(name)[0])

    def table(self) -> xr.Dataset:
        """Return counts and medians by rate; `columns()` says what they mean."""
        return by_rate(self.data)

    def expected(self) -> tuple[float, list[dict[str, float]]]:
        """Return the stated rate, and what to watch in training on these batches: a row for each of a few steps.

        Each number is that of the middle network, with the ends of the interval in which nine of ten further networks
        lie (`curves.edges`).
        """
        place, last = stated_rate(self.table()), self.data.sizes["step"] - 1
        data = self.data.isel(rate=place)
        steps = sorted({last, *(step for step in WATCHED_AT if step < last)})
        rows: list[dict[str, float]] = [{"step": step} for step in steps]
        for name in WATCHED:
            if name in data:
                each = data[name].isel(layer=-1) if name == "correlation" else data[name]
                each = each.max(set(each.dims) - {"sample", "step"})
                for row in rows:
                    ends = edges(each.isel(step=row["step"]), name).values.tolist()
                    row |= {f"{name}_low": ends[0], name: ends[1], f"{name}_high": ends[2]}
        return float(self.data["rate"][place]), rows

    def watched(self) -> TextTable:
        """Return `expected` in words; intervals need two networks or more."""
        rate, rows = self.expected()
        names = [name for name in WATCHED if name in rows[0]]
        within = "nine of ten networks lie within" if self.data.sizes["sample"] > 1 else "one network"
        words = f"What to watch at a rate of {number_text(rate)}; {within}"

        def cell(row: dict[str, float], name: str) -> str:
            low, middle, high = (row[f"{name}{end}"] for end in ("_low", "", "_high"))
            if np.isnan(middle):
                return "–"
            return f"{number_text(low)} to {number_text(high)}" if np.isfinite(high - low) else number_text(middle)

        head = ["step", *(WATCHED[name] for name in names)]
        return TextTable(words, head, [[f"{row['step']}", *(cell(row, name) for name in names)] for row in rows])

    def rows(self) -> list[dict[str, float]]:
        """Return the table by rate, a row for each rate."""
        table = self.table()
        names = [name for name in COLUMNS if name in table or name == "rate"]
        return [{name: table[name].values[k].item() for name in names} for k in range(table.sizes["rate"])]

    @staticmethod
    def columns() -> dict[str, str]:
        """Return what the columns of the table by rate mean."""
        return {name: meaning for name, (_, meaning) in COLUMNS.items()}

    def failed(self, names: str | None = "any") -> list[Verdict]:
        """Return the verdicts of the grade watch or broken that have these names or grades, separated by commas.

        Raises:
            InputError: a name is neither a verdict nor a grade.
        """
        wanted = set(failing(names, STEP_VERDICTS))
        every = bool(wanted & {WATCH, ANY})
        bad = [one for one in self.verdicts if one.grade in (WATCH, BROKEN)]
        return [one for one in bad if every or wanted & {one.name, one.grade}]

    def csv(self) -> str:
        """Return the table by rate as CSV; numbers that are not finite are written as nan and inf."""
        rows = self.rows()
        return csv_of(list(rows[0]), rows)

    def record(self) -> dict[str, Any]:
        """Return the report as JSON holds it: numbers that are not finite are left out."""
        return {
            "name": self.name,
            "grade": self.grade,
            "partial": self.partial,
            "heading": self.heading,
            "caveat": self.caveat,
            "verdicts": [finite_values(asdict(verdict)) for verdict in self.verdicts],
            "rates": [finite_values(row) for row in self.rows()],
            "expected": [finite_values(row) for row in self.expected()[1]],
            "noise": [finite_values(row) for row in self.noise()],
            "thresholds": {name: asdict(each) for name, each in STEP_THRESHOLDS.items()},
            "witness": None if self.witness is None else self.witness.record(),
            "groups": json.loads(self.about.get("groups", "[]")),
            "about": finite_values({name: each for name, each in self.about.items() if name != "groups"}),
        }

    def dataset(self) -> xr.Dataset:
        """Return the data as NetCDF holds them, with the provenance."""
        data = self.data
        flags = {name: each.astype(np.int8) for name, each in data.variables.items() if each.dtype == bool}
        data = data.assign_coords({name: (each.dims, each.values) for name, each in flags.items()})
        return data.assign_attrs(finite_values(self.about))
