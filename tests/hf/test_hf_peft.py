"""Shaped models under PEFT: low-rank weights, and gains that are trained and saved with them."""

import peft
import pytest
import torch
import transformers

from hf_models import config_of, inputs_of, loud
from limitformer.hf import Shaping, load_shaped, shape_model
from limitformer.nn import Gain, gains

TARGETS = {"bert": ["query", "value"], "gpt2": ["c_attn"]}
CLASSES = {"bert": "BertForSequenceClassification", "gpt2": "GPT2ForSequenceClassification"}
# PEFT reads a deprecated attribute of transformers 5.23, which warns.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning:transformers.modeling_utils"
)


def built(family, **options):
    torch.manual_seed(0)
    model = getattr(transformers, CLASSES[family])(config_of(family))
    return shape_model(loud(model.eval()), Shaping(residual_gamma=0.3, shaped_relu=True, **options))


def adapted(model, family, **options):
    """Add low-rank weights; shaping, residuals and slopes are trained too."""
    torch.manual_seed(1)
    saved = ["shaping", "residual", "act" if family == "gpt2" else "intermediate_act_fn"]
    defaults = {"target_modules": TARGETS[family], "modules_to_save": saved, "r": 2, "fan_in_fan_out": family == "gpt2"}
    return peft.get_peft_model(model, peft.LoraConfig(**defaults | options))


def logits(model):
    return model(**inputs_of("text")).logits


def trained(model, steps=3):
    """Train for a few steps."""
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(steps):
        optimiser.zero_grad()
        model(**inputs_of("text", seed=step), labels=torch.tensor([0, 1, 1])).loss.backward()
        optimiser.step()
    return model


@pytest.mark.parametrize(("family", "float32"), [("bert", False), ("gpt2", True)])
def test_peft_trains_and_saves_gains(family, float32, tmp_path):
    base = built(family, float32=float32)
    wanted = logits(base)
    base.save_pretrained(tmp_path / "base")
    before = [gain.value.detach().clone() for gain in gains(base)]
    model = adapted(base, family)
    assert torch.allclose(logits(model), wanted, atol=1e-6)  # low-rank weights start at zero
    trained(model)
    after = logits(model)
    assert (after - wanted).abs().max() > 1e-2
    copies = [module for name, module in model.named_modules() if isinstance(module, Gain) and "to_save" in name]
    originals = [module for name, module in model.named_modules() if isinstance(module, Gain) and "original" in name]
    assert len(copies) == len(originals) == len(before) == 6
    assert all(torch.equal(gain.value, value) for gain, value in zip(originals, before, strict=True))
    assert all((gain.value != value).all() for gain, value in zip(copies, before, strict=True))
    with model.disable_adapter():
        assert torch.allclose(logits(model), wanted, atol=1e-6)
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(load_shaped(tmp_path / "base"), tmp_path / "adapter").eval()
    assert torch.allclose(logits(again), after, atol=1e-6)


def test_peft_measures_the_active_copy():
    model = trained(adapted(built("bert"), "bert"))
    attentions = model(**inputs_of("text"), output_attentions=True).attentions
    assert len(attentions) == 2
    with model.disable_adapter():
        others = model(**inputs_of("text"), output_attentions=True).attentions
    assert (attentions[1] - others[1]).abs().max() > 1e-2


def test_peft_without_modules_to_save_does_not_train_gains(tmp_path):
    model = trained(adapted(built("bert"), "bert", modules_to_save=None))
    assert all(torch.equal(gain.value, torch.full_like(gain.value, gain.start)) for gain in gains(model))
