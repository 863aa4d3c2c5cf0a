"""What the planner proposes is what ``init`` and ``parallelize`` take, and changes no number."""

import copy
import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.models import CosmoFlow
from hyperslab.nn.depth_first import depth_first
from hyperslab.nn.depth_first.chains import find_chains
from hyperslab.planner import memory
from hyperslab.planner.blocks import blocks
from hyperslab.planner.cost import Costs, Job
from hyperslab.planner.machine import Link, load_machine
from hyperslab.planner.read_network import read_network
from hyperslab.planner.search import (
    _move,
    _recut_candidate,
    _shortest_way,
    _sources,
    meshes,
    recomputable,
    search,
)
from hyperslab.planner.shards import Shards
from hyperslab.testing import on_ranks, seeded, whole

# Small networks, with what the planner must get right: lists, modules used twice, norms


class ConvBlock(nn.Module):
    def __init__(self, channels, filters, norm=False):
        super().__init__()
        self.conv = nn.Conv3d(channels, filters, 3, padding=1)
        self.norm = nn.BatchNorm3d(filters) if norm else nn.Identity()

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


class Forks(nn.Module):
    """A dict and a list of modules, a pool that runs twice, a skip that meets what came after."""

    def __init__(self, norm=True):
        super().__init__()
        self.stem = nn.ModuleDict({"wide": ConvBlock(2, 4, norm)})
        self.pool = nn.MaxPool3d(2)
        self.down = nn.ModuleList([ConvBlock(4, 4, norm), ConvBlock(4, 6, norm)])
        self.up = nn.ConvTranspose3d(6, 4, 2, 2)
        self.out = nn.Conv3d(8, 3, 1)

    def forward(self, x):
        x = self.stem["wide"](x)
        skip = self.down[0](self.pool(x))
        return self.out(torch.cat([skip, self.up(self.down[1](self.pool(skip)))], 1))


def wide():
    """Space first, then two dense layers that are worth a cut of their channels."""
    return nn.Sequential(
        nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2)),
        nn.Sequential(nn.Conv3d(4, 64, 3, padding=1), nn.ReLU(), nn.MaxPool3d(4)),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(64, 8192),
        nn.ReLU(),
        nn.Linear(8192, 4),
    )


def rows():
    """Chains of each kind: children of a row, and modules of their own."""
    first = (nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.AvgPool3d(3, 1, 1))
    blocks = (ConvBlock(4, 4), ConvBlock(4, 4))
    last = (nn.BatchNorm3d(4), nn.AdaptiveAvgPool3d(2), nn.Flatten(), nn.Linear(4 * 2**3, 2))
    return nn.Sequential(*first, *blocks, *last)


LINK = Link(1e-6, 1e11)
MACHINE = replace(
    load_machine("laptop"),
    inside=LINK,
    between=LINK,
    kernel_seconds=1e-6,
    half_channels=20,
    memory_nbytes=1e9,
)
"""On which it is worth to cut channels once they are many."""


def trained(model, x, y):
    """Losses of two steps."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.01), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_trains_as_one_process(net, shape, best):
    """``net`` with the choice ``best``, in double precision."""
    mesh = hs.init(**best.mesh, device="cpu", timeout_seconds=100)
    torch.manual_seed(1)
    serial, x = net.double(), seeded(best.batch, *shape)
    for weight in serial.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    y = seeded(*serial(x).shape)
    ours = hs.parallelize(copy.deepcopy(serial), mesh, **best.options)
    found = trained(ours, hs.shard(x, mesh), hs.shard(y, mesh))
    assert found == pytest.approx(trained(serial, x, y), rel=1e-9)
    for mine, theirs in zip(ours.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), theirs, rtol=1e-8, atol=1e-10)


@on_ranks(2, 4)
def test_a_plan_that_cuts_dense_layers_otherwise_trains_as_one_process(num_ranks):
    found = hs.plan(wide(), (2, 16, 16, 16), gpus=num_ranks, batch=2, machine=MACHINE)
    assert {cut.get("channel") for cut in found.best.plan.values()} == {2}
    assert_trains_as_one_process(wide(), (2, 16, 16, 16), found.best)


@on_ranks(4)
def test_any_way_through_a_network_is_a_plan_that_parallelize_takes():
    network = read_network(Forks(), (2, 8, 8, 8))
    costs = Costs(Job(network, 4, precision="fp32"), MACHINE)
    cuts = [*meshes(network, 4, 4)]
    all_shards = [Shards(network, cut, 4) for cut in cuts]
    draw = random.Random(1)
    for _ in range(4):
        way = [draw.randrange(len(cuts))]
        for part in blocks(network)[1:]:
            moves = [_move(costs, shards, _sources(network, part)) for shards in all_shards]
            able = [state for state, seconds in enumerate(moves) if seconds < math.inf]
            way.append(draw.choice(able))
        best = _recut_candidate(costs, blocks(network), all_shards, way)
        assert_trains_as_one_process(Forks(), (2, 8, 8, 8), best)


@on_ranks(2)
def test_chains_that_save_memory_train_as_one_process():
    network = read_network(rows(), (2, 8, 8, 8))
    job = Job(network, 2, precision="fp32")
    machine = replace(MACHINE, cores_per_node=0)  # whose convolutions have no copies beside them
    needed = search(job, machine, 2).best.memory_nbytes
    best = search(job, replace(machine, memory_nbytes=needed), 2).best
    assert {*best.depth_first} & {"0-2", "3", "4"}
    assert best.memory_nbytes < needed
    assert_trains_as_one_process(rows(), (2, 8, 8, 8), best)


@pytest.mark.parametrize(("make", "size"), [(Forks, 8), (wide, 16), (rows, 8)])
def test_names_are_those_of_modules_that_run(make, size):
    net = make()
    network = read_network(net, (2, size, size, size))
    find_chains(net, [*network.chains])  # raises for what is none
    called = set()
    for name, part in net.named_modules():
        part.register_forward_hook(lambda *_, name=name: called.add(name))
    net(torch.zeros(2, 2, size, size, size))
    parts = blocks(network)
    assert {part.name for part in parts} <= called
    assert [n for part in parts for n in part.numbers] == [*range(len(network.layers))]


def test_a_module_that_runs_twice_has_no_cut_of_its_own():
    network = read_network(Forks(), (2, 8, 8, 8))
    assert [part.name for part in blocks(network)] == ["stem.wide", "down.0", "down.1", "up", "out"]
    assert network.containers == {"stem", "down"}


def test_chains_are_what_can_be_computed_tile_by_tile():
    chains = read_network(rows(), (2, 8, 8, 8)).chains
    assert chains == {"0-2": ("0", "1", "2"), "3": ("3",), "4": ("4",)}
    assert not read_network(Forks(norm=True), (2, 8, 8, 8)).chains
    plain = read_network(Forks(norm=False), (2, 8, 8, 8))
    assert [*plain.chains] == ["stem.wide", "down.0", "down.1"]


def test_what_has_norms_goes_under_checkpoints():
    network = read_network(Forks(), (2, 8, 8, 8))
    assert recomputable(network, whole_channels=True) == ("stem.wide", "down.0", "down.1")
    found = search(Job(network, 2, precision="fp32"), replace(MACHINE, memory_nbytes=1e5), 1)
    assert found.infeasible[0].checkpointed == ("stem.wide", "down.0", "down.1")
    assert not found.infeasible[0].depth_first


def test_tiles_are_as_large_as_those_of_depth_first_chains():
    assert memory.TILE_NUMEL == depth_first.TILE_NUMEL
    with torch.device("meta"):
        network = read_network(CosmoFlow(512), (4, 512, 512, 512))
    job, machine = Job(network, 8), load_machine("dgx-h100")
    whole = search(job, replace(machine, memory_nbytes=1e12), 1).best
    tiled = search(job, replace(machine, memory_nbytes=30e9), 1).best
    assert tiled.depth_first
    assert tiled.memory_nbytes < 0.6 * whole.memory_nbytes
    assert tiled.step_seconds > whole.step_seconds


def test_the_shortest_way_is_that_of_trying_all():
    draw = random.Random(3)
    for _ in range(50):
        times, moves = [[[draw.random() for _ in range(3)] for _ in range(5)] for _ in range(2)]

        def total(way, times=times, moves=moves):
            stays = sum(times[part][state] for part, state in enumerate(way))
            pairs = enumerate(itertools.pairwise(way), 1)
            return stays + sum(moves[part][b] for part, (a, b) in pairs if a != b)

        best = min(itertools.product(range(3), repeat=5), key=total)
        assert total(_shortest_way(times, moves)) == pytest.approx(total(best))
