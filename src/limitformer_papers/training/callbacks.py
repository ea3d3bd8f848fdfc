r"""What happens inside a model while it trains, for any Trainer: callbacks that write into a `Log`.

* `Entropy`: of the softmax, by layer and head, in nats: the mean over the rows of a fixed batch [ST, Fig. 6]. It comes
  from log-sum-exp, a few rows at a time, so that no attention matrix is kept.
* `Correlation`: the mean correlation of two tokens after each block, ρ = mean over α ≠ β of ⟨x_α, x_β⟩/(|x_α||x_β|),
  on the same batch; 1 is rank collapse. Layer 0 is what enters the first block.
* `GradientNorms`: |∂loss/∂W| by layer, of values, queries and whole blocks; a Trainer that clips (`max_grad_norm`) has
  done so before.
* `Gains`: γ₁, γ₂ (by head), the slope s₋, and λ, γ of the residuals.
* `ShapingSchedule`: Learn or Recover [ST, App. D]; the gains are a function of the step.

Layers count from 1, as in the papers. Each writes at every `every`-th step, all but the gradients at step 0 too.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from limitformer.base.errors import InputError, require_count
from limitformer.hf.attention import AttentionShaping
from limitformer.hf.families import FAMILIES
from limitformer.nn import Block, Gain, Learn, Logits, Recover, Residual, ShapedSelfAttention, entropy
from limitformer_papers.training.log import Log

Batch = Mapping[str, Tensor]


class Recorder(TrainerCallback):
    """What they share: a log, and how often.

    Args:
        log: where rows go.
        every: so many steps apart.
    """

    def __init__(self, log: Log, every: int) -> None:
        self.log, self.every = log, require_count("every", every)

    def due(self, state: Any, step: int) -> bool:
        """Whether this process writes at this step."""
        return bool(state.is_world_process_zero) and step % self.every == 0


class Looker(Recorder, ABC):
    """Looks at the model after a step, and before the first one."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Step 0, of a run that begins there."""
        if state.global_step == 0 and self.due(state, 0):
            self.look(model, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """The other steps."""
        if self.due(state, state.global_step):
            self.look(model, state.global_step)

    @abstractmethod
    def look(self, model: nn.Module, step: int) -> None:
        """Write what there is to see at this step."""


class OnBatch(Looker):
    """Looks at a forward of a fixed batch, without dropout and gradients; it draws no random numbers.

    Args:
        log: where rows go.
        every: so many steps apart.
        batch: what the model takes.
    """

    def __init__(self, log: Log, every: int, batch: Batch) -> None:
        super().__init__(log, every)
        self.batch = {name: value for name, value in batch.items() if name != "labels"}

    @torch.no_grad()
    def look(self, model: nn.Module, step: int) -> None:
        """Write what `measured` finds."""
        device = next(model.parameters()).device
        batch = {name: value.to(device) for name, value in self.batch.items()}
        with evaluating(model):
            for name, layer, head, value in self.measured(model, batch):
                self.log.record(step, name, value, layer, head)

    @abstractmethod
    def measured(self, model: nn.Module, batch: Batch) -> Iterator[tuple[str, int, int, float]]:
        """(name, layer, head, value), for a forward of `batch`."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model without dropout inside the block."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)


class Entropy(OnBatch):
    """Rows "entropy" by layer and head, in nats."""

    def measured(self, model: nn.Module, batch: Batch) -> Iterator[tuple[str, int, int, float]]:
        """One forward, whose logits are looked at as they pass."""
        found: dict[int, Tensor] = {}
        probed = [(layer, probe) for layer, block in enumerate(blocks_of(model), 1) for probe in probes_of(block)]
        for layer, probe in probed:
            probe.probe = keeper(found, layer)
        try:
            model(**batch)
        finally:
            for _, probe in probed:
                probe.probe = None
        for layer, heads in found.items():
            for head, value in enumerate(heads.tolist()):
                yield "entropy", layer, head, value


def keeper(found: dict[int, Tensor], layer: int) -> Callable[[Logits], None]:
    """A probe that keeps a layer's entropies."""

    def keep(logits: Logits) -> None:
        found[layer] = entropy(logits)

    return keep


class Correlation(OnBatch):
    """Rows "correlation" by layer, that of the embeddings as layer 0."""

    def measured(self, model: nn.Module, batch: Batch) -> Iterator[tuple[str, int, int, float]]:
        """One forward, whose tokens are looked at as they pass."""
        found: dict[int, float] = {}
        seen = batch.get("attention_mask")
        blocks = blocks_of(model)

        def enters(module: nn.Module, args: Any) -> None:
            found[0] = mean_correlation(args[0], seen)

        hooks = [blocks[0].register_forward_pre_hook(enters)]
        for layer, block in enumerate(blocks, 1):
            hooks.append(block.register_forward_hook(after(found, layer, seen)))
        try:
            model(**batch)
        finally:
            for hook in hooks:
                hook.remove()
        for layer in sorted(found):
            yield "correlation", layer, -1, found[layer]


def after(found: dict[int, float], layer: int, seen: Tensor | None) -> Any:
    """A hook after a block that keeps its correlation."""

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        found[layer] = mean_correlation(output[0] if isinstance(output, tuple) else output, seen)

    return keep


def mean_correlation(x: Tensor, seen: Tensor | None = None) -> float:
    """Mean over sequences and pairs of distinct tokens (b, m, n); `seen` (b, m) leaves padding out."""
    unit = nn.functional.normalize(x.double(), dim=-1)
    seen = torch.ones(x.shape[:2], device=x.device) if seen is None or seen.dim() != 2 else seen
    unit, count = unit * seen[..., None].to(unit), seen.double().sum(1)
    pairs = unit.sum(1).square().sum(-1) - (unit * unit).sum((1, 2))  # Σ over α ≠ β, without a matrix of pairs
    enough = count > 1
    return float((pairs[enough] / (count * (count - 1))[enough]).mean())


class GradientNorms(Recorder):
    """Rows "gradient_norm" (of a block), "gradient_norm_value" and "gradient_norm_query" by layer."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """After the backward of the step that is being made."""
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
    """The norm of all their gradients."""
    squares = [p.grad.detach().double().square().sum() for p in parameters if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


class Gains(Looker):
    """Rows "gamma1" and "gamma2" by layer and head, "slope", "lam" and "gamma" by layer (a mean over its sublayers)."""

    def look(self, model: nn.Module, step: int) -> None:
        """Write them all."""
        for layer, block in enumerate(blocks_of(model), 1):
            for name, head, value in gains_of(block):
                self.log.record(step, name, value, layer, head)


def gains_of(block: nn.Module) -> Iterator[tuple[str, int, float]]:
    """(name, head or −1, value) of a block's gains and residuals."""
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
    """Learn or Recover: the gains that belong to each step. `prepare` the model before its optimiser is made.

    First among the callbacks: what others see after step k, and what is saved and evaluated then, has the gains of k.
    """

    def __init__(self, schedule: Learn | Recover) -> None:
        self.schedule = schedule

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Those of the step at which it begins, or goes on."""
        self.schedule.apply(model, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Those of the step that comes next."""
        self.schedule.apply(model, state.global_step)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks, first to last.

    Raises:
        InputError: a model with none that is known.
    """
    own = [module for module in model.modules() if isinstance(module, Block)]
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if own or kind not in FAMILIES:
        if not own:
            raise InputError(f"{type(model).__name__} has no blocks that are known; shape it with hf.shape_model.")
        return list(own)
    base: Any = model.base_model
    return FAMILIES[kind].blocks_of(base)


def probes_of(block: nn.Module) -> list[Any]:
    """The modules of a block whose `probe` is called with its `Logits`."""
    return [module for module in block.modules() if isinstance(module, ShapedSelfAttention | AttentionShaping)]


def weights_of(block: nn.Module, name: str) -> list[nn.Parameter]:
    """A block's weights of queries, keys, values, …, by their name in `nn.InitialVariances`; [] if it has none."""
    found = [module for path, module in block.named_modules() if path.rpartition(".")[2] == name]
    weights: list[Any] = [module.weight for module in found if isinstance(module, nn.Linear)]
    return weights
