"""What a page draws as coloured cells: correlations of tokens at some depths, and a number for each head and block.

Correlations go as hundredths, a signed byte each, row by row up to the diagonal, in base64: a page with 17 depths of
128 tokens holds 0.2 MB of them. UNKNOWN stands for NaN.
"""

import base64
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from limitformer.results.correlation import correlation

if TYPE_CHECKING:
    from limitformer.checking.report import Report

TOKENS, DEPTHS = 128, 17  # at most
UNKNOWN = -128
HEADS = {
    "logit_std": "Logits' standard deviation",
    "effective_tokens": "Effective tokens",
    "largest_logit": "Largest logit",
}


def grids(report: "Report") -> dict[str, Any]:
    """Of a network and the one beside it, as JSON has them."""
    reports = [report, report.against] if report.against is not None else [report]
    return {
        "matrices": [matrices(each) for each in reports],
        "heads": [{**one, "network": each.name} for each in reports for one in heads(each)],
    }


def matrices(report: "Report") -> dict[str, Any]:
    """Correlations of the first sequence in the first sample."""
    first = report.data[["covariance"]].isel(sample=0)
    tokens, every = shown_tokens(first)
    layers = spread(first.sizes["layer"], DEPTHS)
    rho = correlation(first.isel(layer=layers, token=tokens, token_=tokens)).values
    names = first["word"].values[tokens].tolist() if "word" in first.coords else []
    return {
        "network": report.name,
        "layers": first["layer"].values[layers].tolist(),
        "tokens": [int(each) + 1 for each in tokens],
        "of": every,
        "words": [str(name) for name in names],
        "rows": [packed(each) for each in rho],
    }


def shown_tokens(data: Any) -> tuple[NDArray[np.int64], int]:
    """Of the first sequence, at most TOKENS of them, and how many it has."""
    sequence = data["sequence"].values if "sequence" in data.coords else np.zeros(data.sizes["token"])
    every = np.flatnonzero(sequence == sequence[0])
    return every[spread(len(every), TOKENS)], len(every)


def spread(count: int, most: int) -> NDArray[np.int64]:
    """At most so many of 0 … count − 1, from the first to the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def packed(rho: NDArray[Any]) -> str:
    """The lower triangle with its diagonal, in hundredths."""
    part = rho[np.tril_indices(len(rho))].astype(float)
    cells = np.where(np.isfinite(part), np.clip(100 * part, -100, 100).round(), UNKNOWN)
    return base64.b64encode(cells.astype(np.int8).tobytes()).decode()


def heads(report: "Report") -> list[dict[str, Any]]:
    """(head, block) of the measures of attention: medians over samples."""
    found = []
    for name, title in HEADS.items():
        if name in report.curves:
            values = report.curves[name].median("sample").transpose("head", "block").values
            blocks = report.curves["block"].values if "block" in report.curves.coords else range(1, values.shape[1] + 1)
            cells = [[float(f"{each:.5g}") if np.isfinite(each) else None for each in row] for row in values]
            found.append({"title": title, "blocks": [int(each) for each in blocks], "cells": cells})
    return found
