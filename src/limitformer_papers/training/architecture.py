r"""The networks that [ST, App. D] trains, as models of `transformers`: masked language models and classifiers.

x = token embedding + position embedding, each entry N(0, ½), so that tokens start with norm √n; [ST, App. D.1] draws
all weights but queries and keys from N(0, 1/n). Then come blocks of `limitformer.nn` without a causal mask ("shaped",
or the Pre-LN and Post-LN that it is compared with); then, for Pre-LN, a LayerNorm. The paper defines neither positions
nor heads. Here a language model has a separate linear map, N(0, 1/n), and a classifier reads the mean of the visible
tokens.

`Shaping` of a stock model cannot replace them: a shaped BERT keeps the LayerNorm of its embeddings, its biases and the
transform of its head, and no stock family has the bidirectional Pre-LN network.
"""

from math import sqrt
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.masking_utils import bidirectional_mask_function
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput, SequenceClassifierOutput

from limitformer.base.errors import require
from limitformer.hf.attention import shaped_mask
from limitformer.nn import Block, Gain, InitialVariances, Residual, post_ln_block, pre_ln_block, shaped_block

Kind = Literal["shaped", "pre_ln", "post_ln"]
Initial = Literal["law", "paper"]
EMBEDDING_STD = sqrt(0.5)
FIXED = {"causal": False, "tau0": 1.0}  # entries of earlier files, which other models had


class ShapedTransformerConfig(PreTrainedConfig):
    """A shaped Transformer, or its Pre-LN or Post-LN counterpart [ST, App. D]; default sizes are the paper's.

    Args:
        vocab_size: size of the vocabulary.
        hidden_size: n.
        num_hidden_layers: number of blocks.
        num_attention_heads: h, dividing n.
        intermediate_size: n_h.
        max_position_embeddings: the longest sequence.
        kind: "shaped", "pre_ln" or "post_ln".
        residual_gamma: start value of γ, for "shaped".
        float32: whether softmax − γ₂C̄ is computed in float32 for any dtype, for "shaped".
        initial: "law" for variances by fan-in, which preserve the norm of tokens at every depth, or "paper" for 1/n
            for any fan-in [ST, App. D.1]; embeddings have ½ with both.

    Raises:
        InputError: `kind` or `initial` is unknown, or an earlier version saved a model that this class does not build.
    """

    model_type = "shaped_transformer"

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 768,
        num_hidden_layers: int = 18,
        num_attention_heads: int = 8,
        intermediate_size: int = 3072,
        max_position_embeddings: int = 128,
        kind: Kind = "shaped",
        residual_gamma: float = 0.2,
        float32: bool = False,
        initial: Initial = "law",
        **options: Any,
    ) -> None:
        for name, value, words in (("kind", kind, get_args(Kind)), ("initial", initial, get_args(Initial))):
            require(value in words, f"{name} must be one of {', '.join(words)}; got {value!r}.")
        for name, fixed in FIXED.items():
            stored = options.get(name)
            require(stored is None or stored == fixed, f"The networks of [ST] have {name}={fixed}; got {stored!r}.")
        self.vocab_size, self.max_position_embeddings = vocab_size, max_position_embeddings
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.kind, self.initial = kind, initial
        self.residual_gamma, self.float32 = residual_gamma, float32
        super().__init__(**options)


class ShapedTransformerPreTrainedModel(PreTrainedModel):
    """The initialisation that all heads share; a linear layer stores the standard deviation of its weights."""

    config: ShapedTransformerConfig
    base_model_prefix = "transformer"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw weights that are not loaded, such as a new head."""
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=getattr(module, "initial_std", self.config.hidden_size**-0.5))
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=EMBEDDING_STD)
        elif isinstance(module, Gain):
            init.constant_(module.value, module.start)
        elif isinstance(module, Residual):
            gamma = self.config.residual_gamma
            init.constant_(module.gamma, gamma)
            init.constant_(module.lam, sqrt(1 - gamma**2))
        else:
            super()._init_weights(module)


def block_of(config: ShapedTransformerConfig) -> Block:
    """Build a block whose linear layers store their standard deviation."""
    width, heads, hidden = config.hidden_size, config.num_attention_heads, config.intermediate_size
    if config.kind == "shaped":
        options: dict[str, Any] = {"gamma": config.residual_gamma, "per_head": False, "float32": config.float32}
        block = shaped_block(width, heads, hidden=hidden, **options)
    else:
        block = {"pre_ln": pre_ln_block, "post_ln": post_ln_block}[config.kind](width, heads, hidden=hidden)
    variances = variances_of(config)
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            module.initial_std = getattr(variances, name.rpartition(".")[2]) ** 0.5
    return block


def variances_of(config: ShapedTransformerConfig) -> InitialVariances:
    """Return the initial variances of a configuration."""
    width, shaped = config.hidden_size, config.kind == "shaped"
    if config.initial == "paper":
        paper = InitialVariances.paper(width)
        return paper if shaped else InitialVariances(**(vars(paper) | {"query": 1 / width, "key": 1 / width}))
    slope = 1 - 1 / sqrt(width) if shaped else 0.0
    law = InitialVariances.shaped if shaped else InitialVariances.standard
    return law(width, hidden=config.intermediate_size, gain=2 / (1 + slope**2))


class ShapedTransformerModel(ShapedTransformerPreTrainedModel):
    """The architecture without a head: token ids (b, m) to tokens (b, m, n)."""

    def __init__(self, config: ShapedTransformerConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList([block_of(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size) if config.kind == "pre_ln" else nn.Identity()
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> BaseModelOutput:
        """Return the last block's tokens; the mask (b, m) is 1 where a token is seen.

        In a model of 16 bits with `float32`, the tokens between blocks are in float32.
        """
        batch, tokens = input_ids.shape
        x = self.tokens(input_ids) + self.positions(torch.arange(tokens, device=input_ids.device))
        dtype = x.dtype
        seen = None if attention_mask is None else attention_mask.bool()
        options = {"attention_mask": seen, "allow_is_bidirectional_skip": True, "device": x.device}
        mask = shaped_mask(batch, tokens, tokens, mask_function=bidirectional_mask_function, **options)
        for block in self.blocks:
            x = block(x, mask)
        return BaseModelOutput(last_hidden_state=self.norm(x.to(dtype)))


class ShapedTransformerForMaskedLM(ShapedTransformerPreTrainedModel):
    """Logits (b, m, vocab) of the token at each position."""

    accepts_loss_kwargs = True  # the Trainer then passes `num_items_in_batch`

    def __init__(self, config: ShapedTransformerConfig) -> None:
        super().__init__(config)
        self.transformer = ShapedTransformerModel(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
    ) -> MaskedLMOutput:
        """Return logits, and the cross-entropy of `labels` (b, m) other than −100, summed.

        The sum is divided by `num_items_in_batch`; None means the number of these labels.
        """
        logits, loss = self.head(self.transformer(input_ids, attention_mask).last_hidden_state), None
        if labels is not None:
            counted = {"num_items_in_batch": num_items_in_batch, "vocab_size": self.config.vocab_size}
            loss = self.loss_function(logits=logits, labels=labels, **counted)
        return MaskedLMOutput(loss=loss, logits=logits)


class ShapedTransformerForSequenceClassification(ShapedTransformerPreTrainedModel):
    """Logits (b, num_labels) of the mean of the visible tokens."""

    def __init__(self, config: ShapedTransformerConfig) -> None:
        super().__init__(config)
        self.transformer = ShapedTransformerModel(config)
        self.classifier = nn.Linear(config.hidden_size, int(config.num_labels or 2))
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> SequenceClassifierOutput:
        """Return logits, and the loss of the classes `labels` (b,)."""
        x = self.transformer(input_ids, attention_mask).last_hidden_state
        visible = attention_mask.to(x.dtype)[..., None]
        logits, loss = self.classifier((x * visible).sum(1) / visible.sum(1)), None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)


AutoConfig.register(ShapedTransformerConfig.model_type, ShapedTransformerConfig)
AutoModelForMaskedLM.register(ShapedTransformerConfig, ShapedTransformerForMaskedLM)
AutoModelForSequenceClassification.register(ShapedTransformerConfig, ShapedTransformerForSequenceClassification)
