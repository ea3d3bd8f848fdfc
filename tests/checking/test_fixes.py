"""`lf.fix`: the pasted lines on networks that torch and transformers draw, and what is not called a fix."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.checking.thresholds import VERDICTS
from limitformer.designing import report
from limitformer.designing.fixes import FIXES, POWERS, ends, last_gain
from limitformer.models import ShapedAttention, ShapedReLU
from limitformer.reports.verdict import BROKEN, FINE, WATCH, Verdict

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 60}
LLAMA |= {"intermediate_size": 64, "initializer_range": 0.6}
QUICK = {"tokens": 8, "samples": 4, "progress": False}
FAST = QUICK | {"witness": False}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "up", "down"):
            setattr(self, name, nn.Linear(width, width, bias=False))

    def forward(self, x):
        y = nn.functional.rms_norm(x, x.shape[-1:])
        x = x + self.o_proj(nn.functional.scaled_dot_product_attention(self.q_proj(y), self.k_proj(y), self.v_proj(y)))
        return x + self.down(torch.relu(self.up(nn.functional.rms_norm(x, x.shape[-1:]))))


def build(width=32, std=0.1):
    """Make a pre-norm network whose branches are not scaled down with its depth."""
    model = nn.Sequential(nn.Embedding(60, width), *[Block(width) for _ in range(6)], nn.Linear(width, 60, bias=False))
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=0.02 if name == "0.weight" else std)
    return model


def pasted(lines, **names):
    """Execute the lines on these names; return the names after them."""
    exec(lines, names)
    return names


def alike(first, second):
    """Whether two reports have the same numbers."""
    pairs = [(first.curves[name].values, second.curves[name].values) for name in first.curves.data_vars]
    return all(np.allclose(a, b, rtol=1e-4, atol=1e-7, equal_nan=True) for a, b in pairs)


def has_laws_of(model, report):
    """Whether each matrix of a drawn model has the std of its law, within five standard errors."""
    drawn = {name: each.detach() for name, each in model.named_parameters() if report.laws[name].random}
    assert len(drawn) > 10
    ratios = {name: float(each.std()) / report.laws[name].std for name, each in drawn.items()}
    return all(abs(ratios[name] - 1) < 5 / np.sqrt(2 * each.numel()) for name, each in drawn.items())


@pytest.fixture(scope="module")
def of_config():
    return lf.fix(LLAMA, **QUICK)


@pytest.fixture(scope="module")
def of_function():
    return lf.fix(build, settings={"width": 24}, **QUICK)


def test_fields_of_a_configuration_end_the_verdict_when_pasted(of_config):
    assert (set(FIXES) <= set(VERDICTS), of_config.grade) == (True, BROKEN)
    first = of_config.verdicts[0].name
    config = pasted(of_config.lines, config=transformers.LlamaConfig(**LLAMA))["config"]
    again = lf.check(config, **QUICK)
    assert first not in [each.name for each in again.verdicts]
    assert alike(again, of_config.against)
    assert not alike(again, of_config)
    torch.manual_seed(1)
    assert has_laws_of(transformers.LlamaForCausalLM(config), of_config.against)
    assert not has_laws_of(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)), of_config.against)
    assert f"--set initializer_range={config.initializer_range}" in of_config.lines


def test_half_the_change_does_not_end_the_verdict(of_config):
    value = pasted(of_config.lines, config=transformers.LlamaConfig(**LLAMA))["config"].initializer_range
    half = lf.check(LLAMA, settings={"initializer_range": 2 * value}, **FAST)
    assert not ends(of_config.verdicts[0], of_config, half)


def scaled(lines):
    return pasted(lines, build=build)["new_build"]


def test_pasted_factors_give_the_network_that_was_checked(of_function):
    """Compare torch's own draws, and the law of a function that draws and scales. The twin lacks one factor."""
    first = of_function.verdicts[0].name
    assert first in FIXES
    torch.manual_seed(1)
    assert has_laws_of(scaled(of_function.lines)(), of_function.against)
    again = lf.check(scaled(of_function.lines), **QUICK)
    assert first not in [each.name for each in again.verdicts]
    assert alike(again, of_function.against)
    factors = [line for line in of_function.lines.splitlines() if line.startswith('    "*.')]
    assert len(factors) == 2
    for line in factors:
        twin = scaled(of_function.lines.replace(f"{line}\n", ""))
        assert not has_laws_of(twin(), of_function.against)
        assert not alike(lf.check(twin, **FAST), of_function.against)


def test_fix_of_a_module_scales_copies_of_it():
    torch.manual_seed(0)
    model = build()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    result = lf.fix(model, **FAST)
    assert re.findall('"(.*)": 0', result.lines) == ["*.o_proj.weight", "*.down.weight"]
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert not alike(lf.check(model, **FAST), result.against)
    pasted(result.lines, model=model)
    assert alike(lf.check(model, **FAST), result.against)


def test_keys_that_are_too_large_are_scaled_alone():
    torch.manual_seed(0)
    model = build(std=0.1)
    with torch.no_grad():
        for each in model[1:-1]:
            each.k_proj.weight.mul_(100)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    assert "frozen" in [each.name for each in lf.check(model, **FAST).verdicts]
    result = lf.fix(model, **FAST)
    assert re.findall('"(.*)": ', result.lines) == ["*.k_proj.weight"]  # the even split names q_proj too
    pasted(result.lines, model=model)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items() if "k_proj" not in name)
    assert "frozen" not in [each.name for each in lf.check(model, **FAST).verdicts]


def test_head_that_is_too_large_is_scaled_alone():
    def loud():
        model = build(std=0.02)
        nn.init.normal_(model[-1].weight, std=100.0)
        return model

    result = lf.fix(loud, loss="next-token", **FAST)
    assert result.verdicts[0].name == "loss"
    assert '"7.weight": ' in result.lines
    assert "o_proj" not in result.lines
    torch.manual_seed(0)
    model = pasted(result.lines, loud=loud)["new_build"]()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(torch.arange(60)[None])[0, :-1], torch.arange(1, 60))
    assert abs(float(loss) - np.log(60)) < 1.5


class Tied(nn.Module):
    """A network whose head is the table of tokens; N(0, 1) for both tables, as torch draws them."""

    def __init__(self, gain=True, std=0.2):
        super().__init__()
        self.words, self.places, self.body = nn.Embedding(60, 32), nn.Embedding(8, 32), build(std=std)[1:-1]
        self.body.append(nn.RMSNorm(32))
        self.norm, self.out = nn.RMSNorm(32, elementwise_affine=gain), nn.Linear(32, 60, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids):
        return self.out(self.norm(self.body(self.words(ids) + self.places(torch.arange(ids.shape[1])))))


def next_token_loss(model):
    ids = torch.randint(60, (8, 8))
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


def test_tied_head_is_scaled_by_the_gain_of_the_last_norm():
    """A smaller table of tokens alone would end the verdict, too, and drown the tokens in their positions."""
    result = lf.fix(Tied, loss="next-token", **FAST)
    assert result.verdicts[0].name == "loss"
    assert re.findall('^    "(.*)": .*  # gain 1 to', result.lines, re.MULTILINE) == ["norm.weight"]
    torch.manual_seed(0)
    made = pasted(result.lines, Tied=Tied)["new_build"]()
    assert next_token_loss(made) < np.log(60) + 1 < next_token_loss(Tied()) - 1
    torch.manual_seed(0)
    existing = Tied()
    lines = lf.fix(existing, loss="next-token", **FAST).lines
    pasted(lines, model=existing)
    torch.testing.assert_close(existing.norm.weight.detach(), made.norm.weight.detach())
    torch.testing.assert_close(existing.words.weight, made.words.weight)


def test_gains_of_blocks_are_not_that_of_the_last_norm():
    blocks = [nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8)) for _ in range(2)]
    first = nn.ModuleDict({"norm": nn.RMSNorm(8), "blocks": nn.ModuleList(blocks)})  # the norm is made before them
    assert last_gain(None, first) == "norm.weight"
    assert last_gain(None, nn.Sequential(nn.Embedding(9, 8), *blocks, nn.RMSNorm(8), nn.Linear(8, 9))) == "3.weight"
    assert last_gain(None, nn.Sequential(*blocks)) is None


def test_tied_head_without_a_gain_is_scaled_with_all_tables():
    result = lf.fix(partial(Tied, gain=False, std=0.02), loss="next-token", **FAST)
    assert set(re.findall('^    "(.*)": ', result.lines, re.MULTILINE)) == {"words.weight", "places.weight"}


def test_lines_of_a_second_fix_keep_those_of_the_first():
    """Both are pasted into one file, where names of the second must not replace those of the first."""
    factors = {"build": ("*.q_proj.weight", 0.25), "new_build": ("*.up.weight", 0.5)}
    parts = [report.lines_of("function", k, {}, {name: (f, 1.0, f)}) for k, (name, f) in factors.items()]
    space = pasted("\n\n".join(parts), build=build)
    torch.manual_seed(0)
    plain = space["build"]()
    torch.manual_seed(0)
    twice = space["new_build_2"]()
    for (name, before), (_, after) in zip(plain.named_parameters(), twice.named_parameters(), strict=True):
        factor = 0.25 if name.endswith("q_proj.weight") else 0.5 if name.endswith("up.weight") else 1.0
        torch.testing.assert_close(after, before * factor)


def test_lines_for_a_function_called_partial_call_it():
    model = pasted(report.lines_of("function", "partial", {}, {"*.up.weight": (0.5, 1.0, 0.5)}), partial=build)[
        "new_build"
    ]()
    assert isinstance(model, nn.Module)


class OwnHead(nn.Module):
    """A head that is a parameter of the module itself."""

    def __init__(self):
        super().__init__()
        self.body, self.tongue = build(std=0.02)[:-1], nn.Parameter(100 * torch.randn(60, 32))

    def forward(self, ids):
        return self.body(ids) @ self.tongue.T


def test_head_without_a_module_is_scaled():
    result = lf.fix(OwnHead, **FAST)
    assert result.verdicts[0].name == "loss"
    assert '"tongue": ' in result.lines
    assert "loss" not in {each.name for each in result.against.verdicts}


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_fix_needs_a_factor_that_no_norm_takes_away(kind):
    """Queries and keys of Qwen 3 are normalised: their size has no effect."""
    sizes = {name: value for name, value in LLAMA.items() if name != "model_type"} | {"num_key_value_heads": 2}
    config = getattr(transformers, f"{kind}Config")(**sizes | {"initializer_range": 0.3, "head_dim": 16})
    limits = {"narrow": 0.9, "loss": 100.0, "growth": 1e4, "swamped": 1e4, "collapse": 0.999}
    result = lf.fix(lambda: getattr(transformers, f"{kind}ForCausalLM")(config), thresholds=limits, **FAST)
    assert result.verdicts[0].name == "frozen"
    assert bool(result.lines) == (kind == "Llama")
    assert ("normalised at once" in result.fix) == (kind == "Qwen3")


def test_transformer_takes_another_residual_strength():
    attention, relu = ShapedAttention(tau0=1.0), ShapedReLU(c_plus=0.0, c_minus=-1.0)
    model = lf.Transformer(depth=12, width=32, gamma=1.0, lam=1.0, attention=attention, feedforward=relu)
    result = lf.fix(model, **FAST)
    assert result.verdicts[0].name == "grows"
    other = pasted(result.lines, model=model)["model"]
    assert other.gamma < model.gamma
    assert alike(lf.check(other, **FAST), result.against)


def test_sound_network_has_nothing_to_fix(of_function):
    result = lf.fix(scaled(of_function.lines), **FAST)
    assert result.verdicts[0].name == FINE
    assert result.fix.startswith("nothing to fix")
    with pytest.raises(InputError, match="fix has no option overrides"):
        lf.fix(LLAMA, overrides={"*": 0.1})
    assert (result.lines, result.against) == ("", None)


def test_verdict_that_no_factor_ends_has_no_lines():
    result = lf.fix(lambda: build(std=0.25), gradients=False, **FAST)
    assert result.verdicts[0].name == "collapsed"
    assert f"no factor from 2 to {2**POWERS} of output ends it" in result.fix
    assert result.fix.endswith("Nearest: limitformer design")
    assert (result.lines, result.against) == ("", None)


def test_new_verdict_of_the_same_grade_is_not_a_fix(of_config):
    def with_verdicts(*pairs):
        return replace(of_config, verdicts=[Verdict(name, grade, "") for name, grade in pairs])

    frozen, before = Verdict("frozen", WATCH, ""), with_verdicts(("frozen", WATCH), ("swamped", WATCH))
    assert ends(frozen, before, with_verdicts(("swamped", WATCH)))
    assert ends(Verdict("frozen", BROKEN, ""), before, with_verdicts(("uniform", WATCH)))
    assert not ends(frozen, before, with_verdicts(("uniform", WATCH)))
    assert not ends(frozen, before, with_verdicts(("loss", BROKEN)))
    assert not ends(frozen, before, with_verdicts(("frozen", BROKEN)))
