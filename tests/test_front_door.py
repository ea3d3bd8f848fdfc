"""The public door: its names, where they are defined, and which packages are imported for them."""

import ast
import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import limitformer as lf
from limitformer.cli.app import COMMANDS, app, command_of

PACKAGE = Path(lf.__file__).parent
HEAVY = ("numba", "xarray", "zarr", "matplotlib", "scipy", "torch", "transformers", "rich", "typer", "dask", "pandas")
EXTRAS = {
    "checking",
    "designing",
    "hf",
    "initialisation",
    "nn",
    "weightless",
    "check",
    "compare",
    "design",
    "equivalent_rates",
    "fix",
    "rate",
    "recipes",
    "shapes",
    "steps",
    "transfer",
}


def imported_by(code):
    """Return the heavy packages (and NumPy) that a fresh process has imported after `code`."""
    asked = f"import sys\n{code}\nprint([name for name in {('numpy', *HEAVY)!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, encoding="utf-8", check=True)
    return set(ast.literal_eval(done.stdout.splitlines()[-1]))


def command_line(*arguments):
    """Return code that runs the command line and continues."""
    return f"""
from limitformer.cli import main
sys.argv = ["limitformer", *{arguments!r}]
try:
    main()
except SystemExit:
    pass
"""


@pytest.mark.parametrize(
    ("code", "needs"),
    [
        ("import limitformer", set()),
        (
            "import limitformer as lf\n"
            "lf.Transformer(width=8, depth=2, gamma=0.5, attention=lf.ShapedAttention(tau0=1.0))\n"
            "lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=1)\n"
            "lf.from_json(lf.to_json(lf.ReLU())); lf.equicorrelated(2, 0.5)",
            {"numpy"},
        ),
        (command_line("--help"), {"typer"}),
        (command_line("phase", "-h"), {"typer", "rich"}),
        ("import limitformer as lf; lf.overlap", {"numpy", "scipy", "xarray"}),  # so that this test can fail
    ],
    ids=["import", "models", "--help", "phase -h", "overlap"],
)
def test_imports_wait_until_they_are_needed(code, needs):
    found = imported_by(code)
    assert found - {"pandas", "dask"} == needs  # xarray brings these where it finds them


def test_no_code_tunes_the_garbage_collector():
    """Frozen objects are never freed: libraries that count theirs report each as a leak at the end."""
    tuning = {"disable", "freeze", "set_threshold"}
    for file in PACKAGE.rglob("*.py"):
        names = {
            ast.unparse(node)
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute)
        }
        assert not names & {f"gc.{name}" for name in tuning}, file


def imports_for_checkers(package=PACKAGE):
    """Return {name: module} of the imports that only type checkers see."""
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    found = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert all(each.asname == each.name for node in found for each in node.names)  # re-exported, as PEP 484 has it
    return {each.name: node.module for node in found for each in node.names}


def test_checkers_see_the_public_names():
    homes = {name: f"limitformer.{home}" for home, names in lf.HOMES.items() for name in names}
    assert imports_for_checkers() == homes | dict.fromkeys(lf.MODULES, "limitformer")


def test_every_public_name_exists_and_is_listed():
    for name in imports_for_checkers():
        assert getattr(lf, name) is not None
    assert set(imports_for_checkers()) <= set(dir(lf))
    assert set(lf.__all__) == (set(imports_for_checkers()) - EXTRAS - {"models"}) | {"__version__"}


def test_star_import_needs_no_extra():
    code = "sys.modules['torch'] = None\nfrom limitformer import *\nassert Transformer and plot and simulate"
    assert "transformers" not in imported_by(code)


def test_no_public_name_is_hidden_by_a_module():
    """The import of `limitformer.x` sets the attribute `x` of the package and replaces any object of that name."""
    modules = {module.name for module in pkgutil.iter_modules(lf.__path__)}
    assert {name for names in lf.HOMES.values() for name in names} & modules == set()


def test_subpackages_are_found_without_an_import():
    assert imported_by("import limitformer; limitformer.base.errors.InputError") == set()
    assert lf.simulation is importlib.import_module("limitformer.simulation")


@pytest.mark.parametrize(("name", "near"), [("Transfomer", "Transformer"), ("simulat", "simulate"), ("ploot", "plot")])
def test_unknown_name_suggests_the_nearest(name, near):
    with pytest.raises(AttributeError, match=rf"^module 'limitformer' has no attribute '{name}'; nearest: {near}$"):
        getattr(lf, name)
    assert not hasattr(lf, "qqqqqq")
    assert not hasattr(lf, "_ipython_display_")


def test_json_of_a_limit_loads_in_a_fresh_process():
    text = lf.to_json(lf.limit(lf.Transformer(width=8, depth=4, gamma=0.5, attention=lf.ShapedAttention(tau0=1.0))))
    code = f"import limitformer as lf\nassert type(lf.from_json({text!r})).__name__ == 'CovarianceLimit'"
    assert "numba" in imported_by(code)


def test_package_declares_its_types():
    assert (PACKAGE / "py.typed").read_text() == ""


# The list of commands.


@pytest.mark.parametrize("name", COMMANDS)
def test_list_of_commands_shows_their_help(name):
    help_of = command_of(name).help
    assert COMMANDS[name][1] == " ".join(help_of.split("\n\n")[0].split())


@pytest.mark.parametrize("command", [(), ("phase",), ("sweep", "run")])
def test_h_option_is_help(run_here, command):
    short, long = (run_here(*command, option) for option in ("-h", "--help"))
    assert (short.exit_code, short.stdout) == (0, long.stdout)
    assert "Usage:" in short.stdout


def test_unknown_command_suggests_the_nearest(run_here):
    result = run_here("simulat")
    line = "Error: No such command 'simulat'. Did you mean 'simulate'? See 'limitformer --help'.\n"
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", line)


@pytest.fixture
def run_here(monkeypatch):
    """Run the command line in this process, on a wide terminal."""
    from typer.testing import CliRunner

    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


# How things are shown.


def shown_models():
    net = lf.Transformer(
        width=200, depth=150, gamma=0.35, attention=lf.ShapedAttention(tau0=1.0), feedforward=lf.ReLU(), mask="causal"
    )
    pair = lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=100)
    hybrid = lf.HybridTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=100, epsilon=0.5, attention="softmax")
    flow = lf.Transformer(width=9, depth=4, gamma=0.5, lam=1.0, feedforward=lf.ReLU())
    normed = lf.Transformer(width=8, depth=4, gamma=0.5, attention=lf.SoftmaxAttention(tau0=2.0, heads=2), norm="pre")
    return {
        "Transformer(width=200, depth=150, gamma=0.35, attention=ShapedAttention(tau0=1.0), feedforward=ReLU(), "
        "mask='causal')": net,
        "StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=100)": pair,
        "HybridTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=100, epsilon=0.5)": hybrid,
        "Transformer(width=8, depth=4, gamma=0.5, attention=SoftmaxAttention(tau0=2.0, heads=2), "
        "norm=LayerNorm(placement='pre'))": normed,
        "CovarianceLimit(gamma=0.35, tau0=1.0, kink=None, horizon=0.75)": lf.CovarianceLimit(
            gamma=0.35, tau0=1.0, kink=None, horizon=0.75
        ),
        f"TokenLimit(model={pair!r})": lf.limit(pair),
        f"CovarianceFlow(model={flow!r})": lf.limit(flow),
        f"OverlapDiffusion(model={pair!r}, clusters=(1, 1))": lf.overlap(pair),
    }


@pytest.mark.parametrize(("text", "model"), shown_models().items(), ids=lambda value: type(value).__name__)
def test_repr_is_short_and_can_be_evaluated(text, model):
    assert repr(model) == text
    assert eval(text, {name: getattr(lf, name) for name in lf.__all__}) == model
    table = model._repr_html_()
    assert table.startswith(f"<table><caption>{type(model).__name__}</caption>")
    assert table.count("<tr>") == len(json_fields(model))


def json_fields(model):
    if isinstance(model, lf.OverlapDiffusion):
        return ("model", "clusters")
    return set(json.loads(lf.to_json(model))) - {"kind"}


def test_repr_of_a_start_is_one_line_and_its_html_is_escaped():
    start = lf.Start(covariance=[[1.0, 0.2], [0.2, 1.0]], labels=("<b>", "&"), description="a & b")
    assert repr(start) == "<Start of 2 tokens: a & b>"
    assert "<td>&lt;b&gt;, &amp;</td>" in start._repr_html_()
    assert "<td>a &amp; b</td>" in start._repr_html_()
