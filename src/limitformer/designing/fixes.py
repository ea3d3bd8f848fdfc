"""`fix`: the smallest change that ends the first verdict of `check`, found by trying, as lines to paste.

A verdict names knobs (`knobs`) and the direction in which each is turned. All knobs that the network has are tried at a
factor of 2, then 4, and so on to 64. A change is a fix if `check` no longer gives the verdict, nor any new one of its
grade or a worse one. Of several with one factor, the fix leaves the fewest verdicts. Nothing is called a fix that was
not tried.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from math import exp, sqrt
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from limitformer.base.errors import InputError, require
from limitformer.base.progress import track
from limitformer.checking.check import check
from limitformer.checking.module import Passes, copied, evaluating, placed, settle_module
from limitformer.checking.report import Report
from limitformer.designing.knobs import Knob, factor_knob, factors_at, patterns_of
from limitformer.designing.names import FIELD, SHAPED
from limitformer.designing.objective import Objective
from limitformer.designing.report import IMPORTS, SCALE, block, factor_lines, lines_of, transformer_lines
from limitformer.designing.trials import ShapedTrials, StockTrials, uses_of
from limitformer.formats.measure import kind_of
from limitformer.reports.verdict import GRADES, Verdict
from limitformer.subjects.checkpoints import holds_weights
from limitformer.subjects.inputs import inputs_for
from limitformer.subjects.subject import Subject, resolve
from limitformer.weightless.law import LawTable
from limitformer.weightless.laws import CONSTANT, normal
from limitformer.weightless.threads import one_thread

POWERS = 6  # of two
TOKENS = 128  # the default of `check`
CODE = "a change of its code, as the verdict says"  # where it has no knob
HEAD = "head"  # the last matrix with a row for each class, which is no knob of `design`
FIXES: Mapping[str, tuple[tuple[str, int], ...]] = {  # by verdict: knobs, and the sign of the power of two
    "loss": ((FIELD, -1), (HEAD, -1)),
    "collapsed": ((FIELD, -1), ("output", -1), ("gamma", -1)),
    "grows": ((FIELD, -1), ("embedding", 1), ("output", -1), ("gamma", -1)),  # Adam moves small outputs most
    "dies": ((FIELD, 1), ("output", 1), ("gamma", 1)),
    "frozen": ((FIELD, -1), ("logits", -1), ("tau0", 1)),
    "uniform": ((FIELD, 1), ("logits", 1)),
    "vanishing": ((FIELD, -1), ("output", -1), ("gamma", -1)),
    "exploding": ((FIELD, -1), ("output", -1), ("gamma", -1)),
    "constant": (("embedding", 1),),
    "faint": ((FIELD, 1), ("embedding", -1), ("output", 1)),
    "swamped": ((FIELD, -1), ("embedding", 1), ("output", -1)),
    "range": ((FIELD, -1), ("logits", -1), ("output", -1), ("gamma", -1)),
}


@dataclass(frozen=True)
class Candidate:
    """A knob that may end a verdict, and what a value of it leads to.

    Attributes:
        check: returns the report of the network with a value of the knob; further options are those of `check`.
        lines: returns the Python that sets it.
        gain: whether it is the gain of a norm.
    """

    knob: Knob
    sign: int
    check: Callable[..., Report]
    lines: Callable[[float], str]
    gain: bool = False

    def value(self, power: int) -> float:
        return float(f"{self.knob.present * 2.0 ** (self.sign * power):.6g}")

    def words(self, value: float) -> str:
        """Return the change in words, such as `initializer_range 0.1 → 0.0125`."""
        if self.knob.field:
            return f"{self.knob.field} {self.knob.present:g} → {value:g}"
        return f"{'gain' if self.gain else 'std'} of {self.knob.name} × {value:g}"


def fix(what: Any, text: Any = None, *, report: Report | None = None, **options: Any) -> Report:
    """Find the smallest change that ends the first verdict of `check`, and check the network with it.

    It tries factors 2, 4, … 64 of what the verdict's fix is about: initializer_range, or the standard deviation of the
    head, of outputs, of queries and keys, or of the embedding. Where the head is a table, the gain of the last norm is
    scaled in its place, or all tables. Each takes about as long as `check`.

    Args:
        what, text: as for `limitformer.check`. A module that exists is not changed; copies of it are.
        report: the report of `check` with these arguments; None: `check` runs first.
        options: further arguments of `check`, except `against` and `overrides`.

    Returns:
        The report of `check`, in which `lines` is the change as Python, `fix` a sentence on it, and `against` the
        report of the network with it. Without a fix, `fix` says why and `lines` is empty.

    Raises:
        InputError: `check` refuses the arguments, or `what` is a folder with weights.

    >>> import limitformer as lf
    >>> small = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99}
    >>> result = lf.fix(small, tokens=8, settings={"initializer_range": 0.5}, progress=False)
    >>> print(result.fix)
    the verdict frozen ends with initializer_range 0.5 → 0.25
    >>> print(result.lines.splitlines()[0])
    config.initializer_range = 0.25
    """
    for name in ("against", "overrides"):
        require(options.get(name) is None, f"fix has no option {name}.")
    require_no_weights(what)
    report = check(what, text, **options) if report is None else report
    verdict = next((each for each in report.verdicts if each.name in FIXES), None)
    if verdict is None:
        return replace(report, fix="nothing to fix: it has no verdict that a change of weights might end")
    settings, remote = options.get("settings"), options.get("trust_remote_code", False)
    subject = resolve(what, settings, shaping=options.get("shaping"), trust_remote_code=remote)
    candidates, missing = list[Candidate](), ""
    for name, sign in FIXES[verdict.name]:
        if (name in SHAPED) != (subject.transformer is not None):
            continue
        for own in heads_of(report, subject.module) if name == HEAD else [name]:
            try:
                one = candidate(own, sign, what, text, subject, report, options)
                candidates += in_place_of(one, what, text, subject, report, options) if name == HEAD else [one]
            except InputError as error:  # the family lacks this knob, or a norm takes its factor away
                missing = str(error).partition(" Nearest:")[0]
    tries = [(k, each, each.value(k)) for k in range(1, POWERS + 1) for each in candidates]
    tries = [(k, each, value) for k, each, value in tries if value <= each.knob.most]
    steps = track(tries, "fixes to try, at most") if options.get("progress", True) else iter(tries)
    for _, group in groupby(steps, lambda step: step[0]):
        reports = [(each.check(value, witness=False, progress=False), each, value) for _, each, value in group]
        ended = [step for step in reports if ends(verdict, report, step[0])]
        for _, each, value in sorted(ended, key=lambda step: len(step[0].verdicts)):
            after = each.check(value, progress=False)
            if ends(verdict, report, after):  # with the witness, too
                words = f"the verdict {verdict.name} ends with {each.words(value)}"
                return replace(report, against=after, fix=words, lines=each.lines(value))
    names = ", ".join(each.knob.name for each in candidates)
    tried = f"no factor from 2 to {2**POWERS} of {names} ends it. Nearest: limitformer design"
    why = tried if candidates else f"{missing.rstrip('.')}. Nearest: {CODE}"
    return replace(report, fix=f"{verdict.name} has no fix that was tried: {why}")


def require_no_weights(what: Any) -> None:
    """Raise `InputError` for a checkpoint: what its weights were drawn by is its configuration."""
    require(not holds_weights(what), f"{what} holds weights; a fix is for a configuration: {what}/config.json.")


def ends(verdict: Verdict, before: Report, after: Report) -> bool:
    """Whether a verdict is gone, and no new one has its grade or a worse one."""
    names, least = {each.name for each in before.verdicts}, GRADES.index(verdict.grade)
    new = [each for each in after.verdicts if each.name not in names and GRADES.index(each.grade) >= least]
    return verdict.name not in [each.name for each in after.verdicts] and not new


def candidate(
    name: str, sign: int, what: Any, text: Any, subject: Subject, report: Report, options: Mapping[str, Any]
) -> Candidate:
    """Return a knob of a network.

    Raises:
        InputError: it does not have the knob.
    """
    tokens, settings = options.get("tokens", TOKENS), dict(options.get("settings") or {})
    if subject.module is not None:
        return existing(name, sign, text, subject, options)
    if subject.transformer is not None:
        shaped = ShapedTrials(subject.transformer, [name], text, tokens, Objective(effective=None, gradient=None))
        rest = {key: value for key, value in options.items() if key != "settings"}
        return Candidate(
            shaped.knobs[0], sign,
            lambda value, **more: check(shaped.at({name: value}), text, **(rest | more)),
            lambda value: transformer_lines({name: value}),
        )  # fmt: skip
    batch_dim, blocks = options.get("batch_dim", 0), options.get("blocks")
    trials = StockTrials(subject, [name], text, tokens, Objective(gradient=None), batch_dim, blocks)

    def checked(value: float, **more: Any) -> Report:
        setting = {name: value}
        changes = {"settings": settings | trials.fields(setting), "overrides": trials.laws(setting)}
        after = check(what, text, **(dict(options) | changes | more))
        return after if after.name != report.name else replace(after, name=f"{after.name}, {name} × {value:g}")

    def lines(value: float) -> str:
        patch = trials.patch({name: value})
        return lines_for(subject, settings, patch["settings"], patch["weights"])

    return Candidate(trials.knobs[0], sign, checked, lines)


def lines_for(
    subject: Subject, settings: Mapping[str, Any], fields: Mapping[str, Any],
    weights: Mapping[str, tuple[float, float, float]],
) -> str:  # fmt: skip
    """Return the Python that sets these fields and the user's settings, and scales these weights."""
    every = {**settings, **fields}
    if subject.config is None:
        return lines_of("function", subject.name, every, weights)
    made = [f"config.{key} = {each!r}" for key, each in every.items()]
    made += [f"# on the command line: --set {key}={each}" for key, each in fields.items()]
    return "\n".join([*(made if every else []), ""]) + scale_lines(weights)


def in_place_of(
    head: Candidate, what: Any, text: Any, subject: Subject, report: Report, options: Mapping[str, Any]
) -> list[Candidate]:
    """Return what is scaled in place of a head that is also a table: the gain of the last norm, or all tables.

    Smaller by itself, that table would drown in the one of positions.
    """
    if not is_tied(head.knob.name, report, subject.module):
        return [head]
    name, others = last_gain(report, subject.module), list[Candidate]()
    if name is not None:
        others.append(gain_of(name, head.sign, what, text, subject, report, options))
    with suppress(InputError):  # a norm takes its factor away
        others.append(candidate("embedding", head.sign, what, text, subject, report, options))
    return others or [head]


def is_tied(name: str, report: Report, module: nn.Module | None) -> bool:
    """Whether a parameter has another name, too."""
    if module is None:
        return report.laws is not None and bool(report.laws.tied.get(name))
    own = module.get_parameter(name)
    return sum(each is own for _, each in module.named_parameters(remove_duplicate=False)) > 1


def last_gain(report: Report, module: nn.Module | None) -> str | None:
    """Return the name of the last vector that no other block has and whose entries are one positive number."""
    if module is None:
        assert report.laws is not None
        laws, shapes = report.laws.laws, report.laws.shapes
        known = [
            name for name, law in laws.items() if law.kind == CONSTANT and law.shift > 0 and len(shapes[name]) == 1
        ]
    else:
        vectors = [(name, each.detach()) for name, each in module.named_parameters() if each.dim() == 1]
        known = [name for name, each in vectors if each.min() == each.max() > 0]
    kinds = [kind_of(name) for name in known]
    return next((name for name in reversed(known) if kinds.count(kind_of(name)) == 1), None)


def gain_of(
    name: str, sign: int, what: Any, text: Any, subject: Subject, report: Report, options: Mapping[str, Any]
) -> Candidate:
    """Return a factor on the gain of a norm."""
    knob, settings, module = Knob(name, 1.0, weights=(name,)), options.get("settings") or {}, subject.module

    def lines(value: float) -> str:
        now = 1.0 if report.laws is None else report.laws[name].shift
        if module is not None:
            now = float(module.get_parameter(name).detach()[0])
        weights = {name: (value, now, now * value)}
        made = lines_for(subject, settings, {}, weights) if module is None else scale_lines(weights)
        return made.replace("  # std ", "  # gain ")

    if module is not None:
        return replace(scaled(knob, sign, text, module, options), lines=lines, gain=True)

    def checked(value: float, **more: Any) -> Report:
        assert report.laws is not None
        overrides = {name: report.laws[name].times(value)}
        after = check(what, text, **(dict(options) | {"overrides": overrides} | more))
        return replace(after, name=f"{after.name}, {name} × {value:g}")

    return Candidate(knob, sign, checked, lines, gain=True)


def existing(name: str, sign: int, text: Any, subject: Subject, options: Mapping[str, Any]) -> Candidate:
    """Return a factor on weights of a module that exists.

    Raises:
        InputError: it does not have the knob.
    """
    module, blocks = subject.module, options.get("blocks")
    assert module is not None
    inputs = inputs_for(subject, text, options.get("tokens", TOKENS)).with_batch_dim(options.get("batch_dim", 0))
    inputs, passes = settle_module(module, inputs, False, blocks), Passes(module, blocks)
    with one_thread(), evaluating(module):
        try:
            arguments = placed(inputs, module)
            uses = uses_of(passes, lambda: passes.call_once(inputs, arguments, gradients=False))
        finally:
            passes.state.restore()
    stds = stds_by_kind(module)
    laws = {each: normal(std) for each, std in stds.items()}
    network: Any = SimpleNamespace(  # what knobs read of a `Weightless`
        subject=subject,
        module=module,
        blocks=[module.get_submodule(each) for block in passes.layout.blocks for each in block.members],
        weights=[SimpleNamespace(name=each) for each, std in stds.items() if std > 0],
        laws=laws,
    )
    return scaled(factor_knob(name, network, uses), sign, text, module, options)


def scaled(knob: Knob, sign: int, text: Any, module: nn.Module, options: Mapping[str, Any]) -> Candidate:
    """Return a factor on parameters of a module that exists."""
    name = knob.name

    def checked(value: float, **more: Any) -> Report:
        other, factors = copied(module), factors_at([knob], {name: value})
        with torch.no_grad():
            for each, parameter in other.named_parameters():
                parameter.mul_(factors.get(each, 1.0))
        after = check(other, text, **(dict(options) | more))
        return replace(after, name=f"{after.name}, {name} × {value:g}")

    def lines(value: float) -> str:
        laws = {each: normal(std) for each, std in stds_by_kind(module).items()}
        return scale_lines(patterns_of(factors_at([knob], {name: value}), LawTable("", laws, {}, {})))

    return Candidate(knob, sign, checked, lines)


def stds_by_kind(module: nn.Module) -> dict[str, float]:
    """Return the standard deviation of each parameter, root mean square over blocks."""
    kinds: dict[str, list[float]] = {}
    for name, each in module.named_parameters():
        kinds.setdefault(kind_of(name), []).append(float(each.detach().float().var(correction=0)))
    return {name: sqrt(sum(kinds[kind_of(name)]) / len(kinds[kind_of(name)])) for name, _ in module.named_parameters()}


def heads_of(report: Report, module: nn.Module | None) -> list[str]:
    """Return the names of matrices that have a row for each class of the loss, the last first; or a name of none."""
    classes = round(exp(float(report.about.get("chance", 0.0))))
    named = [] if module is None else [(name, tuple(each.shape)) for name, each in module.named_parameters()]
    shapes = dict(named) if report.laws is None else report.laws.shapes
    return [name for name, each in reversed(shapes.items()) if len(each) > 1 and each[0] == classes] or ["*.head"]


def scale_lines(weights: Mapping[str, tuple[float, float, float]]) -> str:
    """Return lines that scale weights of a `model`."""
    return f"{IMPORTS}{block('FACTORS', factor_lines(weights))}\n{SCALE}\n\nscale_weights(model)\n" if weights else ""
