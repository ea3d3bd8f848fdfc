"""Share of the limit's paths that leave a ball, against its exact probability: `python -m benchmarks.exits`.

Antipodal tokens under attention alone have |V| = d/2, so `CovarianceLimit.explosion_probability` is exact for the ball.
Each line has γ, τ₀, the radius over |V₀|, the horizon and the exact probability; then the share of the paths at the
default dt, the share of a tenth of them that is outside at the end of any step, and both deviations in standard errors.
"""

from math import sqrt

import numpy as np

import limitformer as lf
from limitformer.covariance.limit.covariance import CovarianceLimit

# γ, τ₀, variance of a token, radius over |V₀|, horizon
POINTS = (
    (0.2, 0.2, 1.0, 3.0, 0.6),
    (0.3, 0.3, 1.0, 2.0, 0.3),
    (0.4, 0.5, 1.0, 5.0, 0.5),
    (0.5, 3.0, 1.0, 2.0, 1.5),
    (0.52, 0.77, 0.5, 27.5, 0.9),
    (0.6, 1.0, 2.0, 4.0, 0.4),
    (0.7, 0.9, 1.0, 2.0, 0.6),
    (sqrt(0.5), 1.0, 0.5, 30.0, 2.0),
    (0.83, 0.6, 1.0, 3.0, 0.5),
    (0.9, 0.4, 0.7, 10.0, 0.8),
    (0.95, 2.0, 1.0, 3.0, 1.0),
    (1.0, 0.7, 0.5, 6.0, 1.0),
)
SAMPLES, SEEN, SEED = 100_000, 10_000, 5


def shares(gamma: float, tau0: float, variance: float, ratio: float, horizon: float) -> tuple[float, float, float]:
    """Return the exact probability, the share of the paths that leave, and that of those seen outside after a step."""
    attention = lf.ShapedAttention(tau0=tau0)
    limit = lf.limit(lf.Transformer(width=10_000, depth=round(10_000 * horizon), gamma=gamma, attention=attention))
    assert isinstance(limit, CovarianceLimit)
    start, radius = lf.equicorrelated(2, -1.0, variance), 2 * variance * ratio
    exact = limit.explosion_probability(start, time=horizon, radius=2 * radius)
    paths = lf.simulate(
        limit, start, samples=SAMPLES, seed=SEED, radius=radius, record=[horizon], threads=1, progress=False
    )
    seen = lf.simulate(limit, start, samples=SEEN, seed=SEED, radius=30 * radius, threads=1, progress=False)
    outside = (np.linalg.norm(seen["covariance"].values, axis=(-2, -1)) >= radius).any(1)
    return exact, float((paths["exit_cause"].values == 1).mean()), float(outside.mean())


if __name__ == "__main__":
    for point in POINTS:
        exact, share, seen = shares(*point)
        error = sqrt(exact * (1 - exact) / SAMPLES)
        z, wrong = (share - exact) / error, (seen - exact) / error * sqrt(SEEN / SAMPLES)
        gamma, tau0, _, ratio, horizon = point
        print(
            f"{gamma:.3g} {tau0:g} {ratio:g} {horizon:g}  {exact:.4f} {share:.4f} {seen:.4f}  {z:+.1f} {wrong:+.1f}",
            flush=True,
        )
