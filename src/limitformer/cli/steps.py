"""`limitformer steps`: the first training steps in law, and which learning rates a network takes."""

import math
from typing import Annotated, Any

import typer

from limitformer.base.errors import InputError, about, require, require_count
from limitformer.base.progress import suggest_quicker
from limitformer.cli.endings import INTERRUPTED, begin_work
from limitformer.cli.options import (
    SEQUENCES,
    AfterGroups,
    Blocks,
    Clip,
    Full,
    InputsOption,
    Json,
    LossOption,
    Optimizer,
    Settings,
    Text,
    Tokens,
    TrustRemoteCode,
    Warmup,
    What,
    WitnessOption,
    assignments,
    folder_of,
    names_code,
    one_of,
    require_known,
    require_readable,
    separated,
    subject_and_batch,
    user_loss,
    user_object,
    witness_of,
)
from limitformer.cli.report import errors_in_one_line, print_interrupted, print_next, save_and_print
from limitformer.stepping.updates import OPTIMIZERS

FAILED = 1
MOST_RATES = 100


def with_option(key: str) -> str:
    """Return the names of the optimisers that have an option."""
    *most, last = (name for name, one in OPTIMIZERS.items() if key in one.names())
    return f"{', '.join(most)} and {last}"


def steps(
    context: typer.Context,
    what: What,
    optimizer: Optimizer,
    after_groups: AfterGroups = None,
    rates: Annotated[
        str | None,
        typer.Option(
            metavar="LOW:HIGH:N",
            help="Learning rates, N of them from LOW to HIGH by equal factors, or one or several with commas.",
            show_default="the optimiser's own",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Number of steps.")] = 3,
    samples: Annotated[int, typer.Option(help="Networks; 35 can show that a loss falls in nine of ten.")] = 8,
    tokens: Tokens = 32,
    sequences: Annotated[
        str | None,
        typer.Option(
            metavar="B[,fresh]", help=f"{SEQUENCES} fresh: other random ones at every step.", show_default="as given"
        ),
    ] = None,
    text: Text = None,
    inputs: InputsOption = None,
    settings: Settings = None,
    loss: LossOption = None,
    clip: Clip = None,
    weight_decay: Annotated[
        float | None, typer.Option(help="Weight decay.", show_default="the optimiser's own")
    ] = None,
    betas: Annotated[
        str | None,
        typer.Option(metavar="B1,B2", help=f"Of {with_option('betas')}.", show_default="the optimiser's own"),
    ] = None,
    momentum: Annotated[
        float | None, typer.Option(help=f"Of {with_option('momentum')}.", show_default="the optimiser's own")
    ] = None,
    warmup: Warmup = 0,
    fail_on: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Verdicts that end with exit code 1: rate,still, or broken, watch, any."),
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Folder for steps.html, .csv, .json and .nc.")] = None,
    seed: Annotated[int, typer.Option(help="Seed; the same seed gives the same numbers.")] = 0,
    blocks: Blocks = None,
    trust_remote_code: TrustRemoteCode = False,
    witness: WitnessOption = "auto",
    as_json: Json = False,
    full: Full = False,
) -> None:
    """Compute the first training steps in law: which learning rates a network takes, and what moves.

    For example: limitformer steps gpt2 --optimizer adamw --rates 1e-5:1e-1:5 --steps 3 --out steps

    Gradients come from these tokens alone; a larger batch has other gradients, and nothing is said about later steps.
    """
    with errors_in_one_line():
        from limitformer.checking.thresholds import STEP_VERDICTS, failing

        with about("--fail-on"):
            failing(fail_on, STEP_VERDICTS)
        every = rates_of(rates)
        count, fresh = sequences_of(sequences)
        options: dict[str, Any] = {
            "rates": every,
            "steps": require_count("--steps", steps),
            "samples": require_count("--samples", samples),
            "sequences": count,
            "clip": clip,
            "warmup": require_count("--warmup", warmup, least=0),
            "batches": "fresh" if fresh else "same",
            "seed": seed,
            "blocks": blocks or None,
            "witness": witness_of(witness),
        }
        changes = assignments(settings, "--set")
        fits = clip is None or 0 < clip < math.inf
        require(fits, f"--clip must be above 0 and finite; got {clip}.")
        require_count("--tokens", tokens, least=2)
        rule = optimizer_of(optimizer, {"weight_decay": weight_decay, "betas": betas, "momentum": momentum})
        require_known(what, inputs, loss, optimizer, after_groups)
        require_readable(text, inputs)
        require(text is None or inputs is None, "--text and --inputs cannot both be given.")
        from limitformer.checking import StepsInterrupted
        from limitformer.checking import steps as run_steps

        place = folder_of(out)
        begin_work()
        options["loss"] = user_loss(loss)
        if isinstance(rule, str):
            rule = user_object(rule, "--optimizer")
        options["after_groups"] = user_object(after_groups, "--after-groups") if after_groups else None
        subject, batch = subject_and_batch(what, changes, trust_remote_code, text, inputs, tokens, count)
        name_and_rates = f"{samples} networks at {len(every)} rates" if every else f"{samples} networks"
        quicker = f"{name_and_rates}; --samples {samples // 2} takes about half." if samples > 1 else name_and_rates
        try:
            with suggest_quicker(quicker):
                report = run_steps(subject, batch, optimizer=rule, **options)
        except StepsInterrupted as interrupt:
            save_and_print(interrupt.report, place, as_json, full)
            print_interrupted(interrupt.report.data.sizes["sample"])
            raise typer.Exit(INTERRUPTED) from interrupt
        save_and_print(report, place, as_json, full)
        if any(each.said.startswith("not decided") for each in report.verdicts):
            print_next(context, "rate", sequences=count)
        if report.failed(fail_on):
            raise typer.Exit(FAILED)


def rates_of(text: str | None) -> list[float] | None:
    """Read LOW:HIGH:N, or rates with commas between.

    >>> rates_of("1e-4:1e-2:3"), rates_of("0.1,0.2")
    ([0.0001, 0.001, 0.01], [0.1, 0.2])
    """
    if text is None:
        return None
    if ":" not in text:
        result = checked_rates(text)
        require(len(set(result)) == len(result), f"--rates gives a rate twice; got {text!r}.")
    else:
        parts = text.split(":")
        fits = len(parts) == 3 and "," not in text
        require(fits, f"--rates takes LOW:HIGH:N, such as 1e-5:1e-2:7, or 1e-4,1e-3; got {text!r}.")
        low, high = checked_rates(",".join(parts[:2]))
        require(
            low < high,
            f"--rates takes LOW:HIGH:N with LOW below HIGH; got {text!r}. Nearest: {high:g}:{low:g}:{parts[2]}",
        )
        require(parts[2].strip().isdigit(), f"--rates takes a whole number N in LOW:HIGH:N; got {parts[2]!r}.")
        count = require_count("N in --rates LOW:HIGH:N", int(parts[2][:9]), least=2)
        require(count <= MOST_RATES, f"--rates takes at most {MOST_RATES} rates; got {count}.")
        factor = math.log(high / low) / (count - 1)
        result = [float(f"{low * math.exp(k * factor):.6g}") for k in range(count)]
    require(len(result) <= MOST_RATES, f"--rates takes at most {MOST_RATES} rates; got {len(result)}.")
    return result


def sequences_of(text: str | None) -> tuple[int | None, bool]:
    """Read B, fresh, or both: the number of sequences, and whether other tokens are drawn at every step.

    >>> sequences_of("16"), sequences_of("fresh"), sequences_of("16,fresh")
    ((16, False), (None, True), (16, True))
    """
    takes, words = "--sequences takes B, fresh, or B,fresh, such as 16,fresh", [] if text is None else text.split(",")
    numbers = [each for each in words if each != "fresh"]
    require(len(numbers) < 2, f"{takes}; got {text!r}.")
    count = separated(numbers[0], takes, int)[0] if numbers else None
    return count if count is None else require_count("--sequences", count), len(words) > len(numbers)


def checked_rates(text: str) -> list[float]:
    from limitformer.checking.thresholds import valid_rate

    return [valid_rate("--rates", each) for each in separated(text, "--rates takes numbers, such as 1e-3")]


def optimizer_of(name: str, options: dict[str, Any], option: str = "--optimizer") -> Any:
    """Return the optimiser as a dictionary of its options, or the text that names a user's function."""
    values = {key: value for key, value in options.items() if value is not None}
    if names_code(name):
        used = ", ".join(f"--{key.replace('_', '-')}" for key in values)
        require(not values, f"{used}: a function sets its options itself; {name} is one.")
        return name
    one_of(name, tuple(OPTIMIZERS), f"{option} is not FILE.py:NAME, and has no")
    for key in {"betas", "momentum"} & values.keys() - {*OPTIMIZERS[name].names()}:
        raise InputError(f"--{key} is for {with_option(key)}, not for {name}.")
    if "betas" in values:
        values["betas"] = betas_of(values["betas"])
    if "momentum" in values:
        require(0 <= values["momentum"] < 1, f"--momentum must lie in [0, 1); got {values['momentum']:g}.")
    decay = values.get("weight_decay", 0.0)
    require(0 <= decay < math.inf, f"--weight-decay must be 0 or above, and finite; got {decay:g}.")
    return {"name": name, **values}


def betas_of(text: str) -> tuple[float, float]:
    takes = "--betas takes two numbers in [0, 1), such as 0.9,0.95"
    betas = separated(text, takes)
    require(len(betas) == 2 and all(0 <= each < 1 for each in betas), f"{takes}; got {text!r}.")
    return betas[0], betas[1]
