r"""`Build`: what is known of one build of a model, from its code, from several builds, or from its numbers alone.

A function that builds a module is called under `EmptyMemory`:

* twice from one seed, with other numbers in uninitialised memory: entries that differ depend on it (a third call tells
  them from entries that no seed determines);
* from another seed: tensors that differ are random, and all others are fixed.

The law of a random parameter is read from the code (`limitformer.weightless`). It counts only if the numbers of the
build follow it, so that an error of that reading cannot become a finding.
"""

import hashlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from limitformer.base.errors import InputError, first_line, printable
from limitformer.base.foreign import one_line
from limitformer.base.memory import available_memory, check_scratch
from limitformer.initialisation.sharding import in_one_process, joined_module, unequal_replicas
from limitformer.initialisation.summary import TensorSummary, summarise
from limitformer.initialisation.weight_tests import p_of_law
from limitformer.subjects import checkpoints
from limitformer.subjects.checkpoints import holds_weights, weights_in
from limitformer.subjects.size import size_of
from limitformer.subjects.subject import Subject, resolve, unwrapped
from limitformer.subjects.user_code import names_code, user_object
from limitformer.weightless import laws
from limitformer.weightless.building import Limited, build_twice, build_watched, drawn_module
from limitformer.weightless.laws import Law
from limitformer.weightless.reachable import stray_tensors
from limitformer.weightless.tensors import storage, tensors_in

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
FINITE, NAN = 0, 1  # the two fills
NUMBERS = {FINITE: 1.6180339887, NAN: float("nan")}  # of floating types; other types hold 0 or 1
MOST_NOTED = 2**16  # entries of a tensor whose values are noted


class EmptyMemory(TorchDispatchMode):
    """A mode in which uninitialised memory holds a known number, and that notes what small tensors held."""

    def __init__(self, fill: int) -> None:
        super().__init__()
        self.fill = fill
        self.history: dict[int, list[bytes]] = {}  # by storage: digests of its values, in order
        self.alive: list[Any] = []  # storages, so that no address is reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and fill what it allocates."""
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name == "resize_" and args[0].layout == torch.strided:
            return self.resize(func, args, kwargs)
        written = tensors_in(args[0]) if args and name.rstrip("_") != name else tensors_in(kwargs.get("out", ()))
        self.note(written, first=True)
        out = func(*args, **kwargs)
        if name in ALLOCATIONS:
            self.write(out)
        self.note(written)
        return out

    def resize(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Fill the memory that is new, behind the entries that were there."""
        before = args[0].untyped_storage().nbytes() // args[0].element_size()
        out = func(*args, **kwargs)
        after = out.untyped_storage().nbytes() // out.element_size()
        if not out.is_meta and after > before:
            self.write(out.detach().as_strided((after - before,), (1,), before))
        return out

    def write(self, tensor: Tensor) -> None:
        """Write the fill to a tensor; types that cannot be filled stay as they are."""
        if tensor.is_meta or not tensor.numel():
            return
        floating = tensor.is_floating_point() or tensor.is_complex()
        with torch.no_grad():
            try:
                tensor.fill_(NUMBERS[self.fill] if floating else self.fill)
            except RuntimeError:  # such as quantised types
                return

    def note(self, tensors: list[Tensor], first: bool = False) -> None:
        """Note the values of small tensors on the CPU; `first`: only of those without a note."""
        for tensor in tensors:
            ordinary = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
            if not ordinary or tensor.device.type != "cpu" or tensor.untyped_storage().nbytes() > 8 * MOST_NOTED:
                continue
            if not (first and storage(tensor) in self.history):
                self.alive.append(tensor.untyped_storage())
                self.history.setdefault(storage(tensor), []).append(digest(tensor))


def digest(tensor: Tensor) -> bytes:
    """Return a short text of a tensor's storage, equal for equal bytes."""
    entries = torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage())
    return hashlib.sha256(entries.numpy().tobytes()).digest()


PARAMETER, BUFFER, ATTRIBUTE = "parameter", "buffer", "tensor attribute"
WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")
FITS = 1e-9  # p-value below which the law that was read from the code is not that of the numbers
COUNTS = ((2**20, 12), (2**26, 8))  # entries of a module, and how many builds of at most so many are compared
FEWEST = 3  # builds of larger modules
HELD = 3  # builds at a time: A, B and one more
UNREAD = Law(laws.UNKNOWN, reason="it was not read")


class BuiltTensor(NamedTuple):
    """A tensor of a module and what the module says about it."""

    value: Tensor  # whole, or the part of it that this process holds
    role: str
    shape: tuple[int, ...]
    requires_grad: bool
    persistent: bool
    owner: nn.Module | None


@dataclass
class Build:
    """One of the two builds.

    Attributes:
        name: its name in the report.
        tensors: by name, those of the first build.
        ties: by name, the first of the names that share its memory.
        module: whether buffers and non-persistent tensors are known; a state dict has none.
        factory: what builds it again; None: only its numbers are known.
        laws: by name, laws that were read and that the numbers follow.
        random: names of tensors that depend on the seed.
        unwritten: by name, the number of entries that depend on uninitialised memory.
        unstable: names of tensors that differ between two builds from one seed.
        replicas: names of tensors that should be equal on all ranks, and are not.
        values: by name, digests of values that a small tensor has had before its last write.
        doubt: why the laws could not be read.
    """

    name: str
    tensors: dict[str, BuiltTensor]
    ties: dict[str, str]
    module: bool = True
    factory: Callable[[], nn.Module] | None = None
    laws: dict[str, Law] = field(default_factory=dict)
    random: set[str] = field(default_factory=set)
    unwritten: dict[str, int] = field(default_factory=dict)
    unstable: set[str] = field(default_factory=set)
    replicas: set[str] = field(default_factory=set)
    values: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    doubt: str = ""

    @property
    def fixed(self) -> bool:
        """Whether tensors that are not random are known to be fixed."""
        return self.factory is not None

    @cached_property
    def entries(self) -> int:
        """The number of entries of all tensors."""
        return sum(each.value.numel() for each in self.tensors.values())

    def summary(self, name: str) -> TensorSummary:
        """Return moments and a sample of the numbers of the first build."""
        return summarise(self.tensors[name].value, self.laws.get(name, UNREAD).rows)

    def again(self, names: set[str], count: int) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors of these names from `count` builds, each from its own seed."""
        assert self.factory is not None
        for seed in range(1, count + 1):
            tensors = tensors_of(run(self.factory, seed, FINITE, self.name)[0])
            yield {name: tensors[name].value for name in names & tensors.keys()}

    def law_histories(self, names: set[str]) -> dict[str, tuple[Law, ...]]:
        """Return all laws that these parameters have while the module is built, in order; none if they are not read."""
        if self.factory is None or not self.laws:
            return {}
        with warnings.catch_warnings(action="ignore"):
            module, watch = build_watched(self.factory, torch.get_default_dtype(), 0)
        every = {plain_name(name): each for name, each in module.named_parameters(remove_duplicate=False)}
        return {name: tuple(watch.history.get(storage(every[name]), ())) for name in names & every.keys()}


def build_of(what: Any, side: str) -> Build:
    """Return what is known of a build.

    Args:
        what: a function that builds a module, a configuration, a module, a state dict or its file.
        side: the name of the argument in errors.

    Raises:
        InputError: it is none of these, or it cannot be built.
    """
    if isinstance(what, str | Path) and names_code(what):
        what = user_object(str(what))
    if isinstance(what, str | Path) and (Path(what).suffix == ".safetensors" or holds_weights(what)):
        with one_line(f"{what} cannot be read"):
            tensors = weights_in(Path(what)) if Path(what).is_dir() else checkpoints.tensors_in(Path(what))
        return build_of_numbers(Path(what).name, tensors)
    if isinstance(what, Mapping) and what and all(isinstance(each, Tensor) for each in what.values()):
        return build_of_numbers("state dict", dict(what))
    if isinstance(what, nn.Module):
        return Build(type(what).__name__, tensors_of(what), ties_of(what))
    try:
        subject = resolve(what)
    except InputError as error:
        if isinstance(what, str | Path | dict) or callable(what):
            raise
        raise InputError(
            f"{side} must be a function that builds a module, a module, a state dict or a file of one, or a "
            f"configuration; got {printable(f'{what!r:.60}')}. Nearest: lambda: Model(config)."
        ) from error
    return build_of_factory(subject)


def build_of_ranks(ranks: Sequence[Any], reference: Build) -> Build:
    """Return the build whose slices or replicas the functions of several ranks make, joined as in the reference."""
    shapes = {name: each.shape for name, each in reference.tensors.items()}
    subjects = [resolve(each) for each in ranks]
    factories = [each.factory for each in subjects]

    def joined() -> nn.Module:
        return joined_module(in_one_process(factories), shapes)

    build = build_of_factory(Subject(joined, f"{len(ranks)} ranks of {subjects[0].name}", "hidden"))
    modules = []

    def first() -> nn.Module:
        modules.extend(in_one_process(factories))
        return modules[0]

    with warnings.catch_warnings(action="ignore"):
        run(first, 0, FINITE, build.name)
    build.replicas = unequal_replicas(modules, shapes)
    return build


def build_of_numbers(name: str, tensors: dict[str, Tensor]) -> Build:
    """Return the build of a state dict."""
    built = {
        plain_name(key): BuiltTensor(full(each.detach()), PARAMETER, tuple(each.shape), each.requires_grad, True, None)
        for key, each in tensors.items()
    }
    return Build(name, built, tied({key: each.value for key, each in built.items()}), module=False)


def build_of_factory(subject: Subject) -> Build:
    """Build the module several times, and read its laws."""
    factory, name = subject.factory, subject.name
    builds = f"Holding {HELD} builds of {name} at a time"
    if subject.config is not None:
        check_scratch(HELD * size_of(factory, name).whole * torch.get_default_dtype().itemsize, builds, "fewer layers")
    module, memory = run(factory, 0, FINITE, name)
    every = {storage(each): each for each in (*module.parameters(), *module.buffers()) if not is_distributed(each)}
    size = sum(each.untyped_storage().nbytes() for each in every.values() if not each.is_meta)
    check_scratch(HELD * size, builds, "fewer layers")
    build = Build(name, tensors_of(module), ties_of(module), factory=factory)
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    build.values = {
        plain_name(key): tuple(memory.history[storage(each)])
        for key, each in named
        if not is_distributed(each) and each.layout == torch.strided and storage(each) in memory.history
    }
    with warnings.catch_warnings(action="ignore"):  # once is enough
        doubtful = differing(build.tensors, tensors_of(run(factory, 0, NAN, name)[0]))
        if doubtful:
            build.unstable = set(differing(build.tensors, tensors_of(run(factory, 0, FINITE, name)[0])))
        build.random = set(differing(build.tensors, tensors_of(run(factory, 1, FINITE, name)[0])))
    build.unwritten = {key: count for key, count in doubtful.items() if key not in build.unstable}
    read_laws(build)
    return build


def run(factory: Callable[[], nn.Module], seed: int, fill: int, name: str) -> tuple[nn.Module, EmptyMemory]:
    """Build the module from a seed, with this number in uninitialised memory."""
    memory = EmptyMemory(fill)

    def filled() -> nn.Module:
        with Limited(available_memory() or sys.maxsize, name), memory:
            return factory()

    try:
        return drawn_module(filled, torch.get_default_dtype(), seed), memory
    except (InputError, MemoryError):
        raise
    except Exception as error:  # the user's own code, which may raise anything
        raise InputError(f"{name} cannot be built: {type(error).__name__}: {first_line(error)}") from error


def read_laws(build: Build) -> None:
    """Read the laws of random parameters from the code, and keep those that the numbers follow."""
    assert build.factory is not None
    try:
        with warnings.catch_warnings(action="ignore"):  # such as about matrices that are on the meta device here
            known = build_twice(build.factory, torch.get_default_dtype()).laws
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  code that runs, but not while it is watched, such as sharded modules
        build.doubt = f"{type(error).__name__}: {first_line(error)}"
        return
    read = {plain_name(name): law for name, law in known.items() if law.random}
    for name, each in build.tensors.items():
        law = read.get(build.ties.get(name, name))
        if law is not None and each.role == PARAMETER and not each.value.is_meta and name not in build.unwritten:
            tests = p_of_law(each.value, summarise(each.value, law.rows), law)
            if min(tests.values(), default=0.0) > FITS:
                build.laws[name] = law


def differing(one: dict[str, BuiltTensor], other: dict[str, BuiltTensor]) -> dict[str, int]:
    """Return by name how many entries differ between two builds; NaN equals NaN. A missing twin differs wholly."""
    result = {}
    for name, each in one.items():
        a, b = each.value, other[name].value if name in other else None
        if b is None or a.shape != b.shape or a.dtype != b.dtype or a.is_meta != b.is_meta:
            result[name] = max(a.numel(), 1)
        elif not a.is_meta and a.numel():
            unequal = a.to_dense() != b.to_dense() if a.layout != torch.strided else comparable(a) != comparable(b)
            if a.is_floating_point() or a.is_complex():
                unequal &= ~(comparable(a).isnan() & comparable(b).isnan())
            if bool(unequal.any()):
                result[name] = int(unequal.sum())
    return result


def comparable(tensor: Tensor) -> Tensor:
    """Return a tensor of a type that torch can compare: types of 8 bits as float32."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def tensors_of(module: nn.Module) -> dict[str, BuiltTensor]:
    """Return parameters, buffers and tensors in attributes by name; wrappers' names are left out."""
    module = unwrapped(module)
    result = {
        plain_name(name): built_tensor(module, name, each, PARAMETER)
        for name, each in module.named_parameters(remove_duplicate=False)
    }
    for name, buffer in module.named_buffers(remove_duplicate=False):
        result[plain_name(name)] = built_tensor(module, name, buffer, BUFFER)
    for name, each in stray_tensors(module):
        if isinstance(each, Tensor) and not isinstance(each, nn.Parameter) and plain_name(name) not in result:
            result[plain_name(name)] = BuiltTensor(
                full(each.detach()), ATTRIBUTE, tuple(each.shape), each.requires_grad, False, None
            )
    return result


def built_tensor(module: nn.Module, name: str, tensor: Tensor, role: str) -> BuiltTensor:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    persistent = role == PARAMETER or leaf not in owner._non_persistent_buffers_set
    return BuiltTensor(full(tensor.detach()), role, tuple(tensor.shape), tensor.requires_grad, persistent, owner)


def plain_name(name: str) -> str:
    return WRAPPERS.sub("", name).lstrip(".")


def is_distributed(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def full(tensor: Tensor) -> Tensor:
    """Return a distributed tensor gathered, or what this process holds of it if no other process runs."""
    if not is_distributed(tensor):
        return tensor
    each: Any = tensor
    if each.is_meta or torch.distributed.get_backend() == "fake":
        return each.to_local().detach()
    return each.full_tensor().detach()


def ties_of(module: nn.Module) -> dict[str, str]:
    """Return by name of each parameter the first name that shares its memory."""
    every = unwrapped(module).named_parameters(remove_duplicate=False)
    return tied({plain_name(name): each for name, each in every})


def tied(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    first: dict[Any, str] = {}
    return {name: first.setdefault(memory_of(each), name) for name, each in tensors.items()}


def memory_of(tensor: Tensor) -> Any:
    """Return a key that is equal for tensors of the same memory; tensors without memory are their own."""
    local: Any = tensor
    local = local.to_local() if is_distributed(tensor) else local
    if tensor.is_meta or not local.numel() or local.layout != torch.strided:
        return id(tensor)
    return storage(local), local.storage_offset(), local.numel()
