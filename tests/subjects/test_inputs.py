"""Inputs, tasks and losses that are chosen for a model, compared with the model's own code."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_outputs import MaskedLMOutput

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.subjects.choices import choices_of
from limitformer.subjects.classes import task_of
from limitformer.subjects.inputs import inputs_of
from limitformer.subjects.losses import chosen_loss, decoder_token, output_of, own_loss, same_token
from limitformer.subjects.subject import resolve
from limitformer.weightless.blocks import Entries
from limitformer.weightless.interpreter import Observer
from limitformer.weightless.network import Weightless
from weightless_families import CONFIGS

WIDTH = 16
TEXT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 48, "vocab_size": 64,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Words(nn.Module):
    """Ids to logits with tied embeddings, so that a token predicts itself."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.T / WIDTH**0.5


class Nano(Words):
    """Returns (logits, loss) as nanoGPT does: without targets only the last logits."""

    def forward(self, idx, targets=None):
        logits = super().forward(idx)
        if targets is None:
            return logits[:, [-1]], None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def llava():
    return transformers.LlavaConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", **VISION},
        image_token_id=60,
    )


def simulate(model, inputs, **options):
    options = {"samples": 2, "seed": 0, "progress": False} | options
    return lf.weightless.simulate(model, inputs, **options)


def network_of(config):
    return Weightless(resolve(config), torch.float32, torch.device("cpu"))


# ---------------------------------------------------------------- tasks and their losses


@pytest.mark.parametrize(
    ("config", "name", "task"),
    [
        (transformers.Gemma3Config, "Gemma3ForConditionalGeneration", "causal"),
        (transformers.Qwen2_5_VLConfig, "Qwen2_5_VLForConditionalGeneration", "causal"),
        (transformers.WhisperConfig, "WhisperForConditionalGeneration", "seq2seq"),
        (transformers.XLMConfig, "XLMWithLMHeadModel", "masked"),
        (transformers.GPT2Config, "GPT2LMHeadModel", "causal"),
        (transformers.LlamaConfig, "LlamaModel", "hidden"),
    ],
)
def test_only_classes_with_a_decoder_of_their_own_are_seq2seq(config, name, task):
    assert task_of(getattr(transformers, name), config()) == task


def test_loss_of_a_decoder_named_conditional_generation_is_the_models_own():
    config = transformers.Gemma3Config(text_config=TEXT | {"initializer_range": 0.2}, vision_config=VISION)
    config.architectures = ["Gemma3ForConditionalGeneration"]
    ids = torch.arange(3, 15)[None]
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        own, out = model(input_ids=ids, labels=ids).loss, model(input_ids=ids)
    loss = chosen_loss(None, resolve(config).task)(out, {"input_ids": ids})
    torch.testing.assert_close(loss, own[None])
    assert not torch.isclose(own, nn.functional.cross_entropy(out.logits[0], ids[0]))  # the token that is read


def test_decoder_may_have_another_length_than_its_encoder():
    config = transformers.T5Config(
        d_model=32, d_kv=16, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=2, vocab_size=64
    )
    named = {"input_ids": torch.arange(9)[None], "decoder_input_ids": torch.arange(5)[None]}
    inputs, network = inputs_of(named, resolve(config)), network_of(config)
    assert inputs.rows == 1
    network.observed(0, 0, "auto", inputs, Observer)  # the model's own code runs
    read, logits = torch.arange(5)[None], torch.randn(1, 5, 64)
    loss = decoder_token(MaskedLMOutput(logits=logits), named)
    torch.testing.assert_close(loss[0], nn.functional.cross_entropy(logits[0, :-1], read[0, 1:]))
    same = {"input_ids": read, "decoder_input_ids": torch.cat([torch.tensor([[7]]), read[:, :-1]], 1)}
    torch.testing.assert_close(decoder_token((logits,), same), same_token((logits,), same))


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama"])
def test_labels_in_the_inputs_give_the_loss_of_the_model_itself(family):
    ids = torch.tensor([[3, 7, 3, 9, 5], [4, 4, 8, 6, 11]])
    inputs = {"input_ids": ids, "labels": torch.tensor([[5, 5, -100, 2, 9], [-100, -100, -100, 3, 1]])}
    options = {"seed": 0, "gradients": True, "progress": False, "dtype": torch.float64, "draw": "always"}
    mine = lf.weightless.simulate(CONFIGS[family](), inputs, samples=2, **options)

    def of_model(out, named):
        return out.loss

    theirs = lf.weightless.simulate(CONFIGS[family](), inputs, samples=2, loss=of_model, **options)
    for name in ("loss", "weight_gradient"):
        np.testing.assert_array_equal(mine[name], theirs[name])
    without = lf.weightless.simulate(CONFIGS[family](), {"input_ids": ids}, samples=2, **options)
    assert (mine.loss != without.loss).all()


def test_labels_without_a_loss_are_refused():
    logits = torch.zeros(1, 4, 7)
    with pytest.raises(InputError, match=r"the inputs have labels, but the module returns no loss"):
        chosen_loss(None, "causal")(
            (logits,), {"input_ids": torch.ones(1, 4).long(), "labels": torch.ones(1, 4).long()}
        )


def test_labels_of_minus_one_hundred_are_not_counted():
    logits, ids = torch.randn(2, 4, 10), torch.tensor([[1, 2, -100, 3], [1, 2, 3, 4]])
    loss = chosen_loss(None, "causal")((logits,), {"input_ids": ids})
    own = nn.functional.cross_entropy(logits[1, :-1], ids[1, 1:])
    torch.testing.assert_close(loss[1], own)


# ---------------------------------------------------------------- outputs


@dataclass
class Answer:
    score: Any
    last_hidden_state: Any


Pair = namedtuple("Pair", "loss logits")
X, S = torch.randn(2, 3, 4), torch.tensor(1.5)


@pytest.mark.parametrize(
    ("out", "x", "loss"),
    [
        (X, X, None),
        ((None, X), X, None),
        ({"a": S, "logits": X}, X, None),
        (Answer(torch.randn(2, 3), X), X, None),
        (Pair(S, X), X, S),
        ([{"b": S}, (X.long(), X)], X, None),
        (S, S, S),
        ((S,), S, S),
        (MaskedLMOutput(loss=S, logits=X), X, S),
    ],
)
def test_output_and_loss_are_found_by_name_then_by_shape(out, x, loss):
    assert output_of(out) is x
    assert own_loss(out, {}) is loss


def test_output_without_real_numbers_is_an_error():
    with pytest.raises(InputError, match="must return a tensor of real numbers"):
        output_of({"ids": torch.arange(3)})


def test_module_with_targets_computes_its_own_loss():
    ids = torch.arange(10)[None]
    law = simulate(Nano, ids, gradients=True)
    assert law.attrs["inputs"] == "(1, 10), targets (1, 10)"
    by_place, by_user, same = (
        simulate(Nano, (ids, targets), gradients=True, loss=loss)
        for targets, loss in (
            (ids.roll(-1, 1), None), (ids.roll(-1, 1), lambda out, inputs: out[1][None]), (ids, None),
        )
    )  # fmt: skip
    np.testing.assert_array_equal(by_place.loss, law.loss)
    np.testing.assert_array_equal(by_user.loss, law.loss)
    assert not np.isclose(same.loss, law.loss).any()  # the token that is read
    users = simulate(Nano, ids, gradients=True, loss=lambda out, inputs: out[0].square().mean((1, 2)))
    assert users.attrs["inputs"] == "(1, 10)"  # the user's loss receives what the module returns by itself


# ---------------------------------------------------------------- arguments


def test_named_arguments_may_be_flags_texts_and_lists():
    class Modes(Words):
        def forward(self, ids, mode="a", scale=1.0, mask=None, flag=False):
            assert (mode, scale, flag) == ("b", 2.0, True)
            assert mask.shape == (1, 4)
            return super().forward(ids)

    named = {
        "ids": torch.arange(4)[None],
        "mode": "b",
        "scale": 2.0,
        "mask": [[1, 1, 0, 1]],
        "flag": True,
        "other": None,
    }
    data = simulate(Modes, named)
    np.testing.assert_array_equal(data.covariance, simulate(Words, torch.arange(4)[None]).covariance)


def test_decoder_that_shifts_its_input_itself_has_the_loss_of_the_shifted_tokens():
    config = transformers.BartConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32,
        decoder_start_token_id=2, pad_token_id=1, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    ids = torch.arange(4, 12)[None]
    shifted = {"input_ids": ids, "decoder_input_ids": torch.cat([torch.tensor([[2]]), ids[:, :-1]], 1)}
    own, given = (simulate(config, each, gradients=True) for each in ({"input_ids": ids}, shifted))
    np.testing.assert_array_equal(own.loss, given.loss)


# ---------------------------------------------------------------- choices


def first_choice(name, config, ids=None, rows=1):
    """Return the shapes of the first inputs that are proposed."""
    choice = choices_of(getattr(transformers, name), config, ids, rows, False)[0]
    return {key: tuple(each.shape) for key, each in choice.fixed.items()}


@pytest.mark.parametrize(
    ("name", "config", "shapes"),
    [
        ("CLIPForImageClassification", transformers.CLIPConfig(vision_config=VISION), (1, 3, 32, 32)),
        ("HieraModel", transformers.HieraConfig(image_size=[24, 48]), (1, 3, 24, 48)),
        ("ResNetModel", transformers.ResNetConfig(), (1, 3, 64, 64)),
        ("ViTModel", transformers.ViTConfig(image_size=16, num_channels=1), (1, 1, 16, 16)),
        ("VideoMAEModel", transformers.VideoMAEConfig(image_size=32, num_frames=4), (1, 4, 3, 32, 32)),
    ],
)
def test_images_have_the_size_of_the_configuration(name, config, shapes):
    assert first_choice(name, config) == {"pixel_values": shapes}


def test_text_has_as_many_placeholders_as_the_image_has_features():
    config = llava()
    subject, network = resolve(config), network_of(config)
    inputs = inputs_of(6, subject)
    chosen = inputs.first_accepted(lambda each: network.observed(0, 0, "auto", each, Observer), lambda each: None)
    ids = chosen.fixed["input_ids"][0].tolist()
    assert ids.count(60) == 16  # (32/8)², without the class token
    assert len(ids) == 22
    assert chosen.fixed["pixel_values"].shape == (1, 3, 32, 32)
    blocks = [(block.members[0], block.argument) for block in network.layout.blocks]
    again = [network.observed(0, 0, "auto", chosen, lambda: Entries(blocks)).shapes for _ in range(2)]
    assert again[0] == again[1]  # transformers' hooks for hidden states are not installed twice
    assert again[0]


def test_inputs_of_an_image_model_refuse_text():
    with pytest.raises(InputError, match=r"reads no text\. Nearest: an array for its argument 'pixel_values'"):
        inputs_of("some words", resolve(transformers.ViTConfig(**VISION)))
