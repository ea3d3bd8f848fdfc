r"""`Implicit`, a tensor without entries that replaces a random weight in a module.

`ANSWERS`, at the end, has the operations by which models use their weights: linear maps in every spelling, embeddings,
convolutions, slices of stacked experts, transposition, casts. Linear maps lead to `apply`, which chooses between a
map that never draws its weight and one that draws it when needed (`maps`). For any other operation the entries are
drawn and kept (`run`).
"""

import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from limitformer.base.errors import InputError, require
from limitformer.weightless.convolutions import (
    Convolution,
    RedrawnConvolution,
    each_side,
    margins,
    patches_of,
    positions,
)
from limitformer.weightless.interpreter import paused
from limitformer.weightless.laws import ORTHOGONAL
from limitformer.weightless.maps import NeverDrawnMap, RedrawnMap
from limitformer.weightless.numbers import normals
from limitformer.weightless.ops import ENTRIES
from limitformer.weightless.orthogonal import OrthogonalMap, has_room
from limitformer.weightless.products import RepeatedMap, RepeatedUse
from limitformer.weightless.run import (
    ALWAYS,
    NEVER,
    DrawWholeError,
    KeepWeightsError,
    RandomWeight,
    WeightlessRun,
    add_to,
)
from limitformer.weightless.tensors import mapped, tensors_in

NEVER_DRAWN, DRAWN_AGAIN = "never drawn", "drawn when needed"


class Implicit(torch.Tensor):
    """A random weight or its slice [part], perhaps transposed, with a shape and a dtype but without entries."""

    weight: RandomWeight
    part: int | None
    turned: bool
    frozen: bool
    _is_param = True  # so that it is an instance of nn.Parameter

    @staticmethod
    def __new__(
        cls, weight: RandomWeight, part: int | None = None, turned: bool = False, frozen: bool = False,
        dtype: torch.dtype | None = None,
    ) -> "Implicit":  # fmt: skip
        shape = weight.shape if part is None else weight.shape[1:]
        shape = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
        run = weight.run
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype or run.dtype, device=run.device)
        self.weight, self.part, self.turned = weight, part, turned
        self.frozen = frozen or not weight.trained
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing; `__new__` sets the attributes."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Implicit({self.weight.name}, {tuple(self.shape)}, {self.weight.law})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer `func` without the entries where `ANSWERS` can, else call it with the entries drawn."""
        kwargs = kwargs or {}
        if not torch.is_grad_enabled():
            require_followed(next(each for each in tensors_in((args, kwargs)) if isinstance(each, Implicit)))
        name = getattr(func, "__name__", str(func))
        if func in ANSWERS:
            with paused() if name not in METADATA else nullcontext():
                answer = ANSWERS[func](*args, **kwargs)
            if answer is not NotImplemented:
                tell(func, (args, kwargs), answer)
                return answer
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                value = func(*args, **kwargs)
            if not isinstance(value, Tensor):
                return value
        note_operation((args, kwargs), name)
        with paused():
            drawn = with_entries(args), with_entries(kwargs)
        tell(func, (args, kwargs), drawn, ENTRIES)
        return func(*drawn[0], **drawn[1])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation of torch's dispatcher, which no answer has caught, with the entries drawn."""
        if func.overloadpacket.__name__ in ("detach", "alias", "_to_copy"):
            return args[0]
        return func(*with_entries(args), **with_entries(kwargs or {}))


def tell(func: Any, values: Any, out: Any, kind: str = "") -> None:
    """Tell the observers of the pass, if there are any, of an answer without entries, or of entries that were drawn."""
    weight = next(each for each in tensors_in(values) if isinstance(each, Implicit)).weight
    if weight.run.interpreter is not None and getattr(func, "__name__", "") not in METADATA:
        weight.run.interpreter.tell(func, values, out, kind)


def require_followed(tensor: Implicit) -> None:
    """Raise `DrawWholeError` if code that autograd does not follow is a `torch.autograd.Function` of the module's own.

    Such a function gives its own gradient. Its `apply` is often bound before we could wrap it, so that only the frame
    of its `forward` shows it.
    """
    frame: Any = sys._getframe(1) if tensor.weight.run.gradients else None
    own = user_functions(torch.autograd.Function) if frame is not None else {}
    while frame is not None:
        if frame.f_code in own:
            raise DrawWholeError({tensor.weight.name: f"{own[frame.f_code]} uses it"})
        frame = frame.f_back


def user_functions(base: Any) -> dict[Any, str]:
    """Return the names of all subclasses that are neither torch's nor ours, by the code of their `forward`."""
    found: dict[Any, str] = {}
    for each in base.__subclasses__():
        if not each.__module__.startswith(OF_TORCH_OR_OURS):
            found[getattr(each.forward, "__code__", None)] = each.__qualname__
        found |= user_functions(each)
    return found


OF_TORCH_OR_OURS = ("torch.", "limitformer.")
METADATA = {"__get__", "size", "dim", "numel", "is_floating_point", "is_complex", "stride", "__repr__", "element_size"}
METADATA |= {"ndimension", "is_contiguous", "__len__", "__hash__", "__set__", "is_pinned", "data_ptr"}


@dataclass(frozen=True, eq=False)
class WeightNumbers:
    """The random numbers of the map by an implicit matrix W (n × p), as `maps.Numbers`."""

    tensor: Implicit
    turned: bool  # whether the stored matrix is p × n

    @property
    def run(self) -> WeightlessRun:
        return self.tensor.weight.run

    @property
    def name(self) -> str:
        """The name of the weight, with its slice."""
        part = self.tensor.part
        return self.tensor.weight.name if part is None else f"{self.tensor.weight.name}[{part}]"

    @property
    def scale(self) -> float:
        return self.run.scale(self.tensor.weight)

    def gaussian(self, purpose: str, rows: int, columns: int) -> Tensor:
        self.run.note_fresh(self.tensor.weight.name, f"{self.name}: {purpose}")
        return self.run.normals(f"{self.name}: {purpose}", range(1), rows * columns).reshape(
            self.run.side_by_side, rows, columns
        )

    def wishart_root(self, purpose: str, rows: int, freedom: int) -> Tensor:
        return self.run.wishart_root(f"{self.name}: {purpose}", rows, freedom)

    @property
    def samples(self) -> int:
        return self.run.side_by_side

    @property
    def stored_columns(self) -> int:
        """The columns of the weight as the module has it, whose first dimension are the rows."""
        tensor = self.tensor
        rows = tensor.weight.shape[0 if tensor.part is None else 1]
        return tensor.shape.numel() // rows

    def rows_of(self, sample: int, purpose: str, rows: Tensor, columns: int) -> Tensor:
        """Draw N(0, 1) of these rows (r, columns) for the k-th sample of the pass."""
        first = self.run.samples.start + sample
        purpose = f"{self.name}: {purpose}"
        return normals(self.run.seed, purpose, range(first, first + 1), rows, columns, self.run.dtype)[0]

    def whole(self) -> Tensor:
        """Draw W (S, n, p)."""
        return as_matrix(self.stored(), self.turned)

    def stored(self) -> Tensor:
        """Draw the weight in the shape that the module has (S, *shape)."""
        weight, index = self.tensor.weight, self.tensor.part
        values = weight.run.entries(weight, weight.rows if index is None else range(index, index + 1))
        return values if index is None else values[:, 0]

    def add_squared_gradient(self, squared: Tensor) -> None:
        if not self.tensor.frozen:
            add_to(self.run.squared, self.tensor.weight.name, squared)

    def note_product(self, backward: bool, factor: Tensor, answer: Tensor) -> None:
        if self.run.products is not None:  # by the stored matrix S: a map that is turned is Z Sᵀ
            side, pair = backward != self.turned, (factor.detach()[0].clone(), answer.detach()[0].clone())
            self.run.products.setdefault((self.tensor.weight.name, self.tensor.part), {})[side] = pair


def as_matrix(stored: Tensor, turned: bool) -> Tensor:
    """Flatten a stored weight (S, rows, …) to a matrix (S, n, p); p are the rows if `turned`."""
    flat = stored.flatten(2)
    return flat.mT if turned else flat


def note_operation(arguments: Any, operation: str) -> None:
    """Note the operation as the reason to keep the implicit weights among its arguments."""
    if isinstance(arguments, Implicit):
        arguments.weight.run.operations.setdefault(arguments.weight.name, f"used in {operation}")
    elif isinstance(arguments, dict | list | tuple):
        for each in arguments.values() if isinstance(arguments, dict) else arguments:
            note_operation(each, operation)


def with_entries(arguments: Any) -> Any:
    """Replace the implicit weights among the arguments by their entries, kept for the pass."""
    return mapped(arguments, lambda each: entries_of(each) if isinstance(each, Implicit) else each)


def entries_of(tensor: Implicit) -> Tensor:
    values = keep_entries(tensor)[0]
    return (values.transpose(-2, -1) if tensor.turned else values).to(tensor.dtype)


def apply(x: Tensor, tensor: Implicit, turned: bool, bias: Tensor | None = None) -> Tensor:
    """Return x W + b (…, p), in the dtype of x; the stored matrix is p × n if `turned`.

    Raises:
        InputError: in a pass in a number format, x has another type, which plain PyTorch refuses.
    """
    rounds = tensor.weight.run.rounds
    if tensor.weight.run.in_format and x.dtype != tensor.dtype:
        raise InputError(
            f"{tensor.weight.name} is {tensor.dtype} and takes {x.dtype} here, which plain PyTorch refuses. Nearest: "
            f"a cast of its input."
        )
    dtype, x = x.dtype, x.to(tensor.weight.run.dtype)  # of casts of x and W, that of x is rounded
    x = x if rounds is None else rounds(x, False)
    z = tensor.weight.run.by_sample(x)
    columns = tensor.shape[0] if turned else tensor.shape[-1]
    if z.shape[-1] * columns != tensor.shape.numel():  # a map without entries would not fail
        shape, inputs = tuple(tensor.shape), tensor.shape.numel() // columns
        raise InputError(f"{tensor.weight.name} {shape} takes {inputs} entries a token; got {tuple(x.shape)}.")
    run, turned = tensor.weight.run, turned != tensor.turned
    entries = None if run.trains else kept_entries(tensor)
    if entries is None and tensor.weight.law.kind == ORTHOGONAL and not run.trains:
        entries = drawn_orthogonal(tensor, z.shape[-2], z.shape[-1], columns)
    if run.trains:
        out = run.map(z, tensor, turned)
    else:
        numbers = WeightNumbers(tensor, turned)
        out = apply_once(x, z, numbers, columns) if entries is None else z @ as_matrix(entries, turned)
    out = out if rounds is None else rounds(out, True)
    out = out.reshape(*x.shape[:-1], columns)
    return (out if bias is None else add_bias(out, bias)).to(dtype)  # rounded once, as a kernel does


def kept_entries(tensor: Implicit) -> Tensor | None:
    """Return the entries (S, *shape) of a weight that is kept for the pass, None of any other."""
    weight, run = tensor.weight, tensor.weight.run
    if weight.name not in run.reasons_to_keep and (weight.name not in run.leaves or weight.name in run.rows):
        return None
    return keep_entries(tensor)


def drawn_orthogonal(tensor: Implicit, tokens: int, inputs: int, columns: int) -> Tensor | None:
    """Return the entries (S, *shape) of an orthogonal weight that is drawn, None of one that need not be.

    It is kept for the pass, as drawing it costs more than multiplying by it.
    """
    weight, run = tensor.weight, tensor.weight.run
    run.costly.add(weight.name)  # a second use draws it
    if tensor.part is not None:
        run.operations.setdefault(weight.name, "a part of it is used")
    elif weight.name not in run.rows and never_drawn(tokens, inputs, columns, WeightNumbers(tensor, turned=False)):
        return None
    run.operations.setdefault(weight.name, "an orthogonal matrix that costs less if it is drawn")
    return keep_entries(tensor)


def keep_entries(tensor: Implicit) -> Tensor:
    """Draw the entries (S, *shape) of a weight or its slice, and keep them for the pass."""
    whole = tensor.weight.run.whole(tensor.weight)
    part = whole if tensor.part is None else whole[:, tensor.part]
    return part.detach() if tensor.frozen else part


def apply_once(x: Tensor, z: Tensor, numbers: WeightNumbers, columns: int) -> Tensor:
    """Return x W (S, M, p) of a weight that is not kept; columns that an embedding has drawn as rows are inserted."""
    run, weight = numbers.run, numbers.tensor.weight
    known = run.rows.get(weight.name)
    if known is not None and not numbers.turned:
        raise KeepWeightsError({weight.name: "used in several ways"})
    if known is not None and weight.law.rows:  # constant rows need no draw
        known = run.draw_rows(weight, torch.tensor(sorted(weight.law.rows), device=run.device))
    run.tokens[numbers.name] = run.tokens.get(numbers.name, 0) + z.shape[-2]
    orthogonal = weight.law.kind == ORTHOGONAL  # `apply` has drawn those that must be
    if not orthogonal and not never_drawn(run.tokens[numbers.name], z.shape[-1], columns, numbers):
        run.costly.add(weight.name)
    if weight.name in run.repeated:
        every = run.repeats.setdefault(numbers.name, RepeatedMap())
        rows = numbers.tensor.shape.numel() // numbers.stored_columns
        run.use(numbers.name, NEVER_DRAWN, weight)
        matrices = every.of_samples(numbers, (rows, numbers.stored_columns), z.dtype)
        out: Tensor = RepeatedUse.apply(z, run.anchor, every, matrices, numbers.turned, numbers.tensor.frozen)
    elif orthogonal:
        run.use(numbers.name, NEVER_DRAWN, weight)
        out = OrthogonalMap.apply(z, run.anchor, numbers, run.root(x, z), columns)
    elif never_drawn(z.shape[-2], z.shape[-1], columns, numbers):
        run.use(numbers.name, NEVER_DRAWN, weight)
        out = NeverDrawnMap.apply(z, run.anchor, numbers, run.root(x, z), columns)
    elif known is not None:
        raise KeepWeightsError({weight.name: "used as embedding and head"})
    else:
        run.use(numbers.name, DRAWN_AGAIN, weight)
        out = RedrawnMap.apply(z, run.anchor, numbers)
    return out if known is None else out.index_copy_(-1, known[0], z @ known[1].mT)


def never_drawn(tokens: int, inputs: int, columns: int, numbers: WeightNumbers) -> bool:
    """Whether the map leaves its weight undrawn: it must be orthogonal or Gaussian, and that must be cheaper.

    The tokens of an orthogonal weight must be few.
    """
    law, draw = numbers.tensor.weight.law, numbers.run.draw
    if law.kind == ORTHOGONAL:
        few = has_room(tokens, inputs, columns) and draw != ALWAYS
        return few and (draw == NEVER or tokens < min(inputs, columns))
    known = numbers.tensor.weight.name in numbers.run.rows  # its rows that were not looked up are still Gaussian
    if not law.random or not (law.gaussian or (known and law.kind == "normal" and law.shift == 0.0)):
        return False
    if draw == NEVER:
        return True
    return draw != ALWAYS and min(tokens, inputs) * (inputs + columns) < inputs * columns


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not isinstance(weight, Implicit) or len(weight.shape) != 2:
        return NotImplemented
    return apply(input, weight, turned=True, bias=bias)


def add_bias(out: Tensor, bias: Tensor) -> Tensor:
    """Add b to out in place; a random b has one vector for each sample."""
    if not isinstance(bias, Implicit):
        return out.add_(bias)
    run = bias.weight.run
    whole = run.whole(bias.weight)
    values = whole if bias.part is None else whole[:, bias.part]
    return (run.by_sample(out) + values[:, None]).reshape(out.shape)


def matmul(input: Tensor, other: Tensor, bias: Tensor | None = None, **options: Any) -> Any:
    if len(other.shape) == 3 and bias is None:
        return batched(input, other, **options)
    if isinstance(input, Implicit) or not isinstance(other, Implicit) or len(other.shape) != 2 or options:
        return NotImplemented
    return apply(input, other, turned=False, bias=bias)


def batched(input: Tensor, mat2: Tensor, **options: Any) -> Any:
    """Multiply each matrix of x (E, M, n) by its own of stacked matrices (E, n, p)."""
    if isinstance(input, Implicit) or not isinstance(mat2, Implicit) or options or mat2.part is not None:
        return NotImplemented
    if len(mat2.shape) != 3 or input.dim() != 3 or input.shape[0] != mat2.shape[0]:
        return NotImplemented
    parts = [Implicit(mat2.weight, part, mat2.turned, mat2.frozen, mat2.dtype) for part in range(mat2.shape[0])]
    return torch.stack([apply(x, part, turned=False) for x, part in zip(input, parts, strict=True)])


def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **options: Any) -> Any:
    return matmul(mat1, mat2, bias=input, **options)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Look up rows, drawing one for each distinct id."""
    whole = isinstance(weight, Implicit) and weight.part is None and not weight.turned
    if not isinstance(weight, Implicit) or not whole or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    whole_numbers = not input.is_floating_point() and input.dtype != torch.bool
    require(
        whole_numbers, f"{weight.weight.name} is looked up by whole numbers; got {input.dtype}. Nearest: ids of int64."
    )
    rows = weight.weight.run.embed(weight.weight, input)[0]
    rows = rows.detach() if weight.frozen else rows
    if padding_idx is not None:
        padding = (input == padding_idx % weight.shape[0])[..., None]
        rows = torch.where(padding, rows.detach(), rows)
    return rows.to(weight.dtype)


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if not isinstance(weight, Implicit) or not convolves(input, weight):
        return NotImplemented
    sides = len(weight.shape) - 2
    x, dilations = input, each_side(dilation, sides)
    if padding == "same":
        if each_side(stride, sides) != (1,) * sides:
            return NotImplemented  # torch raises the error
        x, padding = functional.pad(x, margins(weight.shape[2:], dilations)), 0
    padding = 0 if padding == "valid" else padding
    none = (0,) * sides
    how = Convolution(each_side(stride, sides), each_side(padding, sides), dilations, False, none, groups)
    return convolve(x, weight, bias, how)


def transposed_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    if not isinstance(weight, Implicit) or not convolves(input, weight):
        return NotImplemented
    sides = len(weight.shape) - 2
    steps, widths, dilations, more = (each_side(each, sides) for each in (stride, padding, dilation, output_padding))
    return convolve(input, weight, bias, Convolution(steps, widths, dilations, True, more, groups))


def convolves(x: Tensor, kernel: Implicit) -> bool:
    """Whether the dimensions of x fit the kernel, with or without one for samples."""
    return not isinstance(x, Implicit) and not kernel.turned and x.dim() in (len(kernel.shape), len(kernel.shape) - 1)


def convolve(input: Tensor, tensor: Implicit, bias: Tensor | None, how: Convolution) -> Tensor:
    """Convolve x (B, channels, …) or (channels, …) with a kernel and a bias for each sample."""
    run, sides = tensor.weight.run, len(tensor.shape) - 2
    if input.dim() == sides + 1:  # without a dimension for samples
        return convolve(input[None], tensor, bias, how)[0]
    x = input.to(run.dtype).unflatten(0, (run.side_by_side, -1))  # a cast, as in `apply`
    numbers = WeightNumbers(tensor, turned=True)
    as_patches = how.groups == 1 and not how.transposed
    kernels = run.whole(tensor.weight) if run.trains and not as_patches else None
    kernels = kernels if run.trains else kept_entries(tensor)
    if kernels is not None:
        out = how.convolve(x, kernels).flatten(0, 1)
    elif as_patches and (run.trains or kernel_is_never_drawn(x, numbers, how)):
        patches = patches_of(input, tensor.shape[2:], how)  # (B, *positions, channels · kernel)
        out = apply(patches, tensor, turned=True).movedim(-1, 1).contiguous()  # as a module may view it
    elif tensor.weight.name in run.repeated:  # elsewhere only its products with patches are known
        raise KeepWeightsError({tensor.weight.name: "used in several ways"})
    else:
        run.use(numbers.name, DRAWN_AGAIN, tensor.weight)
        out = RedrawnConvolution.apply(x, run.anchor, numbers, how).flatten(0, 1)
    out = out.to(input.dtype)
    if bias is None:
        return out
    values = bias
    if isinstance(bias, Implicit):  # one vector for each sample
        whole = bias.weight.run.whole(bias.weight)
        values = (whole if bias.part is None else whole[:, bias.part]).repeat_interleave(len(x[0]), 0)
    return out.add_(values.unflatten(-1, (-1, *[1] * sides)))


def kernel_is_never_drawn(x: Tensor, numbers: WeightNumbers, how: Convolution) -> bool:
    """Whether the map of the patches of x (S, B, channels, …) leaves its kernel undrawn."""
    columns, channels, *kernel = numbers.tensor.shape
    sizes = map(positions, x.shape[3:], kernel, how.stride, how.padding, how.dilation)
    return never_drawn(x.shape[1] * math.prod(sizes), channels * math.prod(kernel), columns, numbers)


def item(tensor: Any, index: Any) -> Any:
    """Return the slice W[i] of stacked matrices, or the row W[i, :] of a table that is drawn by rows."""
    if not isinstance(tensor, Implicit) or tensor.part is not None or tensor.turned or len(tensor.shape) < 2:
        return NotImplemented
    run = tensor.weight.run
    row = isinstance(index, tuple) and index[1:] == (slice(None),) and isinstance(index[0], int)
    row = row and tensor.weight.name in run.rows and len(tensor.shape) == 2
    number = isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0 and index.dtype != torch.bool)
    if not row and not number:
        return NotImplemented
    if row:
        return embedding(torch.tensor([index[0] % tensor.shape[0]], device=run.device), tensor)[0]
    return Implicit(tensor.weight, int(index) % tensor.shape[0], frozen=tensor.frozen, dtype=tensor.dtype)


def transpose(input: Any, *dims: int, **named_dims: int) -> Any:
    """Return the transpose of a matrix, or of each of stacked matrices."""
    size, pair = len(input.shape), {*dims, *named_dims.values()}
    if not isinstance(input, Implicit) or size not in (2, 3) or (size == 3 and {each % 3 for each in pair} != {1, 2}):
        return NotImplemented
    return Implicit(input.weight, input.part, not input.turned, input.frozen, input.dtype)


def transpose_of_matrix(input: Any) -> Any:
    return transpose(input) if len(input.shape) == 2 else NotImplemented


def multiply(tensor: Any, other: Any) -> Any:
    """Multiply a weight in place by a number, outside of autograd, as code that rescales its layers does."""
    whole = isinstance(tensor, Implicit) and tensor.part is None and isinstance(other, int | float)
    if not whole or (torch.is_grad_enabled() and not tensor.frozen):
        return NotImplemented
    return tensor if tensor.weight.run.multiply(tensor.weight, float(other)) else NotImplemented


def divide(tensor: Any, other: Any, **options: Any) -> Any:
    number = isinstance(other, int | float) and other != 0 and not options
    return multiply(tensor, 1 / other) if number else NotImplemented


def freeze(tensor: Any) -> Any:
    """Return the weight without its gradient."""
    return Implicit(tensor.weight, tensor.part, tensor.turned, True, tensor.dtype)


def itself(tensor: Any, *arguments: Any, **more: Any) -> Any:
    """Return the weight itself for copies."""
    return tensor if isinstance(tensor, Implicit) else NotImplemented


def as_type(tensor: Implicit, dtype: torch.dtype) -> Implicit:
    """Return the weight in a type: its entries are drawn in the type of the pass, and cast."""
    if tensor.dtype == dtype or not dtype.is_floating_point:
        return tensor
    return Implicit(tensor.weight, tensor.part, tensor.turned, tensor.frozen, dtype)


def cast_like(tensor: Any, *arguments: Any, **more: Any) -> Any:
    """Answer `x.to(W)`, `x.type_as(W)`, or a cast of the weight, which stays on the device of the pass."""
    if isinstance(tensor, Implicit):
        types = (each.dtype if isinstance(each, Tensor) else each for each in (*arguments, *more.values()))
        dtype = next((each for each in types if isinstance(each, torch.dtype)), tensor.dtype)
        return as_type(tensor, dtype)
    like = next(a for a in arguments if isinstance(a, Implicit))
    return tensor.to(device=like.device, dtype=like.dtype)


ANSWERS: dict[Any, Callable[..., Any]] = {
    functional.linear: linear,
    torch.matmul: matmul,
    torch.mm: matmul,
    Tensor.matmul: matmul,
    Tensor.mm: matmul,
    Tensor.__matmul__: matmul,
    torch.bmm: batched,
    Tensor.bmm: batched,
    torch.addmm: addmm,
    functional.embedding: embedding,
    torch.conv1d: convolution,
    torch.conv2d: convolution,
    torch.conv3d: convolution,
    torch.conv_transpose1d: transposed_convolution,
    torch.conv_transpose2d: transposed_convolution,
    torch.conv_transpose3d: transposed_convolution,
    Tensor.__getitem__: item,
    Tensor.t: transpose_of_matrix,
    torch.t: transpose_of_matrix,
    Tensor.T.__get__: transpose_of_matrix,  # type: ignore[attr-defined]
    Tensor.mT.__get__: lambda tensor: transpose(tensor, -2, -1),  # type: ignore[attr-defined]
    Tensor.transpose: transpose,
    torch.transpose: transpose,
    Tensor.mul_: multiply,
    Tensor.div_: divide,
    Tensor.to: cast_like,
    Tensor.type_as: cast_like,
    Tensor.float: lambda tensor, *_: as_type(tensor, torch.float32),
    Tensor.double: lambda tensor, *_: as_type(tensor, torch.float64),
    Tensor.contiguous: itself,
    Tensor.detach: freeze,
    Tensor.requires_grad.__get__: lambda tensor: not tensor.frozen,  # type: ignore[attr-defined]
    Tensor.clone: itself,
}
