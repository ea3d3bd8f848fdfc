r"""The paper's own architecture as models of `transformers`, with Auto classes, caches and `generate` [ST, App. D].

x = token embedding + position embedding, each entry N(0, ½), so that tokens start with norm √n; then blocks of
`limitformer.nn` ("shaped", or the Pre-LN and Post-LN that it is compared with); then, for Pre-LN, a LayerNorm. The head
of a language model is a linear map of its own, N(0, 1/n), and a class is read off the mean of the visible tokens.
The paper leaves embeddings, head and pooling open.
"""

import copy
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from limitformer.errors import InputError, require
from limitformer.hf.attention import ATTENTION, masks_for_generate, places_of
from limitformer.hf.configuration import ShapedTransformerConfig
from limitformer.nn import Block, Gain, InitialVariances, Residual, post_ln_block, pre_ln_block, shaped_block

EMBEDDING_STD = sqrt(0.5)


class ShapedTransformerPreTrainedModel(PreTrainedModel):
    """What all heads share: how weights start."""

    config: ShapedTransformerConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    supports_gradient_checkpointing = True

    def __init__(self, config: ShapedTransformerConfig, *inputs: Any, **options: Any) -> None:
        config._attn_implementation = ATTENTION
        super().__init__(config, *inputs, **options)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw what is not loaded; each linear layer knows its own deviation."""
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
    """A block, whose linear layers know the deviation that they are drawn with."""
    sizes: dict[str, Any] = {"hidden": config.intermediate_size, "kv_heads": config.num_key_value_heads}
    width, heads = config.hidden_size, config.num_attention_heads
    if config.kind == "shaped":
        shaping: dict[str, Any] = {name: getattr(config, name) for name in ("tau0", "per_head", "float32")}
        block = shaped_block(width, heads, gamma=config.residual_gamma, **sizes, **shaping)
    else:
        block = (pre_ln_block if config.kind == "pre_ln" else post_ln_block)(width, heads, **sizes)
    variances = variances_of(config)
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            module.initial_std = getattr(variances, name.rpartition(".")[2]) ** 0.5
    return block


def variances_of(config: ShapedTransformerConfig) -> InitialVariances:
    """The initial variances that a configuration asks for."""
    width, shaped = config.hidden_size, config.kind == "shaped"
    if config.initial == "paper":
        paper = InitialVariances.paper(width)
        return paper if shaped else InitialVariances(**(vars(paper) | {"query": 1 / width, "key": 1 / width}))
    slope = 1 - 1 / sqrt(width) if shaped else 0.0
    law = InitialVariances.shaped if shaped else InitialVariances.standard
    return law(width, hidden=config.intermediate_size, gain=2 / (1 + slope**2))


def with_causal(config: ShapedTransformerConfig, causal: bool) -> ShapedTransformerConfig:
    """A copy that says whether the model is causal: another head may be built from the configuration too."""
    own = copy.deepcopy(config)
    own.causal = causal if own.causal is None else own.causal
    return own


class ShapedTransformerModel(ShapedTransformerPreTrainedModel):
    """Token ids (b, m) to tokens (b, m, n)."""

    def __init__(self, config: ShapedTransformerConfig) -> None:
        super().__init__(config)
        self.tokens: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList([block_of(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size) if config.kind == "pre_ln" else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of tokens."""
        return self.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Put another in its place."""
        self.tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """The last block's tokens; all of them, from the embeddings on, for `output_hidden_states`.

        Args:
            input_ids: (b, m); or `inputs_embeds`, (b, m, n), to which positions are added too.
            attention_mask: (b, keys), 1 where a token is seen, or (b, 1, m, keys).
            position_ids: (b, m); None: counted on from what is in the cache. Without a mask and a cache, numbers that
                start again at 0 begin another sequence, which sees nothing of those before.
            past_key_values: a cache, of growing or of fixed length.
            use_cache: whether to make one where none is given.
            output_attentions: refused; `ShapedSelfAttention.matrix` gives A.
        """
        require(not output_attentions, "Attentions are never formed; ShapedSelfAttention.matrix gives A of one layer.")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("Give input_ids or inputs_embeds, one of the two.")
        x = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        position_ids = self.checked_positions(x, position_ids, past_key_values)
        mask = self.mask_of(x, attention_mask, past_key_values, position_ids)
        places = places_of(past_key_values, x.shape[1])
        x = x + self.positions(position_ids)
        states = [x]
        for layer, block in enumerate(self.blocks):
            x = self.through(block, layer, x, mask, past_key_values, places)
            states += [x] if output_hidden_states else []
        x = self.norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=(*states[:-1], x) if output_hidden_states else None,
        )

    def through(self, block: nn.Module, layer: int, x: Tensor, mask: Any, past: Cache | None, places: Any) -> Tensor:
        """One block, whose keys and values go into the cache."""
        causal = bool(self.config.causal) and mask is None

        def remember(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            assert past is not None
            both: tuple[Tensor, Tensor] = past.update(key, value, layer)
            return both

        if self.gradient_checkpointing and self.training:
            require(past is None, "Gradient checkpointing would fill a cache twice. Nearest: use_cache=False.")
            recomputed: Tensor = self._gradient_checkpointing_func(block, x, mask, causal)
            return recomputed
        result: Tensor = block(x, mask, causal, cache=None if past is None else remember, positions=places)
        return result

    def mask_of(self, x: Tensor, mask: Tensor | None, past: Cache | None, position_ids: Tensor) -> Any:
        """What the mask function registered for shaped attention makes of it."""
        if self.config.causal:
            return create_causal_mask(self.config, x, mask, past, position_ids=position_ids)
        require(past is None, "A model that is not causal has no use for a cache. Nearest: use_cache=False.")
        return create_bidirectional_mask(self.config, x, mask)

    def checked_positions(self, x: Tensor, position_ids: Tensor | None, past: Cache | None) -> Tensor:
        """(b or 1, m), within what the model has embeddings for."""
        offset = 0 if past is None else past.get_query_offset(0)
        longest = self.config.max_position_embeddings
        if isinstance(offset, int):
            message = f"The model has {longest} positions (max_position_embeddings); got {offset + x.shape[1]} tokens."
            require(offset + x.shape[1] <= longest or position_ids is not None, message)
        if position_ids is None:
            return (torch.arange(x.shape[1], device=x.device) + offset)[None]
        if position_ids.device.type == "cpu" and not torch.compiler.is_compiling():  # others would have to wait
            last = int(position_ids.max())
            require(
                last < longest, f"The model has {longest} positions (max_position_embeddings); got position {last}."
            )
        return position_ids


class ShapedTransformerForMaskedLM(ShapedTransformerPreTrainedModel):
    """Logits (b, m, vocab) of the token at each place."""

    def __init__(self, config: ShapedTransformerConfig) -> None:
        config = with_causal(config, False)
        super().__init__(config)
        self.transformer = ShapedTransformerModel(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        """The head."""
        return self.head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Put another in its place."""
        self.head = value

    @can_return_tuple
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, labels: Tensor | None = None,
        **options: Any,
    ) -> MaskedLMOutput:  # fmt: skip
        """Logits, and the mean cross-entropy where `labels` (b, m) is not −100."""
        counted = {name: options.pop(name) for name in ("num_items_in_batch",) if name in options}
        states = self.transformer(input_ids, attention_mask, return_dict=True, **options)
        logits = self.head(states.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **counted)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=states.hidden_states)


class ShapedTransformerForCausalLM(ShapedTransformerPreTrainedModel, GenerationMixin):
    """Logits (b, m, vocab) of the token after each place."""

    create_masks_for_generate = staticmethod(masks_for_generate)

    def __init__(self, config: ShapedTransformerConfig) -> None:
        config = with_causal(config, True)
        message = (
            "A model of the next token must be causal; got causal=False. Nearest: from_pretrained(…, causal=True)."
        )
        require(bool(config.causal), message)
        super().__init__(config)
        self.transformer = ShapedTransformerModel(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        """The head."""
        return self.head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Put another in its place."""
        self.head = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the last `logits_to_keep` places, 0 for all, and the mean cross-entropy of `labels` (b, m)."""
        counted = {name: options.pop(name) for name in ("num_items_in_batch",) if name in options}
        states = self.transformer(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            return_dict=True,
            **options,
        )
        logits = self.head(states.last_hidden_state[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **counted)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=states.past_key_values, hidden_states=states.hidden_states
        )


class ShapedTransformerForSequenceClassification(ShapedTransformerPreTrainedModel):
    """Logits (b, num_labels) of the mean of the visible tokens."""

    accepts_loss_kwargs = False  # the loss is a mean over the texts of a batch, whatever the Trainer accumulates

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
        """Logits, and the loss of `labels` (b,): classes, or numbers where there is one label."""
        options.pop("num_items_in_batch", None)
        states = self.transformer(input_ids, attention_mask, return_dict=True, **options)
        logits = self.classifier(mean_of_visible(states.last_hidden_state, attention_mask))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=states.hidden_states)


def mean_of_visible(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """(b, n), over the tokens that a mask (b, m) shows."""
    if attention_mask is None:
        return x.mean(1)
    require(attention_mask.dim() == 2, f"attention_mask must be (batch, tokens); got {tuple(attention_mask.shape)}.")
    seen = attention_mask.to(x.dtype)[..., None]
    return (x * seen).sum(1) / seen.sum(1).clamp(min=1)


AutoModel.register(ShapedTransformerConfig, ShapedTransformerModel)
AutoModelForMaskedLM.register(ShapedTransformerConfig, ShapedTransformerForMaskedLM)
AutoModelForCausalLM.register(ShapedTransformerConfig, ShapedTransformerForCausalLM)
AutoModelForSequenceClassification.register(ShapedTransformerConfig, ShapedTransformerForSequenceClassification)
