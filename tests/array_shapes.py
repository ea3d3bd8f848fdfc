"""Shapes of arrays in signatures: `Annotated[ArrayLike, "tokens tokens"]`, in jaxtyping's grammar.

In a call a name is one number, "#name" that or 1, "*name" any number of axes, "..." whatever they are; of several
shapes an array has one. Only the tests look: `checked` holds what comes and goes in a call against the signature.
"""

import collections.abc
import dataclasses
import functools
import inspect
from typing import Annotated, get_args, get_origin, get_type_hints

import numpy as np
import torch
import xarray as xr
from jaxtyping import Shaped, jaxtyped

ARRAYS = (np.ndarray, torch.Tensor, xr.DataArray)


class ShapeError(AssertionError):
    """Raised for an array whose shape differs from its signature."""


class Sized:
    """The attributes that jaxtyping reads from an array."""

    def __init__(self, shape):
        self.shape, self.dtype = shape, np.dtype(float)


def hints_of(thing):
    """Return the annotations of a function, or of the fields of a class."""
    return get_type_hints(inspect.unwrap(thing), include_extras=True)


def shapes_in(hint):
    """Return the array shapes of an annotation, or None."""
    if get_origin(hint) is Annotated:
        return list(hint.__metadata__)
    if get_origin(hint) is collections.abc.Callable:
        return []
    of_numpy = getattr(get_origin(hint), "__name__", "") == "_SupportsArray"  # a part of ArrayLike
    bare = of_numpy or any(kind in (hint, get_origin(hint)) for kind in ARRAYS)
    return [None] * bare + [shape for part in get_args(hint) for shape in shapes_in(part)]


def shape_of(value):
    """Return the shape of an array, a number, nested lists or a start's covariance; None for other objects."""
    value = getattr(value, "covariance", value)
    if hasattr(value, "shape"):
        return tuple(value.shape)
    return np.shape(value) if isinstance(value, (int, float, list, tuple)) else None


def hold(name, hint, value):
    """Raise `ShapeError` unless the value has one of the shapes of its annotation."""
    tuples = [one for one in (hint, *get_args(hint)) if get_origin(one) is tuple]  # maybe one of a union
    if isinstance(value, tuple) and tuples:
        for part, one in zip(get_args(tuples[0]), value, strict=True):
            hold(name, part, one)
        return
    shapes, found = shapes_in(hint), shape_of(value)
    if shapes and found is not None and not any(isinstance(Sized(found), Shaped[Sized, shape]) for shape in shapes):
        raise ShapeError(f"{name} is {found}, not ({' or '.join(shapes)})")


def checked(function):
    """Wrap the function so that its arguments and result are checked."""
    hints = hints_of(function)

    @functools.wraps(function)
    def call(*arguments, **named):
        with jaxtyped("context"):
            for name, value in inspect.signature(function).bind(*arguments, **named).arguments.items():
                hold(name, hints.get(name), value)
            result = function(*arguments, **named)
            hold("the result", hints.get("return"), result)
        return result

    return call


def check_fields(part):
    """Check the fields of a dataclass in the same way."""
    hints = hints_of(type(part))
    with jaxtyped("context"):
        for field in dataclasses.fields(part):
            hold(field.name, hints[field.name], getattr(part, field.name))


def members_of(public):
    """Yield the annotated parts of a public name: a function; a dataclass; the methods and properties of a class."""
    if inspect.isfunction(public) or dataclasses.is_dataclass(public):
        yield public
    for name, member in vars(public).items() if inspect.isclass(public) else ():
        function = getattr(member, "fget", None) or getattr(member, "func", None) or member
        if inspect.isfunction(function) and not name.startswith("_"):
            yield function
