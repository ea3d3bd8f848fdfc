r"""`simulate`: passes forward and backward through any module, by the law of its weights.

Each sample has a pass of its own.
"""

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray

from limitformer.base.errors import InputError, first_line, require, require_count
from limitformer.base.memory import check_scratch, readable
from limitformer.base.progress import advance, progress_bar
from limitformer.nn.drawn.simulate import resolve_device
from limitformer.results.datasets import stamp
from limitformer.simulation.simulate import Interrupted
from limitformer.subjects.choices import parameters_of
from limitformer.subjects.inputs import Inputs, inputs_of, with_targets
from limitformer.subjects.losses import ChosenLoss, Loss, chosen_loss
from limitformer.subjects.subject import Subject, resolve
from limitformer.weightless.arrays import Arrays, blocks_in_words, dataset, require_same_blocks
from limitformer.weightless.interpreter import Observer
from limitformer.weightless.layout import Chosen, Recorder, needs_search
from limitformer.weightless.network import FirstPass, Weightless
from limitformer.weightless.observers.stream import PLACES
from limitformer.weightless.run import ALWAYS, AUTO, NEVER, POSITIONS, row_error

RECOMPUTE_BYTES = 2**30  # of activations, above which blocks run again in the backward pass
NAMED_ARGUMENTS = 6  # in an error
ALLOCATION = re.compile(r"can't allocate memory|not enough memory|out of memory")  # in errors of torch
SEEDED = "the factory seeds its own numbers, so that all samples are equal"
CONSTANT_FACTORY = "the factory makes the same numbers each time, so that all samples are equal"
COPIES = 4  # the measured number of copies of each covariance in memory
T = TypeVar("T")
AGREEMENT = {torch.float64: 1e-8, torch.float32: 1e-4}  # between two calls with the same inputs


def simulate(
    model: Any,
    inputs: Any = 64,
    *,
    samples: int,
    seed: int,
    gradients: bool = False,
    loss: Loss | str | None = None,
    overrides: dict[str, Any] | None = None,
    draw: str = AUTO,
    recompute: bool | None = None,
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    batch_dim: int = 0,
    blocks: Chosen | None = None,
    progress: bool = True,
) -> xr.Dataset:
    """Simulate a network at initialisation, forward and backward, exactly in law and without drawing most weights.

    Args:
        model: a configuration of transformers, its folder, JSON or public name (`limitformer.shapes()`), a function
            that builds a `torch.nn.Module`, or a `limitformer.Transformer`.
        inputs: a text or several, ids (tokens,) or (sequences, tokens), a number of distinct tokens, images, named
            tensors as the module's `forward` takes them; for a `Transformer` its start.
        samples: number of networks.
        seed: the same seed gives the same numbers, for any number of threads and samples.
        gradients: whether the loss is differentiated.
        loss: "next-token", "mse" (with `targets` or `labels` in the inputs), or a function of the module's output and
            its inputs that returns one number a sequence. None means the loss that the module computes, the
            cross-entropy of the model's task, or ½|x|² of the last tokens for a model that has neither. The attribute
            `loss` says which ran.
        overrides: laws that replace the module's: {pattern of names: standard deviation or `Law`}.
        draw: whether Gaussian weights are drawn: "never", "always", or "auto", whichever costs less.
        recompute: whether blocks run again in the backward pass to save memory; None decides by their size.
        device: a device of torch; None takes a GPU if there is one.
        dtype: torch.float32, or torch.float64 where tokens may collapse.
        batch_dim: the dimension of the inputs in which sequences lie: 1 for a module that takes (tokens, sequences, …).
        blocks: the modules to measure: a pattern of names such as "h.*", several, or a function that takes the module
            and returns them; None finds the modules that receive the stream and return it.
        progress: whether the terminal shows work of more than two seconds.

    Returns:
        A dataset by sample: `covariance` of the stream before each block and after the last (layer, token, token_),
        `covariance_inside` after each sublayer, `branch` sizes, `step`, `largest` and `typical` coordinate, `entropy`,
        `effective_tokens`, `tokens_seen`, `logit_std`, `largest_logit` by head, `logits_mean` and `logits_std` of the
        output; with gradients `loss`, `weight_gradient` (weight: every trained parameter) and `stream_gradient`
        (layer), as norms. If the module has random numbers of unknown law, its own code draws a network for each
        sample; the attributes `weights` and `kept` then name them. The attribute `equal_samples` says why all samples
        are equal, if they are. The attribute `opaque` names operations of other packages: what happens inside them is
        computed, and not measured. The attribute `blocks` names the blocks. Several stacks of blocks, such as encoder
        and decoder, follow each other along `layer`, with a coordinate `stack`; `limitformer.weightless.split_stacks`
        separates them.

    Raises:
        InputError: an argument cannot be used, or the module's code cannot run.
        Interrupted: Ctrl-C was pressed; it holds the finished samples, if there are any.
    """
    require_count("samples", samples)
    require(draw in (AUTO, NEVER, ALWAYS), f'draw must be "auto", "never" or "always"; got {draw!r}.')
    require(dtype in (torch.float32, torch.float64), f"dtype must be torch.float32 or torch.float64; got {dtype}.")
    subject = resolve(model)
    prepared = inputs_of(inputs, subject).with_batch_dim(batch_dim)
    network = Weightless(subject, dtype, torch.device(resolve_device(device)), overrides, blocks)
    prepared = accepted_inputs(prepared, network, seed, own_loss=gradients and loss is None)
    differentiated = chosen_loss(loss, subject.task, batch_dim=batch_dim) if gradients else None
    return run_passes(network, prepared, differentiated, samples, seed, draw, recompute, progress)


def accepted_inputs(inputs: Inputs, network: Weightless, seed: int, own_loss: bool) -> Inputs:
    """Return the first of the proposed inputs that the network's code takes.

    Args:
        own_loss: whether a user's module is given targets, so that it computes its own loss.
    """

    if network.foreign and own_loss:
        return with_targets(inputs, network.module)

    def measure(each: Inputs) -> None:
        network.layout = network.first_layout  # other inputs may show other blocks
        began = time.perf_counter()
        arrays = network.run(seed, range(1), each, AUTO, None)
        network.first_pass = FirstPass(seed, each.fixed, arrays, time.perf_counter() - began)

    def call(each: Inputs) -> None:
        network.layout = network.first_layout
        if needs_search(network.layout, network.module):
            recorder = network.observed(seed, 0, AUTO, each, lambda: Recorder(network.module))
            network.recorded = each.fixed, recorder.calls
        else:
            network.observed(seed, 0, AUTO, each, Observer)

    return inputs.first_accepted(call, measure)


def run_passes(
    network: Weightless,
    inputs: Inputs,
    loss: ChosenLoss | None,
    samples: int,
    seed: int,
    draw: str = AUTO,
    recompute: bool | None = None,
    progress: bool = True,
) -> xr.Dataset:
    """Return the dataset of `simulate`; without a loss it has no gradients."""
    tokens = inputs.rows * token_count(inputs)
    size = network.width_of_activations() * tokens * network.dtype.itemsize
    if recompute or (recompute is None and loss is not None and size > RECOMPUTE_BYTES):
        network.recomputes = True
        network.run_again()
    network.trims = size > RECOMPUTE_BYTES
    check_scratch(largest_layer(network, tokens, loss is not None), "One layer of it", "fewer tokens")
    require_recordings(network, inputs, samples)

    known = network.first_pass if loss is None and draw == AUTO else None
    known = known if known is not None and known.seed == seed and known.inputs is inputs.fixed else None
    began = time.perf_counter() - (known.seconds if known else 0.0)
    subject = network.subject
    call_first = partial(named_errors, lambda: network.first(seed, inputs, draw), subject, inputs)
    first, uses = (call_first(), network.uses) if network.foreign else (Arrays(), {})

    def one(sample: int) -> Arrays:
        if known and sample == 0:
            return known.arrays
        arrays = named_errors(lambda: network.run(seed, range(sample, sample + 1), inputs, draw, loss), subject, inputs)
        if sample == 0 and network.foreign:
            again, now = arrays | network.outputs, network.uses
            if now == uses:
                check_repeats(first, again, network)
            else:  # other weights are drawn than at the first call, by another pass's needs
                check_repeats(call_first(), again, network)
        return arrays

    def result(done: int) -> xr.Dataset:
        about = {**provenance(network), "seed": seed, "samples": done, "sequences": inputs.rows, "draw": draw}
        about |= ({"inputs": str(inputs)} if inputs.fixed else {}) | ({"loss": loss.name} if loss is not None else {})
        pairs = ((parts[0][key][0], each) for key in parts[0] for part in parts for each in part[key])
        if done > 1 and all(np.array_equal(a, b, equal_nan=True) for a, b in pairs):
            about["equal_samples"] = SEEDED if network.seeds_itself else CONSTANT_FACTORY
        about["wall_seconds"] = time.perf_counter() - began
        return dataset(parts, network.trained, network.read_where, network.stacks, inputs, about)

    parts = list[Arrays]()
    bar = progress_bar("networks without weights", samples, 0.0) if progress else None
    try:
        for sample in range(samples):
            arrays = one(sample)
            if not parts:
                require_room_for(arrays, samples)
            require_same_blocks(parts[0] if parts else arrays, arrays)
            parts.append(arrays)
            advance(bar, len(parts))
    except KeyboardInterrupt as interrupt:
        if not parts:
            raise  # nothing is finished
        raise Interrupted(result(len(parts))) from interrupt
    finally:
        advance(bar, -1)
    return result(samples)


def check_repeats(first: Arrays, again: Arrays, network: Weightless) -> None:
    """Raise `InputError` if a second call of the module with the same inputs returned other numbers."""
    tolerance = AGREEMENT[network.dtype]
    other = next(
        (key for key in first if key in again and not equal_up_to_rounding(first[key], again[key], tolerance)), None
    )
    require(
        other is None,
        f"{network.subject.name} returns another {other} when it is called again with the same inputs. "
        "Nearest: a forward that changes nothing outside the module.",
    )


def equal_up_to_rounding(a: NDArray[Any], b: NDArray[Any], tolerance: float) -> bool:
    """Whether two arrays are equal up to rounding."""
    if a.shape != b.shape:
        return False
    scale = np.max(np.abs(b[np.isfinite(b)]), initial=0.0)
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * 1e-3 * scale, equal_nan=True))


def named_errors(call: Callable[[], T], subject: Subject, inputs: Inputs) -> T:
    """Turn an exception of the module's own code into an `InputError` of one line."""
    try:
        return call()
    except (InputError, MemoryError):
        raise
    except Exception as error:  # the user's own code, which may raise anything
        if ALLOCATION.search(str(error)):
            raise InputError(
                f"{subject.name} with these inputs takes more memory than is free. Nearest: fewer tokens, smaller "
                "inputs, or a smaller network."
            ) from error
        what = f"{type(error).__name__}: {first_line(error)}{source_line(error)}"
        hint = longest(subject, inputs)
        if not hint and inputs.proposed:
            names = ", ".join(list(parameters_of(subject.kind))[:NAMED_ARGUMENTS])
            hint = f". It was called with {inputs}. Nearest: named tensors, for such arguments as {names}."
        raise InputError(f"{subject.name} cannot run with these inputs: {what}{hint}") from error


def longest(subject: Subject, inputs: Inputs) -> str:
    """Return the hint that inputs have more tokens than the configuration has positions."""
    positions = getattr(subject.config, "max_position_embeddings", None)
    if not isinstance(positions, int) or token_count(inputs) <= positions:
        return ""
    fits = 1 << (positions.bit_length() - 1)  # some families use the first two positions for padding
    return f". Nearest: --tokens {fits} (tokens={fits}); its max_position_embeddings is {positions}."


def source_line(error: BaseException) -> str:
    """Return file and line of the module's code that raised an error."""
    trace = error.__traceback__
    place = ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not any(part in name for part in ("/torch/", "/limitformer/", "/transformers/utils/")):
            place = f" ({name.rpartition('/')[2]}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return place


def token_count(inputs: Inputs) -> int:
    """Return the number of tokens of a sequence."""
    if inputs.tokens is not None:
        return int(inputs.tokens.factor.shape[0])
    first = next(iter(inputs.fixed.values()))
    return int(first.shape[1 - inputs.batch_dim]) if first.dim() in (2, 3) else 256


def largest_layer(network: Weightless, tokens: int, gradients: bool) -> int:
    """Return the bytes that the widest part of a pass needs."""
    widest = max((sum(shape[-2:]) for shape in network.matrices()), default=1)
    return (6 if gradients else 3) * tokens * widest * network.dtype.itemsize + 16 * tokens**2


def require_recordings(network: Weightless, inputs: Inputs, samples: int) -> None:
    """Raise `InputError` unless the covariances of all samples, with the copies that curves need, fit the memory.

    Only ids and rows of vectors show the number of tokens before a pass.
    """
    first = next(iter(inputs.fixed.values()), None)
    if first is not None and first.dim() != (3 if first.is_floating_point() else 2):
        return
    tokens = inputs.rows * token_count(inputs)
    needed = COPIES * samples * PLACES * len(network.layout.blocks) * 8 * tokens**2
    what = f"Recording {samples} networks of {len(network.layout.blocks):,} blocks with {tokens:,} tokens"
    try:
        check_scratch(needed, what, "fewer tokens, samples or layers")
    except InputError:
        tables = [each for each in network.weights if POSITIONS.search(each.name) and len(each.shape) == 2]
        short = [each for each in tables if first is not None and token_count(inputs) > each.shape[0]]
        if short:  # the more useful error
            raise row_error(short[0], 0, token_count(inputs) - 1) from None
        raise


def require_room_for(arrays: Arrays, samples: int) -> None:
    """Raise `InputError` unless the arrays of all samples, of which one is done, fit the memory with one copy."""
    each = sum(array.nbytes for array in arrays.values())
    if samples > 1:
        what = f"Recording {samples} samples, which take {readable(each)} each,"
        check_scratch(each * (2 * samples - 1), what, "fewer samples, smaller inputs, or other blocks")


def provenance(network: Weightless) -> dict[str, Any]:
    """Return the attributes of the dataset: network, laws, uses of weights, versions."""
    uses = network.uses
    ways = {way: sum(how == way for how in uses.values()) for way in sorted(set(uses.values()))}
    return {
        **stamp(str(network.dtype).removeprefix("torch.")),
        "description": "weightless network",
        "model": network.subject.name,
        "parameters": network.table.count,
        "weights": ", ".join(f"{count} {way}" for way, count in ways.items()),
        "kept": "; ".join(f"{name}: {reason}" for name, reason in network.reasons.items()),
        "laws": str(network.table),
        **({"opaque": ", ".join(sorted(network.opaque))} if network.opaque else {}),
        "blocks": blocks_in_words(network.stacks, network.module),
        "torch": torch.__version__,
        "device": str(network.device),
    }
