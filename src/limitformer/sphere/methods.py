"""The methods that a model on the sphere allows, and the choice between them."""

from limitformer.base.errors import require
from limitformer.models import SphereModel
from limitformer.models.kinds import of_kind
from limitformer.paths.arrays import pairs_of
from limitformer.sphere.layer import ONE_NUMBER
from limitformer.sphere.options import Method, SphereOptions
from limitformer.sphere.tokens.logits import query_constants, signed_beta


def methods_of(model: SphereModel, law: str, *, limit: bool = False) -> list[Method]:
    """Return the methods that the model and the law of its values allow, the cheapest first."""
    invariant = (of_kind(model, ONE_NUMBER) or law == "gaussian") and (model.is_isotropic or model.is_fresh)
    methods: list[Method] = ["coordinates"]
    if invariant and model.tokens < model.dim:
        methods.insert(0, "gram")
    one_head = query_constants(model).heads == 1 or (limit and has_averages(model))
    has_kernel = model.moves_alike or model.attention == "softmax"  # of the overlap
    if invariant and model.tokens == 2 and one_head and has_kernel:
        methods.insert(0, "overlap")
    return methods


def has_averages(model: SphereModel) -> bool:
    """Whether steps of the limit of two tokens average attention over its draws (`pair.averaged`)."""
    return model.is_fresh and model.tokens == 2 and model.attention == "softmax" and not model.is_causal


def can_merge(model: SphereModel, law: str) -> bool:
    """Whether tokens that have merged into two points continue as a pair (`stopping.merging`)."""
    gaussian = law == "gaussian" and not of_kind(model, ONE_NUMBER)
    isotropic = model.attention == "softmax" and model.is_isotropic and not (model.is_fresh or model.is_causal)
    return gaussian and isotropic and signed_beta(model) >= 0


def chosen_method(model: SphereModel, law: str, options: SphereOptions, *, limit: bool = False) -> Method:
    """Return the requested method or the cheapest one; raise `InputError` if the model does not allow it."""
    allowed, method, keep = methods_of(model, law, limit=limit), options.method, options.keep
    require(
        keep != "overlap" or model.tokens > 1,
        'One token has no overlap with another. Nearest: keep="outcome" or keep="tokens".',
    )
    if options.pairs is not None:
        pairs_of(options.pairs, model.tokens)
    if keep == "tokens":
        allowed = [m for m in allowed if m == "coordinates"]
    if method is None:
        return allowed[0]
    needs = {
        "overlap": "two tokens, QᵀK = I (or one head, drawn queries and softmax), and Gaussian values or a hybrid "
        "model",
        "gram": "tokens < dim, QᵀK = I or drawn, and Gaussian values or a hybrid model",
        "coordinates": "nothing",
    }
    require(
        method in allowed,
        f"method {method!r} needs {needs[method]}"
        + (", and cannot keep tokens" if keep == "tokens" else "")
        + f"; this model allows {', '.join(map(repr, allowed))}.",
    )
    return method
