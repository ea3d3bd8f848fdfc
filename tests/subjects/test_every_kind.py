"""Every command with every kind of model: it works, or one line says what to give instead."""

import json

import pytest
import torch
import transformers
import xarray as xr

import limitformer as lf
from limitformer.initialisation import compare as compare_builds
from limitformer.initialisation.recipes import compare_with_recipe
from limitformer.subjects.shapes import SHAPES

SMALL = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 200, "initializer_range": 0.2}
TRANSFORMER = lf.Transformer(width=16, depth=2, gamma=0.5, attention=lf.ShapedAttention(tau0=1.0))
START = lf.equicorrelated(3, 0.1)
IDS = [[3, 4, 5, 6]]
CODE = f"""
import transformers

def build(width=16, initializer_range=0.2):
    sizes = {SMALL!r} | {{"n_embd": width, "initializer_range": initializer_range}}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
"""
TEXTS = ("name", "JSON", "dictionary", "folder", "file", "configuration")
FUNCTIONS = ("function", "FILE.py:NAME")
STOCK, OTHER, CHECKPOINT = "module of transformers", "another module", "checkpoint"
EXISTING = (STOCK, OTHER, CHECKPOINT)
OWN = ("Transformer", "JSON of a Transformer")


class Another(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(200, 16)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(2)])

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    place = tmp_path_factory.mktemp("kinds")
    (place / "folder").mkdir()
    (place / "folder" / "config.json").write_text(json.dumps(SMALL))
    (place / "small_gpt.py").write_text(CODE)
    names = {}
    exec(CODE, names)
    config = transformers.GPT2Config(**{key: each for key, each in SMALL.items() if key != "model_type"})
    module = transformers.GPT2LMHeadModel(config)
    module.save_pretrained(place / "checkpoint")
    SHAPES["small-gpt2"] = (SMALL, "this test")
    yield {
        "name": "small-gpt2",
        "JSON": json.dumps(SMALL),
        "dictionary": SMALL,
        "folder": place / "folder",
        "file": str(place / "folder" / "config.json"),
        "configuration": config,
        "function": names["build"],
        "FILE.py:NAME": f"{place / 'small_gpt.py'}:build",
        STOCK: module,
        OTHER: Another(),
        CHECKPOINT: place / "checkpoint",
        "Transformer": TRANSFORMER,
        "JSON of a Transformer": lf.to_json(TRANSFORMER),
    }
    del SHAPES["small-gpt2"]


def mean_square(out, inputs):
    return out.square().mean((1, 2))


def options(kind):
    """Return inputs, and the loss of a network that has none."""
    return (START, {"loss": mean_square}) if kind in OWN else (IDS, {})


def check(what, kind):
    lf.check(what, options(kind)[0], tokens=4, samples=1, gradients=False, progress=False)


def check_with_settings(what, kind):
    settings = {"depth": 3} if kind in OWN else {"initializer_range": 0.1}
    lf.check(
        what, options(kind)[0], tokens=4, samples=1, gradients=False, witness=False, progress=False, settings=settings
    )


def steps(what, kind):
    inputs, loss = options(kind)
    lf.steps(what, inputs, optimizer="sgd", steps=1, samples=1, seed=0, witness=False, progress=False, **loss)


def rate(what, kind):
    inputs, loss = options(kind)
    lf.rate(what, inputs, optimizer="sgd", steps=1, networks=1, seed=0, witness=False, progress=False, **loss)


def transfer(what, kind):
    inputs, loss = options(kind)
    sizes = {"width": [16, 32]}
    lf.transfer(what, sizes, inputs, optimizer="sgd", steps=1, samples=1, seed=0, progress=False, witness=False, **loss)


def design(what, kind):
    few = {"samples": 29, "scan": 1, "progress": False}
    if kind in OWN:
        lf.design(what, START, knobs="gamma", grid={"gamma": [0.4, 0.5]}, **few)
    else:
        lf.design(what, IDS, objective={"gradient": None}, knobs="initializer_range",
                  grid={"initializer_range": [0.1, 0.2]}, **few)  # fmt: skip


def simulate(what, kind):
    lf.weightless.simulate(what, options(kind)[0], samples=1, seed=0, progress=False)


NO_FACTORY = dict.fromkeys([OTHER], "a module has its weights already")
NO_TEXT = dict.fromkeys((*FUNCTIONS, OTHER, *OWN), "must be a language model of transformers")
COMMANDS = {  # the command, and words of its error by kind of model
    "check": (check, {}),
    "check, with settings": (check_with_settings, dict.fromkeys(EXISTING, "this network has its weights already")),
    "steps": (steps, NO_FACTORY),
    "rate": (rate, NO_FACTORY),
    "transfer": (transfer, NO_FACTORY),
    "design": (design, dict.fromkeys((STOCK, OTHER), "has its weights") | {CHECKPOINT: "holds weights"}),
    "compare two builds": (lambda what, kind: compare_builds(what, what), {}),
    "compare with a recipe": (lambda what, kind: compare_with_recipe(what, "gpt2"), NO_FACTORY),
    "law": (lambda what, kind: lf.weightless.law(what), NO_FACTORY),
    "simulate": (simulate, NO_FACTORY),
    "lengths": (lambda what, kind: lf.weightless.attention_by_length(what, [4], progress=False), NO_TEXT),
}


def test_changed_module_has_no_law(kinds):
    """A network without some of its layers, or of a class with more arguments, is not what its configuration says."""
    config = kinds["configuration"]
    shorter, scaled = transformers.GPT2LMHeadModel(config), Scaled(config, 5.0)
    shorter.transformer.h = shorter.transformer.h[:1]
    for module in (shorter, scaled):
        with pytest.raises(lf.InputError, match="is not what its class builds from its configuration"):
            lf.weightless.law(module)
        assert lf.check(module, IDS, gradients=False, progress=False).band is None
    for kind in (transformers.GPT2LMHeadModel, Passes):
        assert lf.weightless.law(kind(config)).count


class Passes(transformers.GPT2LMHeadModel):
    """A class with the signature of transformers, which has no further argument."""

    def __init__(self, config, *inputs, **options):
        super().__init__(config)


class Scaled(transformers.GPT2LMHeadModel):
    def __init__(self, config, factor=1.0):
        super().__init__(config)
        with torch.no_grad():
            self.transformer.wte.weight.mul_(factor)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_takes_every_kind_of_model(command, kinds):
    call, refused = COMMANDS[command]
    every = TEXTS if command in ("check", "law") else ("name", "folder")  # all texts are resolved by one function
    for kind in (*every, *FUNCTIONS, *EXISTING, *OWN):
        what = kinds[kind]
        if kind not in refused:
            call(what, kind)
            continue
        with pytest.raises(lf.InputError) as error:
            call(what, kind)
        assert refused[kind] in str(error.value), kind
        assert "\n" not in str(error.value)


def test_settings_are_arguments_of_a_function(kinds):
    """`settings` changes an argument as it changes the field of that name: the same law."""
    by_function, by_field = (
        lf.check(kinds[kind], IDS, samples=1, gradients=False, progress=False, settings={"initializer_range": 0.05})
        for kind in ("FILE.py:NAME", "dictionary")
    )
    other = lf.check(kinds["FILE.py:NAME"], IDS, samples=1, gradients=False, progress=False)
    xr.testing.assert_allclose(by_function.curves.correlation, by_field.curves.correlation, rtol=0, atol=1e-6)
    assert abs(by_function.curves.correlation - other.curves.correlation).max() > 0.01
    with pytest.raises(lf.InputError, match=r"build has no argument 'widht'\. Nearest: width"):
        lf.check(kinds["function"], IDS, settings={"widht": 8})
