"""Convolutions whose kernels are redrawn, kept, or never drawn, against those of torch."""

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp
from torch.nn import functional

import limitformer as lf
from cases.foreign import IMAGES, Stem
from cases.networks import mean_square
from limitformer.weightless import laws, maps
from limitformer.weightless.implicit import Implicit
from limitformer.weightless.maps import squared_product
from limitformer.weightless.run import ALWAYS, AUTO, RandomWeight, WeightlessRun

LEVEL = 1e-4
DRAWN, UNSEEN = "drawn when needed", "never drawn"

# Function, shape of x, shape of the kernel, options.
WAYS = {
    "one side": (functional.conv1d, (6, 3, 11), (4, 3, 5), {"stride": 2, "padding": 3, "dilation": 2}),
    "two sides": (functional.conv2d, (6, 3, 9, 7), (4, 3, 3, 2), {"stride": (2, 1), "padding": (1, 2)}),
    "three sides": (functional.conv3d, (2, 3, 4, 6, 5), (4, 3, 2, 3, 1), {"stride": (2, 3, 1), "padding": (0, 1, 2)}),
    "same": (functional.conv2d, (4, 3, 6, 5), (4, 3, 4, 3), {"padding": "same", "dilation": (1, 2)}),
    "valid": (functional.conv1d, (4, 3, 6), (4, 3, 4), {"padding": "valid"}),
    "groups": (functional.conv1d, (4, 6, 8), (9, 2, 3), {"groups": 3, "padding": 1}),
    "by channel": (functional.conv2d, (4, 5, 6, 6), (5, 1, 3, 3), {"groups": 5, "padding": "same"}),
    "transposed, one side": (functional.conv_transpose1d, (4, 3, 7), (3, 4, 5), {"stride": 3, "output_padding": 2}),
    "transposed": (
        functional.conv_transpose2d,
        (4, 6, 5, 4),
        (6, 2, 3, 2),
        {"stride": (2, 1), "padding": (1, 0), "groups": 2, "dilation": (1, 2)},
    ),
    "transposed, three sides": (functional.conv_transpose3d, (2, 3, 2, 3, 2), (3, 4, 2, 2, 2), {"stride": 2}),
}


def implicit(shape, law=None, samples=2, name="kernel", gradients=True, **options):
    """Return an implicit parameter and its run."""
    run = options.pop("run", None) or WeightlessRun(
        3, range(samples), 1, torch.float64, torch.device("cpu"), gradients=gradients, **options
    )
    return Implicit(RandomWeight(name, law or laws.uniform(-1.0, 2.0), shape, run)), run


def entries(tensor):
    return tensor.weight.run.entries(tensor.weight, range(tensor.shape[0]))


def values(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_torch(function, x, kernels, biases, **options):
    """Return outputs, and gradients of x, kernels and biases by sample, of a nonlinear loss."""
    x, parts = x.clone().requires_grad_(), []
    kernels, biases = kernels.clone().requires_grad_(), biases.clone().requires_grad_()
    for each, w, b in zip(x.chunk(len(kernels)), kernels, biases, strict=True):
        parts.append(function(each, w, b, **options))
    out = torch.cat(parts)
    loss(out).backward()
    return out, x.grad, kernels.grad.flatten(1).norm(dim=1), biases.grad.norm(dim=1)


def loss(out):
    return (out.sin() * torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype).view(out.shape)).sum()


def compare(way, is_kept=False, sliced=False):
    function, size, shape, options = WAYS[way]
    stacked = (3, *shape) if sliced else shape
    whole, run = implicit(
        stacked, samples=1 if sliced else 2, reasons_to_keep={"kernel": "for the test"} if is_kept else {}
    )
    columns = functional_columns(function, shape, options)
    bias, _ = implicit((columns,), run=run, name="bias")
    x = values(size).requires_grad_()
    tensor = whole[1] if sliced else whole
    out = function(x, tensor, bias, **options)
    loss(out).backward()
    norms = run.gradient_norms()
    kernels = entries(whole)[:, 1] if sliced else entries(whole)
    theirs = by_torch(function, x.detach(), kernels, entries(bias), **options)
    for mine, their in zip((out, x.grad, norms["kernel"], norms["bias"]), theirs, strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-10, atol=1e-12)
    assert run.uses["kernel"] == ("kept" if is_kept else DRAWN)
    assert out.is_contiguous()


def functional_columns(function, shape, options):
    return shape[1] * options.get("groups", 1) if "transpose" in function.__name__ else shape[0]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("way", WAYS)
def test_drawn_kernels_have_outputs_and_gradients_of_torch(way):
    compare(way)


@pytest.mark.parametrize("way", ["one side", "groups", "transposed"])
def test_kept_kernels_have_outputs_and_gradients_of_torch(way):
    compare(way, is_kept=True)


def test_sliced_kernels_have_outputs_and_gradients_of_torch():
    compare("two sides", sliced=True)


def test_wrong_twin_with_swapped_kernels_has_other_gradients():
    """Each sample's kernel convolves the other sample's input."""
    function, size, shape, options = WAYS["two sides"]
    tensor, run = implicit(shape)
    x = values(size)
    loss(function(x, tensor, **options)).backward()
    none = torch.zeros(2, shape[0], dtype=torch.float64)
    theirs = by_torch(function, x, entries(tensor).flip(0), none, **options)[2]
    assert not torch.allclose(run.gradient_norms()["kernel"], theirs, rtol=1e-3)


def test_convolution_without_batch_dimension_takes_one_sample():
    tensor, _ = implicit((4, 3, 5), samples=1)
    x = values((3, 12))
    out = functional.conv1d(x, tensor, stride=2)
    torch.testing.assert_close(out, functional.conv1d(x, entries(tensor)[0], stride=2))


def test_never_drawn_map_refuses_inputs_of_another_width():
    tensor, _ = implicit((64, 64), law=laws.normal(1.0), samples=1)
    with pytest.raises(lf.InputError, match=r"kernel \(64, 64\) takes 64 entries a token; got \(1, 3, 60\)"):
        functional.linear(values((1, 3, 60)), tensor)


PATCHES = {
    "one side": (functional.conv1d, (1, 3, 12), (50, 3, 4), {"stride": 4}),
    "two sides": (functional.conv2d, (2, 3, 4, 5), (40, 3, 3, 3), {"stride": (2, 3), "padding": (1, 2)}),
    "three sides": (functional.conv3d, (1, 2, 4, 6, 2), (40, 2, 2, 3, 2), {"stride": (2, 3, 2), "dilation": (2, 1, 1)}),
}


def kernel_statistics(function, x, tensor, run, options):
    x = x.repeat(run.side_by_side, *[1] * (x.dim() - 1)).requires_grad_()
    out = function(x, tensor, **options)
    (torch.tanh(out).square() * torch.linspace(0.1, 1.0, out.shape[-1], dtype=out.dtype)).sum().backward()
    by_sample, back = out.detach().unflatten(0, (run.side_by_side, -1)), x.grad.unflatten(0, (run.side_by_side, -1))
    return {
        "output": by_sample.flatten(1)[:, 5],
        "size": by_sample.flatten(1).square().sum(1),
        "of the input": back.flatten(1)[:, 2],
        "size of the input's": back.flatten(1).square().sum(1),
        "of the weight": run.gradient_norms()["kernel"],
    }


@pytest.mark.parametrize("way", PATCHES)
def test_never_drawn_kernels_have_the_law_of_drawn_ones(way):
    function, size, shape, options = PATCHES[way]
    statistics = {}
    for draw, name, std in ((AUTO, "kernel", 0.5), (ALWAYS, "kernel", 0.5), (ALWAYS, "twin", 0.56)):
        tensor, run = implicit(shape, law=laws.normal(std), samples=1500, draw=draw)
        run.seed += len(statistics)
        statistics[draw, name] = kernel_statistics(function, values(size), tensor, run, options)
        assert run.uses["kernel"] == (UNSEEN if draw == AUTO else DRAWN)
    mine, theirs, twin = statistics.values()
    assert min(ks_2samp(mine[key], theirs[key]).pvalue for key in mine) > LEVEL
    assert min(ks_2samp(mine[key], twin[key]).pvalue for key in mine) < 1e-10


def test_kernels_of_a_network_are_drawn_when_needed():
    options = {"seed": 0, "gradients": True, "dtype": torch.float64, "progress": False, "loss": mean_square}
    data, alone = (lf.weightless.simulate(Stem, IMAGES, samples=samples, **options) for samples in (3, 1))
    assert data.attrs["weights"] == "6 drawn when needed, 5 kept"  # the kept ones are vectors
    assert data.attrs["kept"] == ""
    np.testing.assert_allclose(alone.weight_gradient, data.weight_gradient[:1], rtol=1e-9)
    assert not np.isclose(data.weight_gradient[0], data.weight_gradient[1]).any()


@pytest.mark.parametrize(("m", "n", "p", "dtype"), [(3, 40, 50, torch.float32), (60, 7, 5, torch.float64)])
def test_both_forms_of_the_weight_gradient_agree(m, n, p, dtype):
    z, d = values((2, m, n)), values((2, m, p), seed=1)
    true = (z.mT @ d).square().sum((1, 2))
    torch.testing.assert_close(squared_product(z.to(dtype), d.to(dtype)), true, rtol=1e-5, atol=0)
    assert not torch.allclose(squared_product(z.flip(1).to(dtype), d.to(dtype)), true, rtol=1e-2)


@pytest.mark.parametrize(("size", "m"), [(1e-25, 60), (1e25, 3)])
def test_gradients_of_any_size_have_a_norm(size, m):
    """In float32 the squares would be 0 or infinite."""
    z, d = values((1, m, 20)).float(), (size * values((1, m, 30), seed=1)).float()
    true = (z.double().mT @ d.double()).square().sum((1, 2))
    torch.testing.assert_close(squared_product(z, d), true, rtol=1e-5, atol=0)


def test_weight_gradient_of_many_tokens_needs_no_gram_matrix(monkeypatch):
    def refused(z):
        raise AssertionError("a Gram matrix of all tokens")

    monkeypatch.setattr(maps, "gram", refused)
    z, d = values((1, 5000, 8)).float(), values((1, 5000, 6)).float()
    assert squared_product(z, d) > 0
