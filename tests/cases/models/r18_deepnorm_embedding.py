"""dalle-mini#150: DeepNet's factor β was applied to the embedding and the head too.

Right: the recipe deepnorm says that it does not cover them.
"""

from torch import nn

from cases.networks import LanguageModel
from limitformer.initialisation.recipes import compare_with_recipe


def build():
    model = LanguageModel(vocabulary=5000)
    for name, each in model.named_parameters():
        if each.dim() == 2:
            nn.init.xavier_normal_(each, gain=1.0 if ".q." in name or ".k." in name else 48**-0.25)
    return model


def verify():
    text = str(compare_with_recipe(build, "deepnorm"))
    assert "not covered: wte.weight ×1: the recipe has no rule for embedding" in text
    assert "not covered: head.weight ×1: the recipe has no rule for head" in text
