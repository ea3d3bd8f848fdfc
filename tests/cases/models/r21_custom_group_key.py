"""nanoGPT-mup, layer decay of MAE and timm: groups have "lr_scale", which only the training loop applies.

Right: the key is refused by name, by `steps` and by `transfer`, unless `after_groups` names what the loop does with it;
with the scale in lr the groups run as they are.
"""

import json

import pytest

import limitformer as lf
from cases.mup import OPTIONS, Mup, groups

FEW = {lf.steps: {"samples": 1}, lf.rate: {"networks": 1}}


def apply(optimizer):
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * group.get("lr_scale", 1.0)


def verify():
    refused = r"a group of AdamW has lr_scale, which is not understood.*after_groups"
    for optimizer in (lambda m: groups(m, 2e-3, lr_scale=0.5), lambda m: groups(m, 2e-3, lr_scale=0.0)):
        with pytest.raises(lf.InputError, match=refused):
            lf.steps(Mup, 8, optimizer=optimizer, samples=1, **OPTIONS)
        with pytest.raises(lf.InputError, match=refused):
            lf.transfer(Mup, {"width": [64, 128]}, 8, optimizer=optimizer, samples=1, **OPTIONS)
    for call in (lf.steps, lf.rate):
        scaled, own = (
            call(Mup, 8, optimizer=lambda m, keys=keys: groups(m, 2e-3, **keys), after_groups=loop, **OPTIONS | few)
            for keys, loop, few in (({"lr_scale": 0.5}, apply, FEW[call]), ({"lr": 1e-3}, None, FEW[call]))
        )
        key = "critical" if call is lf.rate else "loss"
        assert scaled.data[key].equals(own.data[key])
    with pytest.raises(lf.InputError, match="after_groups must be a function"):
        lf.steps(Mup, 8, optimizer="adamw", after_groups=apply, samples=1, **OPTIONS)
    report = lf.steps(Mup, 8, optimizer=lambda m: groups(m, 2e-3, lr=1e-3, weight_decay=0.0), samples=1, **OPTIONS)
    assert [(each["lr"], each["weight_decay"], each["parameters"]) for each in report.record()["groups"]] == [
        ([1e-3], 0.0, 12),
        ([2e-3], 0.01, 16),
    ]
    assert "2 groups: 12 weights with lr 0.001, betas (0.9, 0.999), eps 1e-08, weight_decay 0; 16 weights with" in (
        report.heading
    )
    assert json.loads(report.data.attrs["groups"]) == report.record()["groups"]
