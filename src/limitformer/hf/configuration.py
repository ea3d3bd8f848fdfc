"""The configuration of the paper's architecture, with the names of `transformers`."""

import copy
from typing import Any, ClassVar, Literal, get_args

from transformers import AutoConfig, PreTrainedConfig

from limitformer.base.errors import require, require_count, require_real
from limitformer.hf.caches import NAME
from limitformer.nn.initialisation import dim_of_heads

Kind = Literal["shaped", "pre_ln", "post_ln"]
Initial = Literal["law", "paper"]


class ShapedTransformerConfig(PreTrainedConfig):
    """A shaped Transformer, or its Pre-LN or Post-LN counterpart [ST, App. D]; defaults are the paper's.

    Args:
        vocab_size: size of the vocabulary.
        hidden_size: n.
        num_hidden_layers: number of blocks.
        num_attention_heads: h, dividing n.
        num_key_value_heads: g, dividing h; None means h.
        intermediate_size: n_h.
        max_position_embeddings: the longest sequence.
        kind: "shaped", "pre_ln" or "post_ln".
        residual_gamma: start value of γ, for "shaped".
        tau0: τ₀, for "shaped".
        per_head: whether each head has its own γ₁ and γ₂, for "shaped"; in the paper a layer has two numbers.
        float32: whether softmax − γ₂C̄ is computed in float32 for any dtype, for "shaped".
        causal: whether a token sees only itself and earlier tokens; None: as the head needs.
        initial: "law" for variances by fan-in, which preserve the norm of tokens at every depth, or "paper" for 1/n
            for any fan-in [ST, App. D.1].
        tie_word_embeddings: whether a language model's head is the embedding of tokens instead of a separate map.
    """

    model_type = "shaped_transformer"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [NAME]  # a list, to which the Trainer adds

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 768,
        num_hidden_layers: int = 18,
        num_attention_heads: int = 8,
        num_key_value_heads: int | None = None,
        intermediate_size: int = 3072,
        max_position_embeddings: int = 128,
        kind: Kind = "shaped",
        residual_gamma: float = 0.2,
        tau0: float = 1.0,
        per_head: bool = False,
        float32: bool = False,
        causal: bool | None = None,
        initial: Initial = "law",
        tie_word_embeddings: bool = False,
        **options: Any,
    ) -> None:
        self.vocab_size = require_count("vocab_size", vocab_size)
        self.hidden_size = require_count("hidden_size", hidden_size)
        self.num_hidden_layers = require_count("num_hidden_layers", num_hidden_layers)
        self.num_attention_heads = require_count("num_attention_heads", num_attention_heads)
        dim_of_heads(self.hidden_size, self.num_attention_heads, None)
        self.num_key_value_heads = self.num_attention_heads if num_key_value_heads is None else num_key_value_heads
        divides = num_attention_heads % require_count("num_key_value_heads", self.num_key_value_heads) == 0
        message = f"num_key_value_heads must divide num_attention_heads; got {num_key_value_heads}."
        require(divides, message)
        self.intermediate_size = require_count("intermediate_size", intermediate_size)
        self.max_position_embeddings = require_count("max_position_embeddings", max_position_embeddings)
        self.kind, self.initial = kind, initial
        check_words(self)
        gamma = require_real("residual_gamma", residual_gamma)
        require(0 <= gamma <= 1, f"residual_gamma must lie in [0, 1]; got {gamma}.")
        self.residual_gamma, self.tau0 = gamma, require_real("tau0", tau0)
        self.per_head, self.float32 = per_head, float32
        require(self.tau0 > 0, f"tau0 must be positive; got {tau0}.")
        self.causal = causal
        self.tie_word_embeddings = tie_word_embeddings
        super().__init__(**options)

    def validate(self) -> None:
        """Validate as the library does, except that `output_attentions` does not need "eager" attention."""
        others = copy.copy(self)
        others.output_attentions = False
        library: Any = super(ShapedTransformerConfig, others)  # the method is made by a decorator
        library.validate()


def check_words(config: ShapedTransformerConfig) -> None:
    """Raise `InputError` unless `kind` and `initial` are known words, even if they were set later."""
    for name, words in (("kind", get_args(Kind)), ("initial", get_args(Initial))):
        value = getattr(config, name)
        require(value in words, f"{name} must be one of {', '.join(words)}; got {value!r}.")


AutoConfig.register(ShapedTransformerConfig.model_type, ShapedTransformerConfig)
