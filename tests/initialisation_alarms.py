"""False alarms of the initialisation check over sound models of every family (`make alarms`, ten minutes).

For each family transformers draws 200 models; torch's layers with their uniform laws are a further family. Each model
is checked as it is, and in some families also rounded to 16 bits. At the level of 1 % and 200 models, 7 alarms or more
have a probability below 0.5 %; all families together must satisfy the same bound.
"""

import sys

import torch
from scipy.stats import binom
from torch import nn

from limitformer.initialisation.weight_by_weight import check_initialisation
from limitformer.subjects.subject import resolve
from limitformer.weightless.law import build_without_weights, table_of
from weightless_families import CONFIGS

SEEDS, LEVEL, BOUND = 200, 0.01, 0.005
ROUNDED = ("gpt2", "llama", "modernbert", "t5", "torch")  # checked in 16 bits too


def torchs_own():
    """Return torch's layers of several sizes, with their uniform laws."""
    return nn.Sequential(*(nn.Linear(n, 24) for n in (8, 24, 64)), nn.Embedding(40, 16, padding_idx=3), nn.LayerNorm(9))


def in_sixteen_bits():
    """Return the same layers drawn in bfloat16, for which torch uses 256 levels."""
    return torchs_own().bfloat16().apply(lambda part: getattr(part, "reset_parameters", lambda: None)())


SOUND = {name: lambda name=name: resolve(CONFIGS[name]()).factory() for name in CONFIGS}
SOUND |= {"torch": torchs_own, "torch, bfloat16": in_sixteen_bits}


def sound_models(name, seeds):
    """Yield drawn models; no two families share random numbers."""
    for seed in seeds:
        torch.manual_seed(1000 * list(SOUND).index(name) + seed)
        yield SOUND[name]()


def law_and_reference(name):
    what = CONFIGS[name]() if name in CONFIGS else torchs_own
    subject = resolve(what)
    reference, result = build_without_weights(subject, torch.float32)
    return table_of(subject, reference, result), reference


def alarms(name, seeds, dtype=torch.float32, level=LEVEL):
    """Return the reports with a finding."""
    law, reference = law_and_reference(name)
    reports = (
        check_initialisation(model.to(dtype), law, reference=reference, level=level)
        for model in sound_models(name, seeds)
    )
    return [report for report in reports if report.findings]


def main(names):
    """Print a line for each family and type, of the same models; return 1 if there are too many alarms."""
    exact, rounded = [], []
    for name in names:
        for dtype in (torch.float32, torch.bfloat16, torch.float16)[: 3 if name in ROUNDED else 1]:
            result = alarms(name, range(SEEDS), dtype)
            (exact if dtype is torch.float32 else rounded).append(len(result))
            first = str(result[0]).splitlines()[1].strip() if result else ""
            print(f"{name:16s} {str(dtype)[6:]:9s} {len(result)} of {SEEDS} {first}", flush=True)
    number = SEEDS * len(exact)
    print(f"alarms: {sum(exact)} of {number} models, {sum(exact) / number:.2%}; rounded: {sum(rounded)}")
    too_many = max(exact + rounded) > binom.isf(BOUND, SEEDS, LEVEL) or sum(exact) > binom.isf(BOUND, number, LEVEL)
    return int(too_many)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(SOUND)))
