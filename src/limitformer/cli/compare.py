"""`limitformer compare BASE HEAD`: is a model better or worse after a change?"""

from typing import Annotated, Any

import typer

from limitformer.base.errors import require_count
from limitformer.base.progress import suggest_quicker
from limitformer.cli.endings import begin_work
from limitformer.cli.options import (
    InputsOption,
    Json,
    LossOption,
    Tokens,
    TrustRemoteCode,
    assignments,
    folder_of,
    one_of,
    quicker,
    require_known,
    require_readable,
    user_inputs,
    user_loss,
)
from limitformer.cli.report import errors_in_one_line, print_next, save_and_print

FAILED, WORSE = 1, "worse"


def compare(
    context: typer.Context,
    base: Annotated[str, typer.Argument(metavar="BASE", help="The model before the change, as 'check' takes it.")],
    head: Annotated[str, typer.Argument(metavar="HEAD", help="The model after it.")],
    inputs: InputsOption = None,
    tokens: Tokens = 128,
    samples: Annotated[int, typer.Option(help="Pairs of networks.")] = 8,
    loss: LossOption = None,
    fail_on: Annotated[str | None, typer.Option(metavar=WORSE, help="Exit code 1 if the change is worse.")] = None,
    threshold: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Another threshold, such as collapse=0.99.")
    ] = None,
    as_json: Json = False,
    out: Annotated[str | None, typer.Option(metavar="PATH", help="Folder for paired.html, .json and .nc.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of both.")] = 0,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Tell whether a model is better or worse after a change: two laws at initialisation, in pairs of networks.

    For example: limitformer compare before/model.py:build model.py:build --fail-on worse
    """
    with errors_in_one_line():
        one_of(fail_on or WORSE, (WORSE,), "--fail-on has no")
        require_count("--samples", samples, least=2)
        for one in (base, head):
            require_known(one, inputs, loss)
        require_readable(None, inputs)
        from limitformer.checking import PairedComparison
        from limitformer.checking import compare as run_compare

        place = folder_of(out)
        begin_work()
        options: dict[str, Any] = {
            "tokens": tokens,
            "samples": samples,
            "seed": seed,
            "trust_remote_code": trust_remote_code,
        }
        options |= {"thresholds": assignments(threshold, "--threshold"), "loss": user_loss(loss)}
        with suggest_quicker(quicker("--samples", samples)):
            batch = None if inputs is None else user_inputs(inputs)
            both = run_compare({f"base: {base}": base, f"head: {head}": head}, batch, **options)
        result = PairedComparison(both.reports)
        save_and_print(result, place, as_json)
        if result.worse():
            print_next(context, "check", what=[head], against=base, fail_on=None)
        if fail_on and result.worse():
            raise typer.Exit(FAILED)
