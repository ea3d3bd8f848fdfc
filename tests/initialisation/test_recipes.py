"""Published recipes: every number against its source, and each recipe against modules that draw as its source does."""

import functools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from limitformer.base.errors import InputError
from limitformer.initialisation.recipes import Recipe, compare_with_recipe, recipe_of, recipes
from limitformer.initialisation.recipes.comparison import DIFFERS, FORM
from limitformer.initialisation.recipes.law import constant, normal, uniform
from limitformer.initialisation.recipes.recipe import Weight
from recipe_models import DRAWS, OTHERS, factory

# Sizes: (width, depth, index of the block, head_dim, width of the feed-forward layer, vocabulary).
SMALL = {"width": 64, "depth": 4, "layer": 2, "head_dim": 16, "hidden": 256, "vocabulary": 1000}
BASE = {"width": 768, "depth": 12, "layer": 5, "head_dim": 64, "hidden": 2048, "vocabulary": 32128}

# Recipe → role → standard deviation (or constant) at both sizes, computed by hand from the source.
NUMBERS = {
    "gpt2": {
        "embedding": (0.02, 0.02), "position embedding": (0.01, 0.01), "query": (0.02, 0.02),
        "feed-forward in": (0.02, 0.02), "attention output": (0.00707107, 0.00408248),
        "feed-forward out": (0.00707107, 0.00408248), "norm gain": (1.0, 1.0), "bias": (0.0, 0.0),
    },
    "megatron": {
        "embedding": (0.02, 0.02), "router": (0.02, 0.02), "gate": (0.02, 0.02), "head": (0.02, 0.02),
        "attention output": (0.00707107, 0.00408248), "feed-forward out": (0.00707107, 0.00408248),
    },
    "gpt-neox": {
        "embedding": (0.0790569, 0.0228218), "value": (0.0790569, 0.0228218), "head": (0.0790569, 0.0228218),
        "attention output": (0.0625, 0.00601407), "feed-forward out": (0.0625, 0.00601407),
    },
    "olmo-normal": {"embedding": (0.02, 0.02), "attention output": (0.02, 0.02), "head": (0.02, 0.02)},
    "mitchell": {
        "embedding": (0.123322, 0.0356001), "gate": (0.123322, 0.0356001), "head": (0.123322, 0.0356001),
        "attention output": (0.0503461, 0.0102769), "feed-forward out": (0.0251731, 0.00629326),
    },
    "olmo-full-megatron": {
        "embedding": (0.0197316, 0.0197316), "key": (0.0197316, 0.0197316),
        "attention output": (0.00697616, 0.00402769), "head": (0.123322, 0.0356001),
    },
    "llama-depth-init": {
        "embedding": (1.0, 1.0), "feed-forward in": (0.0197316, 0.0197316),
        "feed-forward out": (0.00805538, 0.00569601), "head": (0.123322, 0.0356001),
    },
    "torchtitan": {
        "gate": (0.02, 0.02), "feed-forward in": (0.00816497, 0.0057735), "feed-forward out": (0.00816497, 0.0057735),
        "attention output": (0.00816497, 0.0057735), "head": (0.123322, 0.0356001),
    },
    "t5": {
        "embedding": (1.0, 1.0), "query": (0.03125, 0.00451055), "key": (0.125, 0.0360844),
        "feed-forward in": (0.125, 0.0360844), "feed-forward out": (0.0625, 0.0220971),
        "relative bias": (0.213201, 0.213201),
    },
    "t5-v1.1": {"head": (0.125, 0.0360844), "gate": (0.125, 0.0360844), "feed-forward out": (0.0625, 0.0220971)},
    "deepnorm": {
        "query": (0.125, 0.0360844), "value": (0.052556, 0.0115279), "attention output": (0.052556, 0.0115279),
        "feed-forward in": (0.0332393, 0.00851395), "feed-forward out": (0.0332393, 0.00851395),
    },
    "torchscale-deepnorm": {
        "embedding": (0.125, 0.0360844), "key": (0.0883883, 0.0255155), "value": (0.0371627, 0.00815148),
        "attention output": (0.052556, 0.0115279), "feed-forward in": (0.0303432, 0.00665566),
        "feed-forward out": (0.0151716, 0.00407574),
    },
    "clip": {
        "embedding": (0.02, 0.02), "position embedding": (0.01, 0.01), "query": (0.125, 0.0360844),
        "attention output": (0.0441942, 0.00736570), "feed-forward in": (0.0883883, 0.0255155),
        "feed-forward out": (0.0441942, 0.00736570),
    },
    "big-vision-vit": {
        "query": (0.125, 0.0360844), "feed-forward in": (0.0790569, 0.0266501),
        "position embedding": (0.125, 0.0360844),
    },
    "switch": {
        "embedding": (1.0, 1.0), "query": (0.00988212, 0.00142636), "value": (0.0395285, 0.0114109),
        "feed-forward out": (0.0197642, 0.00698771), "router": (0.02, 0.02), "relative bias": (0.0674200, 0.0674200),
        "head": (0.0395285, 0.0114109),
    },
    "mup": {
        "embedding": (1.0, 1.0), "query": (0.0, 0.0), "key": (0.125, 0.0360844),
        "feed-forward out": (0.125, 0.0360844), "head": (0.0, 0.0),
    },
    "completep": {"embedding": (0.02, 0.02), "query": (0.04, 0.011547), "attention output": (0.04, 0.011547)},
    "nanochat": {
        "embedding": (0.8, 0.8), "head": (0.001, 0.001), "query": (0.125, 0.0360844),
        "feed-forward in": (0.05, 0.0144338), "attention output": (0.0, 0.0), "smear gate": (0.0057735, 0.0057735),
        "backout factor": (0.2, 0.2),
    },
    "modded-nanogpt": {
        "embedding": (0.005, 0.005), "value": (0.0625, 0.0180422), "attention output": (0.0625, 0.0180422),
        "feed-forward out": (0.0, 0.0), "value embedding": (0.01, 0.01), "residual factors": (1.0488088, 1.0488088),
    },
    "rwkv-7": {
        "embedding": (5.7735e-05, 5.7735e-05), "head": (0.0625, 0.0180422), "receptance": (0.125, 0.0360844),
        "keys": (0.0125, 0.00360844), "channel keys": (0.0625, 0.0220971), "bonus": (-0.04, -0.04),
        "key rate": (1.02, 1.02), "gain after time mixing": (0.817609, 0.615572),
    },
    "rwkv-4": {
        "values": (0.125, 0.0360844), "channel keys": (0.125, 0.0360844), "embedding": (1e-4, 1e-4),
        "outputs": (0.0, 0.0),
    },
    "mamba-2": {
        "embedding": (0.02, 0.02), "input projection": (0.0721688, 0.0208333),
        "output projection": (0.0180422, 0.00368285), "bias of the convolution": (0.288675, 0.288675),
        "log of A": (0.673314, 0.673314), "D": (1.0, 1.0),
    },
    "mhc": {"share of mixing": (-4.59512, -4.59512), "writing to streams": (0.0, 0.0)},
}  # fmt: skip
SHAPES = {  # rows and columns of a weight of torch's layout; a relative bias has 32 buckets and 12 heads
    **dict.fromkeys(("embedding", "head"), ("vocabulary", "width")),
    **dict.fromkeys(("feed-forward in", "gate", "channel keys"), ("hidden", "width")),
    **dict.fromkeys(("feed-forward out", "channel values", "output projection"), ("width", "hidden")),
}


def law(recipe, role, sizes, shape=None):
    """Return the law of a recipe for one weight at these sizes."""
    default = (32, 12) if role == "relative bias" else tuple(sizes[n] for n in SHAPES.get(role, ("width", "width")))
    shape = default if shape is None else shape
    rows, columns = (1, *shape)[-2:]
    names = {**sizes, "rows": rows, "columns": columns, "fan_in": columns, "fan_out": rows}
    return recipe.law_of(Weight(role, shape, (role,), sizes=names))


def size(law):
    return law.std if law.random else law.mean


@pytest.mark.fast
def test_every_recipe_has_numbers_from_its_source():
    assert NUMBERS.keys() == recipes().keys()
    assert all(each.source and each.title for each in recipes().values())
    assert all(" at " in each.source or "arXiv" in each.source for each in recipes().values())


@pytest.mark.fast
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_those_of_the_source_at_two_sizes(name):
    recipe = recipes()[name]
    for role, expected in NUMBERS[name].items():
        for sizes, number in zip((SMALL, BASE), expected, strict=True):
            assert size(law(recipe, role, sizes)) == pytest.approx(number, rel=1e-5), (role, sizes)


@pytest.mark.fast
def test_vectors_of_rwkv_are_those_of_the_source():
    """Entries computed by hand: width 64, depth 4, block 2."""
    seven, four = recipes()["rwkv-7"], recipes()["rwkv-4"]
    mix = law(seven, "mix r", SMALL, (1, 1, 64)).values.ravel()
    assert mix[[0, 16, 48]] == pytest.approx([1.0, 1 - 0.25**0.1, 1 - 0.75**0.1])
    decay = law(seven, "decay", SMALL, (1, 1, 64)).values.ravel()
    # n = 0: −6 + 0.5 − 2.5; n = 63: −6 + 6 + 0.5 + 2.5; n = 32: −6 + 6 (32/63)^(1 + (2/3)^0.3) + 0.5 + 2.5 (0.5/31.5)²
    middle = -6 + 6 * (32 / 63) ** (1 + (2 / 3) ** 0.3) + 0.5 + 2.5 * (0.5 / 31.5) ** 2
    assert decay[[0, 63, 32]] == pytest.approx([-8.0, 3.0, middle])
    first = law(four, "time first", SMALL, (64,)).values
    assert first[:3] == pytest.approx([math.log(0.3), math.log(0.3) + 0.5, math.log(0.3) - 0.5])
    slow = law(four, "time decay", SMALL, (64,)).values
    assert slow[[0, 63]] == pytest.approx([-5.0, 3.0])


def test_law_of_a_logarithm_has_the_moments_of_its_draws():
    """Mamba-2's log of A in closed form, and by 400,000 draws of the source's statement."""
    drawn = torch.log(1 + 15 * torch.rand(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    exact = law(recipes()["mamba-2"], "log of A", SMALL)
    error = exact.std / math.sqrt(len(drawn))
    assert abs(float(drawn.mean()) - exact.mean) < 4 * error
    assert abs(float(drawn.std()) - exact.std) < 4 * error
    assert abs(float(drawn.std()) * math.sqrt(2) - exact.std) > 100 * error  # the wrong twin


@functools.cache
def compared(name, wrong=None):
    return compare_with_recipe(factory(name, wrong), name)


def drawn_roles(name):
    """Return the roles that the module of a recipe draws."""
    draws, form = DRAWS[name]
    absent = {"gate"} if form.get("gated") is False else set()
    return [role for role in draws if role not in absent | ({"head"} if form.get("tied") else set())]


@pytest.mark.parametrize("name", DRAWS)
def test_module_drawn_as_the_source_says_has_no_difference(name):
    comparison = compared(name)
    assert comparison.differences == (), str(comparison)
    assert [row.mark for row in comparison.rows if row.mark == FORM] == [], str(comparison)
    seen = {role for row in comparison.rows for role in row.kind.split(", ")}
    assert set(drawn_roles(name)) <= seen, set(drawn_roles(name)) - seen


@pytest.mark.parametrize("name", DRAWS)
def test_factor_of_root_two_in_one_role_is_the_one_that_is_named(name):
    recipe = recipes()[name]
    first = {str(law(recipe, role, BASE)): role for role in reversed(drawn_roles(name))}  # one role of each law
    for role in first.values():
        comparison = compared(name, role)
        assert {row.kind for row in comparison.differences} == {role}, f"{role}: {comparison}"
        row = comparison.differences[0]
        assert row.ratio == pytest.approx((math.sqrt(2),) * 2) or math.isinf(row.ratio[0])


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_drawn_as_their_sources_say_have_no_difference(name):
    comparison = compare_with_recipe(OTHERS[name], name)
    assert comparison.differences == (), str(comparison)
    unknown = {"mamba-2": {"A_log", "dt_bias"}, "mhc": {"H_pre_logits"}}.get(name, set())
    assert {each.names.rpartition(".")[2] for each in comparison.uncovered} == unknown
    assert {row.kind for row in comparison.rows} >= set(recipes()[name].names) - {"share of mixing", "log of A"}


def test_page_names_every_recipe():
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert [name for name in recipes() if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("name", "ending", "role"),
    [
        ("rwkv-7", "att.key.weight", "keys"),
        ("rwkv-4", "att.time_first", "time first"),
        ("mamba-2", "mixer.out_proj.weight", "output projection"),
        ("mhc", "H_res_logits", "mixing of streams"),
    ],
)
def test_wrong_twin_of_another_architecture_is_named(name, ending, role):
    def wrong():
        model = OTHERS[name]()
        with torch.no_grad():
            for each, parameter in model.named_parameters():
                if each.endswith(ending):
                    parameter.mul_(math.sqrt(2))
        return model

    assert {row.kind for row in compare_with_recipe(wrong, name).differences} == {role}


def test_truncation_at_a_hundred_std_is_a_normal_law_and_is_said():
    comparison = compare_with_recipe(factory("torchtitan"), "megatron")
    row = next(row for row in comparison.rows if row.kind == "query")
    assert (row.mark, row.ratio) == (FORM, (1.0, 1.0))
    assert row.remark == "truncated at ±100 σ, which cuts nothing: a normal"


def test_truncation_that_is_not_rescaled_is_a_difference_of_size():
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens = nn.Embedding(96, 48)
            nn.init.trunc_normal_(self.embed_tokens.weight, std=0.02, a=-0.04, b=0.04)

    row = compare_with_recipe(Cut, "megatron").rows[0]
    assert row.mark == DIFFERS
    assert row.ratio == pytest.approx((0.8796256610,) * 2)


def test_other_constants_are_a_difference():
    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens, self.norm = nn.Embedding(96, 48), nn.LayerNorm(48)
            nn.init.normal_(self.embed_tokens.weight, std=0.02)
            nn.init.zeros_(self.norm.weight)
            nn.init.constant_(self.norm.bias, 0.5)

    rows = {row.kind: row for row in compare_with_recipe(Doubled, "megatron").differences}
    assert rows["norm gain"].remark == "0, where the recipe has 1"
    assert rows["norm bias"].remark == "0.5, where the recipe has 0"
    assert (rows["norm gain"].ratio_text, rows["norm bias"].ratio_text) == ("0", "∞")


def test_settings_change_the_numbers():
    assert "std = 0.006" in str(recipe_of("megatron,std=0.006"))
    comparison = compare_with_recipe(factory("megatron"), "megatron,std=0.006")
    assert {row.ratio_text for row in comparison.differences} == {"3.333"}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda weight: 0.02, r"recipe <lambda> gives 0\.02, which is not a law\. Nearest: def ours\(weight\)"),
        (lambda weight: normal(weight.widht), "AttributeError: a weight has no 'widht'. Nearest: width"),
        (lambda weight: normal(-0.02), "a standard deviation must not be negative; got -0.02"),
        (lambda weight: uniform(1.0, 0.0), "the ends of a uniform law must ascend; got 1 and 0"),
        (lambda weight, std: None, "setting std of recipe <lambda> must be a number"),
    ],
)
def test_wrong_recipes_are_refused(wrong, says):
    with pytest.raises(InputError, match=says):
        compare_with_recipe(factory("megatron"), wrong)


@pytest.mark.fast
def test_formulas_of_earlier_versions_are_refused():
    with pytest.raises(InputError, match="a recipe has no rules; it is a function of a weight"):
        Recipe(name="ours", title="Ours", source="a note", rules={"query": "normal(0.02)"})


@pytest.mark.fast
def test_weight_without_a_size_or_a_value_has_no_law():
    assert law(recipes()["gpt2"], "attention output", {**SMALL, "depth": None}) == "its depth is not known"
    one_block = law(recipes()["rwkv-4"], "time decay", {**SMALL, "depth": 1})
    assert re.fullmatch("the recipe has no value for it: .*division by zero", one_block)
    assert law(recipes()["rwkv-4"], "time decay", SMALL, (1,)) == "the recipe has no value for it"  # 0/0
    assert law(recipes()["gpt2"], "gate", SMALL) == "the recipe has no rule for gate"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpt-2", "recipe must be one of 23 names; got 'gpt-2'. Nearest: gpt2"),
        ("megatron,sd=1", "recipe megatron has no setting 'sd'. It has std."),
        ("gpt2,std=1", "recipe gpt2 has no setting 'std'. It has none."),
        ("megatron,std=big", "setting std of recipe megatron must be a number; got 'big'"),
        ("megatron,0.006", "recipe takes NAME,SETTING=NUMBER; got '0.006'"),
        ("megatron,std=1,std=2", "recipe gives std twice"),
        (3, "recipe must be a function of a weight, or its name; got int"),
    ],
)
def test_wrong_names_are_refused(name, says):
    with pytest.raises(InputError, match=says):
        recipe_of(name)


def test_own_recipe_is_compared():
    def ours(weight, std=0.02):
        """Our house.

        a note
        """
        return {"query": normal(std), "norm gain": constant(1)}.get(weight.role)

    own = recipe_of(ours, "std=0.01")
    assert (own.name, own.title, own.source, own.notes) == ("ours", "Our house", "a note", "")
    assert 'return {"query": normal(std), "norm gain": constant(1)}.get(weight.role)' in str(own)
    comparison = compare_with_recipe(factory("megatron"), own)
    assert [(row.kind, row.ratio) for row in comparison.differences] == [("query", (2.0, 2.0))]
    assert "the recipe has no rule for key" in str(comparison)
    assert compare_with_recipe(factory("megatron"), ours).differences == ()


def test_ratios_that_are_infinite_are_json():
    comparison = compare_with_recipe(factory("mup", "query"), "mup")
    record = json.loads(json.dumps(comparison.record(), allow_nan=False))
    assert [row["ratio"] for row in record["rows"] if row["kind"] == "query"] == [["inf", "inf"]]
    assert np.isinf(comparison.differences[0].ratio[0])
