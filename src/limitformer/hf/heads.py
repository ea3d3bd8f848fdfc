r"""Heads of the paper's architecture, with Auto classes and `generate` [ST, App. D].

The head of a language model is a separate linear map, N(0, 1/n). A classifier reads the mean of the visible tokens. The
paper does not define these heads.
"""

import copy
from typing import Any

from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    GenerationMixin,
)
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput, SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from limitformer.base.errors import require
from limitformer.hf.attention import masks_for_generate
from limitformer.hf.caches import NAME, takes_either_name
from limitformer.hf.configuration import ShapedTransformerConfig
from limitformer.hf.initial import ShapedTransformerPreTrainedModel
from limitformer.hf.transformer import ShapedTransformerModel


def with_causal(config: ShapedTransformerConfig, causal: bool) -> ShapedTransformerConfig:
    """Copy the configuration and set `causal`, as another head may be built from the same one."""
    own = copy.deepcopy(config)
    own.causal = causal if own.causal is None else own.causal
    return own


class LanguageModel(ShapedTransformerPreTrainedModel):
    """The head and the loss of both language models."""

    _tied_weights_keys = {"head.weight": "transformer.tokens.weight"}  # noqa: RUF012

    def __init__(self, config: ShapedTransformerConfig) -> None:
        super().__init__(config)
        self.transformer = ShapedTransformerModel(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.head = value

    def loss_of(self, logits: Tensor, labels: Tensor | None, counted: dict[str, Any]) -> Tensor | None:
        """Return the cross-entropy that `transformers` assigns to the name of this class."""
        if labels is None:
            return None
        loss: Tensor = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **counted)
        return loss


class ShapedTransformerForMaskedLM(LanguageModel):
    """Logits (b, m, vocab) of the token at each position."""

    def __init__(self, config: ShapedTransformerConfig) -> None:
        super().__init__(with_causal(config, False))

    @can_return_tuple
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, labels: Tensor | None = None,
        **options: Any,
    ) -> MaskedLMOutput:  # fmt: skip
        """Return logits, and the mean cross-entropy of `labels` (b, m) other than −100."""
        counted = {name: options.pop(name) for name in ("num_items_in_batch",) if name in options}
        states = self.transformer(input_ids, attention_mask, return_dict=True, **options)
        logits = self.head(states.last_hidden_state)
        loss = self.loss_of(logits, labels, counted)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=states.hidden_states, attentions=states.attentions
        )


class ShapedTransformerForCausalLM(LanguageModel, GenerationMixin):
    """Logits (b, m, vocab) of the token after each position."""

    create_masks_for_generate = staticmethod(masks_for_generate)

    def __init__(self, config: ShapedTransformerConfig) -> None:
        config = with_causal(config, True)
        message = (
            "A model of the next token must be causal; got causal=False. Nearest: from_pretrained(…, causal=True)."
        )
        require(bool(config.causal), message)
        super().__init__(config)

    @takes_either_name
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits, and the mean loss of `labels` (b, m).

        Args:
            logits_to_keep: the number of last positions, 0 for all, or indices of positions.
        """
        counted = {name: options.pop(name) for name in ("num_items_in_batch",) if name in options}
        states = self.transformer(
            input_ids,
            attention_mask,
            position_ids,
            cache,
            inputs_embeds,
            use_cache,
            return_dict=True,
            **options,
        )
        chosen = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.head(states.last_hidden_state[:, chosen])
        loss = self.loss_of(logits, labels, counted)
        named: dict[str, Any] = {NAME: getattr(states, NAME)}
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=states.hidden_states, attentions=states.attentions, **named
        )  # fmt: skip


class ShapedTransformerForSequenceClassification(ShapedTransformerPreTrainedModel):
    """Logits (b, num_labels) of the mean of the visible tokens."""

    accepts_loss_kwargs = False  # the loss is a mean over a batch, which the Trainer must divide

    def __init__(self, config: ShapedTransformerConfig) -> None:
        config = with_causal(config, False)
        super().__init__(config)
        self.num_labels = int(config.num_labels or 2)
        self.transformer = ShapedTransformerModel(config)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, labels: Tensor | None = None,
        **options: Any,
    ) -> SequenceClassifierOutput:  # fmt: skip
        """Return logits, and the loss of `labels` (b,): classes, or numbers if `num_labels` is 1."""
        options.pop("num_items_in_batch", None)
        states = self.transformer(input_ids, attention_mask, return_dict=True, **options)
        logits = self.classifier(mean_of_visible(states.last_hidden_state, attention_mask))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=states.hidden_states, attentions=states.attentions
        )


def mean_of_visible(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the mean (b, n) over the tokens that a mask (b, m) shows."""
    if attention_mask is None:
        return x.mean(1)
    require(attention_mask.dim() == 2, f"attention_mask must be (batch, tokens); got {tuple(attention_mask.shape)}.")
    visible = attention_mask.to(x.dtype)[..., None]
    return (x * visible).sum(1) / visible.sum(1).clamp(min=1)


AutoModelForMaskedLM.register(ShapedTransformerConfig, ShapedTransformerForMaskedLM)
AutoModelForCausalLM.register(ShapedTransformerConfig, ShapedTransformerForCausalLM)
AutoModelForSequenceClassification.register(ShapedTransformerConfig, ShapedTransformerForSequenceClassification)
