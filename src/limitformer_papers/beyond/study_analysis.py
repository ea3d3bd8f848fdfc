"""The numbers of `docs/studies/protocol.md`, from the files that `study_runs` and `study_transfer` write.

python -m limitformer_papers.beyond.study_analysis FOLDER     # with foretold.jsonl, runs.jsonl and transfer.jsonl
"""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy import optimize, stats

from limitformer.base.errors import require
from limitformer_papers.beyond import study_runs as runs
from limitformer_papers.beyond import study_transfer as transfer
from limitformer_papers.beyond.ranks import p_value, ranks, within
from limitformer_papers.beyond.study_networks import WORDS
from limitformer_papers.beyond.study_runs import CHOOSE, GRID, RATES, TEST, Row, best_place, rows_in
from limitformer_papers.common.claims import Claim

Array = NDArray[np.float64]
FILES = ("foretold", "runs", "transfer")
OURS = ("grade", "verdicts", "distance", "gradients' ratio")
KINDS = ("unchanged", "placebo", "fix")
MARGIN, LEVEL, COVERED = 0.2, 0.025, 0.8
PLACES = range(transfer.LEAST, 9)


def collected(foretold: list[Row], trained: list[Row], transferred: list[Row]) -> xr.Dataset:
    """Return what is foretold and what came, of all networks whose runs are complete.

    Of study 1 (network): `loss`, `trains`, `diverged`, and `numbers` (predictor, network). Of study 2: `after` (kind,
    pair). Of study 3 (case): `low`, `high`, `borne`, `best`, `over`, NaN where there is none. Of study 4 (setting,
    size): `place`, `regret`, `range_low`, `range_high`, and `losses` (setting, size, rate).
    """
    unigrams = next(row["unigrams"] for row in trained if "unigrams" in row)
    ends = outcomes(trained, unigrams)
    parts = [networks(foretold, ends), pairs(foretold, ends), cases(foretold, trained), settings(transferred)]
    wanted = sum(len(runs.pairs(foretold, half)) for half in (CHOOSE, TEST))
    return xr.merge(parts).assign_attrs(unigrams=unigrams, pairs=wanted)


def outcomes(trained: list[Row], unigrams: float) -> dict[tuple[str, int], Row]:
    """Return the outcome by kind and seed of the networks with all their runs, of studies 1 and 2."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for run in trained:
        if run["study"] < 3:
            groups.setdefault((run["kind"], run["seed"]), []).append(run)
    return {key: outcome(each, unigrams) for key, each in groups.items() if len(each) == len(RATES)}


def outcome(own: list[Row], unigrams: float) -> Row:
    """Return what a network's runs gave: the loss at the best rate, that of a uniform guess if all diverged."""
    sound = [run for run in own if run["choose"] is not None]
    best = min(sound, key=lambda run: run["choose"], default={"loss": math.inf})
    trains = sum(run["loss"] <= unigrams - MARGIN for run in sound)
    return {"loss": min(best["loss"], math.log(WORDS)), "trains": trains, "diverged": len(own) - len(sound)}


def networks(foretold: list[Row], ends: dict[tuple[str, int], Row]) -> xr.Dataset:
    rows = [row for row in foretold if row["study"] == 1 and ("", row["seed"]) in ends]
    require(bool(rows), "no network of study 1 has its prediction and all its runs.")
    names = [*rows[0]["numbers"], "depth"]
    numbers = [[(row["numbers"] | row)[name] for row in rows] for name in names]
    found = {
        key: ("network", [float(ends["", row["seed"]][key]) for row in rows]) for key in ("loss", "trains", "diverged")
    }
    about = {key: ("network", [row[key] for row in rows]) for key in ("family", "seed")}
    half = [CHOOSE if row["family"] in runs.FAMILIES_OF[CHOOSE] else TEST for row in rows]
    along = {"predictor": names, "half": ("network", half), **about}
    return xr.Dataset({"numbers": (("predictor", "network"), np.array(numbers, float)), **found}, along)


def pairs(foretold: list[Row], ends: dict[tuple[str, int], Row]) -> xr.Dataset:
    rows = {row["seed"]: row for row in foretold if row["study"] == 1}
    seeds = [seed for kind, seed in ends if kind == "fix" and {("", seed), ("placebo", seed)} <= ends.keys()]
    after = np.array([[ends["" if kind == KINDS[0] else kind, seed]["loss"] for seed in seeds] for kind in KINDS])
    names = [architecture(rows[seed]["family"], rows[seed]["depth"]) for seed in seeds]
    verdicts = [rows[seed]["verdict"] for seed in seeds]
    along = {"kind": list(KINDS), "architecture": ("pair", names), "verdict": ("pair", verdicts)}
    return xr.Dataset({"after": (("kind", "pair"), after)}, along)


def architecture(family: str, depth: float) -> str:
    return f"{family}, {depth:.0f} layers"


def cases(foretold: list[Row], trained: list[Row]) -> xr.Dataset:
    """Return the networks of study 3 whose search is complete; NaN is a range or a rate that is not known."""
    known = {row["seed"]: row for row in foretold if row["study"] == 3}
    found, families, none = [], [], math.nan
    for seed, warmup in sorted({(run["seed"], run["warmup"]) for run in trained if run["study"] == 3}):
        own, row = runs.rates_of(trained, seed, warmup), known[seed]
        if runs.next_place(own) is not None:
            continue
        over = [GRID[k] for k in own if k > best_place(own) and runs.diverges(own[k])]
        families.append(row["family"])
        said = [none if row[key] is None else row[key] for key in ("low", "high", "borne")]
        found.append([warmup, *said, best_rate(own), min(over, default=none)])
    columns = np.array(found, float).reshape(-1, 6).T
    names = ("warmup", "low", "high", "borne", "best", "over")
    every = {name: ("case", column) for name, column in zip(names, columns, strict=True)}
    return xr.Dataset(every, {"case_family": ("case", np.array(families, str))})


def best_rate(own: dict[int, Row]) -> float:
    """Return the rate of the lowest loss, by a parabola through the best rate and its neighbours."""
    k = best_place(own)
    around = np.array([own[j]["choose"] if j in own else None for j in (k - 1, k, k + 1)], float)
    if np.isnan(around).any():
        return GRID[k]
    a, b, _ = np.polyfit([-1, 0, 1], around, 2)
    return float(GRID[k] * 2 ** np.clip(-b / (2 * a), -1, 1)) if a > 0 else GRID[k]


def settings(rows: list[Row]) -> xr.Dataset:
    """Return the settings of study 4; those whose runs are not complete have no best place (NaN)."""
    said = {row["setting"]: row for row in rows if "exponent" in row}
    ranges = {(row["setting"], row["size"]): row for row in rows if "low" in row}
    ones = [each for each in transfer.SETTINGS if each.name in said]
    shape = len(ones), 3
    place, regret, low, high = (np.full(shape, math.nan) for _ in range(4))
    losses = np.full((*shape, len(PLACES)), math.nan)
    for a, setting in enumerate(ones):
        every = [transfer.runs_of(rows, setting, size) for size in transfer.AXES[setting.over]]
        for b, (size, own) in enumerate(zip(transfer.AXES[setting.over], every, strict=True)):
            for k, run in own.items():
                losses[a, b, k - transfer.LEAST] = math.nan if run["loss"] is None else run["loss"]
            if found := ranges.get((setting.name, size)):
                low[a, b], high[a, b] = found["low"], found["high"]
        if all(own and transfer.next_place(own, best_place(own)) is None for own in every):
            best = [best_place(own) for own in every]
            at_base = [math.inf if own[best[0]]["loss"] is None else own[best[0]]["loss"] for own in every]
            place[a] = best
            regret[a] = [at - own[k]["loss"] for at, own, k in zip(at_base, every, best, strict=True)]
    told = {
        key: ("setting", np.array([said[each.name][key] for each in ones], float)) for key in ("transfers", "exponent")
    }
    by_size = {"place": place, "regret": regret, "range_low": low, "range_high": high}
    data = told | {name: (("setting", "size"), values) for name, values in by_size.items()}
    along = {"setting": [each.name for each in ones], "rate": list(PLACES)}
    return xr.Dataset(data | {"losses": (("setting", "size", "rate"), losses)}, along)


def auroc(x: Array, fails: NDArray[np.bool_]) -> float:
    """Return the probability that a network that fails has the larger x; ties count half."""
    many, few = int(fails.sum()), int((~fails).sum())
    return float((ranks(x)[fails].sum() - many * (many + 1) / 2) / (many * few)) if many and few else math.nan


def auroc_interval(area: float, many: int, few: int) -> tuple[float, float]:
    """Return Newcombe's interval (method 5): A with |area − A| = z √var(A), the variance that of Hanley and McNeil."""
    if not many or not few or math.isnan(area):
        return 0.0, 1.0
    z, more = stats.norm.ppf(0.975), (many + few) / 2 - 1

    def excess(a: float) -> float:
        variance = a * (1 - a) * (1 + more * (1 - a) / (2 - a) + more * a / (1 + a)) / (many * few)
        return float((area - a) ** 2 - z**2 * variance)

    inside = min(max(area, 1e-9), 1 - 1e-9)  # at 0 and 1 the variance is 0
    low = optimize.brentq(excess, 0.0, inside) if area > 0 else 0.0
    high = optimize.brentq(excess, inside, 1.0) if area < 1 else 1.0
    return float(low), float(high)


def jackknife(of: Callable[[NDArray[np.intp]], float], clusters: Sequence[Any], least: float = 0.0, level: float = 0.95
              ) -> tuple[float, float]:  # fmt: skip
    """Return the interval of a statistic of members: delete one cluster at a time, Student's t of clusters − 1.

    It reaches at least as far as that of a normal statistic with the standard error `least`.
    """
    names, labels = np.unique([str(each) for each in clusters], return_inverse=True)
    values = np.array([of(np.flatnonzero(labels != k)) for k in range(len(names))])
    half = stats.t.ppf((1 + level) / 2, len(names) - 1) * math.sqrt((len(names) - 1) * values.var())
    half = max(half, stats.norm.ppf((1 + level) / 2) * least)
    middle = of(np.arange(len(labels)))
    return middle - half, middle + half


def rho_interval(x: Array, y: Array, families: Array, clusters: Sequence[Any]) -> tuple[float, float]:
    """Return the 95 % interval of ρ within families, on the scale of artanh."""
    least = math.sqrt(1.06 / max(1, len(x) - 3 * len(np.unique(families))))
    ends = jackknife(lambda k: math.atanh(np.clip(within(x[k], y[k], families[k]), -0.999, 0.999)), clusters, least)
    return math.tanh(ends[0]), math.tanh(ends[1])


def sign_flips(differences: Array) -> float:
    """Return the two-sided p of a mean of clusters, over all their signs."""
    every = (np.arange(2 ** len(differences))[:, None] >> np.arange(len(differences)) & 1) * 2.0 - 1
    return float(np.mean(np.abs(every @ differences) >= abs(differences.sum()) - 1e-12))


def of_half(data: xr.Dataset, half: str) -> xr.Dataset:
    return data.isel(network=np.flatnonzero(data["half"] == half))


def clusters_of(data: xr.Dataset) -> list[str]:
    return [
        architecture(*each)
        for each in zip(data["family"].values, data["numbers"].sel(predictor="depth").values, strict=True)
    ]


def table(data: xr.Dataset, half: str) -> xr.Dataset:
    """Return ρ and AUROC of each predictor in one half, with their intervals `_low` and `_high` (predictor,)."""
    one = of_half(data, half)
    y, families, clusters = one["loss"].values, one["family"].values, clusters_of(one)
    fails = y > data.attrs["unigrams"] - MARGIN
    few = [len({c for c, f in zip(clusters, fails, strict=True) if f == wanted}) for wanted in (True, False)]
    names = ("ρ", "ρ_low", "ρ_high", "AUROC", "AUROC_low", "AUROC_high", "ρ_rates", "AUROC_diverges")
    rows = []
    for x in one["numbers"].values:
        area = auroc(x, fails)
        ends = *rho_interval(x, y, families, clusters), area, *auroc_interval(area, *few)
        more = within(x, -one["trains"].values, families), auroc(x, one["diverged"].values > 0)
        rows.append([within(x, y, families), *ends, *more])
    columns = {name: ("predictor", column) for name, column in zip(names, np.transpose(rows), strict=True)}
    return xr.Dataset(columns, {"predictor": data["predictor"]}, {"fails": int(fails.sum())})


def chosen(data: xr.Dataset) -> tuple[str, str]:
    """Return the two predictors with the largest ρ in the choosing half: of ours, and of all others."""
    one = of_half(data, CHOOSE)
    rho = {str(n): within(x, one["loss"].values, one["family"].values)
           for n, x in zip(one["predictor"].values, one["numbers"].values, strict=True)}  # fmt: skip
    ours = max(OURS, key=lambda name: rho[name])
    return ours, max((name for name in rho if name not in OURS), key=lambda name: rho[name])


def verdicts_study(data: xr.Dataset) -> list[Claim]:
    """Return the hypotheses of study 1, then the table."""
    found = []
    halves = [half for half in (CHOOSE, TEST) if len(of_half(data, half)["loss"]) == 24]
    if len(halves) == 2:
        one, names = of_half(data, TEST), chosen(data)
        a, b = (one["numbers"].sel(predictor=name).values for name in names)
        y, families = one["loss"].values, one["family"].values
        p, rho = p_value(a, y, families, 1), within(a, y, families)
        low, high = jackknife(lambda k: within(a[k], y[k], families[k]) - within(b[k], y[k], families[k]),
                              clusters_of(one), level=1 - LEVEL)  # fmt: skip
        found = [
            Claim(f"H1a: ρ of {names[0]} and the loss is above 0, held out (p = {p:.4f})", rho,
                  bool(p < LEVEL and rho > 0)),
            Claim(f"H1b: that ρ minus the one of {names[1]} is above 0 ({low:.2f} to {high:.2f})",
                  rho - within(b, y, families), bool(low > 0)),
        ]  # fmt: skip
    for half in halves:
        rows = table(data, half)
        found.append(Claim(f"study 1, {half}: networks of 24 that fail", rows.attrs["fails"]))
        for name in rows["predictor"].values:
            row = {str(key): float(value) for key, value in rows.sel(predictor=name).data_vars.items()}
            for of in ("ρ", "AUROC"):
                ends = f"({row[of + '_low']:.2f} to {row[of + '_high']:.2f})"
                found.append(Claim(f"{half}: {of} of {name} {ends}", row[of]))
            found.append(Claim(f"{half}: ρ of {name} and the number of rates that do not train", row["ρ_rates"]))
            if math.isfinite(row["AUROC_diverges"]):  # some run diverges
                found.append(Claim(f"{half}: AUROC of {name}, any run diverges", row["AUROC_diverges"]))
    return found


def fixes_study(data: xr.Dataset) -> list[Claim]:
    """Return the differences of losses of study 2, the mean over architectures."""
    found, names = [], data["architecture"].values
    if len(set(names)) < 3:
        return []
    for one, other in (("fix", "placebo"), ("fix", "unchanged"), ("placebo", "unchanged")):
        d = (data["after"].sel(kind=one) - data["after"].sel(kind=other)).values
        means = np.array([d[names == each].mean() for each in np.unique(names)])
        half = stats.t.ppf(0.975, len(means) - 1) * means.std(ddof=1) / math.sqrt(len(means))
        low, high, p = means.mean() - half, means.mean() + half, sign_flips(means)
        about = f"({low:.3f} to {high:.3f}, p = {p:.4f}; {len(names)} networks of {len(means)} architectures)"
        first = other == "placebo" and len(names) >= data.attrs["pairs"]
        name = f"{'H2' if first else 'study 2'}: loss of {one} minus {other} {about}"
        found.append(Claim(name, float(means.mean()), bool(p < 0.05 and means.mean() < 0) if first else None))
    return found


def rates_study(data: xr.Dataset) -> list[Claim]:
    """Return the coverage of study 3, without and with warm-up."""
    found = []
    for warmup in np.unique(data["warmup"]):
        part = data.isel(case=np.flatnonzero(data["warmup"] == warmup))
        families, best = part["case_family"].values, part["best"].values
        inside = (part["low"].values < best) & (best < part["high"].values)
        count, total, what = int(inside.sum()), len(inside), f"warm-up {warmup:.0f}"
        p = stats.binomtest(count, total, COVERED, alternative="less").pvalue
        low, up = stats.binomtest(count, total).proportion_ci(0.95, "exact")
        about = (
            f"of {total} networks whose best rate is in the range ({low:.2f} to {up:.2f}; p of 80 % or more {p:.4f})"
        )
        found.append(Claim(f"{'study 3' if warmup else 'H3'}, {what}: share {about}", count / total,
                           bool(p >= 0.05) if not warmup and total == 20 else None))  # fmt: skip
        found += [
            Claim(f"{what}: {f}, share in the range", float(inside[families == f].mean())) for f in np.unique(families)
        ]
        for name in ("best", "over"):
            rate, borne = part[name].values, part["borne"].values
            known = np.isfinite(borne) & np.isfinite(rate)
            if known.sum() > 2:
                logs, rest = np.log2(rate / borne)[known], (borne[known], rate[known], families[known])
                about = (
                    f"{known.sum()} networks; scatter {logs.std(ddof=1):.2f}; ρ within families {within(*rest):.2f}, "
                    f"p {p_value(*rest, 3):.4f}"
                )
                what_rate = {"best": "best", "over": "diverging"}[name]
                what_it_is = f"log₂ of the {what_rate} rate over the one that nine of ten bear, median ({about})"
                found.append(Claim(f"{what}: {what_it_is}", float(np.median(logs))))
    return found


def transfer_study(data: xr.Dataset) -> list[Claim]:
    """Return what study 4 says of the settings whose runs are complete."""
    part = data.isel(setting=np.flatnonzero(data["place"].notnull().all("size")))
    shifts, regret = (part["place"][:, -1] - part["place"][:, 0]).values, part["regret"][:, -1].values
    foretold, found = -2 * part["exponent"].values, list[Claim]()  # of a ratio of 4, in powers of two
    if len(shifts) > 3:
        one, other = (
            stats.spearmanr(x, y, alternative="greater") for x, y in ((foretold, shifts), (abs(foretold), regret))
        )
        count = f"({len(shifts)} settings, one-sided p = "
        found = [
            Claim(f"H4: ρ of foretold and found change of the best rate is above 0 {count}{one.pvalue:.4f})",
                  float(one.statistic), bool(one.pvalue < 0.05) if len(shifts) == len(transfer.SETTINGS) else None),
            Claim(f"study 4: ρ of the change's size and the regret {count}{other.pvalue:.4f})", float(other.statistic)),
            Claim(f"study 4: mean of |found − foretold change|, where no change has {abs(shifts).mean():.2f}",
                  float(abs(shifts - foretold).mean())),
        ]  # fmt: skip
        refused = part["transfers"].values == 0
        for said, ones in (("said not to transfer", refused), ("not decided, or said to transfer", ~refused)):
            if ones.any():
                rest = f"{ones.sum()} settings {said}, {(shifts[ones] == 0).sum()} without change"
                found.append(Claim(f"study 4: mean regret in nats of {rest}", float(regret[ones].mean())))
        for axis in transfer.AXES:
            ones = np.array([f", {axis}," in name for name in part["setting"].values])
            if ones.sum() > 3:
                one = stats.spearmanr(foretold[ones], shifts[ones], alternative="greater")
                said = f"study 4: ρ over the {axis} alone ({ones.sum()} settings, one-sided p = {one.pvalue:.4f})"
                found.append(Claim(said, float(one.statistic)))
    for k, name in enumerate(part["setting"].values):
        said = f"foretold {foretold[k]:+.1f}" + ", transfers" * (part["transfers"][k] == 1).item()
        found.append(Claim(f"{name}: change of the best rate in powers of two ({said})", float(shifts[k])))
        found.append(Claim(f"{name}: regret in nats", float(regret[k])))
    return found


def claims(data: xr.Dataset) -> list[Claim]:
    return [*verdicts_study(data), *fixes_study(data), *rates_study(data), *transfer_study(data)]


def load(folder: Path) -> xr.Dataset:
    """Return the data of the three files in a folder.

    Raises:
        InputError: a file has no whole row, or no network of study 1 has all its runs.
    """
    files = {name: rows_in(folder / f"{name}.jsonl") for name in FILES}
    missing = [f"{name}.jsonl" for name, rows in files.items() if not rows]
    require(
        not missing, f"{folder} has no rows in {', '.join(missing)}. Nearest: the commands of docs/studies/protocol.md."
    )
    return collected(*files.values())


if __name__ == "__main__":
    for claim in claims(load(Path(sys.argv[1]))):
        print(f"{claim.value:8.4f}  {claim.name}" + {True: ": holds", False: ": fails", None: ""}[claim.holds])
