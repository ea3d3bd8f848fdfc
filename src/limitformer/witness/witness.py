"""`witness_pass`: complete the weights of one weightless sample, and run the user's own module with them."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from limitformer.base.errors import first_line
from limitformer.base.memory import available_memory, readable
from limitformer.initialisation.weight_by_weight import check_initialisation
from limitformer.nn.drawn.simulate import torch_seed
from limitformer.subjects.inputs import Inputs, inputs_of
from limitformer.subjects.losses import Loss
from limitformer.subjects.subject import Subject, resolve
from limitformer.weightless.building import drawn_module
from limitformer.weightless.implicit import Implicit
from limitformer.weightless.network import Weightless
from limitformer.weightless.reachable import State
from limitformer.weightless.run import AUTO, NEVER, WeightlessRun
from limitformer.weightless.simulate import accepted_inputs
from limitformer.weightless.tensors import same_numbers
from limitformer.weightless.threads import one_thread
from limitformer.witness.compare import DELTA, DRAWN, NOT_WITNESSED, Witness, compare
from limitformer.witness.complete import identity_error, weights_of_pass
from limitformer.witness.real import (
    GRADIENT,
    LOSS,
    OUTPUT,
    CastsAsCopies,
    Quantity,
    Values,
    disturb,
    note_outputs,
    number,
    outputs_noted,
    real_pass,
)
from limitformer.witness.reduce import reduced

MOST_IN_FLOAT64, MOST_WHOLE = 20_000_000, 200_000_000  # parameters
COPIES = 3  # of the weights: the module's, their gradients, and the completed ones
SHARE = 0.25  # of the free memory
TOKENS = 16  # of a reduced copy
LEVEL = 1e-6  # probability at which a sound law is taken for a wrong one
FULL = "full"
COPIED = "copies"  # a kind of finding: equal layers, which a simulation knows by the source of their numbers


def witness_pass(
    network: Weightless, inputs: Inputs, loss: Loss | None, seed: int, draw: str = AUTO, how: bool | str = True
) -> Witness:
    """Compare a pass of the first sample with the user's own module in plain PyTorch.

    Up to 20 million parameters in float64; else in float32 at full size, if that fits a quarter of the free memory;
    else, or above 200 million, by a reduced copy in float64, if the model is a configuration of transformers.

    Args:
        network: whose sample it is.
        inputs: of the pass, settled.
        loss: None for a forward pass alone.
        seed: of the sample.
        draw: as for `limitformer.weightless.simulate`.
        how: "full" for the full size, whatever its memory.
    """
    began, size, config = time.perf_counter(), network.table.count, network.subject.config
    if network.drawn:
        return drawn(network)
    dtypes = (torch.float64, torch.float32) if size <= MOST_IN_FLOAT64 else (torch.float32,)
    free, needed = available_memory(), COPIES * size * dtypes[0].itemsize
    large = free is not None and needed > SHARE * free
    small = how != FULL and config is not None and (large or size > MOST_WHOLE)
    absent = Witness(NOT_WITNESSED, f"the module needs {readable(needed)}", parameters=size)
    if how != FULL and large and not small:
        return absent

    def compare_in(of_copy: bool, dtype: torch.dtype) -> Witness:
        if of_copy:
            copy = Weightless(resolve(reduced(config)), dtype, torch.device("cpu"))
            others = accepted_inputs(inputs_of(TOKENS, copy.subject), copy, seed, own_loss=False)
            return witness_in(copy, others, loss, seed, NEVER)
        same = dtype == network.dtype and network.device.type == "cpu"
        laws = {name: network.laws[name] for name in network.overridden}
        one = network if same else Weightless(network.subject, dtype, torch.device("cpu"), laws)
        return witness_in(one, inputs, loss, seed, draw)

    tries = [(small, dtype) for dtype in ((torch.float64, torch.float32) if small else dtypes)]
    return replace(first_that_tells(tries, compare_in, absent), seconds=time.perf_counter() - began)


def first_that_tells(
    tries: list[tuple[bool, torch.dtype]],
    compare_in: Callable[[bool, torch.dtype], Witness],
    result: Witness,
) -> Witness:
    """Return the first comparison that says something; some formulas are not finite, or do not run, in float64.

    A small difference in float64 is decided with casts to float32 as copies, if that witnesses the module.

    Args:
        tries: whether a reduced copy is compared, and in which number format.
        compare_in: takes these, and returns the comparison.
        result: returned if there is nothing to try.
    """

    def compared(of_copy: bool, dtype: torch.dtype, mode: AbstractContextManager[Any]) -> Witness:
        try:
            with one_thread(), mode:
                return replace(compare_in(of_copy, dtype), reduced=of_copy)
        except Exception as error:  # the user's own code, which may raise anything  # noqa: BLE001
            return replace(result, reason=f"the comparison fails: {type(error).__name__}: {first_line(error)}")

    for each in tries:
        result = compared(*each, nullcontext())
        if result.may_be_casts:  # whose rounding the program amplifies
            copied = compared(*each, CastsAsCopies(torch.float32))
            if copied.status == NOT_WITNESSED:  # the code does not run so: a comparison in float32 decides
                continue
            result = copied
        if result.status != NOT_WITNESSED:
            break
    return result


def drawn(network: Weightless) -> Witness:
    """Return why the model's own code draws the networks."""
    name, reason = next(iter(network.drawn.items()))
    return Witness(DRAWN, f"{name}: {reason}", parameters=network.table.count)


def witness_in(network: Weightless, inputs: Inputs, loss: Loss | None, seed: int, draw: str) -> Witness:
    """Compare a pass in the number format of a network."""
    about: dict[str, Any] = {
        "number_format": str(network.dtype).removeprefix("torch."),
        "parameters": network.table.count,
    }
    simulated, run = simulated_pass(network, inputs, loss, seed, draw)
    if network.drawn:  # the pass has shown that it must be
        return drawn(network)
    with real_module(network.subject, network.dtype, seed) as module:
        if wrong := wrong_law(module, network) or fill(module, network, weights_of_pass(run, network.weights, seed)):
            return Witness(DRAWN, wrong, **about)
        identity = max(map(identity_error, (run.products or {}).values()), default=0.0)
        run.products = None
        real, disturbed, state = Values(), Values(), State(module)
        real_pass(module, arguments_of(inputs, seed, network.dtype), loss, real)
        state.restore()
        delta = DELTA[network.dtype]
        disturb(module, delta)
        real_pass(module, arguments_of(inputs, seed, network.dtype), loss, disturbed)
    if not all(math.isfinite(each.size) for key, each in real.items() if key.kind in (OUTPUT, LOSS)):
        return Witness(NOT_WITNESSED, "its output is not finite", **about)
    return compare(simulated, real, disturbed, delta, identity=identity, **about)


def arguments_of(inputs: Inputs, seed: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of a pass of the first sample, without gradients and with memory of their own."""
    arguments = inputs.of(seed, range(1), dtype)
    return {name: each.detach().clone() if isinstance(each, Tensor) else each for name, each in arguments.items()}


def simulated_pass(
    network: Weightless, inputs: Inputs, loss: Loss | None, seed: int, draw: str
) -> tuple[Values, WeightlessRun]:
    """Run the first sample without weights; return what is compared of it, and the pass with its products."""

    def call(run: WeightlessRun) -> tuple[Values, WeightlessRun]:
        run.products = {}
        values, arguments = Values(), network.arguments(run, inputs)
        with torch.set_grad_enabled(loss is not None):
            with outputs_noted(network.module, values):
                out = network.call(arguments)
            note_outputs(out, values)
            if loss is not None:
                arrays = network.backward(out, arguments, loss, run)
                values[Quantity(LOSS)] = number(arrays["loss"][0])
                for name, norm in zip(network.trained, arrays["weight_gradient"][0], strict=True):
                    if not math.isnan(norm):
                        values[Quantity(GRADIENT, name)] = number(norm)
        return values, run

    values, run = network.until_it_runs(seed, range(1), inputs, draw, loss, call)
    return values, run


@contextmanager
def real_module(subject: Subject, dtype: torch.dtype, seed: int) -> Iterator[nn.Module]:
    """Build the user's module, with the numbers that its code draws from this seed.

    Tensors that the code shares between networks, or with the user's program, get their numbers back.
    """
    module = drawn_module(subject.factory, dtype, torch_seed(seed, "weightless build 0"))
    modes = [(part, part.training) for part in module.modules()]
    tensors = [(each, each.data, each.detach().clone()) for each in (*module.parameters(), *module.buffers())]
    try:
        yield module.eval().to(dtype)
    finally:
        for part, mode in modes:
            part.training = mode
        for each, data, numbers in tensors:
            if not same_numbers(data, numbers):  # an expanded buffer cannot be written
                data.copy_(numbers)
            each.data = data
        module.zero_grad()


def wrong_law(module: nn.Module, network: Weightless) -> str:
    """Return the first weight of a real build that does not follow the law that was read; else nothing."""
    if network.overridden:
        return ""
    report = check_initialisation(module, network.table, level=LEVEL)
    lawful = [each for each in report.findings if each.p <= LEVEL and network.laws[each.names[0]].random]
    finding = next((each for each in lawful if each.kind != COPIED), None)
    return "" if finding is None else f"{finding.pattern} holds {finding.entries}, where {finding.law} was read"


def fill(module: nn.Module, network: Weightless, weights: Mapping[str, Tensor | dict[int | None, Tensor]]) -> str:
    """Give a module the numbers of a sample; return which constant differs from the simulated one, or nothing.

    Args:
        weights: those that were completed, whole, or by slice or row; a random weight that is missing was never used.
    """
    if network.state is not None:
        network.state.restore()  # a pass may have changed buffers
    ours = {**dict(network.module.named_parameters()), **dict(network.module.named_buffers())}
    with torch.no_grad():
        for name, each in [*module.named_parameters(), *module.named_buffers()]:
            other = ours.get(name)
            if other is None:
                return f"{name} of the module is not in the simulation"
            if not isinstance(other, Implicit):
                free = network.rebuilt or name in network.overridden or not each.is_floating_point()
                if not free and not torch.allclose(each, other, rtol=1e-5, atol=1e-8, equal_nan=True):
                    return f"{name} has other numbers when it is built again"
                if not same_numbers(each, other):  # an expanded buffer cannot be written
                    each.copy_(other)
            value = weights.get(name, {})
            for part, one in ({None: value} if isinstance(value, Tensor) else value).items():
                target = each if part is None else each[part]
                target.copy_(one.reshape(target.shape))
    return ""
