r"""A vision Transformer with attention only, on the sphere, with random or constant values [CT, Sec. 6, Fig. 2].

An image is cut into patches; each is mapped linearly to R^d and gets a trained position, a trained token for the class
comes first, and all tokens are put on the unit sphere. Then come L layers [CT, eq. 4]

    Xⁱ ← normalised( Xⁱ + V_l A(Xⁱ)/√L ),    A(Xⁱ) = Σ_j w_ij Xʲ,    w_i = softmax over j of β⟨QXⁱ, KXʲ⟩,

with Q and K shared by all layers; the class is a linear map of √d times the first token. Everything is trained.

* **random**: V_l independent at the start, entries N(0, σ²);
* **constant**: one V for all layers, the identity at the start;
* **untied**: one V_l for each layer, each the identity at the start.

[CT] gives L = 128, d = 96, one head, no feed-forward layer, σ = 1, cross-entropy, batch 128, 300 epochs, linear
warm-up over 8, AutoAugment, 5 seeds, and says that it starts from ViT-CIFAR (github.com/omihub777/ViT-CIFAR). It
leaves open, and this experiment takes:

* β: 1. Q and K at the start: the identity, as everywhere else in [CT].
* Whether V of the constant variant stays tied while it trains. "Identical architectures and fully trainable parameters"
  can mean that it does not, so there are both.
* The step of the constant variants: 1/√L, as of the random one ("other architectural choices … are fixed"). That is √L
  units of time of the deterministic flow, whose own step is 1/L.
* Patches: 8 × 8 of them (4 × 4 pixels of CIFAR-10), and the class token, as in ViT-CIFAR. The digits and Fashion-MNIST
  have 4 × 4.
* Optimiser: AdamW (0.9, 0.999), learning rate 10⁻³ falling to 0 as a cosine, weight decay 5·10⁻⁵, no clipping, no
  dropout, no label smoothing. ViT-CIFAR has Adam with such a course down to 10⁻⁵.
* The positions and the class token start as N(0, 1), as in ViT-CIFAR, before the tokens are put on the sphere.
* Validation images of Figure 2: the test images.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import sqrt
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import EvalPrediction

from limitformer.base.errors import require, require_count, require_real, set_fields
from limitformer.models import StochasticTransformer
from limitformer.nn import SphereStack
from limitformer_papers.training.data.batches import steps_per_epoch
from limitformer_papers.training.data.images import Images, Source, collate, read_images
from limitformer_papers.training.harness import train
from limitformer_papers.training.plan import Plan, Schedule

Variant = Literal["constant", "untied", "random"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
CLASSES = 10
# Fields of the plan that a caller sets.
PLANNED = ("threads", "tensorboard", "keep_checkpoints", "loaders", "tf32", "compile")
COUNTS = ("layers", "dim", "patch", "epochs", "batch")
OPTIONAL = ("training_images", "held_out_images")
OWN_RATES: Mapping[Variant, str] = {"untied": "untied_learning_rate", "random": "random_learning_rate"}
REALS = ("beta", "sigma", "learning_rate", "weight_decay")


@dataclass(frozen=True, kw_only=True)
class VitConfig:
    """Settings of the vision experiment.

    Attributes:
        data: "digits", "fashion" (Fashion-MNIST) or "cifar10".
        patch: side of a patch, in pixels.
        layers, dim, beta, sigma: L, d, β, and σ of the random variant.
        epochs, warmup_epochs, batch, learning_rate, weight_decay, schedule: of the training.
        untied_learning_rate, random_learning_rate: of these variants, where they are tuned separately; None takes
            `learning_rate`.
        augment: AutoAugment, for Fashion-MNIST and CIFAR-10.
        training_images, held_out_images: numbers of images, from the start of their files; None takes all.
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
    untied_learning_rate: float | None = None
    random_learning_rate: float | None = None
    weight_decay: float = 5e-5
    schedule: Schedule = "cosine"
    augment: bool = False
    training_images: int | None = None
    held_out_images: int | None = None
    bf16: bool = False

    def __post_init__(self) -> None:
        require(self.data in get_args(Source), f"data must be one of {', '.join(get_args(Source))}; got {self.data!r}.")
        set_fields(self, **{name: require_count(name, getattr(self, name)) for name in COUNTS})
        set_fields(self, warmup_epochs=require_count("warmup_epochs", self.warmup_epochs, least=0))
        set_fields(self, **{name: require_real(name, getattr(self, name)) for name in REALS})
        rates = [(name, require_real) for name in OWN_RATES.values()]
        for name, check in (*[(name, require_count) for name in OPTIONAL], *rates):
            value = getattr(self, name)
            set_fields(self, **{name: value if value is None else check(name, value)})
        require(
            self.warmup_epochs <= self.epochs,
            f"warmup_epochs must be at most epochs = {self.epochs}; got {self.warmup_epochs}. Nearest: {self.epochs}.",
        )
        require(self.beta >= 0, f"beta must be at least 0; got {self.beta}.")
        require(self.sigma > 0, f"sigma must be positive; got {self.sigma}.")
        require(
            self.data != "digits" or not self.augment,
            "AutoAugment's policy is for Fashion-MNIST and CIFAR-10; the digits have none.",
        )

    def rate(self, variant: Variant) -> float:
        """Return the learning rate of a variant."""
        own = getattr(self, OWN_RATES[variant]) if variant in OWN_RATES else None
        return self.learning_rate if own is None else own


PRESETS: Mapping[str, VitConfig] = {
    "tiny": VitConfig(data="digits", patch=2, layers=64, dim=48, epochs=16, warmup_epochs=2, batch=32),
    "digits": VitConfig(data="digits", patch=2, epochs=60, warmup_epochs=4, batch=32),
    "fashion": VitConfig(
        data="fashion",
        patch=7,
        epochs=6,
        warmup_epochs=1,
        batch=32,
        learning_rate=1e-3,  # tuned over 3e-4, 1e-3, 3e-3 by three epochs of seed 100
        random_learning_rate=3e-4,  # over 1e-4, 3e-4, 1e-3, 3e-3
        augment=True,
        training_images=10_000,
        held_out_images=2_000,
    ),
    "paper": VitConfig(data="cifar10", patch=4, epochs=300, warmup_epochs=8, augment=True),
}


class VisionTransformer(nn.Module):
    """Patches, the stack, and ten classes: images (b, channels, side, side) to logits (b, 10) and a loss.

    Args:
        config: the preset.
        variant: what V is.
        channels, side: of the images.
        seed: of the initial weights.
    """

    def __init__(self, config: VitConfig, variant: Variant, *, channels: int, side: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        number, size = (side // config.patch) ** 2, channels * config.patch**2
        self.patch, self.scale = config.patch, sqrt(config.dim)
        self.embedding, self.head = nn.Linear(size, config.dim), nn.Linear(config.dim, CLASSES)
        for linear in (self.embedding, self.head):
            nn.init.normal_(linear.weight, std=1 / sqrt(linear.in_features), generator=generator)
            nn.init.zeros_(linear.bias)
        self.class_token = nn.Parameter(torch.randn(1, 1, config.dim, generator=generator))
        self.positions = nn.Parameter(torch.randn(1, number + 1, config.dim, generator=generator))
        sizes: Any = {"tokens": number + 1, "dim": config.dim, "layers_per_unit_time": config.layers}
        model = StochasticTransformer(**sizes, beta=config.beta, sigma=config.sigma)
        self.stack = SphereStack(model, config.layers, shared_values=variant == "constant", generator=generator)
        if variant != "random":
            self.stack.values.data.copy_(torch.eye(config.dim))

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return `logits`, and the mean cross-entropy `loss` if there are labels."""
        logits = self.head(self.scale * self.stack(self.tokens(pixel_values))[:, 0])
        loss = {} if labels is None else {"loss": functional.cross_entropy(logits.float(), labels)}
        return {**loss, "logits": logits}

    def tokens(self, pixel_values: Tensor) -> Tensor:
        """Return the class token and the patches on the sphere (b, n + 1, d)."""
        patches = functional.unfold(pixel_values, self.patch, stride=self.patch).mT
        words = torch.cat([self.class_token.expand(len(patches), -1, -1), self.embedding(patches)], dim=1)
        return functional.normalize(words + self.positions, dim=-1)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of images whose class is right."""
    return {"accuracy": float((np.asarray(prediction.predictions).argmax(-1) == prediction.label_ids).mean())}


def run_vit(
    preset: str, *, variant: Variant, seed: int, out: Path, data: Path | None = None, **changes: Any
) -> Mapping[str, float]:
    """Train or resume one run in `out`/vit-preset/variant-seed; return its summary.

    Args:
        preset: a name of `PRESETS`.
        variant: "constant", "untied" or "random".
        seed: of the weights, the order of the data and the augmentation.
        out: the folder of all runs.
        data: the folder of CIFAR-10 or Fashion-MNIST.
        changes: new values of the preset's fields, or of the plan's fields in `PLANNED`.

    Raises:
        InputError: a name or value that is unknown, or data that are missing.
    """
    require(preset in PRESETS, f"preset must be one of {', '.join(PRESETS)}; got {preset!r}.")
    require(variant in get_args(Variant), f"variant must be one of {', '.join(VARIANTS)}; got {variant!r}.")
    seed = require_count("seed", seed, least=0)
    config, options = with_changes(PRESETS[preset], changes)
    first = config.training_images, config.held_out_images
    training, held_out = read_images(config.data, data, seed if config.augment else None, first)
    side, channels = training.images.shape[2:]
    fitting = [k for k in range(1, side + 1) if side % k == 0]
    nearest = min(fitting, key=lambda k: abs(k - config.patch))
    fits = config.patch in fitting
    require(fits, f"patch must divide the images' {side} pixels; got {config.patch}. Nearest: {nearest}.")
    folder = Path(out) / f"vit-{preset}" / f"{variant}-{seed}"
    plan = plan_of(replace(config, learning_rate=config.rate(variant)), training, folder, seed, options)
    return train(
        VisionTransformer(config, variant, channels=channels, side=side, seed=seed),
        plan,
        train_data=training,
        eval_data=held_out,
        collate=collate,
        compute_metrics=accuracy,
        about=description_of(config, preset, variant, seed, training, held_out),
    )


def with_changes(config: VitConfig, changes: Mapping[str, Any]) -> tuple[VitConfig, dict[str, Any]]:
    """Return the preset with its changes, and the changes that belong to the plan."""
    ours = {field.name for field in fields(VitConfig)}
    unknown = sorted(set(changes) - ours - set(PLANNED))
    require(not unknown, f"A preset has {', '.join(sorted(ours | set(PLANNED)))}; got {', '.join(unknown)}.")
    chosen, options = ({name: changes[name] for name in changes if name in part} for part in (ours, PLANNED))
    if "epochs" in chosen and "warmup_epochs" not in chosen:  # the warm-up is at most a quarter of them
        quarter = require_count("epochs", chosen["epochs"]) // 4
        chosen["warmup_epochs"] = min(config.warmup_epochs, quarter)
    return replace(config, **chosen), options


def plan_of(config: VitConfig, training: Images, folder: Path, seed: int, options: Mapping[str, Any]) -> Plan:
    """Return the plan in steps; each epoch ends with an evaluation and a checkpoint."""
    epoch = steps_per_epoch(len(training), config.batch)
    return Plan(
        folder=folder,
        steps=epoch * config.epochs,
        batch=config.batch,
        learning_rate=config.learning_rate,
        warmup=epoch * config.warmup_epochs,
        schedule=config.schedule,
        weight_decay=config.weight_decay,
        seed=seed,
        save_every=epoch,
        log_every=epoch,
        evaluate_every=epoch,
        bf16=config.bf16,
        **options,
    )


def description_of(
    config: VitConfig, preset: str, variant: Variant, seed: int, training: Images, held_out: Images
) -> dict[str, Any]:
    """Return the description of the run, which its figure reads."""
    examples = {"training": len(training), "held_out": len(held_out), "epoch": len(training) // config.batch}
    settings = {"experiment": "vit", "preset": preset, "variant": variant, "seed": seed, "config": asdict(config)}
    return {**settings, "examples": examples, "data": [training.fingerprint(), held_out.fingerprint()]}
