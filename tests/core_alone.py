"""A test of the core without torch, run by plain Python in an environment with only the core's dependencies.

`make test` runs it in the environment that `make demo` uses; it fails loudly, with no test runner to install.
"""

import importlib.util
import tempfile
from pathlib import Path

from typer.testing import CliRunner

import limitformer as lf
from limitformer.cli.app import app
from limitformer_papers import RUN_FIGURES, make
from limitformer_papers.making import NEED_TRAINING


def main() -> None:
    """Check that chain, limit, save, load and a figure work, and that `lf.nn` and commands name the extra that they
    need."""
    assert importlib.util.find_spec("torch") is None, "this check needs an environment without torch"
    net = lf.Transformer(width=64, depth=16, gamma=0.5, attention=lf.ShapedAttention(tau0=1.0))
    start = lf.equicorrelated(tokens=3, correlation=0.2)
    finite = lf.simulate(net, start, samples=32, seed=0)
    limit = lf.simulate(lf.limit(net), start, samples=32, seed=0)
    assert finite.covariance.shape == (32, 17, 3, 3)
    assert bool((limit["exit_cause"] == 0).all())
    with tempfile.TemporaryDirectory() as folder:
        assert lf.load(lf.save(finite, Path(folder) / "run.nc")).identical(finite)
        assert len(make("st-fig7", scale="quick", out=folder).paths) == 3
    assert "limitformer[torch]" in refusal_of_torch()
    for name in NEED_TRAINING:
        assert "limitformer[train]" in refusal_of(name), name
    for command in (["check", "gpt2"], ["design", "gpt2"]):
        result = CliRunner().invoke(app, command)
        assert isinstance(result.exception, SystemExit), result.exception
        assert "limitformer[hf]" in result.output, result.output
    print("The core works without torch.")


def refusal_of_torch() -> str:
    """Return the error of `lf.nn` without torch."""
    assert not hasattr(lf, "nn")
    try:
        from limitformer import nn
    except lf.MissingExtraError as error:
        return str(error)
    return f"imported {nn}"


def refusal_of(figure: str) -> str:
    """Return the error of a figure that needs trained networks."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return f"made {make(figure, scale='quick', out=folder, runs=folder if figure in RUN_FIGURES else None)}"
        except lf.MissingExtraError as error:
            return str(error)


if __name__ == "__main__":
    main()
