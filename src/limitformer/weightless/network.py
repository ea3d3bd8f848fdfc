"""A module whose random weights have laws and no entries, ready for passes forward and backward."""

import ctypes
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from limitformer.base.errors import InputError, first_line, require
from limitformer.base.memory import SHARE, available_memory, readable
from limitformer.nn.drawn.simulate import torch_seed
from limitformer.weightless.arrays import Arrays, output_arrays, stream_arrays
from limitformer.weightless.blocks import UnclearAxisError, blocks_of, grown_axis, mixed_sequences, stream_shapes
from limitformer.weightless.building import Built, Limited, built, drawn_module, put_parameters
from limitformer.weightless.implicit import Implicit
from limitformer.weightless.inputs import Inputs, Loss, square
from limitformer.weightless.law import cannot_be_made, table_of, with_overrides
from limitformer.weightless.laws import CONSTANT, UNKNOWN, Law
from limitformer.weightless.measure import Measure, NoEntriesError, where_parameters_are_read
from limitformer.weightless.models import Blueprint
from limitformer.weightless.reachable import State, stray_tensors
from limitformer.weightless.run import KeepWeightError, OneSampleOnlyError, RandomWeight, WeightlessRun, gradient_norm
from limitformer.weightless.shared import SharedGradients
from limitformer.weightless.tensors import tensors_in
from limitformer.weightless.threads import one_thread

BETWEEN_TIDYING = 4  # blocks
COPIES = 2  # of a whole network: its weights and their gradients
DRAWN_WHOLE = "drawn by the model's own code"


class Weightless:
    """A module whose random weights have laws and no entries, ready for passes.

    Where something that a pass could read is not understood (a law, a random buffer, a matrix in a list), each sample
    is a whole network instead, drawn by the model's own code from (seed, sample): slower, and as exact.
    """

    def __init__(
        self, blueprint: Blueprint, dtype: torch.dtype, device: torch.device, overrides: dict[str, Any] | None = None
    ) -> None:
        self.blueprint, self.dtype, self.device = blueprint, dtype, device
        self.limit: int | None = None  # bytes that a network of unknown size may take
        module, found, doubts = self.read()
        self.laws = with_overrides(found, overrides)
        self.overridden = [name for name, law in self.laws.items() if law is not found[name]]
        self.table = table_of(blueprint, module, self.laws)
        self.module = module.eval()
        self.blocks = blocks_of(module)
        require(bool(self.blocks), f"{blueprint.name} has no list of blocks (ModuleList or Sequential) to look at.")
        self.kept: dict[str, str] = {}
        self.weights: list[RandomWeight] = []
        self.drawn: dict[str, str] = {}  # why whole networks are drawn, by what is not understood
        self.sample: tuple[int, int] | None = None  # of which seed and sample the module is
        self.state: State | None = None
        self.axis: tuple[Inputs, int] | None = None  # in which dimension of the stream sequences lie, for these inputs
        self.recomputes = False
        self.tidies = False  # whether a pass is so large that memory is given back on the way
        self.outputs: Arrays = {}  # sizes of what the last pass of a foreign module gave
        self.uses: dict[str, str] = {}
        self.read_where: dict[str, str] = {}  # where the last pass read parameters
        self.reasons: dict[str, str] = {}
        self.trained = {  # dimensions by name
            name: one.dim() for name, one in module.named_parameters() if one.requires_grad or self.laws[name].random
        }
        unknown = {name: law.reason for name, law in self.laws.items() if law.kind == UNKNOWN}
        if unknown or doubts:
            self.draw_whole(unknown | doubts)
        else:
            self.weights = self.replace(module)

    @property
    def foreign(self) -> bool:
        """Whether the module is of code that nobody has looked at: not of transformers, nor of this package."""
        return self.blueprint.config is None and self.blueprint.transformer is None

    def read(self) -> Built:
        """The module and its laws; of a factory that cannot be watched, a network that is drawn."""
        try:
            return built(self.blueprint.factory, self.dtype)
        except (InputError, MemoryError):
            raise
        except Exception as error:  # the user's own code, which may raise anything  # noqa: BLE001
            free = available_memory()
            self.limit = None if free is None else int(SHARE * free / COPIES)
            reason = f"the code that makes it cannot be watched: {type(error).__name__}: {first_line(error)}"
            module = self.whole(0)
            return Built(module, {name: Law(UNKNOWN, reason=reason) for name, _ in module.named_parameters()}, {})

    def draw_whole(self, reasons: dict[str, str]) -> None:
        """Let each sample be a network that the model's own code draws.

        Raises:
            InputError: it does not fit the memory that is free.
        """
        self.drawn, self.weights, self.kept, self.sample, self.state = reasons, [], {}, None, None
        hidden = sum(
            each.numel() for _, each in stray_tensors(self.module) if isinstance(each, Tensor) and each.is_meta
        )
        needed, free = COPIES * (self.table.count + hidden) * self.dtype.itemsize, available_memory()
        name = next(iter(reasons))
        if free is not None and needed > SHARE * free:
            law = "the law of " if name in self.laws else ""
            nearest = f"overrides={{{name!r}: std}}" if name in self.laws else "make it a parameter"
            raise InputError(
                f"{law}{name} is not understood: {reasons[name]}. A network that is drawn whole takes "
                f"{readable(needed)}, more than is free. Nearest: {nearest}."
            )

    def whole(self, seed: int) -> nn.Module:
        """A network that the model's own code draws."""
        limited = nullcontext() if self.limit is None else Limited(self.limit, self.blueprint.name)
        try:
            with limited:
                return drawn_module(self.blueprint.factory, self.dtype, seed)
        except (InputError, MemoryError):
            raise
        except Exception as error:  # the user's own code, which may raise anything
            raise cannot_be_made(self.blueprint, error) from error

    def take(self, run: WeightlessRun) -> None:
        """Make the whole network of the run's sample ready, if it is not."""
        sample = (run.seed, run.samples.start)
        if sample == self.sample:
            return
        self.sample = self.state = None
        self.module, self.blocks = nn.Module(), []  # so that no two networks are held at once
        module = self.whole(torch_seed(run.seed, f"weightless build {run.samples.start}"))
        shapes = {name: tuple(one.shape) for name, one in module.named_parameters()}
        alike = shapes == self.table.shapes
        require(alike, f"{self.blueprint.name} has other parameters each time it is made.")
        self.override(module, run)
        with torch.no_grad():
            for each in (*module.parameters(), *module.buffers()):
                each.data = self.on_device(each.data)
        for name, value in [*module.named_parameters(), *module.named_buffers(), *stray_tensors(module)]:
            missing = isinstance(value, Tensor) and value.is_meta
            require(not missing, f"{name} of {self.blueprint.name} is on the meta device and has no values.")
        self.module, self.blocks, self.sample = module.eval(), blocks_of(module), sample
        self.run_again()

    def override(self, module: nn.Module, run: WeightlessRun) -> None:
        """Draw the parameters of a whole network whose laws were given."""
        laws = {name: self.laws[name] for name in self.overridden}
        found = {name: one for name, one in module.named_parameters() if name in laws}
        drawn = [
            RandomWeight(name, laws[name], tuple(one.shape), run) for name, one in found.items() if laws[name].random
        ]
        copies(drawn)
        for weight in drawn:
            found[weight.name].data.copy_(run.entries(weight, weight.rows)[0])
        for name, one in found.items():
            if laws[name].kind == CONSTANT:
                one.data.fill_(laws[name].shift)

    def replace(self, module: nn.Module) -> list[RandomWeight]:
        """Put implicit weights in the place of random parameters, and overridden constants."""
        waiting = WeightlessRun(0, range(1), 1, self.dtype, self.device)
        weights, new = [], dict[int, Any]()
        for name, parameter in module.named_parameters():
            law = self.laws[name]
            if law.random:
                weights.append(
                    RandomWeight(name, law, tuple(parameter.shape), waiting, trained=parameter.requires_grad)
                )
                new[id(parameter)] = Implicit(weights[-1])
            else:
                constant = law.kind == CONSTANT
                values = torch.full(parameter.shape, law.shift) if constant else parameter.detach()
                new[id(parameter)] = nn.Parameter(self.on_device(values), parameter.requires_grad)
        put_parameters(module, new)
        self.kept |= copies(weights)
        for part in module.modules():
            part._buffers.update({name: self.on_device(b) for name, b in part._buffers.items() if b is not None})
        return weights

    def on_device(self, values: Tensor) -> Tensor:
        """With the pass's device, and its type where they are not whole numbers."""
        return values.to(self.device, self.dtype) if values.is_floating_point() else values.to(self.device)

    def width_of_activations(self) -> int:
        """Numbers that a token leaves behind in a pass, as the outputs of its linear maps."""
        return sum(min(shape[0], 10**6) for shape in self.matrices())

    def matrices(self) -> list[tuple[int, ...]]:
        """The shapes of the random weights of two dimensions or more; of a whole network, those of all."""
        shapes = list(self.table.shapes.values()) if self.drawn else [weight.shape for weight in self.weights]
        return [shape for shape in shapes if len(shape) >= 2]

    @contextmanager
    def tidying(self) -> Iterator[None]:
        """Give memory back on the way: what stays of a layer would break up what the next ones could use again."""
        tidied = self.blocks[::BETWEEN_TIDYING] if self.tidies else []
        hooks = [block.register_forward_pre_hook(lambda *_: give_back_memory()) for block in tidied]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def recompute(self) -> None:
        """Blocks run again in the backward pass rather than keep what they computed."""
        self.recomputes = True
        self.run_again()

    def run_again(self) -> None:
        """Let the module's blocks run again in the backward pass, if they are to."""
        owners: dict[str, int] = {}
        for block in self.blocks if self.recomputes else []:
            for name in names_in(block):
                owners[name] = owners.get(name, 0) + 1
        for block in self.blocks if self.recomputes else []:
            names = names_in(block)
            if all(owners[name] == 1 for name in names):
                block.forward = self.running_again(block.forward, names)

    def running_again(self, forward: Callable[..., Any], names: set[str]) -> Callable[..., Any]:
        """`forward`, whose weights count as unused when it begins again."""

        def again(*args: Any, **kwargs: Any) -> Any:
            give_back_memory()
            if not self.weights:
                return forward(*args, **kwargs)
            run = self.weights[0].run
            run.forget(names)
            with self.by_sample(run):
                return forward(*args, **kwargs)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return wrapped

    def run(self, seed: int, samples: range, inputs: Inputs, draw: str, loss: Loss | None) -> Arrays:
        """One pass, with its weights kept where that turns out to be needed."""
        try:
            return self.until_it_runs(seed, samples, inputs, draw, loss)
        except UnclearAxisError:
            shapes = [self.shapes(seed, samples.start, inputs.repeated(times), draw) for times in (1, 2)]
            self.axis = inputs, grown_axis(*shapes)
            return self.until_it_runs(seed, samples, inputs, draw, loss)

    def shapes(self, seed: int, sample: int, inputs: Inputs, draw: str) -> list[torch.Size]:
        """The shapes of what enters the blocks in a pass of one sample."""

        def call(run: WeightlessRun) -> list[torch.Size]:
            with torch.no_grad(), stream_shapes(self.blocks) as found:
                self.call(self.arguments(run, inputs))
            return list(found)

        return self.until_it_runs(seed, range(sample, sample + 1), inputs, draw, None, call)

    def first(self, seed: int, inputs: Inputs, draw: str) -> Arrays:
        """The first sample's pass without gradients; its sequences must not influence each other.

        Raises:
            InputError: they do.
        """

        def call(run: WeightlessRun) -> bool:
            measure = Measure(self.blocks, 1, inputs.rows, inputs.counted, self.axis_of(inputs))
            with torch.enable_grad(), measure:
                self.call(self.arguments(run, inputs))
            measure.finish()
            return measure.mixes()

        found = self.run(seed, range(1), inputs, draw, None)
        if inputs.rows > 1 and self.until_it_runs(seed, range(1), inputs, draw, square, call):
            raise mixed_sequences(self.blueprint.name, inputs.batch_dim)
        return found | self.outputs

    def until_it_runs(
        self, seed: int, samples: range, inputs: Inputs, draw: str, loss: Loss | None,
        call: Callable[[WeightlessRun], Any] | None = None,
    ) -> Any:  # fmt: skip
        """What `call`, or a pass, gives of a run that keeps the weights which it needs."""
        while True:
            run = WeightlessRun(
                seed, samples, inputs.rows, self.dtype, self.device, draw, loss is not None, dict(self.kept)
            )
            if self.drawn and len(samples) > 1:
                raise OneSampleOnlyError
            if self.drawn:
                self.take(run)
            for weight in self.weights:
                weight.run = run
            for parameter in self.module.parameters():
                parameter.grad = None
            self.state = self.state or State(self.module)
            self.state.restore()
            try:
                with one_thread():
                    return self.attempt(run, inputs, loss) if call is None else call(run)
            except KeepWeightError as needed:
                self.kept[needed.name] = needed.reason
            except NoEntriesError as read:
                if self.drawn:
                    raise InputError(f"{self.blueprint.name} {read}") from read
                self.draw_whole({"a tensor": f"the model {read}"})

    def attempt(self, run: WeightlessRun, inputs: Inputs, loss: Loss | None) -> Arrays:
        """One pass; `KeepWeightError` or `OneSampleOnlyError` if it cannot be as `run` has it."""
        assert self.state is not None  # taken before the first pass
        arguments = self.arguments(run, inputs)
        measure = Measure(self.blocks, len(run.samples), inputs.rows, inputs.counted, self.axis_of(inputs))
        measure.used = run.read
        before = random_states()
        with torch.set_grad_enabled(loss is not None):
            with self.tidying(), measure, self.by_sample(run):
                out = self.call(arguments)
            measure.finish()
            require(random_states() == before, f"{self.blueprint.name} draws random numbers of its own when it runs.")
            changed = self.state.changed_weight()
            require(changed is None, f"{self.blueprint.name} changes its parameter {changed} when it runs.")
            found = stream_arrays(measure) | output_arrays(out, len(run.samples))
            self.uses, self.reasons = run.found, {**run.reasons, **self.kept}
            self.read_where = where_parameters_are_read(self.module, measure)
            if self.foreign:
                self.outputs = {"output": output_sizes(out)[None].cpu().numpy()}
            if self.drawn:
                self.uses, self.reasons = dict.fromkeys(self.table.laws, DRAWN_WHOLE), self.drawn
            if loss is not None:
                found |= self.backward(out, arguments, loss, run, measure)
        return found

    def arguments(self, run: WeightlessRun, inputs: Inputs) -> dict[str, Any]:
        """What the module is called with."""
        given = inputs.of(run.seed, run.samples, self.dtype)
        return {name: each.to(self.device) if isinstance(each, Tensor) else each for name, each in given.items()}

    def axis_of(self, inputs: Inputs) -> int | None:
        """The dimension of the stream in which the sequences lie, if its sizes do not say it."""
        return self.axis[1] if self.axis is not None and self.axis[0] is inputs else None

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """The module's output; what has no name is its first argument."""
        named = {name: value for name, value in arguments.items() if name}
        return self.module(arguments[""], **named) if "" in arguments else self.module(**named)

    def backward(
        self, out: Any, arguments: Mapping[str, Any], loss: Loss, run: WeightlessRun, measure: Measure
    ) -> Arrays:
        """The loss and its gradients."""
        value = loss(out, arguments)
        known = isinstance(value, Tensor) and value.requires_grad
        require(known, "the loss must be a tensor that depends on the module's output.")
        if value.dim() == 0 and len(run.samples) > 1:
            raise OneSampleOnlyError
        by_sample = value.reshape(len(run.samples), -1).mean(1)
        if self.recomputes and self.state is not None:
            self.state.restore()  # blocks run again as they ran first
        by_sample.sum().backward()
        norms = run.gradient_norms() | (self.constant_norms() if run.side_by_side == 1 else {})
        places = range(len(measure.covariance))
        none = torch.full((len(run.samples),), torch.nan)
        return {
            "loss": by_sample.detach().double().cpu().numpy(),
            "weight_gradient": np.stack([norms.get(name, none).cpu().numpy() for name in self.trained], -1),
            "stream_gradient": np.stack([measure.gradient.get(place, none).cpu().numpy() for place in places], -1),
        }

    def by_sample(self, run: WeightlessRun) -> AbstractContextManager[Any]:
        """Keep the gradients of shared parameters apart by sample."""
        return SharedGradients(self.module, run) if run.gradients and run.side_by_side > 1 else nullcontext()

    def constant_norms(self) -> dict[str, Tensor]:
        """|∂W| (1,) of the parameters with entries that a gradient came back to."""
        every = self.module.named_parameters()
        found = {name: one.grad for name, one in every if not isinstance(one, Implicit) and one.grad is not None}
        return {name: gradient_norm(each)[None] for name, each in found.items()}


def copies(weights: list[RandomWeight]) -> dict[str, str]:
    """Weights that are copies of each other draw the same numbers, and are kept; why."""
    first: dict[int, RandomWeight] = {}
    kept: dict[str, str] = {}
    for weight in weights:
        original = first.setdefault(weight.law.source, weight)
        if original is not weight and weight.law.source >= 0:
            weight.numbers = original.name
            kept |= {original.name: f"{weight.name} is a copy of it", weight.name: f"a copy of {original.name}"}
    return kept


def random_states() -> tuple[Any, ...]:
    """The states of the global generators of torch, NumPy and Python."""
    numpys: Any = np.random.get_state(legacy=False)
    return (
        torch.get_rng_state().numpy().tobytes(),
        numpys["state"]["key"].tobytes(),
        numpys["state"]["pos"],
        random.getstate(),
    )


def output_sizes(out: Any) -> Tensor:
    """The norm of each tensor in a module's output."""
    return torch.tensor([float(gradient_norm(each.detach())) for each in tensors_in(out)], dtype=torch.float64)


def give_back_memory() -> None:
    """Return free memory to the system: between the inputs of blocks, which stay, glibc would keep the holes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def names_in(block: nn.Module) -> set[str]:
    """Of the implicit weights in a block."""
    return {p.weight.name for p in block.parameters() if isinstance(p, Implicit)}
