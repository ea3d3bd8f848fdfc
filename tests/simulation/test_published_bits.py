"""A few small results of every kind have the numbers of earlier versions (`published_bits`)."""

import pytest

from published_bits import numbers_of, results

# Mean, and mean of the cosines, of all entries; to the last digits these depend on the processor.
PUBLISHED = {
    "shaped": (0.418652438867891, 0.7265073874333349),
    "attention alone": (0.408261728517068, 0.7518565957960313),
    "ReLU alone": (0.5373761557045168, 0.7363865467840398),
    "GELU, 4 heads, Pre-LN": (0.5555054761316914, 0.7803469622654456),
    "causal, Post-LN": (0.633497595787978, 0.7429961872295372),
    "RMSNorm, λ = 1": (0.5861282539194029, 0.4479706027469253),
    "one matrix": (0.46307858247681905, 0.7639318938306949),
    "shaped, gradients": (3.929843682386104, 0.09766308716314168),
    "GELU, 4 heads, Pre-LN, gradients": (2.573757883060836, -0.18272145979671453),
    "causal, Post-LN, gradients": (0.5070076506098057, 0.8960531368173998),
    "limit": (0.39791132997864337, 0.7281336104983777),
    "limit, Euler-Maruyama": (0.4087223167297529, 0.7293948977626726),
    "pair": (0.33913484838773933, 0.7106697382723544),
    "sphere, Gram matrix": (0.30722462529745104, 0.6814083394560531),
    "sphere, coordinates": (0.5009978809518184, 0.6875001090375242),
    "hybrid": (0.17249622338141513, 0.7960171693321323),
    "sphere limit": (0.3763473432555141, 0.6714741740685988),
}


def test_the_same_seed_gives_the_same_numbers():
    """One more draw, or another order of draws, changes the second digit."""
    found = {name: numbers_of(arrays) for name, arrays in results()}
    assert set(found) == set(PUBLISHED)
    for name, numbers in found.items():
        assert numbers == pytest.approx(PUBLISHED[name], rel=1e-9), name
