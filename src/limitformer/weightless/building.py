"""Build a module twice while it is watched: its random matrices, their laws, and what is not understood."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from limitformer.base.errors import require
from limitformer.base.memory import readable
from limitformer.weightless import laws
from limitformer.weightless.laws import Law
from limitformer.weightless.reachable import GENERATORS, stray_tensors
from limitformer.weightless.tensors import covers, plain, same_numbers, storage
from limitformer.weightless.watching import ALLOCATIONS, RANDOM, LawWatch, watching

NEW = {*ALLOCATIONS, *RANDOM, "empty_like", "zeros", "ones", "full", "randn_like"}
OTHER_CHANCE = "it draws from the generators of NumPy or Python"
RENORMALISES = "it changes its weight when it runs (max_norm)"
RANDOM_VALUE = "it is random"
VIEW = "it is a view, or a copy in another form, of a random matrix"


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


def views(module: nn.Module, known: dict[str, Law], watch: LawWatch) -> dict[str, Law]:
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


def doubts(module: nn.Module, other: nn.Module, watch: LawWatch) -> dict[str, str]:
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


def build(factory: Callable[[], nn.Module], dtype: torch.dtype, seed: int) -> tuple[nn.Module, LawWatch]:
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


def law_of(parameter: Tensor, watch: LawWatch) -> Law:
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


def alike(parameter: Tensor, law: Law, watch: LawWatch, twin: Tensor, watch_of_twin: LawWatch) -> bool:
    """Whether a parameter has the same law in another build, and the same values where it is not random."""
    other = law_of(twin, watch_of_twin)
    if replace(law, source=-1) != replace(other, source=-1) or parameter.shape != twin.shape:
        return False
    if law.kind != laws.GIVEN:
        return True
    mine, theirs = value_of(parameter, law, watch), value_of(twin, other, watch_of_twin)
    return mine is not None and theirs is not None and same_numbers(mine, theirs)


def settle(module: nn.Module, watch: LawWatch, found: dict[str, Law]) -> None:
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


def value_of(tensor: Tensor, law: Law, watch: LawWatch) -> Tensor | None:
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
