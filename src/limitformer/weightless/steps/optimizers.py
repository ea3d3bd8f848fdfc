from dataclasses import dataclass, replace
import torch
@dataclass(frozen=True)
class UpdateRule:
    kind: str; lr: float; weight_decay: float = 0.0; decoupled: bool = False
    momentum: float = 0.0; dampening: float = 0.0; nesterov: bool = False
    betas: tuple = (0.9, 0.999); eps: float = 1e-8; scale: str = "width"
    iterations: int = 5; coefficients: tuple = (3.4445, -4.7750, 2.0315)
@dataclass(frozen=True)
class StepRules:
    rules: dict; clip: float | None; schedule: tuple; name: str; base: float
    def with_rate(self, rate):
        return replace(self, base=rate, rules={k: replace(r, lr=r.lr*rate/self.base) for k, r in self.rules.items()})
def read_optimizer(optimizer, module, *, steps, clip=None, warmup=0, schedule=None):
    opts = optimizer(module); opts = opts if isinstance(opts, list) else [opts]
    names = {id(p): n for n, p in module.named_parameters()}; rules = {}
    for o in opts:
        for g in o.param_groups:
            for p in g["params"]:
                if isinstance(o, torch.optim.SGD): r = UpdateRule("sgd", g["lr"], g["weight_decay"], False, g["momentum"], g["dampening"], g["nesterov"])
                elif isinstance(o, torch.optim.AdamW): r = UpdateRule("adam", g["lr"], g["weight_decay"], True, betas=g["betas"], eps=g["eps"])
                else: r = UpdateRule("muon", g["lr"], g["weight_decay"], True, g["momentum"], 0, g["nesterov"])
                rules[names[id(p)]] = r
    return StepRules(rules, clip, (1.0,)*steps, "x", opts[0].defaults["lr"])
