"""Models at another width or depth: changed fields, shapes, and refusals."""

import json
from functools import partial

import pytest
import torch
import transformers
from torch import nn

import limitformer as lf
from limitformer import InputError
from limitformer.scaling.sizes import at_size, continued, present_size, shapes_of, sizes_over
from limitformer.subjects.shapes import SHAPES

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 50,
}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.map = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.map(self.norm(x))


def network(width, depth=2, *, vocab=30):
    return nn.Sequential(
        nn.Embedding(vocab, width), *(Block(width) for _ in range(depth)), nn.Linear(width, vocab, bias=False)
    )


def test_depth_continues_lists_by_layer_in_their_period():
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    config = {"model_type": "gemma3_text", "num_hidden_layers": 8, "layer_types": 2 * kinds, "hidden_size": 64}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 16}
    deeper = at_size(config, "depth", 12)
    assert deeper.changes["layer_types"][1] == 3 * kinds
    assert deeper.model.config.num_hidden_layers == 12
    assert at_size(config, "depth", 4).changes["layer_types"][1] == kinds


def test_function_may_return_a_configuration():
    """It names fields that `at_size` does not know."""
    from transformers import AutoConfig

    def build(width):
        grown = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": width // 16}
        return AutoConfig.for_model(**LLAMA | grown | {"num_key_value_heads": 2})

    sized = at_size(build, "width", 96)
    assert (sized.changes, sized.model.config.num_attention_heads) == ({"width": (None, 96)}, 6)
    assert shapes_of(sized.model)["model.layers.0.mlp.up_proj.weight"] == (384, 96)


@pytest.mark.parametrize(
    ("values", "length", "expected"),
    [
        (["d", "s", "s", "s"], 6, ["d", "s", "s", "s", "s", "s"]),  # a first layer of another kind
        (["a", "b", "a", "b", "a"], 8, ["a", "b", "a", "b", "a", "b", "a", "b"]),
        (["a", "b"], 5, ["a", "b", "a", "b", "a"]),
        (["a", "b", "c"], 2, ["a", "b"]),
    ],
)
def test_list_continues_in_its_shortest_period(values, length, expected):
    assert continued(values, length) == expected


@pytest.mark.parametrize("name", ["gpt2", "t5-base"])
def test_public_shapes_grow_in_proportion(name):
    shape = next(key for key in SHAPES if key == name or key.startswith(name))
    present = present_size(shape, "width")
    before, after = (shapes_of(at_size(shape, "width", size).model) for size in (present // 2, present))
    assert before.keys() == after.keys()
    dims = [pair for key, own in before.items() for pair in zip(own, after[key], strict=True)]
    assert {b / a for a, b in dims} == {1.0, 2.0}
    depth = present_size(shape, "depth")
    deeper = shapes_of(at_size(shape, "depth", 2 * depth).model)
    assert len(deeper) > 1.8 * len(after)
    assert all(deeper[key] == own for key, own in after.items())


def test_size_that_does_not_grow_is_named():
    """CTRL's dff has a name of its own; the router of Zaya keeps its hidden size, which a user may want to grow."""
    ctrl = {"model_type": "ctrl", "n_layer": 2, "vocab_size": 60, "n_embd": 32, "n_head": 2, "dff": 128}
    assert at_size(ctrl, "width", 64).changes["dff"] == (128, 256)
    zaya = {"model_type": "zaya", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 60}
    zaya |= {"num_attention_heads": 4, "num_key_value_heads": 2, "router_hidden_size": 48}
    assert at_size(zaya, "width", 128).stays == ("router_hidden_size 48",)
    assert at_size(zaya, "width", 64).stays == at_size(LLAMA, "width", 128).stays == ()
    options = {"optimizer": "sgd", "rate": 1e-3, "steps": 1, "samples": 1, "seed": 0, "progress": False}
    notes = lf.transfer(zaya, {"width": [64, 128]}, 4, **options).notes
    assert "stays at every width: router_hidden_size 48. If that should grow, write a function of the width" in notes


def test_factory_is_called_with_its_argument():
    sized = at_size(network, "width", 48)
    assert sized.changes == {"width": (None, 48)}
    assert sized.model.factory()[0].weight.shape == (30, 48)
    assert at_size(partial(network, 8), "vocab", 40).changes == {"vocab": (30, 40)}
    assert at_size(lambda **sizes: network(**sizes), "width", 8).model.factory()[0].weight.shape == (30, 8)


def test_configuration_file_name_and_module_have_sizes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert at_size(tmp_path, "depth", 4).changes == {"num_hidden_layers": (2, 4)}
    assert at_size(json.dumps(LLAMA), "depth", 4).changes == {"num_hidden_layers": (2, 4)}
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    sized = at_size(module, "width", 128)
    assert shapes_of(sized.model)["lm_head.weight"] == (50, 128)
    assert sized.model.kind is type(module)


def test_transformer_has_width_and_depth():
    model = lf.Transformer(
        width=32, depth=4, gamma=0.5, attention=lf.ShapedAttention(tau0=1.0, heads=4), feedforward=lf.ReLU(hidden=64)
    )
    wider = at_size(model, "width", 64)
    assert wider.changes == {"width": (32, 64), "attention.heads": (4, 8), "feedforward.hidden": (64, 128)}
    assert (wider.model.transformer.attention.heads, wider.model.transformer.feedforward.hidden) == (8, 128)
    assert at_size(model, "depth", 9).model.transformer.depth == 9
    assert present_size(model, "depth") == 4
    with pytest.raises(InputError, match=r"has no size 'dept'; it has width and depth. Nearest: depth"):
        at_size(model, "dept", 9)


@pytest.mark.parametrize(
    ("over", "size", "message"),
    [
        ("width", 100, r"num_attention_heads would be 25/4, .* Nearest: 96 or 128"),
        ("width", 8, r"llama at width 8: .* Nearest: 32\.$"),
        ("width", 0, "width must be at least 1; got 0"),
        ("depth", -3, "depth must be at least 1; got -3"),
        ("depth", 2.5, "depth must be a whole number; got 2.5"),
        ("widht", 128, "llama has no size 'widht'. Nearest: width"),
        ("hiden_size", 128, "llama has no size 'hiden_size'. Nearest: hidden_size"),
        ("depth", 100_000, "num_hidden_layers of llama must be at most 4,096; got more"),
    ],
)
def test_configuration_refuses_sizes(over, size, message):
    with pytest.raises(InputError, match=message):
        at_size(LLAMA, over, size)


def test_factory_without_the_argument_names_its_own():
    with pytest.raises(InputError, match=r"network has no argument 'widths'; .* width, depth, vocab. Nearest: width"):
        at_size(network, "widths", 8)
    with pytest.raises(
        InputError,
        match=r"<lambda> has no argument 'width'; .* are breite. Nearest: .*build\(width\): …, with this name",
    ):
        at_size(lambda breite: network(breite), "width", 8)
    with pytest.raises(InputError, match="<lambda> has no argument 'width'; it has no arguments"):
        at_size(lambda: network(8), "width", 8)


def test_module_whose_layers_share_parameters_grows_in_depth():
    config = transformers.AlbertConfig(hidden_size=32, num_attention_heads=2, intermediate_size=32, embedding_size=16)
    deeper = at_size(transformers.AlbertForMaskedLM(config), "depth", 24)
    assert deeper.model.config.num_hidden_layers == 24


def test_network_of_several_stages_is_refused_by_name():
    with pytest.raises(InputError, match="convnext has no one field for its width"):
        at_size({"model_type": "convnext"}, "width", 8)
    with pytest.raises(InputError, match="swin has the same layers at depth 8"):
        at_size({"model_type": "swin"}, "depth", 8)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({}, "over must have one name"),
        ([1, 2], "over must have one name"),
        ({"width": 64}, r"over\['width'\] must be a list of sizes; got 64"),
        ({"width": [64]}, "two or more different sizes"),
        ({"width": [64, 64]}, "two or more different sizes"),
        ({"width": [64, -1]}, "at least 1; got -1"),
    ],
)
def test_over_refuses_names_and_sizes(over, message):
    with pytest.raises(InputError, match=message):
        sizes_over(over)
