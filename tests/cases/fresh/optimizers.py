"""Ten functions that give a GPT its optimiser, all valid in plain torch: four ordinary, six with a trick."""

import torch
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

SAME = "the same losses as torch training really gives"
EITHER = SAME + ", or a refusal that names the cause: "


def adamw_no_decay(m):
    groups = ([p for p in m.parameters() if (p.dim() >= 2) == wide] for wide in (True, False))
    return AdamW([{"params": ps, "weight_decay": w} for ps, w in zip(groups, (0.1, 0.0), strict=True)], 3e-3)


def adam_coupled_layer_decay(m):  # rates that fall from the last block to the first
    rate = {n: 0.7 ** (4 - int(n.split(".")[1]) if n.startswith("blocks") else 0) for n, _ in m.named_parameters()}
    groups = [{"params": [p], "lr": 4e-3 * rate[n]} for n, p in m.named_parameters()]
    return Adam(groups, betas=(0.9, 0.95), weight_decay=0.02, amsgrad=False)


def muon_and_adamw(m):
    hidden = [p for p in m.blocks.parameters() if p.dim() == 2]
    rest = [p for p in m.parameters() if not any(p is h for h in hidden)]
    return [Muon(hidden, lr=0.02, weight_decay=0.01), AdamW(rest, lr=2e-3)]


class WarmAdamW(AdamW):  # a warm-up of its own
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] += 1e-3
        return super().step(closure)


class Lion(Optimizer):  # not Lion: no momentum, and a soft sign
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            p.data -= self.defaults["lr"] * torch.tanh(p.grad / (4 * p.grad.std() + 1e-12))


def patched_step(m):
    optimizer = SGD(m.parameters(), lr=3.0)
    plain, clip = optimizer.step, torch.nn.utils.clip_grad_value_
    optimizer.step = lambda: (clip(m.parameters(), 1e-3), plain())[1]
    return optimizer


def preset_state(m):
    optimizer = AdamW(m.parameters(), lr=3e-3)
    for p in m.parameters():
        optimizer.state[p] = {"step": torch.tensor(50.0), "exp_avg": p.data * 0, "exp_avg_sq": p.data * 0 + 1e-4}
    return optimizer


def rescales_weights(m):
    _ = [p.data.mul_(3.0) for p in m.blocks.parameters()]
    return AdamW(m.parameters(), lr=3e-3)


OPTIMIZERS = [
    ("adamw_no_decay", adamw_no_decay, SAME),
    ("sgd_nesterov", lambda m: SGD(m.parameters(), lr=0.3, momentum=0.9, nesterov=True, weight_decay=1e-3), SAME),
    ("adam_coupled_layer_decay", adam_coupled_layer_decay, SAME),
    ("muon_and_adamw", muon_and_adamw, SAME),
    ("adamw_subclass", lambda m: WarmAdamW(m.parameters(), lr=0.0), EITHER + "step is overridden"),
    ("named_lion", lambda m: Lion(m.parameters(), {"lr": 3e-3}), EITHER + "it is not the known Lion"),
    ("patched_step", patched_step, EITHER + "step is replaced on the instance"),
    ("lr_scale", lambda m: AdamW([{"params": m.parameters(), "lr_scale": 0.5}], lr=3e-3), EITHER + "lr_scale"),
    ("preset_state", preset_state, EITHER + "state before the first step"),
    ("rescales_weights", rescales_weights, EITHER + "the function changes weights"),
]
