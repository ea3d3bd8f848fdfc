"""`limitformer check A B C`: several networks, or one with several settings, in one table."""

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from limitformer.base.errors import InputError, require
from limitformer.cli.check_options import assignments
from limitformer.cli.check_report import print_report
from limitformer.cli.report import print_plain
from limitformer.cli.user_code import names_code, user_object

if TYPE_CHECKING:
    from limitformer.checking import Comparison

Settings = dict[str, Any]


def variants(pairs: list[str] | None) -> list[Settings]:
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
    what: list[str], settings: list[Settings], given: Any, options: dict[str, Any], place: Path | None
) -> "Comparison":
    """Check each network with each of the settings; print and save one comparison."""
    from limitformer.checking import Comparison
    from limitformer.checking import check as run_check
    from limitformer.checking.comparison import distinct

    common, reports = options.pop("settings") or {}, dict[str, Any]()
    both = sorted({name for changes in settings for name in changes} & common.keys())
    require(not both, f"--set and --vary both give {', '.join(both)}.")
    for one in what:
        for changes in settings or [{}]:
            subject = user_object(one, "WHAT") if names_code(one) else one
            try:
                report = run_check(subject, given, settings=common | changes, **options)
            except InputError as error:
                raise InputError(f"{one}: {error}") from error
            reports[distinct(report.name, reports)] = report
    result = Comparison(reports)
    print_report(result)
    if place is not None:
        print_plain("Wrote " + ", ".join(map(str, result.save(place))))
    return result
