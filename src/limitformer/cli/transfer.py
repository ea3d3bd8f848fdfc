"""`limitformer transfer`: does a learning rate that was tuned on a small model hold on a large one?"""

import time
from importlib import import_module
from typing import Annotated, Any

import typer

from limitformer.base.errors import require, require_count
from limitformer.base.progress import suggest_quicker
from limitformer.cli.endings import INTERRUPTED, begin_work
from limitformer.cli.options import (
    AfterGroups,
    Full,
    InputsOption,
    Json,
    LossOption,
    Sequences,
    Settings,
    Text,
    Tokens,
    WitnessOption,
    assignments,
    complete_shape,
    folder_of,
    names_code,
    require_known,
    require_readable,
    separated,
    user_inputs,
    user_loss,
    user_object,
    witness_of,
)
from limitformer.cli.report import errors, errors_in_one_line, print_next, print_plain, save_and_print
from limitformer.stepping.updates import OPTIMIZERS

FAILED = 1
VERDICT = "transfer"
RULES = ("standard", "mup", "completep", "depth-mup")


def transfer(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            autocompletion=complete_shape,
            help="A public shape, a configuration's JSON or folder, or a function that builds a module from a size: "
            "path/to/model.py:NAME.",
        ),
    ],
    widths: Annotated[str | None, typer.Option(metavar="N,N,…", help="Widths; heads keep their size.")] = None,
    depths: Annotated[str | None, typer.Option(metavar="N,N,…", help="Numbers of blocks.")] = None,
    over: Annotated[
        str | None, typer.Option(metavar="NAME=N,N,…", help="Sizes of a field or an argument, or batch=N,N,…")
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help=f"{', '.join(OPTIMIZERS)}; or FILE.py:NAME, a function from a module to its optimiser.")
    ] = "adamw",
    after_groups: AfterGroups = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Learning rate at the base; other sizes keep the optimiser's ratio.", show_default="the optimiser's"
        ),
    ] = None,
    rule: Annotated[str, typer.Option(help=f"Parametrisation: {', '.join(RULES)}.")] = "standard",
    base: Annotated[
        int | None, typer.Option(help="Size at which the rule changes nothing.", show_default="the smallest")
    ] = None,
    target: Annotated[
        int | None, typer.Option(help="A larger size that is not run: predict the effects there.", show_default="none")
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 3,
    tokens: Tokens = 32,
    sequences: Sequences = None,
    text: Text = None,
    inputs: InputsOption = None,
    samples: Annotated[int, typer.Option(help="Networks at each size; a verdict needs 4.")] = 8,
    clip: Annotated[float | None, typer.Option(help="Largest norm of all gradients together.")] = None,
    settings: Settings = None,
    loss: LossOption = None,
    fail_on: Annotated[
        str | None, typer.Option(metavar="NAME", help="transfer: end with exit code 1 if the rate does not transfer.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the networks.")] = 0,
    witness: WitnessOption = "auto",
    out: Annotated[
        str | None, typer.Option(metavar="PATH", help="Folder for transfer.html, .json, .csv, .nc and .png.")
    ] = None,
    as_json: Json = False,
    full: Full = False,
) -> None:
    """Tell whether a learning rate transfers over width or depth: the first training steps at several sizes.

    For example: limitformer transfer gpt2 --widths 256,512,1024 --optimizer adamw --rate 1e-3 --rule mup
    """
    with errors_in_one_line():
        sizes = sizes_of(widths, depths, over)
        require(fail_on in (None, VERDICT), f"--fail-on must be {VERDICT}; got {fail_on!r}.")
        require(rule in RULES, f"--rule must be one of {', '.join(RULES)}; got {rule!r}.")
        named = names_code(optimizer)
        require(
            named or optimizer in OPTIMIZERS, f"--optimizer must be one of {', '.join(OPTIMIZERS)}; got {optimizer!r}."
        )
        require(rate is None or 0 < rate <= 100, f"--rate must be above 0 and at most 100; got {rate}.")
        require_count("--tokens", tokens, least=2)
        require_count("--samples", samples)
        require_count("--steps", steps)
        if sequences is not None:
            require_count("--sequences", sequences)
        require(base is None or base >= 1, f"--base must be a size of at least 1; got {base}. Nearest: no --base.")
        require(
            fail_on is None or samples >= 4,
            f"--fail-on transfer needs --samples 4 or more for a verdict; got {samples}. Nearest: --samples 4.",
        )
        proof = witness_of(witness)
        changes = assignments(settings, "--set")
        require_readable(text, inputs)
        require(text is None or inputs is None, "--text and --inputs cannot both be given.")
        require_known(what, inputs, loss, optimizer, after_groups)
        place = folder_of(out)
        import_module("transformers")  # before the work begins
        from limitformer.models.text import words_of
        from limitformer.scaling.transfer import TransferInterrupted
        from limitformer.scaling.transfer import transfer as run_transfer
        from limitformer.subjects.configurations import is_config
        from limitformer.subjects.inputs import ids_in, is_text, texts_in
        from limitformer.subjects.subject import model_of

        begin_work()
        model = model_of(what, changes)
        method = user_object(optimizer, "--optimizer") if named else optimizer
        after = user_object(after_groups, "--after-groups") if after_groups else None
        function = user_loss(loss)
        began = time.monotonic()
        networks = f"{samples} network{'s' * (samples > 1)} at each of {len(next(iter(sizes.values())))} sizes"
        half = f"; --samples {samples // 2} takes about half." if samples > 1 else ""
        first: Any = user_inputs(inputs) if inputs is not None else text or tokens
        if is_text(first):
            texts = texts_in(first, tokens, max(sizes["batch"]) if "batch" in sizes else sequences)
            first = [" ".join(words_of(one, tokens)) for one in texts]
            first = first[0] if len(first) == 1 else first
        elif is_config(model) and (ids := ids_in(first)) is not None:
            first = ids[..., :tokens]  # as for `rate`
        try:
            with suggest_quicker(networks + half):
                result = run_transfer(
                    model, sizes, first, optimizer=method, after_groups=after,
                    rate=rate, rule=rule, base=base, target=target, steps=steps,
                    samples=samples, seed=seed, clip=clip, loss=function, witness=proof,
                    sequences=sequences,
                )  # fmt: skip
        except TransferInterrupted as interrupt:
            save_and_print(interrupt.result, place, as_json, full)
            counts = " and ".join(str(each.sizes["sample"]) for each in interrupt.result.data.values())
            line = f"Interrupted; this is about the finished networks of {len(interrupt.result.sizes)} sizes: {counts}."
            errors.print(line, markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(INTERRUPTED) from interrupt
        save_and_print(result, place, as_json, full)
        if not as_json:
            print_plain(f"{time.monotonic() - began:.0f} s")
        if result.nearest_rule and result.lines:
            print_next(context, "transfer", rule=result.nearest_rule)
        elif result.transfers is None and not result.not_finite and result.networks_needed:
            print_next(context, "transfer", samples=result.networks_needed)
        if fail_on is not None and result.transfers is False:
            raise typer.Exit(FAILED)


def sizes_of(widths: str | None, depths: str | None, over: str | None) -> dict[str, list[int]]:
    """Read the sizes of --over, or of --widths and --depths, which grow together."""
    lists = [(name, each) for name, each in (("width", widths), ("depth", depths)) if each is not None]
    require(over is None or not lists, "--over excludes --widths and --depths.")
    if over is not None:
        name, equals, values = over.partition("=")
        require(bool(name and equals), f"--over takes NAME=N,N,…; got {over!r}.")
        lists.append((name, values))
    require(bool(lists), "give sizes by --widths, --depths or --over. Nearest: --widths 256,512,1024.")
    return {name: separated(values, "sizes must be whole numbers, such as 256,512,1024", int) for name, values in lists}
