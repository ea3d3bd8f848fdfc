"""The tests of weights against a law: their levels, their power, and their formulas against scipy."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from limitformer.initialisation.like_layers import outliers
from limitformer.initialisation.summary import summarise
from limitformer.initialisation.weight_tests import distance, even_moments, holm, p_of_lines, p_values, pearson_tails
from limitformer.weightless import laws


def test_line_test_has_its_level_and_power():
    """Among 200 normal or lopsided matrices, no level is exceeded by 3.5 standard errors."""
    generator = np.random.default_rng(3)
    for name, shape in (("normal", (40, 30)), ("lopsided", (30, 300)), ("uniform", (64, 48))):
        law = LAWS[name]
        p = np.array([p_of_lines(entries(law, shape, generator), law) for _ in range(200)])
        for level in (0.5, 0.1, 0.02):
            assert (p <= level).mean() <= level + 3.5 * math.sqrt(level * (1 - level) / len(p)), (name, level)
        assert (p <= 0.5).mean() > 0.14  # rows and columns are correlated, but counted as two
        twin = entries(law, shape, generator) - law.mean
        twin[: shape[0] // 2] += twin[shape[0] // 2 :]  # pairs of rows are correlated, and none is equal
        assert p_of_lines(twin + law.mean, law) < 1e-3
    exact = entries(LAWS["uniform"], (64, 48), generator)
    exact[:, 7] = exact[:, 40]
    assert p_of_lines(exact, LAWS["uniform"]) == 0


LAWS = {
    "normal": laws.normal(0.3, mean=0.2),
    "uniform": laws.uniform(-0.5, 0.1),
    "truncated": laws.truncated_normal(0.1, 0.4, -0.5, 0.9),
    "lopsided": laws.truncated_normal(0.0, 1.0, -0.3, 2.5).times(-1.0),
}


def entries(law, shape, generator):
    """Draw entries by scipy, the second route."""
    size = tuple(shape)
    if law.kind == laws.NORMAL:
        values = generator.normal(law.shift, law.scale, size)
    elif law.kind == laws.UNIFORM:
        values = generator.uniform(law.shift, law.shift + law.scale, size)
    else:
        g = stats.truncnorm.rvs(law.low, law.high, size=size, random_state=generator)
        values = law.shift + law.scale * g
    return torch.from_numpy(values).float()


@pytest.mark.parametrize(("name", "size"), [("normal", 6), ("uniform", 300), ("truncated", 6), ("lopsided", 300)])
def test_p_values_are_uniform_under_the_law_and_small_under_another(name, size):
    """No level is exceeded by 3.5 standard errors of 250 draws; mean and shape exhaust theirs."""
    law, generator = LAWS[name], np.random.default_rng(5)
    each = [p_values(summarise(entries(law, (size,), generator)), law) for _ in range(250)]
    for test in ("mean", "spread", "shape", "range"):
        p = np.array([result[test] for result in each])
        for level in (0.5, 0.1, 0.01):
            assert (p <= level).mean() <= level + 3.5 * math.sqrt(level * (1 - level) / len(p)), (test, level)
        assert test == "range" or (test == "spread" and size < 300) or (p <= 0.5).mean() > 0.4
    twin = law.times(2.0)
    assert p_values(summarise(entries(twin, (300,), generator)), law)["spread"] < 1e-6


def test_moments_and_tails_match_scipy():
    for law in LAWS.values():
        g = {
            laws.NORMAL: stats.norm(),
            laws.UNIFORM: stats.uniform(),
            laws.TRUNCATED: stats.truncnorm(law.low, law.high),
        }[law.kind]
        fourth, sixth = (g.expect(lambda x, k=k: ((x - g.mean()) / g.std()) ** k) for k in (4, 6))  # noqa: B023
        assert even_moments(law) == pytest.approx((fourth, sixth), rel=1e-6)
    for z, skew in ((-1.2, 0.8), (4.0, 0.01), (0.7, -0.5), (5.0, 0.0)):
        assert pearson_tails(z, skew) == pytest.approx(
            (stats.pearson3.cdf(z, skew), stats.pearson3.sf(z, skew)), rel=1e-9
        )


def test_distance_matches_scipy_and_ignores_rounding():
    law, values = laws.normal(0.02), 0.02 * torch.randn(9000, generator=torch.Generator().manual_seed(2))
    exact = stats.kstest(values.double().numpy(), "norm", (0, 0.02), method="asymp").statistic
    assert distance(summarise(values), law) == pytest.approx(exact, abs=1e-6)
    coarse = values.bfloat16().float()
    naive = stats.kstest(coarse.double().numpy(), "norm", (0, 0.02), method="asymp").statistic
    assert distance(summarise(coarse), law) <= exact + 1e-6
    assert naive > exact + 1e-4


def test_summary_of_a_large_tensor_skips_fixed_rows():
    values = 3 + 0.01 * torch.randn(3000, 700, generator=torch.Generator().manual_seed(4))
    values[[2, 2990]] = 50.0
    result = summarise(values, (2, 2990))
    rest = np.delete(values.double().numpy(), [2, 2990], 0)
    assert result.count == rest.size
    assert (result.mean, result.std) == pytest.approx((rest.mean(), rest.std()), rel=1e-10)
    assert result.kurtosis == pytest.approx(stats.kurtosis(rest, axis=None, fisher=False), rel=1e-9)
    assert result.high == rest.max()
    assert result.sample.max() < 4
    assert len(result.sample) == pytest.approx(2**14, rel=0.01)


def test_like_layer_test_has_its_level():
    """Among 60 sets of three groups at 5 %, alarms are rare; a layer 20 times the others is found."""
    generator, count = np.random.default_rng(0), {"drawn": 0, "trained": 0}
    for _ in range(60):
        for kind, spread in (("drawn", 0.0), ("trained", 0.3)):
            layers = {
                f"h.{i}.{part}": summarise(
                    torch.from_numpy(math.exp(spread * generator.normal()) * generator.normal(size=90))
                )
                for part in "abc"
                for i in range(6)
            }
            count[kind] += bool(outliers(layers, 0.05))
    assert max(count.values()) <= stats.binom.isf(1e-3, 60, 0.05)
    layers["h.2.a"] = summarise(torch.from_numpy(20 * generator.normal(size=90)))
    assert "h.2.a" in [each.name for each in outliers(layers, 0.05)]


def test_holm_matches_the_textbook():
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == pytest.approx(
        {"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06}
    )
