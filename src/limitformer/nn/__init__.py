"""Networks in torch: random ones, the reference that the chain is tested against, and blocks that train."""

# ruff: noqa: E402 - what an extra installs is required first

from limitformer.base.extras import require_packages as _require_packages

_require_packages("torch", "torch")

from limitformer.nn import drawn as drawn
from limitformer.nn.attention_matrix import Logits as Logits
from limitformer.nn.attention_matrix import attention_matrix as attention_matrix
from limitformer.nn.attention_matrix import entropy as entropy
from limitformer.nn.blocks import Block as Block
from limitformer.nn.blocks import FeedForward as FeedForward
from limitformer.nn.blocks import Stack as Stack
from limitformer.nn.blocks import post_ln_block as post_ln_block
from limitformer.nn.blocks import pre_ln_block as pre_ln_block
from limitformer.nn.blocks import shaped_block as shaped_block
from limitformer.nn.blocks import stack_of as stack_of
from limitformer.nn.blocks import without_decay as without_decay
from limitformer.nn.drawn.network import Layer as Layer
from limitformer.nn.drawn.network import Network as Network
from limitformer.nn.drawn.simulate import simulate as simulate
from limitformer.nn.gains import Gain as Gain
from limitformer.nn.gains import Keep as Keep
from limitformer.nn.gains import Learn as Learn
from limitformer.nn.gains import Recover as Recover
from limitformer.nn.gains import TrainableShapedReLU as TrainableShapedReLU
from limitformer.nn.gains import gains as gains
from limitformer.nn.initialisation import InitialVariances as InitialVariances
from limitformer.nn.initialisation import draw as draw
from limitformer.nn.rounding import RoundingWarning as RoundingWarning
from limitformer.nn.self_attention import ShapedSelfAttention as ShapedSelfAttention
from limitformer.nn.shaped_attention import shaped_attention as shaped_attention
from limitformer.nn.sphere import SphereStack as SphereStack
from limitformer.nn.strengths import Residual as Residual
from limitformer.nn.visibility import Visibility as Visibility
from limitformer.nn.visibility import visibility as visibility
