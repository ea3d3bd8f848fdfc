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
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from limitformer.weightless import laws
from limitformer.weightless.laws import Law
from limitformer.weightless.tensors import covers, plain, storage, tensors_in

ALLOCATIONS = ("empty", "new_empty", "empty_strided", "new_empty_strided")
RANDOM = {"randn": laws.normal(1.0), "rand": laws.uniform(0.0, 1.0)}
RANDOM |= {"randn_like": laws.normal(1.0), "rand_like": laws.uniform(0.0, 1.0)}
ZEROS, ONES, FULL = ({f"{way}_like", f"new_{way}"} for way in ("zeros", "ones", "full"))
KEEPING = {"clone", "detach", "_to_copy", "alias", "lift_fresh", "contiguous"}  # of the whole tensor, entry by entry
VIEWS = {"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "t", "transpose", "permute", "select", "slice"}
VIEWS |= {"detach", "alias", "as_strided", "expand", "_reshape_alias", "unbind", "split", "chunk", "lift_fresh"}
FILLING = {"zero_", "fill_", "normal_", "uniform_", "copy_"}  # what was there before does not matter
ENTRIES = {"tolist", "numpy", "__array__", "__dlpack__"}  # methods that read a tensor's memory
OWN_GENERATOR = "it draws from a generator of its own"
OWN_STATE = "it sets the state of torch's generator"
READS = "it reads a random number while it builds the module"
DEPENDENT = Law(laws.UNKNOWN, reason="its entries depend on each other")


class LawWatch(TorchDispatchMode):
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

    def __init__(self, watch: LawWatch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and note a doubt if it reads random entries."""
        if getattr(func, "__name__", "") in ENTRIES:
            self.watch.check_reading(args[:1])
        return func(*args, **(kwargs or {}))


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
def watching() -> Iterator[LawWatch]:
    """Watch what is built in the block."""
    watch = LawWatch()
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


WATCHES: list[LawWatch] = []  # the one that looks on is the last


def dependent_entries(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """In the place of torch's functions whose entries depend on each other; it runs among their globals, not these."""
    from limitformer.weightless import watching

    watching.WATCHES[-1].note(tensor, watching.DEPENDENT)
    return tensor
