"""Random networks, every weight drawn: the reference that the chain is tested against."""

from limitformer.nn.drawn.network import Attention as Attention
from limitformer.nn.drawn.network import Feedforward as Feedforward
from limitformer.nn.drawn.network import Layer as Layer
from limitformer.nn.drawn.network import Network as Network
from limitformer.nn.drawn.network import Norm as Norm
from limitformer.nn.drawn.network import OneMatrix as OneMatrix
from limitformer.nn.drawn.simulate import simulate as simulate
