r"""The paper's own architecture as a model of `transformers`, with caches [ST, App. D].

x = token embedding + position embedding, each entry N(0, ½), so that tokens start with norm √n; then blocks of
`limitformer.nn` ("shaped", or the Pre-LN and Post-LN that it is compared with); then, for Pre-LN, a LayerNorm. The
paper does not define the embeddings.

`Shaping` of a stock model cannot replace it: a shaped BERT keeps the LayerNorm of its embeddings, its biases and the
transform of its head, while GPT-2, Llama and ViT keep their last norm. And no stock family has the bidirectional Pre-LN
and Post-LN networks of [ST, App. D], which differ from the shaped one only in their blocks.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, DynamicCache
from transformers.cache_utils import Cache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from limitformer.base.errors import InputError, require
from limitformer.hf.attention import refuse_packed, wants_attention
from limitformer.hf.caches import NAME, query_positions, require_cache, takes_either_name
from limitformer.hf.configuration import ShapedTransformerConfig
from limitformer.hf.initial import ShapedTransformerPreTrainedModel, block_of


class ShapedTransformerModel(ShapedTransformerPreTrainedModel):
    """The architecture without a head: token ids (b, m) to tokens (b, m, n)."""

    def __init__(self, config: ShapedTransformerConfig) -> None:
        super().__init__(config)
        self.tokens: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList([block_of(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size) if config.kind == "pre_ln" else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.tokens = value

    @takes_either_name
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | list[int] | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Return the last block's tokens, and all tokens from the embeddings on for `output_hidden_states`.

        In a model of 16 bits with `float32`, the tokens between blocks are in float32.

        Args:
            input_ids: (b, m); or `inputs_embeds`, (b, m, n), to which positions are added too.
            attention_mask: (b, keys), 1 where a token is seen, or (b, 1, m, keys).
            position_ids: (b, m); None counts from the end of the cache. Without a mask and a cache, numbers that
                restart at 0 begin another sequence, which does not see earlier ones.
            cache: a cache of growing or fixed length, also as `past_key_values`; not with positions that restart.
            use_cache: whether to make a cache if there is none.
            output_attentions: whether to form and return A of all layers, or a list of layers.
        """
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("Give input_ids or inputs_embeds, one of the two.")
        require_cache(cache)
        x = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if cache is not None and attention_mask is None:
            refuse_packed(position_ids)
        position_ids = self.checked_positions(x, position_ids, cache)
        mask = self.mask_of(x, attention_mask, cache, position_ids)
        query_places = query_positions(cache, x.shape[1])
        x = x + self.positions(position_ids)
        attentions: list[Tensor] = []
        states, dtype = [x], x.dtype
        for layer, block in enumerate(self.blocks):
            attention: Any = block.attention
            wanted = wants_attention(output_attentions, layer, len(self.blocks))
            attention.shown = attentions.append if wanted else None
            x = self.run_block(block, layer, x, mask, cache, query_places)
            states += [x] if output_hidden_states else []
            attention.shown = None
        x = self.norm(x.to(dtype))
        named: dict[str, Any] = {NAME: cache}
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=(*states[:-1], x) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
            **named,
        )

    def run_block(self, block: Any, layer: int, x: Tensor, mask: Any, past: Cache | None, query_places: Any) -> Tensor:
        """Run one block, whose keys and values go into the cache."""
        causal = bool(self.config.causal) and mask is None

        def extend_cache(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            assert past is not None
            both: tuple[Tensor, Tensor] = past.update(key, value, layer)
            return both

        if self.gradient_checkpointing and self.training:
            require(past is None, "Gradient checkpointing would fill a cache twice. Nearest: use_cache=False.")
            wanted = block.attention.shown is not None
            require(not wanted, "Gradient checkpointing keeps no attentions. Nearest: output_attentions=False.")
            recomputed: Tensor = self._gradient_checkpointing_func(block, x, mask, causal)
            return recomputed
        result: Tensor = block(x, mask, causal, cache=None if past is None else extend_cache, positions=query_places)
        return result

    def mask_of(self, x: Tensor, mask: Tensor | None, past: Cache | None, position_ids: Tensor) -> Any:
        """Return the mask by the mask function that is registered for shaped attention."""
        if self.config.causal:
            return create_causal_mask(self.config, x, mask, past, position_ids=position_ids)
        require(past is None, "A model that is not causal has no use for a cache. Nearest: use_cache=False.")
        return create_bidirectional_mask(self.config, x, mask)

    def checked_positions(self, x: Tensor, position_ids: Tensor | None, past: Cache | None) -> Tensor:
        """Return positions (b or 1, m); raise `InputError` if the model has no embedding for one."""
        offset = 0 if past is None else past.get_query_offset(0)
        longest = self.config.max_position_embeddings
        if isinstance(offset, int):
            message = f"The model has {longest} positions (max_position_embeddings); got {offset + x.shape[1]} tokens."
            require(offset + x.shape[1] <= longest or position_ids is not None, message)
        if position_ids is None:
            return (torch.arange(x.shape[1], device=x.device) + offset)[None]
        if position_ids.device.type == "cpu" and not torch.compiler.is_compiling():  # a GPU would have to be waited for
            last = int(position_ids.max())
            require(
                last < longest, f"The model has {longest} positions (max_position_embeddings); got position {last}."
            )
        return position_ids


AutoModel.register(ShapedTransformerConfig, ShapedTransformerModel)
