"""The network itself, in torch: the reference that the chain is tested against, and what one trains."""

from limitformer.errors import MissingExtraError

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingExtraError("torch", "torch") from error

from limitformer.nn.attention import Attention as Attention
from limitformer.nn.feedforward import Feedforward as Feedforward
from limitformer.nn.network import Layer as Layer
from limitformer.nn.network import Network as Network
from limitformer.nn.norm import Norm as Norm
from limitformer.nn.simulate import simulate as simulate
