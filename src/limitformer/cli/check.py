"""`limitformer check`: will this Transformer collapse? A verdict, curves, and a page."""

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from limitformer.base.errors import InputError, about, require, require_count
from limitformer.base.progress import suggest_quicker
from limitformer.cli.endings import begin_work
from limitformer.cli.options import (
    Blocks,
    Full,
    InputsOption,
    Json,
    LossOption,
    Settings,
    Text,
    Tokens,
    TrustRemoteCode,
    WitnessOption,
    assignments,
    complete_shape,
    folder_of,
    names_code,
    numbers,
    one_of,
    quicker,
    require_known,
    require_readable,
    user_inputs,
    user_loss,
    user_object,
    user_recipe,
    witness_of,
)
from limitformer.cli.report import (
    errors_in_one_line,
    print_next,
    print_plain,
    print_report,
    print_written,
    save_and_print,
)

if TYPE_CHECKING:
    from limitformer.checking import Comparison

FAILED = 1
SHAPED = ("gamma", "tau0", "gamma1", "gamma2", "shaped_relu", "per_head", "trained", "float32")  # of hf.Shaping
SWITCHES = ("shaped_relu", "per_head", "trained", "float32")


DESIGNED = ("collapsed", "grows", "dies", "frozen", "uniform", "vanishing")  # verdicts that `design` may fix


def check(
    context: typer.Context,
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="WHAT…",
            autocompletion=complete_shape,
            help="A public shape ('list' shows them), a configuration's JSON or folder, a checkpoint, or a function "
            "that builds a module: path/to/model.py:NAME or package.module:NAME. Several give one table.",
        ),
    ],
    text: Text = None,
    inputs: InputsOption = None,
    tokens: Tokens = 128,
    samples: Annotated[int, typer.Option(help="Networks of the law.")] = 8,
    settings: Settings = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2", help="Several values of a field of the configuration, in one table."),
    ] = None,
    shaped: Annotated[
        str | None, typer.Option(metavar="gamma=…,tau0=…", help="Shape it first, as limitformer.hf.shape_model does.")
    ] = None,
    against: Annotated[str | None, typer.Option(metavar="WHAT2", help="Another network, shown with it.")] = None,
    gradients: Annotated[
        bool, typer.Option("--gradients/--no-gradients", help="Whether a loss is differentiated.")
    ] = True,
    loss: LossOption = None,
    fail_on: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Verdicts that end with exit code 1: collapsed,frozen, or broken, watch, any."
        ),
    ] = None,
    threshold: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Another threshold, such as collapse=0.99.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Folder for check.html, .png, .nc and .json; for several, compare.*."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the law's samples.")] = 0,
    blocks: Blocks = None,
    trust_remote_code: TrustRemoteCode = False,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,SETTING=NUMBER]",
            help="Compare the law of every weight with a published recipe ('limitformer recipes' lists them), or with "
            "your own, FILE.py:NAME.",
        ),
    ] = None,
    witness: WitnessOption = "auto",
    number_format: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="bf16,fp16,e4m3,e5m2: whether a network keeps within their range."),
    ] = None,
    round_numbers: Annotated[
        bool, typer.Option("--round", help="Run it in these number formats too: how far it is from float32, by layer.")
    ] = False,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,KEY=NUMBER]",
            help="With --number-format: what its first step changes of weights kept in two bytes; adamw,lr=3e-4 or "
            "FILE.py:NAME.",
        ),
    ] = None,
    apply_fix: Annotated[
        bool,
        typer.Option(
            "--apply-fix",
            help="Find the smallest change that ends the first verdict, check again, and print the lines to paste.",
        ),
    ] = False,
    as_json: Json = False,
    full: Full = False,
) -> None:
    """Tell whether a Transformer collapses, explodes or freezes: the exact law at initialisation, or a checkpoint.

    For example: limitformer check llama-3-8b --set initializer_range=0.006 --against llama-3-8b

    Several in one table: limitformer check gpt2 pythia-160m, or --vary initializer_range=0.006,0.02,0.1
    """
    with errors_in_one_line():
        if what == ["list"]:
            from limitformer.subjects.shapes import shapes

            for name, shape in shapes().items():
                print_plain(f"{name:18} {shape['source']}")
            return
        several = variants(vary)
        require(not ((several or len(what) > 1) and against), "--against is for one network. Nearest: one more WHAT.")
        require(not (apply_fix and (several or len(what) > 1)), "--apply-fix is for one network. Nearest: one WHAT.")
        require(
            not (apply_fix and against), "--apply-fix shows the network with its fix beside it, in place of --against."
        )
        from limitformer.checking.thresholds import failing, thresholds_with

        with about("--fail-on"):
            names = failing(fail_on)
        formats = None if number_format is None else [one.strip() for one in number_format.split(",")]
        useless = "--round" * round_numbers or "--optimizer" * (optimizer is not None)
        require(formats is not None or not useless, f"{useless} needs --number-format. Nearest: --number-format bf16.")
        options: dict[str, Any] = {
            "formats": formats,
            "rounding": round_numbers,
            "tokens": require_count("--tokens", tokens, least=2),
            "samples": require_count("--samples", samples),
            "settings": assignments(settings, "--set"),
            "shaping": shaping_options(shaped),
            "thresholds": assignments(threshold, "--threshold"),
        }
        with about("--threshold"):
            thresholds_with(options["thresholds"])
        for one in (*what, *([] if against is None else [against])):
            require_known(one, inputs, loss, optimizer)
        require_readable(text, inputs)
        require(text is None or inputs is None, "--text and --inputs cannot both be given.")
        published = None if recipe is None else user_recipe(recipe, "--recipe")
        from limitformer.checking import check as run_check
        from limitformer.designing.fixes import CODE, FIXES, fix, require_no_weights
        from limitformer.designing.report import name_after
        from limitformer.subjects.checkpoints import holds_weights

        if apply_fix:
            require_no_weights(what[0])
        place = folder_of(out)
        if options["shaping"] is not None:
            options["shaping"] = shaping_of(options["shaping"])
        begin_work()
        with suggest_quicker(quicker("--samples", samples)):
            batch = text if inputs is None else user_inputs(inputs)
            options |= {"gradients": gradients, "seed": seed, "trust_remote_code": trust_remote_code}
            options |= {"blocks": blocks or None, "recipe": published, "loss": user_loss(loss)}
            options["witness"] = witness_of(witness)
            options["optimizer"] = None if optimizer is None else named_optimizer(optimizer)
            if several or len(what) > 1:
                comparison = check_several(what, several, batch, options, place, as_json)
                if fail_on and comparison.failed(fail_on):
                    raise typer.Exit(FAILED)
                return
            report = run_check(what[0], batch, against=against, **options)
            if apply_fix:
                try:
                    report = fix(what[0], batch, report=report, **options)
                except KeyboardInterrupt:
                    save_and_print(report, place, as_json, full)
                    raise
        written = [] if place is None else report.save(place)
        if not as_json:
            print_report(report, full)
        blind = {"frozen", "uniform"} & set(names) if fail_on != "any" and "logit_std" not in report.curves else ()
        require(not blind, f"--fail-on {', '.join(blind)}: no attention was seen in {report.name}.")
        if as_json:
            save_and_print(report, None, as_json)
        elif report.against is not None:
            print_report(report.against, full)
        if apply_fix and not as_json:
            print_plain(f"\n{report.fix}\n\n{report.lines}".rstrip())
        print_written([] if as_json else written)
        if report.lines and names_code(what[0]) and not report.exists:
            file, _, made = what[0].rpartition(":")
            label, new = f"Next, with these lines in {file}", f"{file}:{name_after(made)}"
            assert report.against is not None
            if any(each.name in FIXES for each in report.against.verdicts):  # another one is left
                print_next(context, "check", label, what=new, apply_fix=True, settings=None, against=None)
            else:
                print_next(context, "rate", label, what=new, optimizer="adamw", settings=None)
        if not report.lines:  # which come next
            fixable = any(each.name in FIXES for each in report.verdicts) and not holds_weights(what[0])
            if fixable and not apply_fix:
                print_next(context, "check", label="Fix", apply_fix=True, against=None)
            if report.fix.endswith(CODE):
                pass  # no command turns what it does not have
            elif report.verdicts[0].name in DESIGNED:
                print_next(context, "design", what=str(Path(what[0]) / "config.json") if report.exists else what[0])
            elif not report.trained and gradients and (apply_fix or not fixable):
                print_next(context, "rate", optimizer="adamw")
        untrained = not (fail_on and report.trained)
        require(untrained, f"--fail-on: {report.name} is trained, so that no verdict on its initialisation is given.")
        if report.failed(fail_on):
            raise typer.Exit(FAILED)


def named_optimizer(text: str) -> Any:
    """Read a function FILE.py:NAME, or NAME,KEY=NUMBER,… as the options of an optimiser."""
    if names_code(text):
        return user_object(text, "--optimizer")
    name, *pairs = text.split(",")
    return {"name": name, **assignments(pairs, "--optimizer")}


def shaping_options(text: str | None) -> dict[str, Any] | None:
    """Read gamma=…,tau0=… as options of `limitformer.hf.Shaping`; gamma is its residual_gamma."""
    if text is None:
        return None
    values = assignments(text.split(","), "--shaped")
    for name, value in values.items():
        one_of(name, SHAPED, "--shaped has no option")
        if name in SWITCHES:
            require(isinstance(value, bool), f"--shaped {name} is true or false; got {value!r}.")
        elif value is not None or name == "tau0":
            numbers({name: value}, "--shaped")
    return {{"gamma": "residual_gamma"}.get(name, name): value for name, value in values.items()}


def shaping_of(values: dict[str, Any]) -> Any:
    from limitformer.hf import Shaping

    try:
        return Shaping(**values)
    except InputError as error:
        raise InputError(f"--shaped: {str(error).replace('residual_gamma', 'gamma')}") from error


def variants(pairs: list[str] | None) -> list[dict[str, Any]]:
    """Read NAME=V1,V2,… and return the settings of all combinations."""
    if not pairs:
        return []
    values = {}
    for name, each in assignments(pairs, "--vary").items():
        several = each if isinstance(each, list) else [each]
        if isinstance(each, str):
            several = [one for part in each.split(",") for one in assignments([f"{name}={part}"], "--vary").values()]
        require(len(several) > 1, f"--vary takes NAME=VALUE,VALUE,…; got {name}={each}. Nearest: --set {name}={each}")
        values[name] = several
    return [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]


def check_several(
    what: list[str], settings: list[dict[str, Any]], given: Any, options: dict[str, Any], place: Path | None,
    as_json: bool,
) -> "Comparison":  # fmt: skip
    """Check each network with each of the settings; print and save one comparison."""
    from limitformer.checking import Comparison
    from limitformer.checking import check as run_check
    from limitformer.checking.comparison import distinct

    common, reports = options.pop("settings") or {}, dict[str, Any]()
    both = sorted({name for changes in settings for name in changes} & common.keys())
    require(not both, f"--set and --vary both give {', '.join(both)}.")
    for one in what:
        for changes in settings or [{}]:
            with about(one):
                report = run_check(one, given, settings=common | changes, **options)
            reports[distinct(report.name, reports)] = report
    result = Comparison(reports)
    save_and_print(result, place, as_json)
    return result
