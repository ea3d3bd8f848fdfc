"""`simulate_steps`: the first training steps of any module, by the law of its weights."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import nn

from limitformer.base.errors import require, require_count
from limitformer.base.progress import PartOfBar, advance, progress_bar
from limitformer.nn.drawn.simulate import torch_seed
from limitformer.simulation.simulate import Interrupted
from limitformer.weightless.arrays import BY_HEAD, Arrays, require_same_blocks
from limitformer.weightless.building import put_parameters
from limitformer.weightless.implicit import Implicit
from limitformer.weightless.inputs import Inputs, inputs_of
from limitformer.weightless.layout import Chosen
from limitformer.weightless.losses import ChosenLoss, Loss, chosen_loss, loss_of_shapes
from limitformer.weightless.models import blueprint_of
from limitformer.weightless.network import Weightless
from limitformer.weightless.run import ALWAYS, AUTO, NEVER
from limitformer.weightless.simulate import named_errors, provenance, settle
from limitformer.weightless.steps.batches import SAME, batches_of, tables
from limitformer.weightless.steps.optimizers import base_rate, factors_of, made_by, read_optimizer, valid_clip
from limitformer.weightless.steps.rules import Factors, StepRules, groups_of, in_words
from limitformer.weightless.steps.trajectory import StepBatches, Trajectory
from limitformer.weightless.steps.weights import Forms

BAR = "networks in training"
DIMENSIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("loss", "loss_unseen", "gradient_norm", "clipping", "output", "output_change"), ()),
    **dict.fromkeys(("stream", "stream_change", "largest"), ("layer",)),
    **dict.fromkeys(("branch", "branch_change"), ("block", "sublayer")),
    **dict.fromkeys(BY_HEAD, ("block", "head")),
    **dict.fromkeys(("weight_gradient", "weight_change", "weight_spectral", "update_effect"), ("weight",)),
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
        model, inputs, optimizer, rates, steps, samples, seed, batches, unseen, loss, clip, warmup, schedule: as for
            `limitformer.steps`; rates of several optimisers keep their ratios to that of the first.
        factors: by the name of a parameter: what its learning rate, its weight decay and its ε are multiplied by.
        overrides, draw, dtype, batch_dim, blocks: as for `limitformer.steps`.
        progress: whether the terminal shows work of more than two seconds; or a part of the bar of longer work.
        drawn: a reason to let the module's own code draw whole networks, which an optimiser that a function returns
            trains itself; empty if there is none.

    Returns:
        A dataset by rate, sample and step; step t is before the step t + 1, so that there is one more than `steps`.
        `loss` of the batch of the next step, and after the last step of the last batch; `loss_unseen`; `gradient_norm`
        of all weights together, and `clipping`, the factor of all gradients. Measured on the first batch: `stream`,
        the root mean square of its entries by layer, `stream_change` |X_t − X_0|/|X_0|, `largest` entry, all absent if
        the module has no blocks; `branch` and `branch_change` by block and sublayer, infinite where a branch was zero;
        `entropy`, `logit_std`, `largest_logit`, … of attention by head; `output` and `output_change`, the root mean
        squares of the output and of its difference from the start. By weight: `weight_gradient`, `weight_change` |W_t −
        a W_0| with a the factor of weight decay, relative to `weight_size`, the norm |W_0| in root mean square over
        networks (infinite for a weight that was zero and moves), and its largest singular value `weight_spectral` where
        the change has low rank, relative to the same; `update_effect`, the root mean square of what the change adds to
        the output of the weight's linear map, times a multiplier between the head and the module's output. The
        coordinates `matrix` and `table` say which weights have two dimensions or more, and which are those of an
        `nn.Embedding`.

    Raises:
        InputError: an argument cannot be used, or the module's code cannot run.
        Interrupted: Ctrl-C was pressed; it holds the finished samples, if there are any.
    """
    require_count("samples", samples)
    require_count("steps", steps)
    require(draw in (AUTO, NEVER, ALWAYS), f'draw must be "auto", "never" or "always"; got {draw!r}.')
    require(dtype in (torch.float32, torch.float64), f"dtype must be torch.float32 or torch.float64; got {dtype}.")
    training = training_of(
        model, inputs, optimizer=optimizer, rates=rates, steps=steps, seed=seed, batches=batches, unseen=unseen,
        loss=loss, clip=clip, warmup=warmup, schedule=schedule, factors=factors, overrides=overrides, draw=draw,
        dtype=dtype, batch_dim=batch_dim, blocks=blocks, drawn=drawn,
    )  # fmt: skip
    network, first, every, forms = training.network, training.first, training.rules, training.forms
    began = time.perf_counter()
    parts: list[list[Arrays]] = []

    def result() -> xr.Dataset:
        about = {
            **provenance(network), "description": "training steps in law", "seed": seed, "samples": len(parts),
            "sequences": first.rows, "draw": draw, "inputs": str(first), "optimizer": in_words(every),
            "groups": json.dumps(groups_of(every)),
            "batches": batches if isinstance(batches, str) else "given", "loss": training.loss.name,
            "frozen": sum(not each.requires_grad for each in network.module.parameters()),
            "weights": ", ".join(f"{number} {form}" for form, number in sorted(Counter(forms.forms.values()).items())),
            "kept": "; ".join(f"{name}: {reason}" for name, reason in forms.reasons.items()),
            "wall_seconds": time.perf_counter() - began,
        }  # fmt: skip
        return dataset(parts, [each.base for each in every], network, about)

    bar = progress_bar(BAR, samples * len(every), 0.0) if progress is True else progress or None
    try:
        for sample in range(samples):
            of_rates: list[Arrays] = []
            for rule in every:
                of_rates.append(named_errors(training.trajectory(rule, sample).arrays, network.blueprint, first))
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


@dataclass
class Training:
    """The training of networks: everything but their random numbers.

    Attributes:
        rules: of the optimiser, at each learning rate.
        optimizer: a function of the module that returns its optimiser, if drawn networks are trained by it; else None.
    """

    network: Weightless
    first: Inputs
    batches: StepBatches
    rules: list[StepRules]
    loss: ChosenLoss
    forms: Forms
    seed: int
    optimizer: Any = None

    def trajectory(self, rule: StepRules, sample: int) -> Trajectory:
        """Return the training of one network at one learning rate."""
        result = Trajectory(self.network, rule, self.forms, self.loss, self.batches, self.seed, sample)
        result.optimizer = self.optimizer
        return result


def training_of(
    model: Any, inputs: Any, *, optimizer: Any, rates: Sequence[float] | None, steps: int, seed: int,
    batches: Any = SAME, unseen: Any = None, loss: Loss | str | None = None, clip: float | None = None,
    warmup: int = 0, schedule: Any = None, factors: Factors | None = None, overrides: dict[str, Any] | None = None,
    draw: str = AUTO, dtype: torch.dtype = torch.float32, batch_dim: int = 0, blocks: Chosen | None = None,
    drawn: str = "",
) -> Training:  # fmt: skip
    """Return the training that the arguments of `simulate_steps` describe."""
    blueprint = blueprint_of(model)
    first = inputs_of(inputs, blueprint).with_batch_dim(batch_dim)
    network = Weightless(blueprint, dtype, torch.device("cpu"), overrides, blocks)
    network.needs_blocks = False
    if drawn and not network.drawn:
        network.draw_whole({"its code": drawn})
    of_user = callable(optimizer) and bool(drawn)
    if of_user:  # it trains drawn networks itself: a simulation needs its rate and its name
        made = made_by(optimizer, network.whole(torch_seed(seed, "optimiser")))
        names = " and ".join(type(each).__name__ for each in made)
        rules = StepRules({}, valid_clip(clip), factors_of(steps, warmup, schedule), base_rate(made[0]), names)
    else:
        rules = rules_of(network, optimizer, steps, clip, warmup, schedule)
    if factors is not None:
        rules = rules.with_factors(factors)
    every = [rules] if rates is None else [rules.with_rate(rate) for rate in rates]
    require(bool(every), "rates must have at least one learning rate; got none.")
    first = settle(first, network, seed, own_loss=loss is None)
    named_errors(
        lambda: network.first(seed, first, AUTO) if network.foreign else network.run(seed, range(1), first, AUTO, None),
        blueprint, first,
    )  # fmt: skip
    prepared = batches_of(first, batches, unseen, network, steps, seed, batch_dim)
    passes = (steps + 1) * (2 + (prepared.of_steps[-1] is not first))
    known = tables(network)
    widths = {columns for _, columns in known} | {size.width for size in network.stacks.values()}
    by_shapes = loss_of_shapes(blueprint.name, {rows for rows, _ in known}, widths, batch_dim)
    function = chosen_loss(loss, blueprint.task, by_shapes, batch_dim)
    forms = Forms(draw, passes, steps)
    return Training(network, first, prepared, every, function, forms, seed, optimizer if of_user else None)


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
