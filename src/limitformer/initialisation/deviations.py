"""What deviates from the law, one weight, buffer or tie after the other; and layers that deviate from their like."""

import torch
from torch import Tensor, nn

from limitformer.initialisation import findings as found_as
from limitformer.initialisation.bugs import recognised
from limitformer.initialisation.findings import Deviation
from limitformer.initialisation.held import LONG, Held
from limitformer.initialisation.like_layers import outliers
from limitformer.initialisation.lines import p_of_lines
from limitformer.initialisation.sharing import broken_ties, copies, new_ties
from limitformer.initialisation.subject import NONE, Subject, evidence
from limitformer.initialisation.weight_tests import SMALLEST, p_values
from limitformer.weightless import laws


def tested(name: str, subject: Subject) -> dict[str, float]:
    """The p-values of one weight, each by itself; 0 is what the law excludes."""
    each, law, parameter = subject.held[name], subject.laws[name], subject.parameters[name]
    if each.odd:
        return {"NaN": 0.0}
    if not each.count or law.kind == laws.UNKNOWN:
        return {}
    if law.kind == laws.GIVEN:
        meant = None if subject.reference is None else dict(subject.reference.named_parameters()).get(name)
        return {} if meant is None or meant.is_meta or same(parameter, meant) else {"values": 0.0}
    if law.std == 0:
        off = max(abs(each.low - law.shift), abs(each.high - law.shift))
        return {} if off <= near_zero(each.spacing, law.shift) else {"constant": 0.0}
    found = p_values(each, law) | {"lines": p_of_lines(parameter, law)}
    if each.constant and each.count >= LONG:
        found["constant"] = 0.0
    if any(lines_dead(each)):
        found["dead rows"] = 0.0
    if any(not bool((parameter.detach()[row] == value).all()) for row, value in law.rows.items()):
        found["fixed rows"] = 0.0
    return found


def near_zero(spacing: float, value: float) -> float:
    """How far from a number rounding may take it."""
    return spacing * abs(value) + (SMALLEST if spacing > 1e-5 and value else 0.0)


def same(mine: Tensor, meant: Tensor) -> bool:
    """Whether two tensors agree up to rounding to the type of the first."""
    if mine.shape != meant.shape:
        return False
    if not mine.is_floating_point():
        return bool(torch.equal(mine.cpu(), meant.to("cpu", mine.dtype)))
    close = max(4 * torch.finfo(mine.dtype).eps, 1e-5)
    a, b = mine.detach().cpu().double(), meant.detach().to("cpu", mine.dtype).double()
    return bool(torch.allclose(a, b, rtol=close, atol=1e-12, equal_nan=True))


def lines_dead(each: Held) -> tuple[int, int]:
    """Rows and columns that are all zero; lines of few entries do not count."""
    if each.dead or not len(each.rows):
        return 0, 0
    long = len(each.columns) >= LONG, len(each.rows) >= LONG
    return int((each.rows == 0).sum()) * long[0], int((each.columns == 0).sum()) * long[1]


def deviation(name: str, corrected: dict[str, float], subject: Subject) -> Deviation:
    """What stands out of one weight against its law, and the bug that it looks like."""
    e = evidence(name, subject)
    bug, detail = recognised(e)
    certain = [test for test in ("NaN", "constant", "values", "fixed rows") if test in corrected]
    kind = (
        certain[0]
        if certain
        else "dead rows"
        if "dead rows" in corrected
        else min(corrected, key=corrected.__getitem__)
    )
    if kind == "constant" and e.held.dead and e.law.std > 0:
        kind = "dead"
    return Deviation(name, kind, min(corrected.values()), found_as.held_text(e.held, e.law), str(e.law), bug, detail)


def law_free(subject: Subject) -> list[Deviation]:
    """Where no law is known: NaN is found with the rest; dead matrices and dead rows."""
    found = []
    for name, each in subject.held.items():
        bias = "bias" in name.rpartition(".")[2]  # zero by custom, also where those of many experts are a matrix
        if subject.laws[name].kind != laws.UNKNOWN or not len(each.rows) or each.odd or bias:
            continue
        rows, columns = lines_dead(each)
        owner = subject.module.get_submodule(name.rpartition(".")[0])
        rows -= getattr(owner, "padding_idx", None) is not None
        if each.dead or rows > 0 or columns > 0:
            kind, text = "dead" if each.dead else "dead rows", found_as.held_text(each, NONE)
            bug, detail = (found_as.DEAD, "every entry is 0") if each.dead else (None, "")
            found.append(Deviation(name, kind, 0.0, text, "none known", bug, detail))
    return found


def of_buffers(subject: Subject) -> list[Deviation]:
    """Buffers that are not those of the reference; without one, those that are NaN."""
    meant = {} if subject.reference is None else dict(subject.reference.named_buffers())
    found = []
    for name, buffer in subject.module.named_buffers():
        twin = meant.get(name)
        if buffer.is_meta or not buffer.numel() or (twin is not None and twin.is_meta):
            continue
        wrong = not same(buffer, twin) if twin is not None else bool(buffer.isnan().any())
        if wrong:
            running = isinstance(subject.module.get_submodule(name.rpartition(".")[0]), nn.modules.batchnorm._NormBase)
            kind = "statistics" if running and bool(buffer.isfinite().all()) else "buffer"
            law = "another buffer" if twin is None else found_as.buffer_text(twin)
            bug = None if kind == "statistics" else found_as.UNINITIALISED
            found.append(
                Deviation(name, kind, 0.0, found_as.buffer_text(buffer), law, bug, "the buffer is not as built")
            )
    return found


def of_sharing(subject: Subject) -> list[Deviation]:
    """Ties that are broken or new, and copies."""
    found = [] if subject.table is None else broken_ties(subject.parameters, subject.table)
    apart = [each.names for each in found]
    found += [] if subject.table is None else new_ties(subject.parameters, subject.table)
    found += copies(subject.held, subject.table, apart)
    return [found_as.sharing(each) for each in found]


def of_like_layers(subject: Subject, trained: bool, level: float) -> list[Deviation]:
    """Layers that stand out among their like, where no law says what they should be."""
    asked = {n: h for n, h in subject.held.items() if trained or subject.laws[n].kind == laws.UNKNOWN}
    return [
        Deviation(o.name, "like layers", o.p, f"std {asked[o.name].std:.3g}, {o.ratio:.3g} times its like layers'",
                  "none known" if not trained else str(subject.laws[o.name]), None, "")
        for o in outliers(asked, level, trained)
    ]  # fmt: skip
