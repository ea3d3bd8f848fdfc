"""`limitformer design`: what to set before training, from the law alone."""

from pathlib import Path
from typing import Annotated, Any

import typer

from limitformer.base.errors import require, require_count
from limitformer.base.progress import suggest_quicker
from limitformer.cli.endings import begin_work
from limitformer.cli.options import (
    InputsOption,
    LossOption,
    Settings,
    Text,
    Tokens,
    assignments,
    complete_shape,
    folder_of,
    one_of,
    require_known,
    require_readable,
    separated,
    user_inputs,
    user_loss,
)
from limitformer.cli.report import errors_in_one_line, print_next, print_plain, print_written
from limitformer.subjects.user_code import names_code

USUAL = ("initializer_range", "output", "gamma", "tau0")  # without --knobs

Asked = Annotated[str | None, typer.Option(metavar="LOW,HIGH", help="Band to ask for, or none.")]


def design(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            autocompletion=complete_shape,
            help="A public shape ('limitformer check list' shows them), a configuration's JSON or folder, a function "
            "that builds a module, path/to/model.py:NAME, or the JSON of a Transformer ('limitformer simulate "
            "MODEL.toml --show-model' prints it).",
        ),
    ],
    text: Text = None,
    inputs: InputsOption = None,
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
    risk: Annotated[float, typer.Option(help="Allowed probability that a network misses the objective.")] = 0.1,
    tokens: Tokens = 32,
    samples: Annotated[
        int | None, typer.Option(help="Networks that evaluate a setting.", show_default="64, or 1000 by the chain")
    ] = None,
    scan: Annotated[
        int | None,
        typer.Option(help="Networks in each cell of the grid.", show_default="16, or 200 by the chain"),
    ] = None,
    loss: LossOption = None,
    settings: Settings = None,
    grid: Annotated[
        list[str] | None, typer.Option(metavar="KNOB=V1,V2,…", help="Values of a knob, instead of the usual ones.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for design.json, .png, .nc and the cells.")] = None,
    seed: Annotated[int, typer.Option(help="Seed; the chosen setting is evaluated with fresh seeds.")] = 0,
) -> None:
    """Find settings for a sound network at initialisation, with their risk, and print the lines to paste.

    For example: limitformer design gpt2 --set n_layer=48 --correlation -0.2,0.4 --out gpt2-48
    """
    with errors_in_one_line():
        bands = {"correlation": correlation, "stream": stream, "effective": effective, "gradient": gradient}
        objective = {name: band_of(name, text) for name, text in bands.items() if text is not None}
        names = None if knobs is None else knobs_of(knobs)
        pairs = assignments(grid, "--grid").items()
        values = {name: separated(str(each), f"--grid {name} takes numbers") for name, each in pairs}
        for name in values:
            one_of(name, tuple(names or USUAL), "--grid has no knob")
        require(text is None or inputs is None, "--text and --inputs cannot both be given.")
        require(0 < risk < 1, f"--risk must lie in (0, 1); got {risk:g}.")
        options: dict[str, Any] = {
            "tokens": require_count("--tokens", tokens, least=2),
            "samples": None if samples is None else require_count("--samples", samples),
            "scan": None if scan is None else require_count("--scan", scan),
            "settings": assignments(settings, "--set"),
        }
        require_known(what, inputs, loss)
        require_readable(text, inputs)
        from limitformer.designing import design as run_design

        folder_of(out)
        begin_work()
        data = text if inputs is None else user_inputs(inputs)
        options |= {
            "loss": user_loss(loss),
            "knobs": names,
            "objective": objective,
            "risk": risk,
            "grid": values,
            "seed": seed,
        }
        code = names_code(what) or names_code(loss or "")  # which may change between two runs
        options["store"] = None if code else out
        with suggest_quicker("a --grid of fewer values, or fewer --tokens, is quicker."):
            result = run_design(what, data, **options)
        written = [] if out is None else result.save(out)
        print_plain(str(result))
        if result.found and any(result.changes.values()):
            print_plain(f"\n{result.python()}")
        print_written(written)
        fields = result.patch()["settings"].items()
        if beyond := result.beyond():
            others = [each for each in grid or () if each.partition("=")[0] != beyond.partition("=")[0]]
            print_next(context, "design", knobs=",".join(each.name for each in result.knobs), grid=[*others, beyond])
        if result.found and result.chosen is result.present:
            print_next(context, "rate", optimizer="adamw")
        elif result.found and names_code(what):
            from limitformer.designing.report import name_after

            file, _, made = what.rpartition(":")
            print_next(context, "check", what=f"{file}:{name_after(made)}", settings=None)
        elif result.found and result.kind == "configuration" and not result.changes["weights"]:
            print_next(context, "check", settings=[f"{name}={value}" for name, value in fields])


def knobs_of(text: str) -> list[str]:
    """Return the names of --knobs; raise `InputError` for one that no family has."""
    from limitformer.designing.names import FIELD, SCALES, SHAPED, distinct, is_pattern, no_knob

    names = distinct(name.strip() for name in text.split(","))
    for name in names:
        if not (is_pattern(name) or name in (FIELD, *SCALES, *SHAPED)):
            raise no_knob(name, (FIELD, *SCALES, *SHAPED))
    return names


def band_of(name: str, text: str) -> Any:
    """Read LOW,HIGH, or none; for the gradient one number."""
    if text == "none":
        return None
    ends = separated(text, f"--{name} takes numbers, or none")
    wanted = 1 if name == "gradient" else 2
    require(len(ends) == wanted, f"--{name} takes {'one number' if wanted == 1 else 'LOW,HIGH'}; got {text!r}.")
    return ends[0] if wanted == 1 else tuple(ends)
