"""Where memory is short, the largest chains are computed depth first, on all ranks alike."""

import copy
import logging
import random
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.nn.depth_first import memory_watch
from hyperslab.nn.depth_first.chains import find_candidates
from hyperslab.nn.depth_first.memory_estimate import estimate_memory
from hyperslab.testing import seeded

TILES = (2000, 500)


class Block(nn.Module):
    """Functional code around a convolution."""

    def __init__(self, before, after):
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, padding=1)

    def forward(self, x):
        return F.avg_pool2d(F.leaky_relu(self.conv(x), inplace=True), 3, 2, 1)


class Net(nn.Module):
    def __init__(self, first=Block):
        super().__init__()
        self.blocks = nn.Sequential(first(2, 8), Block(8, 8))
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(240, 2))

    def forward(self, x):
        return self.head(self.blocks(x))


def made(free, *, depth_first="auto", mesh=None, first=Block):
    """A network on ranks that have so many free bytes."""
    torch.manual_seed(3)
    model = Net(first).double()
    with patch.object(memory_watch, "free_bytes", lambda _: free):
        return hs.parallelize(model, mesh or hs.init(device="cpu"), depth_first=depth_first)


def picked(model):
    chains = model._hyperslab.memory._chains
    return {chain.name: chain.tile_numel for chain in chains if chain.picked}


def stepped(model, free, x, mesh=None, cuts=None):
    """The loss and the gradients of a step with so many free bytes."""
    mesh = mesh or hs.init(device="cpu")
    with (
        patch.object(memory_watch, "free_bytes", lambda _: free),
        patch.object(memory_watch, "TILES", TILES),
    ):
        torch.manual_seed(1)
        loss = model(hs.shard(x, mesh, cuts=cuts)).square().sum()
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


X = seeded(1, 2, 24, 20)
PLENTY = 2**30


def test_nothing_is_picked_where_memory_suffices_nor_for_other_passes(caplog):
    caplog.set_level(logging.INFO, "hyperslab")
    model = made(PLENTY)
    stepped(model, PLENTY, X)
    stepped(model, 0, X[..., :20])  # no larger than what fitted
    model.eval()(hs.shard(X.repeat(2, 1, 1, 1), hs.init(device="cpu")))
    assert not picked(model)
    assert not caplog.text


def test_on_cpus_and_with_names_nothing_is_watched():
    assert made(None)._hyperslab.memory is None
    assert made(0, depth_first=["blocks.0"])._hyperslab.memory is None
    assert "forward" not in made(None).blocks.__dict__


@pytest.mark.ranks(2)
def test_what_is_picked_is_the_same_on_all_ranks_and_changes_nothing_but_rounding():
    mesh = hs.init(height=2, device="cpu")
    cuts = {"height": [0, 7, 24]}
    expected = stepped(made(None, mesh=mesh), 0, X, mesh, cuts)
    ours = made(0, mesh=mesh)
    free = PLENTY if mesh.rank else 100_000  # only one rank is short
    with patch.object(memory_watch._log, "info") as told:
        torch.testing.assert_close(stepped(ours, free, X, mesh, cuts), expected)
    assert picked(ours) == {"blocks.0": 2000}
    assert told.called == (mesh.rank == 0)


def test_the_fewest_are_picked_and_smaller_tiles_where_larger_do_not_do(caplog):
    caplog.set_level(logging.INFO, "hyperslab")
    expected = stepped(made(None), 0, X)
    found = []
    for free in (120_000, 80_000, 1):
        caplog.clear()
        model = made(free)
        torch.testing.assert_close(stepped(model, free, X), expected)
        found.append(picked(model))
        assert "are free, so blocks.0" in caplog.text
        assert ("are free: split samples over more ranks" in caplog.text) == (free == 1)
    assert found[:2] == [{"blocks.0": 2000}, {"blocks.0": 500}]
    assert found[2]["blocks.0"] == 500


def test_larger_inputs_are_looked_at_again():
    model = made(0)
    stepped(model, PLENTY, X[:, :, :23])
    assert not picked(model)
    stepped(model, 120_000, X)
    assert picked(model)


def test_copies_pick_for_themselves():
    model = made(0)
    twin = copy.deepcopy(model)
    stepped(twin, 1, X)
    assert picked(twin)
    assert not picked(model)


class Random(Block):
    """Takes one of two ways, as stochastic depth does."""

    def forward(self, x):
        return super().forward(x) * (random.random() < 0.5)


def test_what_draws_random_numbers_of_python_is_not_picked():
    model = made(0, first=Random)
    stepped(model, 1, X)
    assert "blocks.0" not in picked(model)


class Dropping(Block):
    p = 0.0

    def forward(self, x):
        return F.dropout(super().forward(x), self.p) if self.p else super().forward(x)


def test_what_was_picked_and_cannot_be_any_more_runs_as_it_is():
    models = [made(free, first=Dropping) for free in (None, 0)]
    for model in models:
        stepped(model, 1, X)
        model.zero_grad()
        model.blocks[0].p = 0.5
    assert "blocks.0" in picked(models[1])
    expected, ours = (stepped(model, 1, X) for model in models)
    torch.testing.assert_close(ours, expected)


@pytest.mark.slow
def test_what_was_picked_is_compiled_layer_by_layer():
    model, x = made(0), hs.shard(X, hs.init(device="cpu"))
    stepped(model, 1, X)
    assert picked(model)
    model.eval()
    torch.testing.assert_close(torch.compile(model, backend="eager")(x).local, model(x).local)


def test_weighing_leaves_no_trace():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout())
    before, draws = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    x = hs.shard(torch.ones(1, 2, 9, 9), hs.init(device="cpu"))
    estimate = estimate_memory(model.forward, (x,), {}, model, torch.device("cpu"))
    assert estimate.peak({}) > 4 * 7 * 7 * 4
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), draws)


class Keeping(nn.Module):
    """Keeps what it made in a pass for the next, in ways that users do."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.mask, self.seen, self.by_shape = None, [], {}

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(x.shape[2:])
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.ones(()))
        self.by_shape.setdefault(tuple(x.shape), torch.ones(()))
        self.seen.append(random.random() + np.random.rand())  # noqa: NPY002
        return self.conv(x * self.mask * self.scale)


def test_weighing_leaves_modules_and_their_hooks_alone():
    model, heard = Keeping(), []
    model.conv.register_forward_hook(lambda *_: heard.append("forward"))
    x = hs.shard(torch.ones(1, 2, 9, 9), hs.init(device="cpu"))
    before = random_states()
    estimate_memory(model.forward, (x,), {}, model, torch.device("cpu"))
    assert (model.mask, model.seen, model.by_shape, heard) == (None, [], {}, [])
    assert not hasattr(model, "scale")
    assert random_states() == before
    model(torch.ones(1, 2, 9, 9))
    assert heard == ["forward"]
    assert type(model.mask) is type(model.scale) is torch.Tensor


def random_states():
    return random.getstate(), np.random.get_state()[2]  # noqa: NPY002


def test_kernels_of_users_get_no_memory_without_values():
    """The address would be 0, and what is launched on it ends the process."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3))
    x = hs.shard(torch.ones(1, 2, 9, 9), hs.init(device="cpu"))
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        estimate_memory(lambda x: model(x).data_ptr(), (x,), {}, model, torch.device("cpu"))


def test_bytes_are_those_that_autograd_keeps():
    """A convolution keeps its input, an activation in place its result; both have gradients."""
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(inplace=True), nn.Conv2d(4, 1, 1))
    x = hs.shard(torch.ones(1, 2, 8, 8), hs.init(device="cpu"))
    estimate = estimate_memory(model.forward, (x,), {}, model, torch.device("cpu"))
    between = 4 * 8 * 8 * 4
    assert estimate.peak({}) == 3 * between  # what is kept, and what passes through the activation


def test_a_network_that_cannot_be_weighed_runs_as_it_is():
    model = made(0)
    model.head[0] = Refusing()
    stepped(model, 1, X)
    assert not picked(model)


class Refusing(nn.Flatten):
    def forward(self, x):
        assert float(x.detach().sum()) == float(x.detach().sum())  # which it has to know
        return super().forward(x)


def test_chains_with_hooks_are_left_alone():
    model = made(0)
    model.blocks[0].conv.register_forward_hook(lambda *_: None)
    stepped(model, 1, X)
    assert "blocks.0" not in picked(model)


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (
            [nn.Conv2d(1, 1, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(1, 1, 3), nn.ReLU()],
            "0-2 3-4",
        ),
        ([nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1), nn.ReLU(), nn.Conv2d(1, 1, 1), nn.Tanh()], "2-4"),
        ([nn.Conv2d(1, 1, 3), nn.Dropout(), nn.ReLU(), nn.Flatten()], ""),
        ([Block(1, 1), nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU())], "0 1.0-1"),
    ],
    ids=["pools end stretches", "batch norm", "dropout", "nested"],
)
def test_candidates(layers, names):
    assert [chain.name for chain in find_candidates(nn.Sequential(*layers))] == names.split()
