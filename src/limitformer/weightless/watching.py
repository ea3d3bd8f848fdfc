r"""What a module's own code draws for each parameter, read by watching it run.

While a module is built, every new matrix goes to the meta device, where nothing is computed and nothing stored, and
each operation that writes to it is written down: normal, uniform, truncated normal, constants, copies, multiples, in
their order. A later write over the whole replaces what came before. Vectors and buffers are real. So no table of
architectures is believed, and a model of any size can be read.

Four of torch's initialisations do nothing on the meta device. They are watched by themselves, under whatever name they
were imported: the truncated normal; the orthogonal and the sparse one, whose entries depend on each other; and Dirac's.

Chance may also enter where no law describes it: a number that is read while the module is built, a seed that the code
sets itself, another generator. The watch notes each of these as a doubt.
"""

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from limitformer.base.errors import require
from limitformer.base.memory import readable
from limitformer.weightless import laws
from limitformer.weightless.laws import Law
from limitformer.weightless.reachable import GENERATORS, same_numbers, stray_tensors

ALLOCATIONS = ("empty", "new_empty", "empty_strided", "new_empty_strided")
RANDOM = {"randn": laws.normal(1.0), "rand": laws.uniform(0.0, 1.0)}
RANDOM |= {"randn_like": laws.normal(1.0), "rand_like": laws.uniform(0.0, 1.0)}
ZEROS, ONES, FULL = ({f"{way}_like", f"new_{way}"} for way in ("zeros", "ones", "full"))
NEW = {*ALLOCATIONS, *RANDOM, "empty_like", "zeros", "ones", "full", "randn_like"}
KEEPING = {"clone", "detach", "_to_copy", "alias", "lift_fresh", "contiguous"}  # of the whole tensor, entry by entry
VIEWS = {"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "t", "transpose", "permute", "select", "slice"}
VIEWS |= {"detach", "alias", "as_strided", "expand", "_reshape_alias", "unbind", "split", "chunk", "lift_fresh"}
FILLING = {"zero_", "fill_", "normal_", "uniform_", "copy_"}  # what was there before does not matter
ENTRIES = {"tolist", "numpy", "__array__", "__dlpack__"}  # methods that read a tensor's memory
OWN_GENERATOR = "it draws from a generator of its own"
OWN_STATE = "it sets the state of torch's generator"
READS = "it reads a random number while it builds the module"
OTHER_CHANCE = "it draws from the generators of NumPy or Python"
RENORMALISES = "it changes its weight when it runs (max_norm)"
RANDOM_VALUE = "it is random"
VIEW = "it is a view, or a copy in another form, of a random matrix"
DEPENDENT = Law(laws.UNKNOWN, reason="its entries depend on each other")


class Watch(TorchDispatchMode):
    """Sends new matrices to the meta device and keeps the law of every storage that chance or a constant wrote to."""

    def __init__(self) -> None:
        super().__init__()
        self.laws: dict[int, Law] = {}
        self.values: dict[int, Tensor] = {}  # what was copied from a computed tensor
        self.alive: list[Any] = []  # storages, so that no address is used twice
        self.draws = 0
        self.widths: dict[int, int] = {}  # of the rows of `Law.rows`, by the law's source
        self.doubts: set[str] = set()  # what the code does with chance that no law describes
        self.state: Tensor | None = None  # of torch's generator after the last draw

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and write down what it does."""
        name, kwargs = func.overloadpacket.__name__, dict(kwargs or {})
        if any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values())):
            self.doubts.add(OWN_GENERATOR)
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            self.check_reading((args, kwargs))
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        if seeded:
            self.check_state()
        out = self.followed(name, func, args, kwargs, seeded)
        if seeded:
            self.move_state()
        return out

    def begin(self) -> None:
        """Take the state of torch's generator as the one that the code finds."""
        self.state = torch.get_rng_state()

    def check_state(self) -> None:
        """Note a doubt if anything but a draw has changed the state of torch's generator."""
        if self.state is not None and not torch.equal(self.state, torch.get_rng_state()):
            self.doubts.add(OWN_STATE)

    def move_state(self) -> None:
        """Move torch's generator, which stays where it is when entries are drawn on the meta device."""
        if self.state is not None and torch.equal(self.state, torch.get_rng_state()):
            torch.rand(1)
        self.state = torch.get_rng_state()

    def check_reading(self, values: Any) -> None:
        """Note a doubt if the code reads entries that are random."""
        if self.has_chance(values):
            self.doubts.add(READS)

    def has_chance(self, values: Any) -> bool:
        """Whether chance has a part in one of the tensors."""
        laws_of_all = [self.law_of(tensor) for tensor in tensors_in(values)]
        return any(law is not None and (law.random or law.kind == laws.UNKNOWN) for law in laws_of_all)

    def followed(self, name: str, func: Any, args: Any, kwargs: dict[str, Any], seeded: bool) -> Any:
        """Run an operation and note the laws of what it makes or changes."""
        if name in ALLOCATIONS or name in RANDOM:
            return self.made(name, func, args, kwargs)
        if name == "_to_copy" and args[0].is_meta:  # a matrix that is sent to a device stays without entries
            kwargs["device"] = args[0].device
        before = self.has_chance((args, kwargs))
        out = func(*args, **kwargs)
        if name.rstrip("_") != name and args:
            self.written(name, args, kwargs, before or seeded)
        elif "out" in kwargs:
            if before or seeded or kwargs["out"].is_meta:
                self.note(kwargs["out"], Law(laws.UNKNOWN, reason=f"it was written by {name}"))
        elif seeded:
            for made in tensors_in(out):
                self.note(made, Law(laws.UNKNOWN, reason=f"it was made by {name}"))
        elif name == "_to_copy" and out.is_meta and not args[0].is_meta:  # sent to where the matrices are
            self.copied(out, args[0])
        elif name not in VIEWS:
            self.derived(name, args, kwargs, out)
        return out

    def made(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """A new tensor; a matrix is one of the meta device."""
        size = args[0] if isinstance(args[0], list | tuple) else args[1] if len(args) > 1 else args[0].shape
        like = args[0].dtype if isinstance(args[0], Tensor) else torch.get_default_dtype()
        if len(size) >= 2 and (kwargs.get("dtype") or like).is_floating_point:
            kwargs["device"] = torch.device("meta")
        out: Tensor = func(*args, **kwargs)
        if name in RANDOM:
            unknown = Law(laws.UNKNOWN, reason=f"it was made by {name}")
            self.note(out, self.drawn(RANDOM[name]) if out.is_floating_point() else unknown)
        return out

    def drawn(self, law: Law) -> Law:
        """The law of new random numbers."""
        self.draws += law.random
        return replace(law, source=self.draws if law.random else -1)

    def written(self, name: str, args: Any, kwargs: dict[str, Any], chance: bool) -> None:
        """Note an operation in place, on one tensor or on several."""
        if not isinstance(args[0], Tensor):
            for tensor in tensors_in(args[0]):
                if chance or tensor.is_meta:
                    self.note(tensor, Law(laws.UNKNOWN, reason=f"it was changed by {name}"))
        elif not chance and not args[0].is_meta:
            self.note(args[0], Law(laws.GIVEN))
        elif name == "copy_" and isinstance(args[1], Tensor):
            self.copied(args[0], args[1])
        else:
            before, tensor = self.law_of(args[0]), args[0]
            after = after_writing(name, before, args[1:], kwargs)
            after = self.drawn(after) if name in FILLING else after
            if not tensor.is_floating_point() and after.kind != laws.CONSTANT:
                after = Law(laws.UNKNOWN, reason=f"it was changed by {name}")
            self.note(tensor, after if covers(tensor) else self.with_part(before, tensor, after))

    def copied(self, tensor: Tensor, source: Tensor) -> None:
        """Note that `tensor` takes the entries of `source`."""
        law, rearranged = self.law_of(source), not (plain(tensor) and source.shape == tensor.shape)
        if not source.is_meta and not self.has_chance(source):
            law = Law(laws.GIVEN) if plain(tensor) else Law(laws.UNKNOWN, reason="a part of it was overwritten")
            self.values[storage(tensor)] = source.detach().expand(tensor.shape).clone()
        elif law is not None and law.kind == laws.GIVEN and plain(source) and not rearranged:
            self.values[storage(tensor)] = self.values[storage(source)]
        elif law is not None and law.kind == laws.GIVEN:
            law = Law(laws.UNKNOWN, reason="it repeats or rearranges given numbers")
        law = law or Law(laws.UNKNOWN, reason="a copy of something that was computed")
        if law.random and not (
            plain(source) and not rearranged and source.is_floating_point() and tensor.is_floating_point()
        ):
            law = Law(laws.UNKNOWN, reason="it repeats or rearranges random numbers")
        self.note(tensor, law if covers(tensor) else self.with_part(self.law_of(tensor), tensor, law))

    def derived(self, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Tensors made from ones whose law is known: from one by an operation with numbers, or not understood."""
        if name in ZEROS | ONES | FULL:
            after = after_writing(f"{name}_", None, args[2 if "new" in name else 1 :], {})
            self.note(out, after if out.is_meta else Law(laws.GIVEN))
            return
        if name == "empty_like" and not out.is_meta:
            return
        sources = [(t, law) for t in tensors_in((args, kwargs)) if (law := self.law_of(t)) is not None]
        if not sources or not any(law.random or law.kind == laws.UNKNOWN or t.is_meta for t, law in sources):
            return
        tensor, law = sources[0]
        alone = len(sources) == 1 and tensor is args[0] and len(tensors_in((args, kwargs))) == 1
        for made in tensors_in(out):
            after = Law(laws.UNKNOWN, reason=f"it was made by {name}")
            same = plain(tensor) and plain(made) and made.shape == tensor.shape
            if alone and same and tensor.is_floating_point() and made.is_floating_point():
                after = law if name in KEEPING else after_writing(f"{name}_", law, args[1:], kwargs)
                if after is law and storage(tensor) in self.values:
                    self.values[storage(made)] = self.values[storage(tensor)]
            self.note(made, after)

    def with_part(self, before: Law | None, part: Tensor, after: Law) -> Law:
        """The law of a random matrix whose row `part` was overwritten by a constant; unknown for any other part."""
        base = part._base if part._base is not None else part
        row = base.stride(0) if base.dim() else 0
        whole_row = row and part.numel() == row and part.is_contiguous() and part.storage_offset() % row == 0
        if before is None or not before.random or not whole_row or after.kind != laws.CONSTANT:
            return Law(laws.UNKNOWN, reason="a part of it was overwritten")
        if self.widths.setdefault(before.source, row) != row:
            return Law(laws.UNKNOWN, reason="parts of it were overwritten")
        return replace(before, rows=before.rows | {part.storage_offset() // row: after.shift})

    def note(self, tensor: Tensor, law: Law) -> None:
        """Note the law of a storage; one that is not understood gets a source, too, by which copies are known."""
        if tensor.layout != torch.strided:
            return
        self.alive.append(tensor.untyped_storage())
        if law.kind == laws.UNKNOWN and law.source < 0:
            self.draws += 1
            law = replace(law, source=self.draws)
        self.laws[storage(tensor)] = law

    def law_of(self, tensor: Tensor) -> Law | None:
        """Of its storage, if something was seen."""
        return self.laws.get(storage(tensor)) if tensor.layout == torch.strided else None

    def truncated_normal(
        self, tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> Tensor:
        """In the place of torch's function."""
        torch.rand(1)  # which is watched: it moves torch's generator, as this draw does
        if generator is not None:
            self.doubts.add(OWN_GENERATOR)
        law = self.drawn(laws.truncated_normal(mean, std, a, b))
        self.note(tensor, law if covers(tensor) else self.with_part(self.law_of(tensor), tensor, law))
        return tensor


class Readings(TorchFunctionMode):
    """Notes where the code reads random entries past torch's operations, such as by `tolist`."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and note a doubt if it reads random entries."""
        if getattr(func, "__name__", "") in ENTRIES:
            self.watch.check_reading(args[:1])
        return func(*args, **(kwargs or {}))


class Limited(TorchDispatchMode):
    """Refuses to make more tensors than `most` bytes in all."""

    def __init__(self, most: int, name: str) -> None:
        super().__init__()
        self.most, self.made, self.name = most, 0, name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and count what is new."""
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in NEW:
            self.made += out.untyped_storage().nbytes() if not out.is_meta else 0
            fits = self.made <= self.most
            require(fits, f"{self.name} takes more than {readable(self.most)}, which is what is free.")
        return out


def tensors_in(values: Any) -> list[Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = list(values.values())
    return [tensor for value in values for tensor in tensors_in(value)] if isinstance(values, list | tuple) else []


def plain(tensor: Tensor) -> bool:
    """Whether it is all of its storage, in its order."""
    return covers(tensor) and tensor.is_contiguous() and tensor.storage_offset() == 0


def storage(tensor: Tensor) -> int:
    """What tensors that share their memory have in common."""
    return int(tensor.untyped_storage()._cdata)


def covers(tensor: Tensor) -> bool:
    """Whether it is all of its storage, and has each entry once."""
    entries = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if tensor.numel() and size > 1 and stride != entries:
            return False
        entries *= size
    return entries * tensor.element_size() == tensor.untyped_storage().nbytes()


def after_writing(name: str, before: Law | None, args: Any, kwargs: dict[str, Any]) -> Law:
    """The law of a tensor of the law `before` after the operation."""
    numbers = [a for a in args if isinstance(a, int | float)]
    number = float(numbers[0]) if numbers else None
    if not set(kwargs) <= {"mean", "std", "from", "to", "generator", "value", "memory_format", "min", "max"}:
        return Law(laws.UNKNOWN, reason=f"it was changed by {name.rstrip('_')} with {', '.join(kwargs)}")
    if name == "normal_":
        return laws.normal(*normal_arguments(args, kwargs)[::-1])
    if name == "uniform_":
        return laws.uniform(*uniform_arguments(args, kwargs))
    if name in ("zero_", "fill_") or name[:-1] in ZEROS | ONES | FULL:
        value = 0.0 if name == "zero_" or name[:-1] in ZEROS else 1.0 if name[:-1] in ONES else number
        return Law(laws.UNKNOWN, reason=name) if value is None else laws.constant(value)
    if name in ("requires_grad_", "detach_"):
        return before or Law(laws.GIVEN)
    if before is None or not (before.random or before.kind == laws.CONSTANT):
        return Law(laws.UNKNOWN, reason=f"it was changed by {name.rstrip('_')}")
    if number is not None and name in ("mul_", "div_", "add_", "sub_"):
        change = {"mul_": before.times(number), "add_": before.plus(number), "sub_": before.plus(-number)}
        return before.times(1 / number) if name == "div_" else change[name]
    if name == "neg_":
        return before.times(-1.0)
    if name == "erfinv_" and before.kind == laws.UNIFORM and not before.rows:
        return before.erfinv()
    if name in ("clamp_", "clip_") and before.within(*clamp_arguments(args, kwargs)):
        return before
    return Law(laws.UNKNOWN, reason=f"it was changed by {name.rstrip('_')}")


def normal_arguments(args: Any, kwargs: dict[str, Any]) -> tuple[float, float]:
    """(mean, std) of `normal_`."""
    found = {"mean": 0.0, "std": 1.0} | dict(zip(("mean", "std"), args, strict=False)) | kwargs
    return float(found["mean"]), float(found["std"])


def uniform_arguments(args: Any, kwargs: dict[str, Any]) -> tuple[float, float]:
    """(low, high) of `uniform_`."""
    found = {"from": 0.0, "to": 1.0} | dict(zip(("from", "to"), args, strict=False)) | kwargs
    return float(found["from"]), float(found["to"])


def clamp_arguments(args: Any, kwargs: dict[str, Any]) -> tuple[float, float]:
    """(min, max) of `clamp_`."""
    found = dict(zip(("min", "max"), args, strict=False)) | kwargs
    least, most = found.get("min"), found.get("max")
    return -math.inf if least is None else float(least), math.inf if most is None else float(most)


@contextlib.contextmanager
def watching() -> Iterator[Watch]:
    """Watch what is built in the block."""
    watch = Watch()
    silent = [nn.init.orthogonal_, nn.init.sparse_, nn.init.dirac_]
    codes = [(function.__code__, function.__defaults__) for function in silent]
    truncated = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = watch.truncated_normal
    WATCHES.append(watch)
    for function in silent:  # the function itself, for others have imported it by name
        function.__code__, function.__defaults__ = dependent_entries.__code__, None
    try:
        with watch, Readings(watch):
            yield watch
    finally:
        WATCHES.pop()
        nn.init._no_grad_trunc_normal_ = truncated
        for function, (code, defaults) in zip(silent, codes, strict=True):
            function.__code__, function.__defaults__ = code, defaults


WATCHES: list[Watch] = []  # the one that looks on is the last


def dependent_entries(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """In the place of torch's functions whose entries depend on each other; it runs among their globals, not these."""
    from limitformer.weightless import watching

    watching.WATCHES[-1].note(tensor, watching.DEPENDENT)
    return tensor


class Built(NamedTuple):
    """A module whose random matrices are on the meta device, the law of each parameter, and other randomness."""

    module: nn.Module
    laws: dict[str, Law]  # by the parameter's first name
    doubts: dict[str, str]  # what the pass would read and is not understood: its name, and why


def built(factory: Callable[[], nn.Module], dtype: torch.dtype) -> Built:
    """Build a module from two seeds: what differs, and was not understood, is random in a way that is not known."""
    module, watch = build(factory, dtype, 0)
    other, watch_of_other = build(factory, dtype, 1)
    twins = dict(other.named_parameters())
    laws_found = {}
    explains = False  # whether a parameter shows where numbers of NumPy or Python went
    for name, parameter in module.named_parameters():
        law = law_of(parameter, watch)
        if name not in twins or not alike(parameter, law, watch, twins[name], watch_of_other):
            seen = watch.law_of(parameter) or law
            explains = explains or seen.kind != laws.UNKNOWN
            law = Law(laws.UNKNOWN, reason=seen.reason or RANDOM_VALUE, source=seen.source)
        laws_found[name] = law
    laws_found |= views(module, laws_found, watch)
    settle(module, watch, laws_found)
    settle(other, watch_of_other, laws_found)
    reasons = watch.doubts | watch_of_other.doubts
    reasons -= {OTHER_CHANCE} if explains else set()
    own = {"the code that makes it": "; ".join(sorted(reasons))} if reasons else {}
    return Built(module, laws_found, doubts(module, other, watch) | own)


def views(module: nn.Module, known: dict[str, Law], watch: Watch) -> dict[str, Law]:
    """Unknown laws for the parameters that hold a random matrix in part, or in another form than other parameters."""
    forms: dict[int, dict[Any, list[str]]] = {}
    odd = set()
    for name, parameter in module.named_parameters():
        law = known[name]
        if parameter.layout != torch.strided or law.source < 0:
            continue
        geometry = (parameter.shape, parameter.stride(), parameter.storage_offset(), parameter.dtype)
        form = (*geometry, law.kind, law.low, law.high)
        forms.setdefault(law.source, {}).setdefault(form, []).append(name)
        rows = not law.rows or (plain(parameter) and parameter.stride(0) == watch.widths[law.source])
        if not covers(parameter) or not rows:
            odd.add(law.source)
    unknown: dict[str, Law] = {}
    for source, names in forms.items():
        for same in names.values() if source in odd or len(names) > 1 else ():
            watch.draws += 1  # a source of their own, so that laws that are given do not make them copies
            reasons = {name: known[name].reason or VIEW for name in same}
            unknown |= {name: Law(laws.UNKNOWN, reason=reasons[name], source=watch.draws) for name in same}
    return unknown


def doubts(module: nn.Module, other: nn.Module, watch: Watch) -> dict[str, str]:
    """What a pass through `module` could read, is not a parameter, and has no values or others in another build."""
    reasons, twins = {}, dict(other.named_buffers())
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            reasons[name] = "it was made by an operation on matrices"
        elif watch.has_chance(buffer) or name not in twins or not same_numbers(buffer, twins[name]):
            reasons[name] = RANDOM_VALUE
    own = {id(parameter) for parameter in module.parameters()}
    elsewhere, here = dict(stray_tensors(other)), dict(stray_tensors(module))
    for name, value in here.items():
        if isinstance(value, Tensor) and (value.is_meta or id(value) in own):
            reasons[name] = "it is a matrix that is neither a parameter nor a buffer"
        elif isinstance(value, GENERATORS):
            reasons[name] = "it is a generator of random numbers"
        elif watch.has_chance(value) or name not in elsewhere or not same_numbers(value, elsewhere[name]):
            reasons[name] = "it is random, and neither a parameter nor a buffer"
    reasons |= {name: "only some of the modules have it" for name in elsewhere if name not in here}
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            reasons[name] = RENORMALISES
    return reasons


def build(factory: Callable[[], nn.Module], dtype: torch.dtype, seed: int) -> tuple[nn.Module, Watch]:
    """Run the factory from these global seeds, and watch it."""

    def watched() -> nn.Module:
        watch.begin()
        before = other_chance()
        module = factory()
        if other_chance() != before:
            watch.doubts.add(OTHER_CHANCE)
        return module

    with watching() as watch:
        return drawn_module(watched, dtype, seed), watch


def other_chance() -> tuple[Any, ...]:
    """The states of the global generators of NumPy and Python."""
    numpys: Any = np.random.get_state(legacy=False)
    return numpys["state"]["key"].tobytes(), numpys["state"]["pos"], random.getstate()


def drawn_module(factory: Callable[[], nn.Module], dtype: torch.dtype, seed: int) -> nn.Module:
    """Run the factory from these global seeds, which are put back."""
    before, own, numpys = torch.get_default_dtype(), random.getstate(), np.random.get_state()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            module = factory()
    finally:
        torch.set_default_dtype(before)
        np.random.set_state(numpys)
        random.setstate(own)
    require(isinstance(module, nn.Module), f"the function must return a torch.nn.Module; got {type(module).__name__}.")
    lazy = next((name for name, each in named_tensors(module) if is_lazy(each)), None)
    require(
        lazy is None,
        f"{lazy} of {type(module).__name__} is of a lazy layer, and has no shape before the module has run. "
        "Nearest: the layer with its sizes, such as nn.Linear for nn.LazyLinear.",
    )
    return module


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def law_of(parameter: Tensor, watch: Watch) -> Law:
    """The law as watched; where nothing random wrote to a parameter, its values."""
    law = watch.law_of(parameter)
    if law is not None and parameter.is_meta and law.kind == laws.GIVEN and not plain(parameter):
        return Law(laws.UNKNOWN, reason="it repeats or rearranges given numbers")
    if law is not None and (parameter.is_meta or watch.has_chance(parameter)):
        return law
    if parameter.is_meta:
        return Law(laws.UNKNOWN, reason="nothing was seen to write to it")
    first = parameter.detach().reshape(-1)[:1]
    same = parameter.numel() > 0 and bool((parameter.detach() == first).all())
    return laws.constant(float(first)) if same and not parameter.is_complex() else Law(laws.GIVEN)


def alike(parameter: Tensor, law: Law, watch: Watch, twin: Tensor, watch_of_twin: Watch) -> bool:
    """Whether a parameter has the same law in another build, and the same values where it is not random."""
    other = law_of(twin, watch_of_twin)
    if replace(law, source=-1) != replace(other, source=-1) or parameter.shape != twin.shape:
        return False
    if law.kind != laws.GIVEN:
        return True
    mine, theirs = value_of(parameter, law, watch), value_of(twin, other, watch_of_twin)
    return mine is not None and theirs is not None and same_numbers(mine, theirs)


def settle(module: nn.Module, watch: Watch, found: dict[str, Law]) -> None:
    """Give memory and values to what is not random: constants, copies, and buffers."""
    values = {}
    for name, parameter in module.named_parameters():
        law = found.get(name)
        if parameter.is_meta and law is not None and not law.random:
            value = value_of(parameter, law, watch)
            if value is not None:
                values[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    put_parameters(module, values)
    for _, part in module.named_modules():
        for key, buffer in list(part._buffers.items()):
            law = None if buffer is None else watch.law_of(buffer)
            if buffer is not None and buffer.is_meta and law is not None:
                value = value_of(buffer, law, watch)
                part._buffers[key] = buffer if value is None else value


def value_of(tensor: Tensor, law: Law, watch: Watch) -> Tensor | None:
    """The values of a constant or a copy."""
    if not tensor.is_meta:
        return tensor.detach()
    if law.kind == laws.CONSTANT:
        return torch.full(tensor.shape, law.shift, dtype=tensor.dtype)
    if law.kind == laws.GIVEN and plain(tensor) and storage(tensor) in watch.values:
        return watch.values[storage(tensor)].to(tensor.dtype).reshape(tensor.shape)
    return None


def put_parameters(module: nn.Module, new: dict[int, Any]) -> None:
    """Put new parameters, with their attributes, wherever `module` has the old ones, whose `id`s are the keys."""
    for part in module.modules():
        found = {key: (old, new[id(old)]) for key, old in part._parameters.items() if id(old) in new}
        for key, (old, one) in found.items():
            vars(one).update(vars(old))
            part._parameters[key] = one
