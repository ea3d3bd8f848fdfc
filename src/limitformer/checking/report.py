"""The result of a check: verdicts first, then curves; as text, a page, a picture and data."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from limitformer.base.moved import OldAttributes
from limitformer.checking.curves import CURVES, TABLE, medians, typical
from limitformer.checking.metrics import Metric, metrics_of
from limitformer.checking.network import LISTED, CheckedNetwork
from limitformer.checking.page.page import contents
from limitformer.checking.thresholds import Threshold
from limitformer.formats.verdicts import record as format_record
from limitformer.formats.verdicts import rounding_table
from limitformer.formats.verdicts import table as format_table
from limitformer.initialisation.recipes import RecipeComparison
from limitformer.initialisation.recipes.comparison import names_text
from limitformer.reports.page import Code, Page, Section
from limitformer.reports.report import AnyReport, finite_values
from limitformer.reports.verdict import COLUMNS, FINE, TRAINED, number_text, verdict_lines, wrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Report(CheckedNetwork, AnyReport, OldAttributes):
    """The result of `limitformer.check`.

    Attributes:
        name: the network's name.
        exists: whether it is a network with its weights; else the curves are samples of the law.
        curves: what was measured, by sample, layer, block and head.
        band: middle, low and high of the law's curves: 90 % of new networks; None if no law is known.
        data: covariances and everything else that was measured.
        laws: the law of every weight.
        about: provenance.
        initialisation: the weights of an existing network, compared with their law.
        verdicts: what is wrong in any stack, broken things first; or one verdict: fine, or trained.
        stack: the name of the stack of blocks that the curves describe, if there are several: the last one.
        stacks: the other stacks, such as an encoder, each with name, curves, band, data and verdicts.
        thresholds: where verdicts begin.
        against: the report of another network, for the same tokens.
        recipe: the law of every weight, compared with a published recipe; None if none was asked for.
        witness: a sample of the law, compared with the user's own module in plain PyTorch; None if none was.
        formats: the numbers of every tensor in each number format, `limitformer.formats.measure.dataset`; None if none
            was asked for.
        rounding: relative difference of `stream` and its `gradient` from float32 by format, sample and layer.
        fix: of `limitformer.fix`: one sentence on what ends the first verdict; `against` is the network with it.
        lines: that change as Python; empty if there is none.
    """

    FILES = "check"

    thresholds: Mapping[str, Threshold] = field(default_factory=dict)
    against: "Report | None" = None
    fix: str = ""
    lines: str = ""

    def __repr__(self) -> str:
        """Return name, grade, verdicts and sizes on one line; `print` shows the report."""
        names = ", ".join(dict.fromkeys(one.name for one in self.verdicts if one.name not in (FINE, TRAINED)))
        return f"<Report {self.name}: {self.grade}{f' ({names})' if names else ''}; {self.heading}>"

    def __str__(self) -> str:
        return self.text()

    def text(self, full: bool = True) -> str:
        """Return verdicts and the curves at a few layers, on lines of at most 80 characters.

        With `full` also the reasons of verdicts and the curves of further stacks.
        """
        lines = wrapped(f"{self.name}: {self.heading}", "") + wrapped(self.proof, "")
        lines += verdict_lines(self.verdicts, self.exists, full)
        if self.trained:
            lines += ["", f"{'differs from initialisation':>38}{'this network':>14}{'a new one, 90 %':>24}"]
            lines += [f"{each.name:>38}{each.now:>14}{each.new:>24}" for each in self.changes()]
        for stack in self.stacks if full else ():
            lines += ["", *wrapped(f"{stack.name}: {stack.heading}", ""), *rows(stack)]
        lines += ["", self.stack] if self.stacks else [""]
        published = [] if self.recipe is None else ["", *recipe_lines(self.recipe)]
        return "\n".join([*lines, *rows(self), *self.number_formats(), *self.notes(), *published])

    def number_formats(self) -> list[str]:
        """Return the tables of number formats, if there are any."""
        counted = [] if self.formats is None else ["", *format_table(self.formats)]
        return counted + ([] if self.rounding is None else ["", *rounding_table(self.rounding)])

    def notes(self) -> list[str]:
        """Return the remarks, and the first findings on the weights."""
        lines = [part for line in self.remarks() for part in wrapped(f"  {line}", "    ")]
        findings = [] if self.initialisation is None else list(self.initialisation.findings)
        weights = [f"    {str(finding).splitlines()[0]}" for finding in findings[:LISTED]]
        weights += [f"    and {len(findings) - LISTED} more"] if len(findings) > LISTED else []
        lines += [part for line in weights for part in wrapped(line, "      ")]
        return ["", *lines] if lines else []

    def record(self) -> dict[str, Any]:
        """Return the report as JSON holds it."""
        return {
            "name": self.name,
            "grade": self.grade,
            "trained": self.trained,
            "changes": [asdict(each) for each in self.changes()] if self.trained else [],
            "verdicts": [finite_values(asdict(verdict)) for verdict in self.verdicts],
            "curves": medians(self.curves),
            "curves_of_stacks": {each.name: medians(each.curves) for each in self.stacks},
            "within_law": self.within_law,
            "unlike_law": self.unlike_law,
            "initialisation": None if self.initialisation is None else str(self.initialisation),
            "witness": None if self.witness is None else self.witness.record(),
            "recipe": None if self.recipe is None else self.recipe.record(),
            "formats": None if self.formats is None else format_record(self.formats, self.rounding),
            "thresholds": {name: asdict(each) for name, each in self.thresholds.items()},
            "about": finite_values(self.about),
            "stacks": {each.name: [finite_values(asdict(one)) for one in each.verdicts] for each in self.stacks},
            "against": None if self.against is None else self.against.record(),
            "fix": self.fix,
            "lines": self.lines,
        }

    def metrics(self) -> dict[str, Metric]:
        """Return the numbers under the names of training monitors, each with the interval of nine of ten new networks.

        >>> import limitformer as lf
        >>> small = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99}
        >>> sorted({name.partition("/")[0] for name in lf.check(small, tokens=8, progress=False).metrics()})[:3]
        ['activation_grad_norm', 'activation_rms', 'attention_entropy']
        """
        return metrics_of(self.curves, self.band)

    def dataset(self) -> xr.Dataset:
        """Return curves, band and covariances as NetCDF holds them."""
        return dataset_of(self)

    def contents(self) -> Page:
        """Return what the page shows."""
        page = contents(self, self.against, self.thresholds)
        code = [Code("Lines to paste", self.lines)] if self.lines else []
        sections = [page.sections[0], *([Section("Fix", [self.fix, *code])] if self.fix else []), *page.sections[1:]]
        return replace(page, sections=sections)

    def draw(self) -> "Figure":
        """Return the picture: six panels by layer for each stack of blocks."""
        from limitformer.checking.picture import draw  # with Matplotlib, which printing a report does not need

        return draw(self, self.against, self.thresholds)

    def datasets(self) -> dict[str, xr.Dataset]:
        """Return the datasets of all stacks by the name of their file."""
        names = {f"check-{re.sub('[^A-Za-z0-9._-]+', '_', each.name)}": dataset_of(each) for each in self.stacks}
        more = {"formats": self.formats, "rounding": self.rounding}
        return {"check": self.dataset(), **names, **{k: each for k, each in more.items() if each is not None}}


def rows(network: CheckedNetwork) -> list[str]:
    """Return a line for each curve of the table, at layers from the start to the end; block k ends at layer k."""
    last = network.curves.sizes["layer"] - 1
    layers = sorted({0, min(1, last), last // 4, last // 2, 3 * last // 4, last})
    head = f"{'layer':>13}" + "".join(f"{layer:>9}" for layer in layers)
    return [head, *(row(network, name, layers) for name in TABLE if name in network.curves)]


def row(network: CheckedNetwork, name: str, layers: list[int]) -> str:
    """Return medians over samples of the mean over heads, and the largest number that the curve could have."""
    values = typical(network.curves[name])
    shift = 0 if "layer" in network.curves[name].dims else 1
    at = [values[layer - shift] if 0 <= layer - shift < len(values) else np.nan for layer in layers]
    whole = ""
    if name == "effective_rank":
        whole = f" of {network.about['tokens']}"
    if name == "effective_tokens" and "tokens_seen" in network.curves:
        whole = f" of {float(network.curves['tokens_seen'].median()):.3g}"
    return (f"{CURVES[name].row:>13}" + "".join(f"{cell(name, value):>9}" for value in at) + whole).rstrip()


def dataset_of(network: CheckedNetwork) -> xr.Dataset:
    """Return curves, band and covariances as NetCDF holds them."""
    bands = {}
    if network.band is not None:  # the law may have gradients of other weights, which `read_first` describes
        bands = {f"law_{name}": each.drop_vars("read_first", errors="ignore") for name, each in network.band.items()}
    variables: dict[Any, Any] = {**network.curves.data_vars, **bands, "covariance": network.data["covariance"]}
    return xr.Dataset(variables).assign_attrs(finite_values(network.about))


def recipe_lines(comparison: RecipeComparison) -> list[str]:
    """Return the comparison with a recipe on lines of at most 80 characters."""
    lines = wrapped(comparison.summary, "  ")
    lines += comparison.table(COLUMNS)
    for row in comparison.rows:
        if row.remark:
            lines += wrapped(f"  {row.mark} {row.kind}: {row.remark} ({names_text(row)})", "    ")
    for remark in comparison.remarks:
        lines += wrapped(f"  ! {remark}", "    ")
    missing = [f"{each.names} ({each.reason})" for each in comparison.uncovered]
    if missing:
        more = f" and {len(missing) - LISTED} more" if len(missing) > LISTED else ""
        lines += wrapped(f"  not covered: {', '.join(missing[:LISTED])}{more}", "    ")
    return lines + wrapped(f"  source: {comparison.recipe.source}", "    ")


def cell(name: str, value: float) -> str:
    """Return a number of the table; a correlation has three decimals, because less than a thousandth means nothing."""
    if np.isnan(value):
        return ""
    return f"{value + 0.0:.3f}".replace("-0.000", "0.000") if name == "correlation" else number_text(value)
