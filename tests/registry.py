"""A registry of models. Each is tested against the network and has a wrong twin."""

import limitformer as lf

SMALL = {"width": 16, "depth": 8, "gamma": 0.5}
HALF = {"width": 8, "depth": 8, "gamma": 0.5}

SHAPED = lf.ShapedAttention(tau0=1.0)
SOFTMAX = lf.SoftmaxAttention()
SHAPED_RELU = lf.ShapedReLU(c_plus=0.2, c_minus=-1.0)


def without(**intervention) -> lf.ShapedAttention:
    """Return shaped attention with one part removed."""
    return lf.ShapedAttention(tau0=1.0, **intervention)


# Name → everything but the size.
PARTS = {
    "attention": {"attention": SHAPED},
    "feed-forward": {"feedforward": SHAPED_RELU},
    "both": {"attention": SHAPED, "feedforward": SHAPED_RELU},
    "no identity": {"attention": without(identity=False), "feedforward": SHAPED_RELU},
    "no centring": {"attention": without(center=False), "feedforward": SHAPED_RELU},
    "standard temperature": {"attention": without(temperature="standard"), "feedforward": SHAPED_RELU},
    "unshaped": {"attention": SOFTMAX, "feedforward": lf.ReLU()},
    "GELU, wide": {"attention": SOFTMAX, "feedforward": lf.GELU(hidden=24)},
    "Pre-LN": {"attention": SOFTMAX, "feedforward": SHAPED_RELU, "norm": "pre"},
    "Post-LN": {"attention": SOFTMAX, "feedforward": SHAPED_RELU, "norm": "post"},
    "Pre-RMS": {"attention": SOFTMAX, "feedforward": SHAPED_RELU, "norm": lf.RMSNorm(placement="pre")},
    "Post-RMS": {"attention": SOFTMAX, "feedforward": SHAPED_RELU, "norm": lf.RMSNorm(placement="post")},
    "four heads": {"attention": lf.SoftmaxAttention(heads=4), "feedforward": SHAPED_RELU},
    "heads narrower than tokens": {"attention": lf.ShapedAttention(tau0=0.5, heads=3, head_dim=2)},
    "head_dim 1": {"attention": lf.ShapedAttention(tau0=0.5, head_dim=1)},
    "causal": {"attention": lf.ShapedAttention(tau0=0.5), "feedforward": SHAPED_RELU, "mask": "causal"},
    "causal, unshaped, Pre-LN": {
        "attention": SOFTMAX,
        "feedforward": lf.ReLU(),
        "mask": "causal",
        "norm": "pre",
    },
    "lambda = 1": {"attention": SHAPED, "feedforward": SHAPED_RELU, "lam": 1.0},
    "one matrix": {"feedforward": lf.OneMatrix(activation=lf.ReLU()), "lam": 0.9},
}

MODELS = {name: lf.Transformer(**SMALL, **parts) for name, parts in PARTS.items()}
HALF_WIDTH = {name: lf.Transformer(**HALF, **parts) for name, parts in PARTS.items()}
