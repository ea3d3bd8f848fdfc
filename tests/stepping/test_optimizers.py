"""Optimisers as they are named, and as users' own code makes them."""

import inspect

import pytest
import torch
from torch import nn

from limitformer.base.errors import InputError
from limitformer.stepping.optimizers import NotUnderstoodError, read_optimizer
from limitformer.stepping.rules import groups_of, in_words
from limitformer.stepping.updates import SGD, Adam, AdamW, Muon


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.hidden = nn.Embedding(11, 4), nn.Linear(4, 4)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 11, bias=False)


def read(optimizer, module=None, **options):
    return read_optimizer(optimizer, module or Small().to("meta"), steps=3, **options)


def test_named_optimisers_have_torchs_defaults():
    for name, kind in {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}.items():
        by_torch = read(lambda module, kind=kind: kind(module.parameters()))
        assert dict(read(name).rules) == dict(by_torch.rules)
        assert len(by_torch.rules) == 6
    lion = read("lion").rules["hidden.weight"]
    assert (lion.name, lion.betas, lion.lr) == ("lion", (0.9, 0.99), 1e-4)


def test_rules_are_read_from_the_optimisers_of_torch_that_they_make():
    for rule in (
        SGD(0.1, 0.3, momentum=0.8, dampening=0.2), SGD(0.1, momentum=0.8, nesterov=True), Adam(0.03, 0.4, eps=1e-6),
        AdamW(0.03, betas=(0.8, 0.9)), Muon(0.03, 0.4, momentum=0.8, nesterov=False, scale="rms", iterations=6),
    ):  # fmt: skip
        assert dict(read(lambda m, r=rule: r.in_torch()([m.hidden.weight], **r.torch_options())).rules) == {
            "hidden.weight": rule
        }
    decoupled = read(lambda m: torch.optim.Adam(m.parameters(), decoupled_weight_decay=True, weight_decay=0.1)).rules
    assert decoupled["head.weight"] == AdamW(weight_decay=0.1)


def test_muon_by_name_takes_hidden_matrices_only():
    rules = read({"name": "muon", "lr": 0.05, "adam_lr": 0.001}).rules
    assert {name for name, rule in rules.items() if rule.name == "muon"} == {"hidden.weight"}
    assert {rule.lr for rule in rules.values() if rule.name == "adamw"} == {0.001}
    kernels = nn.ModuleDict({"patches": nn.Conv1d(3, 4, 3), "hidden": nn.Linear(4, 4), "head": nn.Linear(4, 5)})
    assert [name for name, rule in read("muon", kernels).rules.items() if rule.name == "muon"] == ["hidden.weight"]


def configure_optimizers(self, weight_decay=0.1, learning_rate=6e-4, betas=(0.9, 0.95), device_type="cpu"):
    """The grouping of small language-model code: matrices decay, vectors do not; fused where there is a GPU."""
    params = {name: p for name, p in self.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in params.values() if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = "fused" in inspect.signature(torch.optim.AdamW).parameters and device_type == "cuda"
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, **({"fused": True} if fused else {}))


def test_parameter_groups_of_users_code_are_read():
    rules = read(configure_optimizers)
    assert rules.rules["hidden.weight"] == AdamW(6e-4, 0.1, betas=(0.9, 0.95))
    assert rules.rules["norm.weight"].weight_decay == 0.0
    with pytest.raises(InputError, match="AdamW has fused=True"):
        read(lambda module: torch.optim.AdamW(module.parameters(), fused=True), Small())


def test_rates_keep_the_ratios_of_groups():
    def groups(module):
        return torch.optim.AdamW(
            [{"params": module.head.parameters(), "lr": 1e-4}, {"params": module.hidden.parameters()}], lr=1e-3
        )

    rules = read(groups).with_rate(0.1).rules
    assert rules["head.weight"].lr == pytest.approx(0.01)
    assert rules["hidden.bias"].lr == pytest.approx(0.1)
    assert "norm.weight" not in rules


def test_several_optimisers_share_the_parameters():
    def both(module):
        matrices = [module.hidden.weight]
        rest = [p for p in module.parameters() if p is not matrices[0]]
        return torch.optim.Muon(matrices, lr=0.02, ns_steps=6), torch.optim.AdamW(rest, lr=3e-4)

    rules = read(both).rules
    assert (rules["hidden.weight"].name, rules["hidden.weight"].iterations) == ("muon", 6)
    assert rules["head.weight"].name == "adamw"


class Changed(torch.optim.AdamW):
    def step(self, closure=None):
        """Do something else."""


def with_hook(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def with_state(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[module.head.weight] = {"momentum_buffer": torch.ones(11, 4)}
    return optimizer


def scheduled(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return optimizer


def sparse():
    module = Small()
    module.table = nn.Embedding(11, 4, sparse=True)
    return module


def fails(module):
    raise KeyError("lost")


REFUSALS = {
    r"unknown optimizer 'adamm'; there are sgd, adam, .*\. Nearest: adam": "adamm",
    r"sgd has no option 'momentun'; .* Nearest: momentum": {"name": "sgd", "momentun": 0.9},
    "unknown optimizer None": {"lr": 0.1},
    r"adamw has betas=\(0.9, 1.0\)": {"name": "adamw", "betas": (0.9, 1.0)},
    "momentum=-0.1": {"name": "sgd", "momentum": -0.1},
    "sgd has nesterov, which needs momentum and no dampening": {"name": "sgd", "nesterov": True},
    "scale='spectral'": {"name": "muon", "scale": "spectral"},
    "optimizer must be one of": torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1),
    r"SGD has a parameter \(3,\) that the mod": lambda m: torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1),
    "a group of SGD has betas, which": lambda m: torch.optim.SGD([{"params": m.parameters(), "betas": 1}], lr=1),
}
NOT_UNDERSTOOD = {  # drawn networks are trained by it
    "the optimiser LBFGS is not understood": lambda m: torch.optim.LBFGS(m.parameters()),
    "the optimiser Changed is not understood": lambda m: Changed(m.parameters()),
    "AdamW has amsgrad=True": lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True),
    "SGD has lr=1000000.0; it must be": lambda m: torch.optim.SGD(m.parameters(), lr=1e6),
    "the function for the optimizer fails: ValueError": lambda m: torch.optim.Muon([m.norm.weight]),
    "SGD has hooks on its steps": with_hook,
    "SGD has a step that is replaced": scheduled,
    "SGD has a state already": with_state,
    "the function for the optimizer fails: KeyError: 'lost'": fails,
    "must return an optimiser of torch, or several; got NoneType": lambda m: None,
    "hidden.weight is in two groups or optimisers": lambda m: [
        torch.optim.SGD(m.parameters(), lr=0.1), torch.optim.SGD([m.hidden.weight], lr=1)
    ],
}  # fmt: skip


def test_optimisers_that_cannot_be_read_are_refused_by_name():
    for message, optimizer in (REFUSALS | NOT_UNDERSTOOD).items():
        with pytest.raises(InputError, match=message) as refusal:
            read(optimizer)
        assert isinstance(refusal.value, NotUnderstoodError) == (message in NOT_UNDERSTOOD), message
    with pytest.raises(InputError, match=r"^table has sparse=True: gradients that are sparse. Nearest: sparse=False"):
        read("sgd", sparse())
    for rate in (0, -1e-3, 1e6, float("nan"), True, "fast"):
        with pytest.raises(InputError, match="a learning rate must be above 0 and at most 100"):
            read("sgd").with_rate(rate)


def test_rates_refer_to_the_first_of_several_optimisers_and_to_rates_that_are_used():
    def both(module):
        rest = [module.table.weight, module.head.weight, module.norm.weight, module.norm.bias]
        return torch.optim.Muon([module.hidden.weight], lr=0.02), torch.optim.AdamW(rest, lr=3e-4)

    rules = read(both).with_rate(0.04)
    assert rules.rules["hidden.weight"].lr == pytest.approx(0.04)
    assert rules.rules["head.weight"].lr == pytest.approx(6e-4)

    def own_rates(module):
        return torch.optim.SGD([{"params": list(module.parameters()), "lr": 0.5}])

    assert read(own_rates).base == 0.5


def test_eps_of_torchs_muon_is_read():
    rules = read(lambda module: torch.optim.Muon([module.hidden.weight], eps=1.0, weight_decay=0.0))
    assert rules.rules["hidden.weight"].least_norm == 1.0
    assert "least_norm 1)" in in_words([rules])


def test_groups_have_the_rates_that_run():
    def groups(module):
        return torch.optim.SGD([{"params": [module.head.weight], "lr": 1.0}, {"params": [module.table.weight]}], lr=0.1)

    rules = read(groups)
    every = [rules.with_rate(0.2), rules.with_rate(0.4)]
    assert [each["lr"] for each in groups_of(every)] == [pytest.approx([2.0, 4.0]), pytest.approx([0.2, 0.4])]
    assert in_words(every) == (
        "SGD (2 groups: 1 weight with lr × 10, momentum 0, dampening 0, weight_decay 0; "
        "1 weight with lr × 1, momentum 0, dampening 0, weight_decay 0)"
    )
    assert in_words([read("lion")]) == "lion (lr 0.0001, betas (0.9, 0.99), weight_decay 0)"
    assert "1 weight by Muon with lr 0.02, " in in_words([read("muon")])


def test_schedules_multiply_the_rates():
    assert read("sgd", warmup=2).schedule == (0.5, 1.0, 1.0)
    assert read("sgd", warmup=2, schedule=lambda step: 10.0 - step).schedule == (5.0, 9.0, 8.0)
    assert read("sgd", schedule=[3, 2, 1, 0]).schedule == (3.0, 2.0, 1.0)
    for options in ({"warmup": -1}, {"schedule": [1.0]}, {"schedule": lambda step: -1.0}, {"clip": 0.0}):
        with pytest.raises(InputError, match=next(iter(options))):
            read("sgd", **options)
