"""The result of a check: verdicts first, then curves; as text, a page, a picture, data."""

import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from limitformer.base.files import check_writable, write_whole
from limitformer.checking.band import inside, surprises
from limitformer.checking.curves import over_heads
from limitformer.checking.network import Change, changes_of
from limitformer.checking.subject import READOUT
from limitformer.checking.thresholds import Threshold, failing
from limitformer.checking.verdicts import FINE, TRAINED, Verdict, failed, grade_of, shown
from limitformer.initialisation.report import InitialisationReport
from limitformer.results.storage import save
from limitformer.weightless.law import LawTable
from limitformer.weightless.laws import CONSTANT

UNLIKELY = 0.01
MOST = 4  # findings on weights, in the summary
COLUMNS = 80  # of the summary
FEW = 3  # points, of which one may lie outside by chance
SHOWN = {  # in the summary
    "size": "stream",
    "correlation": "correlation",
    "effective_rank": "rank",
    "logit_std": "logit std",
    "effective_tokens": "eff. tokens",
    "stream_gradient": "gradient",
}


@dataclass(frozen=True)
class Report:
    """What `limitformer.check` returns.

    Attributes:
        name: of the network.
        exists: whether it is a network with its weights; else the curves are samples of the law.
        curves: by sample: what was measured, by layer, block and head.
        band: middle, low and high of the law's curves: 90 % of new networks; None where no law is known.
        data: the covariances and what was seen beside them.
        laws: the law of every weight.
        about: provenance.
        initialisation: of a network that exists, its weights beside their law.
        verdicts: what is wrong, broken things first, or one that says fine, or that the network is trained.
        thresholds: where verdicts begin.
        against: the report of another network, for the same tokens.
    """

    name: str
    exists: bool
    curves: xr.Dataset
    band: xr.Dataset | None
    data: xr.Dataset
    laws: LawTable | None
    about: Mapping[str, Any]
    initialisation: InitialisationReport | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    thresholds: Mapping[str, Threshold] = field(default_factory=dict)
    against: "Report | None" = None

    @property
    def trained(self) -> bool:
        """Whether this network's weights clearly differ from the law of its initialisation, and were trained.

        Training moves what starts constant, gains of norms and biases. Where nearly all random weights differ and these
        are still constant, it is another initialisation, which has verdicts.
        """
        found = self.initialisation
        if not self.exists or found is None or self.laws is None or not found.trained:
            return False
        laws = self.laws.laws  # a weight that its law ties, and this network does not, has none of its own
        constant = [each for each in found.weights if each.name in laws and laws[each.name].kind == CONSTANT]
        moved = sum(each.std > 0 or each.mean != laws[each.name].shift for each in constant)
        return bool(2 * moved >= len(constant))

    @property
    def apart(self) -> list[str]:
        """The weights that this network holds by themselves and its law as copies of others."""
        if self.initialisation is None or self.laws is None:
            return []
        tied = {name for names in self.laws.tied.values() for name in names}
        return [each.name for each in self.initialisation.weights if each.name in tied]

    @property
    def grade(self) -> str | None:
        """fine, watch or broken, the worst of all verdicts; None for a trained network, which is not judged."""
        return None if self.trained else grade_of(self.verdicts)

    def failed(self, names: str | None = "any") -> list[Verdict]:
        """The verdicts that fail a check for `names`.

        Args:
            names: verdicts and grades with commas between. A verdict fails at its worst grade: `collapsed` at broken,
                `swamped`, which is never broken, at watch. `broken` is any verdict of that grade, `watch` or `any` is
                every verdict.

        Raises:
            InputError: there is no verdict or grade of a name.
        """
        return failed(self.verdicts, failing(names))

    @property
    def within_law(self) -> dict[str, float]:
        """Of a network that exists: which part of each curve lies in the law's band; not of single numbers."""
        if self.band is None or not self.exists:
            return {}
        parts = inside(self.curves, self.band)
        return {str(name): float(each.mean()) for name, each in parts.items() if int(each.notnull().sum()) >= FEW}

    @property
    def unlike_law(self) -> dict[str, float]:
        """Of a network that exists: the curves that its law would give with a probability below 0.01, and that."""
        if self.band is None or not self.exists:
            return {}
        found = sorted(surprises(self.curves, self.band).items(), key=lambda pair: pair[1])
        return {name: p for name, p in found if p < UNLIKELY}

    def changes(self) -> list[Change]:
        """What differs from a network at initialisation, for a trained one: curves at their ends, and weights."""
        return changes_of(self)

    def __str__(self) -> str:
        """Verdicts with their reasons, and the curves at a few layers, on lines of at most 80 characters."""
        lines = folded(f"{self.name}: {self.heading}", "")
        for one in self.verdicts:
            lines += folded(f"  {one.sign} {title_of(one)}{share_text(one, self)}", "    ")
            lines += folded(f"    why: {one.why}", "      ") if one.why else []
            lines += folded(f"    fix: {one.mends}", "      ") if one.mends else []
        if self.trained:
            lines += ["", *self.changed_rows()]
        return "\n".join([*lines, "", *self.rows(), *self.notes()])

    @property
    def heading(self) -> str:
        """The first line after the name: depth, tokens, and what was measured."""
        blocks, tokens = self.curves.sizes["layer"] - 1, self.about["tokens"]
        samples = self.curves.sizes["sample"]
        law = f"law at initialisation, {samples} sample{'' if samples == 1 else 's'}"
        kind = "this network" if self.exists else law
        return f"{blocks} blocks, {tokens} tokens, {kind}"

    def changed_rows(self) -> list[str]:
        head = f"{'differs from initialisation':>38}{'this network':>14}{'a new one, 90 %':>24}"
        return [head, *(f"{each.name:>38}{each.now:>14}{each.new:>24}" for each in self.changes())]

    def rows(self) -> list[str]:
        """A line for each shown curve, at layers from the start to the end. Block k stands under layer k, its end."""
        last = self.curves.sizes["layer"] - 1
        layers = sorted({0, min(1, last), last // 4, last // 2, 3 * last // 4, last})
        head = f"{'layer':>13}" + "".join(f"{layer:>9}" for layer in layers)
        return [head, *(self.row(name, title, layers) for name, title in SHOWN.items() if name in self.curves)]

    def row(self, name: str, title: str, layers: list[int]) -> str:
        """Medians over samples of the mean over heads, and what the numbers are out of."""
        curve = self.curves[name]
        values = over_heads(curve).median("sample").values
        shift = 0 if "layer" in curve.dims else 1
        at = [values[layer - shift] if 0 <= layer - shift < len(values) else np.nan for layer in layers]
        cells = [cell(name, value) for value in at]
        of = self.whole(name)
        return (f"{title:>13}" + "".join(f"{each:>9}" for each in cells) + (f" of {of}" if of else "")).rstrip()

    def whole(self, name: str) -> str:
        """The largest number that a curve could have: tokens, or those that a row of attention sees."""
        if name == "effective_rank":
            return str(self.about["tokens"])
        if name == "effective_tokens" and "tokens_seen" in self.curves:
            return f"{float(self.curves['tokens_seen'].median()):.3g}"
        return ""

    def notes(self) -> list[str]:
        """The remarks, and the first findings on the weights."""
        lines = [part for line in self.remarks() for part in folded(f"  {line}", "    ")]
        lines += [part for line in self.weights() for part in folded(line, "      ")]
        return ["", *lines] if lines else []

    def remarks(self) -> list[str]:
        """The loss beside that of a uniform guess, the curves that leave the law's band, and a word on the weights."""
        lines = [] if "logit_std" in self.curves else ["no attention was seen: neither a softmax nor torch's own"]
        if "loss" in self.curves:
            beside = f", of a uniform guess {self.about['chance']:.4g}" if "chance" in self.about else ""
            name = "loss" if self.about.get("loss") != READOUT else f"{READOUT}, as the model has no task:"
            lines.append(f"{name} {float(self.curves['loss'].median()):.4g}{beside}")
        unlike = [] if self.trained else [f"{name} (p {p:.0e})" for name, p in self.unlike_law.items()]
        if unlike:
            lines.append(f"unlike its law: {', '.join(unlike[:MOST])}{' and more' if len(unlike) > MOST else ''}")
        if self.exists and self.laws is None:
            lines.append("no law is known of this network: the verdicts take it for one that is not trained")
        if "unread" in self.about:
            lines.append(f"not read, as the class of the network does not have them: {self.about['unread']}")
        if self.trained and (apart := self.apart):
            lines.append(f"held apart, though the law ties them to others: {', '.join(apart[:MOST])}")
        if self.initialisation is not None:
            lines.append(f"weights: {self.initialisation.summary}")
        return lines

    def weights(self) -> list[str]:
        """The first findings on the weights."""
        found = [] if self.initialisation is None else list(self.initialisation.findings)
        more = [f"    and {len(found) - MOST} more"] if len(found) > MOST else []
        return [*(f"    {str(finding).splitlines()[0]}" for finding in found[:MOST]), *more]

    def record(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "name": self.name,
            "grade": self.grade,
            "trained": self.trained,
            "changes": [asdict(each) for each in self.changes()] if self.trained else [],
            "verdicts": [plain(asdict(verdict)) for verdict in self.verdicts],
            "within_law": self.within_law,
            "unlike_law": self.unlike_law,
            "initialisation": None if self.initialisation is None else str(self.initialisation),
            "thresholds": {name: asdict(each) for name, each in self.thresholds.items()},
            "about": plain(dict(self.about)),
            "against": None if self.against is None else self.against.record(),
        }

    def dataset(self) -> xr.Dataset:
        """Curves, band and covariances, for NetCDF."""
        bands = {} if self.band is None else {f"law_{name}": each for name, each in self.band.items()}
        kept = {"covariance": self.data["covariance"]}
        return xr.Dataset({**self.curves.data_vars, **bands, **kept}).assign_attrs(plain(dict(self.about)))

    def save(self, folder: str | Path) -> list[Path]:
        """Write check.html, check.png, check.nc and check.json into a folder, each whole or not at all; their paths.

        Raises:
            InputError: the folder cannot be written.
        """
        from limitformer.checking.page.page import page
        from limitformer.checking.picture import draw
        from limitformer.plot import style

        place = Path(folder)
        check_writable(place)
        html, picture, record = (place / f"check.{ending}" for ending in ("html", "png", "json"))
        write_whole(html, lambda path: path.write_text(page(self), encoding="utf-8"))
        with style():
            drawing = draw(self)
            write_whole(picture, lambda path: drawing.savefig(path))
        text = json.dumps(self.record(), indent=2, ensure_ascii=False, allow_nan=False)
        write_whole(record, lambda path: path.write_text(text, encoding="utf-8"))
        return [html, picture, save(self.dataset(), place / "check.nc"), record]

    def _repr_html_(self) -> str:
        """In a notebook the page shows itself."""
        from html import escape

        from limitformer.checking.page.page import page

        return f'<iframe srcdoc="{escape(page(self))}" width="100%" height="900" style="border:0"></iframe>'


def title_of(verdict: Verdict) -> str:
    """The grade and the sentence."""
    return verdict.said if verdict.name in (FINE, TRAINED) else f"{verdict.grade}: {verdict.said}"


def share_text(verdict: Verdict, report: Report) -> str:
    """The share of samples that show the verdict, where it is not all of them."""
    if report.exists or verdict.share == 1:
        return ""
    return f" ({verdict.share:.0%} of samples)"


def folded(line: str, indent: str) -> list[str]:
    """The line, on several where it is longer than the summary is wide."""
    return textwrap.wrap(line, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def cell(name: str, value: float) -> str:
    """A number of the table; a correlation has three decimals, as what is below a thousandth of 1 is nothing."""
    if np.isnan(value):
        return ""
    return f"{value + 0.0:.3f}".replace("-0.000", "0.000") if name == "correlation" else shown(value)


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Numbers and texts as JSON and NetCDF have them; what is not a finite number is left out."""
    found = {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}
    infinite = {name for name, value in found.items() if isinstance(value, float) and not np.isfinite(value)}
    return {name: value for name, value in found.items() if name not in infinite and value is not None}
