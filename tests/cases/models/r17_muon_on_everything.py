"""DeepSpeed#7641: Muon was applied to the embedding and the head, which belong to AdamW.

Right: `steps` names both; with Muon on hidden matrices only it names none.
"""

import torch

import limitformer as lf
from cases.networks import LanguageModel
from training_networks import next_token


def verdicts(optimizer):
    options = {"optimizer": optimizer, "loss": next_token, "steps": 1, "samples": 1, "seed": 0, "progress": False}
    report = lf.steps(LanguageModel, 16, **options)
    return report, {each.name: each for each in report.verdicts}


def verify():
    matrices = [name for name, each in LanguageModel().named_parameters() if each.dim() == 2]
    report, named = verdicts(lambda m: torch.optim.Muon([p for p in m.parameters() if p.dim() == 2], lr=0.02))
    assert named["muon"].grade == "watch"
    assert "wte.weight, head.weight" in named["muon"].said
    (group,) = report.record()["groups"]
    assert (group["optimizer"], group["parameters"], group["weight_decay"]) == ("Muon", len(matrices), 0.1)
    assert "muon" not in verdicts({"name": "muon"})[1]
