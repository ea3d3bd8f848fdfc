"""Benchmarks: `make bench` prints tables and writes out/benchmarks.json. Names after the folder select some.

Compared things run in turn within one process on the same cores, and the ratio is the median over the turns: machines
are noisy, ratios less so.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import limitformer as lf
from benchmarks import attention, floors, gradients, hooks, sweep_overhead, weightless, weightless_drawn
from benchmarks.dense_root import dense_root_step
from benchmarks.sphere_loop import run_layers, uniform_tokens
from limitformer.models import Transformer
from limitformer.nn.drawn import simulate as simulate_networks
from limitformer.numerics.random import replica_normals
from limitformer.sphere.methods import methods_of
from limitformer_papers import FIGURES

TURNS = 5
# Least ratios, seconds and megabytes that the project asks of itself.
WANTED = {"attention": 250, "attention + feed-forward": 100, "8 tokens": 20, "16 tokens": 1000}
FIXED, DRAWN = None, "gaussian"
WANTED_SPHERE = {  # (tokens, dim, query_key)
    (2, 4, FIXED): 8,
    (8, 16, FIXED): 2,
    (8, 96, FIXED): 10,
    (50, 4, FIXED): 3,
    (2, 4, DRAWN): 8,
    (8, 64, DRAWN): 10,
}
WANTED_UNLIKE = 2.0  # of a layer of two tokens, without its random numbers, over the plain one
WANTED_COLD, WANTED_WARM, WANTED_FIGURE, WANTED_MEMORY = 45, 15, 120, 1000
WANTED_FIG3 = 600
LONG = ("ct-fig4", "ct-fig6", "lifetimes")  # minutes to hours; their pages say how long
KEY = np.array([1, 2], np.uint64)
THREADS = os.cpu_count() or 1
screen = Console()


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compared(
    fast: Callable[[], object], slow: Callable[[], object], fast_units: int, slow_units: int
) -> dict[str, float]:
    """Return the median time per unit of each, measured alternately, and the median ratio."""
    fast(), slow()
    times = np.array([(seconds(fast) / fast_units, seconds(slow) / slow_units) for _ in range(TURNS)])
    ratios = times[:, 1] / times[:, 0]
    return {
        "fast_ns": float(np.median(times[:, 0]) * 1e9),
        "slow_ns": float(np.median(times[:, 1]) * 1e9),
        "ratio": float(np.median(ratios)),
        "least_ratio": float(ratios.min()),
        "largest_ratio": float(ratios.max()),
    }


def alone(work: Callable[[], object], units: int) -> float:
    """Return the median time per unit in nanoseconds."""
    work()
    return float(np.median([seconds(work) / units for _ in range(TURNS)]) * 1e9)


def network_models() -> dict[str, Transformer]:
    """Return models of two tokens at width 200, as in [ST, Fig. 1]."""
    attention, feedforward = lf.ShapedAttention(tau0=1.0), lf.ShapedReLU(c_plus=0.0, c_minus=-1.0)
    common: dict[str, Any] = {"width": 200, "depth": 50, "gamma": 8**-0.5}
    return {
        "attention": Transformer(**common, attention=attention),
        "attention + feed-forward": Transformer(**common, attention=attention, feedforward=feedforward),
    }


def chain_against_network() -> list[dict[str, Any]]:
    """Compare a layer of the chain with a layer of the network in torch, both on all cores, and with its floor."""
    start, rows = lf.equicorrelated(tokens=2, correlation=0.2), []
    for name, model in network_models().items():
        samples, networks = 20_000, 256

        def chain(model: Transformer = model, samples: int = samples) -> object:
            return lf.simulate(model, start, samples=samples, seed=0, record=[model.depth], progress=False)

        def network(model: Transformer = model, networks: int = networks) -> object:
            return simulate_networks(
                model, start, samples=networks, seed=0, record=[model.depth], batch=networks, progress=False
            )

        def floor(model: Transformer = model) -> None:
            floors.attention_layer(2_000, model.depth, 2, 200, 200, KEY)
            if model.feedforward is not None:
                floors.feedforward_layer(2_000, model.depth, 2, 200, 200, KEY)

        row = {"wanted": WANTED[name], **compared(chain, network, samples * model.depth, networks * model.depth)}
        single = alone(
            lambda model=model: lf.simulate(  # type: ignore[misc]
                model, start, samples=4_000, seed=0, record=[model.depth], threads=1, progress=False
            ),
            4_000 * model.depth,
        )
        floor_ns = alone(floor, 2_000 * model.depth)
        rows.append(
            {
                "what": name,
                **row,
                "one_thread_ns": single,
                "floor_ns": floor_ns,
                "over_floor": single / floor_ns,
            }
        )
    return rows


def limit_against_dense_root() -> list[dict[str, Any]]:
    """Compare the factor step with the batched dense root, both on all cores."""
    rows = []
    for tokens, samples in ((2, 40_000), (8, 8_000), (16, 2_000)):
        v0 = lf.equicorrelated(tokens=tokens, correlation=0.2).covariance
        sde = lf.limit(Transformer(width=100, depth=100, gamma=0.2, attention=lf.ShapedAttention(tau0=1.0)))
        paths = best_batch(sde, v0)
        batch = torch.tensor(v0).expand(paths, tokens, tokens).clone()

        def factor(samples: int = samples, sde: Any = sde, v0: Any = v0, threads: int = THREADS) -> object:
            return lf.simulate(
                sde, v0, samples=samples, seed=0, record=[sde.horizon], dt=0.01, threads=threads, progress=False
            )

        def dense(sde: Any = sde, batch: torch.Tensor = batch) -> object:
            return dense_root_step(sde, batch, 0.01)

        row = compared(factor, dense, samples * 100, paths)
        single = alone(lambda factor=factor, few=samples // 4: factor(few, threads=1), samples // 4 * 100)  # type: ignore[misc]
        floor_ns = alone(lambda tokens=tokens: floors.limit_step(200, 100, tokens, KEY), 200 * 100)  # type: ignore[misc]
        rows.append(
            {
                "what": f"{tokens} tokens",
                "wanted": WANTED.get(f"{tokens} tokens", ""),
                **row,
                "one_thread_ns": single,
                "floor_ns": floor_ns,
                "over_floor": single / floor_ns,
            }
        )
    return rows


def sphere_against_loop() -> list[dict[str, Any]]:
    """Compare a layer of the chain on the sphere with a loop in torch, on one thread each."""
    before, rows = torch.get_num_threads(), []
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    for (tokens, dim, query_key), wanted in WANTED_SPHERE.items():
        model = lf.StochasticTransformer(
            tokens=tokens, dim=dim, beta=1.0, layers_per_unit_time=100, query_key=query_key
        )
        replicas = best_replicas(model, generator)
        x, layers = uniform_tokens(replicas, model, generator), max(2, 20_000 // (replicas * tokens))
        samples, time_ = (20_000, 10.0) if tokens == 2 else (128, 10.0)

        def chain(model: Any = model, samples: int = samples, time_: float = time_) -> object:
            return lf.simulate(
                model, horizon=time_, samples=samples, seed=0, record=[time_], threads=1, progress=False, keep="outcome"
            )

        def loop(model: Any = model, x: torch.Tensor = x, layers: int = layers) -> object:
            return run_layers(x, model, layers, generator)

        row = compared(chain, loop, samples * round(time_ * 100), replicas * layers)
        drawn = ", drawn queries" if query_key else ""
        what = f"{tokens} tokens, dim {dim}{drawn} ({methods_of(model, 'gaussian')[0]})"
        rows.append({"what": what, "wanted": wanted, **row, "loop_batch": replicas})
    torch.set_num_threads(before)
    return rows


def unlike_pairs() -> list[dict[str, Any]]:
    """Compare a layer of two tokens that attention moves by different rules with the plain layer."""
    common: dict[str, Any] = {"tokens": 2, "dim": 4, "beta": 1.0, "layers_per_unit_time": 100}
    samples, units, rows = 20_000, 20_000 * 1000, []

    def chain(model: Any) -> Callable[[], object]:
        options: dict[str, Any] = {
            "horizon": 10.0,
            "record": [10.0],
            "threads": 1,
            "progress": False,
            "keep": "outcome",
        }
        return lambda: lf.simulate(model, samples=samples, seed=0, **options)

    base = chain(lf.StochasticTransformer(**common))
    normals = alone(lambda: replica_normals((1, 2), 800, 1000), 200_000)
    kinds: dict[str, dict[str, Any]] = {"causal": {"mask": "causal"}, "drawn": {"query_key": "gaussian"}}
    for name, more in kinds.items():
        row = compared(base, chain(lf.StochasticTransformer(**common, **more)), units, units)
        row["slow_ns"] -= normals
        ratio = row["slow_ns"] / row["fast_ns"]
        what = f"{name}, less four normals ({normals:.0f} ns)"
        rows.append({**row, "what": what, "ratio": ratio, "at_most": WANTED_UNLIKE})
    return rows


def best_replicas(model: Any, generator: torch.Generator) -> int:
    """Find the number of trajectories at which the loop is fastest per trajectory."""

    def cost(replicas: int) -> float:
        x = uniform_tokens(replicas, model, generator)
        return alone(lambda: run_layers(x, model, 3, generator), 3 * replicas)

    return min((16, 64, 256, 1024, 4096), key=cost)


def best_batch(sde: Any, v0: Any) -> int:
    """Find the number of paths at which the dense root is fastest per path."""

    def cost(paths: int) -> float:
        batch = torch.tensor(v0).expand(paths, *v0.shape).clone()
        return alone(lambda: dense_root_step(sde, batch, 0.01), paths)

    return min((20, 100, 500), key=cost)


def thread_scaling() -> list[dict[str, Any]]:
    """Time the same chain on one thread, two, … all."""
    model = network_models()["attention + feed-forward"]
    start, rows = lf.equicorrelated(tokens=2, correlation=0.2), []
    counts = sorted({1, 2, THREADS})
    times: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(TURNS):
        for count in counts:
            times[count].append(
                seconds(
                    lambda count=count: lf.simulate(  # type: ignore[misc]
                        model,
                        start,
                        samples=20_000,
                        seed=0,
                        record=[model.depth],
                        threads=count,
                        progress=False,
                    )
                )
            )
    for count in counts:
        ratios = np.array(times[1]) / np.array(times[count])
        rows.append(
            {
                "what": f"{count} threads",
                "seconds": float(np.median(times[count])),
                "speedup": float(np.median(ratios)),
            }
        )
    return rows


def first_result() -> list[dict[str, Any]]:
    """Time a new process up to each figure at paper scale; the first run has no compiled kernels on disk."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": f"{folder}/kernels"}
        for name, what, wanted in (
            ("st-fig1", "cold", WANTED_COLD),
            ("st-fig1", "warm", WANTED_WARM),
            *((figure, "warm", WANTED_FIGURE) for figure in FIGURES if figure not in ("st-fig1", "ct-fig3", *LONG)),
            ("ct-fig3", "warm", WANTED_FIG3),
        ):
            taken, megabytes = new_process(name, folder, environment)
            rows.append(
                {
                    "what": f"{name}, {what}",
                    "wanted": wanted,
                    "seconds": taken,
                    "wanted_megabytes": WANTED_MEMORY,
                    "megabytes": megabytes,
                }
            )
    return rows


def new_process(name: str, folder: str, environment: dict[str, str]) -> tuple[float, float]:
    """Return the seconds and peak megabytes of making a figure at paper scale."""
    # The peak that a process reports of its child includes its own, from before the child became another program.
    code = (
        "import sys; from limitformer_papers import make; make(sys.argv[1], out=sys.argv[2]);"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    began = time.perf_counter()
    command = [sys.executable, "-c", code, name, f"{folder}/out"]
    done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    return time.perf_counter() - began, int(done.stdout) / 1024


def show(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(*rows[0], title=title, title_justify="left")
    for row in rows:
        table.add_row(
            *(
                value if isinstance(value, str) else f"{value:,.3g}" if value < 100 else f"{value:,.0f}"
                for value in row.values()
            )
        )
    screen.print(table)


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "out")
    report: dict[str, Any] = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": THREADS},
        "torch_threads": torch.get_num_threads(),
    }
    for name, title, measure in (
        ("chain", "Chain against network (torch, float32): ns a layer and sample", chain_against_network),
        (
            "limit",
            "Limit: factor step against dense root (torch, float64): ns a step and sample",
            limit_against_dense_root,
        ),
        (
            "sphere",
            "Tokens on the sphere: chain against a loop (torch, float32), one thread: ns a layer and trajectory",
            sphere_against_loop,
        ),
        ("unlike", "Two tokens in dimension 4, one thread: causal mask or drawn queries over plain", unlike_pairs),
        (
            "gradients",
            "Gradients of the chain, one thread (networks in torch, float32): ns a layer and sample",
            lambda: gradients.table(compared),
        ),
        ("threads", "Thread scaling", thread_scaling),
        ("sweeps", "Sweeps: overhead a cell and worker, in ms", lambda: sweep_overhead.overhead(20_000, THREADS)),
        ("attention", "Shaped attention against sdpa (forward and backward, steps): ms", attention.table),
        ("memory", f"Shaped attention against sdpa: peak memory at length {attention.LONG:,}", attention.memory_table),
        ("efficiency", "Sweeps: parallel efficiency", lambda: sweep_overhead.efficiency(40, THREADS)),
        ("weightless", "Weightless GPT-2 against the drawn network, a sample", weightless.table),
        (
            "drawn",
            "Weightless networks whose weights must be drawn, against drawn ones: ms a sample",
            weightless_drawn.table,
        ),
        ("hooks", "A module that exists, measured: over its plain pass forward and backward", hooks.table),
        ("first", "Figures at paper scale, each in a new process", first_result),
    ):
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        report[name] = measure()
        show(title, report[name])
    out.mkdir(parents=True, exist_ok=True)
    (out / "benchmarks.json").write_text(json.dumps(report, indent=2) + "\n")
    screen.print(f"Wrote {out / 'benchmarks.json'}")


if __name__ == "__main__":
    main()
