"""The lines to paste: the code is executed, and gives the optimiser, the weights and the pass of the rule."""

import math
import sys
from types import ModuleType

import pytest
import torch

import limitformer as lf
from limitformer.scaling.lines import lines_of
from limitformer.scaling.parametrisation import parametrise
from limitformer.scaling.sizes import at_size
from limitformer.stepping.optimizers import read_optimizer

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
LLAMA |= {"num_key_value_heads": 2, "intermediate_size": 96}
BASES, AT = {"width": 64, "depth": 2}, {"width": 256, "depth": 8}


def lines_at(over, rule, optimizer, kind=None):
    """Return the lines, what the rule sets, and the module of its own code at that size."""
    module = at_size(LLAMA, over, AT[over]).model.factory()
    put = parametrise(LLAMA, over, AT[over], BASES[over], rule, kind or optimizer)
    every = zip(
        put.lr_factors, put.lr_factors.values(), put.decay_factors.values(), put.eps_factors.values(), strict=True
    )
    rules = read_optimizer(optimizer, module, steps=1).with_factors({name: each for name, *each in every})
    return lines_of("here", put, rules), put, rules, module


def pasted(code):
    names = {}
    exec(code, names)
    return names


def same_rules(first, second):
    one, other = (
        {(key, name): value for key, each in rules.items() for name, value in (vars(each) | {"of": type(each)}).items()}
        for rules in (first, second)
    )
    exact = [key for key, value in one.items() if not isinstance(value, float)]
    return one.keys() == other.keys() and all(
        one[key] == (other[key] if key in exact else pytest.approx(other[key], rel=1e-10)) for key in one
    )


@pytest.mark.parametrize(
    ("over", "rule", "optimizer"),
    [
        ("width", "standard", "muon"),
        ("width", "mup", "adamw"),
        ("width", "mup", {"name": "sgd", "momentum": 0.9, "nesterov": True}),
        ("width", "completep", "adam"),
        ("depth", "completep", "adamw"),
        ("depth", "depth-mup", {"name": "adamw", "weight_decay": 0.1}),
    ],
)
def test_pasted_code_gives_the_optimiser_of_the_rule(over, rule, optimizer):
    kind = optimizer if isinstance(optimizer, str) else optimizer["name"]
    lines, _, rules, module = lines_at(over, rule, optimizer, {} if kind == "muon" else kind)
    read = read_optimizer(pasted(lines.code)["optimizer"], module, steps=1)
    assert same_rules(read.rules, rules.rules)
    plain = read_optimizer(optimizer, module, steps=1)  # wrong twin: without the factors of the rule
    assert same_rules(read.rules, plain.rules) is (rule == "standard")


def test_table_of_lines_has_the_numbers_of_mup():
    """muP at four times the width, by hand: hidden matrices have a quarter of the rate and four times the decay."""
    lines, *_ = lines_at("width", "mup", "adamw")
    rows = {row[0]: row[1:] for row in lines.rows}
    assert rows["model.layers.*.mlp.up_proj.weight"] == ["AdamW", "0.00025", "0.04", "2.5e-09", "0.01", "–"]
    assert rows["model.embed_tokens.weight"] == ["AdamW", "0.001", "0.01", "2.5e-09", "0.02", "–"]
    assert rows["lm_head.weight"] == ["AdamW", "0.001", "0.01", "2.5e-09", "0.02", "0.25"]


def test_pasted_code_gives_the_weights_and_the_pass_of_the_rule():
    lines, put, _, module = lines_at("width", "mup", "adamw")
    names, ids = pasted(lines.code), torch.arange(8)[None]
    torch.manual_seed(0)
    for each in module.parameters():
        torch.nn.init.normal_(each, std=0.02)
    names["initialise"](module)
    stds = {name: each.std().item() for name, each in module.named_parameters() if each.dim() == 2}
    laws = put.laws_in_effect()
    assert {name: laws[name].std for name in stds} == pytest.approx(stds, rel=0.03)
    ruled = put.model.factory()
    ruled.load_state_dict(module.state_dict())
    plain = module(ids).logits
    names["multiply"](module)
    assert torch.allclose(module(ids).logits, ruled(ids).logits, atol=1e-6)
    assert not torch.allclose(plain, ruled(ids).logits, atol=1e-3 * ruled(ids).logits.abs().max().item())


def test_lion_is_imported_from_its_package(monkeypatch):
    class Lion(torch.optim.SGD):
        def __init__(self, groups):
            self.given = [{key: each for key, each in group.items() if key != "params"} for group in groups]

    monkeypatch.setitem(sys.modules, "lion_pytorch", ModuleType("lion_pytorch"))
    sys.modules["lion_pytorch"].Lion = Lion
    lines, _, _, module = lines_at("width", "mup", "lion")
    groups = pasted(lines.code)["optimizer"](module).given
    assert {group["lr"] for group in groups} == {1e-4, 2.5e-5}


def test_branches_over_depth_are_a_line_for_the_block():
    lines, *_ = lines_at("depth", "completep", "adamw")
    assert "instead of x + f: x + 0.25 * f" in lines.code
    assert ["residual branches", *["–"] * 5, "0.25"] in lines.rows


class Growing(torch.nn.Module):
    """Attention whose heads grow with the width."""

    def __init__(self, width):
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(50, width), torch.nn.Linear(width, 50)
        self.attention = torch.nn.ModuleList([Attention(width)])

    def forward(self, ids):
        x = self.tokens(ids)
        return self.head(x + self.attention[0](x))


class Attention(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q_proj, self.k_proj, self.scale = torch.nn.Linear(width, width), torch.nn.Linear(width, width), width**-0.5

    def forward(self, x):
        return (self.q_proj(x) @ self.k_proj(x).mT * self.scale).softmax(-1) @ x


def test_factor_of_logits_is_a_line_of_code():
    put = parametrise(Growing, "width", 64, 16, "mup", "adamw")
    module = Growing(64)
    names = pasted(lines_of("here", put, read_optimizer("adamw", module, steps=1)).code)
    names["multiply"](module)
    assert module.attention[0].scale == pytest.approx(1 / 64 * math.sqrt(16))  # q·k/d, equal at the base


def test_lines_are_in_text_page_and_json():
    options = {"optimizer": "adamw", "rule": "mup", "steps": 1, "samples": 2, "seed": 0, "progress": False}
    result = lf.transfer(LLAMA, {"width": [64, 128]}, 6, target=256, rate=2e-3, **options)
    assert result.lines.title == "width 256, rule mup, base 64"
    assert result.lines.code in str(result)
    record = result.record()["lines"]
    assert record["code"] == result.lines.code
    assert {"weights": "lm_head.weight", "lr": "0.002", "multiplier": "0.25"}.items() <= record["settings"][-1].items()
    assert "What to set at width 256, rule mup, base 64" in result.page()
    assert result.data[128].attrs["seed"] == 0
    assert list(result.data) == [64, 128]  # the target does not run
