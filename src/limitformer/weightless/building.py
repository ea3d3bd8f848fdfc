"""Build a module twice while `LawWatch` watches: its parameters and their laws, and other randomness.

The two builds have different seeds. A parameter, buffer or attribute that differs between them, but that no watched
draw explains, is random with an unknown law. `build_sample` then builds a module for each sample: vectors and numbers
are those of the build, matrices of unknown law are computed from its tape, and matrices of known law have no entries.
"""

import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from limitformer.base.errors import require
from limitformer.base.memory import readable
from limitformer.subjects.subject import refuse_scripted
from limitformer.weightless import laws
from limitformer.weightless.laws import Law
from limitformer.weightless.reachable import GENERATORS, stray_tensors
from limitformer.weightless.tensors import covers_storage, is_whole_storage, same_numbers, stored_matrix
from limitformer.weightless.threads import LOCK
from limitformer.weightless.watching import ALLOCATIONS, RANDOM, READS, LawWatch, watching

NEW = {*ALLOCATIONS, *RANDOM, "empty_like", "zeros", "ones", "full", "randn_like"}
OTHER_CHANCE = "it draws from the generators of NumPy or Python"
RENORMALISES = "it changes its weight when it runs (max_norm)"
RANDOM_VALUE = "it is random"
IN_EACH_BUILD = {OTHER_CHANCE, READS}  # of which builds with other seeds have other numbers
VIEW = "it is a view, or a copy in another form, of a random matrix"


class Limited(TorchDispatchMode):
    """A mode that raises `InputError` once new tensors take more than `most` bytes together."""

    def __init__(self, most: int, name: str) -> None:
        super().__init__()
        self.most, self.made, self.name = most, 0, name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and count the bytes of a new tensor."""
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in NEW:
            self.made += out.untyped_storage().nbytes() if not out.is_meta else 0
            fits = self.made <= self.most
            require(fits, f"{self.name} takes more than {readable(self.most)}, the free memory.")
        return out


class Built(NamedTuple):
    """A module whose random matrices are on the meta device, and its laws."""

    module: nn.Module
    laws: dict[str, Law]  # by the parameter's first name
    rebuilt: dict[str, str]  # what each sample needs a build of its own for: reasons by name
    doubts: dict[str, str]  # randomness that such a build does not have either: reasons by name
    entries: int  # the number of entries of unknown law


def build_twice(factory: Callable[[], nn.Module], dtype: torch.dtype) -> Built:
    """Build a module from two seeds, and read the laws of its parameters."""
    module, watch = build_watched(factory, dtype, 0)
    hooked = dict(hooked_parameters(module))
    other, watch_of_other = build_watched(factory, dtype, 1)
    same = "The function returns the same module at each call. Nearest: a function that builds a new one."
    require(other is not module, same)
    twins = dict(other.named_parameters())
    shared = next((name for name, each in module.named_parameters() if twins.get(name) is each), "")
    require(
        not shared,
        f"All networks that the function makes share {shared}, so that training one changes all. Nearest: a copy "
        "in each (copy.deepcopy).",
    )
    known = {}
    has_known_law = False  # whether a parameter holds the numbers drawn from NumPy or Python
    for name, parameter in module.named_parameters():
        law = law_of(parameter, watch)
        if name not in twins or not same_in_both(name, parameter, law, watch, twins[name], watch_of_other):
            seen = watch.law_of(parameter) or law
            has_known_law = has_known_law or seen.kind != laws.UNKNOWN
            law = Law(laws.UNKNOWN, reason=seen.reason or RANDOM_VALUE, source=seen.source)
        known[name] = law
    known |= views(module, known, watch)
    set_values(module, watch, known)
    set_values(other, watch_of_other, known)
    rebuilt, doubts = other_randomness(module, other, watch)
    reasons = watch.doubts | watch_of_other.doubts
    reasons -= {OTHER_CHANCE} if has_known_law else set()
    for kinds, group in ((reasons & IN_EACH_BUILD, rebuilt), (reasons - IN_EACH_BUILD, doubts)):
        if kinds:
            group["the code that makes it"] = "; ".join(sorted(kinds))
    doubts |= {f"the gradient of {name}": f"{place} is its hook" for name, place in hooked.items()}
    for name, parameter in module.named_parameters():
        if known[name].kind == laws.UNKNOWN:
            group = doubts if parameter.is_meta and not watch.tape.knows(parameter) else rebuilt
            group[name] = known[name].reason
    computed = without_entries(module, watch, known) if rebuilt else []
    computed += [each for name, each in module.named_parameters() if name in rebuilt and not each.is_meta]
    return Built(module, known, rebuilt, doubts, sum(each.numel() for each in computed))


def hooked_parameters(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield parameters whose gradients a hook changes, and where its code is: weights without entries lose hooks."""
    for name, parameter in module.named_parameters():
        hooks = [*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values()]
        for hook in hooks[:1]:
            code = getattr(hook, "__code__", None)
            where = "" if code is None else f" ({code.co_filename.rpartition('/')[2]}, line {code.co_firstlineno})"
            yield name, getattr(hook, "__name__", type(hook).__name__) + where


def build_sample(factory: Callable[[], nn.Module], dtype: torch.dtype, seed: int) -> tuple[nn.Module, dict[str, Law]]:
    """Build a module from a seed, with all its numbers but random matrices; return it with the laws of these.

    Vectors, numbers and matrices of unknown law are those of this build, and so are matrices that share random numbers
    with them.
    """
    module, watch = build_watched(factory, dtype, seed)
    known = {name: law_of(parameter, watch) for name, parameter in module.named_parameters()}
    known |= views(module, known, watch)
    tensors = without_entries(module, watch, known)
    names = {id(one): name for name, one in [*module.named_buffers(), *module.named_parameters()]}
    replayed = watch.tape.replay(tensors, [names.get(id(each), "a matrix") for each in tensors])
    values = dict(zip(map(id, tensors), replayed, strict=True))
    listed = recurrent_weights(module)
    strays = {id(value): value for _, value in stray_tensors(module) if id(value) in values.keys() - listed}
    parameters: dict[int, Tensor] = {}
    for parameter in module.parameters():
        if id(parameter) in values:
            parameters[id(parameter)] = nn.Parameter(values[id(parameter)], parameter.requires_grad)
    for part in module.modules():
        for key, buffer in part._buffers.items():
            if id(buffer) in values and id(buffer) not in strays:
                part._buffers[key] = values[id(buffer)]
    put_parameters(module, {key: each for key, each in parameters.items() if key not in strays})
    for where, stray in strays.items():  # in place, wherever it is
        torch.utils.swap_tensors(stray, parameters.get(where, values[where]))
    return module, {name: known[name] for name, one in module.named_parameters() if one.is_meta}


def recurrent_weights(module: nn.Module) -> set[int]:
    """Return the `id` of each parameter of torch's recurrent layers, which list them a second time."""
    return {id(one) for part in module.modules() if isinstance(part, nn.RNNBase) for one in part.parameters()}


def without_entries(module: nn.Module, watch: LawWatch, known: dict[str, Law]) -> list[Tensor]:
    """Return the tensors on the meta device that a build computes: all but independent weights of known law."""
    strays = {id(value): value for _, value in stray_tensors(module) if isinstance(value, Tensor) and value.is_meta}
    computed = strays | {id(each): each for each in module.buffers() if each.is_meta}
    random: dict[int, Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.is_meta and id(parameter) not in computed:
            (random if known[name].random else computed)[id(parameter)] = parameter
    count = -1
    while count < len(computed):
        count = len(computed)
        draws = watch.tape.draws(computed.values())
        computed |= {key: each for key, each in random.items() if watch.tape.dependent(each, draws)}
    return list(computed.values())


def views(module: nn.Module, known: dict[str, Law], watch: LawWatch) -> dict[str, Law]:
    """Return unknown laws for parameters that are a part of a random matrix, or share it in another form."""
    forms: dict[int, dict[Any, list[str]]] = {}
    unknown_sources = set()
    for name, parameter in module.named_parameters():
        law = known[name]
        if parameter.layout != torch.strided or law.source < 0:
            continue
        geometry = (parameter.shape, parameter.stride(), parameter.storage_offset(), parameter.dtype)
        form = (*geometry, law.kind, law.low, law.high)
        forms.setdefault(law.source, {}).setdefault(form, []).append(name)
        rows = not law.rows or (is_whole_storage(parameter) and parameter.stride(0) == watch.widths[law.source])
        other = law.kind == laws.ORTHOGONAL and stored_matrix(parameter) != law.matrix
        if not covers_storage(parameter) or not rows or other:
            unknown_sources.add(law.source)
    unknown: dict[str, Law] = {}
    for source, names in forms.items():
        for same in names.values() if source in unknown_sources or len(names) > 1 else ():
            watch.draws += 1  # a separate source, so that overrides do not make them copies
            reasons = {name: known[name].reason or VIEW for name in same}
            unknown |= {name: Law(laws.UNKNOWN, reason=reasons[name], source=watch.draws) for name in same}
    return unknown


def other_randomness(module: nn.Module, other: nn.Module, watch: LawWatch) -> tuple[dict[str, str], dict[str, str]]:
    """Return reasons, by name, why tensors and numbers other than parameters differ from module to module.

    The first dictionary has what a build for one sample draws again, the second what it cannot.
    """
    reasons, doubts, twins = dict[str, str](), dict[str, str](), dict(other.named_buffers())
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            (reasons if watch.tape.knows(buffer) else doubts)[name] = "it was computed from matrices without entries"
        elif watch.is_random(buffer) or name not in twins or not same_numbers(buffer, twins[name]):
            reasons[name] = RANDOM_VALUE
    own, listed = {id(parameter) for parameter in module.parameters()}, recurrent_weights(module)
    elsewhere, here = dict(stray_tensors(other)), dict(stray_tensors(module))
    for name, value in here.items():
        if isinstance(value, Tensor) and (value.is_meta or id(value) in own):
            replaceable = id(value) in listed or (value.grad_fn is None and not weakref.getweakrefs(value))
            exists = not value.is_meta or (replaceable and watch.tape.knows(value))
            (reasons if exists else doubts)[name] = "it is a matrix that is neither a parameter nor a buffer"
        elif isinstance(value, GENERATORS):
            doubts[name] = "it is a generator of random numbers"
        elif watch.is_random(value) or name not in elsewhere or not same_numbers(value, elsewhere[name]):
            reasons[name] = "it is random, and neither a parameter nor a buffer"
    reasons |= {name: "only some of the modules have it" for name in elsewhere if name not in here}
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            doubts[name] = RENORMALISES
    return reasons, doubts


def build_watched(factory: Callable[[], nn.Module], dtype: torch.dtype, seed: int) -> tuple[nn.Module, LawWatch]:
    """Call the factory with global seeds while a watch looks on."""

    def watched() -> nn.Module:
        watch.begin()
        before = numpy_and_python_states()
        module = factory()
        if numpy_and_python_states() != before:
            watch.doubts.add(OTHER_CHANCE)
        return module

    with LOCK, watching(seed) as watch:
        return drawn_module(watched, dtype, seed), watch


def numpy_and_python_states() -> tuple[Any, ...]:
    """The states of the global generators of NumPy and Python."""
    numpys: Any = np.random.get_state(legacy=False)
    return numpys["state"]["key"].tobytes(), numpys["state"]["pos"], random.getstate()


def drawn_module(factory: Callable[[], nn.Module], dtype: torch.dtype, seed: int) -> nn.Module:
    """Call the factory with global seeds; the states of the global generators are restored."""
    with LOCK, seeded(seed, dtype), empty_as_nan(), torch.compiler.set_stance("force_eager"):
        module = factory()
    module = getattr(module, "_orig_mod", module)  # of a compiled module
    require(isinstance(module, nn.Module), f"the function must return a torch.nn.Module; got {type(module).__name__}.")
    refuse_scripted(module)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    lazy = next((name for name, each in tensors if is_lazy(each)), None)
    require(
        lazy is None,
        f"{lazy} of {type(module).__name__} belongs to a lazy layer, and has no shape before the module has run. "
        "Nearest: the layer with its sizes, such as nn.Linear for nn.LazyLinear.",
    )
    return module


@contextmanager
def seeded(seed: int, dtype: torch.dtype) -> Iterator[None]:
    """Seed the global generators and set torch's default dtype within the with statement."""
    before, own, numpys = torch.get_default_dtype(), random.getstate(), np.random.get_state()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            yield
    finally:
        torch.set_default_dtype(before)
        np.random.set_state(numpys)
        random.setstate(own)


@contextmanager
def empty_as_nan() -> Iterator[None]:
    """Let tensors of uninitialised memory be NaN within the with statement."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fills


def uninitialised(module: nn.Module) -> list[str]:
    """Return the names of parameters that the code of a module, which was built here, does not initialise."""
    every = module.named_parameters()
    return [name for name, each in every if not each.is_meta and bool(each.detach().isnan().any())]


def law_of(parameter: Tensor, watch: LawWatch) -> Law:
    """Return the watched law; if nothing random wrote to a parameter, whether its values are constant or given."""
    if not parameter.numel():
        return Law(laws.GIVEN)
    law = watch.law_of(parameter)
    if law is not None and (parameter.is_meta or watch.is_random(parameter)):
        return law
    if parameter.is_meta:
        return Law(laws.UNKNOWN, reason="nothing was seen to write to it")
    if bool(parameter.detach().isnan().any()):
        return Law(laws.UNKNOWN, reason="it is never initialised")
    first = parameter.detach().reshape(-1)[:1]
    same = parameter.numel() > 0 and bool((parameter.detach() == first).all())
    return laws.constant(float(first)) if same and not parameter.is_complex() else Law(laws.GIVEN)


def same_in_both(
    name: str, parameter: Tensor, law: Law, watch: LawWatch, twin: Tensor, watch_of_twin: LawWatch
) -> bool:
    """Whether a parameter has the same law in both builds, and the same values if it is not random."""
    other = law_of(twin, watch_of_twin)
    if replace(law, source=-1) != replace(other, source=-1) or parameter.shape != twin.shape:
        return False
    if law.kind != laws.GIVEN:
        return True
    mine, theirs = value_of(name, parameter, law, watch), value_of(name, twin, other, watch_of_twin)
    return mine is not None and theirs is not None and same_numbers(mine, theirs)


def set_values(module: nn.Module, watch: LawWatch, known: dict[str, Law]) -> None:
    """Give memory and values to parameters and buffers of the meta device that are not random."""
    values = {}
    for name, parameter in module.named_parameters():
        law = known.get(name)
        if parameter.is_meta and law is not None and not law.random:
            value = value_of(name, parameter, law, watch)
            if value is not None:
                values[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    put_parameters(module, values)
    for _, part in module.named_modules():
        for key, buffer in list(part._buffers.items()):
            law = None if buffer is None else watch.law_of(buffer)
            if buffer is not None and buffer.is_meta and law is not None:
                value = value_of(key, buffer, law, watch)
                part._buffers[key] = buffer if value is None else value


def value_of(name: str, tensor: Tensor, law: Law, watch: LawWatch) -> Tensor | None:
    """Return the values of a constant or a copy, None of any other tensor without memory."""
    if not tensor.is_meta:
        return tensor.detach()
    if law.kind == laws.CONSTANT or not tensor.numel():
        return torch.full(tensor.shape, law.shift, dtype=tensor.dtype)
    known = law.kind == laws.GIVEN and watch.tape.knows(tensor)
    return watch.tape.replay([tensor], [name])[0] if known else None


def put_parameters(module: nn.Module, new: dict[int, Any]) -> None:
    """Replace parameters of `module`, by the `id` of the old ones, and copy their attributes."""
    for part in module.modules():
        pairs = {key: (old, new[id(old)]) for key, old in part._parameters.items() if id(old) in new}
        for key, (old, one) in pairs.items():
            vars(one).update(vars(old))
            if isinstance(part, nn.RNNBase):
                setattr(part, key, one)  # so that it updates its list
            else:
                part._parameters[key] = one
