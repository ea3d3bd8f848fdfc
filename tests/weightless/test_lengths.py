"""The first attention at any length, against all rows of drawn networks."""

import numpy as np
import pytest
import torch
import transformers
from scipy.stats import ks_2samp

import limitformer as lf
from limitformer.weightless import attention_by_length
from limitformer.weightless.lengths import WantedMask, rows_mask

SIZES = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "num_hidden_layers": 2, "vocab_size": 128, "initializer_range": 0.5,
}  # fmt: skip
WINDOW = 6
MAMBA = {"model_type": "mamba2", "num_hidden_layers": 1, "hidden_size": 64, "num_heads": 16, "head_dim": 8}


def drawn_rows(config, rows, seed, tokens=24):
    """Effective tokens and the logits' spread of rows of the first block, mean over rows and heads, from weights."""
    torch.manual_seed(seed)
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**config, attn_implementation="eager"))
    ids = torch.randperm(128, generator=torch.Generator().manual_seed(seed))[:tokens][None]
    with torch.no_grad():
        a = model.eval()(ids, output_attentions=True).attentions[0][0, :, rows].double()
    effective = torch.special.entr(a).sum(-1).exp().mean()
    logits = a.log()  # up to a constant by row
    spread = [row[row.isfinite()].var(correction=0) for row in logits.flatten(0, 1)]
    return float(effective), float(torch.stack(spread).mean())


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_law_is_that_of_all_rows_of_drawn_networks(kind):
    """All rows of the second half. A twin of twice the length, or without the window, is rejected."""
    config = {"model_type": kind, **SIZES} | ({"sliding_window": WINDOW} if kind == "mistral" else {})
    count, rows = 130, list(range(12, 24))
    data = attention_by_length(config, [24, 48], rows=99, samples=count, seed=3, progress=False)
    ours = data["effective_tokens"].mean("head").values
    spread = (data["logit_std"] ** 2).mean("head").values
    drawn = np.array([drawn_rows(config, rows, seed) for seed in range(count)])
    assert ks_2samp(ours[:, 0], drawn[:, 0]).pvalue > 1e-4
    assert ks_2samp(spread[:, 0], drawn[:, 1]).pvalue > 1e-4
    if kind == "llama":
        assert ks_2samp(ours[:, 1], drawn[:, 0]).pvalue < 1e-6
        assert np.allclose(data["tokens_seen"].isel(length=0), np.mean(rows) + 1)
    else:
        assert (data["tokens_seen"] == WINDOW).all()
        wide = attention_by_length(config | {"sliding_window": 24}, [24], rows=99, samples=60, progress=False)
        assert ks_2samp(wide["effective_tokens"].mean("head").values[:, 0], drawn[:, 0]).pvalue < 1e-6


def test_bidirectional_attention_sees_all_tokens():
    config = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    data = attention_by_length(config | {"intermediate_size": 32, "vocab_size": 64}, [16, 200], rows=5, progress=False)
    assert data["tokens_seen"].isel(sample=0, head=0).values.tolist() == [16, 200]
    assert data["threshold"].values == pytest.approx(np.sqrt(2 * np.log([16, 200])))


def test_same_seed_gives_the_same_numbers_and_rows_lie_in_the_second_half():
    config = {"model_type": "llama", **SIZES}
    first, again = (attention_by_length(config, [32, 500], rows=4, seed=5, progress=False) for _ in range(2))
    assert first.drop_attrs().identical(again.drop_attrs())
    seen = first["tokens_seen"].isel(sample=0, head=0).values
    assert 16 < seen[0] <= 32
    assert 250 < seen[1] <= 500


@pytest.mark.parametrize(
    ("model", "lengths", "message"),
    [
        ({"model_type": "gemma2"}, [64], "softcap"),
        (MAMBA, [64], "no attention"),
        ({"model_type": "t5"}, [64], "a language model"),
        ({"model_type": "llama", **SIZES}, [], "at least one"),
        ({"model_type": "llama", **SIZES}, [3], "lengths must be"),
        ({"model_type": "llama", **SIZES}, [10**11], "more than is free"),
        (lambda: torch.nn.Linear(2, 2), [64], "a language model"),
    ],
)  # fmt: skip
def test_unknown_terms_and_lengths_are_refused(model, lengths, message):
    with pytest.raises(lf.InputError, match=message):
        attention_by_length(model, lengths, progress=False)


def test_only_causal_windows_are_recognised():
    from transformers.masking_utils import (
        bidirectional_mask_function,
        chunked_overlay,
        sliding_window_bidirectional_overlay,
        sliding_window_causal_mask_function,
    )

    assert rows_mask(mask_function=sliding_window_causal_mask_function(5), local_size=5) == WantedMask(True, 5)
    assert rows_mask(mask_function=sliding_window_bidirectional_overlay(5), local_size=5) == WantedMask(None, 5)
    chunks = chunked_overlay(5, torch.zeros(1, dtype=torch.long))
    assert rows_mask(mask_function=chunks, local_size=5).causal is None
    assert rows_mask(mask_function=bidirectional_mask_function) == WantedMask(False, None)
