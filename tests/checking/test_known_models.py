"""The numbers of known models next to the thresholds: a small model by another route, the file, the page."""

import csv
from pathlib import Path

import numpy as np
import torch
import transformers
from benchmarks import known_models
from benchmarks.known_models import FILE, HEAD, MODELS, table, values_of

import limitformer as lf
from limitformer.checking.thresholds import known_values

SMALL = lf.shapes()["gpt2"] | {"n_layer": 3, "n_embd": 96, "n_head": 3, "vocab_size": 500}
TOKENS = 24


def drawn(seed):
    """Return correlation, growth, loss away from chance and the last activation's size, of a network in plain torch."""
    torch.manual_seed(seed)
    sizes = {name: value for name, value in SMALL.items() if name not in ("model_type", "source")}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).eval()
    ids = torch.arange(3, 3 + TOKENS)[None]
    streams = []
    for block in model.transformer.h:
        block.register_forward_hook(lambda _, inputs, output: streams.append(first_of(output)))
    embedding = []
    model.transformer.h[0].register_forward_pre_hook(lambda _, inputs: embedding.append(inputs[0]))
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss
    unit = torch.nn.functional.normalize(streams[-1][0], dim=-1)
    rho = (unit @ unit.T)[~torch.eye(TOKENS, dtype=torch.bool)].mean()
    root = [x.square().mean().sqrt() for x in (embedding[0], streams[0], streams[-1])]
    return {
        "collapsed": rho, "grows": root[2] / root[1], "grows_from_start": root[2] / root[0],
        "far_loss": abs(loss - np.log(SMALL["vocab_size"])),
    }  # fmt: skip


def first_of(output):
    return output[0] if isinstance(output, tuple) else output


def test_numbers_of_a_small_model_are_those_of_drawn_networks():
    """The median of many networks of the law lies where that of drawn ones does; another range is rejected."""
    many = [drawn(seed) for seed in range(60)]
    ours = values_of(SMALL, tokens=TOKENS, samples=60, progress=False)
    wrong = values_of(SMALL | {"initializer_range": 0.06}, tokens=TOKENS, samples=20, progress=False)
    for name in many[0]:
        each = np.array([float(one[name]) for one in many])
        error = 1.2533 * each.std(ddof=1) * (2 / 60) ** 0.5  # of the difference of two medians
        assert abs(ours[name] - np.median(each)) < 4 * error, name
        assert abs(wrong[name] - np.median(each)) > 4 * error, name
    assert ours["dies"] == ours["grows"]


def test_file_has_every_model_and_the_page_its_table():
    rows = list(csv.DictReader(FILE.read_text(encoding="utf-8").splitlines()))
    assert tuple(dict.fromkeys(row["model"] for row in rows)) == MODELS
    assert len({(row["model"], row["measure"]) for row in rows}) == len(rows)
    page = Path(known_models.PAGE).read_text(encoding="utf-8")
    assert page[page.index(HEAD) :].startswith(table(rows) + "\n\n")
    assert [round(known_values()["collapsed"][name], 2) for name in ("gpt2-xl", "bert-large")] == [0.71, 0.95]


def test_verdict_on_the_page_has_the_numbers_of_known_models():
    report = lf.check(SMALL | {"initializer_range": 0.5}, tokens=8, samples=2, gradients=False, progress=False)
    frozen = next(each for each in report.verdicts if each.name == "frozen")
    assert frozen.known.startswith("gpt2-xl 0.199, bert-large 0.107, ")
    assert frozen.known in report.page()
    assert report.record()["verdicts"][0]["known"] == report.verdicts[0].known
