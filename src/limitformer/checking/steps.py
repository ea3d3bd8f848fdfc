"""`steps`: the first training steps of a network, in law, with verdicts, a page and data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr

from limitformer.base.errors import require, require_count
from limitformer.checking.page.steps import contents
from limitformer.checking.step_verdicts import GIVEN, step_verdicts
from limitformer.checking.thresholds import valid_rate
from limitformer.checking.trained_networks import COLUMNS, SHOWN, TrainedNetworks
from limitformer.reports.page import Page
from limitformer.reports.report import AnyReport
from limitformer.reports.verdict import aligned, number_text, titled, verdict_lines, wrapped
from limitformer.simulation.simulate import Interrupted
from limitformer.stepping.noise import ALL
from limitformer.stepping.optimizers import NotUnderstoodError, with_groups
from limitformer.stepping.simulate import SAME, simulate_steps, training_of
from limitformer.subjects.inputs import Inputs, inputs_of
from limitformer.subjects.losses import Loss
from limitformer.subjects.subject import resolve
from limitformer.weightless.layout import Chosen
from limitformer.weightless.run import AUTO
from limitformer.weightless.simulate import token_count
from limitformer.witness import DRAWN, FULL, Witness, witness_steps


@dataclass(frozen=True)
class StepsReport(TrainedNetworks, AnyReport):
    """The result of `limitformer.steps`.

    Attributes:
        name: the network's name.
        data: what was measured, by rate, sample and step: the dataset of `limitformer.stepping.simulate_steps`.
        verdicts: statements about the rates and the first steps, in a fixed order.
        about: provenance; `batch` is the size of the first batch, `asked` the number of networks asked for.
        witness: two steps, compared with the user's own module and optimiser in plain PyTorch; None if none were.
    """

    FILES = "steps"

    def __repr__(self) -> str:
        """Return name, grade and sizes on one line; `print` shows the report."""
        return f"<StepsReport {self.name}: {self.grade}; {self.heading}>"

    def __str__(self) -> str:
        return self.text()

    def text(self, full: bool = True) -> str:
        """Return the verdicts, the table by rate and what to watch, on lines of at most 80 characters.

        `full`: with the reasons of the verdicts, and with what to watch between the first step and the last.
        """
        lines = verdict_lines(self.verdicts, exists=True, full=full)  # the first line is the answer
        lines += ["", *wrapped(f"{self.name}: {self.heading}", ""), *wrapped(self.proof, "")]
        table = self.rows()
        columns = [name for name in SHOWN if name in table[0]]
        head = f"{'rate':>8}" + "".join(f"{COLUMNS[name][0]:>9}" for name in columns)
        # Each is over its columns: explosions on both batches, losses before and after.
        above = f"{'batch/unseen':>26}{'loss of the batch':>18}{'of an unseen one':>18}"
        rows = [
            f"{number_text(row['rate']):>8}"
            + "".join(f"{cell(row[name])}{unseen(row) if name == 'explodes' else ''}".rjust(9) for name in columns)
            for row in table
        ]
        watched = self.watched()
        rows_shown = watched.rows if full else [watched.rows[0], watched.rows[-1]]
        cells = aligned([watched.head, *rows_shown], left=0)
        noise = "".join(
            f"Simple noise scale of SGD at step {row['step']}: {number_text(row['scale'])} sequences "
            f"({number_text(row['low'])} to {number_text(row['high'])}). "
            for row in self.noise()
            if row["weights"] == ALL
        )
        numbers = [above, head, *(row.rstrip() for row in rows), f"{watched.label}:", *cells]
        return "\n".join([*lines, "", *numbers, "", *wrapped(f"{noise}{self.caveat}", "")])

    def contents(self) -> Page:
        """Return what the page shows."""
        return contents(self)


class StepsInterrupted(Interrupted):
    """Ctrl-C during `steps`; `report` is that of the finished networks, and `partial` has their data."""

    def __init__(self, report: StepsReport) -> None:
        super().__init__(report.data)
        self.report, self.pickled_arguments = report, (report,)


def cell(value: float) -> str:
    """Return a number of the table; "–" if it is unknown."""
    return "–" if np.isnan(value) else number_text(value)


def unseen(row: Mapping[str, float]) -> str:
    """Return the count of explosions on the unseen batch, after that on the batch of the steps."""
    return f"/{cell(row['unseen_explodes'])}" if "unseen_explodes" in row else ""


def steps(
    model: Any,
    inputs: Any = 64,
    *,
    optimizer: Any,
    after_groups: Any = None,
    rates: Sequence[float] | None = None,
    steps: int = 3,
    samples: int,
    seed: int,
    sequences: int | None = None,
    batches: Any = SAME,
    unseen: Any = None,
    loss: Loss | str | None = None,
    clip: float | None = None,
    warmup: int = 0,
    schedule: Any = None,
    overrides: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    draw: str = AUTO,
    dtype: torch.dtype = torch.float32,
    batch_dim: int = 0,
    blocks: Chosen | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
    witness: bool | str = True,
) -> StepsReport:
    """Simulate the first training steps of a network in law, and tell which learning rates it takes.

    The gradients come from these tokens alone: give the batch of training. A larger batch has other gradients: under
    Adam other signs, under Muon other directions. Nothing is said about later steps.

    Args:
        model: a configuration of transformers, its folder, JSON or public name, a function that builds a
            `torch.nn.Module`, or a `limitformer.Transformer`.
        inputs: the first batch, as for `limitformer.weightless.simulate`.
        optimizer: a name in `limitformer.stepping.OPTIMIZERS`, such as "adamw"; a dictionary with such a "name" and its
            options; or a function that takes the module and returns its optimiser, or several.
        after_groups: a function of your training loop that receives what `optimizer` returned, and applies keys of its
            groups that torch does not know, such as "lr_scale".
        rates: learning rates, each of which begins with the same networks; the rates of parameter groups keep their
            ratios, and the rate is the optimiser's default, or that of the first group if no group has the default.
            None: that of the optimiser.
        steps: number of steps.
        samples: number of networks; 35 or more can show that a loss falls in nine of ten.
        seed: the same seed gives the same numbers, for any number of threads, samples and rates.
        sequences: number of sequences of a batch. If `inputs` is a number of tokens, each network has its own, with ids
            that are drawn uniformly from the vocabulary; else they are the first of `inputs`. The noise of gradients
            is then measured. Their gradients add up in pieces of 512 tokens or one sequence, so that memory does not
            grow with the batch; stream, attention and output are measured on the first piece. A loss that is one
            number for all sequences together has the whole batch in one pass, and no noise.
        batches: "same" for the first batch at every step; "fresh" for ids that are drawn uniformly from the
            vocabulary, or numbers of the first batch's mean and variance; or a list of inputs for each step. With
            "same" the loss of the batch is compared before and after, otherwise that of the unseen batch.
        unseen: a batch that no step sees; None draws it as for "fresh".
        loss: "next-token", "mse" (with `targets` or `labels` in the inputs), or a function of the module's output and
            its inputs that returns one number a sequence. None: the loss that the module computes, or that of a task
            of transformers. Without these, whole numbers as targets have their cross-entropy, and ids with an output
            (…, tokens, words) that of the next token, if a table has as many rows as there are words, and the stream
            has another width. Otherwise a loss is required.
        clip: the largest norm of all gradients together; None does not clip.
        warmup: number of steps over which the learning rate rises linearly.
        schedule: a function of the step, or numbers, that multiply the learning rates.
        overrides, settings, batch_dim, blocks, trust_remote_code, progress: as for `limitformer.check`.
        draw: whether Gaussian matrices are drawn: "never", "always", or "auto", whichever costs less.
        dtype: torch.float32 or torch.float64.
        witness: whether two steps of the first network are compared with the user's own module and optimiser in plain
            PyTorch; "full" for any size. If they differ, or the optimiser is not understood, the module's own code
            draws the networks, and the optimiser trains them.

    Raises:
        InputError: an argument cannot be used, the module's code cannot run, or it makes the same network each time.
        StepsInterrupted: Ctrl-C after the first network; it holds the report of the finished networks.

    >>> import limitformer as lf
    >>> small = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 99}
    >>> def sgd(module):
    ...     return torch.optim.SGD(module.parameters(), lr=0.1)
    >>> report = lf.steps(small, 8, optimizer=sgd, rates=[0.1, 1.0], steps=1, samples=2, seed=0, progress=False)
    >>> report.table()["falls"].values.tolist()
    [2, 2]
    """
    optimizer = with_groups(optimizer, after_groups)
    every = None if rates is None else [valid_rate(f"rates[{k}]", rate) for k, rate in enumerate(rates)]
    subject = resolve(model, settings, trust_remote_code=trust_remote_code)
    first = inputs_of(inputs, subject, sequences)
    size = batch_size(first.with_batch_dim(batch_dim).with_sequences(sequences))

    require(witness in (True, False, FULL), f"witness must be True, False or {FULL!r}; got {witness!r}.")
    options: dict[str, Any] = {
        "optimizer": optimizer, "rates": every, "steps": steps, "seed": seed, "sequences": sequences,
        "batches": batches, "unseen": unseen, "loss": loss, "clip": clip, "warmup": warmup, "schedule": schedule,
        "overrides": None if overrides is None else dict(overrides), "draw": draw, "batch_dim": batch_dim,
        "blocks": blocks,
    }  # fmt: skip
    require_count("samples", samples)
    require_count("steps", steps)  # before the witness, which takes fewer
    proof: Witness | None = None

    def report(data: xr.Dataset) -> StepsReport:
        data = data.assign_attrs(unseen="drawn" if unseen is None else GIVEN)
        about = {**data.attrs, "batch": size, "asked": samples}
        return StepsReport(titled(subject.name, settings), data, step_verdicts(data), about, proof)

    def simulate() -> xr.Dataset:
        drawn = proof.reason if proof is not None and proof.status == DRAWN else ""
        return simulate_steps(subject, first, samples=samples, dtype=dtype, progress=progress, drawn=drawn, **options)

    try:
        try:
            if witness:
                build = partial(training_of, model=subject, inputs=first, factors=None, drawn="", **options)
                proof = witness_steps(build, optimizer, witness, sequences=sequences)
            data = simulate()
        except NotUnderstoodError as error:
            proof = Witness(DRAWN, error.reason)
            data = simulate()
    except Interrupted as interrupt:
        raise StepsInterrupted(report(interrupt.partial)) from interrupt
    return report(data)


def batch_size(inputs: Inputs) -> str:
    """Return the size of a batch in words: its tokens without padding, or the inputs if it has no dimension of tokens.

    >>> batch_size(Inputs({"ids": torch.ones(2, 8)}, {}, 2)), batch_size(Inputs({"x": torch.ones(1, 3, 9, 9)}, {}, 1))
    ('16 tokens', '1 input')
    """
    first = next(iter(inputs.fixed.values()), None)
    if inputs.counted is not None:
        number, unit = int(inputs.counted.sum()), "token"
    elif first is None or first.dim() in (2, 3):
        number, unit = inputs.rows * token_count(inputs), "token"
    else:
        number, unit = inputs.rows, "input"
    return f"{number} {unit}{'' if number == 1 else 's'}"
