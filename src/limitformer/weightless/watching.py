r"""What a module's own code draws for each parameter, read by watching it run.

While a module is built, every new matrix goes to the meta device, where nothing is computed and nothing stored, and
each operation that writes to it is written down: normal, uniform, truncated normal, constants, copies, multiples, in
their order. A later write over the whole replaces what came before. Vectors and buffers are real. So no table of
architectures is believed, and a model of any size can be read.

Four of torch's initialisations do nothing on the meta device. They are watched by themselves, under whatever name they
were imported: the truncated normal; the orthogonal and the sparse one, whose entries depend on each other; and Dirac's.
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
from torch.utils._python_dispatch import TorchDispatchMode

from limitformer.base.errors import require
from limitformer.base.memory import readable
from limitformer.weightless import laws
from limitformer.weightless.laws import Law
from limitformer.weightless.reachable import same_numbers, strays

ALLOCATIONS = ("empty", "new_empty", "empty_strided", "new_empty_strided")
RANDOM = {"randn": laws.normal(1.0), "rand": laws.uniform(0.0, 1.0)}
RANDOM |= {"randn_like": laws.normal(1.0), "rand_like": laws.uniform(0.0, 1.0)}
NEW = {*ALLOCATIONS, *RANDOM, "empty_like", "zeros", "ones", "full", "randn_like"}
KEEPING = {"clone", "detach", "_to_copy", "alias", "lift_fresh", "contiguous"}  # of the whole tensor, entry by entry
VIEWS = {"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "t", "transpose", "permute", "select", "slice"}
VIEWS |= {"detach", "alias", "as_strided", "expand", "_reshape_alias", "unbind", "split", "chunk", "lift_fresh"}
FILLING = {"zero_", "fill_", "normal_", "uniform_", "copy_"}  # what was there before does not matter
DEPENDENT = Law(laws.UNKNOWN, reason="its entries depend on each other")


class Watch(TorchDispatchMode):
    """Sends new matrices to the meta device and keeps the law of every storage that chance or a constant wrote to."""

    def __init__(self) -> None:
        super().__init__()
        self.laws: dict[int, Law] = {}
        self.values: dict[int, Tensor] = {}  # what was copied from a computed tensor
        self.alive: list[Any] = []  # storages, so that no address is used twice
        self.draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and write down what it does."""
        name, kwargs = func.overloadpacket.__name__, dict(kwargs or {})
        if name in ALLOCATIONS or name in RANDOM:
            return self.made(name, func, args, kwargs)
        if name == "_to_copy" and args[0].is_meta:  # a matrix that is sent to a device stays without entries
            kwargs["device"] = args[0].device
        out = func(*args, **kwargs)
        if name.rstrip("_") != name and args:
            self.written(name, args, kwargs)
        elif "out" in kwargs:
            self.note(kwargs["out"], Law(laws.UNKNOWN, reason=f"it was written by {name}"))
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
        if name in RANDOM and out.is_floating_point():
            self.note(out, self.drawn(RANDOM[name]))
        return out

    def drawn(self, law: Law) -> Law:
        """The law of new random numbers."""
        self.draws += law.random
        return replace(law, source=self.draws if law.random else -1)

    def written(self, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        """An operation in place, on one tensor or on several."""
        if not isinstance(args[0], Tensor):
            for tensor in tensors_in(args[0]):
                self.note(tensor, Law(laws.UNKNOWN, reason=f"it was changed by {name}"))
        elif name == "copy_" and isinstance(args[1], Tensor):
            self.copied(args[0], args[1])
        elif args[0].is_floating_point():
            before, tensor = self.law_of(args[0]), args[0]
            after = after_writing(name, before, args[1:], kwargs)
            after = self.drawn(after) if name in FILLING else after
            self.note(tensor, after if covers(tensor) else with_part(before, tensor, after))

    def copied(self, tensor: Tensor, source: Tensor) -> None:
        """`tensor` takes the entries of `source`."""
        law = self.law_of(source)
        if law is None and not source.is_meta:
            self.values[storage(tensor)] = source.detach().expand(tensor.shape).clone()
            law = Law(laws.GIVEN)
        elif law is not None and law.kind == laws.GIVEN and plain(source) and source.shape == tensor.shape:
            self.values[storage(tensor)] = self.values[storage(source)]
        elif law is not None and law.kind == laws.GIVEN:
            law = Law(laws.UNKNOWN, reason="it repeats or rearranges given numbers")
        law = law or Law(laws.UNKNOWN, reason="a copy of something that was computed")
        if law.random and not (plain(source) and plain(tensor) and source.shape == tensor.shape):
            law = Law(laws.UNKNOWN, reason="it repeats or rearranges random numbers")
        self.note(tensor, law if covers(tensor) else with_part(self.law_of(tensor), tensor, law))

    def derived(self, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Tensors made from ones whose law is known: from one by an operation with numbers, or not understood."""
        sources = [(t, law) for t in tensors_in((args, kwargs)) if (law := self.law_of(t)) is not None]
        if not sources or not any(law.random or law.kind == laws.UNKNOWN or t.is_meta for t, law in sources):
            return
        tensor, law = sources[0]
        alone = len(sources) == 1 and tensor is args[0] and len(tensors_in((args, kwargs))) == 1
        for made in tensors_in(out):
            after = Law(laws.UNKNOWN, reason=f"it was made by {name}")
            if alone and plain(tensor) and plain(made) and made.shape == tensor.shape:
                after = law if name in KEEPING else after_writing(f"{name}_", law, args[1:], kwargs)
                if after is law and storage(tensor) in self.values:
                    self.values[storage(made)] = self.values[storage(tensor)]
            self.note(made, after)

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
        law = self.drawn(laws.truncated_normal(mean, std, a, b))
        self.note(tensor, law if covers(tensor) else with_part(self.law_of(tensor), tensor, law))
        return tensor


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
    """Whether it is all of its storage."""
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()


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
    if name in ("zero_", "fill_", "zeros_like_", "ones_like_", "full_like_"):
        value = {"zero_": 0.0, "zeros_like_": 0.0, "ones_like_": 1.0}.get(name, number)
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


def with_part(before: Law | None, part: Tensor, after: Law) -> Law:
    """The law of a random matrix whose row `part` was overwritten by a constant; unknown for any other part."""
    base = part._base if part._base is not None else part
    row = base.stride(0) if base.dim() else 0
    whole_row = row and part.numel() == row and part.is_contiguous() and part.storage_offset() % row == 0
    if before is None or not before.random or not whole_row or after.kind != laws.CONSTANT:
        return Law(laws.UNKNOWN, reason="a part of it was overwritten")
    rows = before.rows | {part.storage_offset() // row: after.shift}
    return replace(before, rows=rows)


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
        with watch:
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
    found = {}
    for name, parameter in module.named_parameters():
        found[name] = law_of(parameter, watch)
        if name not in twins or not alike(parameter, found[name], watch, twins[name], watch_of_other):
            seen = watch.law_of(parameter) or found[name]
            found[name] = Law(laws.UNKNOWN, reason=seen.reason or "it is random", source=seen.source)
    settle(module, watch, found)
    settle(other, watch_of_other, found)
    return Built(module, found, doubts(module, other, watch))


def doubts(module: nn.Module, other: nn.Module, watch: Watch) -> dict[str, str]:
    """What a pass through `module` could read, is no parameter, and has no values or others in another build."""
    found, twins = {}, dict(other.named_buffers())
    for name, buffer in module.named_buffers():
        law = watch.law_of(buffer)
        if buffer.is_meta:
            found[name] = "it was made by an operation on matrices"
        elif (law is not None and law.random) or name not in twins or not same_numbers(buffer, twins[name]):
            found[name] = "it is random"
    own = {id(parameter) for parameter in module.parameters()}
    elsewhere = dict(strays(other))
    for name, value in strays(module):
        if isinstance(value, Tensor) and (value.is_meta or id(value) in own):
            found[name] = "it is a matrix that is neither a parameter nor a buffer"
        elif name not in elsewhere or not same_numbers(value, elsewhere[name]):
            found[name] = "it is random, and neither a parameter nor a buffer"
    return found


def build(factory: Callable[[], nn.Module], dtype: torch.dtype, seed: int) -> tuple[nn.Module, Watch]:
    """Run the factory from these global seeds, and watch it."""
    with watching() as watch:
        return drawn_module(factory, dtype, seed), watch


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
    return module


def law_of(parameter: Tensor, watch: Watch) -> Law:
    """As watched; of what nothing random wrote to, its values."""
    law = watch.law_of(parameter)
    if law is not None and (parameter.is_meta or law.random or law.reason == DEPENDENT.reason):
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
    if law.kind == laws.GIVEN and storage(tensor) in watch.values:
        return watch.values[storage(tensor)].to(tensor.dtype).reshape(tensor.shape)
    return None


def put_parameters(module: nn.Module, new: dict[int, Any]) -> None:
    """Put new parameters, with their attributes, wherever `module` has the old ones, whose `id`s are the keys."""
    for part in module.modules():
        found = {key: (old, new[id(old)]) for key, old in part._parameters.items() if id(old) in new}
        for key, (old, one) in found.items():
            vars(one).update(vars(old))
            part._parameters[key] = one
