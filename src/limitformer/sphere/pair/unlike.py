r"""Two tokens with different attention weights: drawn queries and keys, a causal mask, unequal clusters.

Their overlap is still a Markov chain. With weights (1 + Tᵢ)/2 of token i on itself and (1 − Tᵢ)/2 on the other, sum s
and difference d of the tokens (`pair.chain`) receive

  A(X¹) + A(X²) = s + θd,    A(X¹) − A(X²) = φd,    θ = (T₁ − T₂)/2,   φ = (T₁ + T₂)/2.

* **Drawn queries**, G = QᵀK: Tᵢ = tanh(P ± Q) with P = (β/4) dᵀGd, Q = (β/4) sᵀGd. For i.i.d. N(0, τ²) entries these
  are independent normals with deviations b(1 − z)/2 and b√(1 − z²)/2, b = βτ. For a product of two matrices with k
  rows both are multiplied by the same √(χ²_k/k). θ = ½ tanh(2Q)(1 − T₁T₂) keeps its digits near ±1.
* **Clusters** of unequal size: `stopping.two_clusters`.
* **Causal mask**: the first token attends only to itself, T₁ = 1; the second has T₂ = tanh(β(1 − z)/2), or tanh(P − Q).

**The step.** In the basis of the unit vectors d̂ and ŝ, the direction e in which V d̂ leaves their plane, and the rest,
with normals h, h′, g₁, g₂, g₃ and ρ² ~ χ²_{dim−2}, χ² ~ χ²_{dim−3},

  d′/|d| = (1 + cφh, cφh′, cφρ, 0),
  s′/|s| = (cg₁ + cϑh, 1 + cg₂ + cϑh′, cg₃ + cϑρ, cχ),        ϑ = θ|d|/|s|,   c = σ/√L.

Their lengths and their product give w′ as in `pair.chain`, with Q = |big′|² and S∥, S⊥ the squares of small′ along and
across big′. With a causal mask ϑ grows without bound toward −1, so the tokens leave even −1 itself, w = 0. In all other
cases w = 0 is absorbing.
"""

import numpy as np

from limitformer.numerics.elementary import U64, exponential
from limitformer.numerics.kernels import inlined, kernel, strict_kernel
from limitformer.numerics.random import box_muller, words_of
from limitformer.sphere.pair.chi_squares import blocks_needed, chi_squares

LEAST_FACTOR = 1e-150  # of w in a layer, as in `pair.chain`
SMALL_RATIO = 1e-8  # |s|/|d|, or |d|/|s|, below which tanh is its argument to 16 digits
LEAST_START = 1e-200  # w that is negligible relative to the change by a causal mask
NORMALS = 2  # blocks of four


@kernel
def advance_unlike(constants, k0, k1, layer, pairs):
    """Apply one layer to all running replicas."""
    degrees, running = max(constants.dim - 3, 0), pairs.running[0]
    across, scales = blocks_needed(degrees), blocks_needed(constants.head_dim)
    block = layer * U64(NORMALS + across + scales)
    after = block + U64(NORMALS)
    chi_squares(degrees, k0, k1, pairs.replica, after, running, pairs.first, pairs.second)
    if constants.head_dim > 0:
        after += U64(across)
        chi_squares(constants.head_dim, k0, k1, pairs.replica, after, running, pairs.scale, pairs.unused)
    move_unlike(constants, k0, k1, block, pairs)


@inlined
def hyperbolic_tangent(x):
    e = exponential(-2.0 * abs(x))
    t = (1.0 - e) / (1.0 + e)
    return t if x >= 0.0 else -t


@inlined
def drawn_logits(beta, below, w, scale, zeta, eta):
    """Return P, and Q over the smaller of |s|/|d| and its inverse, from two normals."""
    return 0.5 * beta * below * scale * zeta, beta / (1.0 + w) * scale * eta


@inlined
def tangent_over(ratio, q):
    """Return tanh(2·ratio·q)/ratio."""
    return 2.0 * q if ratio < SMALL_RATIO else hyperbolic_tangent(2.0 * ratio * q) / ratio


@strict_kernel
def move_unlike(constants, k0, k1, block, pairs):
    """Apply the step, given the χ²."""
    beta, step, dim = constants.beta, constants.step, constants.dim
    fresh, causal = constants.fresh, constants.causal
    for i in range(pairs.running[0]):
        of_layer, zeta, eta = normals_of(block, pairs.replica[i], k0, k1)
        positive, w = pairs.sign[i] > 0.0, pairs.w[i]
        w = max(w, LEAST_START) if causal and not positive else w
        ratio = np.sqrt(w)
        below = (2.0 * w if positive else 2.0) / (1.0 + w)
        t, u, lean = 1.0, 0.0, 0.0  # T₁, T₂, θ|d|/|s|
        if fresh:
            scale = np.sqrt(pairs.scale[i] / constants.head_dim) if constants.head_dim > 0 else 1.0
            p, q = drawn_logits(beta, below, w, scale, zeta, eta)
            u = hyperbolic_tangent(p - ratio * q)
            t = 1.0 if causal else hyperbolic_tangent(p + ratio * q)
            lean = 0.5 * tangent_over(ratio, q) * (1.0 - t * u) * (w if positive else 1.0)
        else:
            u = hyperbolic_tangent(0.5 * beta * below)
        if causal:
            lean = 0.5 * (1.0 - u) * (ratio if positive else 1.0 / ratio)
        phi = step * 0.5 * (t + u)
        lean *= step
        turn_unlike(i, positive, w, phi, lean, step, dim, of_layer, pairs)


@inlined
def normals_of(block, replica, k0, k1):
    """Draw the six normals of V d̂ and V ŝ, and two for the queries."""
    w0, w1, w2, w3 = words_of(block, replica, k0, k1)
    h, h_ = box_muller(w0, w1)
    g1, g2 = box_muller(w2, w3)
    w0, w1, w2, w3 = words_of(block + U64(1), replica, k0, k1)
    g3, of_rho = box_muller(w0, w1)
    zeta, eta = box_muller(w2, w3)
    return (h, h_, of_rho, g1, g2, g3), zeta, eta


@inlined
def turn_unlike(i, positive, w, phi, lean, step, dim, of_layer, pairs):
    """Update w and the sign of replica i, given cφ and cϑ."""
    h, h_, of_rho, g1, g2, g3 = of_layer
    rho = np.sqrt(pairs.first[i] + of_rho * of_rho) if dim > 2 else 0.0
    g3 = g3 if dim > 2 else 0.0
    rest = step * step * pairs.second[i]
    d1, d2, d3 = 1.0 + phi * h, phi * h_, phi * rho
    s1, s2, s3 = step * g1 + lean * h, 1.0 + step * g2 + lean * h_, step * g3 + lean * rho
    square_d, square_s = d1 * d1 + d2 * d2 + d3 * d3, s1 * s1 + s2 * s2 + s3 * s3 + rest
    product = d1 * s1 + d2 * s2 + d3 * s3
    c1, c2, c3 = d2 * s3 - d3 * s2, d3 * s1 - d1 * s3, d1 * s2 - d2 * s1
    area = c1 * c1 + c2 * c2 + c3 * c3 + rest * square_d
    big = square_s if positive else square_d
    difference = big - w * ((product * product + area) / big)
    longer = np.sqrt(difference * difference + 4.0 * w * area) + abs(difference)
    pairs.w[i] = w * max(4.0 * area / (longer * longer), LEAST_FACTOR)
    pairs.sign[i] = pairs.sign[i] if difference >= 0.0 else -pairs.sign[i]
