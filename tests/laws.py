"""The whole table of laws: every family, weightless against drawn by transformers (`make laws`, half an hour).

For each family 4,000 weightless samples are compared with 2,000 drawn ones in thirty to fifty statistics of states and
gradients, at the level 1e-4 for a family. For four families a wrong twin must be rejected, in which one kind of weight
has another standard deviation. First the logits of stock models at their default width are compared with the formula of
each family (`architectures`).
"""

import sys

from architectures import CASES, logits
from weightless_families import CONFIGS, drawn, p_values, paired, weightless

LEVEL = 1e-4
TWINS = {"gpt2": "*.c_fc.weight", "llama": "*.down_proj.weight", "bert": "*.dense.weight", "t5": "*.wo.weight"}


def main(families):
    """Print a line for each family; return 1 if one fails."""
    failed = formulas()
    for family in families:
        networks = drawn(family, 2000)
        data = weightless(family, 4000)
        p = p_values(paired(data, networks))
        worst = min(p, key=p.get)
        holds = p[worst] > LEVEL / len(p)
        print(f"{family:12s} {len(p)} statistics, least p {p[worst]:.1e} ({worst})", "" if holds else "FAILS")
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
    """Print a line for each stock model; return those whose logits differ from the formula."""
    failed = []
    for family in CASES:
        seen, expected = logits(family)
        print(f"{family:12s} standard deviation of the first logits {seen:.3f}, by formula {expected:.3f}", flush=True)
        failed += [] if abs(seen / expected - 1) < 0.06 else [f"{family}'s logits"]
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(CONFIGS)))
