"""`limitformer design`: what to set before training, from the law alone."""

from pathlib import Path
from typing import Annotated, Any

import typer

from limitformer.base.errors import InputError, require
from limitformer.cli.check_options import Settings, Text, Tokens, assignments, say
from limitformer.cli.report import errors_in_one_line

Asked = Annotated[str | None, typer.Option(metavar="LOW,HIGH", help="Band that is asked, or none to ask nothing.")]


def design(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="A public shape ('limitformer check list' shows them), a configuration's JSON or folder, or the "
            "JSON of a Transformer ('limitformer simulate --show-model' prints it).",
        ),
    ],
    text: Text = None,
    knobs: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="One or two of initializer_range, embedding, output, logits and patterns of weights' names; gamma, "
            "tau0 for a Transformer.",
            show_default="initializer_range,output",
        ),
    ] = None,
    correlation: Asked = None,
    stream: Asked = None,
    effective: Asked = None,
    gradient: Annotated[
        str | None, typer.Option(metavar="MOST", help="Largest over smallest gradient by block, or none.")
    ] = None,
    risk: Annotated[float, typer.Option(help="Probability that a network may miss it.")] = 0.1,
    tokens: Tokens = 32,
    samples: Annotated[
        int | None, typer.Option(help="Networks that judge a setting.", show_default="64, or 1000 by the chain")
    ] = None,
    scan: Annotated[
        int | None, typer.Option(help="Networks of a cell of the grid at most.", show_default="16, or 200 by the chain")
    ] = None,
    settings: Settings = None,
    grid: Annotated[
        list[str] | None, typer.Option(metavar="KNOB=V1,V2,…", help="Values of a knob in the place of the usual ones.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for design.json, .png and .nc.")] = None,
    seed: Annotated[int, typer.Option(help="Seed; what is chosen is judged by fresh ones.")] = 0,
) -> None:
    """Find what to set so that a network at initialisation is sound, how sure that is, and the lines to paste.

    For example: limitformer design gpt2 --set n_layer=48 --correlation -0.2,0.4 --out gpt2-48
    """
    with errors_in_one_line():
        from limitformer.checking import DesignInterrupted
        from limitformer.checking import design as designed
        from limitformer.running.results import check_writable

        asked = {"correlation": correlation, "stream": stream, "effective": effective, "gradient": gradient}
        objective = {name: band_of(name, given) for name, given in asked.items() if given is not None}
        if out is not None:
            check_writable(out)
        try:
            found = designed(
                what,
                text,
                knobs=None if knobs is None else knobs.split(","),
                objective=objective,
                risk=risk,
                tokens=tokens,
                samples=samples,
                scan=scan,
                grid={name: values_of(name, given) for name, given in assignments(grid, "--grid").items()},
                settings=assignments(settings, "--set"),
                seed=seed,
            )
        except DesignInterrupted as interrupt:
            keep_partial(interrupt, out)
            raise
        say(str(found))
        say(f"\n{found.python()}")
        if out is not None:
            say("Wrote " + ", ".join(map(str, found.save(out))))


def band_of(name: str, given: str) -> Any:
    """LOW,HIGH as numbers, or None; one number for the gradient."""
    if given == "none":
        return None
    try:
        ends = [float(end) for end in given.split(",")]
    except ValueError as error:
        raise InputError(f"--{name} takes numbers, or none; got {given!r}.") from error
    wanted = 1 if name == "gradient" else 2
    require(len(ends) == wanted, f"--{name} takes {'one number' if wanted == 1 else 'LOW,HIGH'}; got {given!r}.")
    return ends[0] if wanted == 1 else tuple(ends)


def values_of(name: str, given: Any) -> list[float]:
    """V1,V2,… as numbers."""
    try:
        return [float(value) for value in str(given).split(",")]
    except ValueError as error:
        raise InputError(f"--grid {name} takes numbers; got {given!r}.") from error


def keep_partial(interrupt: Any, out: Path | None) -> None:
    """The region so far, in the folder that was asked for."""
    from limitformer.running.results import save

    if out is not None:
        say(f"Wrote {save(interrupt.partial, out / 'design.nc')}: the region so far.")
        interrupt.resumes = True  # so that the last line says how far it came
