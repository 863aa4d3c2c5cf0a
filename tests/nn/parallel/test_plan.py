"""Another cut of the same ranks for each part of a module."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hyperslab as hs
from hyperslab.testing import seeded, whole

X = (4, 2, 8, 8, 8)


class Block(nn.Module):
    """A residual block with a gate, whose parts may lie on other meshes than its skip."""

    def __init__(self, channels, filters, stride=1):
        super().__init__()
        self.first = nn.Conv3d(channels, filters, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm3d(filters)
        self.second = nn.Conv3d(filters, filters, 3, padding=1)
        self.groups = nn.GroupNorm(2, filters)
        self.skip = nn.Conv3d(channels, filters, 1, stride)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool3d(1), nn.Conv3d(filters, filters, 1))

    def forward(self, x):
        y = self.groups(self.second(F.leaky_relu(self.norm(self.first(x)))))
        return F.relu(self.skip(x) + y * torch.sigmoid(self.gate(y)))


class Hourglass(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv3d(2, 6, 3, padding=1), nn.InstanceNorm3d(6, affine=True))
        self.deep = nn.Conv3d(6, 8, 3, 2, 1)
        self.up = nn.ConvTranspose3d(8, 6, 2, 2)
        self.out = nn.Conv3d(12, 3, 1)

    def forward(self, x):
        skip = self.down(x)
        return self.out(torch.cat([skip, self.up(F.relu(self.deep(skip)))], 1))


def classifier():
    parts = [Block(2, 6), Block(6, 8, 2), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, 4)]
    return nn.Sequential(*parts)


CASES = {
    "spatial": (classifier, {"0": {"height": 2, "width": 2}, "1": {"depth": 2, "sample": 2}}),
    "channels here and there": (
        classifier,
        {"0.first": {"channel": 4}, "1.second": {"channel": 2, "depth": 2}, "4": {"channel": 4}},
    ),
    "a part of a part": (classifier, {"1": {"depth": 4}, "1.gate": {"channel": 2}}),
    "by pattern": (classifier, {"*.second": {"channel": 2, "height": 2}}),
    "given splits": (
        classifier,
        {"*.second": {"channel": 4, "split": "channel"}, "4": {"channel": 4, "split": "filter"}},
    ),
    "blocks": (classifier, {"4": {"channel": 2, "sample": 2, "split": "blocks"}}),
    "skips": (
        Hourglass,
        {"down": {"depth": 4}, "deep": {"channel": 4}, "up": {"width": 2}, "out": {"height": 4}},
    ),
}
MESHES = [{"depth": 4}, {"channel": 2, "depth": 2}, {"sample": 4}]


def trained(model, x, y):
    optimizer, losses = torch.optim.Adam(model.parameters(), 0.01), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        losses += [loss.item(), float(hs.clip_grad_norm_(model.parameters(), 0.5))]
        optimizer.step()
    return losses


@pytest.mark.ranks(4)
@pytest.mark.every(8)
@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_planned_module_trains_as_in_one_process(name, axes):
    make, plan = CASES[name]
    mesh = hs.init(**axes, device="cpu", timeout_seconds=100)
    torch.manual_seed(1)
    serial, x = make().double(), seeded(*X)
    y = seeded(*serial(x).shape)
    ours = hs.parallelize(copy.deepcopy(serial), mesh, plan=plan)
    found = trained(ours, hs.shard(x, mesh), hs.shard(y, mesh))
    assert found == pytest.approx(trained(serial, x, y), rel=1e-10, abs=1e-12)
    pairs = zip(ours.state_dict().items(), serial.state_dict().values(), strict=True)
    for (key, mine), theirs in pairs:
        torch.testing.assert_close(whole(mine), theirs, rtol=1e-9, atol=1e-11, msg=key)


@pytest.mark.ranks(4)
def test_weights_are_cut_as_the_plan_of_their_module_says():
    mesh = hs.init(depth=4, device="cpu", timeout_seconds=100)
    plan = {"0.second": {"channel": 4, "split": "filter"}, "4": {"channel": 2}}
    model = hs.parallelize(classifier(), mesh, plan=plan)
    second = model[0].second.weight
    assert isinstance(second, DTensor)
    assert second.to_local().shape[0] == (2, 2, 2, 0)[mesh.rank]
    assert model[4].weight.to_local().numel() == 16
    assert not isinstance(model[0].first.weight, DTensor)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_kept_where_the_input_comes_on_another_mesh(momentum):
    mesh = hs.init(channel=2, device="cpu", timeout_seconds=100)
    serial = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4, momentum=momentum)).double()
    x = seeded(4, 2, 6, 5)
    ours = hs.parallelize(copy.deepcopy(serial), mesh, plan={"0": {"height": 2}})
    for _ in range(2):
        serial(x)
        ours(hs.shard(x, mesh))
    for mine, theirs in zip(ours.buffers(), serial.buffers(), strict=True):
        torch.testing.assert_close(whole(mine), theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.ranks(2)
def test_slabs_of_meshes_that_were_made_apart_still_do_not_meet():
    one, other = (hs.init(**axes, device="cpu") for axes in ({"depth": 2}, {"height": 2}))
    x = seeded(2, 2, 4, 4, 4)
    with pytest.raises(hs.LayoutError, match="tensors of different meshes cannot meet"):
        hs.shard(x, one) + hs.shard(x, other)


WRONG = {
    "no module": (
        {"features.*": {"depth": 2}},
        "plan: no module is named 'features.*'; there are ",
    ),
    "no axis": ({"0": {"time": 2}}, "plan of '0': there is no axis 'time': the axes are sample, "),
    "too many ranks": ({"0": {"depth": 3}}, "plan of '0': 2 ranks cannot be spread over depth=3"),
    "unknown split": ({"0": {"split": "rows"}}, "plan of '0': split must be one of filter, "),
    "no table": ({"0": 2}, "plan of '0': a cut is a table such as {'depth': 4}, got 2"),
    "no plan": ("depth", "plan maps names of modules to cuts, got str"),
    "blocks without a second axis": (
        {"4": {"channel": 2, "split": "blocks"}},
        "are cut into blocks over channel and one other axis, and the mesh is channel=2",
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", WRONG)
def test_all_ranks_refuse_a_wrong_plan_in_one_line(name):
    plan, words = WRONG[name]
    mesh = hs.init(depth=2, device="cpu", timeout_seconds=100)
    with pytest.raises(hs.ConfigError, match=re.escape(words)) as caught:
        hs.parallelize(classifier(), mesh, plan=plan)
    assert "\n" not in str(caught.value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{"shard_weights": True}, {"depth_first": ["0"]}], ids=str)
def test_what_wants_one_mesh_for_all_is_refused_with_a_plan(options):
    mesh = hs.init(depth=2, device="cpu", timeout_seconds=100)
    net = nn.Sequential(nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.ReLU()))
    words = f"plan and {next(iter(options))} cannot be given together"
    with pytest.raises(hs.ConfigError, match=words):
        hs.parallelize(net, mesh, plan={"0.0": {"height": 2}}, **options)


@pytest.mark.ranks(2)
def test_a_plan_for_a_module_that_fsdp_has_spread_is_refused():
    mesh = hs.init(depth=2, device="cpu", timeout_seconds=100)
    net = fully_shard(classifier(), mesh=init_device_mesh("cpu", (2,)))
    words = "plan and shard_weights cannot be given together, nor fully_shard be applied before"
    with pytest.raises(hs.ConfigError, match=words) as caught:
        hs.parallelize(net, mesh, plan={"4": {"channel": 2}})
    assert "\n" not in str(caught.value)


@pytest.mark.ranks(2)
def test_a_planned_module_is_not_compiled():
    mesh = hs.init(depth=2, device="cpu", timeout_seconds=100)
    net = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1))
    model = torch.compile(hs.parallelize(net, mesh, plan={"0": {"height": 2}}), backend="eager")
    with pytest.raises(Exception, match="a module with a plan cannot be compiled: use it as it is"):
        model(hs.shard(torch.rand(X), mesh))


@pytest.mark.ranks(2)
def test_a_module_with_more_ranks_than_indices_is_named():
    mesh = hs.init(depth=2, device="cpu", timeout_seconds=100)
    model = hs.parallelize(classifier(), mesh, plan={"4": {"sample": 2}})
    words = "an extent of 1, over sample=2: .*in 4, a Linear"
    with pytest.raises(hs.LayoutError, match=words):
        model(hs.shard(torch.rand(1, *X[1:]), mesh))


def test_on_one_rank_a_plan_of_one_rank_changes_nothing():
    mesh = hs.init(device="cpu")
    x = torch.rand(2, 4)
    layer = nn.Sequential(nn.Linear(4, 3))
    expected = layer(x)
    model = hs.parallelize(layer, mesh, plan={"0": {"channel": 1, "split": "filter"}})
    torch.testing.assert_close(hs.gather(model(hs.shard(x, mesh))), expected)
