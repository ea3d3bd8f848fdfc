"""Refusals of user functions in one line; JSON and the command line name functions by their paths."""

import json
import math
import pickle
import sys
from dataclasses import replace

import numba
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import limitformer as lf
import limitformer.covariance.chain.own as own_chain
import own_parts_example as own
from limitformer.base.errors import InputError, NotImportedError
from limitformer.cli.app import app
from limitformer.models.functions import freeze, import_function, is_path, path_of
from limitformer.models.serial import describe, from_record
from limitformer.nn.drawn.own import torch_elementwise, torch_mixing
from limitformer.sampling.exits import INSIDE, LEFT_BALL, NO_NUMBER

START = {"tokens": 2, "correlation": 0.2}
V0 = np.array([[1.0, 0.3], [0.3, 1.5]])
SIZE = {"width": 8, "depth": 2, "gamma": 0.5}
RUN = {"samples": 3, "seed": 0, "progress": False}


def refuses(message, make, *arguments, **options):
    with pytest.raises(InputError, match=message) as caught:
        make(*arguments, **options)
    assert "\n" not in str(caught.value)


def logarithm(x):
    return math.log(x)


def hole(x):
    return x if x != 0 else math.nan


def words(x):
    return f"{x}"


def interpreted(x):
    return float(eval(f"{x!r} * 2"))


def raises_far_out(x):
    if x > 20.0:
        raise ValueError
    return x


def by_whole_numbers(x):
    return x * (2**-1 if x > 0 else 1)


@numba.njit
def compiled_cube(x):
    return x * x * x


def helper(x):
    return 2.0 * x


def with_helper(x):
    return helper(x)


def calls_itself(x):
    return calls_itself(x - 1.0) if x > 1.0 else x


def keeps_dims(logits, visible):
    return logits * visible / (10.0 + np.sum(logits, axis=1, keepdims=True))


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (logarithm, {}, r"function must take any number; .*:logarithm\(-10\) raised ValueError: .*"),
        (hole, {}, r"function must be finite; .*:hole\(0\) gave nan\."),
        (words, {}, r"function must give a real number; .*:words\(-10\) gave '-10.0'\."),
        (math.tanh, {}, r"must be a function of Python or Numba, or its path; got <built-in .*: a def that"),
        ("silu", {}, r"A function is named by its path, \"package.module:function\"; got 'silu'\."),
        ("no_such_module_here:silu", {}, r"The module no_such_module_here cannot be imported: ModuleNotFoundError: .*"),
        ("own_parts_example:sillu", {}, r"own_parts_example has no function sillu"),
        (interpreted, {}, r"Numba cannot compile \S+:interpreted: .+ Nearest: arithmetic, math and numpy"),
        (with_helper, {}, r"Untyped global name 'helper'.* Nearest: @numba.njit on helper, which"),
        (calls_itself, {}, r"Nearest: a loop; a function cannot call itself"),
        (own.silu, {"gain": -1}, "gain must be positive; got -1.0"),
        (own.silu, {"torch": 3}, "torch must be a function of tensors"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),  # an address would be another one in each worker
)
def test_functions_that_are_not_activations_are_refused(function, options, message):
    refuses(message, lf.Elementwise, function, **options)


def test_gains_that_cannot_be_computed_are_refused():
    refuses("function must not vanish", lf.Transformer, **SIZE, feedforward=lf.Elementwise(lambda x: 0.0 * x))
    refuses(r"is inf.*: give gain, or another σ\.", lf.Elementwise(lambda x: math.exp(x * x / 3)).gain_at, 8)


def test_a_function_that_numba_compiles_to_another_is_refused(monkeypatch):
    frozen = freeze(by_whole_numbers)
    monkeypatch.setattr(frozen, "compiled", numba.njit(own.x_tanh))
    refuses("Numba and Python do not agree about .*:by_whole_numbers", lf.Elementwise, by_whole_numbers)


def test_replica_that_raises_leaves_its_neighbours_alone():
    """No whole group of eight paths leaves, although one path in four does."""
    part = lf.Elementwise(raises_far_out, hidden=2, gain=1)
    model = lf.Transformer(width=8, depth=1, gamma=1.0, feedforward=part)
    dataset = lf.simulate(model, [[100.0]], samples=800, seed=0, progress=False)
    exited = np.isfinite(dataset["exit"].values)
    share = 1 - (0.5 + math.erf(2 / math.sqrt(2)) / 2) ** 2  # neither of two N(0, 100) above 20
    assert abs(exited.mean() - share) < 4 * math.sqrt(share * (1 - share) / 800)
    assert not exited.reshape(100, 8).all(1).any()
    values = np.array([1.0, 30.0, -3.0])
    loop = own_chain.compiled_elementwise(numba.njit(raises_far_out))
    loop.ctypes(values.ctypes.data_as(loop.ctypes.argtypes[0]), 3, 2.0)
    np.testing.assert_array_equal(values, [2.0, math.nan, -6.0])


def test_nan_of_a_function_has_its_own_exit_cause():
    """It is the same in chain and network; the twin that explodes at the same size has left the ball."""

    def root(x):
        return math.nan if x > 12.0 else x

    def torch_root(x):
        return torch.where(x > 12.0, math.nan, x)

    options = {"samples": 50, "seed": 0, "progress": False}
    layer = lf.Elementwise(root, torch=torch_root, gain=1)
    model = lf.Transformer(width=8, depth=2, gamma=1.0, feedforward=layer)
    for run in (lf.simulate, lf.nn.simulate):
        assert set(run(model, [[80.0]], **options)["exit_cause"].values) <= {INSIDE, NO_NUMBER}
        assert NO_NUMBER in run(model, [[80.0]], **options)["exit_cause"].values
    boom = lf.Transformer(width=8, depth=40, gamma=1.0, feedforward=lf.SquaredReLU())
    assert set(lf.simulate(boom, [[80.0]], **options)["exit_cause"].values) == {INSIDE, LEFT_BALL}
    strong = lf.Transformer(width=8, depth=2, gamma=0.0, lam=1e200, feedforward=lf.SiLU())
    assert set(lf.simulate(strong, [[1.0]], **options)["exit_cause"].values) == {LEFT_BALL}


def test_functions_compiled_by_numba_are_accepted():
    assert lf.Elementwise(compiled_cube).gain_at(5) == pytest.approx(1 / 15, rel=1e-9)
    dataset = lf.simulate(lf.Transformer(**SIZE, feedforward=lf.Elementwise(compiled_cube)), V0, **RUN)
    assert np.isfinite(dataset["covariance"]).all()
    assert json.loads(lf.to_json(lf.Elementwise(own.silu)))["function"] == "own_parts_example:silu"


def normalises(logits, visible):
    positive = np.maximum(logits, 0.0) * visible
    return positive / np.sum(positive)


def no_mask(logits, visible):
    return logits * 0.1


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        (lambda logits, visible: logits.sum(), {}, r"give a real matrix \(1, 1\); .* gave float64 \(\) of float64"),
        (lambda logits, visible: logits * 1j, {}, r"must give a real matrix"),
        (lambda logits: logits, {}, r"function must take \(logits, visible\); .* raised TypeError"),
        (normalises, {}, "must give a finite matrix; .*:normalises gave nan at logits of"),
        (keeps_dims, {}, r"got an unexpected keyword argument 'keepdims'\. Nearest"),
        (no_mask, {"tau0": 0}, "tau0 must be positive"),
        (no_mask, {"temperature": "hot"}, 'temperature must be "shaped" or "standard"'),
    ],
)
def test_rules_that_do_not_return_a_mixing_matrix_are_refused(rule, options, message):
    refuses(message, lf.Mixing, rule, **options)


def leaks_when_negative(logits, visible):
    return np.where(logits > 0.0, logits * visible, 0.1)


def leaks_far(logits, visible):
    return np.ones_like(logits) if len(logits) > 4 else logits * visible


def test_rules_are_tried_at_several_logits_and_with_the_tokens_of_the_run():
    part = lf.Mixing(leaks_when_negative)
    refuses("leaks_when_negative ignores visible", lf.Transformer, **SIZE, attention=part, mask="causal")
    model = lf.Transformer(**SIZE, attention=lf.Mixing(leaks_far), mask="causal")
    for run in (lf.simulate, lf.nn.simulate):
        refuses("leaks_far ignores visible", run, model, np.eye(5), **RUN)
    lf.Transformer(**SIZE, attention=lf.Mixing(no_mask))
    masked = {"attention": lf.Mixing(no_mask), "mask": "causal"}
    refuses("A must be 0 outside visible; .*:no_mask ignores visible", lf.Transformer, **SIZE, **masked)


def gelu(x):
    """A function that shares its name with one of torch, and uses only operators."""
    return x * abs(x)


def test_functions_on_tensors_must_be_the_same():
    wrong = lf.Elementwise(own.silu, torch="tanh")
    refuses(
        r"torch of Elementwise\(own_parts_example:silu\) is another function: .* instead of",
        torch_elementwise,
        wrong,
    )
    refuses("Nearest: torch=", torch_elementwise, lf.Elementwise(own.x_tanh))
    refuses("torch has no function 'sillu'", torch_elementwise, lf.Elementwise(own.silu, torch="sillu"))
    other = lf.Mixing(own.linear_attention, torch=own.torch_sigmoid_attention)
    refuses(r"torch of Mixing\(own_parts_example:linear_attention\) is another function", torch_mixing, other)
    refuses("did not give a tensor of shape", torch_elementwise, lf.Elementwise(own.silu, torch=torch.sum))
    assert torch_elementwise(lf.Elementwise(gelu)) is freeze(gelu)
    assert torch_elementwise(lf.Elementwise(own.silu)) is torch.nn.functional.silu


def test_stack_of_refuses_rules_and_gates():
    build = lf.nn.stack_of
    refuses(
        "shaped or softmax attention; got Mixing",
        build,
        lf.Transformer(**SIZE, attention=lf.Mixing(own.linear_attention)),
    )
    refuses("no gated pairs yet", build, lf.Transformer(**SIZE, feedforward=lf.Gated(own.silu)))
    block = build(lf.Transformer(**SIZE, feedforward=lf.Elementwise(own.silu))).blocks[0]
    x = torch.linspace(-2, 2, 5)
    torch.testing.assert_close(block.feedforward.activation(x), torch.nn.functional.silu(x))


def test_one_matrix_takes_one_activation_and_no_gates():
    refuses("activation must be one of ShapedReLU, ReLU, GELU, Elementwise", lf.OneMatrix, activation=lf.SwiGLU())
    refuses("hidden must be None; got 5", lf.OneMatrix, activation=lf.SiLU(hidden=5))


BOTH = {"width": 8, "attention": lf.ShapedAttention(tau0=1.0), "feedforward": lf.ReLU()}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gamma": [0.1, 0.2]}, r"gamma must be a number, or have one entry a layer, 3; got 2\."),
        ({"gamma": [0.1, 0.2, 1.5]}, r"gamma must lie in \[0, 1\]; got 0.1 to 1.5\..*above 1 give lam too"),
        ({"gamma": [0.1, 0.2, -0.5], "lam": 1.0}, "gamma must be at least 0; got -0.5"),
        ({"gamma": 0.5, "lam": [1.0, 1.0, -1.0]}, "lam must be at least 0; got -1.0"),
        ({"gamma": [0.1, (0.2, 0.3, 0.4), 0.5]}, r"gamma\[1\] must be a number or a pair \(attention, feed-forward\)"),
        ({"gamma": [0.1, "x", 0.5]}, r"gamma\[1\] must be a number"),
        ({"gamma": [0.1, math.nan, 0.5]}, r"gamma\[1\] must be finite"),
        ({"gamma": "0.5"}, "gamma must be a number; got '0.5'"),
        ({"gamma": 10**400}, r"gamma must be below 1.8e308 in size; got more\."),
    ],
)
def test_strengths_that_do_not_fit_are_refused(values, message):
    refuses(message, lf.Transformer, depth=3, **BOTH, **values)


def test_layers_of_one_sublayer_have_no_pairs():
    refuses(
        r"gamma\[0\] must be a number, for its only sublayer; got \(0.1, 0.2\)",
        lf.Transformer, width=8, depth=1, gamma=[(0.1, 0.2)], feedforward=lf.ReLU(),
    )  # fmt: skip


def test_strengths_are_kept_as_plain_tuples():
    model = lf.Transformer(depth=3, **BOTH, gamma=np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]), lam=[1, 2, (0, 1.5)])
    assert model.gamma == ((0.1, 0.2), (0.3, 0.4), (0.5, 0.6))
    assert model.lam == (1.0, 2.0, (0.0, 1.5))
    assert lf.from_json(lf.to_json(model)) == model
    assert hash(model) == hash(lf.from_json(lf.to_json(model)))
    np.testing.assert_array_equal(model.strengths[2], [[0.0, 0.5], [1.5, 0.6]])
    np.testing.assert_allclose((replace(model, lam=None).strengths ** 2).sum(-1), 1, rtol=1e-15)


def test_json_of_earlier_models_is_unchanged():
    text = (
        '{"kind": "Transformer", "width": 8, "depth": 3, "gamma": 0.5, "attention": {"kind": "ShapedAttention", '
        '"tau0": 1.0, "heads": null, "head_dim": null, "identity": true, "center": true, "temperature": "shaped"}, '
        '"feedforward": {"kind": "ReLU", "hidden": null}, "norm": null, "mask": null, "lam": null}'
    )
    assert lf.to_json(lf.Transformer(depth=3, gamma=0.5, **BOTH)) == text


def test_functions_that_need_one_gamma_refuse_sequences():
    model = lf.Transformer(depth=3, **BOTH, gamma=[0.1, 0.2, 0.3])
    with pytest.raises(lf.NoLimitError, match="strengths differ by layer or sublayer; gamma and lam must be numbers"):
        lf.limit(model)
    refuses("the knob gamma needs it to be a number", lf.design, model, knobs=("gamma",), progress=False)
    refuses("This takes one gamma and one lam", lambda: model.skip)
    axes = {"over": {"depth": [3, 4]}, "simulate": {"samples": 2, "seed": 0, "start": START}}
    refuses("Cell depth = 4: gamma must be a number, or have one entry a layer, 4; got 3", lf.Sweep, model, **axes)


WHOLE = lf.Transformer(
    **SIZE,
    attention=lf.Mixing(own.sigmoid_attention, heads=2, torch=own.torch_sigmoid_attention),
    feedforward=lf.Gated(own.silu, hidden=5, gain=2.5),
    norm=lf.RadialNorm(own.bounded, placement="post", centred=True),
    mask="causal",
)


def test_json_has_functions_by_their_paths():
    record = json.loads(lf.to_json(WHOLE))
    assert record["feedforward"]["function"] == "own_parts_example:silu"
    assert record["attention"]["torch"] == "own_parts_example:torch_sigmoid_attention"
    assert lf.from_json(lf.to_json(WHOLE)) == WHOLE
    assert pickle.loads(pickle.dumps(WHOLE)) == WHOLE
    assert all(map(is_path, ("a:b", "a.b:c.d")))
    assert not any(map(is_path, ("a", "a:b:c", "a b:c", ":b", "a:", None)))


def test_functions_without_a_path_are_refused_by_to_json_and_named_in_records():
    part = lf.Elementwise(lambda x: 0.5 * x)
    refuses("which .*<lambda> does not have. Nearest: a function at the top level", lf.to_json, part)
    dataset = lf.simulate(lf.Transformer(**SIZE, feedforward=part), V0, **RUN)
    written = json.loads(dataset.attrs["model"])["feedforward"]["function"]
    assert written.startswith("<")
    assert "lambda" in written
    refuses(
        "function of Elementwise was .*<lambda>, a function that cannot be imported, and cannot be restored",
        lf.from_json,
        dataset.attrs["model"],
    )
    assert describe(WHOLE) == lf.to_json(WHOLE)
    assert path_of(own.silu) == "own_parts_example:silu"
    assert path_of(replace) is not None
    assert path_of(lambda x: x) is None


def test_stored_files_import_no_modules(tmp_path, monkeypatch):
    """A stored model names a module that would create a file if it ran."""
    (tmp_path / "stranger.py").write_text("import pathlib\npathlib.Path('mark').touch()\ndef f(x):\n    return x\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    record = {"kind": "Elementwise", "function": "stranger:f"}
    with pytest.raises(NotImportedError, match="stranger:f is not imported because a file names it"):
        from_record(record, imports=False)
    (tmp_path / "config.json").write_text(json.dumps({"kind": "Transformer", **SIZE, "feedforward": record}))
    with pytest.raises(NotImportedError):
        lf.weightless.simulate(tmp_path, V0, samples=1, seed=0, progress=False)
    assert not (tmp_path / "mark").exists()
    assert "stranger" not in sys.modules
    assert from_record(record).gain_at(3) == pytest.approx(1)
    assert (tmp_path / "mark").exists()
    assert from_record(record, imports=False) == from_record(record)
    assert import_function("limitformer.models.activations:silu", imports=False)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Run `limitformer simulate` in a folder with a model whose own functions are in that folder."""
    (tmp_path / "model.toml").write_text(
        '[model]\nkind = "Transformer"\nwidth = 8\ndepth = 2\ngamma = 0.5\n'
        'attention = {kind = "Mixing", function = "parts_of_mine:flat", tau0 = 1.0}\n'
        'feedforward = {kind = "Elementwise", function = "parts_of_mine:leaky", hidden = 9}\n'
    )
    (tmp_path / "parts_of_mine.py").write_text(
        "def leaky(x):\n    return max(x, 0.1 * x)\n\ndef flat(logits, visible):\n    return visible / len(visible)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(file, *arguments):
        result = CliRunner().invoke(app, ["simulate", file, *arguments])
        return result.exit_code, result.stdout or result.stderr

    return call


def test_the_command_line_takes_functions_of_the_folder(command, tmp_path):
    code, output = command("model.toml", "--show-model")
    assert code == 0
    model = lf.from_json(output)
    assert model.feedforward.function.__name__ == "leaky"
    assert model.feedforward.hidden == 9
    assert type(model.attention) is lf.Mixing
    (tmp_path / "strengths.json").write_text(lf.to_json(replace(model, gamma=[0.1, 0.9])))
    code, output = command("strengths.json", "--samples", "8")
    assert code == 0, output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "feedforward.function=parts_of_mine:nothing"), "has no function nothing"),
        (("--as", "limit"), "No limit is proven"),
        (("--set", "attention=null", "--gradients"), "with Elementwise(parts_of_mine:leaky) has no gradients"),
    ],
)
def test_the_command_line_refuses_in_one_line(command, arguments, message):
    code, output = command("model.toml", *arguments)
    assert code == 2
    assert message in " ".join(output.split())
