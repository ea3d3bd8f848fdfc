r"""`shape_model`: shape the attention of a stock model, and optionally its blocks.

By default only the attention changes: A = γ₁ I + softmax(QKᵀ/(τ₀ τ_model)) − γ₂ C̄ in place of the softmax [ST, eq. 33].

With `residual_gamma` γ the normalisations inside the blocks are removed, and each branch f is added as λx + γ f(x),
λ² + γ² = 1 at the start, both trained [ST, App. D]. Shaped attention needs tokens of norm √n; pre-norm families have
embeddings of any scale, so the tokens are normalised once, before the first block. Modules after the last block do not
change.

With `shaped_relu` the activation becomes x⁺ + s₋ x⁻, s₋ = 1 − 1/√n at the start.
"""

import copy
from dataclasses import asdict
from math import sqrt
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from limitformer.base.errors import InputError, require
from limitformer.hf.attention import (
    ATTENTION,
    AttentionShaping,
    check_packing,
    masks_for_generate,
    note_offset,
    store_output_attentions,
)
from limitformer.hf.families import FAMILIES, Family, found_family
from limitformer.hf.float32 import keep_float32
from limitformer.hf.other_families import check_attention
from limitformer.hf.settings import Shaping, mark, require_shaping
from limitformer.nn import InitialVariances, Residual, TrainableShapedReLU

Model = TypeVar("Model", bound=PreTrainedModel)
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(101)


def shape_model(
    model: Model, shaping: Shaping | None = None, *, redraw: bool = False, generator: torch.Generator | None = None
) -> Model:
    """Shape a model of transformers in place, and return it.

    Of BERT, RoBERTa, GPT-2, Llama and ViT everything can be shaped; of any other model the attention, if each block has
    one that calls the attention function of transformers with nothing added inside the softmax. A pass over three
    tokens checks that.

    Args:
        model: a model with its head, from a configuration or a checkpoint. If only its base model is shaped, the head
            is saved without the shaping.
        shaping: None means `Shaping()`.
        redraw: whether the blocks' weights are drawn again with `InitialVariances.shaped`; for untrained models.
        generator: the generator of these draws.

    Raises:
        InputError: the attention cannot be shaped, the family does not allow the shaping, or the model has
            cross-attention or is shaped already. The model then does not change.
    """
    shaping = Shaping() if shaping is None else shaping
    require_shaping(shaping)
    family = checked_family(model, shaping)
    if family.attention_only:
        require(
            not redraw,
            f"redraw is for {', '.join(FAMILIES)}; of {model.config.model_type} only the attention is known.",
        )
        check_attention(model, family)
    apply_shaping(model, family, shaping)
    if redraw:
        redraw_blocks(model, family, generator)
    return model


def checked_family(model: PreTrainedModel, shaping: Shaping) -> Family:
    """Return the model's family; raise `InputError` if it cannot have this shaping."""
    is_model = isinstance(model, PreTrainedModel)
    require(is_model, f"shape_model takes a model of transformers; got {type(model).__name__}.")
    kind = model.config.model_type
    require(getattr(model.config, "shaping", None) is None, f"This {type(model).__name__} is shaped already.")
    crossed = getattr(model.config, "add_cross_attention", False)
    require(not crossed, "Shaped attention has no meaning for cross-attention: A has an identity of tokens.")
    embedded = getattr(model.config, "position_embedding_type", "absolute")
    absolute = embedded in (None, "absolute")
    require(absolute, f"Shaped attention has no meaning for positions inside the softmax ({embedded!r}).")
    family = FAMILIES.get(kind) or found_family(model)
    if family is None:
        raise InputError(f"no attention was found in the blocks of {kind} that can be shaped.")
    only = [
        name for name in ("residual_gamma", "shaped_relu", "float32") if getattr(shaping, name) not in (None, False)
    ]
    whole = not (family.attention_only and only)
    require(whole, f"{', '.join(only)}: only for {', '.join(FAMILIES)}; of {kind} only the attention can be shaped.")
    require(not (shaping.shaped_relu and family.gated), f"{kind} has a gated activation; shaped_relu must be False.")
    dropout = kind == "vit" and shaping.residual_gamma is not None and model.config.hidden_dropout_prob > 0
    require(not dropout, "ViT drops out of λx + γf, not of f: residual_gamma needs hidden_dropout_prob=0.")
    return family


def apply_shaping(model: PreTrainedModel, family: Family, shaping: Shaping) -> None:
    """Shape every block, and store the shaping in the configuration."""
    blocks = family.blocks_of(model.base_model)
    for block in blocks:
        shape_attention(block, family, shaping, model.config.num_attention_heads)
        if shaping.residual_gamma is not None:
            shape_residuals(block, family, shaping)
        if shaping.shaped_relu:
            activation = TrainableShapedReLU(negative=1 - 1 / sqrt(model.config.hidden_size), trained=shaping.trained)
            replace(block, family.activation, activation.to(next(block.parameters())))
    if shaping.float32:
        keep_float32(blocks, family)
    if shaping.residual_gamma is not None and not family.post_norm:
        blocks[0].register_forward_pre_hook(normalise_tokens, with_kwargs=True)
    model.base_model.register_forward_pre_hook(store_output_attentions, with_kwargs=True)
    if family.causal or getattr(model.config, "is_decoder", False):
        model.base_model.register_forward_pre_hook(check_packing, with_kwargs=True)
    untyped: Any = model  # mypy takes a module's attributes for tensors
    untyped.create_masks_for_generate = masks_for_generate
    untyped.base_model.shaped_blocks, untyped.base_model.shaped_packs = family.blocks, family.packs
    mark_configuration(model, shaping, family.activation_name)


def mark_configuration(model: PreTrainedModel, shaping: Shaping, activation: str) -> None:
    """Store the shaping in a copy of the configuration, from which other models may be built."""
    shared, own = model.config, copy.deepcopy(model.config)
    modules: list[Any] = [module for module in model.modules() if getattr(module, "config", None) is shared]
    for module in modules:
        module.config = own
    own.shaping = asdict(shaping)
    mark(own, type(model), activation)
    own.attn_implementation = ATTENTION  # saved, which `_attn_implementation` is not
    own._attn_implementation = ATTENTION


def shape_attention(block: nn.Module, family: Family, shaping: Shaping, heads: int) -> None:
    """Add gains to an attention, and the hook that passes the position of its queries."""
    attention = attrgetter(family.attention)(block)
    attention.shaping = AttentionShaping(shaping, heads).to(next(attention.parameters()))
    attention.register_forward_pre_hook(note_offset, with_kwargs=True)


def shape_residuals(block: nn.Module, family: Family, shaping: Shaping) -> None:
    """Add both branches as λx + γf, without normalisations."""
    assert shaping.residual_gamma is not None
    for norm, path in zip(family.norms, family.branches, strict=True):
        replace(block, norm, nn.Identity())
        branch = attrgetter(path)(block)
        branch.residual = Residual(shaping.residual_gamma, trained=shaping.trained).to(next(branch.parameters()))
        branch.register_forward_hook(scale_sum if family.post_norm else scale_branch, with_kwargs=True)


def replace(block: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the submodule at `path`."""
    parent, _, name = path.rpartition(".")
    setattr(attrgetter(parent)(block) if parent else block, name, module)


def scale_branch(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
    """A hook after f: return γ f(x) + (λ − 1)x, to which the block adds x."""
    x = args[0] if args else kwargs["hidden_states"]
    f, *others = output if isinstance(output, tuple) else (output,)
    branch = module.residual(x, f) - x
    return (branch, *others) if isinstance(output, tuple) else branch


def scale_sum(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
    """A hook after x + f(x): return λx + γ f(x)."""
    x = args[1] if len(args) > 1 else kwargs["input_tensor"]
    return module.residual(x, output - x)


def normalise_tokens(module: Any, args: Any, kwargs: Any) -> Any:
    """A hook before the first block: normalise tokens to the norm √n."""
    if args:
        return (functional.rms_norm(args[0], args[0].shape[-1:]), *args[1:]), kwargs
    x = kwargs["hidden_states"]
    return args, kwargs | {"hidden_states": functional.rms_norm(x, x.shape[-1:])}


@torch.no_grad()
def redraw_blocks(model: PreTrainedModel, family: Family, generator: torch.Generator | None) -> None:
    """Draw the blocks' weights with `InitialVariances.shaped`, and set their biases to 0."""
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
    """Return the variances for these weights and this σ, or σ(g)u if it is gated: c = 1/E σ(g)² in both cases."""
    width, joined = weights["query"][0].shape[1], weights["output"][0].shape[1]
    dtype = weights["query"][0].dtype
    squares = activation(torch.tensor(NODES, dtype=dtype, device=weights["query"][0].device)).double().cpu() ** 2
    gain = 1 / float(np.average(squares.numpy(), weights=WEIGHTS))
    return InitialVariances.shaped(width, joined=joined, hidden=weights["post"][0].shape[1], gain=gain)
