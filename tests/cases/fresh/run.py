"""Run every case in the library and in plain torch: `python -m tests.cases.fresh.run` prints a line for each."""

import copy
import time

import torch

from . import modules, optimizers

STEPS, DRAWN = 3, 100


def verdicts(report) -> str:  # attributes of these names, else the marked lines of what it prints
    found = [f"{name}: {getattr(report, name)}" for name in ("grade", "verdicts") if hasattr(report, name)]
    return " | ".join(found + [line for line in str(report).splitlines() if line.strip()[:1] in ("✗", "!", "✓")])


def by_name(loss):
    """Return the loss for inputs by name, of which a first argument has none."""
    return lambda out, inputs: loss(out, inputs.get("", inputs))


def drawn(case, make) -> torch.Tensor:  # losses (network, step) of networks that torch really draws and trains
    losses = torch.zeros(DRAWN, STEPS + 1)
    for k in range(DRAWN):
        torch.manual_seed(k)
        made = make(module := case.build())
        for step in range(STEPS + 1):
            loss = case.loss(module(case.inputs), case.inputs).mean()
            losses[k, step] = loss.detach()
            if step < STEPS:
                module.zero_grad()
                loss.backward()
                _ = [optimizer.step() for optimizer in (made if isinstance(made, list) else [made])]
    return losses


def summary(losses: torch.Tensor) -> str:
    return ", ".join(f"{x.mean():.4g} ± {x.std() / len(x) ** 0.5:.2g}" for x in losses.T)


def show(name: str, expected: str, ask) -> None:
    start = time.perf_counter()
    try:
        got = ask()
    except Exception as error:  # noqa: BLE001  # a refusal is an answer, too
        got = f"{type(error).__name__}: {error}"
    print(f"{name} ({time.perf_counter() - start:.1f} s): {' '.join(got.split())[:600]} || {expected}", flush=True)


def main() -> None:
    import limitformer as lf

    torch.set_num_threads(1)
    for name, build, inputs, loss, sound, expected in copy.deepcopy(modules.MODULES):
        f = by_name(loss)
        ask = lambda b=build, i=inputs, f=f: verdicts(lf.check(b, i, samples=4, loss=f, progress=False))  # noqa: E731
        show(name, expected if sound else f"FAULT: {expected}", ask)
    gpt, how = modules.MODULES[0], {"samples": 32, "steps": STEPS, "seed": 0, "progress": False}
    for name, make, right in optimizers.OPTIMIZERS:
        run = lambda o=make: lf.steps(gpt.build, gpt.inputs, optimizer=o, loss=by_name(gpt.loss), **how)  # noqa: E731
        ask = lambda run=run: summary(torch.tensor(run().data.loss.values[0]))  # noqa: E731
        show(name, f"torch: {summary(drawn(gpt, make))} || {right}", ask)


main() if __name__ == "__main__" else None
