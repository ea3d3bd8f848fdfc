"""Tiny language models of four kinds: the numbers that `check` computes from a configuration, and their training.

* pre: GPT-2, the norm before the branch;
* post: BERT as a decoder, the norm after the sum;
* none: GPT-2 without norms in its blocks, each branch f added as λx + γf(x), λ² + γ² = 1 at the start;
* shaped: the same with shaped attention [ST, eq. 11].

All are causal and tie their embedding to their head; transformers' own code draws all weights from N(0, s²), s the
`initializer_range` (GPT-2 divides those of the output projections by √(2·blocks)).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from limitformer_papers.training.harness import threads, train  # first: its error names the missing extra

# isort: split
import torch
from transformers import BertConfig, GPT2Config, PreTrainedConfig

from limitformer.checking import check
from limitformer.checking.report import Report
from limitformer.checking.thresholds import BROKEN
from limitformer.designing import Objective
from limitformer.designing.objective import values_of
from limitformer.hf import Shaping
from limitformer.subjects.subject import resolve
from limitformer_papers.training.data.text_data import TextData
from limitformer_papers.training.log import curve, read_log
from limitformer_papers.training.plan import Plan
from limitformer_papers.training.tasks.mlm import spread

KINDS = ("pre", "post", "none", "shaped")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes that all networks of a study share.

    Attributes:
        width, heads: of a block, whose hidden layer is four times as wide.
        vocabulary, length, batch: of the text, and sequences in a step.
        steps, warmup, learning_rate: of the training: a rise, and then a constant rate.
        evaluated: held-out sequences.
        gamma: γ of the kinds without norms.
        documents: of the corpus; None: all.
    """

    width: int = 64
    heads: int = 4
    vocabulary: int = 512
    length: int = 32
    batch: int = 8
    steps: int = 200
    warmup: int = 20
    learning_rate: float = 3e-3
    evaluated: int = 256
    gamma: float = 0.2
    documents: int | None = None


@dataclass(frozen=True)
class TinyNetwork:
    """A configuration: its kind, its depth and its initializer_range."""

    kind: str
    depth: int
    scale: float

    @property
    def name(self) -> str:
        return f"{self.kind}-d{self.depth}-s{self.scale:g}"


def configuration(cell: TinyNetwork, sizes: Sizes) -> PreTrainedConfig:
    common: dict[str, Any] = {"vocab_size": sizes.vocabulary, "initializer_range": cell.scale, "use_cache": False}
    common |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if cell.kind == "post":
        return BertConfig(
            **common, hidden_size=sizes.width, num_hidden_layers=cell.depth, num_attention_heads=sizes.heads,
            intermediate_size=4 * sizes.width, max_position_embeddings=sizes.length, is_decoder=True,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, architectures=["BertLMHeadModel"],
        )  # fmt: skip
    return GPT2Config(
        **common, n_embd=sizes.width, n_layer=cell.depth, n_head=sizes.heads, n_positions=sizes.length,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, architectures=["GPT2LMHeadModel"],
    )  # fmt: skip


def shaping_of(cell: TinyNetwork, sizes: Sizes) -> Shaping | None:
    """Return the shaping of the kinds without norms; γ₁ and γ₂ are left out where attention is the stock one."""
    if cell.kind == "shaped":
        return Shaping(residual_gamma=sizes.gamma)
    return Shaping(gamma1=None, gamma2=None, residual_gamma=sizes.gamma) if cell.kind == "none" else None


def foretold(cell: TinyNetwork, sizes: Sizes, samples: int, seed: int) -> dict[str, float]:
    """Return the numbers of `check` on unrelated tokens: medians over networks of the law."""
    with threads(1):  # the number of threads changes the last bits of sums
        report = check(
            configuration(cell, sizes), tokens=sizes.length, samples=samples, seed=seed,
            shaping=shaping_of(cell, sizes), progress=False,
        )  # fmt: skip
    return numbers_of(report)


def numbers_of(report: Report) -> dict[str, float]:
    curves, values = report.curves, values_of(report.curves, report.data)
    gradient = curves["stream_gradient"].values
    with np.errstate(divide="ignore", invalid="ignore"):
        numbers = {
            "correlation at the end": values["correlation"][0],
            "stream, end over start": values["stream"][0],
            "least effective tokens": values["effective"][0],
            "gradients, most over least": values["gradient"][0],
            "stream's gradient, first over last": gradient[:, 1] / gradient[:, -1],
            "largest branch over stream": np.nanmax(curves["relative_branch"].values, (1, 2)),
            "largest spread of logits": np.nanmax(curves["logit_std"].values, (1, 2)),
            "loss at the start": curves["loss"].values,
            "distance of the objective": Objective().distance(values),
        }
    return {name: float(np.median(value)) for name, value in numbers.items()} | {"verdicts": float(verdicts_of(report))}


def verdicts_of(report: Report) -> int:
    """Count verdicts as version 0.2.0, which made the study, did: without loss, dead weights and warnings."""
    counted = [one for one in report.verdicts if one.grade == BROKEN and one.name not in ("loss", "dead")]
    counted += [one for one in report.verdicts if one.name in ("swamped", "range")]
    largest = report.curves["logit_std"].max("head").dropna("block", how="any")
    uniform = bool((largest.isel(block=-1) < 0.05).mean() >= 0.5) and largest.sizes["block"] > 0
    return len(counted) + uniform


def trained(cell: TinyNetwork, sizes: Sizes, data: TextData, seed: int, out: Path) -> tuple[float, float]:
    """Train one network, or resume, or read its result: the loss of the first step and the held-out loss (∞: diverged).

    Raises:
        TrainingInterrupted: Ctrl-C; the same call goes on.
    """
    folder = out / f"{cell.name}-seed{seed}"
    torch.manual_seed(seed)
    model: Any = resolve(configuration(cell, sizes), shaping=shaping_of(cell, sizes))
    summary = train(
        model.factory(),
        plan_of(sizes, seed, folder),
        train_data=data.train,
        eval_data=spread(data.evaluation, sizes.evaluated),
        collate=next_tokens,
        about={"experiment": "foretells", **asdict(cell), **asdict(sizes), "data": data.record},
    )
    first = float(curve(read_log(folder), "loss")[1][0])
    return first, float("inf") if summary["diverged"] else float(summary["eval_loss"])


def plan_of(sizes: Sizes, seed: int, folder: Path) -> Plan:
    """Return the plan of one core, so that every machine gives the same bits."""
    every: dict[str, Any] = {"save_every": sizes.steps, "log_every": sizes.steps, "evaluate_every": sizes.steps}
    return Plan(
        folder=folder, steps=sizes.steps, batch=sizes.batch, learning_rate=sizes.learning_rate, warmup=sizes.warmup,
        seed=seed, tensorboard=False, threads=1, keep_checkpoints=1, **every,
    )  # fmt: skip


def loss_of_frequencies(data: TextData, sizes: Sizes) -> float:
    """Return the held-out loss, in nats, of predicting by the training text's token frequencies."""
    counts = np.bincount(np.asarray(data.train.tokens), minlength=sizes.vocabulary) + 1
    sequences = spread(data.evaluation, sizes.evaluated)
    targets = np.concatenate([sequences[k]["input_ids"][1:].numpy() for k in range(len(sequences))])
    return float(-np.log(counts[targets] / counts.sum()).mean())


def next_tokens(examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a batch of examples {"input_ids"} of one length; the models shift the labels themselves."""
    ids = torch.stack([one["input_ids"] for one in examples])
    return {"input_ids": ids, "labels": ids}
