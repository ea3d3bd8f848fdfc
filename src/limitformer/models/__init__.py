"""Frozen, validated declarations of models. They compute nothing."""

from limitformer.models.activations import *  # noqa: F403  its `__all__`
from limitformer.models.attention import Attention as Attention
from limitformer.models.attention import ShapedAttention as ShapedAttention
from limitformer.models.attention import SoftmaxAttention as SoftmaxAttention
from limitformer.models.feedforward import GELU as GELU
from limitformer.models.feedforward import Elementwise as Elementwise
from limitformer.models.feedforward import Feedforward as Feedforward
from limitformer.models.feedforward import Gated as Gated
from limitformer.models.feedforward import OneMatrix as OneMatrix
from limitformer.models.feedforward import ReLU as ReLU
from limitformer.models.feedforward import ShapedReLU as ShapedReLU
from limitformer.models.feedforward import ShapedSmooth as ShapedSmooth
from limitformer.models.mixing import Mixing as Mixing
from limitformer.models.norm import LayerNorm as LayerNorm
from limitformer.models.norm import Norm as Norm
from limitformer.models.norm import RadialNorm as RadialNorm
from limitformer.models.norm import RMSNorm as RMSNorm
from limitformer.models.serial import from_json as from_json
from limitformer.models.serial import to_json as to_json
from limitformer.models.sphere import HybridTransformer as HybridTransformer
from limitformer.models.sphere import SphereModel as SphereModel
from limitformer.models.sphere import StochasticTransformer as StochasticTransformer
from limitformer.models.start import Start as Start
from limitformer.models.start import as_start as as_start
from limitformer.models.start import equicorrelated as equicorrelated
from limitformer.models.start import from_covariance as from_covariance
from limitformer.models.start import from_tokens as from_tokens
from limitformer.models.text import from_text as from_text
from limitformer.models.transformer import Transformer as Transformer
