"""The results of passes: arrays by sample, and one Dataset."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

from limitformer.base.errors import require
from limitformer.weightless.inputs import Inputs
from limitformer.weightless.measure import Measure

Arrays = dict[str, NDArray[Any]]

BY_HEAD = ("entropy", "effective_tokens", "tokens_seen", "logit_std", "largest_logit")


def stream_arrays(measure: Measure) -> Arrays:
    """Return the measures of the stream and the heads, by sample."""
    sizes = sorted({v.shape[-1] for v in measure.covariance})
    require(len(sizes) == 1, f"blocks must all have the same number of tokens; got {sizes}. Nearest: equal lengths.")
    sublayers = max((len(each) for each in measure.branch), default=0)
    like = measure.covariance[0]
    arrays = {"covariance": torch.stack(measure.covariance, 1).cpu().numpy()}
    arrays |= {key: torch.stack(each, 1).cpu().numpy() for key, each in measure.size.items() if each}
    if sublayers:
        inside = [padded(each, sublayers, torch.full_like(like, torch.nan)) for each in measure.inside]
        branch = [padded(each, sublayers, torch.full_like(like[:, 0, 0], torch.nan)) for each in measure.branch]
        arrays["covariance_inside"] = torch.stack(inside, 1).cpu().numpy()
        arrays["branch"] = torch.stack(branch, 1).cpu().numpy()
    layers = [heads for heads in measure.heads if heads]
    if layers:
        most = max(heads["entropy"].shape[1] for heads in layers)
        for key in BY_HEAD:
            arrays[key] = np.stack([padded_heads(heads, key, len(like), most) for heads in measure.heads], 1)
    return arrays


def padded(values: list[Tensor], count: int, none: Tensor) -> Tensor:
    """Stack along the second dimension, with `none` for missing values."""
    return torch.stack([*values, *[none] * (count - len(values))], 1)


def padded_heads(heads: dict[str, Tensor], key: str, samples: int, most: int) -> NDArray[Any]:
    """Return (samples, most), with NaN where a layer has fewer heads."""
    out = np.full((samples, most), np.nan)
    if heads:
        out[:, : heads[key].shape[1]] = heads[key].cpu().numpy()
    return out


def output_arrays(out: Any, samples: int) -> Arrays:
    """Return mean and standard deviation of the output's logits, by sample."""
    logits = getattr(out, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() == 0:
        return {}
    by_sample = logits.detach().reshape(samples, -1, logits.shape[-1])
    count = by_sample[0].numel()
    mean = by_sample.sum(-1).double().sum(1) / count  # torch's `std_mean` is ten times slower
    rest = torch.linalg.vector_norm(by_sample - mean[:, None, None].to(logits.dtype), dim=-1)
    std = (rest.double().square().sum(1) / (count - 1)).sqrt()
    return {"logits_mean": mean.cpu().numpy(), "logits_std": std.cpu().numpy()}


def dataset(
    parts: list[Arrays], weights: Mapping[str, int], read: Mapping[str, str], inputs: Inputs, about: dict[str, Any]
) -> xr.Dataset:
    """Return the dataset of the finished samples, with coordinates and the attributes `about`.

    Args:
        weights: the dimensions of trained parameters, by name.
        read: where the pass read parameters, by name.
    """
    arrays = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]} if parts else {}
    dims = {
        "covariance": ("sample", "layer", "token", "token_"),
        "covariance_inside": ("sample", "block", "sublayer", "token", "token_"),
        "branch": ("sample", "block", "sublayer"),
        "step": ("sample", "block"),
        "largest": ("sample", "layer"),
        "typical": ("sample", "layer"),
        "weight_gradient": ("sample", "weight"),
        "stream_gradient": ("sample", "layer"),
        **dict.fromkeys(BY_HEAD, ("sample", "block", "head")),
    }
    data = xr.Dataset({key: (dims.get(key, ("sample",)), value) for key, value in arrays.items()})
    coordinates: dict[str, Any] = {key: np.arange(data.sizes[key]) for key in ("sample", "layer") if key in data.dims}
    if "block" in data.dims:
        coordinates["block"] = np.arange(1, data.sizes["block"] + 1)
    if "weight" in data.dims:
        coordinates["weight"] = list(weights)
        coordinates["read"] = ("weight", [read.get(name, "") for name in weights])
        coordinates["matrix"] = ("weight", [dimensions >= 2 for dimensions in weights.values()])
    tokens = data.sizes.get("token", 0)
    if len(inputs.sequence_of(tokens)) == tokens:
        coordinates["sequence"] = ("token", inputs.sequence_of(tokens).numpy())
    if inputs.labels and tokens == len(inputs.labels):
        coordinates["word"] = ("token", list(inputs.labels))
    return data.assign_coords(coordinates).assign_attrs(about)
