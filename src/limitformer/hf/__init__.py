"""Shaped attention for the stock models of Hugging Face."""

from limitformer.base.extras import of_extra as _of_extra

with _of_extra("hf"):
    import transformers as _transformers  # noqa: F401

    from limitformer.hf.attention import ATTENTION as ATTENTION
    from limitformer.hf.checkpoint import load_shaped as load_shaped
    from limitformer.hf.settings import Shaping as Shaping
    from limitformer.hf.shaping import shape_model as shape_model
