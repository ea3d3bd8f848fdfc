"""The whole table of laws: every family, weightless against drawn by transformers (`make laws`, half an hour).

For each family 4,000 weightless samples against 2,000 drawn ones, some thirty to fifty statistics of states and
gradients; the level is 1e-4 for all of a family together. For four families a twin, one kind of whose weights has
another standard deviation, must be rejected. Before that, the logits of stock models at their default width, against
the formula of each family (`architectures`).
"""

import sys

from architectures import CASES, logits
from weightless_families import CONFIGS, drawn, p_values, paired, weightless

LEVEL = 1e-4
TWINS = {"gpt2": "*.c_fc.weight", "llama": "*.down_proj.weight", "bert": "*.dense.weight", "t5": "*.wo.weight"}


def main(families):
    """Print a line for each; 1 if one fails."""
    failed = formulas()
    for family in families:
        networks = drawn(family, 2000)
        data = weightless(family, 4000)
        found = p_values(paired(data, networks))
        worst = min(found, key=found.get)
        holds = found[worst] > LEVEL / len(found)
        print(f"{family:12s} {len(found)} statistics, least p {found[worst]:.1e} ({worst})", "" if holds else "FAILS")
        print(f"{'':12s} weights: {data.attrs['weights']}; kept: {data.attrs['kept'] or 'none'}", flush=True)
        failed += [] if holds else [family]
        if family in TWINS:
            twin = p_values(paired(weightless(family, 4000, overrides={TWINS[family]: 0.23}), networks))
            rejected = min(twin.values()) < 1e-8
            print(f"{'':12s} twin, {TWINS[family]} of 0.23: least p {min(twin.values()):.0e}", flush=True)
            failed += [] if rejected else [f"{family}'s twin"]
    print("failed:", ", ".join(failed) or "none")
    return bool(failed)


def formulas():
    """Print a line for each stock model; those whose logits the formula does not give."""
    failed = []
    for family in CASES:
        seen, expected = logits(family)
        print(f"{family:12s} standard deviation of the first logits {seen:.3f}, by formula {expected:.3f}", flush=True)
        failed += [] if abs(seen / expected - 1) < 0.06 else [f"{family}'s logits"]
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(CONFIGS)))
