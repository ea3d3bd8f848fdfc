"""Where known models lie: the numbers behind the verdicts of eight models, and their table on docs/check.md.

python -m benchmarks.known_models writes `src/limitformer/checking/known-models.csv`, a model at a time: models that are
in the file are not computed again. Each number is the median of two networks of 128 unrelated tokens, from the law of
the public shape; of an encoder and a decoder it is that which is nearer to its threshold.
"""

import csv
from pathlib import Path
from typing import Any

import numpy as np

import limitformer as lf
from limitformer.checking.measures import MEASURES, measures
from limitformer.checking.thresholds import THRESHOLDS
from limitformer.checking.verdicts import RULES, Rule, dies
from limitformer.reports.report import csv_of
from limitformer.reports.verdict import BROKEN, WATCH, number_text

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "src/limitformer/checking/known-models.csv"
PAGE = ROOT / "docs/check.md"
MODELS = (
    *("gpt2-xl", "bert-large", "roberta-large", "t5-large"),
    *("llama-3-8b", "mistral-7b", "qwen2-7b", "gemma-2-9b"),
)
HEAD = "| measure | threshold"
COLUMNS = ("model", "measure", "value")


def values_of(model: Any, **options: Any) -> dict[str, float]:
    """Return the numbers of a model by the name of their rule, the worst of its stacks."""
    report = lf.check(model, witness=False, **options)
    result: dict[str, tuple[float, float]] = {}
    for stack in (*report.stacks, report):
        for rules in measures(stack.curves, report.thresholds).values():
            for name, each in rules.items():
                here = float(np.median(each.severity)), float(np.median(each.value))
                result[name] = max(result.get(name, here), here)
    return {name: value for name, (_, value) in result.items()}


def table(rows: list[dict[str, str]]) -> str:
    """Return the thresholds and the numbers of the file as a table of Markdown."""
    values = {(row["measure"], row["model"]): number_text(float(row["value"])) for row in rows}
    lines = [f"{HEAD} | {' | '.join(MODELS)} |", "|---" * (len(MODELS) + 2) + "|"]
    for words, finds in MEASURES.items():
        own = [rule for rule in RULES if rule.find in finds and rule.threshold]
        limits = []
        for grade in (WATCH, BROKEN):
            numbers = [number_text(limit_of(rule)) for rule in own if rule.grade == grade]
            limits += [f"{grade} {' or '.join(numbers)}"] if numbers else []
        names = ", ".join(dict.fromkeys(f"`{rule.name}`" for rule in own))
        cells = [values.get((finds[0].__name__, model), "") for model in MODELS]
        lines += [f"| {names}: {words} | {', '.join(limits)} | {' | '.join(cells)} |"] if any(cells) else []
    return "\n".join(lines)


def limit_of(rule: Rule) -> float:
    limit = THRESHOLDS[str(rule.threshold)].at(rule.grade)
    assert limit is not None
    return 1 / limit if rule.find is dies else limit


def main() -> None:
    rows = list(csv.DictReader(FILE.read_text(encoding="utf-8").splitlines())) if FILE.exists() else []
    for model in MODELS:
        if model in {row["model"] for row in rows}:
            continue
        print(model, flush=True)
        numbers = values_of(model, tokens=128, samples=2, progress=False)
        rows += [{"model": model, "measure": name, "value": f"{value:.6g}"} for name, value in numbers.items()]
        FILE.write_text(csv_of(COLUMNS, rows), encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(HEAD)
    _, _, after = rest.partition("\n\n")
    PAGE.write_text(f"{before}{table(rows)}\n\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
