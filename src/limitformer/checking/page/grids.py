"""The coloured cells of a page: correlations of tokens at some depths, and a number for each head and block.

Correlations are sent in hundredths, a signed byte each, row by row up to the diagonal, in base64: 17 depths of 128
tokens take 0.2 MB. UNKNOWN stands for NaN.
"""

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from limitformer.checking.curves import BY_HEAD, CURVES
from limitformer.checking.network import CheckedNetwork
from limitformer.results.correlation import correlation

TOKENS, DEPTHS = 128, 17  # at most
UNKNOWN = -128


def grids(networks: list[CheckedNetwork]) -> dict[str, Any]:
    """Return the cells of one or two networks as JSON holds them."""
    return {
        "matrices": [matrices(each) for each in networks],
        "heads": [{**one, "network": each.name} for each in networks for one in heads(each)],
    }


def matrices(network: CheckedNetwork) -> dict[str, Any]:
    """Return the correlations of at most TOKENS tokens of the first sequence in the first sample."""
    first = network.data[["covariance"]].isel(sample=0)
    sequence = first["sequence"].values if "sequence" in first.coords else np.zeros(first.sizes["token"])
    every = np.flatnonzero(sequence == sequence[0])
    tokens = every[evenly(len(every), TOKENS)]
    layers = evenly(first.sizes["layer"], DEPTHS)
    rho = correlation(first.isel(layer=layers, token=tokens, token_=tokens)).values
    words = first["word"].values[tokens].tolist() if "word" in first.coords else []
    return {
        "network": network.name,
        "layers": first["layer"].values[layers].tolist(),
        "tokens": [int(each) + 1 for each in tokens],
        "of": len(every),
        "words": [str(word) for word in words],
        "rows": [packed(each) for each in rho],
    }


def evenly(count: int, most: int) -> NDArray[np.int64]:
    """Return at most `most` of 0 … count − 1, from the first to the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def packed(rho: NDArray[Any]) -> str:
    """Return the lower triangle with its diagonal, in hundredths."""
    part = rho[np.tril_indices(len(rho))].astype(float)
    cells = np.where(np.isfinite(part), np.clip(100 * part, -100, 100).round(), UNKNOWN)
    return base64.b64encode(cells.astype(np.int8).tobytes()).decode()


def heads(network: CheckedNetwork) -> list[dict[str, Any]]:
    """Return medians over samples (head, block) of the curves of attention."""
    result = []
    for name in BY_HEAD:
        if name in network.curves:
            curve = network.curves[name]
            values = curve.median("sample").transpose("head", "block").values
            blocks = curve["block"].values if "block" in curve.coords else range(1, values.shape[1] + 1)
            cells = [[float(f"{each:.5g}") if np.isfinite(each) else None for each in row] for row in values]
            result.append({"title": CURVES[name].title, "blocks": [int(each) for each in blocks], "cells": cells})
    return result
