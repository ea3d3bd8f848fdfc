"""Lion as in its paper (Chen et al., arXiv 2302.06675, Algorithm 2), and Muon with Adam, as users write them."""

import torch


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                momentum = self.state[each].setdefault("momentum", torch.zeros_like(each))
                first, second = group["betas"]
                each.mul_(1 - group["lr"] * group["weight_decay"])
                each.sub_(group["lr"] * (first * momentum + (1 - first) * each.grad).sign())
                momentum.mul_(second).add_((1 - second) * each.grad)


class SingleDeviceMuonWithAuxAdam(torch.optim.Optimizer):
    """Groups with `use_muon` step by torch's Muon, the others by torch's AdamW."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.02, "weight_decay": 0.0})

    def step(self, closure=None):
        for k, group in enumerate(self.param_groups):
            options = {key: value for key, value in group.items() if key not in ("params", "use_muon")}
            kind = torch.optim.Muon if group["use_muon"] else torch.optim.AdamW
            if k not in self.state:
                self.state[k] = kind(group["params"], **options)
            self.state[k].step()
