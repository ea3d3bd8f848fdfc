r"""Forward and backward through anybody's module with its weights' law and without its weights.

Each pass has some samples side by side in the first dimension, where that gives the same numbers as one at a time:
that is tried with two of them before it is done.
"""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray

from limitformer.base.errors import InputError, first_line, require, require_count
from limitformer.base.memory import check_scratch
from limitformer.base.progress import advance, progress_bar
from limitformer.nn.drawn.simulate import resolve_device
from limitformer.results.datasets import stamp
from limitformer.simulation.simulate import Interrupted
from limitformer.weightless.arrays import Arrays, dataset
from limitformer.weightless.inputs import Inputs, Loss, default_loss, inputs_of
from limitformer.weightless.models import Blueprint, blueprint_of
from limitformer.weightless.network import Weightless
from limitformer.weightless.run import ALWAYS, AUTO, NEVER, POSITIONS, OneSampleOnlyError, row_error

SIDE_BY_SIDE_BYTES = 2**25  # of activations that a pass of several samples may have
MOST_SIDE_BY_SIDE = 256
RECOMPUTE_BYTES = 2**30  # of activations, beyond which blocks run again in the backward pass
PLACES, COPIES = 3, 4  # covariances of a block, and how often each is in memory at the most, as was measured
T = TypeVar("T")
AGREEMENT = {torch.float64: 1e-6, torch.float32: 1e-2}  # between samples side by side and alone


def simulate(
    model: Any,
    inputs: Any = 64,
    *,
    samples: int,
    seed: int,
    gradients: bool = False,
    loss: Loss | None = None,
    overrides: dict[str, Any] | None = None,
    draw: str = AUTO,
    recompute: bool | None = None,
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    batch_dim: int = 0,
    progress: bool = True,
) -> xr.Dataset:
    """The exact law of a network at initialisation, forward and backward, with no weight drawn that need not be.

    Args:
        model: a configuration of transformers, its folder, JSON or public name (`limitformer.shapes()`), a function
            that makes a `torch.nn.Module`, or a `limitformer.Transformer`.
        inputs: a text or several, ids (tokens,) or (sequences, tokens), a number of distinct tokens, images, named
            tensors as the module's `forward` takes them; for a `Transformer` its start.
        samples: number of networks.
        seed: the same seed gives the same numbers, for any number of threads and of samples.
        gradients: whether the loss is differentiated.
        loss: from the module's output and its inputs to one number a sequence; None is the cross-entropy of the
            model's task, or half the mean square of the last tokens where it has none.
        overrides: laws in the place of the module's own: {pattern of names: standard deviation or `Law`}.
        draw: "auto", whichever costs less; "never" or "always" draw Gaussian weights.
        recompute: whether blocks run again in the backward pass to save memory; None decides by their size.
        device: of torch; None takes a GPU where there is one.
        dtype: torch.float32, or torch.float64 where tokens may collapse.
        batch_dim: the dimension of the inputs in which sequences lie: 1 for a module that takes (tokens, sequences, …).
        progress: whether work of more than two seconds shows on the terminal.

    Returns:
        By sample: `covariance` of the stream before each block and after the last (layer, token, token_),
        `covariance_inside` after each sublayer, `branch` sizes, `step`, `largest` and `typical` coordinate, `entropy`,
        `effective_tokens`, `tokens_seen`, `logit_std`, `largest_logit` by head, `logits_mean` and `logits_std` of the
        output; with gradients `loss`, `weight_gradient` (weight: every trained parameter) and `stream_gradient`
        (layer), as norms. Where something random is not understood, each sample is a network that the model's own code
        draws; the attributes `weights` and `kept` say so.

    Raises:
        InputError: an argument that cannot be used, or a module whose code cannot run.
        Interrupted: Ctrl-C, with the finished samples, if there are any.
    """
    require_count("samples", samples)
    require(draw in (AUTO, NEVER, ALWAYS), f'draw must be "auto", "never" or "always"; got {draw!r}.')
    require(dtype in (torch.float32, torch.float64), f"dtype must be torch.float32 or torch.float64; got {dtype}.")
    blueprint = blueprint_of(model)
    given = inputs_of(inputs, blueprint).with_batch_dim(batch_dim)
    found = Weightless(blueprint, dtype, torch.device(resolve_device(device)), overrides)
    differentiated = (loss or default_loss(blueprint.task)) if gradients else None
    return run_passes(found, given, differentiated, samples, seed, draw, recompute, progress)


def run_passes(
    found: Weightless,
    given: Inputs,
    loss: Loss | None,
    samples: int,
    seed: int,
    draw: str = AUTO,
    recompute: bool | None = None,
    progress: bool = True,
) -> xr.Dataset:
    """What `simulate` returns, of a network that is ready; without a loss no gradients."""
    tokens = given.rows * token_count(given)
    size = found.width_of_activations() * tokens * found.dtype.itemsize
    if recompute or (recompute is None and loss is not None and size > RECOMPUTE_BYTES):
        found.recompute()
    found.tidies = size > RECOMPUTE_BYTES
    check_scratch(largest_layer(found, tokens, loss is not None), "One layer of it", "fewer tokens")
    require_recordings(found, given, samples)

    began = time.perf_counter()
    first = named_errors(lambda: found.first(seed, given, draw), found.blueprint) if found.foreign else {}

    def one(part: range) -> Arrays:
        arrays = named_errors(lambda: found.run(seed, part, given, draw, loss), found.blueprint)
        if part == range(1):
            check_repeats(first, arrays | found.outputs, found)
        return arrays

    def result(done: int) -> xr.Dataset:
        about = {**provenance(found), "seed": seed, "samples": done, "sequences": given.rows, "draw": draw}
        about["wall_seconds"] = time.perf_counter() - began
        return dataset(parts, found.trained, found.read_where, given, about)

    parts: list[Arrays] = []
    shown = progress_bar("networks without weights", samples, 0.0) if progress else None
    done = 0
    try:
        together = SideBySide(one, side_by_side(one, found, samples, size) if samples > 2 else 1)
        for part, arrays in together.parts(range(samples)):
            parts.append(arrays)
            done = part.stop
            advance(shown, done)
    except KeyboardInterrupt as interrupt:
        if not parts:
            raise  # nothing is finished
        raise Interrupted(result(done)) from interrupt
    finally:
        advance(shown, -1)
    return result(samples)


@dataclass
class SideBySide:
    """Passes of `step` samples each; of one, from where what goes through the module depends on the sample."""

    one: Callable[[range], Arrays]
    step: int

    def parts(self, samples: range) -> Iterator[tuple[range, Arrays]]:
        """Which samples, and what came of them."""
        at = samples.start
        while at < samples.stop:
            part = range(at, min(at + self.step, samples.stop))
            try:
                found = self.one(part)
            except OneSampleOnlyError:
                if self.step == 1:
                    raise
                self.step = 1
                continue
            yield part, found
            at = part.stop


def side_by_side(one: Callable[[range], Arrays], found: Weightless, samples: int, size: int) -> int:
    """How many samples a pass may have: more than one only where it gives the same numbers."""
    step = min(samples, MOST_SIDE_BY_SIDE, max(1, SIDE_BY_SIDE_BYTES // max(size, 1)))
    if step < 2:
        return 1
    try:
        together = one(range(2))
    except (OneSampleOnlyError, InputError):
        return 1
    first, second = one(range(1)), one(range(1, 2))
    tolerance = AGREEMENT[found.dtype]
    alike = all(
        equal_up_to_rounding(together[key][k], alone[key][0], tolerance)
        for k, alone in enumerate((first, second))
        for key in first
    )
    return step if alike else 1


def check_repeats(first: Arrays, again: Arrays, found: Weightless) -> None:
    """`InputError` if a module gave other numbers when it was called again with the same inputs."""
    tolerance = AGREEMENT[found.dtype] / 100
    other = next(
        (key for key in first if key in again and not equal_up_to_rounding(first[key], again[key], tolerance)), None
    )
    require(
        other is None,
        f"{found.blueprint.name} gives another {other} when it is called again with the same inputs. "
        "Nearest: a forward that changes nothing outside of the module.",
    )


def equal_up_to_rounding(a: NDArray[Any], b: NDArray[Any], tolerance: float) -> bool:
    """Whether they are the same numbers, but for rounding."""
    scale = np.max(np.abs(b[np.isfinite(b)]), initial=0.0)
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * 1e-3 * scale, equal_nan=True))


def named_errors(call: Callable[[], T], blueprint: Blueprint) -> T:
    """What the module's own code raises, as one line."""
    try:
        return call()
    except (InputError, OneSampleOnlyError, MemoryError):
        raise
    except Exception as error:  # the user's own code, which may raise anything
        what = f"{type(error).__name__}: {first_line(error)}{place_of(error)}"
        raise InputError(f"{blueprint.name} cannot run with these inputs: {what}{longest(blueprint, what)}") from error


def longest(blueprint: Blueprint, what: str) -> str:
    """Return the hint that inputs are too long, if what went wrong names the number of positions."""
    positions = getattr(blueprint.config, "max_position_embeddings", None)
    named = positions is not None and str(positions) in re.findall(r"\d+", what)
    return f". Nearest: fewer tokens; its max_position_embeddings is {positions}." if named else ""


def place_of(error: BaseException) -> str:
    """The file and line of the module's code that raised it."""
    trace = error.__traceback__
    place = ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if "/torch/" not in name and "/limitformer/" not in name:
            place = f" ({name.rpartition('/')[2]}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return place


def token_count(inputs: Inputs) -> int:
    """Tokens of a sequence."""
    if inputs.tokens is not None:
        return int(inputs.tokens.factor.shape[0])
    first = next(iter(inputs.fixed.values()))
    return int(first.shape[1 - inputs.batch_dim]) if first.dim() in (2, 3) else 256


def largest_layer(found: Weightless, tokens: int, gradients: bool) -> int:
    """Bytes that the widest part of a pass needs."""
    widest = max((sum(shape[-2:]) for shape in found.matrices()), default=1)
    return (6 if gradients else 3) * tokens * widest * found.dtype.itemsize + 16 * tokens**2


def require_recordings(found: Weightless, inputs: Inputs, samples: int) -> None:
    """Raise `InputError` unless the covariances of all samples, and what curves make of them, fit the memory.

    Ids and rows of vectors say how many tokens there are; of other inputs it is known when they have run.
    """
    first = next(iter(inputs.fixed.values()), None)
    if first is not None and first.dim() != (3 if first.is_floating_point() else 2):
        return
    tokens = inputs.rows * token_count(inputs)
    needed = COPIES * samples * PLACES * len(found.blocks) * 8 * tokens**2
    what = f"Recording {samples} networks of {len(found.blocks):,} blocks with {tokens:,} tokens"
    try:
        check_scratch(needed, what, "fewer tokens, samples or layers")
    except InputError:
        tables = [each for each in found.weights if POSITIONS.search(each.name) and len(each.shape) == 2]
        short = [each for each in tables if first is not None and token_count(inputs) > each.shape[0]]
        if short:  # what the user should know first
            raise row_error(short[0], 0, token_count(inputs) - 1) from None
        raise


def provenance(found: Weightless) -> dict[str, Any]:
    """What the numbers are of."""
    uses = found.uses
    ways = {way: sum(how == way for how in uses.values()) for way in sorted(set(uses.values()))}
    return {
        **stamp(str(found.dtype).removeprefix("torch.")),
        "description": "weightless network",
        "model": found.blueprint.name,
        "parameters": found.table.count,
        "weights": ", ".join(f"{count} {way}" for way, count in ways.items()),
        "kept": "; ".join(f"{name}: {reason}" for name, reason in found.reasons.items()),
        "laws": str(found.table),
        "torch": torch.__version__,
        "device": str(found.device),
    }
