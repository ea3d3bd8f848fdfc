"""`limitformer overlap`: exact results about the overlap of two tokens or clusters, in words and as a table or JSON."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from limitformer.cli.endings import begin_work
from limitformer.cli.overlap_words import words_of
from limitformer.cli.report import errors_in_one_line, print_plain, screen
from limitformer.cli.sphere_options import HeadDim, Heads, Mask, QueryKey, Tau, parse_clusters, sphere_model

if TYPE_CHECKING:
    from limitformer.sphere.overlap import OverlapDiffusion

MODEL, QUESTION = "Model", "Question"


def overlap(
    context: typer.Context,
    dim: Annotated[int, typer.Option(help="Coordinates d of a token.", rich_help_panel=MODEL)] = 4,
    beta: Annotated[float, typer.Option(help="Inverse temperature β, of either sign.", rich_help_panel=MODEL)] = 1.0,
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="Noise amplitude ε: the hybrid model.", rich_help_panel=MODEL, show_default="none: stochastic model"
        ),
    ] = None,
    attention: Annotated[str, typer.Option(help="softmax or unnormalized.", rich_help_panel=MODEL)] = "softmax",
    sigma: Annotated[
        float | None, typer.Option(help="Standard deviation σ of the values.", rich_help_panel=MODEL, show_default="1")
    ] = None,
    query_key: QueryKey = None,
    tau: Tau = None,
    head_dim: HeadDim = None,
    heads: Heads = None,
    mask: Mask = None,
    clusters: Annotated[
        str | None,
        typer.Option(help="Sizes p,q of the two clusters.", rich_help_panel=QUESTION, show_default="1,1: two tokens"),
    ] = None,
    start: Annotated[
        float | None,
        typer.Option(help="Overlap z at the start.", rich_help_panel=QUESTION, show_default="uniform tokens"),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Overlap at the end: print the mean time from --start to it.", rich_help_panel=QUESTION),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=QUESTION)] = False,
) -> None:
    """Tell whether two tokens end at antipodes: exact probabilities, thresholds and times at infinite depth.

    For example: limitformer overlap --dim 4 --beta 2 --clusters 2,1 --start -1 --target 0.9
    """
    with errors_in_one_line():
        from limitformer.sphere.overlap import overlap as overlap_of

        sizes = parse_clusters(clusters)
        fields = {"tokens": sum(sizes) if sizes else 2, "dim": dim, "beta": beta}
        if epsilon is not None:
            fields["epsilon"] = epsilon
        model = sphere_model({**context.params, "values": None, "layers_per_unit_time": 1}, **fields)
        begin_work()
        diffusion = overlap_of(model, clusters=sizes)
        answer = results_from(diffusion, start, target)  # first, because it refuses bad input
        summary = diffusion.summary() | answer
        if as_json:
            print_plain(json.dumps(summary, indent=2, allow_nan=False))
        else:
            screen.print(words_of(summary), markup=False, highlight=False)
            screen.print(table_of(summary))


def results_from(diffusion: "OverlapDiffusion", start: float | None, target: float | None) -> dict[str, Any]:
    """Return the results that depend on --start and --target."""
    from limitformer.base.errors import require

    require(target is None or start is not None, "--target needs --start, where the mean time begins.")
    if start is None:
        return {}
    antipodal = float(diffusion.antipodal_probability(start=start))
    results: dict[str, Any] = {"start": start, "antipodal_probability_from_start": antipodal}
    if target is not None:
        time = float(diffusion.mean_hitting_time(target, start=start))
        results |= {"target": target, "mean_hitting_time": "inf" if time == float("inf") else time}
    return results


def table_of(summary: dict[str, Any]) -> Table:
    """Tabulate the quantities. Those without a meaning for the model (None) are left out."""
    table = Table("quantity", "value", show_lines=False)
    table.columns[1].overflow = "fold"
    for name, value in flat(summary):
        if value is not None:
            table.add_row(name, f"{value:.6g}" if isinstance(value, float) else str(value))
    return table


def flat(record: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Flatten nested dicts into names and values."""
    rows: list[tuple[str, Any]] = []
    for key, value in record.items():
        name = f"{prefix}{key}".replace("_", " ")
        rows += flat(value, f"{name}: ") if isinstance(value, dict) else [(name, value)]
    return rows
