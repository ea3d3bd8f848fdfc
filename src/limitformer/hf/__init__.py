"""Shaped attention for Hugging Face models: stock models, and the paper's architecture with Auto classes."""

from limitformer.base.extras import of_extra as _of_extra

with _of_extra("hf"):
    import transformers as _transformers  # noqa: F401

    from limitformer.hf.attention import ATTENTION as ATTENTION
    from limitformer.hf.checkpoint import load_shaped as load_shaped
    from limitformer.hf.configuration import ShapedTransformerConfig as ShapedTransformerConfig
    from limitformer.hf.heads import ShapedTransformerForCausalLM as ShapedTransformerForCausalLM
    from limitformer.hf.heads import ShapedTransformerForMaskedLM as ShapedTransformerForMaskedLM
    from limitformer.hf.heads import (
        ShapedTransformerForSequenceClassification as ShapedTransformerForSequenceClassification,
    )
    from limitformer.hf.shaping import Shaping as Shaping
    from limitformer.hf.shaping import shape_model as shape_model
    from limitformer.hf.transformer import ShapedTransformerModel as ShapedTransformerModel
