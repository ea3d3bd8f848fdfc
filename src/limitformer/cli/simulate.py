"""`limitformer simulate`: read a model from a file, simulate it, print a table and save the data."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from limitformer.base.errors import about, require
from limitformer.cli.endings import INTERRUPTED, begin_work
from limitformer.cli.options import assignments, option, separated
from limitformer.cli.report import errors, errors_in_one_line, print_plain, screen

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr

    from limitformer.models import Start, Transformer

ROWS = 9  # largest number of rows in the table


START, RUN = "Start", "Simulation"


def simulate(
    context: typer.Context,
    model_file: Annotated[
        Path, typer.Argument(metavar="MODEL.toml", help="The model, as above or in the file of a sweep; or its JSON.")
    ],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change the model first: gamma=0.3, attention.tau0=2."),
    ] = None,
    text: Annotated[Path | None, option(START, help="Start from the words of this file, embedded at random.")] = None,
    positions: Annotated[
        bool, option(START, "--positions", help="Add sinusoidal positions to the words of the text.")
    ] = False,
    tokens: Annotated[
        int | None, option(START, help="Number of tokens.", default="2, or all tokens of a text of at most 64")
    ] = None,
    correlation: Annotated[
        float | None, option(START, help="Correlation of each pair of tokens (without --text).", default="0.2")
    ] = None,
    variance: Annotated[
        float | None, option(START, help="Variance of each token (without --text).", default="1")
    ] = None,
    kind: Annotated[
        str,
        option(RUN, "--as", help="chain (the finite network, exact), limit (its SDE) or network (needs torch)."),
    ] = "chain",
    samples: Annotated[int, option(RUN, help="Independent networks or paths.")] = 1024,
    record: Annotated[
        str | None,
        option(
            RUN, help="Layers or (for a limit) times to record, separated by commas.", default=f"{ROWS}, evenly spaced"
        ),
    ] = None,
    dt: Annotated[float | None, option(RUN, help="Time step of the limit.", default="0.01")] = None,
    step: Annotated[
        str | None, option(RUN, help="Method for the limit: factor or euler-maruyama.", default="factor")
    ] = None,
    radius: Annotated[
        float | None, option(RUN, help="Stop a path of a chain or limit when |V| reaches this radius.", default="1e100")
    ] = None,
    gradients: Annotated[bool, option(RUN, "--gradients", help="Differentiate ½|x|² of the last tokens.")] = False,
    seed: Annotated[int, option(RUN, help="Seed; the same seed gives the same numbers.")] = 0,
    threads: Annotated[int | None, option(RUN, help="Threads of a chain or limit.", default="all cores")] = None,
    out: Annotated[Path | None, option(RUN, help="Write the data to this file, .nc or .zarr.")] = None,
    show_model: Annotated[bool, option(RUN, "--show-model", help="Print the model as JSON and exit.")] = False,
) -> None:
    r"""Simulate a Transformer at initialisation: its exact chain, its limit, or the network itself.

    Prints correlations and variances of the tokens, and sizes of gradients, by layer (chain, network) or time (limit).

    For example: limitformer simulate model.toml --set gamma=0.3 --record 0,50,150, where model.toml is

    \[model]
    kind = "Transformer"
    width = 200
    depth = 150
    gamma = 0.3535533905932738
    attention = {kind = "ShapedAttention", tau0 = 1.0}
    feedforward = {kind = "ShapedReLU", c_plus = 0.0, c_minus = -1.0}
    """
    with errors_in_one_line():
        from limitformer.models import to_json

        model = read_model(model_file, assignments(changes, "--set"))
        if show_model:
            print_plain(to_json(model, indent=2))
            return
        from limitformer.results.storage import check_target, save

        if out is not None:
            check_target(out)
        chosen = context.params
        options = {name: chosen[name] for name in ("threads", "radius", "dt", "step") if chosen[name] is not None}
        settings = {"samples": samples, "seed": seed, **({"gradients": True} if gradients else {})}
        dataset, complete = run(
            kind, model, start_of(text, model.width, chosen), parse_record(record), settings, options
        )
        written = None if out is None else save(dataset, out)
        screen.print(table_of(dataset))
        if written is not None:
            print_plain(f"Wrote {written}")
        if not complete:
            finished = dataset.sizes["sample"]
            errors.print(f"Interrupted; the table shows the {finished} finished samples.", markup=False)
            raise typer.Exit(INTERRUPTED)


def parse_record(record: str | None) -> list[float] | None:
    """Parse a comma-separated list of numbers."""
    if record is None:
        return None
    takes = "--record must be numbers separated by commas, e.g. 0,50,150"
    points = separated(record, takes)
    require(all(map(isfinite, points)), f"{takes}; got {record!r}.")
    return points


def run(
    kind: str,
    model: "Transformer",
    start: "Start",
    record: Sequence[float] | None,
    settings: dict[str, Any],
    options: dict[str, Any],
) -> "tuple[xr.Dataset, bool]":
    """Run the simulation. Return its dataset and whether it finished."""
    import limitformer as lf

    require(kind in ("chain", "limit", "network"), f"--as must be chain, limit or network; got {kind!r}.")
    simulated = lf.limit(model) if kind == "limit" else model
    points = even_points(kind, simulated, options) if record is None else record
    if kind == "network":
        from limitformer.nn import simulate as simulate_network

        require(not options, f"The network has no option {', '.join(options)}; it has samples, record and seed.")
        work: Callable[..., xr.Dataset] = partial(simulate_network, model)
    else:
        work = partial(lf.simulate, simulated, **options)
    from limitformer.base.progress import suggest_quicker

    begin_work()
    try:
        with suggest_quicker(f"--samples {max(1, settings['samples'] // 2)} takes about half the time."):
            return work(start, record=points, **settings), True
    except lf.Interrupted as interrupted:
        if interrupted.partial.sizes["sample"] == 0:
            raise
        return interrupted.partial, False


def even_points(kind: str, simulated: Any, options: dict[str, Any]) -> "np.ndarray":
    """Return at most `ROWS` evenly spaced layers or times from 0 to the last. Times coincide with steps."""
    import numpy as np

    from limitformer.sampling.process import whole_steps

    if kind != "limit":
        return np.unique(np.rint(np.linspace(0, simulated.depth, ROWS)))
    steps = whole_steps(simulated.horizon, options.get("dt", 0.01))
    return np.unique(np.rint(np.linspace(0, steps, ROWS))) * (simulated.horizon / steps)


def table_of(dataset: "xr.Dataset") -> Table:
    """Tabulate correlations (over all pairs and samples) and variances by layer or time."""
    import numpy as np

    from limitformer.results.datasets import correlation

    axis = str(dataset["covariance"].dims[1])
    tokens = dataset.sizes["token"]
    title = f"{dataset.attrs['description']}, {dataset.sizes['sample']} samples, {tokens} tokens"
    table = Table(axis, "mean ρ", "mean |ρ|", "5 % … 95 % of ρ", "median variance", title=title)
    differentiated = "stream_gradient" in dataset
    if differentiated:
        table.add_column("median |∂X|")
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    pairs = np.triu_indices(tokens, 1)
    for k, point in enumerate(dataset[axis].values):
        one = dataset.isel({axis: [k]})  # one point at a time, to save memory
        variance = np.median(np.diagonal(one["covariance"].values, axis1=-2, axis2=-1))
        rho = correlation(one).values[:, 0][:, pairs[0], pairs[1]]
        gradient = [f"{float(one['stream_gradient'].median()):.4g}"] if differentiated else []
        table.add_row(f"{point:g}", *correlation_cells(rho), f"{variance:.4g}", *gradient)
    table.caption = caption(dataset, tokens)
    return table


def correlation_cells(rho: "np.ndarray") -> tuple[str, str, str]:
    """Return the mean, mean absolute value and range of correlations; empty cells for a single token."""
    import numpy as np

    if rho.size == 0:
        return "", "", ""
    low, high = np.quantile(rho, [0.05, 0.95])
    return near_one(rho.mean()), near_one(abs(rho).mean()), f"{low:.3f} … {high:.3f}"


def weight_lines(dataset: "xr.Dataset") -> list[str]:
    """Return the median gradient norm of each kind of weight, over samples and layers; of a limit at its first time."""
    if "weight_gradient" not in dataset:
        return []
    kinds = [".".join(str(name).split(".")[-2:]) for name in dataset["weight"].values]  # without the layer of a chain
    norms, where = dataset["weight_gradient"], ""
    if "time" in norms.dims:
        where = f" at time {float(norms['time'][0]):g}, over the width (of queries and keys over its root)"
        norms = norms.isel(time=0)
    medians = norms.assign_coords(kind=("weight", kinds)).groupby("kind").median(...)
    sizes = ", ".join(f"{kind} {float(medians.sel(kind=kind)):.3g}" for kind in dict.fromkeys(kinds))
    lines = ["∂: gradient of |x|²/2 of the last tokens, averaged over tokens", f"median |∂W|{where}: {sizes}"]
    if "tangent_kernel" in dataset:
        lines.append(f"median of Σ |∂W|² over width³: {float(dataset['tangent_kernel'].median()):.3g}")
    return lines


def near_one(rho: float) -> str:
    """Format with four digits, or as a distance from 1 where four digits would show only 1."""
    distance = 1 - rho
    return f"1 - {distance:.0e}" if 1e-15 < distance < 5e-5 else f"{rho:.4f}"


def caption(dataset: "xr.Dataset", tokens: int) -> str | None:
    """Say what the numbers are averaged over, and how many samples left the ball or failed."""
    import numpy as np

    from limitformer.sampling.exits import CAUSES

    lines = ["ρ over all samples and pairs of tokens"] if tokens > 2 else []
    lines += weight_lines(dataset)
    causes = dataset["exit_cause"].values if "exit_cause" in dataset else np.zeros(0)  # networks have none
    for cause, words in list(enumerate(CAUSES))[1:]:
        count = int(np.sum(causes == cause))
        if count:
            lines.append(f"{count} samples {words} and keep their last values")
    lost = int(np.isnan(dataset["loss"].values).sum()) if "loss" in dataset else 0
    if lost:
        lines.append(f"{lost} samples have no gradients (NaN), which need all layers within the ball")
    return "\n".join(lines) or None


LONGEST_TEXT = 64  # tokens; a longer text needs --tokens


def read_model(path: Path, changes: Mapping[str, Any]) -> "Transformer":
    """Return the Transformer of a file as if the file had these values. User functions may be in this folder.

    The file is TOML with a table [model], as of a sweep, or the JSON of `to_json` if its name ends in .json.
    """
    from limitformer.models import Transformer
    from limitformer.models.serial import from_record, json_object
    from limitformer.models.text import read_text
    from limitformer.sweep.file import read_toml

    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    record = None if path.suffix == ".json" else read_toml(path).get("model")
    with about(str(path)):
        record = json_object(read_text(path), "A model") if path.suffix == ".json" else record
        needs = "A model's file needs the table [model]; 'limitformer simulate --help' has one."
        require(isinstance(record, dict), needs)
        for name, value in changes.items():
            set_in(record, name, value)
        model = from_record(record)
    fits = isinstance(model, Transformer)
    require(fits, f"{path} describes a {type(model).__name__}, not a Transformer.")
    return model


def set_in(record: Any, name: str, value: Any) -> None:
    """Set a field of a model's record; a dotted name is a field of a part, which is made if there is none."""
    *parts, last = name.split(".")
    for part in parts:
        record[part] = {} if record.get(part) is None else record[part]
        record = record[part]
        require(isinstance(record, dict), f"--set {name}: {part} is {record!r}, which has no fields.")
    record[last] = value


def start_of(path: Path | None, width: int, options: Mapping[str, Any]) -> "Start":
    """Return the start from the words of a text, or from tokens of equal variances and correlations."""
    from limitformer.models import equicorrelated, from_text
    from limitformer.models.text import words_of

    tokens, equal = options["tokens"], {name: options[name] for name in ("correlation", "variance")}
    values = {name: value for name, value in equal.items() if value is not None}
    if path is None:
        require(not options["positions"], "--positions would change nothing: there is no --text.")
        return equicorrelated(**{"tokens": 2 if tokens is None else tokens, "correlation": 0.2, **values})
    require(not values, f"--{', --'.join(values)} would change nothing: --text is the start.")
    if tokens is None:
        few = len(words_of(path, LONGEST_TEXT + 1)) <= LONGEST_TEXT
        require(few, f"{path} has more than {LONGEST_TEXT} tokens; give a number, e.g. --tokens {LONGEST_TEXT}.")
    positions: Any = "sinusoidal" if options["positions"] else None
    return from_text(path, width=width, tokens=tokens, positions=positions, seed=options["seed"])
