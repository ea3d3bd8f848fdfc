"""Counts of numbers against casts of torch, of drawn weights, and of updates that are rounded one by one."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from limitformer.base.errors import InputError
from limitformer.formats.table import FORMATS, formats_of
from limitformer.formats.tally import Tally, tally_of_law
from limitformer.weightless.laws import constant, normal, orthogonal, truncated_normal, uniform

EVERY = tuple(FORMATS.values())
EDGES = [2.0**-10, 2.0**-11, 2.0**-25, 2.0**-24, 2.0**-17, 464.0, 465.0, 65519.0, 65520.0, 61440.0, 61439.0, 2.0**-6]


def numbers() -> torch.Tensor:
    """Return numbers of all sizes, with zeros and the numbers at which formats round to zero or beyond."""
    g = torch.Generator().manual_seed(0)
    spread = torch.randn(200_000, generator=g) * 2.0 ** torch.randint(-30, 20, (200_000,), generator=g)
    return torch.cat([spread, torch.tensor(EDGES), -torch.tensor(EDGES), torch.zeros(7)])


def counted(x, formats=EVERY):
    result = Tally(formats)
    result.add(x)
    return result


def shares_by_casts(x, which, scale=0):
    """Return how many round beyond the format, to zero, and below its smallest normal number."""
    x = x[x != 0] * 2.0**scale
    rounded = x.to(which.dtype).float()
    beyond = (x.abs() >= which.beyond).sum()  # torch's own casts to e4m3 stay at the largest number
    return int(beyond), int((rounded == 0).sum()), int(((x.abs() < 2.0**which.normal) & (rounded != 0)).sum())


@pytest.mark.parametrize("which", EVERY, ids=lambda each: each.name)
def test_counts_are_those_of_casts_and_not_of_neighbouring_formats(which):
    x = numbers()
    tally = counted(x)
    mine = int(tally.over[EVERY.index(which)]), tally.zero(which), tally.subnormal(which)
    assert mine == shares_by_casts(x, which)
    if which.name != "bf16":
        assert tally.zero(replace(which, normal=which.normal - 1)) != mine[1]
        assert tally.at_most(which.smallest) != mine[1]  # flush of all below the smallest number
        scale = tally.room(which)
        assert tally.zero(which, scale) == shares_by_casts(x, which, scale)[1] != mine[1]
        assert torch.isfinite((x * 2.0**scale).to(which.dtype).float()).all()
        assert float((x * 2.0 ** (scale + 1)).abs().max()) > which.largest


def test_beyond_begins_where_casts_are_infinite():
    """e4m3 has no infinity: OCP's table of it has 448 as the largest number, and 464 rounds to it."""
    for which in (FORMATS["fp16"], FORMATS["e5m2"], FORMATS["bf16"]):
        limit = torch.tensor(which.beyond)
        assert torch.isinf(limit.to(which.dtype).float())
        assert torch.nextafter(limit, torch.zeros(())).to(which.dtype).float() == which.largest
    assert counted(torch.tensor([464.0, 464.1])).over[EVERY.index(FORMATS["e4m3"])] == 1


def test_masks_and_zeros_do_not_count():
    x = torch.tensor([0.0, -0.0, float("-inf"), torch.finfo(torch.float32).min, -(2.0**126), 3.0, -5.0])
    tally = counted(x)
    assert (tally.count, tally.largest, tally.over.sum()) == (2, 5.0, 0)
    assert tally.middle() == -2  # 3 · 2⁻² lies in (½, 1]


LAWS = {
    "normal": (normal(0.02), lambda n, g: 0.02 * torch.randn(n, generator=g)),
    "shifted": (normal(0.1, mean=1.0), lambda n, g: 1 + 0.1 * torch.randn(n, generator=g)),
    "uniform": (uniform(-0.1, 0.1), lambda n, g: 0.2 * torch.rand(n, generator=g) - 0.1),
    "constant": (constant(1.0), lambda n, g: torch.ones(n)),
    "truncated": (
        truncated_normal(0.0, 0.02, -0.03, 0.05),
        lambda n, g: torch.nn.init.trunc_normal_(torch.empty(n), 0, 0.02, -0.03, 0.05, generator=g),
    ),
}


@pytest.mark.parametrize("name", LAWS)
def test_weights_by_their_law_are_those_that_are_drawn(name):
    law, draw = LAWS[name]
    entries = 1_000_000
    drawn = counted(draw(entries, torch.Generator().manual_seed(1)))
    lawful = tally_of_law(law, entries, EVERY)
    exact = lawful.within
    error = np.sqrt(np.maximum(exact * (1 - exact / entries), 1.0))
    assert (np.abs(drawn.within - exact) < 4.5 * error).all()
    assert lawful.largest == pytest.approx(drawn.largest, rel=0.1)
    if law.random:
        wrong = tally_of_law(law.times(1.02), entries, EVERY).within
        assert (np.abs(drawn.within - wrong) > 4.5 * error).any()


def test_entries_of_an_orthogonal_matrix():
    matrix = torch.nn.init.orthogonal_(torch.empty(300, 200), 0.5, generator=torch.Generator().manual_seed(0))
    share = counted(matrix).at_most(-6) / matrix.numel()
    assert tally_of_law(orthogonal(0.5, 300, 200), matrix.numel(), EVERY).at_most(-6) / matrix.numel() == pytest.approx(
        share, abs=0.01
    )


def test_tallies_add_up():
    a, b = numbers()[:1000], numbers()[1000:5000]
    both, whole = counted(a), counted(torch.cat([a, b]))
    both.merge(counted(b))
    assert (both.within == whole.within).all()
    assert (both.largest, list(both.over)) == (whole.largest, list(whole.over))


@pytest.mark.parametrize(
    ("names", "says"),
    [(["fp61"], "no number format 'fp61'"), ([], r"got \[\]"), ("BF61", "bf16"), (torch.half, "got torch.float16")],
)
def test_unknown_formats(names, says):
    with pytest.raises(InputError, match=says):
        formats_of(names)


def test_formats_by_name():
    assert [each.name for each in formats_of("BF16, e4m3,bf16")] == ["bf16", "e4m3"]
