"""Weightless networks: anybody's architecture, forward and backward, exact in law, with no weight drawn."""

from limitformer.base.extras import of_extra as _of_extra

with _of_extra("torch"):
    import torch as _torch  # noqa: F401

    from limitformer.weightless.law import LawTable as LawTable
    from limitformer.weightless.law import law as law
    from limitformer.weightless.laws import Law as Law
    from limitformer.weightless.shapes import shapes as shapes
    from limitformer.weightless.simulate import simulate as simulate
