r"""Callbacks for any Trainer that write quantities inside a model into a `Log` while it trains.

* `Entropy`: of the softmax, by layer and head, in nats: the mean over the rows of a fixed batch [ST, Fig. 6]. It comes
  from log-sum-exp, a few rows at a time, so that no attention matrix is stored.
* `Correlation`: the mean correlation of two tokens after each block, ρ = mean over α ≠ β of ⟨x_α, x_β⟩/(|x_α||x_β|),
  on the same batch; 1 is rank collapse. Layer 0 is the input of the first block.
* `GradientNorms`: |∂loss/∂W| by layer, of values, queries and whole blocks, after clipping (`max_grad_norm`).
* `Gains`: γ₁, γ₂ (by head), the slope s₋, and λ, γ of the residuals.
* `ShapingSchedule`: Learn, Recover or Keep [ST, App. D]; the gains are a function of the step.

Layers count from 1, as in the papers. Each callback writes at every `every`-th step, all but the gradients at step 0
too.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from limitformer.base.errors import InputError, require_count
from limitformer.hf.attention import AttentionShaping
from limitformer.hf.families import FAMILIES
from limitformer.nn import Block, Gain, Keep, Learn, Recover, Residual, ShapedSelfAttention, entropy
from limitformer_papers.training.log import Log

Batch = Mapping[str, Tensor]


class LogCallback(TrainerCallback):
    """A callback with a log and an interval.

    Args:
        log: receives the rows.
        every: steps between rows.
    """

    def __init__(self, log: Log, every: int) -> None:
        self.log, self.every = log, require_count("every", every)

    def due(self, state: Any, step: int) -> bool:
        return bool(state.is_world_process_zero) and step % self.every == 0


class Measuring(LogCallback, ABC):
    """A callback that measures the model after a step, and before the first one."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Measure at step 0, if the run begins there."""
        if state.global_step == 0 and self.due(state, 0):
            self.look(model, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        if self.due(state, state.global_step):
            self.look(model, state.global_step)

    @abstractmethod
    def look(self, model: nn.Module, step: int) -> None:
        """Write the rows of this step."""


class MeasuringBatch(Measuring):
    """A callback that measures a forward pass of a fixed batch, without dropout, gradients or random numbers.

    Args:
        log: receives the rows.
        every: steps between rows.
        batch: keyword arguments of the model.
    """

    def __init__(self, log: Log, every: int, batch: Batch) -> None:
        super().__init__(log, every)
        self.batch = {name: value for name, value in batch.items() if name != "labels"}

    @torch.no_grad()
    def look(self, model: nn.Module, step: int) -> None:
        device = next(model.parameters()).device
        batch = {name: value.to(device) for name, value in self.batch.items()}
        with evaluating(model):
            for name, layer, head, value in self.rows(model, batch):
                self.log.record(step, name, value, layer, head)

    @abstractmethod
    def rows(self, model: nn.Module, batch: Batch) -> Iterator[tuple[str, int, int, float]]:
        """Yield (name, layer, head, value), from a forward pass of `batch`."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off inside the block."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)


class Entropy(MeasuringBatch):
    """Rows "entropy" by layer and head, in nats."""

    def rows(self, model: nn.Module, batch: Batch) -> Iterator[tuple[str, int, int, float]]:
        entropies: dict[int, Tensor] = {}
        probed = [(layer, probe) for layer, block in enumerate(blocks_of(model), 1) for probe in probes_of(block)]
        for layer, probe in probed:
            probe.probe = lambda logits, layer=layer: entropies.update({layer: entropy(logits)})
        try:
            model(**batch)
        finally:
            for _, probe in probed:
                probe.probe = None
        for layer, heads in entropies.items():
            for head, value in enumerate(heads.tolist()):
                yield "entropy", layer, head, value


class Correlation(MeasuringBatch):
    """Rows "correlation" by layer, that of the embeddings as layer 0."""

    def rows(self, model: nn.Module, batch: Batch) -> Iterator[tuple[str, int, int, float]]:
        correlations: dict[int, float] = {}
        seen = batch.get("attention_mask")
        blocks = blocks_of(model)

        def measure(layer: int, x: Any) -> None:
            correlations[layer] = mean_correlation(x[0] if isinstance(x, tuple) else x, seen)

        hooks = [blocks[0].register_forward_pre_hook(lambda module, args: measure(0, args))]
        for layer, block in enumerate(blocks, 1):
            hooks.append(block.register_forward_hook(lambda module, args, x, layer=layer: measure(layer, x)))
        try:
            model(**batch)
        finally:
            for hook in hooks:
                hook.remove()
        for layer in sorted(correlations):
            yield "correlation", layer, -1, correlations[layer]


def mean_correlation(x: Tensor, seen: Tensor | None = None) -> float:
    """Return the mean over sequences and pairs of distinct tokens (b, m, n); `seen` (b, m) leaves padding out."""
    unit = nn.functional.normalize(x.double(), dim=-1)
    seen = torch.ones(x.shape[:2], device=x.device) if seen is None or seen.dim() != 2 else seen
    unit, count = unit * seen[..., None].to(unit), seen.double().sum(1)
    pairs = unit.sum(1).square().sum(-1) - (unit * unit).sum((1, 2))  # Σ over α ≠ β, without a matrix of pairs
    enough = count > 1
    return float((pairs[enough] / (count * (count - 1))[enough]).mean())


class GradientNorms(LogCallback):
    """Rows "gradient_norm" (of a block), "gradient_norm_value" and "gradient_norm_query" by layer."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Write the norms after the backward pass of the step in progress."""
        step = state.global_step + 1
        if not self.due(state, step):
            return
        for layer, block in enumerate(blocks_of(model), 1):
            self.log.record(step, "gradient_norm", norm_of(list(block.parameters())), layer)
            for name in ("value", "query"):
                weights = weights_of(block, name)
                if weights:
                    self.log.record(step, f"gradient_norm_{name}", norm_of(weights), layer)


def norm_of(parameters: list[nn.Parameter]) -> float:
    squares = [p.grad.detach().double().square().sum() for p in parameters if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


class Gains(Measuring):
    """Rows "gamma1" and "gamma2" by layer and head, "slope", "lam" and "gamma" by layer (a mean over its sublayers)."""

    def look(self, model: nn.Module, step: int) -> None:
        for layer, block in enumerate(blocks_of(model), 1):
            for name, head, value in gains_of(block):
                self.log.record(step, name, value, layer, head)


def gains_of(block: nn.Module) -> Iterator[tuple[str, int, float]]:
    """Yield (name, head or −1, value) of a block's gains and residuals."""
    for path, module in block.named_modules():
        if isinstance(module, Gain):
            name = path.rpartition(".")[2]
            values = module.value.detach().flatten().tolist()
            for head, value in enumerate(values):
                yield ("slope" if name == "negative" else name), (head if len(values) > 1 else -1), value
    residuals = [module for module in block.modules() if isinstance(module, Residual)]
    for name in ("lam", "gamma") if residuals else ():
        yield name, -1, sum(float(getattr(module, name).detach()) for module in residuals) / len(residuals)


class ShapingSchedule(TrainerCallback):
    """Set the gains of a schedule at each step; call `prepare` on the model before its optimiser is made.

    It goes first among the callbacks, so that others, checkpoints and evaluations at step k see the gains of step k.
    """

    def __init__(self, schedule: Learn | Recover | Keep) -> None:
        self.schedule = schedule

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Set the gains of the step at which training begins or resumes."""
        self.schedule.apply(model, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Set the gains of the next step."""
        self.schedule.apply(model, state.global_step)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks, first to last.

    Raises:
        InputError: a model with none that is known.
    """
    own = [module for module in model.modules() if isinstance(module, Block)]
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if own:
        return list(own)
    base: Any = getattr(model, "base_model", None)
    path = getattr(base, "shaped_blocks", None) or (FAMILIES[str(kind)].blocks if kind in FAMILIES else None)
    if base is None or path is None:
        raise InputError(f"{type(model).__name__} has no blocks that are known; shape it with hf.shape_model.")
    return list(attrgetter(path)(base))


def probes_of(block: nn.Module) -> list[Any]:
    """Return the modules of a block whose `probe` is called with its `Logits`."""
    return [module for module in block.modules() if isinstance(module, ShapedSelfAttention | AttentionShaping)]


def weights_of(block: nn.Module, name: str) -> list[nn.Parameter]:
    """Return a block's weights of this name in `nn.InitialVariances`; [] if it has none."""
    modules = [module for path, module in block.named_modules() if path.rpartition(".")[2] == name]
    weights: list[Any] = [module.weight for module in modules if isinstance(module, nn.Linear)]
    return weights
