"""What `limitformer overlap` answers, in words: where the tokens end, what it takes, and how long."""

from math import log
from typing import Any

INFINITE = ("inf", "-inf")  # as a summary has them


def words_of(summary: dict[str, Any]) -> str:
    """The answer in a few sentences; `summary` is that of the diffusion, with what was asked beside it.

    >>> import limitformer as lf
    >>> model = lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=1)
    >>> for sentence in words_of(lf.overlap(model).summary()).split("; "):
    ...     print(sentence)
    Two tokens in dimension 4 at β = 1 end at antipodes with probability 0.1199, else in one cluster
    orthogonal tokens with probability 0.08443. Antipodes are possible where |β| > 0.6585.
    """
    sentences = (f"{who(summary)} {where(summary)}.", what_it_takes(summary), how_long(summary))
    return " ".join(sentence for sentence in sentences if sentence)


def who(summary: dict[str, Any]) -> str:
    """Two tokens, or two clusters, and the model."""
    p, q = summary["clusters"]
    these = "Two tokens" if (p, q) == (1, 1) else f"Clusters of {p} and {q} tokens"
    epsilon = summary["model"].get("epsilon")
    noise = "" if epsilon is None else f", ε = {epsilon:.6g}"
    strength = "βτ" if is_drawn(summary) else "β"
    return (
        f"{these} in dimension {summary['model']['dim']} at {strength} = {summary['beta']:.6g}{noise}{beyond(summary)}"
    )


def is_drawn(summary: dict[str, Any]) -> bool:
    """Whether each layer has queries and keys of its own."""
    return summary["model"].get("query_key") == "gaussian"


def beyond(summary: dict[str, Any]) -> str:
    """What of the model [CT] does not have."""
    parts = ["with queries and keys drawn in each layer"] * is_drawn(summary)
    parts += ["behind a causal mask"] * (summary["model"].get("mask") == "causal")
    return "".join(f", {part}" for part in parts) + "," * bool(parts)


def where(summary: dict[str, Any]) -> str:
    """Where they end: from the start that was asked for, else from a uniform one and from overlap 0."""
    if neither(summary):
        return "end nowhere: neither antipodes nor one cluster attracts them"
    uniform, zero = (chance(summary, start) for start in ("uniform", "zero"))
    if uniform == zero == "0":
        ending = "never end at antipodes, always in one cluster"
    elif uniform == zero == "1":
        ending = "are certain to end at antipodes"
    else:
        orthogonal = "tokens" if summary["clusters"] == [1, 1] else "clusters"
        rest = f"else in one cluster; orthogonal {orthogonal} with probability {zero}"
        ending = f"end at antipodes with probability {uniform}, {rest}"
    return ending + from_start(summary)


def neither(summary: dict[str, Any]) -> bool:
    """Whether no end attracts."""
    return not any(summary["boundaries"][end]["kind"] == "attracting" for end in ("minus", "plus"))


def chance(summary: dict[str, Any], start: str) -> str:
    """The probability of antipodes from this start, also where no double has it; 0 and 1 only where it is that."""
    p, logarithm = summary["antipodal_probability"][start], summary["log_antipodal_probability"][start]
    if logarithm in (*INFINITE, 0.0):
        return "1" if logarithm == 0.0 else "0"
    if p < 1e-300:
        return f"10^{logarithm / log(10):.0f}"
    return f"1 - {summary['single_cluster_probability'][start]:.1g}" if p > 0.99995 else f"{p:.4g}"


def from_start(summary: dict[str, Any]) -> str:
    """The same from --start."""
    if "start" not in summary:
        return ""
    return f"; from z = {summary['start']:.6g} with probability {summary['antipodal_probability_from_start']:.4g}"


def what_it_takes(summary: dict[str, Any]) -> str:
    """The threshold of antipodes."""
    if summary["model"]["kind"] == "HybridTransformer":
        possible, certain = summary["critical_epsilon"], summary["certain_epsilon"]
        return f"Antipodes are possible where ε > {shown(possible)}, and certain where ε > {shown(certain)}."
    if summary["model"].get("mask") == "causal":
        return "Behind a causal mask antipodes attract at no β: the first token sees itself alone."
    if summary["metastable"] is not None:
        return "Antipodal clusters of unequal size are metastable only."
    critical = summary["critical_beta"]
    if critical == 0.0:
        return "Antipodes are possible at every β" + ("." if summary["model"]["dim"] == 2 else " but 0.")
    if is_drawn(summary):
        return "With drawn queries and keys antipodes attract in dimensions 2 and 3 alone."
    return f"Antipodes are possible where |β| > {shown(critical)}."


def how_long(summary: dict[str, Any]) -> str:
    """The mean time that was asked for, or that unequal clusters stay antipodal."""
    if "target" in summary:
        start, target, time = summary["start"], summary["target"], summary["mean_hitting_time"]
    elif summary["metastable"] is not None:
        start, target, time = -1.0, summary["metastable"]["target"], summary["metastable"]["mean_lifetime"]
    else:
        return ""
    unit = "unit of time" if time == 1 else "units of time"
    long = "is infinite" if time in INFINITE else f"is {shown(time)} {unit}"
    return f"The mean time from z = {start:.6g} to z = {target:.6g} {long}."


def shown(value: float | str | None) -> str:
    """Four digits, or ∞."""
    return "∞" if value is None or isinstance(value, str) else f"{value:.4g}"
