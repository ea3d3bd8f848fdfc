"""Several networks side by side: one table, one page, one dataset with a dimension `model`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from limitformer.base.errors import require
from limitformer.checking.check import check
from limitformer.checking.curves import CURVES, LAYERWISE, layer_numbers, typical
from limitformer.checking.report import Report
from limitformer.checking.thresholds import FORMAT_VERDICTS
from limitformer.reports.figures import Line, Panel, kind_of
from limitformer.reports.page import Figures, Heading, Page, Part, Section, TextTable
from limitformer.reports.report import AnyReport, csv_of, finite_values
from limitformer.reports.verdict import FINE, NOTE, TRAINED, Verdict, aligned, number_text

if TYPE_CHECKING:
    import pandas as pd

COLUMNS: Mapping[str, str] = {  # of the table, with what they mean
    "grade": "the worst grade of its verdicts",
    "verdicts": "their names",
    "blocks": "number of blocks",
    "parameters": "number of parameters of the law",
    "loss": "at initialisation, the median over samples",
    "chance": "loss of a uniform guess",
    "stream": "size at the end over that before the first block",
    "correlation": "mean correlation of tokens at the end",
    "rank": "effective rank of the tokens at the end, over their number",
    "logit_std": "standard deviation of a row's logits in the widest block",
    "effective_tokens": "that attention takes in, over those it sees, in the narrowest block",
    "largest": "largest activation of all layers",
    "largest_logit": "of all heads",
    "gradient_ratio": "gradient of the stream after the first block over that at the end",
    "formats": "number formats without an alarm, of those that were asked for",
}
ABOUT = "Medians over samples; curves by relative depth, from 0 to 1."
WIDTH = 80  # of the legend below the table


@dataclass(frozen=True)
class Comparison(AnyReport):
    """The result of `limitformer.compare`.

    Attributes:
        reports: by the name of the network, in the order in which they were given.
    """

    FILES = "compare"

    reports: Mapping[str, Report]

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return a row for each network; `COLUMNS` says what the columns mean."""
        return {name: row_of(report) for name, report in self.reports.items()}

    def frame(self) -> "pd.DataFrame":
        """Return the table as a DataFrame of pandas."""
        import pandas as pd

        return pd.DataFrame.from_dict(self.rows(), orient="index", columns=list(COLUMNS)).rename_axis("model")

    def csv(self) -> str:
        """Return the table as comma-separated values."""
        return csv_of(["model", *COLUMNS], ({"model": name, **row} for name, row in self.rows().items()))

    def dataset(self) -> xr.Dataset:
        """Return the curves of all networks, last stacks, (model, sample, layer, …); NaN where a network has fewer.

        An existing network has one sample. Gradients by kind of weight are left out.
        """
        parts = []
        for report in self.reports.values():
            known = [name for name in report.curves.data_vars if name in LAYERWISE]
            curves = report.curves[known].reset_coords(drop=True)
            places = {dim: np.arange(size) for dim, size in curves.sizes.items()}
            places |= {"block": np.arange(1, curves.sizes["block"] + 1)} if "block" in curves.sizes else {}
            parts.append(curves.assign_coords(places))
        named = [part.expand_dims(model=[name]) for name, part in zip(self.reports, parts, strict=True)]
        data = xr.merge(named, join="outer", compat="no_conflicts", combine_attrs="drop").sel(model=list(self.reports))
        columns = {name: [row[name] for row in self.rows().values()] for name in ("grade", "verdicts")}
        return data.assign_coords({name: ("model", values) for name, values in columns.items()})

    def record(self) -> dict[str, Any]:
        """Return the comparison as JSON holds it."""
        rows = self.rows().items()
        return {
            "table": {name: finite_values(row) for name, row in rows},
            "reports": {name: report.record() for name, report in self.reports.items()},
        }

    def failed(self, names: str | None = "any") -> dict[str, list[Verdict]]:
        """Return the verdicts of each network that fail a check for `names`, as `Report.failed`."""
        return {model: failures for model, report in self.reports.items() if (failures := report.failed(names))}

    def __str__(self) -> str:
        """Return one line for each network, then its verdicts."""
        columns = ["blocks", "loss", "stream", "correlation", "rank", "logit_std", "effective_tokens", "gradient_ratio"]
        columns += ["formats"] if any(report.formats is not None for report in self.reports.values()) else []
        head = ["", "grade", *(short(name) for name in columns)]
        body = [
            [
                f"{report.verdicts[0].sign} {name}",
                str(row["grade"]),
                *(in_units(key, row[key], report) for key in columns),
            ]
            for (name, report), row in zip(self.reports.items(), self.rows().values(), strict=True)
        ]
        lines = aligned([head, *body], left=2)  # names to the left, numbers to the right
        lines += ["", *wrap("; ".join(f"{short(name)}: {COLUMNS[name]}" for name in columns[2:]), WIDTH)]
        for name, report in self.reports.items():
            faults = [one for one in report.verdicts if one.name != FINE]
            lines += ["", name, *(f"  {one.sign} {one.said}" for one in faults)] if faults else []
        return "\n".join(lines)

    def contents(self) -> Page:
        """Return what the page shows."""
        head = ["model", *(short(name) for name in COLUMNS)]
        rows = [[name, *(text_of(value) for value in row.values())] for name, row in self.rows().items()]
        verdicts: list[Part] = []
        for name, report in self.reports.items():
            verdicts += [Heading(name), *(f"{one.sign} {one.said}" for one in report.verdicts)]
        meaning = [[short(name), meaning] for name, meaning in COLUMNS.items()]
        title = f"{len(self.reports)} networks"
        sections = [
            Section("Table", [TextTable("Table of networks", head, rows)]),
            Section("Verdicts", verdicts),
            Section("By depth", [Figures(self.panels(), [(kind_of(k), name) for k, name in enumerate(self.reports)])]),
            Section("Columns", [TextTable("Meaning of the columns", ["column", "meaning"], meaning)]),
        ]
        return Page("check", title, title, [ABOUT], sections)

    def panels(self) -> list[Panel]:
        """Return a panel for each curve."""
        result = []
        for name, curve in CURVES.items():
            lines = []
            for k, (model, report) in enumerate(self.reports.items()):
                if not curve.title or name not in report.curves or "sublayer" in report.curves[name].dims:
                    continue
                depth = layer_numbers(report.curves[name]) / max(1, report.curves.sizes["layer"] - 1)
                lines.append(Line(kind_of(k), model, depth, typical(report.curves[name])))
            result.append(Panel(curve.title, curve.note, "depth", tuple(lines), None, curve.scale == "artanh"))
        return result


def compare(models: Any, text: Any = None, **options: Any) -> Comparison:
    """Check several networks on the same tokens.

    Args:
        models: subjects of `check`, in a list, or by name in a dictionary.
        text: the argument of `check`, for all of them.
        options: further arguments of `check`, for all of them.

    Raises:
        InputError: an argument cannot be used; the message begins with the name of the network.

    >>> import limitformer as lf
    >>> small = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    >>> depths = {f"{depth} layers": small | {"num_hidden_layers": depth} for depth in (2, 4)}
    >>> lf.compare(depths, tokens=8, samples=2, progress=False).frame()["blocks"].to_dict()
    {'2 layers': 2, '4 layers': 4}
    """
    require("against" not in options, "compare has no option against. Nearest: one more model.")
    named = dict(models) if isinstance(models, Mapping) else dict[str, Any]()
    single = isinstance(models, Mapping) and "model_type" in models
    require(not single, "models must be several; got one configuration. Nearest: a list of it.")
    names = all(isinstance(name, str) and name.isprintable() for name in named)
    require(names, f"names of models must be text of one line; got {list(named)!r:.60}.")
    several = bool(models) and isinstance(models, Mapping | list | tuple)
    require(several, f"models must be a list or a dictionary of at least one; got {models!r:.60}.")
    reports = dict[str, Report]()
    for name, model in named.items() or [(None, each) for each in models]:
        report = check(model, text, **options)
        if name is not None:
            report = replace(report, name=name)
        reports[distinct(report.name, reports)] = report
    return Comparison(reports)


def distinct(name: str, taken: Mapping[str, Any]) -> str:
    """Return the name, with a number if it is taken."""
    names = (name if k == 1 else f"{name} ({k})" for k in range(1, len(taken) + 2))
    return next(each for each in names if each not in taken)


def row_of(report: Report) -> dict[str, Any]:
    """Return the columns of one network; None where something was not measured."""
    curves = report.curves
    correlation, rank = (
        finite(typical(curves[name])[-1]) if name in curves else None for name in ("correlation", "effective_rank")
    )
    after = min(1, curves.sizes["layer"] - 1)
    size = typical(curves["size"])
    gradient = typical(curves["stream_gradient"]) if "stream_gradient" in curves else None
    share = None
    if "tokens_seen" in curves:
        share = least(typical(curves["effective_tokens"]) / typical(curves["tokens_seen"]))
    return {
        "grade": TRAINED if report.trained else report.grade,
        "verdicts": ", ".join(dict.fromkeys(one.name for one in report.verdicts)),
        "blocks": curves.sizes["layer"] - 1,
        "parameters": report.laws.count if report.laws is not None else None,
        "loss": float(curves["loss"].median()) if "loss" in curves else None,
        "chance": report.about.get("chance"),
        "stream": ratio(size[-1], size[0]),
        "correlation": correlation,
        "rank": None if rank is None else rank / report.about["tokens"],
        "logit_std": most(curves, "logit_std"),
        "effective_tokens": share,
        "largest": most(curves, "largest"),
        "largest_logit": most(curves, "largest_logit"),
        "gradient_ratio": None if gradient is None else ratio(gradient[after], gradient[-1]),
        "formats": None if report.formats is None else sound_formats(report),
    }


def sound_formats(report: Report) -> str:
    """Return the names of the number formats that no alarm is about."""
    assert report.formats is not None
    found = (one for one in report.verdicts if one.name in FORMAT_VERDICTS and one.grade != NOTE)
    alarms = {one.said.split()[0].strip(":") for one in found}
    return " ".join(name for name in report.formats["format"].values.tolist() if name not in alarms) or "none"


def most(curves: xr.Dataset, name: str) -> float | None:
    values = typical(curves[name]) if name in curves else np.array([np.nan])
    return finite(np.nanmax(values)) if np.isfinite(values).any() else None


def least(values: Any) -> float | None:
    return finite(np.nanmin(values)) if np.isfinite(values).any() else None


def ratio(top: float, bottom: float) -> float | None:
    return finite(top / bottom) if bottom else None


def finite(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def short(name: str) -> str:
    """Return a column's name in words."""
    return {"effective_tokens": "eff. tokens", "gradient_ratio": "grad. ratio"}.get(name, name.replace("_", " "))


def text_of(value: Any) -> str:
    """Return a cell of the table."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else number_text(value)


def in_units(column: str, value: Any, report: Report) -> str:
    """Return a cell in the units of `check`: a factor, or a number of how many."""
    if value is None or column not in ("stream", "rank", "effective_tokens"):
        return text_of(value)
    if column == "stream":
        return f"{number_text(value)}×"
    whole = report.about["tokens"]
    if column == "effective_tokens":
        shares = typical(report.curves["effective_tokens"]) / typical(report.curves["tokens_seen"])
        whole = float(typical(report.curves["tokens_seen"])[np.nanargmin(shares)])
    return f"{number_text(value * whole)} of {number_text(whole)}"
