"""`simulate_steps`: the first training steps of any module, by the law of its weights."""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from limitformer.base.errors import InputError, require, require_count
from limitformer.base.progress import PartOfBar, advance, progress_bar
from limitformer.nn.drawn.simulate import torch_seed
from limitformer.simulation.simulate import Interrupted
from limitformer.stepping.optimizers import (
    base_rate,
    factors_of,
    hidden_matrices,
    made_by,
    read_optimizer,
    valid_clip,
)
from limitformer.stepping.rules import Factors, StepRules, groups_of, in_words
from limitformer.stepping.trajectory import NOISE_PIECES, StepBatches, Trajectory, pieces_of
from limitformer.stepping.weights import Forms
from limitformer.subjects.inputs import Inputs, inputs_of, with_targets
from limitformer.subjects.losses import TARGETS, ChosenLoss, Loss, chosen_loss
from limitformer.subjects.subject import resolve
from limitformer.weightless.arrays import BY_HEAD, Arrays, require_same_blocks
from limitformer.weightless.building import put_parameters
from limitformer.weightless.implicit import Implicit
from limitformer.weightless.laws import GIVEN, UNKNOWN
from limitformer.weightless.layout import Chosen
from limitformer.weightless.network import Weightless
from limitformer.weightless.run import ALWAYS, AUTO, NEVER
from limitformer.weightless.simulate import accepted_inputs, named_errors, provenance

BAR = "networks in training"
SAME, FRESH = "same", "fresh"
IDS = ("", "input_ids", "decoder_input_ids", *TARGETS)
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id", "mask_token_id")
DIMENSIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("loss", "loss_unseen", "gradient_norm", "clipping", "output", "output_change"), ()),
    **dict.fromkeys(("stream", "stream_change", "largest", "correlation"), ("layer",)),
    **dict.fromkeys(("branch", "branch_change"), ("block", "sublayer")),
    **dict.fromkeys((*BY_HEAD, "logit_change"), ("block", "head")),
    **dict.fromkeys(("weight_signal", "weight_noise"), ("weight",)),
    **dict.fromkeys(
        ("weight_gradient", "weight_change", "weight_spectral", "update_effect", "lookup_effect"), ("weight",)
    ),
}


def simulate_steps(
    model: Any,
    inputs: Any = 64,
    *,
    optimizer: Any,
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
    factors: Factors | None = None,
    overrides: dict[str, Any] | None = None,
    draw: str = AUTO,
    dtype: torch.dtype = torch.float32,
    batch_dim: int = 0,
    blocks: Chosen | None = None,
    progress: bool | PartOfBar = True,
    drawn: str = "",
) -> xr.Dataset:
    """Simulate the first training steps of a network, exactly in law and without drawing most weights.

    The gradients come from the tokens of `inputs` alone. A larger batch has other gradients: under Adam other signs,
    under Muon other directions. Nothing is said about later steps.

    Args:
        model, inputs, optimizer, rates, steps, samples, seed, sequences, batches, unseen, loss, clip, warmup, schedule:
            as for `limitformer.steps`; rates of several optimisers keep their ratios to that of the first.
        factors: by the name of a parameter: what its learning rate, its weight decay and its ε are multiplied by.
        overrides, draw, dtype, batch_dim, blocks: as for `limitformer.steps`.
        progress: whether the terminal shows work of more than two seconds; or a part of the bar of longer work.
        drawn: a reason to let the module's own code draw whole networks, which an optimiser that a function returns
            trains itself; empty if there is none.

    Returns:
        A dataset by rate, sample and step; step t is before the step t + 1, so that there is one more than `steps`.
        `loss` of the batch of the next step, and after the last step of the last batch; `loss_unseen`; `gradient_norm`
        of all weights together, and `clipping`, the factor of all gradients. Measured on the first batch: `stream`,
        the root mean square of its entries by layer, `stream_change` |X_t − X_0|/|X_0|, `largest` entry, `correlation`,
        the mean over pairs of a sequence's tokens, all absent if the module has no blocks; `branch` and
        `branch_change` by block and sublayer, infinite where a branch was zero; `entropy`, `logit_std`,
        `largest_logit`, … of attention by head, and `logit_change`, the change of the first sequence's logits (at most
        its last 64 tokens) along the loss's gradient by them at the start, as a root mean square; `output` and
        `output_change`, the root mean squares of the output and of its difference from the start.
        By weight: `weight_gradient`, `weight_change` |W_t − a W_0| with a the factor of weight decay, relative to
        `weight_size`, the norm |W_0| in root mean square over networks (infinite for a weight that was zero and moves);
        its largest singular value `weight_spectral` where the change has low rank, relative to the same;
        `update_effect`, the root mean square of what the change adds to the output of the weight's linear map, times a
        multiplier between the head and the module's output, or, of a table that no map uses, to the rows that tokens
        read; `lookup_effect` is the latter for every table. With `sequences`, `weight_signal` and `weight_noise` are
        unbiased estimates of |G|² and tr Σ (`stepping.noise`). The coordinates `matrix` and `table` say which weights
        have two dimensions or more, and which are those of an `nn.Embedding`.

    Raises:
        InputError: an argument cannot be used, the module's code cannot run, or it makes the same network each time.
        Interrupted: Ctrl-C was pressed; it holds the finished samples, if there are any.
    """
    require_count("samples", samples)
    require_count("steps", steps)
    training = training_of(
        model, inputs, optimizer=optimizer, rates=rates, steps=steps, seed=seed, sequences=sequences, batches=batches,
        unseen=unseen, loss=loss, clip=clip, warmup=warmup, schedule=schedule, factors=factors, overrides=overrides,
        draw=draw, dtype=dtype, batch_dim=batch_dim, blocks=blocks, drawn=drawn,
    )  # fmt: skip
    network, first, every, forms = training.network, training.first, training.rules, training.forms
    if samples > 1:
        training.require_different_networks()
    began = time.perf_counter()
    parts: list[list[Arrays]] = []

    def result() -> xr.Dataset:
        about = {
            **provenance(network), "description": "training steps in law", "seed": seed, "samples": len(parts),
            "sequences": first.rows, "draw": draw, "inputs": str(first), "optimizer": in_words(every),
            "groups": json.dumps(groups_of(every)),
            "muon_outside": ", ".join(
                name for name, rule in every[0].rules.items()
                if rule.of_matrices and name not in hidden_matrices(network.module)
            ),
            "batches": batches if isinstance(batches, str) else "given", "loss": training.loss.name,
            "frozen": sum(not each.requires_grad for each in network.module.parameters()),
            "weights": ", ".join(f"{number} {form}" for form, number in sorted(Counter(forms.forms.values()).items())),
            "kept": "; ".join(f"{name}: {reason}" for name, reason in forms.reasons.items()),
            "wall_seconds": time.perf_counter() - began,
        }  # fmt: skip
        return dataset(parts, [each.base for each in every], network, about)

    bar = progress_bar(BAR, samples * len(every), 0.0) if progress is True else progress or None
    advance(bar, 0)
    try:
        for sample in range(samples):
            of_rates: list[Arrays] = []
            for rule in every:
                one = training.trajectory(rule, sample)
                one.advance = partial(part_done, bar, sample * len(every) + len(of_rates))
                of_rates.append(named_errors(one.arrays, network.subject, first))
                require_same_blocks(parts[0][0] if parts else of_rates[0], of_rates[-1])
                advance(bar, sample * len(every) + len(of_rates))
            parts.append(of_rates)
    except KeyboardInterrupt as interrupt:
        if not parts:
            raise
        raise Interrupted(result()) from interrupt
    finally:
        advance(bar, -1)
    return result()


def part_done(bar: Any, before: int, share: float) -> None:
    advance(bar, before + share)


@dataclass
class Training:
    """The training of networks: everything but their random numbers.

    Attributes:
        rules: of the optimiser, at each learning rate.
        own_rates: the different learning rates that the optimiser has itself.
        optimizer: a function of the module that returns its optimiser, if drawn networks are trained by it; else None.
        batches_at: returns the batches of a network if each has its own; else None.
    """

    network: Weightless
    first: Inputs
    batches: StepBatches
    rules: list[StepRules]
    loss: ChosenLoss
    forms: Forms
    seed: int
    own_rates: set[float]
    optimizer: Any = None
    batches_at: Callable[[int], StepBatches] | None = None

    def of_network(self, sample: int) -> StepBatches:
        """Return the batches of one network."""
        return self.batches if self.batches_at is None else self.batches_at(sample)

    def require_different_networks(self) -> None:
        """Raise `InputError` if all networks are the same, or if what differs has no effect, as in an unused layer."""
        self.network.require_different_draws()
        if any(law.kind in (GIVEN, UNKNOWN) for law in self.network.laws.values()):
            first, second = (self.trajectory(self.rules[0], sample).gradients() for sample in range(2))
            require(
                first != second,
                f"{self.network.name} draws numbers that have no effect: two networks have the same loss and the same "
                "gradients. Nearest: one network (limitformer.steps, samples=1).",
            )

    def trajectory(self, rule: StepRules, sample: int) -> Trajectory:
        """Return the training of one network at one learning rate."""
        batches = self.of_network(sample)
        result = Trajectory(self.network, rule, self.forms, self.loss, batches, self.seed, sample)
        result.optimizer = self.optimizer
        return result


def training_of(
    model: Any, inputs: Any, *, optimizer: Any, rates: Sequence[float] | None, steps: int, seed: int,
    sequences: int | None = None,
    batches: Any = SAME, unseen: Any = None, loss: Loss | str | None = None, clip: float | None = None,
    warmup: int = 0, schedule: Any = None, factors: Factors | None = None, overrides: dict[str, Any] | None = None,
    draw: str = AUTO, dtype: torch.dtype = torch.float32, batch_dim: int = 0, blocks: Chosen | None = None,
    drawn: str = "",
) -> Training:  # fmt: skip
    """Return the training that the arguments of `simulate_steps` describe."""
    require(draw in (AUTO, NEVER, ALWAYS), f'draw must be "auto", "never" or "always"; got {draw!r}.')
    require(dtype in (torch.float32, torch.float64), f"dtype must be torch.float32 or torch.float64; got {dtype}.")
    subject = resolve(model)
    first = inputs_of(inputs, subject, sequences).with_batch_dim(batch_dim)
    network = Weightless(subject, dtype, torch.device("cpu"), overrides, blocks)
    network.needs_blocks = False
    if drawn and not network.drawn:
        network.draw_whole({"its code": drawn})
    of_user = callable(optimizer) and bool(drawn)
    if of_user:  # it trains drawn networks itself: a simulation needs its rate and its name
        optimizers = made_by(optimizer, network.drawn_network(torch_seed(seed, "optimiser")))
        names = " and ".join(type(each).__name__ for each in optimizers)
        own_rates = {group["lr"] for each in optimizers for group in each.param_groups}
        rules = StepRules({}, valid_clip(clip), factors_of(steps, warmup, schedule), base_rate(optimizers[0]), names)
    else:
        rules = rules_of(network, optimizer, steps, clip, warmup, schedule)
        own_rates = {each.lr for each in rules.rules.values()}
    if factors is not None:
        rules = rules.with_factors(factors)
    every = [rules] if rates is None else [rules.with_rate(rate) for rate in rates]
    require(bool(every), "rates must have at least one learning rate; got none.")
    first = accepted_inputs(first, network, seed, own_loss=loss is None)
    first = first.with_sequences(sequences)
    pieces = pieces_of(first, NOISE_PIECES if sequences else 1)
    few = first.part(slice(0, 1 + network.foreign)) if len(pieces) > 1 else first  # two may influence each other

    def begin(inputs: Inputs) -> None:
        own = partial(network.first, seed, inputs, AUTO) if network.foreign else None
        named_errors(own or partial(network.run, seed, range(1), inputs, AUTO, None), subject, inputs)

    begin(few)
    function = chosen_loss(loss, subject.task, network.loss_of_shapes(batch_dim), batch_dim)
    user = optimizer if of_user else None
    whole = False
    if len(pieces) > 1:  # a mean over all tokens that count is not that of the sequences' means
        two = first.part(slice(0, 2))
        trial = Training(
            network,
            two,
            StepBatches([two], None, whole=True),
            every,
            function,
            Forms(draw, 2, 1),
            seed,
            own_rates,
            user,
        )
        named_errors(trial.trajectory(every[0], 0).losses, subject, two)
        whole = function.numbers != two.rows
    pieces = [first] if whole else pieces
    if pieces[0].rows > few.rows:  # as many heads as sequences may be mistaken for each other
        begin(pieces[0])
    of_network = partial(batches_of, first, batches, unseen, network, steps, seed, batch_dim, whole)
    own = sequences is not None and first.free
    prepared = of_network(sample=0 if own else None)
    prepared = replace(prepared, noisy=len(pieces) > 1 and sequences is not None)
    passes = len(pieces) * (steps + 1) * (2 + (prepared.of_steps[-1] is not prepared.of_steps[0]))
    forms = Forms(draw, passes, len(pieces) * steps)
    return Training(
        network, first, prepared, every, function, forms, seed, own_rates, user,
        (lambda sample: replace(of_network(sample=sample), noisy=prepared.noisy)) if own else None,
    )  # fmt: skip


def rules_of(
    network: Weightless, optimizer: Any, steps: int, clip: float | None, warmup: int, schedule: Any
) -> StepRules:
    """Read the optimiser of a network, whose random matrices are on the meta device for as long."""
    implicit = {name: each for name, each in network.module.named_parameters() if isinstance(each, Implicit)}
    ordinary = {
        name: torch.nn.Parameter(torch.empty(each.shape, dtype=network.dtype, device="meta"), not each.frozen)
        for name, each in implicit.items()
    }
    put_parameters(network.module, {id(each): ordinary[name] for name, each in implicit.items()})
    try:
        return read_optimizer(optimizer, network.module, steps=steps, clip=clip, warmup=warmup, schedule=schedule)
    finally:
        put_parameters(network.module, {id(ordinary[name]): each for name, each in implicit.items()})


def weight_sizes(network: Weightless) -> list[float]:
    """Return the root mean square of |W₀| of each trained parameter, by its law."""
    entries = {name: each for name, each in network.module.named_parameters() if not isinstance(each, Implicit)}
    sizes = []
    for name in network.trained:
        law, (rows, *rest) = network.laws[name], network.table.shapes[name] or (1,)
        if law.random or name not in entries:
            square = (rows - len(law.rows)) * (law.mean**2 + law.std**2) + sum(each**2 for each in law.rows.values())
            sizes.append(float(np.sqrt(np.prod(rest, dtype=float) * square)))
        else:
            sizes.append(float(torch.linalg.vector_norm(entries[name].detach().double())))
    return sizes


def dataset(parts: list[list[Arrays]], rates: list[float], network: Weightless, about: dict[str, Any]) -> xr.Dataset:
    """Return the dataset of the finished networks, which are lists of the arrays of each rate."""
    variables = {
        key: np.stack([np.concatenate([of_rates[k][key] for of_rates in parts]) for k in range(len(rates))])
        for key in parts[0][0]
    }
    data = xr.Dataset(
        {key: (("rate", "sample", "step", *DIMENSIONS[key]), each) for key, each in variables.items()},
        {"rate": rates, "weight": list(network.trained)},
    )
    coordinates: dict[str, Any] = {
        name: np.arange(data.sizes[name]) for name in ("sample", "step", "layer") if name in data.dims
    }
    coordinates["matrix"] = "weight", [dimensions >= 2 for dimensions in network.trained.values()]
    tables = {f"{name}.weight" for name, each in network.module.named_modules() if isinstance(each, nn.Embedding)}
    coordinates["table"] = "weight", [name in tables for name in network.trained]
    if "block" in data.dims:
        coordinates["block"] = np.arange(1, data.sizes["block"] + 1)
    if len(network.stacks) > 1:
        names = [(name, k) for name, size in network.stacks.items() for k in range(size.layers)]
        coordinates |= {"stack": ("layer", [name for name, _ in names]), "layer": [k for _, k in names]}
        if "block" in data.dims:
            coordinates["block_stack"] = "block", [name for name, k in names if k]
            coordinates["block"] = [k for _, k in names if k]
    sizes = xr.DataArray(weight_sizes(network), dims="weight")
    data["weight_size"] = sizes
    with np.errstate(divide="ignore", invalid="ignore"):
        for key in ("weight_change", "weight_spectral"):
            data[key] = (data[key] / sizes).where(data[key] != 0.0, 0.0)  # also of a zero that stays
    return data.assign_coords(coordinates).assign_attrs(about)


def batches_of(
    first: Inputs, batches: Any, unseen: Any, network: Weightless, steps: int, seed: int, batch_dim: int,
    whole: bool, sample: int | None = None,
) -> StepBatches:  # fmt: skip
    """Return the batches of all steps.

    Args:
        first: the inputs of the first step.
        batches: "same", "fresh", or inputs for each step.
        unseen: inputs that no step sees; None draws them, no more than one piece; False leaves them out.
        whole: whether a batch is not divided into pieces.
        sample: the network whose own batches are drawn, the first one too; None: all have those of `first`.

    Raises:
        InputError: batches are unknown, too few, or of another shape than the first.
    """
    of = "" if sample is None else f" of network {sample}"
    first = first if sample is None else drawn_like(first, network, seed, f"0{of}")
    if isinstance(batches, str) and batches in (SAME, FRESH):
        of_steps = [first] + [
            first if batches == SAME else drawn_like(first, network, seed, f"{k}{of}") for k in range(1, steps + 1)
        ]
    elif isinstance(batches, Sequence) and not isinstance(batches, str):
        require(
            len(batches) in (steps, steps + 1),
            f"batches must have inputs for each of the {steps} steps, and perhaps for the loss after them; got "
            f'{len(batches)}. Nearest: batches="same".',
        )
        others = [user_batch(each, first, network, f"batches[{k}]", batch_dim) for k, each in enumerate(batches)]
        of_steps = others if len(others) > steps else [*others, others[-1]]
    else:
        raise InputError(f'batches must be "same", "fresh" or a list of inputs; got {batches!r:.60}. Nearest: "same".')
    if unseen is None or unseen is False:
        piece = first if whole else pieces_of(first)[0]
        drawn = drawn_like(piece, network, seed, f"-1{of}") if unseen is None else None
        return StepBatches(of_steps, drawn, whole=whole)
    return StepBatches(of_steps, user_batch(unseen, first, network, "unseen", batch_dim), whole=whole)


def user_batch(value: Any, first: Inputs, network: Weightless, name: str, batch_dim: int) -> Inputs:
    """Return a batch of the user, with the shapes of the first."""
    prepared = inputs_of(value, network.subject).with_batch_dim(batch_dim)
    if network.foreign and any(target in first.fixed for target in TARGETS):
        prepared = with_targets(prepared, network.module)
    shapes, wanted = ({key: tuple(each.shape) for key, each in batch.fixed.items()} for batch in (prepared, first))
    require(shapes == wanted, f"{name} must have the shapes of the first batch, {first}; got {prepared}.")
    return prepared


def drawn_like(first: Inputs, network: Weightless, seed: int, k: str) -> Inputs:
    """Return another batch of the same shapes: ids uniform in the vocabulary, numbers of the same mean and variance.

    Without a known vocabulary, whole numbers are drawn from those of the batch. Inputs of a `limitformer.Transformer`
    are drawn for each network, and so stay as they are.
    """
    if first.tokens is not None:
        return first
    generator = torch.Generator().manual_seed(torch_seed(seed, f"batch {k}"))
    ids = vocabulary(network)
    rolled = {name for name in TARGETS if name in first.fixed and is_next_token(first, name)}
    floats = any(each.is_floating_point() for each in first.fixed.values())
    fixed, changed = {}, False
    for name, each in first.fixed.items():
        fixed[name] = each
        if each.is_floating_point():
            noise = torch.randn(each.shape, generator=generator, dtype=torch.float64)
            fixed[name] = (each.double().mean() + noise * each.double().std(correction=0)).to(each.dtype)
            changed = True
        elif name in IDS and not floats and name not in rolled and len(ids):
            fixed[name] = ids[torch.randint(len(ids), each.shape, generator=generator)].to(each.dtype)
            changed = True
    for name, each in first.fixed.items() if not changed else ():
        if each.dtype == torch.long:  # whatever they number, these are valid
            values, changed = each.unique(), True
            fixed[name] = values[torch.randint(len(values), each.shape, generator=generator)]
    require(
        changed,
        f"no other batch can be drawn for {first}: it has neither ids nor real numbers. Nearest: "
        "give the batches as a list, and unseen=….",
    )
    for name in rolled:
        fixed[name] = fixed[""].roll(-1, 1 - first.batch_dim)
    return replace(first, fixed=fixed, choices=[], labels=())


def is_next_token(inputs: Inputs, name: str) -> bool:
    """Whether a target is the next token, as `with_targets` makes it."""
    ids = inputs.fixed.get("")
    return ids is not None and torch.equal(inputs.fixed[name], ids.roll(-1, 1 - inputs.batch_dim))


def vocabulary(network: Weightless) -> Tensor:
    """Return the ids that are not special; none if no table was looked up."""
    config = network.subject.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config  # of a model of several parts
    size = getattr(text, "vocab_size", None)
    if not isinstance(size, int):
        size = max((rows for rows, _ in network.tables()), default=0)
    special = [getattr(config, name, None) for name in SPECIAL]
    excluded = torch.tensor([each for each in special if isinstance(each, int)], dtype=torch.long)
    ids = torch.arange(size)
    rest = ids[~torch.isin(ids, excluded)]
    return rest if len(rest) else ids
