"""What a check found: verdicts first, then curves; as text, a page, a picture, data."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from limitformer.checking.band import inside, surprises
from limitformer.checking.initialisation.report import InitialisationReport
from limitformer.checking.thresholds import Threshold
from limitformer.checking.verdicts import HEALTHY, Verdict, names_in
from limitformer.running.results import check_writable, save, write_whole
from limitformer.weightless.law import LawTable

UNLIKELY = 0.01
MOST = 4  # findings on weights, in the summary
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
        verdicts: what is wrong, serious things first, or one that says healthy.
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
    def healthy(self) -> bool:
        """Whether no threshold is reached."""
        return [verdict.name for verdict in self.verdicts] == [HEALTHY]

    def failed(self, names: str | None = "any") -> list[Verdict]:
        """The verdicts of these names, such as "collapsed,frozen", or "any".

        Raises:
            InputError: there is no verdict of a name.
        """
        chosen = names_in(names)
        return [verdict for verdict in self.verdicts if verdict.name in chosen]

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

    def __str__(self) -> str:
        """Verdicts, and the curves at a few layers."""
        lines = [f"{self.name}: {self.heading}", *(f"  {sign(one)} {one}{sure(one, self)}" for one in self.verdicts)]
        return "\n".join([*lines, "", *self.rows(), *self.notes()])

    @property
    def heading(self) -> str:
        """Of what it is a report."""
        blocks, tokens = self.curves.sizes["layer"] - 1, self.about["tokens"]
        samples = self.curves.sizes["sample"]
        law = f"law at initialisation, {samples} sample{'' if samples == 1 else 's'}"
        kind = "this network" if self.exists else law
        return f"{blocks} blocks, {tokens} tokens, {kind}"

    def rows(self) -> list[str]:
        """A line of each shown curve, at layers from the start to the end."""
        last = self.curves.sizes["layer"] - 1
        layers = sorted({0, min(1, last), last // 4, last // 2, 3 * last // 4, last})
        head = f"{'layer':>14}" + "".join(f"{layer:>10}" for layer in layers)
        return [head, *(self.row(name, title, layers) for name, title in SHOWN.items() if name in self.curves)]

    def row(self, name: str, title: str, layers: list[int]) -> str:
        """Median over samples and heads; what belongs to a block stands under the layer before it."""
        values = self.curves[name].median([dim for dim in ("sample", "head") if dim in self.curves[name].dims]).values
        at = [values[layer] if layer < len(values) else np.nan for layer in layers]
        return (f"{title:>14}" + "".join(f"{'' if np.isnan(value) else f'{value:.3g}':>10}" for value in at)).rstrip()

    def notes(self) -> list[str]:
        """The loss beside that of chance, and the curves that leave the law's band."""
        lines = [] if "logit_std" in self.curves else ["  no attention was seen: neither a softmax nor torch's own"]
        if "loss" in self.curves:
            chance = f", chance {self.about['chance']:.3g}" if "chance" in self.about else ""
            lines.append(f"  loss {float(self.curves['loss'].median()):.4g}{chance}")
        unlike = [f"{name} (p {p:.0e})" for name, p in self.unlike_law.items()]
        if unlike:
            lines.append(f"  unlike its law: {', '.join(unlike[:MOST])}{' and more' if len(unlike) > MOST else ''}")
        if self.initialisation is not None:
            lines += [f"  weights: {self.initialisation.summary}", *self.weights()]
        return ["", *lines] if lines else []

    def weights(self) -> list[str]:
        """The first findings on the weights."""
        found = [] if self.initialisation is None else list(self.initialisation.findings)
        more = [f"    and {len(found) - MOST} more"] if len(found) > MOST else []
        return [*(f"    {str(finding).splitlines()[0]}" for finding in found[:MOST]), *more]

    def record(self) -> dict[str, Any]:
        """What JSON holds."""
        return {
            "name": self.name,
            "healthy": self.healthy,
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
        text = json.dumps(self.record(), indent=2, ensure_ascii=False)
        write_whole(record, lambda path: path.write_text(text, encoding="utf-8"))
        return [html, picture, save(self.dataset(), place / "check.nc"), record]

    def _repr_html_(self) -> str:
        """In a notebook the page shows itself."""
        from html import escape

        from limitformer.checking.page.page import page

        return f'<iframe srcdoc="{escape(page(self))}" width="100%" height="900" style="border:0"></iframe>'


def sign(verdict: Verdict) -> str:
    """For the eye."""
    return "✓" if verdict.name == HEALTHY else "✗" if verdict.serious else "!"


def sure(verdict: Verdict, report: Report) -> str:
    """In how many samples, where there are several."""
    if report.exists or verdict.name == HEALTHY:
        return ""
    return f" ({verdict.share:.0%} of samples)"


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Numbers and texts as JSON and NetCDF have them."""
    found = {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}
    return {name: value for name, value in found.items() if value == value and value is not None}
