"""The numbers behind the verdicts, whether or not they reach a threshold."""

from collections.abc import Callable, Mapping

import xarray as xr

from limitformer.checking import verdicts as rules
from limitformer.checking.thresholds import Threshold
from limitformer.checking.verdicts import Limits, RuleResult

Find = Callable[[xr.Dataset, Limits], RuleResult | None]
MEASURES: Mapping[str, tuple[Find, ...]] = {  # rules of one number, which may be too large or too small
    "loss away from a uniform guess, nats": (rules.far_loss,),
    "correlation of tokens at the end": (rules.collapsed,),
    "stream, end / first block": (rules.grows, rules.dies),
    "stream, end / embedding": (rules.grows_from_start, rules.dies_from_start),
    "std of logits / √(2 ln m), widest block": (rules.frozen,),
    "tokens taken in / seen, least": (rules.narrow,),
    "tokens taken in / seen, most": (rules.uniform,),
    "gradients of blocks, largest / smallest": (rules.vanishing,),
    "gradient of stream, first block / end": (rules.exploding,),
    "experts, unrelated tokens: 1": (rules.one_expert,),
    "longest half-life of a state, tokens": (rules.forgets,),
    "agreement of outputs, other condition": (rules.ignores_input,),
    "agreement of outputs, unrelated inputs": (rules.constant,),
    "largest branch / stream": (rules.faint,),
    "largest / smallest group of tokens": (rules.uneven,),
    "first branch / embedding": (rules.swamped,),
    "largest activation": (rules.massive,),
    "largest logit": (rules.large_logits,),
}
TOO_SMALL = ("dies", "dies_from_start", "narrow", "one_expert", "forgets", "faint")  # rules whose number is then worse


def measures(curves: xr.Dataset, thresholds: Mapping[str, Threshold]) -> dict[str, dict[str, RuleResult]]:
    """Return the results of the rules by measure and name of the rule, with severity 1 at the milder threshold."""
    limits = {name: each.broken if each.watch is None else each.watch for name, each in thresholds.items()}
    numbers = {name: limit for name, limit in limits.items() if limit is not None}
    results = {
        words: {rule.__name__: result for rule in several if (result := rule(curves, numbers)) is not None}
        for words, several in MEASURES.items()
    }
    return {words: each for words, each in results.items() if each}
