"""The curves by depth that the library plots, checks and designs for: titles, units, axes and bounds, in one registry.

`lf.plot` and `limitformer.checking` share these names. A value is a number for each sample and layer (or block).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class CurveInfo:
    """The words and the range of one curve.

    Attributes:
        title: noun phrase for labels, titles and sentences.
        note: definition, or the meaning of a reference value.
        unit: unit of the values.
        axis: the unit of depth: "layer" for the stream, start included; "block" for parts of a block.
        scale: scale of the values in plots.
        least, most: the values that the curve cannot pass.
        reference: value that a reader compares with, such as 1 for tokens of one direction; None: there is none.
    """

    title: str
    note: str = ""
    unit: str = "1"
    axis: Literal["layer", "block"] = "layer"
    scale: Literal["linear", "log"] = "log"
    least: float = 0.0
    most: float = inf
    reference: float | None = None


CURVES: Mapping[str, CurveInfo] = {
    "pair_correlation": CurveInfo(
        title="correlation of two tokens", scale="linear", least=-1.0, most=1.0, reference=1.0
    ),
    "variance": CurveInfo(title="size of the tokens, |x|²/width"),
    "correlation": CurveInfo(
        title="mean correlation of tokens",
        note="1: all tokens have one direction",
        scale="linear",
        least=-1.0,
        most=1.0,
        reference=1.0,
    ),
    "correlation_abs": CurveInfo(title="mean absolute correlation of tokens", scale="linear", most=1.0, reference=1.0),
    "correlation_95": CurveInfo(
        title="95th percentile of the correlations of tokens", scale="linear", least=-1.0, most=1.0, reference=1.0
    ),
    "size": CurveInfo(title="root mean square of the stream", note="of a coordinate, over tokens"),
    "relative_branch": CurveInfo(
        title="size of a branch", note="over the size of the stream that it is added to", axis="block"
    ),
    "step": CurveInfo(title="step of the stream", note="change in a block over the stream before it", axis="block"),
    "stable_rank": CurveInfo(
        title="stable rank of the tokens", note="number of directions, by the largest", least=1.0, reference=1.0
    ),
    "effective_rank": CurveInfo(
        title="effective rank of the tokens", note="number of directions, by entropy", least=1.0, reference=1.0
    ),
    "largest": CurveInfo(title="largest activation", note="largest |x| of the stream"),
    "typical": CurveInfo(title="typical activation", note="median |x| of the stream"),
    "logit_std": CurveInfo(
        title="standard deviation of logits", note="in a row of attention, averaged over heads", axis="block"
    ),
    "effective_tokens": CurveInfo(
        title="effective tokens",
        note="that a row of attention reads, averaged over heads",
        axis="block",
        least=1.0,
        reference=1.0,
    ),
    "largest_logit": CurveInfo(title="largest logit", note="averaged over heads", axis="block", least=-inf),
    "stream_gradient": CurveInfo(title="gradient of the stream", note="norm of the loss's derivative"),
    "gradient": CurveInfo(title="gradient of weights", note="norm of the loss's derivative, by block", axis="block"),
    "loss": CurveInfo(title="loss", unit="nats"),
}
