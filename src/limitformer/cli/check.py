"""`limitformer check`: will this Transformer collapse? A verdict, curves, and a page."""

from pathlib import Path
from typing import Annotated, Any

import typer

from limitformer.base.errors import InputError, require
from limitformer.cli.check_options import Settings, Text, Tokens, assignments, say
from limitformer.cli.check_report import next_command, print_report
from limitformer.cli.report import errors_in_one_line

FAILED = 1


def check(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="A public shape ('list' shows them), a configuration's JSON or folder, or a checkpoint.",
        ),
    ],
    text: Text = None,
    tokens: Tokens = 128,
    samples: Annotated[int, typer.Option(help="Networks of the law.")] = 8,
    settings: Settings = None,
    shaped: Annotated[
        str | None, typer.Option(metavar="gamma=…,tau0=…", help="Shape it first, as limitformer.hf.shape_model does.")
    ] = None,
    against: Annotated[str | None, typer.Option(metavar="WHAT2", help="Another one, side by side.")] = None,
    gradients: Annotated[
        bool, typer.Option("--gradients/--no-gradients", help="Whether a loss is differentiated.")
    ] = True,
    fail_on: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Verdicts that end with exit code 1: collapsed,frozen, or broken, watch, any."
        ),
    ] = None,
    threshold: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Another threshold, such as collapse=0.99.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for check.html, .png, .nc and .json.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the law's samples.")] = 0,
) -> None:
    """Tell whether a Transformer collapses, explodes or freezes: the exact law at initialisation, or a checkpoint.

    For example: limitformer check llama-3-8b --set initializer_range=0.006 --against llama-3-8b
    """
    with errors_in_one_line():
        if what == "list":
            show_shapes()
            return
        from limitformer.checking import check as checked  # first: without an extra it names the one that has it
        from limitformer.checking.verdicts import failing
        from limitformer.running.results import check_writable

        # isort: split
        from transformers.utils import logging

        logging.set_verbosity_error()  # what is wrong is said in one line
        names = failing(fail_on)  # before any work is done
        if out is not None:
            check_writable(out)
        report = checked(
            what,
            text,
            tokens=tokens,
            samples=samples,
            gradients=gradients,
            against=against,
            settings=assignments(settings, "--set"),
            shaping=shaping_of(shaped),
            thresholds=assignments(threshold, "--threshold"),
            seed=seed,
        )
        print_report(report)
        blind = {"frozen", "uniform"} & set(names) if fail_on != "any" and "logit_std" not in report.curves else ()
        require(not blind, f"--fail-on {', '.join(blind)}: no attention was seen in {report.name}.")
        if report.against is not None:
            print_report(report.against)
        if out is not None:
            say("Wrote " + ", ".join(map(str, report.save(out))))
        say("\n" + next_command(report, what, settings, shaped is not None, out))
        judged = not (fail_on and report.trained)
        require(judged, f"--fail-on: {report.name} is trained, so that no verdict on its initialisation is given.")
        if report.failed(fail_on):
            raise typer.Exit(FAILED)


def show_shapes() -> None:
    """The names of the public shapes, and where their numbers are published."""
    from limitformer.weightless import shapes

    for name, numbers in shapes().items():
        say(f"{name:18} {numbers['source']}")


def shaping_of(given: str | None) -> Any:
    """gamma=…,tau0=… as a `Shaping`; gamma is its residual_gamma."""
    if given is None:
        return None
    from limitformer.hf import Shaping

    values = assignments(given.split(","), "--shaped")
    if "gamma" in values:
        values["residual_gamma"] = values.pop("gamma")
    try:
        return Shaping(**values)
    except TypeError as error:
        raise InputError(f"--shaped: {error}. There are gamma, tau0, gamma1, gamma2, shaped_relu, per_head.") from error
