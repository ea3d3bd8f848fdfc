"""Load of experts, memory of heads, and what the output owes to a condition, against the models' own code."""

import math

import numpy as np
import pytest
import torch
import transformers
from benchmarks.zoo.configurations import small_config
from torch import nn
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

import limitformer as lf
from limitformer.checking.conditions import agreement_of, with_other
from limitformer.checking.module import settle_module
from limitformer.subjects.inputs import Inputs, inputs_of
from limitformer.subjects.subject import resolve
from limitformer.weightless.block_parts import half_lives, unrelated_experts

MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 128, "num_local_experts": 6,
    "num_experts_per_tok": 2,
}  # fmt: skip
IDS = torch.tensor([[3, 4, 5, 3, 4, 5, 6, 7, 8, 3, 4, 9]])


def effective(choices, experts):
    share = np.bincount(np.asarray(choices).ravel(), minlength=experts) / np.size(choices)
    return float(np.exp(-sum(p * math.log(p) for p in share if p > 0)))


def drawn_mixtral(seed):
    torch.manual_seed(seed)
    config = transformers.CONFIG_MAPPING["mixtral"](**{k: v for k, v in MIXTRAL.items() if k != "model_type"})
    return transformers.MixtralForCausalLM(config).eval()


def router_choices(model, ids, k=2):
    with torch.no_grad():
        logits = model(input_ids=ids, output_router_logits=True).router_logits
    return [each.softmax(-1).topk(k).indices.numpy() for each in logits]


def test_load_of_experts_equals_that_of_the_models_own_router():
    model = drawn_mixtral(5)
    curves = lf.check(model, IDS, law=False, progress=False).curves
    for block, choices in enumerate(router_choices(model, IDS)):
        at = {"sample": 0, "block": block}
        assert float(curves["effective_experts"].isel(at)) == pytest.approx(effective(choices, 6), rel=1e-9)
        busiest = np.bincount(choices.ravel(), minlength=6).max() / IDS.numel()
        assert float(curves["busiest_expert"].isel(at)) == pytest.approx(busiest, rel=1e-9)
        assert float(curves["chosen_experts"].isel(at)) == 2


@pytest.mark.parametrize(("kind", "experts"), [("switch_transformers", 4), ("deepseek_v3", 8)])
def test_routers_of_other_families_are_found(kind, experts):
    """A choice of groups, which DeepSeek makes first, is not that of experts."""
    small = {
        "switch_transformers": {
            "d_model": 32, "d_kv": 8, "d_ff": 32, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2,
            "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2, "num_experts": 4, "vocab_size": 128,
        },
        "deepseek_v3": {
            "hidden_size": 32, "num_hidden_layers": 2, "first_k_dense_replace": 0, "n_routed_experts": 8,
            "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "moe_intermediate_size": 16, "intermediate_size": 32, "kv_lora_rank": 8,
            "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "vocab_size": 128,
        },
    }[kind]  # fmt: skip
    data = lf.weightless.simulate({"model_type": kind, **small}, 24, samples=2, seed=0, progress=False)
    chosen = 1 if kind == "switch_transformers" else 2
    routed = data["chosen_experts"].values
    assert (routed[~np.isnan(routed)] == chosen).all()
    assert np.isfinite(data["effective_experts"].values).any(1).all()
    unrelated = data["unrelated_experts"].values
    assert unrelated[~np.isnan(unrelated)] == pytest.approx(unrelated_experts(24, experts, chosen), rel=1e-12)


def test_unrelated_experts_is_the_mean_over_independent_choices():
    """A direct sum over all equally likely counts of two tokens with one choice each among three experts."""
    exact = (1 / 3) * 1.0 + (2 / 3) * 2.0
    assert unrelated_experts(2, 3, 1) == pytest.approx(exact, abs=4 * 0.5 / math.sqrt(64))
    assert 7.9 < unrelated_experts(400, 8, 2) < 8.0


def test_half_life_is_that_of_the_mixers_own_recurrence():
    """Increments of the scan's output shrink by exp(−Δ A) a token where the projection of the input is zero.

    The twin leaves the bias of Δ out.
    """
    config = transformers.Mamba2Config(hidden_size=16, num_heads=4, head_dim=8, state_size=4, n_groups=1, chunk_size=4)
    torch.manual_seed(0)
    model = transformers.Mamba2ForCausalLM(config).double()
    mixer = next(part for part in model.modules() if isinstance(part, Mamba2Mixer))
    with torch.no_grad():
        mixer.in_proj.weight.zero_()
        mixer.conv1d.bias.normal_()
    seen = {}
    mixer.norm.register_forward_pre_hook(lambda part, args: seen.update(y=args[0]))
    with torch.no_grad():
        mixer(torch.randn(1, 6, 16, dtype=torch.float64))
    y = seen["y"][0].unflatten(-1, (4, 8)).double()
    step = y.diff(dim=0)
    decay = (step[1:] / step[:-1]).mean((0, 2))
    measured = -1 / torch.log2(decay)
    assert torch.allclose(half_lives([mixer]), measured, rtol=1e-4)
    assert not torch.allclose(1 / torch.exp(mixer.A_log.detach()), measured, rtol=0.1)


def test_memory_of_one_token_is_past_broken():
    """dt_bias = 1 and A = 1, 2, … give half-lives of 0.53 tokens at most."""
    config = {
        "model_type": "mamba2", "hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1,
        "num_hidden_layers": 2, "vocab_size": 64, "chunk_size": 8,
    }  # fmt: skip
    assert "memory" not in [one.name for one in lf.check(config, tokens=8, samples=2, progress=False).verdicts]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    for part in model.modules():
        if isinstance(part, Mamba2Mixer):
            part.dt_bias.data.fill_(1.0)
            part.A_log.data.copy_(torch.log(torch.arange(1.0, 9.0)))
    report = lf.check(model, tokens=8, law=False, progress=False)
    (one,) = (one for one in report.verdicts if one.name == "memory")
    assert one.severe
    assert one.value == pytest.approx(math.log(2) / math.log1p(math.e), rel=1e-6)


class Decoder(nn.Module):
    """Tokens that add a projection of a condition in each block."""

    def __init__(self, strength):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Linear(6, 32)
        self.h = nn.ModuleList(Conditioned(strength) for _ in range(3))

    def forward(self, x, condition):
        x = self.embedding(x)
        for block in self.h:
            x = block(x, condition)
        return x


class Conditioned(nn.Module):
    def __init__(self, strength):
        super().__init__()
        self.mix, self.read, self.strength = nn.Linear(32, 32), nn.Linear(5, 32), strength

    def forward(self, x, condition):
        return x + torch.tanh(self.mix(x)) + self.strength * self.read(condition)[:, None]


@pytest.mark.parametrize(("strength", "is_deaf"), [(1.0, False), (1e-3, True)])
def test_agreement_is_that_of_two_passes_of_the_module(strength, is_deaf):
    model = Decoder(strength)
    inputs = {"x": torch.randn(1, 7, 6), "condition": torch.randn(1, 5)}
    report = lf.check(model, inputs, law=False, progress=False)
    other = with_other(Inputs(inputs, {}, 1), ["condition"], None).fixed["condition"][1:]
    with torch.no_grad():
        a, b = model(inputs["x"], inputs["condition"])[0], model(inputs["x"], other)[0]
    expected = torch.cosine_similarity(a.double(), b.double(), dim=-1).mean()
    found = report.curves["agreement"]
    assert found["condition"].values.tolist() == ["condition", "every input"]
    assert float(found[0]) == pytest.approx(float(expected), rel=1e-5)
    assert ("deaf" in [one.name for one in report.verdicts]) is is_deaf


def test_tokens_before_a_difference_do_not_count():
    """V of four tokens and four others: the second differs, the third and fourth follow it."""
    x = np.zeros((2, 8, 3))
    x[:, :4] = x[:, 4:] = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]]
    x[:, 5] = [0, 1, 1]
    x[1, 6] = [0, 1, 1]
    v = np.einsum("lin,ljn->lij", x, x)
    assert agreement_of(v) == pytest.approx((1 / math.sqrt(2) + 1) / 2)
    x[1, 6] = x[1, 2]
    assert agreement_of(np.einsum("lin,ljn->lij", x, x)) is None  # no path leads there


def test_group_sizes_are_those_of_words_and_images():
    config = small_config("llava")
    inputs = inputs_of(16, resolve(config))
    model = transformers.LlavaForConditionalGeneration(config).eval()
    inputs = settle_module(model, inputs, own_loss=False).fixed
    report = lf.check(model, inputs, law=False, progress=False)
    seen = {}
    hook = model.model.language_model.layers[0].register_forward_pre_hook(
        lambda part, args, kwargs: seen.update(x=args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    x, image = seen["x"][0].double(), inputs["input_ids"][0] == model.config.image_token_id
    sizes = report.curves["group_size"].isel(sample=0, layer=0)
    for name, at in (("words", ~image), ("pixel_values", image)):
        assert float(sizes.sel(group=name)) == pytest.approx(float(x[at].square().mean().sqrt()), rel=1e-5)
    assert float(sizes.sel(group="words")) != pytest.approx(float(sizes.sel(group="pixel_values")), rel=0.01)
