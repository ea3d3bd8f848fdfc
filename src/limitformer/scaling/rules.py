"""Rules of parametrisation as data: how weights, learning rates and multipliers change with the size of a network.

Every entry is a factor between a network and its base, as powers of three ratios:

  m_in    fan-in over that of the base,
  m_out   fan-out over that of the base,
  m_L     depth over that of the base.

Roles of parameters, by the dimensions that grow with the width (as in the package mup):

  input   a matrix whose fan-out grows: embeddings, the first map,
  hidden  a matrix of which both dimensions grow,
  output  a matrix whose fan-in grows: the head, routers, keys and values that all heads share,
  vector  biases and gains of a dimension that grows,
  fixed   no dimension grows.

"mup" is Table 8 of Tensor Programs V, the form that allows tied embeddings: an output weight keeps its variance, and
the forward pass has a multiplier 1/m_in instead. With two matrices of growth n per side, the table's factors 1/fan_in
and fan_out are m_in^-1 and m_out here, as the base has the factor 1 (the package mup has the same ratios).

Keys and values of a fixed number of columns, W x of n entries of x, have the rule of an output although attention and
not the loss follows. A step may change x along the rows of W, by Wᵀe/σ, whose entries are of size 1 where σ is the
standard deviation of W; it changes W x by W Wᵀe/σ ≈ n σ e. This is of size 1 for σ = 1/n. For a hidden matrix's
σ = n^(−1/2) it is √n, so that one step moves keys and values further the wider the network is. The price is that at
initialisation they fall like n^(−1/2), as the logits of the head do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

INPUT, HIDDEN, OUTPUT, VECTOR, FIXED = ROLES = ("input", "hidden", "output", "vector", "fixed")
SGD, ADAM = "sgd", "adam"  # columns of the tables


@dataclass(frozen=True)
class Powers:
    """The factor m_in^fan_in · m_out^fan_out · m_L^depth."""

    fan_in: float = 0.0
    fan_out: float = 0.0
    depth: float = 0.0

    def factor(self, fan_in: float, fan_out: float, depth: float) -> float:
        """Return the factor at these ratios."""
        return float(fan_in**self.fan_in * fan_out**self.fan_out * depth**self.depth)


ONE = Powers()
Table = Mapping[str, Powers]  # by role; a role that is not there has the factor 1


@dataclass(frozen=True)
class StepTable:
    """The factors of one optimiser.

    Attributes:
        rate, decay: of the learning rate and the weight decay, by role.
        rate_inside: another factor of the rates of all parameters in residual blocks.
        eps: of ε of all parameters, where fan-in is the largest ratio of the parameter's dimensions: under muP the
            gradients of tables, heads and gains fall with the width, too. Outside residual blocks without the depth.
    """

    rate: Table = field(default_factory=dict)
    decay: Table = field(default_factory=dict)
    rate_inside: Powers = ONE
    eps: Powers = ONE


@dataclass(frozen=True)
class ScalingRule:
    """A rule of parametrisation.

    Attributes:
        name: its public name.
        source: where the table is published.
        std: factors of the standard deviation at initialisation, by role.
        multiplier: factors of the forward pass of a matrix, by role.
        steps: by column; an optimiser whose column is not there has no entry in the publication.
        branch: the factor of each residual branch.
        scales_attention: whether logits are q·k/d instead of q·k/√d.
        limits: what the publication assumes of another depth.
    """

    name: str
    source: str
    std: Table = field(default_factory=dict)
    multiplier: Table = field(default_factory=dict)
    steps: Mapping[str | None, StepTable] = field(default_factory=dict)
    branch: Powers = ONE
    scales_attention: bool = False
    limits: str = ""


MUP = (
    "Yang et al., Tensor Programs V, arXiv 2203.03466, Table 8 and Definition 4.1 (attention); github.com/microsoft/mup"
)
MUP_SOURCE = f"{MUP}; ε of Adam: Dey et al., arXiv 2505.01618, eq. 40, and github.com/EleutherAI/nanoGPT-mup"
COMPLETEP_SOURCE = "Dey et al., Don't be lazy: CompleteP, arXiv 2505.01618, Table 1, α = 1; head size fixed"
DEPTH_MUP_SOURCE = (
    "Yang et al., Tensor Programs VI, arXiv 2310.02244: branches a/√L, rates η of SGD and η/√L of Adam; "
    "ε and weight decay: Dey et al., arXiv 2505.01618, Table 1, α = ½"
)
PRE_NORM = "derived for Transformers whose branches begin with a norm (pre-LN)"

STD = {HIDDEN: Powers(fan_in=-0.5)}
MULTIPLIER = {OUTPUT: Powers(fan_in=-1.0)}
BY_FAN_IN = {HIDDEN: Powers(fan_in=-1.0)}


def adam_table(alpha: float | None) -> StepTable:
    """Return the table of Adam: μP, and with α that of branches m_L^-α."""
    return StepTable(
        rate=BY_FAN_IN,
        decay={HIDDEN: Powers(fan_in=1.0)},
        rate_inside=ONE if alpha is None else Powers(depth=alpha - 1.0),
        eps=Powers(fan_in=-1.0, depth=-(alpha or 0.0)),
    )


def sgd_table() -> StepTable:
    """Return the table of SGD; the weight decay, which torch multiplies by the rate, cancels its factor."""
    rate = {
        INPUT: Powers(fan_out=1.0),
        VECTOR: Powers(fan_out=1.0),
        OUTPUT: Powers(fan_in=1.0),
        HIDDEN: Powers(fan_in=-1.0, fan_out=1.0),
    }
    return StepTable(rate=rate, decay={k: Powers(-p.fan_in, -p.fan_out) for k, p in rate.items()})


RULES: Mapping[str, ScalingRule] = {
    "standard": ScalingRule(
        "standard", "the model's own code at each size", steps={k: StepTable() for k in (SGD, ADAM, None)}
    ),
    "mup": ScalingRule(
        "mup",
        MUP_SOURCE,
        std=STD,
        multiplier=MULTIPLIER,
        steps={SGD: sgd_table(), ADAM: adam_table(None)},
        scales_attention=True,
        limits="for growing width: it has no entries for another depth",
    ),
    "completep": ScalingRule(
        "completep",
        COMPLETEP_SOURCE,
        std=STD,
        multiplier=MULTIPLIER,
        steps={ADAM: adam_table(1.0)},
        branch=Powers(depth=-1.0),
        scales_attention=True,
        limits=PRE_NORM,
    ),
    "depth-mup": ScalingRule(
        "depth-mup",
        DEPTH_MUP_SOURCE,
        std=STD,
        multiplier=MULTIPLIER,
        steps={SGD: sgd_table(), ADAM: adam_table(0.5)},
        branch=Powers(depth=-0.5),
        scales_attention=True,
        limits=f"{PRE_NORM}; its theory has one layer in each branch",
    ),
}
