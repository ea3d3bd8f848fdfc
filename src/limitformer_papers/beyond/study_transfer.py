"""Study 4 of `docs/studies/protocol.md`: does a rate hold at another size where `transfer` says so?

    python -m limitformer_papers.beyond.study_transfer foretell TRANSFER.jsonl
    python -m limitformer_papers.beyond.study_transfer train TRANSFER.jsonl

A rule is put into effect by the lines that `transfer` prints; muP done wrong leaves out one of their three functions.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import limitformer as lf
from limitformer.scaling.lines import lines_of
from limitformer.scaling.transfer import factors_of, parametrised
from limitformer_papers.beyond import study_networks as nets
from limitformer_papers.beyond.study_networks import StudyNetwork, batch_of
from limitformer_papers.beyond.study_runs import Row, append, best_place, rows_in

STEPS, WARMUP, FACTOR, LEAST = 200, 20, 2.0, -4
PARTS = ("initialise", "multiply", "rates")  # what a rule changes
AXES = {"width": (64, 128, 256), "depth": (3, 6, 12)}
RATES = {"adamw": 4e-3, "sgd": 0.5, "muon": 0.02}  # in the middle of the grid


@dataclass(frozen=True)
class Setting:
    """How networks grow: the family, what grows, the optimiser, and the parts of a rule that are in effect."""

    family: str
    over: str
    optimizer: str
    rule: str = "standard"
    parts: tuple[str, ...] = PARTS

    @property
    def name(self) -> str:
        left_out = "".join(f" without {each}" for each in PARTS if each not in self.parts)
        return f"{self.family}, {self.over}, {self.optimizer}, {self.rule}{left_out}"

    def network(self, size: int) -> StudyNetwork:
        width, depth = (size, 4) if self.over == "width" else (64, size)
        return StudyNetwork(
            self.family, depth, 0.08, output=(2 * depth) ** -0.5, seed=401, width=width, heads=width // 16
        )


WRONG = [tuple(each for each in PARTS if each != one) for one in PARTS]
SETTINGS = [
    *(Setting("gpt2", "width", each) for each in RATES),
    *(Setting("gpt2", "width", each, "mup") for each in ("adamw", "sgd")),
    *(Setting("gpt2", "width", "adamw", "mup", parts) for parts in WRONG),
    *(Setting("llama", "width", "adamw", rule) for rule in ("standard", "mup")),
    *(Setting("gpt2", "depth", each) for each in RATES),
    *(Setting("gpt2", "depth", "adamw", rule) for rule in ("completep", "depth-mup")),
    Setting("llama", "depth", "adamw"),
]


def optimizers(kind: str, module: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Return the optimisers: Muon has the matrices of blocks, and AdamW a tenth of its rate for the rest."""
    if kind == "adamw":
        return nets.plain(module, rate)
    if kind == "sgd":
        return [torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9)]
    inside = [each for name, each in module.named_parameters() if name.startswith("blocks") and each.dim() == 2]
    rest = [each for name, each in module.named_parameters() if not name.startswith("blocks") or each.dim() < 2]
    return [torch.optim.Muon(inside, lr=rate), torch.optim.AdamW(rest, lr=rate / 10)]


def lines(setting: Setting, size: int, rate: float) -> dict[str, Any]:
    """Return the functions that `transfer` would print for a size: `optimizer`, `initialise` and `multiply`."""
    base, make = AXES[setting.over][0], partial(made_by, setting)
    put, _, rules = parametrised(model_of(setting), setting.over, size, base, setting.rule, make, STEPS)
    rules, space = rules.with_rate(rate).with_factors(factors_of(put)), dict[str, Any]()
    exec(lines_of(setting.name, put, rules).code, space)
    return space


def made_by(setting: Setting, module: nn.Module) -> list[torch.optim.Optimizer]:
    return optimizers(setting.optimizer, module, RATES[setting.optimizer])


def model_of(setting: Setting) -> Callable[..., nn.Module]:
    """Return the function of the size that makes the network, without any rule."""

    def of_width(width: int = AXES["width"][0]) -> nn.Module:
        return nets.Decoder(setting.network(width), 0.08)

    def of_depth(depth: int = AXES["depth"][0]) -> nn.Module:
        return nets.Decoder(setting.network(depth), 0.08)

    return of_width if setting.over == "width" else of_depth


def prepare(setting: Setting, size: int, module: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Put the parts of the setting's rule into effect; return the optimisers."""
    if setting.rule == "standard":
        return optimizers(setting.optimizer, module, rate)
    space = lines(setting, size, rate)
    for part in ("initialise", "multiply"):
        if part in setting.parts:
            space[part](module)
    if "rates" not in setting.parts:
        return optimizers(setting.optimizer, module, rate)
    made = space["optimizer"](module)
    return made if isinstance(made, list) else [made]


def foretold(setting: Setting) -> Row:
    """Return what `transfer` says: its verdict, and the exponent of the measure of the verdict that changes most."""
    sizes, model, rule, make = AXES[setting.over], model_of(setting), setting.rule, partial(made_by, setting)
    if setting.parts != PARTS:  # the parts that are in effect belong to the user's own code
        model, make, rule = of_parts(setting), partial(made_of_parts, setting), "standard"
    found = lf.transfer(
        model, {setting.over: list(sizes)}, batch_of(setting.network(sizes[0]), -1)[:, :-1], optimizer=make, rule=rule,
        loss="next-token", clip=1.0, samples=4, seed=4, witness=False, progress=False,
    )  # fmt: skip
    powers = {name: found.exponents[name].value for name in found.deciding}
    name = max(powers, key=lambda each: abs(powers[each]))
    return {"transfers": found.transfers, "measure": name, "exponent": powers[name], "exponents": powers}


def tuned(setting: Setting, size: int) -> Row:
    """Return the range of `rate` for a network of one size, with the rule in effect."""
    one = setting.network(size)
    found = lf.rate(
        lambda: of_parts(setting)(size), batch_of(one, -1)[:, :-1], optimizer=partial(made_of_parts, setting),
        loss="next-token", clip=1.0, seed=one.seed, networks=4, witness=False, progress=False,
    )  # fmt: skip
    return {"size": size, "low": nets.finite(found.tune[0]), "high": nets.finite(found.tune[1])}


def of_parts(setting: Setting) -> Callable[..., nn.Module]:
    def build(width: int = AXES["width"][0]) -> nn.Module:
        module = model_of(setting)(width)
        prepare(setting, width, module, RATES[setting.optimizer])
        return module

    return build


def made_of_parts(setting: Setting, module: nn.Module) -> list[torch.optim.Optimizer]:
    if "rates" not in setting.parts:
        return made_by(setting, module)
    made = lines(setting, module.get_parameter("table.weight").shape[1], RATES[setting.optimizer])["optimizer"](module)
    return made if isinstance(made, list) else [made]


def runs_of(rows: list[Row], setting: Setting, size: int) -> dict[int, Row]:
    """Return the runs of a setting at a size, by the place of their rate."""
    return {r["place"]: r for r in rows if "place" in r and (r["setting"], r["size"]) == (setting.name, size)}


def next_place(own: dict[int, Row], wanted: int) -> int | None:
    """Return the next place on the grid: `wanted`, then the neighbours of the best one until both are known."""
    if wanted not in own:
        return wanted
    best = best_place(own)
    return next((k for k in (best + 1, best - 1) if k not in own and k >= LEAST), None)


def to_train(rows: list[Row]) -> Iterator[Row]:
    """Yield the runs that are missing; the base's best rate is the first one of every other size."""
    for setting in SETTINGS:
        wanted = 0
        for size in AXES[setting.over]:
            own = runs_of(rows, setting, size)
            while (place := next_place(own, wanted)) is not None:
                own[place] = {"setting": setting.name, "size": size, "place": place}
                yield own[place]  # the caller adds the losses to it
            wanted = best_place(own) if size == AXES[setting.over][0] else wanted


def main(what: str, path: str) -> None:
    torch.set_num_threads(1)
    file = Path(path)
    rows = rows_in(file)
    if what == "foretell":
        done = {row["setting"] for row in rows if "exponent" in row}
        for setting in (each for each in SETTINGS if each.name not in done):
            append(file, {"setting": setting.name, **foretold(setting)})
            print(setting.name, flush=True)
        ranges = {(row["setting"], row["size"]) for row in rows if "low" in row}
        for setting, size in product((SETTINGS[0], SETTINGS[3]), AXES["width"]):
            if (setting.name, size) not in ranges:
                append(file, {"setting": setting.name, **tuned(setting, size)})
                print(setting.name, size, flush=True)
        return
    by_name = {each.name: each for each in SETTINGS}
    for row in to_train(rows):
        setting, size = by_name[row["setting"]], row["size"]
        rate = RATES[setting.optimizer] * FACTOR ** row["place"]
        one = setting.network(size)
        row |= nets.train(one, rate, STEPS, WARMUP, partial(prepare, setting, size)) | {"text": nets.text()[1]}
        append(file, row)
        print(setting.name, size, row["place"], row["loss"], f"{row['seconds']} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
