r"""Masked language modelling [ST, App. D]: a shaped Transformer against Pre-LN and Post-LN.

Variants:

* shaped-learn: shaped attention, shaped ReLU, no normalisation; γ₁, γ₂ and s₋ are trained;
* shaped-recover: the same start; γ₁, γ₂ and s₋ fall linearly to 0 during the warm-up;
* shaped-fixed: the same start; γ₁, γ₂ and s₋ stay, "still trainable but at much slower rates" [ST, App. D];
* pre-ln, post-ln: softmax attention, ReLU, LayerNorm.

All of them use Adam (0.9, 0.999), no weight decay, a linear warm-up and then a constant rate (the paper mentions no
decay), and no clipping. The seed decides initial weights, masks and the order of the data. λ and γ are trained in all
shaped variants.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from limitformer.base.errors import require, require_count, require_real
from limitformer.nn import Keep, Learn, Recover
from limitformer_papers.training.architecture import Kind, ShapedTransformerConfig, ShapedTransformerForMaskedLM
from limitformer_papers.training.callbacks import Correlation, Entropy, Gains, GradientNorms, ShapingSchedule
from limitformer_papers.training.data.masking import MaskedCollator
from limitformer_papers.training.data.text_data import TextData, text_data
from limitformer_papers.training.data.tokenizer import save_tokenizer
from limitformer_papers.training.harness import train
from limitformer_papers.training.log import Log
from limitformer_papers.training.plan import Plan

Variant = Literal["shaped-learn", "shaped-recover", "shaped-fixed", "pre-ln", "post-ln"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
COMPARED: tuple[Variant, ...] = ("shaped-learn", "shaped-recover", "pre-ln", "post-ln")  # [ST, Table 1]
KINDS: Mapping[Variant, Kind] = {
    "shaped-learn": "shaped",
    "shaped-recover": "shaped",
    "shaped-fixed": "shaped",
    "pre-ln": "pre_ln",
    "post-ln": "post_ln",
}
TOKENIZER = "tokenizer"  # next to the model, in the folder of a run
EVALUATED, LOOKED_AT = 512, 8  # held-out sequences, at most: all of a large corpus would take longer than the training
EVALUATION_SEED = 2**63  # seed of the masks of held-out sequences; no run trains with it


@dataclass(frozen=True, kw_only=True)
class MlmConfig:
    """Sizes and plan of a run, and its grid.

    Attributes:
        width, depth, heads, hidden: n, d, h, n_h.
        length, batch: tokens in a sequence, sequences in a step.
        vocabulary: size of the tokenizer.
        steps, warmup: steps, and those in which the rate rises and Recover removes the shaping.
        initial: "law" or "paper", as in `ShapedTransformerConfig`.
        learning_rates, gammas, seeds: the grid; only shaped variants have γ.
        bf16: mixed precision; shaped variants keep softmax − C̄ in float32.
        look_every: steps between measurements of entropy, correlation, gains and gradients.
        save_every, evaluate_every: steps between checkpoints and between evaluations.
    """

    width: int
    depth: int
    heads: int
    hidden: int
    length: int
    batch: int
    vocabulary: int
    steps: int
    warmup: int
    initial: Literal["law", "paper"] = "law"
    learning_rates: tuple[float, ...]
    gammas: tuple[float, ...]
    seeds: int
    bf16: bool = False
    look_every: int
    save_every: int
    evaluate_every: int


PRESETS = {
    "tiny": MlmConfig(
        width=128, depth=8, heads=4, hidden=512, length=64, batch=16, vocabulary=2048, steps=800, warmup=80,
        learning_rates=(1e-3, 3e-3, 1e-2), gammas=(0.2,), seeds=2, look_every=50, save_every=200, evaluate_every=200,
    ),
    "deep": MlmConfig(
        width=128, depth=18, heads=8, hidden=512, length=64, batch=16, vocabulary=2048, steps=800, warmup=80,
        initial="paper", learning_rates=(1e-4, 5e-4, 1e-3, 5e-3), gammas=(0.05, 0.1, 0.2), seeds=2, look_every=50,
        save_every=200, evaluate_every=200,
    ),
    "small": MlmConfig(
        width=512, depth=18, heads=8, hidden=2048, length=128, batch=32, vocabulary=16_000, steps=20_000, warmup=800,
        initial="paper", learning_rates=(1e-4, 5e-4, 1e-3, 5e-3), gammas=(0.05, 0.2), seeds=2, bf16=True,
        look_every=200, save_every=2_000, evaluate_every=2_000,
    ),
    "paper": MlmConfig(
        width=768, depth=18, heads=8, hidden=3072, length=128, batch=32, vocabulary=32_000, steps=100_000, warmup=4_000,
        initial="paper", learning_rates=(1e-4, 5e-4, 1e-3, 5e-3), gammas=(0.05, 0.1, 0.2), seeds=4, look_every=500,
        save_every=5_000, evaluate_every=5_000,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MlmRun:
    """One run: a configuration and a point of its grid; γ is 0 for the variants without one."""

    config: MlmConfig
    variant: Variant
    learning_rate: float
    gamma: float = 0.0
    seed: int = 0
    source: str = "stdlib"

    def __post_init__(self) -> None:
        require(self.variant in VARIANTS, f"variant must be one of {', '.join(VARIANTS)}; got {self.variant!r}.")
        require(
            require_real("learning_rate", self.learning_rate) > 0,
            f"learning_rate must be positive; got {self.learning_rate}.",
        )
        require(0 <= require_real("gamma", self.gamma) <= 1, f"gamma must lie in [0, 1]; got {self.gamma}.")
        require_count("seed", self.seed, least=0)

    @property
    def is_shaped(self) -> bool:
        """Whether the variant has γ."""
        return KINDS[self.variant] == "shaped"

    @property
    def name(self) -> str:
        """The name of its folder."""
        gamma = f"-gamma{self.gamma:g}" if self.is_shaped else ""
        return f"{self.variant}-d{self.config.depth}{gamma}-lr{self.learning_rate:g}-seed{self.seed}"

    def about(self, data: TextData) -> dict[str, Any]:
        """Return the description of the run."""
        sizes = asdict(self.config)
        for name in ("learning_rates", "gammas", "seeds", "steps", "batch", "bf16", "save_every", "evaluate_every"):
            sizes.pop(name)  # part of the grid, or of the plan
        place = {"variant": self.variant, "gamma": self.gamma, "evaluated": EVALUATED, "looked_at": LOOKED_AT}
        return {"experiment": "mlm", **place, **sizes, "data": data.record}


def preset(name: str, **changes: Any) -> MlmConfig:
    """Return a preset with changes; those that are None change nothing.

    Raises:
        InputError: no such preset, or sizes that do not fit.
    """
    require(name in PRESETS, f"Unknown preset {name!r}; there are {', '.join(PRESETS)}.")
    config = replace(PRESETS[name], **{key: value for key, value in changes.items() if value is not None})
    for key in ("width", "depth", "heads", "hidden", "length", "batch", "vocabulary", "steps", "seeds"):
        require_count(key, getattr(config, key))
    # A shorter run than the preset's keeps its shape.
    return replace(config, warmup=min(config.warmup, max(1, config.steps // 10)))


def grid(
    config: MlmConfig, source: str, variants: Sequence[Variant] = COMPARED, seeds: Iterable[int] | None = None
) -> Iterator[MlmRun]:
    """Yield all runs of a configuration's grid, seeds outermost, so that a grid that stops early has complete seeds."""
    for seed in range(config.seeds) if seeds is None else seeds:
        for rate in config.learning_rates:
            for variant in variants:
                for gamma in config.gammas if KINDS[variant] == "shaped" else (0.0,):
                    yield MlmRun(
                        config=config, variant=variant, learning_rate=rate, gamma=gamma, seed=seed, source=source
                    )


def run_mlm(run: MlmRun, out: Path, *, documents: int | None = None, **options: Any) -> Mapping[str, float]:
    """Train, resume or read the run `out`/`run.name`; return its summary.

    Args:
        run: the run.
        out: the folder of all runs.
        documents: largest number of documents of each source.
        options: values of the plan's `threads`, `tensorboard`, `tf32` and `compile`.

    Raises:
        InputError: sizes, data or a folder that cannot be used, before any training.
        TrainingInterrupted: Ctrl-C, or a time budget is spent; the same call resumes.
    """
    config = run.config
    data = text_data(run.source, config.vocabulary, config.length, Path(out) / "data", documents)
    plan = plan_of(run, Path(out), options)
    model = model_of(run, len(data.tokenizer))
    evaluation, masked = spread(data.evaluation, EVALUATED), MaskedCollator(data.tokenizer, EVALUATION_SEED)
    probes = spread(evaluation, LOOKED_AT)
    log, every, batch = Log(), config.look_every, masked([probes[k] for k in range(len(probes))])
    looks = [Entropy(log, every, batch), Correlation(log, every, batch), GradientNorms(log, every), Gains(log, every)]
    summary = train(
        model,
        plan,
        train_data=data.train,
        eval_data=evaluation,
        collate=MaskedCollator(data.tokenizer, run.seed),
        eval_collate=masked,
        callbacks=[ShapingSchedule(schedule_of(run)), *looks, log],
        about=run.about(data),
    )
    if not (plan.folder / TOKENIZER).exists():
        save_tokenizer(data.tokenizer, plan.folder / TOKENIZER)
    return summary


def plan_of(run: MlmRun, out: Path, options: Mapping[str, Any]) -> Plan:
    config = run.config
    return Plan(
        folder=out / run.name,
        steps=config.steps,
        batch=config.batch,
        learning_rate=run.learning_rate,
        warmup=config.warmup,
        seed=run.seed,
        save_every=config.save_every,
        log_every=config.look_every,
        evaluate_every=config.evaluate_every,
        bf16=config.bf16,
        **options,
    )


def model_of(run: MlmRun, vocabulary: int) -> ShapedTransformerForMaskedLM:
    """Return the untrained model, its weights drawn from the seed."""
    config = run.config
    torch.manual_seed(run.seed)
    model = ShapedTransformerForMaskedLM(
        ShapedTransformerConfig(
            vocab_size=vocabulary,
            hidden_size=config.width,
            num_hidden_layers=config.depth,
            num_attention_heads=config.heads,
            intermediate_size=config.hidden,
            max_position_embeddings=config.length,
            kind=KINDS[run.variant],
            residual_gamma=run.gamma,
            initial=config.initial,
            float32=config.bf16,
        )
    )
    schedule_of(run).prepare(model)
    return model


def schedule_of(run: MlmRun) -> Learn | Recover | Keep:
    """Return the gains' schedule; variants without gains have nothing to learn."""
    if run.variant == "shaped-recover":
        return Recover(steps=run.config.warmup)
    return Keep() if run.variant == "shaped-fixed" else Learn()


def spread(data: Any, number: int) -> Any:
    """Return at most `number` of the items, evenly spaced: neighbours are often of one document."""
    count = min(number, len(data))
    return torch.utils.data.Subset(data, [k * len(data) // count for k in range(count)])
