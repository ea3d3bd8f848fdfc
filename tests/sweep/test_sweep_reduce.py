"""The reductions of a sweep, each compared with a separate computation from the samples of the same cell."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.special import ndtr
from scipy.stats import binomtest, ks_2samp

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.covariance.limit.covariance import log_variance
from limitformer.results.outcomes import OUTCOMES
from limitformer.sweep.describe import seed_of
from limitformer.sweep.run import compute_sweep
from limitformer_papers.shaped_transformer.stopping import LARGEST, SMALLEST
from sweep_grids import NETWORK, PAIR, sweep, values_equal

THREE = replace(PAIR, tokens=3)
TABLE = {"tokens": 3, "correlation": 0.2, "variance": 2.0}
LEVELS = [0.1, 0.5, 0.9]


def both(keep, base=THREE, over=None, **simulate):
    """Return the reduced sweep, and the same sweep with its samples."""
    over = over or {"beta": [0.5, 2.0]}
    return tuple(
        compute_sweep(sweep(over, base, kept, **simulate), threads=1, progress=False)
        for kept in (keep, {"samples": True})
    )


def networks(keep, **simulate):
    """Return the two for a network, which has a start instead of a horizon."""
    found = []
    for kept in (keep, {"samples": True}):
        settings = {"samples": 30, "seed": 4, "start": TABLE, "record": "all", **simulate}
        description = lf.Sweep(NETWORK, over={"gamma": [0.2, 0.6]}, simulate=settings, reduce=kept)
        found.append(compute_sweep(description, threads=1, progress=False))
    return found


def overlaps(samples):
    """Return the mean over the pairs of a sample, (cell, sample, point)."""
    return samples["overlap"].transpose(..., "pair").values.mean(-1)


def correlations(samples):
    """Return the mean over the pairs, (cell, sample, point), from a sum over pairs."""
    v = samples["covariance"].values
    rho = [v[..., i, j] / np.sqrt(v[..., i, i] * v[..., j, j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    return sum(rho) / 3


def test_samples_are_those_of_simulate():
    (data, _), points = both({"samples": True}, samples=9, record=[0.5, 1.0]), [0.5, 1.0]
    for k, beta in enumerate((0.5, 2.0)):
        model = replace(THREE, beta=beta)
        cell = next(cell for cell in sweep({"beta": [beta]}, THREE).cells())
        seed = seed_of(sweep({"beta": [beta]}, THREE), cell)
        direct = lf.simulate(model, samples=9, seed=seed, horizon=1.0, record=points, threads=1)
        assert set(direct.data_vars) == {"overlap", "gap"} == set(data.data_vars)
        for name in direct.data_vars:
            assert data[name].dims[1:] == tuple("point" if dim == "time" else dim for dim in direct[name].dims)
            assert values_equal(data[name][k], direct[name])
    assert data["point"].values.tolist() == points


def test_moments_of_overlaps():
    data, samples = both({"moments": True}, record=[0.5, 1.0])
    x = overlaps(samples)
    assert data["overlap_mean"].dims == ("beta", "point")
    np.testing.assert_allclose(data["overlap_mean"], x.sum(1) / 12, rtol=1e-12)
    variance = ((x - x.mean(1, keepdims=True)) ** 2).sum(1) / 11
    np.testing.assert_allclose(data["overlap_variance"], variance, rtol=1e-12)
    np.testing.assert_allclose(data["overlap_error"], np.sqrt(variance / 12), rtol=1e-12)


def test_moments_of_a_network():
    data, samples = networks({"moments": True})
    rho, variance = correlations(samples), np.einsum("cspii->csp", samples["covariance"].values) / 3
    for name, x in {"correlation": rho, "variance": variance}.items():
        np.testing.assert_allclose(data[f"{name}_mean"], x.mean(1), rtol=1e-11)
        np.testing.assert_allclose(data[f"{name}_variance"][:, 1:], x[:, :, 1:].var(1, ddof=1), rtol=1e-9)
        np.testing.assert_allclose(data[f"{name}_error"][:, 1:], x[:, :, 1:].std(1, ddof=1) / 30**0.5, rtol=1e-9)
    assert set(data.data_vars) == {
        f"{name}_{what}" for name in ("correlation", "variance") for what in ("mean", "variance", "error")
    }


def quantile(x, level):
    """Return a quantile, linear between the order statistics."""
    x = np.sort(x)
    place = level * (len(x) - 1)
    low = min(int(place), len(x) - 2)
    return x[low] + (place - low) * (x[low + 1] - x[low])


def test_quantiles():
    data, samples = both({"quantiles": LEVELS}, record=[0.5, 1.0])
    assert data["overlap_quantile"].dims == ("beta", "quantile", "point")
    assert data["quantile"].values.tolist() == LEVELS
    for cell, level, point in np.ndindex(2, 3, 2):
        expected = quantile(overlaps(samples)[cell, :, point], LEVELS[level])
        assert float(data["overlap_quantile"][cell, level, point]) == pytest.approx(expected, rel=1e-12)


def labelled(samples, tolerance):
    """Return the outcomes of three tokens from their overlaps, (cell, sample, point)."""
    z = samples["overlap"].transpose(..., "pair").values
    together, opposed = z > 1 - tolerance, z < tolerance - 1
    single = together.all(-1)
    pair = (together | opposed).all(-1) & opposed.any(-1)
    return np.where(single, "single cluster", np.where(pair, "antipodal pair", "unresolved"))


@pytest.mark.parametrize("base", [PAIR, THREE, replace(PAIR, tokens=4)], ids=["two", "three", "four tokens"])
def test_outcomes_are_counted_and_have_wilsons_intervals(base):
    over, settings = {"beta": [0.5, 3.0]}, {"samples": 200, "horizon": 12.0, "tolerance": 0.2, "seed": 5}
    data, samples = both({"outcomes": {"level": 0.9}}, base, over, **settings)
    labels = labelled(samples, 0.2)
    assert data["outcome"].values.tolist() == list(OUTCOMES)
    assert {"single cluster", "antipodal pair", "unresolved"} == set(OUTCOMES)
    assert len(set(labels.ravel())) == 3, "the case is too easy"
    for cell, name in np.ndindex(2, 3):
        count = int((labels[cell, :, 0] == OUTCOMES[name]).sum())
        found = data.isel(beta=cell, point=0).sel(outcome=OUTCOMES[name])
        interval = binomtest(count, 200).proportion_ci(0.9, method="wilson")
        assert float(found["probability"]) == count / 200
        np.testing.assert_allclose([found["low"], found["high"]], interval, atol=1e-12)


def test_equal_counts_antipodal_clusters_of_equal_size():
    four = replace(PAIR, tokens=4)
    settings = {"samples": 200, "horizon": 12.0, "tolerance": 0.2, "seed": 5}
    data, samples = both({"outcomes": True}, four, {"beta": [0.5, 3.0]}, **settings)
    z = samples["overlap"].transpose(..., "pair").values
    with_first = np.concatenate([np.ones((*z.shape[:-1], 1)), z[..., :3]], -1) > 0  # the first token's side
    resolved = (np.abs(z) > 0.8).all(-1)
    equal = resolved & (with_first.sum(-1) == 2)
    np.testing.assert_array_equal(data["equal"], equal.mean(1))
    pairs = data["probability"].sel(outcome="antipodal pair")
    assert (data["equal"] > 0).all()
    assert (data["equal"] < pairs).any(), "the case is too easy"


def first_outside(matrices, largest, smallest):
    """Return the first layer with an eigenvalue outside, or the last layer, from a loop over matrices."""
    for layer, v in enumerate(matrices):
        least, *_, most = np.linalg.eigvalsh(v)
        if most > largest or least < smallest:
            return layer
    return len(matrices) - 1


def test_stopping_times_have_the_ends_of_the_figures():
    """Some samples stop and others do not, as the start is large [ST, Fig. 5, 8]."""
    attention, found = replace(NETWORK, depth=20, attention=lf.ShapedAttention(tau0=0.5)), []
    for keep in ({"stopping_times": True}, {"samples": True}):
        settings = {"samples": 60, "record": "all", "seed": 8, "start": {**TABLE, "variance": 100.0}}
        description = lf.Sweep(attention, over={"gamma": [0.5, 0.9]}, simulate=settings, reduce=keep)
        found.append(compute_sweep(description, threads=1, progress=False))
    data, samples = found
    assert (LARGEST, SMALLEST) == (1e4, 1e-4)
    for cell, sample in np.ndindex(2, 60):
        layer = first_outside(samples["covariance"].values[cell, sample], LARGEST, SMALLEST)
        assert float(data["stopping_time"][cell, sample]) == layer / 20
    assert len(np.unique(data["stopping_time"])) > 3, "the case is too easy"


@pytest.mark.parametrize("ends", [{"largest": 2.0, "smallest": 1e-9}, {"largest": 1e9, "smallest": 0.5}], ids=str)
def test_stopping_times_of_the_limit_are_those_of_a_geometric_brownian_motion(ends):
    """V of one token, recorded in steps of 0.1; the twin sees these times only."""
    relu = lf.ShapedReLU(c_plus=1.0, c_minus=1.0)
    net = lf.Transformer(width=100, depth=100, gamma=0.8, feedforward=relu)
    record, size = np.arange(11) / 10, 20_000
    settings = {"samples": size, "seed": 8, "start": {"tokens": 1}, "as": "limit", "record": record.tolist()}
    found = []
    for keep in ({"stopping_times": ends}, {"samples": True}):
        found.append(
            compute_sweep(lf.Sweep(net, over={"gamma": [0.8]}, simulate=settings, reduce=keep), progress=False)
        )
    stopped = found[0]["stopping_time"].values[0]
    v = found[1]["covariance"].values[0, :, :, 0, 0]
    variance = 4 * lf.limit(net).constants().linear ** 2
    sign = 1 if ends["largest"] == 2.0 else -1  # log 2 above or below the start
    for point in (3, 6, 9):
        deviation, drift = np.sqrt(variance * record[point]), -sign * variance * record[point] / 2
        expected = ndtr((drift - np.log(2)) / deviation) + 2.0**-sign * ndtr((-drift - np.log(2)) / deviation)
        error = np.sqrt(expected * (1 - expected) / size)
        assert abs((stopped <= record[point] + 1e-9).mean() - expected) < 4 * error
        seen = ((v > ends["largest"]) | (v < ends["smallest"]))[:, : point + 1].any(1)
        assert seen.mean() < expected - 4 * error


def test_variance_of_log_eigenvalues_is_that_of_the_dense_diffusion():
    """σ² = ∇fᵀ Σ ∇f for f = log λ, with and without a mask; without the part of attention it is rejected."""
    v = np.array([[1.0, 0.4, -0.3], [0.4, 1.7, 0.5], [-0.3, 0.5, 0.8]])
    rows, columns = np.triu_indices(3)
    values, vectors = np.linalg.eigh(v)
    for mask in (None, "causal"):
        attention = lf.ShapedAttention(tau0=0.6)
        limit = lf.limit(lf.Transformer(width=9, depth=9, gamma=0.8, attention=attention, mask=mask))
        for k in (0, -1):
            u = vectors[:, k]
            gradient = np.where(rows == columns, 1, 2) * u[rows] * u[columns] / values[k]
            dense = gradient @ limit.diffusion(v) @ gradient
            assert log_variance(limit, v, u) == pytest.approx(dense, rel=1e-12)
            assert 4 * limit.constants().linear ** 2 != pytest.approx(dense, rel=0.01)


def test_ks_is_the_distance_from_a_separate_simulation_of_the_limit():
    over, settings = {"beta": [0.5, 2.0]}, {"samples": 50, "record": [0.5, 1.0]}
    data, samples = both({"ks": True}, THREE, over, **settings)
    description = sweep(over, THREE, **settings)
    for k, cell in enumerate(description.cells()):
        seed = seed_of(description, cell)
        limit = lf.simulate(lf.limit(cell.model), samples=50, seed=seed, horizon=1.0, record=[1.0], threads=1)
        theirs = limit["overlap"].values.mean(-1)[:, 0]
        expected = ks_2samp(overlaps(samples)[k, :, -1], theirs).statistic
        assert float(data["overlap_ks"][k]) == pytest.approx(expected, abs=1e-15)
        assert float(data["overlap_ks"][k]) != ks_2samp(overlaps(samples)[k, :, 0], theirs).statistic


def test_several_reductions_equal_each_one_alone():
    keep = {"samples": True, "moments": True, "quantiles": LEVELS, "outcomes": True, "ks": True}
    together = compute_sweep(sweep({"beta": [0.5, 2.0]}, THREE, keep), threads=1, progress=False)
    for name, options in keep.items():
        alone = compute_sweep(sweep({"beta": [0.5, 2.0]}, THREE, {name: options}), threads=1, progress=False)
        for result in alone.data_vars:
            assert values_equal(alone[result], together[result]), result


def test_exits_are_counted_by_every_point():
    """The points of a chain are layers, those of a limit are times."""
    hot = {"samples": 40, "start": {"tokens": 3, "variance": 3.0}, "radius": 7.0}
    for described, record in (("chain", [0, 2, 6]), ("limit", [0.0, 0.15, 0.3])):
        data, samples = networks({"exits": True}, **hot, **{"as": described}, record=record)
        exits = samples["exit"].values
        counted = [[sum(each <= point for each in paths) / 40 for point in record] for paths in exits]
        assert data["left"].values == pytest.approx(np.array(counted))
        spread = [[np.std([each <= point for each in paths]) / np.sqrt(40) for point in record] for paths in exits]
        assert data["left_error"].values == pytest.approx(np.array(spread))
        assert (np.diff(counted) >= 0).all()
        assert 0 < np.max(counted) < 1


@pytest.mark.parametrize(
    ("keep", "base", "simulate", "says"),
    [
        ({"stopping_times": True}, PAIR, {"horizon": 1.0}, "keep stopping_times: Stopping times need a covariance."),
        ({"stopping_times": True}, NETWORK, {"start": TABLE}, "keep stopping_times: Stopping times need more than"),
        ({"exits": True}, PAIR, {"horizon": 1.0}, "keep exits: Exits need a covariance"),
        ({"outcomes": True}, NETWORK, {"start": TABLE}, "keep outcomes: outcomes needs overlaps or outcomes"),
        ({"ks": True}, PAIR, {"horizon": 1.0, "as": "limit"}, "keep ks: limit needs a model; got TokenLimit."),
    ],
    ids=lambda value: str(value)[:30],
)
def test_reduction_that_does_not_fit_is_refused_before_a_store_is_made(tmp_path, keep, base, simulate, says):
    field = "beta" if base is PAIR else "gamma"
    description = lf.Sweep(base, over={field: [0.1]}, simulate={"samples": 4, **simulate}, reduce=keep)
    with pytest.raises(InputError) as raised:
        lf.run_sweep(description, tmp_path / "s", workers=1, progress=False)
    assert str(raised.value).startswith(f"No cell can run of the 1 that were tried. Cell {field} = 0.1: {says}")
    assert list(tmp_path.iterdir()) == []
