"""The numbers of a report under the names of training monitors, each with the interval of new networks.

"attention_entropy/block_03: 4.1 (3.9 to 4.3)" is what the curve of that name in Weights & Biases or TensorBoard should
begin with.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from limitformer.base.errors import InputError, require
from limitformer.checking.curves import over_heads

NAMES: Mapping[str, str] = {  # our curves, under the names that monitors of training use
    "loss": "loss",
    "size": "activation_rms",
    "largest": "massive_activation",
    "correlation": "token_similarity",
    "effective_rank": "effective_rank",
    "entropy": "attention_entropy",
    "largest_logit": "max_attention_logit",
    "logit_std": "attention_logit_std",
    "effective_experts": "effective_experts",
    "busiest_expert": "max_expert_load",
    "stream_gradient": "activation_grad_norm",
}
Log = Callable[[Mapping[str, float], int], None]


class Metric(NamedTuple):
    """A number, and the interval that holds that of nine of ten new networks; NaN where no law is known."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if np.isnan(self.low):
            return f"{self.value:.4g}"
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


def metrics_of(curves: xr.Dataset, band: xr.Dataset | None) -> dict[str, Metric]:
    """Return metrics by name: `loss`, and by layer or block `attention_entropy/block_03`, means over heads."""
    result = dict[str, Metric]()
    for curve, name in NAMES.items():
        if curve not in curves:
            continue
        values = over_heads(curves[curve]).median("sample")
        edges = None if band is None or curve not in band else over_heads(band[curve])
        for place, value in np.ndenumerate(values.values):
            if np.isnan(value):
                continue
            low, high = (
                np.nan if edges is None else float(edges.sel(edge=edge).values[place]) for edge in ("low", "high")
            )
            result[name + place_in_words(values, place)] = Metric(float(value), low, high)
    return result


def place_in_words(values: xr.DataArray, place: tuple[int, ...]) -> str:
    """Return /layer_03 or /block_03, with as many digits as the last one has."""
    if not place:
        return ""
    (dimension,) = map(str, values.dims)
    number = int(values[dimension].values[place]) if dimension in values.coords else place[0]
    digits = max(2, len(str(values.sizes[dimension])))
    return f"/{dimension}_{number:0{digits}d}"


def to_wandb(run: Any = None) -> Log:
    """Return a function that logs metrics to a run of Weights & Biases, by default the active one.

    Raises:
        InputError: no run is active.
    """
    if run is None:
        try:
            import wandb
        except ImportError as error:
            raise InputError("wandb is not installed. Nearest: pip install wandb, or to_wandb(run).") from error
        run = wandb.run
    if run is None:
        raise InputError("no run of wandb is active. Nearest: wandb.init(…) first, or to_wandb(run).")
    require(callable(getattr(run, "log", None)), f"a run of wandb has log; got {type(run).__name__}.")
    return lambda values, step: run.log({**values, "limitformer/step": step})


def to_tensorboard(writer: Any) -> Log:
    """Return a function that logs metrics to a `torch.utils.tensorboard.SummaryWriter`.

    Raises:
        InputError: it has no method `add_scalar`.
    """
    if not callable(getattr(writer, "add_scalar", None)):
        raise InputError(f"a SummaryWriter has add_scalar; got {type(writer).__name__}.")

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        if callable(getattr(writer, "flush", None)):
            writer.flush()  # a look is rare, and a training may be killed

    return log


def scalars(metrics: Mapping[str, Metric], expected: Mapping[str, Metric] | None) -> dict[str, float]:
    """Return what a monitor draws: each number, and below `expected/` the interval of a new network."""
    result = {f"limitformer/{name}": each.value for name, each in metrics.items()}
    for name, each in (expected or {}).items():
        if not np.isnan(each.low):
            result |= {f"limitformer/expected/{name}/low": each.low, f"limitformer/expected/{name}/high": each.high}
    return result
