r"""Make the attention of a stock model shaped, and its blocks where one wishes.

Attention alone: A = γ₁ I + softmax(QKᵀ/(τ₀ τ_model)) − γ₂ C̄ in place of the softmax [ST, eq. 33].

With `residual_gamma` γ the normalisations inside the blocks go, and each branch f is added as λx + γ f(x),
λ² + γ² = 1 at the start, both trained [ST, App. D]. Shaped attention takes tokens of norm √n; pre-norm families have
embeddings of any scale, so that the tokens are normalised once, before the first block. What stands after the last
block stays.

With `shaped_relu` the activation becomes x⁺ + s₋ x⁻, s₋ = 1 − 1/√n at the start.
"""

import copy
from dataclasses import asdict, dataclass
from math import sqrt
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from limitformer.base.errors import InputError, require, require_real
from limitformer.hf.attention import (
    ATTENTION,
    AttentionShaping,
    check_packing,
    masks_for_generate,
    note_offset,
    note_wish,
)
from limitformer.hf.families import FAMILIES, Family
from limitformer.hf.float32 import keep_float32
from limitformer.hf.marks import mark
from limitformer.nn import InitialVariances, Residual, TrainableShapedReLU

Model = TypeVar("Model", bound=PreTrainedModel)
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(101)


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """How a model is shaped; it is saved with the model's configuration.

    Attributes:
        gamma1, gamma2: γ₁ and γ₂ at the start; 0 keeps what a trained model computes, None leaves a term out for good.
        tau0: τ₀ > 0, which divides the logits.
        per_head: whether each head has its own γ₁ and γ₂.
        trained: whether γ₁, γ₂, s₋, λ and γ have gradients.
        float32: whether softmax − γ₂C̄, its sum with γ₁ I and the tokens between the layers are in float32 whatever the
            dtype of the weights.
        residual_gamma: γ of the residuals, which takes the blocks' normalisations away; None keeps both as they are.
        shaped_relu: whether the activation becomes a shaped ReLU.
    """

    gamma1: float | None = 1.0
    gamma2: float | None = 1.0
    tau0: float = 1.0
    per_head: bool = True
    trained: bool = True
    float32: bool = False
    residual_gamma: float | None = None
    shaped_relu: bool = False

    def __post_init__(self) -> None:
        for name in ("gamma1", "gamma2", "residual_gamma"):
            if getattr(self, name) is not None:
                require_real(name, getattr(self, name))
        require(require_real("tau0", self.tau0) > 0, f"tau0 must be positive; got {self.tau0}.")
        gamma = self.residual_gamma
        fits = gamma is None or 0 <= gamma <= 1
        require(fits, f"residual_gamma must lie in [0, 1]; got {gamma}. [ST, App. D] takes 0.05, 0.1 or 0.2.")


def shape_model(
    model: Model, shaping: Shaping | None = None, *, redraw: bool = False, generator: torch.Generator | None = None
) -> Model:
    """Shape a BERT, RoBERTa, GPT-2, Llama or ViT model, in place; the model itself is returned.

    Args:
        model: with its head, from a configuration or a checkpoint; a head whose model was shaped without it does not
            know of the shaping when it is saved.
        shaping: None means `Shaping()`.
        redraw: whether the blocks' weights are drawn anew with the variances of [ST, App. D]; for untrained models.
        generator: what they are drawn from.

    Raises:
        InputError: another family, cross-attention, a model that is shaped already, or a shaping that the family does
            not allow; the model is then as it was.
    """
    shaping = Shaping() if shaping is None else shaping
    family = checked_family(model, shaping)
    apply_shaping(model, family, shaping)
    if redraw:
        redraw_blocks(model, family, generator)
    return model


def checked_family(model: PreTrainedModel, shaping: Shaping) -> Family:
    """The model's family, or `InputError` where it cannot be shaped so."""
    is_model = isinstance(model, PreTrainedModel)
    require(is_model, f"shape_model takes a model of transformers; got {type(model).__name__}.")
    kind = model.config.model_type
    if kind not in FAMILIES:
        raise InputError(f"Models of type {kind!r} cannot be shaped; there are {', '.join(FAMILIES)}.")
    require(getattr(model.config, "shaping", None) is None, f"This {type(model).__name__} is shaped already.")
    crossed = getattr(model.config, "add_cross_attention", False)
    require(not crossed, "Shaped attention has no meaning for cross-attention: A has an identity of tokens.")
    embedded = getattr(model.config, "position_embedding_type", "absolute")
    absolute = embedded in (None, "absolute")
    require(absolute, f"Shaped attention has no meaning for positions inside the softmax ({embedded!r}).")
    family = FAMILIES[kind]
    require(not (shaping.shaped_relu and family.gated), f"{kind} has a gated activation; shaped_relu must be False.")
    dropout = kind == "vit" and shaping.residual_gamma is not None and model.config.hidden_dropout_prob > 0
    require(not dropout, "ViT drops out of λx + γf, not of f: residual_gamma needs hidden_dropout_prob=0.")
    return family


def apply_shaping(model: PreTrainedModel, family: Family, shaping: Shaping) -> None:
    """Shape every block, and note it in the configuration."""
    blocks = family.blocks_of(model.base_model)
    for block in blocks:
        shape_attention(block, family, shaping, model.config.num_attention_heads)
        if shaping.residual_gamma is not None:
            shape_residuals(block, family, shaping)
        if shaping.shaped_relu:
            shape_activation(block, family, shaping, model.config.hidden_size)
    if shaping.float32:
        keep_float32(blocks, family)
    if shaping.residual_gamma is not None and not family.post_norm:
        blocks[0].register_forward_pre_hook(normalise_tokens, with_kwargs=True)
    model.base_model.register_forward_pre_hook(note_wish, with_kwargs=True)
    if family.causal or getattr(model.config, "is_decoder", False):
        model.base_model.register_forward_pre_hook(check_packing, with_kwargs=True)
    untyped: Any = model  # a module's own attributes are tensors to the checker
    untyped.create_masks_for_generate = masks_for_generate
    mark_configuration(model, shaping)


def mark_configuration(model: PreTrainedModel, shaping: Shaping) -> None:
    """Note the shaping in a configuration of the model's own: others may be built from the one that it had."""
    shared, own = model.config, copy.deepcopy(model.config)
    modules: list[Any] = [module for module in model.modules() if getattr(module, "config", None) is shared]
    for module in modules:
        module.config = own
    own.shaping = asdict(shaping)
    mark(own, type(model))
    own.attn_implementation = ATTENTION  # saved, which `_attn_implementation` is not
    own._attn_implementation = ATTENTION


def shape_attention(block: nn.Module, family: Family, shaping: Shaping, heads: int) -> None:
    """Give an attention its gains, and let it ask the cache where its queries stand."""
    attention = attrgetter(family.attention)(block)
    attention.shaping = AttentionShaping(
        heads if shaping.per_head else None,
        gamma1=shaping.gamma1,
        gamma2=shaping.gamma2,
        tau0=shaping.tau0,
        trained=shaping.trained,
        float32=shaping.float32,
    ).to(next(attention.parameters()))
    attention.register_forward_pre_hook(note_offset, with_kwargs=True)


def shape_residuals(block: nn.Module, family: Family, shaping: Shaping) -> None:
    """λx + γf for both branches, without normalisations."""
    assert shaping.residual_gamma is not None
    for norm, path in zip(family.norms, family.branches, strict=True):
        replace(block, norm, nn.Identity())
        branch = attrgetter(path)(block)
        branch.residual = Residual(shaping.residual_gamma, trained=shaping.trained).to(next(branch.parameters()))
        branch.register_forward_hook(scale_sum if family.post_norm else scale_branch, with_kwargs=True)


def shape_activation(block: nn.Module, family: Family, shaping: Shaping, width: int) -> None:
    """A shaped ReLU."""
    activation = TrainableShapedReLU(negative=1 - 1 / sqrt(width), trained=shaping.trained)
    replace(block, family.activation, activation.to(next(block.parameters())))


def replace(block: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module where `path` leads."""
    parent, _, name = path.rpartition(".")
    setattr(attrgetter(parent)(block) if parent else block, name, module)


def scale_branch(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
    """A hook after f: γ f(x) + (λ − 1)x, to which the block adds x."""
    x = args[0] if args else kwargs["hidden_states"]
    return with_first(output, module.residual(x, first(output)) - x)


def scale_sum(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
    """A hook after x + f(x): λx + γ f(x)."""
    x = args[1] if len(args) > 1 else kwargs["input_tensor"]
    return module.residual(x, output - x)


def first(output: Any) -> Tensor:
    """The tokens of what a branch gives."""
    tokens: Tensor = output[0] if isinstance(output, tuple) else output
    return tokens


def with_first(output: Any, tokens: Tensor) -> Any:
    """The same with other tokens."""
    return (tokens, *output[1:]) if isinstance(output, tuple) else tokens


def normalise_tokens(module: Any, args: Any, kwargs: Any) -> Any:
    """A hook before the first block: tokens of norm √n."""
    if args:
        return (functional.rms_norm(args[0], args[0].shape[-1:]), *args[1:]), kwargs
    x = kwargs["hidden_states"]
    return args, kwargs | {"hidden_states": functional.rms_norm(x, x.shape[-1:])}


@torch.no_grad()
def redraw_blocks(model: PreTrainedModel, family: Family, generator: torch.Generator | None) -> None:
    """Draw the blocks' weights with the variances of [ST, App. D]; their biases become 0."""
    for block in family.blocks_of(model.base_model):
        weights = family.weights(block)
        variances = variances_of(weights, attrgetter(family.activation)(block))
        for name, several in weights.items():
            for weight in several:
                device = None if generator is None else generator.device
                normal = torch.randn(weight.shape, generator=generator, device=device)
                weight.copy_(normal * getattr(variances, name) ** 0.5)
        for name, parameter in block.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()


def variances_of(weights: dict[str, list[Tensor]], activation: nn.Module) -> InitialVariances:
    """For these weights and this σ, or σ(g)u where it is gated: c = 1/E σ(g)² in both."""
    width, joined = weights["query"][0].shape[1], weights["output"][0].shape[1]
    dtype = weights["query"][0].dtype
    squares = activation(torch.tensor(NODES, dtype=dtype, device=weights["query"][0].device)).double().cpu() ** 2
    gain = 1 / float(np.average(squares.numpy(), weights=WEIGHTS))
    return InitialVariances.shaped(width, joined=joined, hidden=weights["post"][0].shape[1], gain=gain)
