"""`limitformer rate`: the largest learning rate that nine of ten networks bear."""

import math
from typing import Annotated, Any

import typer

from limitformer.base.errors import InputError, require, require_count
from limitformer.base.progress import suggest_quicker
from limitformer.cli.endings import INTERRUPTED, begin_work
from limitformer.cli.options import (
    AfterGroups,
    Clip,
    Full,
    InputsOption,
    Json,
    LossOption,
    Optimizer,
    Sequences,
    Settings,
    Text,
    Tokens,
    TrustRemoteCode,
    Warmup,
    What,
    WitnessOption,
    assignments,
    folder_of,
    require_known,
    require_readable,
    subject_and_batch,
    user_loss,
    user_object,
    witness_of,
)
from limitformer.cli.report import errors_in_one_line, is_given, print_interrupted, print_next, save_and_print
from limitformer.cli.steps import optimizer_of

FOR_A_SEARCH = ("steps", "minutes", "warmup", "witness")  # options that --equivalent-to does not have


def rate(
    context: typer.Context,
    what: What,
    optimizer: Optimizer,
    after_groups: AfterGroups = None,
    steps: Annotated[int, typer.Option(help="Steps after which the loss must be lower than before.")] = 3,
    networks: Annotated[
        int | None, typer.Option(help="Largest number of networks.", show_default="40; 4 for --equivalent-to")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time after which no further network begins.")] = 10.0,
    tokens: Tokens = 32,
    sequences: Sequences = None,
    text: Text = None,
    inputs: InputsOption = None,
    settings: Settings = None,
    loss: LossOption = None,
    clip: Clip = None,
    warmup: Warmup = 0,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Folder for rate.html, .csv, .json and .nc.")] = None,
    at: Annotated[
        float | None, typer.Option("--rate", help="Rate of --optimizer, for --equivalent-to.", show_default="its own")
    ] = None,
    equivalent_to: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Another optimiser, or FILE.py:NAME: which rate of it does the same?"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed; the same seed gives the same networks.")] = 0,
    trust_remote_code: TrustRemoteCode = False,
    witness: WitnessOption = "auto",
    as_json: Json = False,
    full: Full = False,
) -> None:
    """Search the largest learning rate that nine of ten networks bear, and the range to tune in.

    For example: limitformer rate model.py:build --optimizer train.py:make --inputs train.py:batch

    Give the batch of training: a smaller one has other gradients. Ctrl-C keeps the networks that are finished.

    With --equivalent-to: the rate at which another optimiser moves the stream as --optimizer does, by kind of weight,
    such as: limitformer rate gpt2 --optimizer muon --rate 0.02 --equivalent-to adamw
    """
    with errors_in_one_line():
        largest = networks if networks is not None else 40 if equivalent_to is None else 4
        options: dict[str, Any] = {
            "steps": require_count("--steps", steps),
            "networks": require_count("--networks", largest),
            "minutes": minutes,
            "sequences": None if sequences is None else require_count("--sequences", sequences),
            "clip": clip,
            "warmup": require_count("--warmup", warmup, least=0),
            "seed": seed,
            "witness": witness_of(witness),
        }
        require(0 < minutes < math.inf, f"--minutes must be above 0 and finite; got {minutes:g}.")
        require(clip is None or 0 < clip < math.inf, f"--clip must be above 0 and finite; got {clip}.")
        require_count("--tokens", tokens, least=2)
        unused = [f"--{name}" for name in FOR_A_SEARCH if is_given(context, name)]
        require(
            equivalent_to is None or not unused,
            f"{' and '.join(unused)}: --equivalent-to compares the first step alone, and has no such option.",
        )
        changes = assignments(settings, "--set")
        rule = optimizer_of(optimizer, {})
        other = None if equivalent_to is None else optimizer_of(equivalent_to, {}, "--equivalent-to")
        require(at is None or equivalent_to is not None, "--rate is for --equivalent-to; a search begins anywhere.")
        require_known(what, inputs, loss, optimizer, after_groups, equivalent_to)
        require_readable(text, inputs)
        require(text is None or inputs is None, "--text and --inputs cannot both be given.")
        from limitformer.rates.equivalent import equivalent_rates
        from limitformer.rates.rate import RateInterrupted
        from limitformer.rates.rate import rate as run_rate

        place = folder_of(out)
        begin_work()
        options["loss"] = user_loss(loss)
        if isinstance(rule, str):
            rule = user_object(rule, "--optimizer")
        options["after_groups"] = user_object(after_groups, "--after-groups") if after_groups else None
        if isinstance(other, str):
            other = user_object(other, "--equivalent-to")
        subject, batch = subject_and_batch(what, changes, trust_remote_code, text, inputs, tokens, sequences)
        try:
            if other is not None:
                known = {key: options[key] for key in ("after_groups", "clip", "loss", "seed", "networks", "sequences")}
                with suggest_quicker(f"{largest} networks; --networks 2 takes less."):
                    equal = equivalent_rates(subject, batch, optimizer=rule, other=other, rate=at, **known)
                save_and_print(equal, place, as_json)
                return
            with suggest_quicker(
                f"fewer than {largest} networks if they decide, and none begins after {minutes:g} min."
            ):
                report = run_rate(subject, batch, optimizer=rule, **options)
        except RateInterrupted as interrupt:
            save_and_print(interrupt.report, place, as_json, full)
            print_longer(context, interrupt.report, largest, minutes)
            print_interrupted(interrupt.report.networks)
            raise typer.Exit(INTERRUPTED) from interrupt
        save_and_print(report, place, as_json, full)
        print_longer(context, report, largest, minutes)
        if report.tunable:
            middle, width = f"{report.next_rate:.2g}", width_of(what, changes)
            if width is None:
                print_next(context, "steps", rates=middle)
            else:
                print_next(context, "transfer", rate=middle, widths=f"{width},{2 * width}", target=4 * width)


def print_longer(context: typer.Context, report: Any, networks: int, minutes: float) -> None:
    """Print the command that would decide, unless the report does, or critical rates are not numbers."""
    if not report.decided and not report.unusual() and not report.hopeless:
        more, seconds = report.missing
        longer = (float(report.data["seconds"].sum()) + 1.3 * seconds) / 60
        enough = max(networks, report.networks + more), math.ceil(max(minutes, longer))
        label = "To decide" if report.tunable else "Next"
        print_next(context, "rate", label, networks=enough[0], minutes=enough[1])


def width_of(what: str, changes: dict[str, Any]) -> int | None:
    """Return the width of a model that has other widths; None for others."""
    from limitformer.scaling.sizes import WIDTH, present_size
    from limitformer.subjects.subject import model_of

    try:
        return present_size(model_of(what, changes), WIDTH)
    except InputError:
        return None
