"""The result of a check: verdicts first, then curves; as text, a page, a picture and data."""

import math
import re
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from limitformer.base.files import Paged, local_path, write_texts, write_whole
from limitformer.checking.curves import CURVES, TABLE, inside, over_heads, place_of, surprises, typical
from limitformer.checking.metrics import Metric, metrics_of
from limitformer.checking.thresholds import FINE, Threshold, failing
from limitformer.checking.verdicts import TRAINED, Verdict, failed, grade_of, number_text
from limitformer.initialisation.recipes import RecipeComparison
from limitformer.initialisation.recipes.comparison import names_text
from limitformer.initialisation.report import InitialisationReport
from limitformer.results.storage import save
from limitformer.weightless.law import LawTable
from limitformer.weightless.laws import CONSTANT
from limitformer.witness import Witness

UNLIKELY = 0.01
LISTED = 4  # names in a remark
FEW = 3  # points, of which one may lie outside by chance
MOST_WEIGHTS = 4
LONGEST = 38  # characters of a name in the comparison
NO_ATTENTION = "no attention was seen: no softmax of a known form, nor torch's own"


@dataclass(frozen=True)
class Change:
    """One line of the comparison, in words: what was measured, this network's number, and that of a new one."""

    name: str
    now: str
    new: str


@dataclass(frozen=True)
class CheckedNetwork:
    """The measurements of one network, and the verdicts on it; `Report` lists the attributes."""

    name: str
    exists: bool
    curves: xr.Dataset
    band: xr.Dataset | None
    data: xr.Dataset
    laws: LawTable | None
    about: Mapping[str, Any]
    initialisation: InitialisationReport | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    stack: str = ""
    stacks: "tuple[CheckedNetwork, ...]" = ()
    recipe: RecipeComparison | None = None
    witness: Witness | None = None

    @property
    def trained(self) -> bool:
        """Whether this network was trained: its weights clearly differ from the law of its initialisation.

        Training moves weights that start constant, such as gains of norms and biases. If nearly all random weights
        differ and these are still constant, it is another initialisation, which has verdicts.
        """
        weights = self.initialisation
        if not self.exists or weights is None or self.laws is None or not weights.trained:
            return False
        laws = self.laws.laws  # a weight that the law ties, and this network does not, has no law of its own
        constant = [each for each in weights.weights if each.name in laws and laws[each.name].kind == CONSTANT]
        moved = sum(each.std > 0 or each.mean != laws[each.name].shift for each in constant)
        return bool(2 * moved >= len(constant))

    @property
    def apart(self) -> list[str]:
        """The weights that the law ties to others and this network does not."""
        if self.initialisation is None or self.laws is None:
            return []
        tied = {name for names in self.laws.tied.values() for name in names}
        return [each.name for each in self.initialisation.weights if each.name in tied]

    @property
    def grade(self) -> str | None:
        """fine, watch or broken, the worst of all verdicts; None for a trained network, which has no grade."""
        return None if self.trained else grade_of(self.verdicts)

    def failed(self, names: str | None = "any") -> list[Verdict]:
        """Return the verdicts that fail a check for `names`.

        Args:
            names: verdicts and grades with commas between. A verdict fails at its worst grade: `collapsed` at broken,
                `swamped`, which is never broken, at watch. `broken` is any verdict of that grade, `watch` or `any` is
                every verdict.

        Raises:
            InputError: there is no verdict or grade of that name.
        """
        return failed(self.verdicts, failing(names))

    @property
    def within_law(self) -> dict[str, float]:
        """The share of each curve of an existing network that lies in the law's band, except curves of few points."""
        if self.band is None or not self.exists:
            return {}
        parts = inside(self.curves, self.band)
        return {str(name): float(each.mean()) for name, each in parts.items() if int(each.notnull().sum()) >= FEW}

    @property
    def unlike_law(self) -> dict[str, float]:
        """The curves of an existing network whose probability under its law is below 0.01, with that probability."""
        if self.band is None or not self.exists:
            return {}
        pairs = sorted(surprises(self.curves, self.band).items(), key=lambda pair: pair[1])
        return {name: p for name, p in pairs if p < UNLIKELY}

    def changes(self) -> list[Change]:
        """Return how a trained network differs from one at initialisation: the ends of its curves, and its weights."""
        ends = [change for name, curve in CURVES.items() if curve.change and (change := curve_change(self, name))]
        return ends + weight_changes(self)

    @property
    def heading(self) -> str:
        """Depth, tokens, whether this is a network or samples of its law, and the loss that was differentiated."""
        blocks, tokens = self.curves.sizes["layer"] - 1, self.about["tokens"]
        samples = self.curves.sizes["sample"]
        law = f"law at initialisation, {samples} sample{'' if samples == 1 else 's'}"
        stack = f" of {self.stack}" if self.stack else ""
        loss = f", loss: {self.about['loss']}" if "loss" in self.curves else ""
        words = "1 token" if tokens == 1 else f"{tokens} tokens"
        return f"{blocks} blocks{stack}, {words}, {'this network' if self.exists else law}{loss}"

    @property
    def proof(self) -> str:
        """The sentence of the witness; empty without one."""
        return "" if self.witness is None else self.witness.in_words(self.curves.sizes["sample"])

    def remarks(self) -> list[str]:
        """Return the loss next to that of a uniform guess, the curves unlike the law, and a summary of the weights."""
        lines = [] if "logit_std" in self.curves else [NO_ATTENTION]
        if "equal_samples" in self.about:
            lines.append(str(self.about["equal_samples"]))
        if "chosen" in self.about:
            lines.append(f"inputs chosen for it: {self.about['chosen']}")
        if "loss" in self.curves:
            guess = f", of a uniform guess {self.about['chance']:.4g}" if "chance" in self.about else ""
            lines.append(f"loss {float(self.curves['loss'].median()):.4g}{guess}")
        if "frozen" in self.about:
            lines.append(frozen_in_words(int(self.about["frozen"])))
        unlike = [] if self.trained else [f"{name} (p {p:.0e})" for name, p in self.unlike_law.items()]
        if unlike:
            lines.append(f"unlike its law: {', '.join(unlike[:LISTED])}{' and more' if len(unlike) > LISTED else ''}")
        if self.stacks or any(sign in str(self.about.get("blocks", "")) for sign in (", ", "(")):
            lines.append(f"blocks: {self.about['blocks']}")
        if self.exists and self.laws is None:
            lines.append("no law is known of this network: the verdicts take it for one that is not trained")
        if "unread" in self.about:
            lines.append(f"not read, as the class of the network does not have them: {self.about['unread']}")
        if self.trained and (apart := self.apart):
            lines.append(f"held apart, though the law ties them to others: {', '.join(apart[:LISTED])}")
        if self.initialisation is not None:
            lines.append(f"weights: {self.initialisation.summary}")
        return lines


def frozen_in_words(count: int) -> str:
    """Return a sentence on weights that are not trained."""
    weights = "1 weight is" if count == 1 else f"{count} weights are"
    return f"{weights} frozen (requires_grad=False), without verdicts on gradients and steps"


def stack_like(part: CheckedNetwork, network: CheckedNetwork, other: CheckedNetwork | None) -> CheckedNetwork | None:
    """Return the stack of another network that has the place of `part` in `network`."""
    if other is None or part is network:
        return other
    return next((each for each in other.stacks if each.name == part.name), None)


def curve_change(network: CheckedNetwork, name: str) -> Change | None:
    """Compare the last layer, or the block of attention that is farthest from a new network's."""
    if network.band is None or name not in network.curves or name not in network.band:
        return None
    if name == "loss" and "chance" not in network.about:
        return None
    curve, band = over_heads(network.curves[name].isel(sample=0)), over_heads(network.band[name])
    low, middle, high = (np.atleast_1d(band.sel(edge=edge).values) for edge in ("low", "middle", "high"))
    values = np.atleast_1d(curve.values)[: len(middle)]
    if not (np.isfinite(values) & np.isfinite(middle)).any():
        return None
    place = len(values) - 1
    title = CURVES[name].change
    if "block" in curve.dims:
        with np.errstate(divide="ignore", invalid="ignore"):
            place = int(np.nanargmax(np.abs(np.log(values / middle))))
        title = f"{title} {place + 1}"
    return Change(title, number_text(values[place]), f"{number_text(low[place])} to {number_text(high[place])}")


def weight_changes(network: CheckedNetwork) -> list[Change]:
    """Return the kinds of random weight whose standard deviation differs most from the law's, as ratios."""
    if network.initialisation is None or network.laws is None:
        return []
    ratios: dict[str, list[float]] = {}
    for weight in network.initialisation.weights:
        law = network.laws.laws.get(weight.name)
        if law is not None and law.std > 0 and weight.std > 0:
            ratios.setdefault(place_of(weight.name)[0], []).append(weight.std / law.std)
    medians = {kind: float(np.median(each)) for kind, each in ratios.items()}
    most = sorted(medians, key=lambda kind: -abs(math.log(medians[kind])))[:MOST_WEIGHTS]
    return [
        Change(f"std of {shortened(kind, LONGEST - 7)}", f"{number_text(medians[kind])} × law", "1 × law")
        for kind in most
    ]


def shortened(name: str, length: int) -> str:
    """Return the last parts of a dotted name that fit."""
    parts = name.split(".")
    while len(name) > length and len(parts) > 1:
        parts = parts[1:]
        name = f"…{'.'.join(parts)}"
    return name


COLUMNS = 80  # characters of a line of the text


@dataclass(frozen=True)
class Report(Paged, CheckedNetwork):
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
    """

    thresholds: Mapping[str, Threshold] = field(default_factory=dict)
    against: "Report | None" = None

    def __repr__(self) -> str:
        """Return name, grade, verdicts and sizes on one line; `print` shows the report."""
        names = ", ".join(dict.fromkeys(one.name for one in self.verdicts if one.name not in (FINE, TRAINED)))
        return f"<Report {self.name}: {self.grade}{f' ({names})' if names else ''}; {self.heading}>"

    def __str__(self) -> str:
        """Return verdicts with their reasons, and the curves at a few layers, on lines of at most 80 characters."""
        lines = wrapped(f"{self.name}: {self.heading}", "") + wrapped(self.proof, "")
        for one in self.verdicts:
            share = "" if self.exists or one.share == 1 else f" ({one.share:.0%} of samples)"
            title = one.said if one.name in (FINE, TRAINED) else f"{one.grade}: {one.said}"
            lines += wrapped(f"  {one.sign} {title}{share}", "    ")
            lines += wrapped(f"    why: {one.why}", "      ") if one.why else []
            lines += wrapped(f"    fix: {one.mends}", "      ") if one.mends else []
        if self.trained:
            lines += ["", f"{'differs from initialisation':>38}{'this network':>14}{'a new one, 90 %':>24}"]
            lines += [f"{each.name:>38}{each.now:>14}{each.new:>24}" for each in self.changes()]
        for stack in self.stacks:
            lines += ["", *wrapped(f"{stack.name}: {stack.heading}", ""), *rows(stack)]
        lines += ["", self.stack] if self.stacks else [""]
        published = [] if self.recipe is None else ["", *recipe_lines(self.recipe)]
        return "\n".join([*lines, *rows(self), *self.notes(), *published])

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
            "within_law": self.within_law,
            "unlike_law": self.unlike_law,
            "initialisation": None if self.initialisation is None else str(self.initialisation),
            "witness": None if self.witness is None else self.witness.record(),
            "recipe": None if self.recipe is None else self.recipe.record(),
            "thresholds": {name: asdict(each) for name, each in self.thresholds.items()},
            "about": finite_values(self.about),
            "stacks": {each.name: [finite_values(asdict(one)) for one in each.verdicts] for each in self.stacks},
            "against": None if self.against is None else self.against.record(),
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

    def page(self) -> str:
        """Return the report as one HTML page that needs no other file."""
        from limitformer.checking.page.page import page

        return page(self, self.against, self.thresholds)

    def save(self, folder: str | Path) -> list[Path]:
        """Write check.html, check.png, check.nc and check.json into a folder, each whole or not at all; return paths.

        Each further stack of blocks has a file check-….nc of its own.

        Raises:
            InputError: the folder cannot be written.
        """
        from limitformer.checking.picture import draw  # with Matplotlib, which printing a report does not need
        from limitformer.plot import style

        place = local_path(folder)
        picture = place / "check.png"
        (html,) = write_texts(place, {"check.html": self.page()})
        with style():
            figure = draw(self, self.against)
            write_whole(picture, lambda path: figure.savefig(path))
        (record,) = write_texts(place, {"check.json": self.record()})
        names = [f"check-{re.sub('[^A-Za-z0-9._-]+', '_', each.name)}.nc" for each in self.stacks]
        others = [save(dataset_of(each), place / name) for each, name in zip(self.stacks, names, strict=True)]
        return [html, picture, save(self.dataset(), place / "check.nc"), *others, record]


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


def wrapped(line: str, indent: str) -> list[str]:
    return textwrap.wrap(line, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def cell(name: str, value: float) -> str:
    """Return a number of the table; a correlation has three decimals, because less than a thousandth means nothing."""
    if np.isnan(value):
        return ""
    return f"{value + 0.0:.3f}".replace("-0.000", "0.000") if name == "correlation" else number_text(value)


def finite_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers and texts as JSON and NetCDF hold them, without None and numbers that are not finite."""
    native = {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}
    infinite = {name for name, value in native.items() if isinstance(value, float) and not np.isfinite(value)}
    return {name: value for name, value in native.items() if name not in infinite and value is not None}
