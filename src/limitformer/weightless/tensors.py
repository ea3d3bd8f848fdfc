"""Facts about tensors: whether they share memory, were changed in place, cover their storage, or are equal."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Fingerprint = tuple[float, ...]  # numbers that differ after a change in place


def fingerprint(z: Tensor) -> Fingerprint:
    """Return the number of changes that torch has counted, and the norm, which shows others.

    In inference mode torch counts none, and the sum of the entries replaces the number.
    """
    z = z.detach()
    counted = float(z.sum()) if z.is_inference() else float(z._version)
    return counted, float(torch.linalg.vector_norm(z))


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same numbers at the same address."""
    alike = a.data_ptr() == b.data_ptr() and a.numel() == b.numel() and a.shape[-1] == b.shape[-1]
    return alike and a.is_contiguous() and b.is_contiguous()


def tensors_in(values: Any) -> list[Tensor]:
    """Return every tensor in nested lists, tuples and dicts."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = list(values.values())
    return [tensor for value in values for tensor in tensors_in(value)] if isinstance(values, list | tuple) else []


def mapped(values: Any, function: Callable[[Any], Any]) -> Any:
    """Return nested lists, tuples and dicts with `function` of everything else in them."""
    if isinstance(values, dict):
        return {key: mapped(value, function) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(mapped(value, function) for value in values)
    return function(values)


def is_whole_storage(tensor: Tensor) -> bool:
    """Whether a tensor is all of its storage, in the order of memory."""
    return covers_storage(tensor) and tensor.is_contiguous() and tensor.storage_offset() == 0


def storage(tensor: Tensor) -> int:
    """Return a number that is equal for tensors that share their memory.

    What has no memory has a number of its own: sparse tensors, and those inside `torch.func`.
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def covers_storage(tensor: Tensor) -> bool:
    """Whether a tensor has each entry of its storage once, in any order."""
    entries = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if tensor.numel() and size > 1 and stride != entries:
            return False
        entries *= size
    return entries * tensor.element_size() == tensor.untyped_storage().nbytes()


def stored_matrix(tensor: Tensor) -> tuple[int, int] | None:
    """Return rows and columns of a matrix as it is in memory, with all dimensions but the first flattened.

    The matrix may be the transpose of one in memory; None for anything else.
    """
    if tensor.dim() == 2 and not tensor.is_contiguous():
        tensor = tensor.mT
    if tensor.dim() < 2 or not is_whole_storage(tensor) or not tensor.numel():
        return None
    return tensor.shape[0], tensor.numel() // tensor.shape[0]


def same_tensors(a: Tensor, b: Tensor) -> bool:
    """Whether both have the same shape, dtype and entries; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout or a.is_meta != b.is_meta:
        return False
    if a.is_meta or a.layout != torch.strided:
        return a.is_meta or same_tensors(a.detach().to_dense(), b.detach().to_dense())
    return bool(torch.equal(a.detach(), b.detach())) or bool(
        ((a.detach() == b.detach()) | (a.detach().isnan() & b.detach().isnan())).all()
    )


def same_numbers(a: Any, b: Any) -> bool:
    """Whether two tensors, arrays or numbers are equal; NaN equals NaN."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and same_tensors(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        alike = type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype
        return alike and (a.dtype == object or bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")))
    return type(a) is type(b) and (a == b or (a != a and b != b))
