"""The settings of the vision experiment, and its presets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from limitformer.base.errors import require, require_count, require_real, set_fields
from limitformer_papers.training.data.images import Source
from limitformer_papers.training.plan import Schedule

COUNTS = ("layers", "dim", "patch", "epochs", "batch")
REALS = ("beta", "sigma", "learning_rate", "weight_decay")


@dataclass(frozen=True, kw_only=True)
class VitConfig:
    """A preset of the experiment.

    Attributes:
        data: "digits" or "cifar10".
        patch: side of a patch, in pixels.
        layers, dim, beta, sigma: L, d, β, and σ of the random variant.
        epochs, warmup_epochs, batch, learning_rate, weight_decay, schedule: of the training.
        augment: AutoAugment, for CIFAR-10.
        bf16: mixed precision.
    """

    data: Source
    patch: int
    layers: int = 128
    dim: int = 96
    beta: float = 1.0
    sigma: float = 1.0
    epochs: int
    warmup_epochs: int
    batch: int = 128
    learning_rate: float = 1e-3
    weight_decay: float = 5e-5
    schedule: Schedule = "cosine"
    augment: bool = False
    bf16: bool = False

    def __post_init__(self) -> None:
        require(self.data in get_args(Source), f"data must be one of {', '.join(get_args(Source))}; got {self.data!r}.")
        set_fields(self, **{name: require_count(name, getattr(self, name)) for name in COUNTS})
        set_fields(self, warmup_epochs=require_count("warmup_epochs", self.warmup_epochs, least=0))
        set_fields(self, **{name: require_real(name, getattr(self, name)) for name in REALS})
        require(
            self.warmup_epochs <= self.epochs,
            f"warmup_epochs must be at most epochs = {self.epochs}; got {self.warmup_epochs}. Nearest: {self.epochs}.",
        )
        require(self.beta >= 0, f"beta must be at least 0; got {self.beta}.")
        require(self.sigma > 0, f"sigma must be positive; got {self.sigma}.")
        require(
            self.data == "cifar10" or not self.augment, "AutoAugment's policy is for CIFAR-10; the digits have none."
        )


PRESETS: Mapping[str, VitConfig] = {
    "tiny": VitConfig(data="digits", patch=2, layers=64, dim=48, epochs=16, warmup_epochs=2, batch=32),
    "digits": VitConfig(data="digits", patch=2, epochs=60, warmup_epochs=4, batch=32),
    "paper": VitConfig(data="cifar10", patch=4, epochs=300, warmup_epochs=8, augment=True),
}
