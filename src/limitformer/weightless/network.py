"""`Weightless`: a module whose random weights are replaced by `Implicit`, and its passes forward and backward.

`run` is one pass of some samples. It begins again (`until_it_runs`) when a weight turns out to need entries; `attempt`
goes forward while `Measure` watches blocks and stream, and `backward` collects the norms of the gradients.
"""

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import active_count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from limitformer.base.errors import InputError, first_line, require
from limitformer.base.memory import SHARE, available_memory, readable
from limitformer.nn.drawn.simulate import torch_seed
from limitformer.subjects.inputs import Inputs, call_with
from limitformer.subjects.losses import Loss, square
from limitformer.subjects.subject import Subject
from limitformer.weightless.arrays import Arrays, output_arrays, sizes_of_stacks, stream_arrays
from limitformer.weightless.blocks import mixed_sequences
from limitformer.weightless.building import (
    Built,
    Limited,
    build_sample,
    build_twice,
    drawn_module,
    numpy_and_python_states,
    put_parameters,
    uninitialised,
)
from limitformer.weightless.implicit import Implicit
from limitformer.weightless.interpreter import Interpreter, NoEntriesError, Observer
from limitformer.weightless.law import build_error, table_of, with_overrides
from limitformer.weightless.laws import CONSTANT, UNKNOWN, Law
from limitformer.weightless.layout import Chosen
from limitformer.weightless.observers.stream import where_parameters_are_read
from limitformer.weightless.reachable import GENERATORS, State, stray_tensors
from limitformer.weightless.run import (
    DrawWholeError,
    KeepWeightsError,
    RandomWeight,
    WeightlessRun,
    gradient_norm,
)
from limitformer.weightless.structure import Structure
from limitformer.weightless.tensors import same_numbers, tensors_in
from limitformer.weightless.threads import one_thread
from limitformer.weightless.watching import OWN_GENERATOR, OWN_STATE

BLOCKS_BETWEEN_TRIMS = 4
NO_GRADIENT_WANTED = "modified by an inplace operation", "requires grad"  # in errors of torch about a change in place
COPIES = 2  # of a whole network in memory: its weights and their gradients
DRAWS, OTHER_THREAD = "draws random numbers of its own when it runs", ", or another thread of the program does"
DRAWN_WHOLE = "drawn by the model's own code"


class FirstPass(NamedTuple):
    """A pass of sample 0 without gradients."""

    seed: int
    inputs: dict[str, Tensor]
    arrays: Arrays
    seconds: float


class Weightless(Structure):
    """A module whose random weights have laws but no entries.

    If a pass could read random numbers of unknown law (a weight, a buffer, a number), the model's own code builds a
    network for each sample from (seed, sample), in which only the matrices of known law have no entries. If this
    cannot reproduce all random numbers, the code draws a whole network for each sample. Both are slower, and exact too.
    """

    def __init__(
        self, subject: Subject, dtype: torch.dtype, device: torch.device, overrides: dict[str, Any] | None = None,
        blocks: Chosen | None = None,
    ) -> None:  # fmt: skip
        self.subject, self.dtype, self.device = subject, dtype, device
        self.limit: int | None = None  # bytes that a network of unknown size may take
        module, own_laws, rebuilt, doubts, entries = self.build()
        shapes = {name: tuple(one.shape) for name, one in module.named_parameters()}
        self.laws = with_overrides(own_laws, overrides, shapes)
        self.overridden = [name for name, law in self.laws.items() if law is not own_laws[name]]
        self.table = table_of(subject, module, self.laws)
        super().__init__(module.eval(), blocks, heads_first=None if self.foreign else False)
        self.reasons_to_keep: dict[str, str] = {}  # by weight, for all later passes
        self.repeated: set[str] = set()  # those of them that are not kept
        self.weights: list[RandomWeight] = []
        self.drawn: dict[str, str] = {}  # reasons to draw whole networks, by name
        self.rebuilt: dict[str, str] = {}  # reasons to build a network for each sample, by name
        self.uninitialised: set[str] = set()  # parameters of the network that was drawn or built
        self.sample: tuple[int, int] | None = None  # seed and sample of the network that was drawn or built
        self.state: State | None = None
        self.first_pass: FirstPass | None = None  # the pass that showed that the inputs can be measured
        self.plain_inputs = False  # whether inputs have no gradient
        self.recomputes = False  # whether blocks run again in the backward pass instead of storing their activations
        self.trims = False  # whether a pass is so large that it trims the heap between blocks
        self.outputs: Arrays = {}  # norms of the outputs of a foreign module's last pass
        self.uses: dict[str, str] = {}
        self.read_where: dict[str, str] = {}  # where the last pass read parameters
        self.reasons: dict[str, str] = {}  # why weights of the last pass had entries
        self.trained = {  # dimensions by name
            name: one.dim() for name, one in module.named_parameters() if one.numel() and one.requires_grad
        }
        overridden = set(self.overridden)
        rebuilt, doubts = ({k: v for k, v in each.items() if k not in overridden} for each in (rebuilt, doubts))
        if doubts:
            self.draw_whole(rebuilt | doubts)
        elif rebuilt:
            self.require_room(rebuilt, entries, "The part of it that is drawn takes")
            self.rebuilt, self.reasons_to_keep = rebuilt, dict(rebuilt)
        else:
            self.weights = self.replace(module)

    @property
    def blocks(self) -> list[nn.Module]:
        """The modules of the blocks."""
        return [self.module.get_submodule(name) for block in self.layout.blocks for name in block.members]

    @property
    def foreign(self) -> bool:
        """Whether the module's code is neither of transformers nor of this package, so that passes are checked."""
        return self.subject.config is None and self.subject.transformer is None

    @property
    def name(self) -> str:
        """The name of the network."""
        return self.subject.name

    def lookups(self) -> dict[str, tuple[int, int]]:
        """Return rows and columns of the weights of which the last pass drew rows, by name."""
        return {w.name: (w.shape[0], w.shape[-1]) for w in self.weights if "rows" in self.uses.get(w.name, "")}

    def build(self) -> Built:
        """Build the module and read its laws; if its factory fails while it is watched, draw a whole network."""
        try:
            return build_twice(self.subject.factory, self.dtype)
        except (InputError, MemoryError):
            raise
        except Exception as error:  # the user's own code, which may raise anything  # noqa: BLE001
            free = available_memory()
            self.limit = None if free is None else int(SHARE * free / COPIES)
            reason = f"the code that makes it cannot be watched: {type(error).__name__}: {first_line(error)}"
            module = self.drawn_network(0)
            unknown = {name: Law(UNKNOWN, reason=reason) for name, _ in module.named_parameters()}
            return Built(module, unknown, {}, dict.fromkeys(unknown, reason), 0)

    def draw_whole(self, reasons: dict[str, str]) -> None:
        """Let the model's own code draw a whole network for each sample.

        Raises:
            InputError: it does not fit the free memory.
        """
        self.drawn, self.weights, self.reasons_to_keep, self.sample, self.state = reasons, [], {}, None, None
        self.rebuilt, self.repeated = {}, set()
        hidden = sum(
            each.numel() for _, each in stray_tensors(self.module) if isinstance(each, Tensor) and each.is_meta
        )
        self.require_room(reasons, self.table.count + hidden, "A network that is drawn whole takes")

    def require_room(self, reasons: dict[str, str], entries: int, what: str) -> None:
        """Raise `InputError` unless these entries, with their gradients, fit the free memory."""
        needed, free = COPIES * entries * self.dtype.itemsize, available_memory()
        if free is not None and needed > SHARE * free:
            name = next(iter(reasons))
            law = "the law of " if name in self.laws else ""
            nearest = "make it a parameter"
            if name in self.laws:
                nearest = f"overrides={{{name!r}: std}}, which is another network"
            raise InputError(
                f"{law}{name} is not understood: {reasons[name]}. {what} {readable(needed)}, more than is free. "
                f"Nearest: {nearest}."
            )

    def drawn_network(self, seed: int) -> nn.Module:
        """Let the model's own code draw a network."""
        limited = nullcontext() if self.limit is None else Limited(self.limit, self.subject.name)
        try:
            with limited:
                return drawn_module(self.subject.factory, self.dtype, seed)
        except (InputError, MemoryError):
            raise
        except Exception as error:  # the user's own code, which may raise anything
            raise build_error(self.subject, error) from error

    @property
    def seeds_itself(self) -> bool:
        """Whether the code that makes the network sets a seed, of all its random numbers or of some."""
        return any(sign in reason for reason in self.drawn.values() for sign in (OWN_STATE, OWN_GENERATOR))

    def require_different_draws(self) -> None:
        """Raise `InputError` if the model's own code makes the same network each time."""
        if any(self.laws[name].random for name in (self.overridden if self.drawn else self.laws)):
            return  # this package draws them, with other numbers for each network
        one, two = (numbers_of(self.drawn_network(torch_seed(k, "draws"))) for k in range(2))
        why = ", as it sets a seed" if self.seeds_itself else ""
        require(
            one.keys() != two.keys() or not all(same_numbers(each, two[name]) for name, each in one.items()),
            f"{self.subject.name} makes the same network each time{why}; a law needs networks that differ. "
            "Nearest: torch's random numbers without a seed, or one network (limitformer.steps, samples=1).",
        )

    def take(self, run: WeightlessRun) -> None:
        """Draw or build the network of the run's sample, unless it is there."""
        sample = (run.seed, run.samples.start)
        if sample == self.sample:
            return
        self.sample = self.state = None
        self.module, self.weights = nn.Module(), []  # so that only one network is in memory
        seed, laws = torch_seed(run.seed, f"weightless build {run.samples.start}"), dict[str, Law]()
        if self.drawn:
            module = self.drawn_network(seed)
        else:
            module, laws = build_sample(self.subject.factory, self.dtype, seed)
        shapes = {name: tuple(one.shape) for name, one in module.named_parameters()}
        alike = shapes == self.table.shapes
        require(alike, f"{self.subject.name} has other parameters each time it is built.")
        self.uninitialised = set(uninitialised(module)) - set(self.overridden)
        if self.drawn:
            self.override(module, run)
        else:
            self.weights = self.replace(module, laws | {name: self.laws[name] for name in self.overridden})
        with torch.no_grad():
            for each in (*module.parameters(), *module.buffers()):
                if not isinstance(each, Implicit):
                    each.data = self.on_device(each.data)
        for name, value in [*module.named_parameters(), *module.named_buffers(), *stray_tensors(module)]:
            missing = isinstance(value, Tensor) and value.is_meta
            require(not missing, f"{name} of {self.subject.name} is on the meta device and has no values.")
        self.module, self.sample = module.eval(), sample
        self.run_again()

    def override(self, module: nn.Module, run: WeightlessRun) -> None:
        """Draw the parameters of a whole network that have the laws of `overrides`."""
        laws = {name: self.laws[name] for name in self.overridden}
        parameters = {name: one for name, one in module.named_parameters() if name in laws}
        weights = [RandomWeight(name, laws[name], tuple(one.shape), run) for name, one in parameters.items()]
        drawn = [weight for weight in weights if weight.law.random]
        link_copies(drawn)
        for weight in drawn:
            parameters[weight.name].data.copy_(run.entries(weight, weight.rows)[0])
        for weight in weights:
            if weight.law.kind == CONSTANT:
                parameters[weight.name].data.fill_(weight.law.shift)

    def replace(self, module: nn.Module, laws: dict[str, Law] | None = None) -> list[RandomWeight]:
        """Replace random parameters by implicit weights, and set overridden constants; of `laws`, or of all laws."""
        waiting = WeightlessRun(0, range(1), 1, self.dtype, self.device)
        weights, new = [], dict[int, Any]()
        for name, parameter in module.named_parameters():
            law = self.laws[name] if laws is None else laws.get(name)
            if law is None:
                continue
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
        self.reasons_to_keep |= link_copies(weights)
        for part in module.modules():
            part._buffers.update({name: self.on_device(b) for name, b in part._buffers.items() if b is not None})
        return weights

    def on_device(self, values: Tensor) -> Tensor:
        """Move to the pass's device, and cast floating-point numbers to its dtype."""
        return values.to(self.device, self.dtype) if values.is_floating_point() else values.to(self.device)

    def width_of_activations(self) -> int:
        """The numbers that a pass stores for a token: the outputs of its linear maps."""
        return sum(min(shape[0], 10**6) for shape in self.matrices())

    def matrices(self) -> list[tuple[int, ...]]:
        """The shapes of random matrices; of a whole network, those of all matrices."""
        every = self.drawn or self.rebuilt
        shapes = list(self.table.shapes.values()) if every else [weight.shape for weight in self.weights]
        return [shape for shape in shapes if len(shape) >= 2]

    @contextmanager
    def trimming(self) -> Iterator[None]:
        """Trim the heap every few blocks of a large pass: stored activations would fragment it."""
        trimmed = self.blocks[::BLOCKS_BETWEEN_TRIMS] if self.trims else []
        hooks = [block.register_forward_pre_hook(lambda *_: trim_heap()) for block in trimmed]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def run_again(self) -> None:
        """Wrap the blocks that run again, if the network recomputes; blocks that share a weight do not."""
        single = [self.module.get_submodule(each.members[0]) for each in self.layout.blocks if len(each.members) == 1]
        known = [{p.weight.name for p in block.parameters() if isinstance(p, Implicit)} for block in single]
        owners = Counter(name for names in known for name in names)
        for block, names in zip(single, known, strict=True) if self.recomputes else ():
            if all(owners[name] == 1 for name in names):
                block.forward = self.recomputed(block.forward, names)

    def recomputed(self, forward: Callable[..., Any], names: set[str]) -> Callable[..., Any]:
        """Wrap `forward` so that its weights count as unused whenever it runs."""

        def again(*args: Any, **kwargs: Any) -> Any:
            trim_heap()
            if not self.weights:
                return forward(*args, **kwargs)
            run = self.weights[0].run
            run.forget(names)
            return forward(*args, **kwargs)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return wrapped

    def run(self, seed: int, samples: range, inputs: Inputs, draw: str, loss: Loss | None) -> Arrays:
        """Run one pass forward, and backward if there is a loss; return its arrays by sample."""
        call = partial(self.until_it_runs, seed, samples, inputs, draw, loss)
        arrays: Arrays = self.until_clear(inputs, call, partial(self.observed, seed, samples.start, draw))
        return arrays

    def find_blocks(self, inputs: Inputs, observed: Callable[..., Any], measured: bool) -> None:
        super().find_blocks(inputs, observed, measured)
        if self.recomputes:
            self.run_again()

    def observed(self, seed: int, sample: int, draw: str, inputs: Inputs, make: Callable[[], Observer]) -> Any:
        """Return the observer that `make` makes, after a pass of one sample without gradients."""

        def call(run: WeightlessRun) -> Observer:
            observer = make()
            with torch.no_grad(), self.watching(run, observer):
                self.call(self.arguments(run, inputs))
            return observer

        return self.until_it_runs(seed, range(sample, sample + 1), inputs, draw, None, call)

    @contextmanager
    def watching(self, run: WeightlessRun, *observers: Observer) -> Iterator[None]:
        """Tell observers of the pass."""
        with Interpreter(self.module, *observers, read=run.read) as run.interpreter:
            try:
                yield
            finally:
                run.interpreter = None

    def first(self, seed: int, inputs: Inputs, draw: str) -> Arrays:
        """Run the first sample without gradients.

        Raises:
            InputError: its sequences influence each other.
        """

        def call(run: WeightlessRun) -> bool:
            measure = self.measure(1, inputs, run.read)
            with torch.enable_grad(), self.watching(run, *self.observers(measure)):
                self.call(self.arguments(run, inputs))
            measure.finish()
            return measure.mixes()

        arrays = self.run(seed, range(1), inputs, draw, None)
        if inputs.rows > 1 and self.until_it_runs(seed, range(1), inputs, draw, square, call):
            raise mixed_sequences(self.subject.name, inputs.batch_dim)
        return arrays | self.outputs

    def until_it_runs(
        self, seed: int, samples: range, inputs: Inputs, draw: str, loss: Loss | None,
        call: Callable[[WeightlessRun], Any] | None = None,
    ) -> Any:  # fmt: skip
        """Repeat the pass, keeping one more weight each time, until none lacks entries; return its result."""
        while True:
            run = WeightlessRun(seed, samples, inputs.rows, self.dtype, self.device, draw, loss is not None)
            run.repeated = set(self.repeated)
            run.reasons_to_keep = {k: reason for k, reason in self.reasons_to_keep.items() if k not in run.repeated}
            self.begin(run)
            try:
                with one_thread():
                    return self.attempt(run, inputs, loss) if call is None else call(run)
            except DrawWholeError as needed:
                self.draw_whole(needed.reasons)
            except KeepWeightsError as needed:
                self.reasons_to_keep |= run.again | needed.reasons
                self.repeated |= run.repeatable()
                self.repeated -= needed.reasons.keys() - run.repeatable()
            except (RuntimeError, InputError) as error:
                if not self.detach_inputs(error):
                    raise
            except NoEntriesError as error:
                if self.drawn:
                    raise InputError(f"{self.subject.name} {error}") from error
                self.draw_whole({"a tensor": f"the model {error}"})

    def detach_inputs(self, error: Exception) -> bool:
        """Give later passes inputs without a gradient after an error that this may mend; return whether it may.

        The code may change its inputs in place, or what it makes of them, as it may without their gradient.
        """
        may_mend = not self.plain_inputs and any(words in str(error) for words in NO_GRADIENT_WANTED)
        self.plain_inputs = self.plain_inputs or may_mend
        return may_mend

    def begin(self, run: WeightlessRun) -> None:
        """Give the module the weights of a pass, and the state that it had before all passes."""
        if self.drawn or self.rebuilt:
            with one_thread():
                self.take(run)
            run.uses |= dict.fromkeys(self.rebuilt, DRAWN_WHOLE)
        for weight in self.weights:
            weight.run = run
        for parameter in self.module.parameters():
            parameter.grad = None
        self.state = self.state or State(self.module)
        self.state.restore()

    def attempt(self, run: WeightlessRun, inputs: Inputs, loss: Loss | None) -> Arrays:
        """Run one pass.

        Raises:
            KeepWeightsError: weights need entries.
            InputError: the module draws random numbers, changes a parameter, or reads one that is never initialised.
        """
        assert self.state is not None  # taken before the first pass
        arguments = self.arguments(run, inputs)
        measure = self.measure(len(run.samples), inputs, run.read)
        before = random_states()
        with torch.set_grad_enabled(loss is not None):
            with self.trimming(), self.watching(run, *self.observers(measure)):
                out = self.call(arguments)
            measure.finish()
            for name, parameter in self.module.named_parameters() if self.uninitialised else ():
                require(
                    name not in self.uninitialised or id(parameter) not in run.read,
                    f"{name} of {self.subject.name} is never initialised: its numbers are those that were in memory. "
                    f"Nearest: initialise it in the function, or overrides={{{name!r}: 0.02}}.",
                )
            require(random_states() == before, f"{self.subject.name} {DRAWS}{OTHER_THREAD * (active_count() > 1)}.")
            changed = self.state.changed_weight()
            require(changed is None, f"{self.subject.name} changes its parameter {changed} when it runs.")
            arrays = output_arrays(out, len(run.samples))
            self.stacks = sizes_of_stacks(measure)
            self.uses, self.reasons = run.uses, {**run.operations, **run.reasons_to_keep}
            self.read_where = where_parameters_are_read(self.module, measure)
            if self.foreign:
                self.outputs = {"output": output_sizes(out)[None].cpu().numpy()}
            if self.drawn:
                self.uses, self.reasons = dict.fromkeys(self.table.laws, DRAWN_WHOLE), self.drawn
            if loss is not None:
                arrays |= self.backward(out, arguments, loss, run)
            arrays |= stream_arrays(measure, gradients=loss is not None)
        return arrays

    def arguments(self, run: WeightlessRun, inputs: Inputs) -> dict[str, Any]:
        """Return the arguments of the module, by name; the first argument may have the name ""."""
        named = inputs.of(run.seed, run.samples, self.dtype)
        if self.plain_inputs:
            named = {name: each.detach() if isinstance(each, Tensor) else each for name, each in named.items()}
        return {name: each.to(self.device) if isinstance(each, Tensor) else each for name, each in named.items()}

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Call the module.

        Raises:
            KeepWeightsError: weights that are not kept were used more than once.
        """
        with torch.compiler.set_stance("force_eager"):
            out = call_with(self.module, arguments)
        if self.weights and self.weights[0].run.again:
            raise KeepWeightsError(self.weights[0].run.again)
        return out

    def backward(self, out: Any, arguments: Mapping[str, Any], loss: Loss, run: WeightlessRun) -> Arrays:
        """Differentiate the loss; return it with the norms of the gradients."""
        value = loss(out, arguments)
        differentiable = isinstance(value, Tensor) and value.requires_grad
        require(differentiable, "the loss must be a tensor that depends on the module's output.")
        mean = value.mean()
        if self.recomputes and self.state is not None:
            self.state.restore()  # as it was when the blocks ran first
        mean.backward()
        norms = run.gradient_norms()
        for name, one in self.module.named_parameters():
            if not isinstance(one, Implicit) and one.grad is not None:  # it has entries
                norms[name] = gradient_norm(one.grad)[None]
        none = torch.full((1,), torch.nan)
        return {
            "loss": mean.detach().double().cpu().numpy()[None],
            "weight_gradient": np.stack([norms.get(name, none).cpu().numpy() for name in self.trained], -1),
        }


def numbers_of(module: nn.Module) -> dict[str, Any]:
    """Return the tensors and numbers that a module holds, by path."""
    strays = [(name, value) for name, value in stray_tensors(module) if not isinstance(value, GENERATORS)]
    return dict([*module.named_parameters(), *module.named_buffers(), *strays])


def link_copies(weights: list[RandomWeight]) -> dict[str, str]:
    """Let copies draw the same numbers as their original; return the reasons to keep them."""
    first: dict[int, RandomWeight] = {}
    reasons: dict[str, str] = {}
    for weight in weights:
        original = first.setdefault(weight.law.source, weight)
        if original is not weight and weight.law.source >= 0:
            weight.numbers = original.name
            reasons |= {original.name: f"{weight.name} is a copy of it", weight.name: f"a copy of {original.name}"}
    return reasons


def random_states() -> tuple[Any, ...]:
    """The states of the global generators of torch, NumPy and Python."""
    return torch.get_rng_state().numpy().tobytes(), *numpy_and_python_states()


def output_sizes(out: Any) -> Tensor:
    """The norm of each tensor in a module's output."""
    return torch.tensor([float(gradient_norm(each.detach())) for each in tensors_in(out)], dtype=torch.float64)


def trim_heap() -> None:
    """Return freed memory to the system: stored activations lie between the holes, which glibc would hold on to."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
