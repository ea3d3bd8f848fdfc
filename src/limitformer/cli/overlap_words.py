"""The sentences of `limitformer overlap`: where tokens end, at which thresholds, and how long it takes."""

from math import log
from typing import Any

HIGHER = 1.01  # ratio of a threshold to that of the limit from which it is worth a sentence
INFINITE = ("inf", "-inf")  # a summary has text for infinite numbers


def words_of(summary: dict[str, Any]) -> str:
    """Describe a diffusion's `summary` in a few sentences, with the results for --start and --target if present.

    >>> import textwrap
    >>> import limitformer as lf
    >>> model = lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=1)
    >>> print(textwrap.fill(words_of(lf.overlap(model).summary()), 100))
    Two tokens in dimension 4 at β = 1 end at antipodes with probability 0.1199, else in one cluster;
    orthogonal tokens with probability 0.08443. Antipodes are possible where |β| > 0.6585. This is the
    limit of many layers; few layers in a unit of time need a larger β: |β| > 1.04 with 1 and |β| >
    0.7108 with 10.
    """
    sentences = (f"{subject(summary)} {ending(summary)}.", threshold(summary), few_layers(summary), duration(summary))
    return " ".join(sentence for sentence in sentences if sentence)


def subject(summary: dict[str, Any]) -> str:
    """Name the two tokens or clusters, and the model."""
    p, q = summary["clusters"]
    these = "Two tokens" if (p, q) == (1, 1) else f"Clusters of {p} and {q} tokens"
    epsilon = summary["model"].get("epsilon")
    noise = "" if epsilon is None else f", ε = {epsilon:.6g}"
    strength = "βτ" if is_drawn(summary) else "β"
    dim, beta = summary["model"]["dim"], summary["beta"]
    return f"{these} in dimension {dim} at {strength} = {beta:.6g}{noise}{extensions(summary)}"


def is_drawn(summary: dict[str, Any]) -> bool:
    """Whether each layer draws its own queries and keys."""
    return summary["model"].get("query_key") == "gaussian"


def extensions(summary: dict[str, Any]) -> str:
    """Name the features of the model that [CT] does not have."""
    parts = ["with queries and keys drawn in each layer"] * is_drawn(summary)
    parts += ["under a causal mask"] * (summary["model"].get("mask") == "causal")
    return "".join(f", {part}" for part in parts) + "," * bool(parts)


def ending(summary: dict[str, Any]) -> str:
    """Say where they end, from a uniform start, from overlap 0 and from --start."""
    if nothing_attracts(summary):
        return "end nowhere: neither antipodes nor one cluster attracts them"
    uniform, zero = (probability(summary, start) for start in ("uniform", "zero"))
    if uniform == zero == "0":
        text = "never end at antipodes, always in one cluster"
    elif uniform == zero == "1":
        text = "are certain to end at antipodes"
    else:
        orthogonal = "tokens" if summary["clusters"] == [1, 1] else "clusters"
        rest = f"else in one cluster; orthogonal {orthogonal} with probability {zero}"
        text = f"end at antipodes with probability {uniform}, {rest}"
    return text + from_start(summary)


def nothing_attracts(summary: dict[str, Any]) -> bool:
    return not any(summary["boundaries"][end]["kind"] == "attracting" for end in ("minus", "plus"))


def probability(summary: dict[str, Any], start: str) -> str:
    """Format the probability of antipodes from this start. 0 and 1 are exact; a tiny probability is a power of ten."""
    p, logarithm = summary["antipodal_probability"][start], summary["log_antipodal_probability"][start]
    if logarithm in (*INFINITE, 0.0):
        return "1" if logarithm == 0.0 else "0"
    if p < 1e-300:
        return f"10^{logarithm / log(10):.0f}"
    return f"1 - {summary['single_cluster_probability'][start]:.1g}" if p > 0.99995 else f"{p:.4g}"


def from_start(summary: dict[str, Any]) -> str:
    if "start" not in summary:
        return ""
    return f"; from z = {summary['start']:.6g} with probability {summary['antipodal_probability_from_start']:.4g}"


def threshold(summary: dict[str, Any]) -> str:
    """State the threshold beyond which antipodes are possible."""
    if summary["model"]["kind"] == "HybridTransformer":
        possible, certain = summary["critical_epsilon"], summary["certain_epsilon"]
        return (
            f"Antipodes are possible where ε > {four_digits(possible)}, and certain where ε > {four_digits(certain)}."
        )
    if summary["model"].get("mask") == "causal":
        return "Under a causal mask antipodes attract at no β: the first token sees only itself."
    if summary["metastable"] is not None:
        return "Antipodal clusters of unequal size are only metastable."
    critical = summary["critical_beta"]
    if critical == 0.0:
        return "Antipodes are possible at every β" + ("." if summary["model"]["dim"] == 2 else " but 0.")
    if is_drawn(summary):
        return "With drawn queries and keys antipodes attract only in dimensions 2 and 3."
    return f"Antipodes are possible where |β| > {four_digits(critical)}."


def few_layers(summary: dict[str, Any]) -> str:
    """Warn that networks with few layers in a unit of time need a larger β, where that is known."""
    limit, every = summary["critical_beta"], summary["critical_beta_of_layers"]
    higher = {layers: beta for layers, beta in every.items() if beta is not None and beta > HIGHER * limit}
    if not higher:
        return ""
    where = " and ".join(f"|β| > {four_digits(beta)} with {layers}" for layers, beta in higher.items())
    return f"This is the limit of many layers; few layers in a unit of time need a larger β: {where}."


def duration(summary: dict[str, Any]) -> str:
    """State the mean time from --start to --target, or the mean lifetime of unequal clusters."""
    if "target" in summary:
        start, target, time = summary["start"], summary["target"], summary["mean_hitting_time"]
    elif summary["metastable"] is not None:
        start, target, time = -1.0, summary["metastable"]["target"], summary["metastable"]["mean_lifetime"]
    else:
        return ""
    unit = "unit of time" if time == 1 else "units of time"
    long = "is infinite" if time in INFINITE else f"is {four_digits(time)} {unit}"
    return f"The mean time from z = {start:.6g} to z = {target:.6g} {long}."


def four_digits(value: float | str | None) -> str:
    return "∞" if value is None or isinstance(value, str) else f"{value:.4g}"
