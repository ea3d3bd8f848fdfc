"""`limit`: from a model to its infinite-depth limit."""

from typing import overload

from limitformer.base.errors import InputError
from limitformer.covariance.limit.covariance import CovarianceLimit, covariance_limit
from limitformer.covariance.limit.flow import CovarianceFlow, flows
from limitformer.models import SphereModel, Transformer
from limitformer.sphere.limit import TokenLimit


@overload
def limit(model: Transformer) -> CovarianceLimit | CovarianceFlow: ...


@overload
def limit(model: SphereModel) -> TokenLimit: ...


def limit(model: Transformer | SphereModel) -> CovarianceLimit | CovarianceFlow | TokenLimit:
    """Return the infinite-depth limit of `model`: covariances for a `Transformer`, otherwise tokens on the sphere.

    A `CovarianceLimit`, the SDE of λ² + γ² = 1, has the horizon depth/width; a `CovarianceFlow`, the ODE of λ = 1 and
    γ = 1/√depth, has the horizon 1; a `TokenLimit` has none, and `simulate` needs `horizon`. Some limits of covariances
    are theorems and others derivations that are tested: the attribute `basis` says which.

    Raises:
        InputError: not a model.
        NoLimitError: a part of a `Transformer` whose contribution to a layer does not shrink with the width, or one
            for which no limit is proven or derived; the message names it.

    >>> import limitformer as lf
    >>> lf.limit(lf.Transformer(width=200, depth=150, gamma=0.5, attention=lf.ShapedAttention(tau0=1.0))).horizon
    0.75
    """
    if isinstance(model, Transformer):
        return CovarianceFlow(model=model) if flows(model) else covariance_limit(model)
    if isinstance(model, SphereModel):
        return TokenLimit(model=model)
    stock = isinstance(model, str | dict) or hasattr(model, "model_type")
    hint = " Nearest: limitformer.check, for a configuration of transformers." if stock else ""
    raise InputError(f"limit needs a model; got {type(model).__name__}.{hint}")
