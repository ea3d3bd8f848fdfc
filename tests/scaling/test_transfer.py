"""`lf.transfer`: known powers of the width and of the depth, and mistakes in a parametrisation that it finds."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import limitformer as lf
import widths_of_gpt
from limitformer.base.errors import InputError
from limitformer.scaling.transfer import Transfer
from limitformer.subjects.losses import square

WIDTHS = [64, 128, 256]
SMALL = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 40}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2}
HEAD = "effect of head, first step"


class WithBias(widths_of_gpt.GPT):
    """A GPT whose head has torch's bias; its output is divided by a power of the width."""

    def __init__(self, width, power, std):
        super().__init__(width)
        self.power, self.head = power, nn.Linear(width, widths_of_gpt.VOCABULARY)
        nn.init.normal_(self.head.weight, std=std) if std else nn.init.zeros_(self.head.weight)

    def forward(self, ids):
        return super().forward(ids) / (self.head.in_features / widths_of_gpt.BASE) ** self.power


def over_width(name, optimizer):
    return lf.transfer(
        getattr(widths_of_gpt, name), {"width": WIDTHS}, 24, optimizer=optimizer, steps=1, samples=4, seed=0,
        loss=widths_of_gpt.next_token, progress=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def standard():
    return over_width("standard", {"name": "adam", "lr": 1e-4})


def test_effect_of_adam_on_the_head_grows_like_the_width_in_the_standard_parametrisation(standard):
    head = standard.exponents[HEAD]
    assert head.low < 1.0 < head.high
    assert head.value == pytest.approx(1.0, abs=0.15)
    assert standard.exponents["output"].value == pytest.approx(0.0, abs=0.1)
    assert standard.transfers is False
    assert standard.conclusion.startswith("The effect of head, first step grows by a factor of 4.")
    assert ") over width 64 to 256, and " in standard.conclusion


def test_effects_under_mup_do_not_depend_on_the_width():
    result = over_width("mup", widths_of_gpt.adam)
    assert result.transfers is not False
    assert abs(result.exponents[HEAD].value) < 0.2
    assert result.exponents["output"].value == pytest.approx(-0.5, abs=0.1)


def test_head_divided_by_the_root_of_the_width_is_found():
    result = over_width("wrong_after", widths_of_gpt.adam)
    assert result.transfers is False
    assert result.exponents[HEAD].value == pytest.approx(0.5, abs=0.15)
    assert "effect of head" in result.conclusion


@pytest.mark.slow
def test_change_of_the_stream_under_completep_does_not_depend_on_the_depth():
    model = SMALL | {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.125}
    changes = {}
    for rule in ("completep", "standard"):
        result = lf.transfer(
            model, {"depth": [8, 16, 32]}, 12, optimizer="adamw", rate=1e-5, rule=rule, steps=1, samples=6, seed=0,
            progress=False,
        )  # fmt: skip
        changes[rule] = result.exponents["stream change at the end"]
    assert abs(changes["completep"].value) < 0.2
    assert changes["completep"].low < 0 < changes["completep"].high
    assert changes["standard"].low > 0.8


def test_table_files_and_picture_have_every_measure(standard, tmp_path):
    assert "size-free" in str(standard)
    record = json.loads(json.dumps(standard.record()))
    assert [row["measure"] for row in record["measures"]] == list(standard.measures)
    for path in standard.save(tmp_path):
        assert path.stat().st_size > 0
    data = lf.load(tmp_path / "transfer.nc")
    np.testing.assert_array_equal(data["value"].sel(measure=HEAD), standard.measures[HEAD])
    assert standard.csv().splitlines()[0].startswith("measure,64,128,256,exponent")


def test_fewer_than_four_networks_with_a_measure_give_no_verdict():
    """The exponent of a measure is that of the networks where it is positive, and the table counts them."""
    exponents = {HEAD: lf.scaling.exponents.Exponent(-0.26, -0.27, -0.25)}
    values = np.ones((5, 2)) * [1.0, 2**-0.26]
    values[0, 1] = -1.0
    four = Transfer("width", (1, 2), "standard", "sgd", {}, {HEAD: values}, exponents)
    assert four.transfers is False
    assert four.cells()[1][-1] == "depends (4 of 5 networks)"
    assert four.rows()[0]["networks"] == 4
    values = values[:4]
    three = Transfer("width", (1, 2), "standard", "sgd", {}, {HEAD: values}, exponents)
    assert three.transfers is None
    assert three.conclusion.startswith("No verdict on the learning rate over the width: it needs 4 networks")


@pytest.mark.parametrize(
    ("over", "options", "message"),
    [
        ({"width": [32]}, {}, "two or more"),
        ({"width": [32, 40]}, {}, "width 40"),
        ({"breadth": [32, 64]}, {}, "breadth"),
        ({"width": [32, 64]}, {"rule": "mupp"}, "rule must be one of"),
        ({"width": [32, 64]}, {"rates": [0.1]}, "transfer has no option rates"),
        ({"width": [32, 64]}, {"warm_up": 2}, "transfer has no option warm_up. Nearest: warmup"),
        ({"width": [32, 64]}, {"base": 0}, "base must be at least 1; got 0"),
        ({"width": [32, 64]}, {"base": -7}, "base must be at least 1; got -7"),
        ({"width": [32, 64]}, {"target": 63}, "target must be the largest width that runs or more; got 63"),
        ({"width": [32, 64]}, {"target": 72}, "at width 72"),
        ({"width": [32, 64]}, {"rate": 0.0}, "a learning rate must be above 0"),
        ({"width": [32, 64]}, {"optimizer": "adamax"}, "unknown optimizer 'adamax'"),
    ],
)
def test_bad_arguments_of_transfer_give_one_clear_error(over, options, message):
    options = {"optimizer": "adamw", "steps": 1, "samples": 1, "seed": 0, "progress": False} | options
    with pytest.raises(InputError, match=message):
        lf.transfer(SMALL, over, 6, **options)


class BarThatNotes:
    """A bar that notes its total, each number of pieces done, and the part that runs."""

    def __init__(self, description, total, first):
        self.total, self.done, self.parts, self.part = total, [], [], ""
        self.progress = type("Shown", (), {"disable": False})
        self.visible = False

    def show(self, done):
        self.done.append(done)
        self.parts.append(self.part)


def test_target_that_is_the_largest_size_changes_nothing():
    options = {"optimizer": "adamw", "rule": "mup", "steps": 1, "samples": 2, "seed": 0, "progress": False}
    named, unnamed = (lf.transfer(SMALL, {"width": [16, 32]}, 6, target=each, **options) for each in (32, None))
    assert named.lines.title == "width 32, rule mup, base 16"
    assert str(named) == str(unnamed)
    assert "as these sizes predict" not in named.conclusion


def test_one_bar_shows_all_sizes_and_weighs_them_by_the_sides_of_their_parameters(monkeypatch):
    bars = []
    monkeypatch.setattr(
        "limitformer.scaling.transfer.progress_bar", lambda *settings: bars.append(BarThatNotes(*settings)) or bars[-1]
    )
    monkeypatch.setattr("limitformer.stepping.simulate.progress_bar", lambda *_: pytest.fail("a second bar"))
    lf.transfer(SMALL, {"width": [16, 32, 64]}, 6, optimizer="sgd", steps=1, samples=2, seed=0)
    (bar,) = bars
    sides = [sides_of_llama(width) for width in (16, 32, 64)]
    # A size begins, is prepared, and has two networks, each with a step and the passes after it.
    steps = np.outer(np.array(sides) / 4, [0, 0, 1, 1, 1, 1]).ravel() / sum(sides)
    assert bar.total == 6
    np.testing.assert_allclose(bar.done, 6 * np.cumsum(steps), rtol=1e-12)
    sizes = ["width 16, 1 of 3", "width 32, 2 of 3", "width 64, 3 of 3"]
    assert bar.parts == np.repeat(sizes, 6).tolist()


def sides_of_llama(width):
    """Sum the square roots of the sizes of the parameters of `SMALL` at another width."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from limitformer.scaling.sizes import at_size

    config = at_size(SMALL, "width", width).model.config
    assert config.hidden_size == width
    fields = {key: value for key, value in config.to_dict().items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields))
    return sum(each.numel() ** 0.5 for each in model.parameters())


def test_interrupted_transfer_keeps_networks_that_every_size_has(monkeypatch):
    from limitformer.scaling.transfer import TransferInterrupted
    from limitformer.stepping.trajectory import Trajectory

    options = {"optimizer": "sgd", "steps": 1, "seed": 0, "progress": False}
    whole = lf.transfer(SMALL, {"width": [16, 32, 64]}, 6, samples=2, **options)
    begun = []

    def arrays(self, real=Trajectory.arrays):
        begun.append(self.sample)
        if len(begun) == 3 + 3 + 3:  # the last network of the last size
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Trajectory, "arrays", arrays)
    with pytest.raises(TransferInterrupted, match="interrupted after 3 samples") as caught:
        lf.transfer(SMALL, {"width": [16, 32, 64]}, 6, samples=3, **options)
    part = caught.value.result
    assert part.sizes == (16, 32, 64)
    assert "finished: 3 of width 16, 3 of width 32, 2 of width 64" in part.notes[0]
    assert isinstance(caught.value, lf.Interrupted)
    assert np.isnan(part.measures["output"][2, 2])
    assert part.exponents == whole.exponents  # of the two networks that every size has


class Cubic(nn.Module):
    """A network that explodes at a large rate: branches grow like the cube of the stream."""

    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(40, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x) ** 3
        return x


def head_of_zeros(width):
    model = widths_of_gpt.standard(width)
    nn.init.zeros_(model.head.weight)
    return model


def test_head_of_zeros_alone_moves_in_the_first_step_and_decides():
    """Its effect is the change of the output; the other effects are zero, and have rows without exponents."""
    result = lf.transfer(
        head_of_zeros, {"width": WIDTHS}, 24, optimizer={"name": "adam", "lr": 1e-4}, steps=1, samples=4, seed=0,
        loss=widths_of_gpt.next_token, progress=False,
    )  # fmt: skip
    np.testing.assert_allclose(result.measures[HEAD], result.measures["output change"], rtol=1e-5)
    assert result.exponents[HEAD].value == pytest.approx(1.0, abs=0.15)
    assert result.conclusion.startswith("The effect of head, first step grows by a factor of 4.")
    still = {name for name in result.measures if name.startswith("effect of")} - {HEAD} | {"stream change at the end"}
    assert len(still) == 7
    assert not still & result.exponents.keys()
    assert all([row[1:5] for row in result.cells() if row[0] == name] == [["0", "0", "0", "–"]] for name in still)


@pytest.mark.parametrize(("power", "std"), [(0.5, 0.0), (1.0, 0.1)])
def test_multiplier_after_a_head_with_a_bias_is_found(power, std):
    """The output with its bias is not a multiple of the product by the head's matrix."""
    result = lf.transfer(
        lambda width: WithBias(width, power, std), {"width": WIDTHS}, 24, optimizer={"name": "adam", "lr": 1e-4},
        steps=1, samples=3, seed=0, loss=widths_of_gpt.next_token, progress=False,
    )  # fmt: skip
    assert result.exponents[HEAD].value == pytest.approx(1.0 - power, abs=0.15)


class Deep(nn.Module):
    """Blocks whose outputs are small, against the stream."""

    def __init__(self, depth):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 64), nn.Linear(64, 50, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
            for _ in range(depth)
        )

    def forward(self, ids):
        x = 32 * self.table(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_small_changes_of_the_stream_count_if_they_are_resolved_at_one_size():
    options = {"optimizer": "adam", "rate": 3e-6, "steps": 1, "samples": 4, "seed": 0, "progress": False}
    result = lf.transfer(Deep, {"depth": [4, 8, 16]}, 12, **options)
    changes = result.data[4].stream_change.isel(step=1, layer=-1).values
    assert (changes < 100 * np.finfo(np.float32).eps).all()
    assert result.exponents["stream change at the end"].value == pytest.approx(0.9, abs=0.2)
    assert result.transfers is False


def test_note_names_matrices_without_an_effect():
    def build(width=32):
        layer = {"nhead": 2, "dim_feedforward": 64, "batch_first": True}
        blocks = [nn.TransformerEncoderLayer(width, **layer) for _ in range(2)]
        return nn.Sequential(nn.Embedding(20, width), *blocks, nn.Linear(width, 20))

    options = {"optimizer": "adam", "rate": 1e-3, "steps": 1, "samples": 2, "seed": 0, "progress": False}
    result = lf.transfer(build, {"width": [16, 32]}, 6, **options)
    measured = {name for name in result.measures if name.startswith("effect of")}
    note = next(each for each in result.notes if each.startswith("The effects of these matrices are not"))
    assert note.endswith(": *.self_attn.in_proj_weight, *.self_attn.out_proj.")
    assert any("linear1" in name for name in measured)


class Gaze(nn.Module):
    """Attention of one head whose class does not say so."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(self.a(x), self.b(x), self.c(x))


@pytest.mark.parametrize("part", [Gaze, lambda width: nn.Linear(width, width)])
def test_note_on_heads_is_for_networks_that_attend(part):
    def build(width):
        return nn.Sequential(nn.Embedding(20, width), part(width), part(width), nn.Linear(width, 20))

    options = {"optimizer": "adam", "rate": 1e-3, "rule": "mup", "steps": 1, "samples": 2, "seed": 0, "progress": False}
    notes = lf.transfer(build, {"width": [16, 32]}, 6, **options).notes
    assert any("multiply queries by √(d of the base/d)" in each for each in notes) == (part is Gaze)


def test_networks_that_are_not_finite_do_not_transfer():
    options = {"optimizer": "sgd", "steps": 3, "samples": 3, "seed": 0, "progress": False, "loss": square}
    ids = torch.arange(6)[None]
    result = lf.transfer(Cubic, {"width": [16, 32]}, ids, rate=100.0, **options)
    assert result.not_finite == {16: 3, 32: 3}
    assert not result.notes
    assert result.transfers is None
    assert "not finite after the steps in 3 of 3 networks at width 16, 3 of 3" in result.conclusion
    assert " nan" not in str(result)
    assert lf.transfer(Cubic, {"width": [16, 32]}, ids, rate=1e-6, **options).not_finite == {}
    nowhere = options | {"loss": lambda out, inputs: square(out, inputs) * np.nan}
    before = lf.transfer(Cubic, {"width": [16, 32]}, ids, rate=1e-6, **nowhere).conclusion
    assert before.endswith("3 of 3 networks at width 32, in some before the first step.")
