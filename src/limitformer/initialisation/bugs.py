r"""Known bugs of initialisation, each with its signs, its harm and the usual fix.

Evidence is one weight that deviates from its law; a recogniser returns the evidence in words, or an empty string. The
first bug of the table that matches is named. L is the number of like layers. A ratio is the std of the entries over the
law's; it counts as x within four standard errors and 0.3 %, if it is closer to x than to 1.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from limitformer.initialisation.like_layers import pattern
from limitformer.initialisation.summary import TensorSummary
from limitformer.weightless import laws
from limitformer.weightless.laws import Law

# 0.8796, the std of a normal truncated at two: by parts, its variance is 1 − 2·2φ(2)/(2Φ(2) − 1).
CUT = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))
QUERY = re.compile(r"(^|[._])(q|query|queries|q_proj|q_lin|wq|q_b_proj|to_q)([._]|$)", re.IGNORECASE)
FUSED = re.compile(r"qkv|query_key_value|c_attn|in_proj", re.IGNORECASE)
NORM = re.compile(r"norm|(^|\.)ln_?\w*\.", re.IGNORECASE)
FLAT = 2.1  # kurtosis below which entries look uniform (1.8), not truncated (2.4) or normal (3)


@dataclass(frozen=True)
class Evidence:
    """A weight that deviates, and its surroundings."""

    name: str
    shape: tuple[int, ...]
    law: Law
    summary: TensorSummary
    layers: int  # like layers, L
    embedding: bool = False
    norm: bool = False
    stds: frozenset[float] = frozenset()  # of all laws of the module
    fans: tuple[int, ...] = ()  # of the weight beside a bias, else its own

    @property
    def ratio(self) -> float:
        """The std of the entries over that of the law."""
        return self.summary.std / self.law.std if self.law.std > 0 else math.nan

    def near(self, x: float) -> bool:
        """Return whether the ratio is x, and clearly not 1."""
        close = min(4 * self.summary.log_error() + 0.003, abs(math.log(x)) / 3)
        return self.ratio > 0 and abs(math.log(self.ratio / x)) < close

    def holds(self, std: float) -> bool:
        """Return whether the entries have this std."""
        return self.law.std > 0 and self.near(std / self.law.std)


def evidence_of(
    name: str, shape: Any, law: Law, summary: TensorSummary, owner: Any, every: Mapping[str, Law], matrix: Any
) -> Evidence:
    """Return what recognisers read of a weight; `every` has all laws, and `matrix` is the shape of a bias's weight."""
    alike = [other for other in every if pattern(other) == pattern(name)]
    layers = {next((part for part in other.split(".") if part.isdecimal()), "") for other in alike}
    fans = (matrix[-1], math.prod(matrix[:-1]), math.prod(matrix[1:])) if len(matrix) > 1 else ()
    stds = frozenset(each.std for each in every.values())
    kinds = isinstance(owner, nn.Embedding), "norm" in type(owner).__name__.lower()
    return Evidence(name, tuple(shape), law, summary, len(layers), *kinds, stds, tuple(dict.fromkeys(fans)))


@dataclass(frozen=True)
class Bug:
    """The name of a bug, its harm, the usual fix, and the function that recognises it."""

    key: str
    title: str
    why: str
    mend: str
    recognise: Callable[[Evidence], str] = field(repr=False)


def uninitialised(e: Evidence) -> str:
    """Recognise garbage: NaN, or numbers that no initialisation draws."""
    if e.summary.odd:
        return f"{e.summary.odd:,} of {e.summary.count + e.summary.odd:,} entries are NaN or infinite"
    far, usual = max(abs(e.summary.low), abs(e.summary.high)), max(abs(e.law.shift), e.law.std, 1.0)
    return f"entries up to {far:.2g}" if far > 1e6 * usual else ""


def norm_at_zero(e: Evidence) -> str:
    """Recognise zeros instead of ones, or ones where the family multiplies by 1 + w."""
    if not e.norm or e.law.kind != laws.CONSTANT or not e.summary.constant:
        return ""
    if e.law.shift == 1.0 and e.summary.dead:
        return "weights of a norm are 0 and should be 1"
    if e.law.shift == 0.0 and e.summary.low == 1.0 and not e.name.endswith("bias"):
        return "weights of a norm are 1 and should be 0: this family multiplies by 1 + w"
    return ""


def dead_or_untied(e: Evidence) -> str:
    """Recognise a constant where the law is random, broken ties, and copies."""
    if e.law.std > 0 and e.summary.constant:
        return f"every entry is {e.summary.low:g}"
    return ""


def wide_embedding(e: Evidence) -> str:
    """Recognise torch's default N(0, 1), or a std of 0.6."""
    for std in (1.0, 0.6):
        if e.embedding and e.law.std > 0 and abs(e.summary.std / std - 1) < 0.05 + 4 * e.summary.log_error():
            return f"an embedding holds std {e.summary.std:.3g}, {e.ratio:.3g} times its law's" if e.ratio > 2 else ""
    return ""


def torch_default(e: Evidence) -> str:
    """Recognise U(±1/√fan), the default of torch.nn.Linear."""
    fans = [fan for fan in e.fans if fan > 1]
    if e.law.kind == laws.CONSTANT:  # a bias
        error = 4 * e.summary.log_error() + 0.01
        off = [abs(math.log(e.summary.std * math.sqrt(3 * fan))) for fan in fans if e.summary.std > 0]
        bounded = any(max(-e.summary.low, e.summary.high) <= fan**-0.5 * 1.01 for fan in fans)
        return "torch's default uniform bias was left in place" if off and min(off) < error and bounded else ""
    if e.law.kind == laws.UNIFORM and e.law.std in [(3 * fan) ** -0.5 for fan in fans]:
        return ""
    for fan in fans:
        if e.summary.kurtosis < FLAT and e.holds((3 * fan) ** -0.5):
            return f"torch's default uniform, std 1/√(3·{fan}), was left in place"
    return ""


def wrong_fan(e: Evidence) -> str:
    """Recognise another formula of a fan, or the other side of the matrix."""
    default = torch_default(e)
    if default or len(e.shape) < 2 or not e.law.std > 0 or large_block(e):
        return default
    out, into = math.prod(e.shape[:-1]), e.shape[-1]
    scaled = [f for f in (out, into) for g in (1, 2, 1 / 3) if math.isclose(e.law.std, (g / f) ** 0.5, rel_tol=1e-3)]
    if out != into and scaled:
        for ratio in (math.sqrt(into / out), math.sqrt(out / into)):
            if e.near(ratio):
                return f"the std is that of the other side of the {out}×{into} matrix: fan-in and fan-out are exchanged"
    if QUERY.search(e.name):  # a query that is too large may look like any of these
        return ""
    formulas = {"√(2/{0})": 2.0, "1/√{0}": 1.0}
    for fan in dict.fromkeys((into, out)):
        for text, gain in formulas.items():
            if e.holds(math.sqrt(gain / fan)):
                return f"the std is {text.format(fan)}, a formula of fans that the law does not use here"
    return f"the std is √(2/({into} + {out})), Xavier's" if e.holds(math.sqrt(2 / (into + out))) else ""


def truncation(e: Evidence) -> str:
    """Recognise the std of a truncated normal in place of the normal's, or the reverse."""
    cut = e.summary.kurtosis < 2.7 + 3 * math.sqrt(24 / max(e.summary.count, 1)) and e.summary.kurtosis > FLAT
    own = e.law.std / abs(e.law.scale) if e.law.kind == laws.TRUNCATED and e.law.scale else 1.0
    if own < 0.99:
        if e.near(1 / own):
            return f"the law is truncated, std {own:.4f} of the nominal one, but the entries have the nominal one"
        return f"the std was multiplied by {own:.4f} once more" if e.near(own) else ""
    if e.near(CUT) and cut:
        return f"a normal truncated at two standard deviations that was not rescaled: std {CUT:.4f} of the law's"
    return f"divided by {CUT:.4f} as if it had been truncated" if e.near(1 / CUT) else ""


def large_query(e: Evidence) -> str:
    """Recognise a query projection, or a block of a fused one, that is too large."""
    if not e.law.std > 0:
        return ""
    if QUERY.search(e.name) and e.ratio > 3:
        return f"a query projection is {e.ratio:.3g} times too large"
    return large_block(e)


def large_block(e: Evidence) -> str:
    """Recognise a fused projection of which some outputs are too large, and the others follow the law."""
    if not FUSED.search(e.name):
        return ""
    for squares in (e.summary.rows, e.summary.columns):
        slices = np.sqrt(squares) / e.law.std
        large = slices > 3
        if 0.05 < large.mean() < 0.67 and abs(np.median(slices[~large]) - 1) < 0.2:
            part = f"{large.sum()} of {len(large)} outputs, from {int(np.argmax(large))} on"
            return f"{part}, are {np.sqrt((slices[large] ** 2).mean()):.3g} times too large"
    return ""


def scalings(e: Evidence) -> list[tuple[int, str]]:
    """Return the factors, distinguishable from 1, by which output projections may be divided."""
    return [(number, text) for number, text in ((2 * e.layers, "√(2L)"), (e.layers, "√L")) if number > 2]


def residual_scaled(e: Evidence) -> str:
    """Recognise 1/√(2L) or 1/√L where the law has neither."""
    for number, text in scalings(e):
        if e.near(number**-0.5):
            return f"divided by {text} = {math.sqrt(number):.3g}, which the law does not do here"
    return ""


def residual_missing(e: Evidence) -> str:
    """Recognise a weight without the 1/√(2L) or 1/√L of its law."""
    for number, text in scalings(e):
        base = e.law.std * math.sqrt(number)
        known = any(math.isclose(base, std, rel_tol=1e-3) for std in e.stds)
        if known and e.near(math.sqrt(number)):
            return f"not divided by {text} = {math.sqrt(number):.3g}, as the law does"
    return ""


BUGS = (
    Bug("uninitialised", "uninitialised memory", "Nothing has written to it since it was allocated.",
        "Fill it in the module's initialisation; buffers that are not saved must be computed again after loading.",
        uninitialised),
    Bug("norm-zero", "norm weights at zero", "A branch whose norm has the wrong constant passes nothing, or too much.",
        "Initialise norm weights to the constant of this family's code: one, or zero where it multiplies by 1 + w.",
        norm_at_zero),
    Bug("dead", "dead, constant or untied tensor", "Equal entries stay equal, and untied copies train apart.",
        "Run the initialisation over this module too, then tie_weights().", dead_or_untied),
    Bug("embedding", "embedding std of 0.6 or 1", "It drowns every branch, or saturates a tied head's logits.",
        "Draw embeddings with the configuration's initializer_range; torch.nn.Embedding's default is N(0, 1).",
        wide_embedding),
    Bug("fan", "wrong fan", "The size of what a layer puts out is off by a ratio of widths in every layer.",
        "Call the model's own initialisation over this module; check the order (out, in) that the formula expects.",
        wrong_fan),
    Bug("query", "query projection too large", "Logits grow in proportion, and attention freezes on single tokens.",
        "Draw queries with the std of keys; do not multiply by √(head dimension) what the attention divides by it.",
        large_query),
    Bug("residual-missing", "missing 1/√(2L) on output projections", "The stream's variance grows with every branch.",
        "Divide the std of the projections that write to the stream by √(2L).", residual_missing),
    Bug("residual-wrong", "residual scaling on the wrong matrix", "A branch is small inside, yet the stream grows.",
        "Divide the output projections (c_proj, o_proj, down_proj) by √(2L), and no other matrix.", residual_scaled),
    Bug("truncation", "truncated normal not rescaled", "A normal truncated at ±2σ has a std of 0.8796 σ.",
        "Divide the std by 0.8796 where the std is what is meant, and nowhere else.", truncation),
)  # fmt: skip


def recognise(evidence: Evidence) -> tuple[Bug | None, str]:
    """Return the first bug that matches, and the evidence in words."""
    for bug in BUGS:
        detail = bug.recognise(evidence)
        if detail:
            return bug, detail
    return None, ""
