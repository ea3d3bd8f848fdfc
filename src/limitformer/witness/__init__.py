"""The witness: a run proves itself on the user's own module, in plain PyTorch."""

from limitformer.witness.compare import DRAWN, NOT_WITNESSED, WITNESSED, Witness
from limitformer.witness.training import witness_steps
from limitformer.witness.witness import FULL, witness_pass

__all__ = ["DRAWN", "FULL", "NOT_WITNESSED", "WITNESSED", "Witness", "witness_pass", "witness_steps"]
