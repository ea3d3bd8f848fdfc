"""The predictions and the training runs of the studies in `docs/studies/protocol.md`: one JSON line each.

    python -m limitformer_papers.beyond.study_runs foretell FORETOLD.jsonl
    python -m limitformer_papers.beyond.study_runs train RUNS.jsonl FORETOLD.jsonl --study 1 --half choosing

What is in the file is not repeated, so that a run can be killed at any time; `--minutes` ends it after the run in
progress. `study_analysis` prints the numbers of the protocol.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import limitformer as lf
from limitformer.checking.report import Report
from limitformer.designing import Objective
from limitformer.designing.objective import values_of
from limitformer.reports.verdict import GRADES
from limitformer_papers.beyond import study_networks as nets
from limitformer_papers.beyond.ranks import generator
from limitformer_papers.beyond.study_networks import KNOBS, StudyNetwork, batch_of, builder_of, finite

Row = dict[str, Any]
CHOOSE, TEST = "choosing", "held-out"
DEPTHS, RATES, STEPS, WARMUP = (6, 12, 24), (3e-4, 1e-3, 3e-3, 1e-2), 300, 20
FAMILIES_OF = {CHOOSE: ("gpt2", "none", "sandwich"), TEST: ("llama", "bert", "qk")}
STDS = {CHOOSE: (0.02, 0.05, 0.1, 0.12, 0.03, 0.25, 0.4, 0.006), TEST: (0.025, 0.06, 0.08, 0.15, 0.04, 0.3, 0.5, 0.004)}
OUTPUTS = {CHOOSE: (1, 0, 0, 1, 6, 0, 1, 1), TEST: (0, 1, 0, 1, 8, 0, 1, 1)}  # 0: 1/√(2 depth)
EMBEDDINGS = {CHOOSE: (1, 1, 10, 1, 1, 1, 1, 1), TEST: (1, 1, 12, 1, 1, 1, 1, 1)}
FIXES = {  # the knob of the first remedy that a verdict names and that these networks have, and its direction
    "loss": ("head", -1), "collapsed": ("output", -1), "grows": ("output", -1), "dies": ("output", 1),
    "frozen": ("logits", -1), "uniform": ("logits", 1), "vanishing": ("output", -1), "exploding": ("output", -1),
    "constant": ("embedding", 1), "faint": ("embedding", -1), "swamped": ("embedding", 1), "range": ("logits", -1),
}  # fmt: skip
IDLE = {("bert", "embedding"), ("qk", "logits"), ("sandwich", "output")}  # a norm takes these factors away
MOST, STRUCTURAL = 6, 4.0  # powers of two of a fix; the placebo's factor beside a change of norms
PAIRS = 10  # networks of each half in study 2
RATE_FAMILIES, EACH = ("none", "sandwich", "llama", "qk"), 5  # of study 3
GRID, MIDDLE, RATE_STEPS, RATE_WARMUP = [1e-4 * 2**k for k in range(14)], 4, 150, 30


def networks(half: str) -> list[StudyNetwork]:
    """Return the networks of a half of study 1: each family with each setting; the depths take turns."""
    result = []
    for a, family in enumerate(FAMILIES_OF[half]):
        for b, (std, output, embedding) in enumerate(zip(STDS[half], OUTPUTS[half], EMBEDDINGS[half], strict=True)):
            depth = DEPTHS[(a + b) % len(DEPTHS)]
            seed = 1 + 8 * a + b + 100 * (half == TEST)
            result.append(StudyNetwork(family, depth, std, embedding, output=output or (2 * depth) ** -0.5, seed=seed))
    return result


def rate_networks() -> list[StudyNetwork]:
    """Return the networks of study 3: depths, stds and outputs are drawn."""
    random, result = generator(3), []
    for k in range(EACH * len(RATE_FAMILIES)):
        depth, log = int(random.integers(3, 13)), random.uniform(math.log(0.015), math.log(0.12))
        output = (2 * depth) ** -0.5 if random.random() < 0.5 else 1.0
        family = RATE_FAMILIES[k % len(RATE_FAMILIES)]
        result.append(StudyNetwork(family, depth, float(f"{math.exp(log):.2g}"), output=output, seed=301 + k))
    return result


def rows_in(path: Path) -> list[Row]:
    """Return the rows of a file; a last line that is torn is not one."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def network_of(row: Row) -> StudyNetwork:
    return StudyNetwork(**{key: row[key] for key in StudyNetwork.__dataclass_fields__ if key in row})


def append(path: Path, row: Row) -> None:
    """Write a row behind the last whole line."""
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write((json.dumps(row, allow_nan=False) + "\n").encode())


def checked(one: StudyNetwork, witness: bool = False) -> Report:
    """Return the report of `check` on two sequences of the training text."""
    options: Any = {"loss": "next-token", "samples": 4, "seed": one.seed, "witness": witness, "progress": False}
    return lf.check(builder_of(one), batch_of(one, -1)[:2, :-1], **options)


def names_in(report: Report) -> list[str]:
    return [each.name for each in report.verdicts]


def changed(one: StudyNetwork, change: Row) -> StudyNetwork:
    return replace(one, **{key: getattr(one, key) * each if key in KNOBS else each for key, each in change.items()})


def numbers_of(one: StudyNetwork, report: Report) -> Row:
    """Return all predictors; the larger, the worse a network is said to be."""
    curves = report.curves
    values = values_of(curves, report.data)
    parts = [curves[name].values for name in ("gradient", "outside_gradient")]
    norm = np.sqrt(sum((each.reshape(len(each), -1) ** 2).sum(1) for each in parts))
    with np.errstate(all="ignore"):
        apart, back = np.log(1 - curves["correlation"].values), 2 * np.log(curves["stream_gradient"].values)
        angle, gradient = (abs((each[:, -1] - each[:, 1]) / (each.shape[1] - 2)) for each in (apart, back))
    radius, mass = nets.koopman(one)
    found = {
        "grade": GRADES.index(report.grade), "verdicts": len(report.verdicts) * (report.grade != "fine"),
        "distance": Objective().distance(values), "gradients' ratio": values["gradient"][0],
        "loss at the start": curves["loss"].values, "gradient norm": norm,
        "angle exponent": angle, "gradient exponent": gradient, "both exponents": np.hypot(angle, gradient),
        "RKSP radius": radius, "RKSP near-unit mass": mass,
    }  # fmt: skip
    return {name: finite(float(np.median(value))) for name, value in found.items()}


def mended(one: StudyNetwork, report: Report) -> Row:
    """Return the fix of the first verdict that has one, the smallest that ends it, and a placebo; or neither."""
    names = names_in(report)
    first = next((name for name in names if name in FIXES), None)
    if first is None:
        return {}
    knob, sign = FIXES[first]
    tries: list[Row] = [{knob: 2.0 ** (sign * k)} for k in range(1, MOST + 1)]
    if first == "vanishing" and one.family == "bert":
        tries = [{"place": "pre"}]
    fix = next((each for each in tries if first not in names_in(checked(changed(one, each)))), None)
    if fix is None:
        return {"verdict": first}
    factor, named = fix.get(knob, STRUCTURAL), {FIXES[name][0] for name in names if name in FIXES}
    others = [each for each in KNOBS if each not in named and (one.family, each) not in IDLE]
    placebos = [{str(each): size} for each in generator(one.seed).permutation(others) for size in (factor, 1 / factor)]
    same = (each for each in placebos if set(names_in(checked(changed(one, each)))) == set(names))
    return {"verdict": first, "fix": fix, "placebo": next(same, None)}


def foretold(study: int, one: StudyNetwork) -> Row:
    if study == 1:
        report = checked(one, witness=True)
        about = {"names": names_in(report), "witness": report.witness and report.witness.status}
        return {"numbers": numbers_of(one, report), **about, **mended(one, report)}
    found = lf.rate(builder_of(one), batch_of(one, -1)[:, :-1], optimizer=nets.adamw, loss="next-token", clip=1.0,
                    seed=one.seed, networks=4, witness=False, progress=False)  # fmt: skip
    return {"low": finite(found.tune[0]), "high": finite(found.tune[1]), "borne": finite(found.rate)}


def to_foretell(rows: list[Row]) -> Iterator[Row]:
    done = {(row["study"], row["seed"]) for row in rows}
    for study, ones in ((1, [*networks(CHOOSE), *networks(TEST)]), (3, rate_networks())):
        yield from ({"study": study, **asdict(one)} for one in ones if (study, one.seed) not in done)


def pairs(rows: list[Row], half: str) -> list[Row]:
    """Return the networks of study 2 of one half, drawn from those that have a fix and a placebo."""
    every = [row for row in rows if row["study"] == 1 and row["family"] in FAMILIES_OF[half]]
    if len(every) < len(networks(half)):
        raise SystemExit(f"study 2 needs the file of foretold numbers with all networks of the {half} half.")
    able = [row for row in every if row.get("placebo")]
    return [able[k] for k in generator(2).permutation(len(able))[:PAIRS]]


def to_train(study: int, half: str, rows: list[Row], foretold_rows: list[Row]) -> Iterator[Row]:
    """Yield the runs of a study that are not in the file; those of study 3 depend on what earlier ones gave."""
    done = {key_of(row): row for row in rows}
    if study == 3:
        for one, warmup in product(rate_networks(), (0, RATE_WARMUP)):
            row = {"study": 3, "kind": "", "warmup": warmup, "asked": RATE_STEPS, **asdict(one)}
            own = rates_of(rows, one.seed, warmup)
            while (place := next_place(own)) is not None:
                own[place] = row | {"rate": GRID[place]}
                yield own[place]  # the caller adds the losses to it
        return
    cases = [(one, "") for one in networks(half)]
    if study == 2:
        known = {one.seed: one for one in networks(half)}
        both = product(pairs(foretold_rows, half), ("fix", "placebo"))
        cases = [(changed(known[row["seed"]], row[kind]), kind) for row, kind in both]
    for (one, kind), rate in product(cases, RATES):
        row = {"study": study, "kind": kind, "rate": rate, "warmup": WARMUP, "asked": STEPS, **asdict(one)}
        if key_of(row) not in done:
            yield row


def rates_of(rows: list[Row], seed: int, warmup: int) -> dict[int, Row]:
    """Return the runs of a network of study 3, by the place of their rate on the grid."""
    return {GRID.index(r["rate"]): r for r in rows if (r["study"], r["seed"], r["warmup"]) == (3, seed, warmup)}


def next_place(own: dict[int, Row]) -> int | None:
    """Return the next place on the grid of rates: around the best one, then up to the first that diverges."""
    if not own:
        return MIDDLE
    best = best_place(own)
    for k in (best - 1, *range(best + 1, len(GRID))):
        if k >= 0 and k not in own:
            return k
        if k > best and diverges(own[k]):
            return None
    return None


def best_place(own: dict[int, Row]) -> int:
    return min(own, key=lambda k: (math.inf if own[k]["choose"] is None else own[k]["choose"], k))


def diverges(row: Row) -> bool:
    """Return whether training ended in no finite loss, or not below that of the first step."""
    return row["choose"] is None or row["first"] is None or row["choose"] >= row["first"]


def key_of(row: Row) -> tuple[Any, ...]:
    return row["study"], row["kind"], row["seed"], row["rate"], row["warmup"]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("foretell", "train"))
    parser.add_argument("out", type=Path)
    parser.add_argument("foretold", type=Path, nargs="?")
    parser.add_argument("--study", type=int, choices=(1, 2, 3), default=1)
    parser.add_argument("--half", choices=(CHOOSE, TEST), default=CHOOSE)
    parser.add_argument("--minutes", type=float, default=math.inf)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows, began, spent = rows_in(given.out), time.monotonic(), list[float]()
    trains, known = given.what == "train", rows_in(given.foretold) if given.foretold else []
    work = to_train(given.study, given.half, rows, known) if trains else to_foretell(rows)
    ahead = [] if trains and given.study == 3 else list(work)
    about = {"text": nets.text()[1], "unigrams": nets.loss_of_frequencies()}
    total = len(ahead)
    for k, row in enumerate(ahead or work, 1):
        if time.monotonic() - began > 60 * given.minutes:
            break
        one, start = network_of(row), time.process_time()
        row |= nets.train(one, row["rate"], row["asked"], row["warmup"]) if trains else foretold(row["study"], one)
        spent.append(round(time.process_time() - start, 1))
        append(given.out, row | about | {"seconds": spent[-1]})
        left = f", {total - k} left, about {np.mean(spent) * (total - k) / 60:.0f} minutes of CPU" if total else ""
        print(f"{one.family}, {one.depth} layers: {spent[-1]} s{left}", flush=True)


if __name__ == "__main__":
    main()
