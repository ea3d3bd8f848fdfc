"""Two builds of one model, of which one is sharded: shards, ranks and fully sharded modules."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from limitformer.initialisation import compare
from two_builds import Plain, kinds, names_ending, with_fans


def test_shards_of_every_formula_are_found_among_like_matrices():
    for initialise in (nn.init.kaiming_normal_, nn.init.xavier_normal_, partial(nn.init.kaiming_uniform_, a=5**0.5)):
        report = compare(with_fans("plain", 1, initialise), with_fans("plain", 2, initialise))
        assert list(kinds(report)) == ["after sharding"]
        assert "2 slices" in report.findings[0].detail


def test_equal_shards_are_found():
    a, b = with_fans("plain", 1, nn.init.normal_), with_fans("plain", 4, nn.init.normal_, same_seed=True)
    (finding,) = compare(a, b).findings
    assert finding.kind == "equal shards"
    assert set(finding.names) == names_ending("plain", "up.weight", "down.weight")
    assert "4 equal slices along dimension 1" in finding.detail


class Slices(nn.Module):
    """A feed-forward layer of which every rank has one slice, initialised with the fans of the slice."""

    def __init__(self, ranks=1, rank=0, seed="own"):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64 // ranks), nn.Linear(64 // ranks, 24, bias=False)
        self.norm, self.router = nn.LayerNorm(16), nn.Linear(16, 4, bias=False)
        if seed == "own":
            torch.manual_seed(torch.initial_seed() + rank)
        nn.init.normal_(self.up.weight)
        nn.init.normal_(self.up.bias)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        if seed == "late":
            torch.manual_seed(torch.initial_seed() + rank)
            nn.init.uniform_(self.router.weight)


def ranks(seed):
    return [partial(Slices, 4, rank, seed) for rank in range(4)]


def test_ranks_are_joined():
    assert kinds(compare(Slices, ranks("own"))) == {"after sharding": {"down.weight"}}
    assert kinds(compare(Slices, ranks("one")))["equal shards"] == {"up.weight", "up.bias", "down.weight"}
    assert kinds(compare(partial(Slices, 1, 0, "late"), ranks("late")))["unequal replicas"] == {"router.weight"}


def test_one_of_several_shards_is_compared():
    found = kinds(compare(Slices, ranks("own")[0]))
    assert found == {"after sharding": {"down.weight"}, "shape": {"up.weight", "up.bias"}}
    assert kinds(compare(Slices, ranks("own")[0], shards=4)) == {"after sharding": {"down.weight"}}
    assert kinds(compare(Slices, ranks("own")[0], shards=2))["shape"] == {"up.weight", "up.bias"}


@pytest.fixture(params=["fake", "gloo"])
def mesh(request, tmp_path):
    """A mesh of four processes of which one exists, or of one process."""
    size = 4 if request.param == "fake" else 1
    if request.param == "fake":
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    else:
        dist.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield init_device_mesh("cpu", (size,))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")
def test_fully_sharded_build_is_compared(mesh):
    def sharded(skipped=(), on_shards=False):
        def built():
            with torch.device("meta"):
                model = Plain()
            fully_shard(model, mesh=mesh)
            model.to_empty(device="cpu")
            for name, part in model.named_modules():
                part._is_hf_initialized = name in skipped
            model.initialize_weights()
            model.tie_weights()
            for block in model.blocks if on_shards else ():
                nn.init.xavier_uniform_(block.up.weight.to_local())
            return model

        return built

    def whole():
        model = Plain()
        for block in model.blocks:
            nn.init.xavier_uniform_(block.up.weight)
        return model

    assert not compare(Plain, sharded()).findings
    assert kinds(compare(Plain, sharded(("score",)))) == {"uninitialised": {"score.weight"}}
    expected = {} if mesh.size() == 1 else {"after sharding": {"blocks.0.up.weight", "blocks.1.up.weight"}}
    assert kinds(compare(whole, sharded(on_shards=True))) == expected
