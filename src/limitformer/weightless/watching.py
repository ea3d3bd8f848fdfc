r"""`LawWatch`, which reads the law of each parameter while a module's own code initialises it.

While a module is built, every new matrix goes to the meta device, where nothing is computed or stored. The watch
follows the operations that write to it, in their order: normal, uniform, truncated normal, orthogonal, constants,
copies and multiples. A write to the whole matrix replaces earlier ones. Vectors and buffers are real. Hence no table of
architectures is needed, and the laws of a model of any size can be read.

`trunc_normal_`, `orthogonal_`, `sparse_` and `dirac_` do nothing on the meta device, so the watch replaces them. The
law of `sparse_` is unknown.

A tape records how each matrix was computed. Its entries are computed from the tape if no law describes them, or if the
code reads them.

Randomness may also enter where no law describes it: the code reads a random number while it builds the module, sets a
seed, or uses another generator. The watch notes each of these as a doubt.
"""

import contextlib
import math
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from limitformer.weightless import laws
from limitformer.weightless.laws import Law
from limitformer.weightless.tape import Tape
from limitformer.weightless.tensors import covers_storage, is_whole_storage, storage, stored_matrix, tensors_in

ALLOCATIONS = ("empty", "new_empty", "empty_strided", "new_empty_strided")
LARGE = 2**24  # entries: a constant matrix of more has no storage
RANDOM = {"randn": laws.normal(1.0), "rand": laws.uniform(0.0, 1.0)}
RANDOM |= {"randn_like": laws.normal(1.0), "rand_like": laws.uniform(0.0, 1.0)}
DRAWS: dict[str, Any] = {  # law, and the arguments of the operation in the order of the law's, with their defaults
    "normal_": (lambda mean, std: laws.normal(std, mean), ("mean", 0.0), ("std", 1.0)),
    "uniform_": (laws.uniform, ("from", 0.0), ("to", 1.0)),
}
ZEROS, ONES, FULL = ({way, f"{way}_like", f"new_{way}"} for way in ("zeros", "ones", "full"))
KEEPING = {"clone", "detach", "_to_copy", "alias", "lift_fresh", "contiguous"}  # results with the same entries
VIEWS = {"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "t", "transpose", "permute", "select", "slice"}
VIEWS |= {"detach", "alias", "as_strided", "expand", "_reshape_alias", "unbind", "split", "chunk", "lift_fresh"}
FILLING = {"zero_", "fill_", "normal_", "uniform_", "copy_"}  # earlier entries do not matter
META, CPU = torch.device("meta"), torch.device("cpu")
PLACES: dict[Any, Any] = {  # attributes by which the code asks where a tensor is, and the answers for the CPU
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    Tensor.device.__get__: CPU,
}
MOST_ROWS = 1024  # rows of constants in a random matrix
ENTRIES = {"tolist", "numpy", "__array__", "__dlpack__"}  # methods that read a tensor's memory
FROM_NUMBERS = {torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, Tensor.new_tensor}
OWN_GENERATOR = "it draws from a generator of its own"
OWN_STATE = "it sets the state of torch's generator"
READS = "it reads a random number while it builds the module"
SHARES = "it shares the memory of a matrix with NumPy while it builds the module"
FAILS = "an operation fails while the code that makes it is watched"
DEPENDENT = Law(laws.UNKNOWN, reason="its entries depend on each other")
SILENT = {function.__name__: function for function in (nn.init.orthogonal_, nn.init.sparse_, nn.init.dirac_)}
ORIGINALS = {  # functions of their own, as the watch changes the code of torch's
    name: types.FunctionType(each.__code__, each.__globals__, name, each.__defaults__) for name, each in SILENT.items()
}
TRUNCATED_NORMAL = nn.init._no_grad_trunc_normal_
TAKES, COMPATIBLE = "_has_compatible_shallow_copy_type", torch._has_compatible_shallow_copy_type


class LawWatch(TorchDispatchMode):
    """A mode that sends new matrices to the meta device and notes the law of every storage that is written to."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.laws: dict[int, Law] = {}
        self.history: dict[int, list[Law]] = {}  # by storage: every law that it has had
        self.bare: set[int] = set()  # storages that the code itself puts on the meta device
        self.tape = Tape(seed)
        self.paused = False
        self.alive: list[Any] = []  # storages, so that no address is reused
        self.draws = 0
        self.widths: dict[int, int] = {}  # by source: entries of each row of `Law.rows`
        self.doubts: set[str] = set()  # uses of randomness that no law describes
        self.state: Tensor | None = None  # the state of torch's generator after the last draw

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and note the laws of the tensors that it writes."""
        with torch._C.DisableTorchFunction():  # `Readings` hides the meta device
            return self.watched(func, args, kwargs)

    def watched(self, func: Any, args: Any, kwargs: Any) -> Any:
        name, kwargs = func.overloadpacket.__name__, dict(kwargs or {})
        if self.paused:
            return func(*args, **kwargs)
        if any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values())):
            self.doubts.add(OWN_GENERATOR)
        device = kwargs.get("device")
        bare = self.is_bare((args, kwargs)) if device is None else torch.device(device).type == META.type
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            self.check_reading((args, kwargs))
            args, kwargs = self.with_entries(args), self.with_entries(kwargs)
        elif name.endswith("_") and isinstance(args[0], Tensor) and not args[0].is_meta:
            args, kwargs = self.with_entries(args), self.with_entries(kwargs)
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        if seeded:
            self.check_state()
        try:
            out = self.follow(name, func, args, kwargs, seeded)
        except Exception:  # the code may catch it and make another module
            self.doubts.add(FAILS)
            raise
        if seeded:
            if self.state is not None and torch.equal(self.state, torch.get_rng_state()):
                torch.rand(1)  # a draw on the meta device does not advance the generator
            self.state = torch.get_rng_state()
        if bare:
            self.note_bare(out)
        return out

    def is_bare(self, values: Any) -> bool:
        """Whether the code itself put one of the tensors on the meta device."""
        tensors = tensors_in(values) if self.bare else []
        return any(each.is_meta and storage(each) in self.bare for each in tensors)

    def note_bare(self, values: Any) -> None:
        for each in tensors_in(values):
            if each.is_meta and each.layout == torch.strided:
                self.alive.append(each.untyped_storage())
                self.bare.add(storage(each))

    def takes_data(self, tensor: Tensor, other: Tensor) -> bool:
        """Whether `nn.Module._apply` may keep the parameter `tensor` and give it the data of `other`.

        It makes a new parameter if the device changes, which ends ties. In a watch both may be on the meta device.
        """
        return COMPATIBLE(tensor, other) and self.is_bare(tensor) == self.is_bare(other)

    def begin(self) -> None:
        """Note the state of torch's generator before the first draw."""
        self.state = torch.get_rng_state()

    def check_state(self) -> None:
        """Note a doubt if anything but a draw has changed the state of torch's generator."""
        if self.state is not None and not torch.equal(self.state, torch.get_rng_state()):
            self.doubts.add(OWN_STATE)

    def check_reading(self, values: Any) -> None:
        """Note a doubt if the code reads random entries."""
        if self.is_random(values):
            self.doubts.add(READS)

    def with_entries(self, values: Any) -> Any:
        """Replace matrices by their entries, for code that reads them."""
        if isinstance(values, Tensor):
            if not values.is_meta or not self.tape.knows(values):
                return values
            self.tape.read |= self.tape.draws([values])
            with self.pause():
                return self.tape.replay([values])[0]
        if isinstance(values, dict):
            return {key: self.with_entries(each) for key, each in values.items()}
        return type(values)(map(self.with_entries, values)) if isinstance(values, list | tuple) else values

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Follow no operations within the with statement."""
        self.check_state()
        self.paused = True
        try:
            yield
        finally:
            self.paused = False
            self.state = None if self.state is None else torch.get_rng_state()

    def is_random(self, values: Any) -> bool:
        """Whether one of the tensors is random, or has an unknown law."""
        laws_of_all = [self.law_of(tensor) for tensor in tensors_in(values)]
        return any(law is not None and (law.random or law.kind == laws.UNKNOWN) for law in laws_of_all)

    def follow(self, name: str, func: Any, args: Any, kwargs: dict[str, Any], seeded: bool) -> Any:
        """Run an operation, and note the laws of the tensors that it makes or changes."""
        if name in ALLOCATIONS or name in RANDOM or func is torch.ops.aten.normal.float_float:
            return self.allocate(name, func, args, kwargs)
        if name == "_to_copy" and args[0].is_meta:  # a matrix stays on the meta device
            kwargs["device"] = args[0].device
        shape = new_size(args) if name in ZEROS | ONES | FULL else torch.Size()
        large = len(shape) >= 2 and shape.numel() >= LARGE and makes_floats(args, kwargs)  # it gets no storage
        if large or (name == "empty_like" and args[0].is_meta and args[0].dim() >= 2):
            kwargs["device"] = torch.device("meta")
        chance = self.is_random((args, {key: each for key, each in kwargs.items() if key != "out"}))
        exists = any(self.is_random(each) for each in tensors_in((args, kwargs)) if not each.is_meta)
        out = self.call(func, args, kwargs)
        inplace = name.rstrip("_") != name and args
        written = tensors_in(args[0]) if inplace else tensors_in(kwargs.get("out", ()))
        if name == "set_":  # the tensor now has the storage of another, in which nothing is written
            if args[0].is_meta and not args[1].is_meta:  # or a new one without entries
                copy = torch.ops.aten.copy_.default
                self.tape.record(copy, args, {}, args[0], [args[0]], seeded=False, shares=exists, fresh=True)
                self.note_copy(args[0], args[1])
            return out
        if name not in VIEWS and name != "empty_like":
            fresh = name in FILLING or "out" in kwargs
            self.tape.record(func, args, kwargs, out, written, seeded=seeded, shares=exists, fresh=fresh)
        if inplace:
            self.note_write(name, args, kwargs, chance or seeded)
        elif "out" in kwargs:
            if chance or seeded:
                self.note(kwargs["out"], Law(laws.UNKNOWN, reason=f"it was written by {name}"))
            elif kwargs["out"].is_meta:
                self.note_given(kwargs["out"])
        elif seeded:
            for result in tensors_in(out):
                self.note(result, Law(laws.UNKNOWN, reason=f"it was made by {name}"))
        elif name == "_to_copy" and out.is_meta and not args[0].is_meta:  # sent to where the matrices are
            self.note_copy(out, args[0])
        elif name not in VIEWS:
            self.note_result(name, args, kwargs, out)
        return out

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operation; if some of its tensors are on the meta device, so are all but single numbers.

        An operation that torch cannot do without entries gets them.
        """

        def on_meta(values: Any) -> Any:
            if isinstance(values, Tensor):
                return values.to("meta") if values.dim() and not values.is_meta else values
            if isinstance(values, dict):
                return {key: on_meta(each) for key, each in values.items()}
            return type(values)(map(on_meta, values)) if isinstance(values, list | tuple) else values

        places = {each.is_meta for each in tensors_in((args, kwargs)) if each.dim()}
        if len(places) == 2:
            return func(*on_meta(args), **on_meta(kwargs))
        try:
            return func(*args, **kwargs)
        except NotImplementedError:
            if func._schema.is_mutable:
                raise
            self.check_reading((args, kwargs))
            return func(*self.with_entries(args), **self.with_entries(kwargs))

    def allocate(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Make a new tensor, on the meta device if it is a matrix."""
        if len(new_size(args)) >= 2 and makes_floats(args, kwargs):
            kwargs["device"] = torch.device("meta")
        out: Tensor = func(*args, **kwargs)
        if name not in ALLOCATIONS:
            law = laws.normal(args[1], mean=args[0]) if name == "normal" else RANDOM[name]
            unknown = Law(laws.UNKNOWN, reason=f"it was made by {name}")
            self.note(out, self.with_source(law) if out.is_floating_point() else unknown)
            if name.endswith("_like"):
                func, args = getattr(torch, name.removesuffix("_like")), [out.shape]
            self.tape.record(func, args, {"dtype": out.dtype}, out, [], seeded=True)
        return out

    def with_source(self, law: Law) -> Law:
        """Give a random law a new source, any other none."""
        self.draws += law.random
        return replace(law, source=self.draws if law.random else -1)

    def note_write(self, name: str, args: Any, kwargs: dict[str, Any], chance: bool) -> None:
        """Note an operation in place, on one tensor or several."""
        if not isinstance(args[0], Tensor):
            for tensor in tensors_in(args[0]):
                if chance:
                    self.note(tensor, Law(laws.UNKNOWN, reason=f"it was changed by {name}"))
                elif tensor.is_meta:
                    self.note_given(tensor)
        elif not chance and not args[0].is_meta:
            self.note(args[0], Law(laws.GIVEN))
        elif name == "copy_" and isinstance(args[1], Tensor):
            self.note_copy(args[0], args[1])
        else:
            before, tensor = self.law_of(args[0]), args[0]
            after = after_writing(name, before, args[1:], kwargs)
            if after.kind == laws.UNKNOWN and not chance:
                self.note_given(tensor)
                return
            after = self.with_source(after) if name in FILLING else after
            if not tensor.is_floating_point() and after.kind != laws.CONSTANT:
                after = Law(laws.UNKNOWN, reason=f"it was changed by {name}")
            self.note_whole_or_part(tensor, after)

    def note_copy(self, tensor: Tensor, source: Tensor) -> None:
        """Note that the entries of `source` are copied to `tensor`."""
        law, rearranged = self.law_of(source), not (is_whole_storage(tensor) and source.shape == tensor.shape)
        if not self.is_random(source) and (not source.is_meta or (law is not None and law.kind == laws.GIVEN)):
            self.note_given(tensor)
            return
        law = law or Law(laws.UNKNOWN, reason="a copy of something that was computed")
        if law.random and not (
            is_whole_storage(source) and not rearranged and source.is_floating_point() and tensor.is_floating_point()
        ):
            law = Law(laws.UNKNOWN, reason="it repeats or rearranges random numbers")
        self.note_whole_or_part(tensor, law)

    def note_given(self, tensor: Tensor) -> None:
        """Note that numbers which are not random were written to a tensor."""
        self.note_whole_or_part(tensor, Law(laws.GIVEN))

    def note_whole_or_part(self, tensor: Tensor, law: Law) -> None:
        self.note(tensor, law if covers_storage(tensor) else self.with_part(self.law_of(tensor), tensor, law))

    def note_result(self, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Note the law of a result: known if it is computed from one tensor of known law and numbers, else unknown."""
        results = tensors_in(out)
        if name in ZEROS | ONES | FULL and out.is_meta:
            self.note(out, after_writing(f"{name}_", None, args[2 if "new" in name else 1 :], {}))
            return
        inputs = tensors_in((args, kwargs))
        random = self.is_random(inputs)
        empty = any(each.is_meta and self.law_of(each) is None for each in inputs)
        if name == "empty_like" or (not random and (empty or not any(each.is_meta for each in results))):
            return
        law = self.law_of(inputs[0]) if len(inputs) == 1 and inputs[0] is args[0] else None
        for result in results:
            after = Law(laws.UNKNOWN, reason=f"it was made by {name}") if random else Law(laws.GIVEN)
            pair = (inputs[0], result) if law is not None and result.shape == inputs[0].shape else ()
            if law is not None and pair and all(x.is_floating_point() and is_whole_storage(x) for x in pair):
                one = law if name in KEEPING else after_writing(f"{name}_", law, args[1:], kwargs)
                after = after if one.kind == laws.UNKNOWN and not random else one
            self.note(result, after)

    def with_part(self, before: Law | None, part: Tensor, after: Law) -> Law:
        """Return the law of a matrix after a write to `part`.

        It is known for rows of constants in a random matrix, and for numbers that are not random.
        """
        fixed = after.kind in (laws.CONSTANT, laws.GIVEN)
        if fixed and (before is None or before.kind in (laws.CONSTANT, laws.GIVEN)):
            return Law(laws.GIVEN)
        base = part._base if part._base is not None else part
        row = base.stride(0) if base.dim() else 0
        rows = row and part.numel() % row == 0 and part.is_contiguous() and part.storage_offset() % row == 0
        number = part.numel() // row if rows else 0
        independent = before is not None and before.random and before.kind != laws.ORTHOGONAL
        if before is None or not independent or not 0 < number <= MOST_ROWS or after.kind != laws.CONSTANT:
            return Law(laws.UNKNOWN, reason="a part of it was overwritten")
        if self.widths.setdefault(before.source, row) != row:
            return Law(laws.UNKNOWN, reason="parts of it were overwritten")
        first = part.storage_offset() // row
        return replace(before, rows=before.rows | dict.fromkeys(range(first, first + number), after.shift))

    def note(self, tensor: Tensor, law: Law) -> None:
        """Note the law of a storage; an unknown law gets a source too, which identifies copies."""
        if tensor.layout != torch.strided:
            return
        self.alive.append(tensor.untyped_storage())
        if law.kind == laws.UNKNOWN and law.source < 0:
            self.draws += 1
            law = replace(law, source=self.draws)
        self.laws[storage(tensor)] = law
        self.history.setdefault(storage(tensor), []).append(law)

    def law_of(self, tensor: Tensor) -> Law | None:
        """Return the law of a tensor's storage, None if nothing random wrote to it."""
        return self.laws.get(storage(tensor)) if tensor.layout == torch.strided else None

    def truncated_normal(
        self, tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> Tensor:
        law = self.with_source(laws.truncated_normal(mean, std, a, b))
        return self.instead_of(TRUNCATED_NORMAL, law, tensor, mean, std, a, b, generator=generator)

    def orthogonal(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Replace torch's function; a part of a larger matrix, or one in another order, has no law."""
        gain, matrix = kwargs.get("gain", args[0] if args else 1.0), stored_matrix(tensor)
        law = DEPENDENT if matrix is None else self.with_source(laws.orthogonal(float(gain), *matrix))
        return self.instead_of(ORIGINALS["orthogonal_"], law, tensor, *args, **kwargs)

    def instead_of(self, function: Callable[..., Any], law: Law, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Note what an initialisation of torch would do, which does nothing on the meta device."""
        options = {name: each for name, each in kwargs.items() if name != "generator"}
        if any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values())):
            self.doubts.add(OWN_GENERATOR)
        seeded = law.kind != laws.GIVEN
        with torch._C.DisableTorchFunction():  # as above
            if seeded:
                torch.rand(1)  # a watched draw that advances torch's generator, as the replaced one does
            if not tensor.is_meta:
                with torch.no_grad(), self.pause():
                    function(tensor, *args, **options)
            self.tape.record(function, [tensor, *args], options, None, [tensor], seeded=seeded, fresh=True)
            self.note_whole_or_part(tensor, law)
        return tensor


class Readings(TorchFunctionMode):
    """A mode that notes where the code reads random entries without an operation, such as by `tolist`.

    It also keeps tensors made from numbers off the meta device, where the numbers would be lost, and tells the code
    that a matrix is on the CPU unless the code itself has put it on the meta device.
    """

    def __init__(self, watch: LawWatch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and note a doubt if it reads random entries."""
        if func in PLACES:
            return PLACES[func] if args[0].is_meta and storage(args[0]) not in self.watch.bare else func(*args)
        if getattr(func, "__name__", "") in ENTRIES:
            self.watch.check_reading(args[:1])
            if func.__name__ != "tolist" and any(each.is_meta for each in tensors_in(args[:1])):
                self.watch.doubts.add(SHARES)  # what NumPy writes there would be lost
            args = (self.watch.with_entries(args[0]), *args[1:])
        kwargs = dict(kwargs or {})
        if func in FROM_NUMBERS:
            device = kwargs.get("device") or (args[0].device if func is Tensor.new_tensor else "cpu")
            holds = not (args and isinstance(args[0], list | tuple) and not args[0])  # none tells the default device
            if torch.device(device).type == META.type:
                out = func(*args, **kwargs | ({"device": "cpu"} if holds else {}))
                self.watch.note_bare(out)
                return out
        return func(*args, **kwargs)


def new_size(args: Any) -> torch.Size:
    """Return the size of the tensor that an operation makes."""
    size = next((each for each in args if isinstance(each, list | tuple)), None)
    return torch.Size(args[0].shape if size is None else size)


def makes_floats(args: Any, kwargs: dict[str, Any]) -> bool:
    like = args[0].dtype if isinstance(args[0], Tensor) else torch.get_default_dtype()
    return bool((kwargs.get("dtype") or like).is_floating_point)


def after_writing(name: str, before: Law | None, args: Any, kwargs: dict[str, Any]) -> Law:
    """Return the law after an operation on a tensor of the law `before`."""
    numbers = [a for a in args if isinstance(a, int | float)]
    number = float(numbers[0]) if numbers else None
    if not set(kwargs) <= {"mean", "std", "from", "to", "generator", "value", "memory_format", "min", "max"}:
        return Law(laws.UNKNOWN, reason=f"it was changed by {name.rstrip('_')} with {', '.join(kwargs)}")
    if name in DRAWS:
        law, *defaults = DRAWS[name]
        named = dict(defaults) | dict(zip(dict(defaults), args, strict=False)) | kwargs
        return law(*(float(named[key]) for key, _ in defaults))
    if name in ("zero_", "fill_") or name[:-1] in ZEROS | ONES | FULL:
        value = 0.0 if name == "zero_" or name[:-1] in ZEROS else 1.0 if name[:-1] in ONES else number
        return Law(laws.UNKNOWN, reason=name) if value is None else laws.constant(value)
    if name in ("requires_grad_", "detach_"):
        return before or Law(laws.GIVEN)
    if before is None or not (before.random or before.kind == laws.CONSTANT):
        return Law(laws.UNKNOWN, reason=f"it was changed by {name.rstrip('_')}")
    products = ("mul_", "div_") if before.kind == laws.ORTHOGONAL else ("mul_", "div_", "add_", "sub_")
    if number is not None and name in products:
        change = {"mul_": before.times(number), "add_": before.plus(number), "sub_": before.plus(-number)}
        return before.times(1 / number) if name == "div_" else change[name]
    if name == "neg_":
        return before.times(-1.0)
    if name == "erfinv_" and before.kind == laws.UNIFORM and not before.rows:
        return before.erfinv()
    if name in ("clamp_", "clip_"):
        named = dict(zip(("min", "max"), args, strict=False)) | kwargs
        least, most = named.get("min"), named.get("max")
        clamped = before.clamped(
            -math.inf if least is None else float(least), math.inf if most is None else float(most)
        )
        if clamped is not None:
            return clamped
    return Law(laws.UNKNOWN, reason=f"it was changed by {name.rstrip('_')}")


@contextlib.contextmanager
def watching(seed: int = 0) -> Iterator[LawWatch]:
    """Watch the modules that are built within the with statement."""
    import torch._dynamo  # it registers the function that is replaced below, and is needed in any case

    watch = LawWatch(seed)
    codes = {name: (function.__code__, function.__defaults__) for name, function in SILENT.items()}
    nn.init._no_grad_trunc_normal_ = watch.truncated_normal
    setattr(torch, TAKES, watch.takes_data)
    WATCHES.append(watch)
    for name, function in SILENT.items():  # its code, as others have imported the function by name
        function.__code__, function.__defaults__ = REPLACEMENTS[name].__code__, None
    try:
        with watch, Readings(watch):
            yield watch
    finally:
        WATCHES.pop()
        nn.init._no_grad_trunc_normal_ = TRUNCATED_NORMAL
        setattr(torch, TAKES, COMPATIBLE)
        for name, (code, defaults) in codes.items():
            SILENT[name].__code__, SILENT[name].__defaults__ = code, defaults


WATCHES: list[LawWatch] = []  # the active one is the last


# The three replacements run with the globals of torch's module.


def orthogonal_entries(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
    from limitformer.weightless import watching

    return watching.WATCHES[-1].orthogonal(tensor, *arguments, **options)


def sparse_entries(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
    from limitformer.weightless import watching as w

    return w.WATCHES[-1].instead_of(w.ORIGINALS["sparse_"], w.DEPENDENT, tensor, *arguments, **options)


def dirac_entries(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
    from limitformer.weightless import watching as w

    return w.WATCHES[-1].instead_of(w.ORIGINALS["dirac_"], w.Law("given"), tensor, *arguments, **options)


REPLACEMENTS = {"orthogonal_": orthogonal_entries, "sparse_": sparse_entries, "dirac_": dirac_entries}
