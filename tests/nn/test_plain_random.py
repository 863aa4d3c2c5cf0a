"""Random numbers of plain tensors within a parallelized module: the same on any mesh."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import dropout as dropout_by_name
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from hyperslab.nn.plain_random import active_draws
from hyperslab.testing import seeded, whole
from hyperslab.testing.strategies import Place

SHAPE = (3, 4, 11, 9, 10)


class Net(nn.Module):
    """A convolution, and what ``function`` makes of it and of the whole of it."""

    def __init__(self, function):
        super().__init__()
        self.conv, self.drop = nn.Conv3d(4, 4, 3, padding=1), nn.Dropout(0.3)
        self.register_buffer("scale", torch.linspace(1, 2, 4))
        self.function = function

    def forward(self, x):
        y = self.conv(x)
        return self.function(self, y, hs.gather(y.mean((2, 3, 4))))


def by_channel(t):
    return t.reshape(-1, 4, 1, 1, 1)


class Drawing(torch.autograd.Function):
    """Draws the same numbers in both of its passes."""

    @staticmethod
    def forward(ctx, t):
        ctx.state = torch.get_rng_state()
        return F.dropout(t, 0.5)

    @staticmethod
    def backward(ctx, grad):
        with torch.random.fork_rng():
            torch.set_rng_state(ctx.state)
            return F.dropout(grad, 0.5)


DRAWS = {
    "gathered": lambda net, y, t: by_channel(F.dropout(t, 0.4)) * y,
    "a layer": lambda net, y, t: by_channel(net.drop(t)) * y,
    "a name from before": lambda net, y, t: by_channel(dropout_by_name(t, 0.4)) * y,
    "in place": lambda net, y, t: by_channel(F.dropout(t * 1, 0.4, inplace=True)) * y,
    "by torch": lambda net, y, t: by_channel(torch.dropout(t, 0.4, True)) * y,
    "channels": lambda net, y, t: by_channel(F.dropout1d(t[..., None], 0.4)) * y,
    "channels without a batch": lambda net, y, t: F.dropout1d(t, 0.4).sum() * y,
    "channels in place": lambda net, y, t: by_channel(F.dropout1d(t[..., None] * 1, 0.4, True)) * y,
    "saturated": lambda net, y, t: by_channel(F.alpha_dropout(t, 0.4, True)) * y,
    "saturated in place": lambda net, y, t: (
        by_channel(F.alpha_dropout(t * 1, 0.4, True, inplace=True)) * y
    ),
    "complex": lambda net, y, t: by_channel(F.dropout(t + 0j, 0.4).real) * y,
    "a weight": lambda net, y, t: by_channel(F.dropout(net.conv.bias, 0.4)) * y,
    "of weights": lambda net, y, t: by_channel(torch.randn_like(net.conv.bias * 2)) * y,
    "a buffer": lambda net, y, t: by_channel(F.dropout(net.scale, 0.4)) * y,
    "drop path": lambda net, y, t: y * torch.empty(len(y), 1, 1, 1, 1).bernoulli_(0.5),
    "drop path by a method": lambda net, y, t: y * y.new_empty(len(y), 1, 1, 1, 1).bernoulli_(0.5),
    "like": lambda net, y, t: by_channel(torch.rand_like(t) + torch.randn_like(input=t)) * y,
    "like, on a device": lambda net, y, t: by_channel(torch.rand_like(t, device="cpu")) * y,
    "one number": lambda net, y, t: torch.rand_like(t.sum()) * y,
    "filled": lambda net, y, t: by_channel(t.detach().normal_(1, 2).exponential_().uniform_()) * y,
    "coins": lambda net, y, t: by_channel(torch.bernoulli(t.detach().sigmoid())) * y,
    "classes": lambda net, y, t: by_channel(F.gumbel_softmax(t, dim=1)) * y,
    "integers": lambda net, y, t: y * torch.empty(1, dtype=torch.int64).bernoulli_(0.5),
    "torch's own": lambda net, y, t: y * torch.rand(()) + torch.randint_like(t, 9).sum(),
    "before Slabs": lambda net, y, t: (
        F.dropout(y, 0.4) * by_channel(F.dropout(t, 0.4)) * net.drop(y)
    ),
    "checkpoint": lambda net, y, t: by_channel(checkpoint(net.drop, t, use_reentrant=False)) * y,
    "reentrant checkpoint": lambda net, y, t: (
        by_channel(checkpoint(net.drop, t, use_reentrant=True)) * y
    ),
    "checkpoint of both": lambda net, y, t: checkpoint(
        lambda y: by_channel(F.dropout(hs.gather(y.mean((2, 3, 4))), 0.4)) * y,
        y,
        use_reentrant=False,
    ),
    "a function of autograd": lambda net, y, t: by_channel(Drawing.apply(t)) * y,
    "not in training": lambda net, y, t: by_channel(F.dropout(t, 0.4, False)) * y,
}


def drawn(place, name):
    mesh = place.mesh()
    torch.manual_seed(0)
    net = hs.parallelize(Net(DRAWS[name]).double(), mesh)
    results = []
    for seed in range(2):
        torch.manual_seed(seed)
        x = hs.shard(seeded(*SHAPE), mesh, cuts=place.cuts_of(5))
        out = net(x)
        (out * hs.shard(seeded(*SHAPE, seed=7), mesh, cuts=place.cuts_of(5))).sum().backward()
        results += [hs.gather(out).detach(), whole(net.conv.weight.grad).clone(), torch.rand(())]
    assert active_draws() is None
    return results


@pytest.mark.every(3)
@pytest.mark.parametrize("name", DRAWS)
def test_numbers_do_not_depend_on_the_mesh(run, place, name):
    (due,) = run(Place({}), drawn, name)
    for ours in run(place, drawn, name):
        torch.testing.assert_close(ours, due, rtol=1e-10, atol=1e-10)


def alone(place):
    """One rank runs the module by itself, on a plain tensor."""
    mesh = place.mesh()
    torch.manual_seed(0)
    net = hs.parallelize(Net(DRAWS["gathered"]).double(), mesh)
    if mesh.rank:
        return None
    torch.manual_seed(0)
    return net(seeded(*SHAPE)).detach()


def test_a_rank_draws_them_by_itself_on_plain_tensors(run):
    (due,) = run(Place({}), alone)
    first, second = run(Place({"depth": 2}), alone)
    torch.testing.assert_close(first, due)
    assert second is None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["gathered", "a weight", "drop path", "torch's own"])
def test_ranks_whose_random_states_differ_are_told(name):
    mesh = hs.init(depth=2, device="cpu")
    torch.manual_seed(0)
    net, x = hs.parallelize(Net(DRAWS[name]).double(), mesh), hs.shard(seeded(*SHAPE), mesh)
    torch.manual_seed(mesh.rank)
    with torch.no_grad(), pytest.raises(hs.CommError, match="seed all ranks alike"):
        net(x)
    torch.manual_seed(0)
    net(x).sum().backward()


@pytest.mark.ranks(2)
def test_ranks_that_draw_nothing_within_passes_may_differ_in_their_random_states():
    mesh = hs.init(depth=2, device="cpu")
    net = hs.parallelize(Net(DRAWS["not in training"]).double(), mesh)
    torch.manual_seed(mesh.rank)
    with torch.no_grad():
        net(hs.shard(seeded(*SHAPE), mesh))
    torch.manual_seed(0)


def test_outside_of_passes_numbers_are_torchs_own():
    hs.parallelize(nn.Dropout(), hs.init(device="cpu"))
    x = torch.ones(100)
    torch.manual_seed(0)
    drawn = F.dropout(x), torch.rand_like(x), torch.empty(9).normal_()
    torch.manual_seed(0)
    keep = torch.empty(100).bernoulli_(0.5)
    torch.testing.assert_close(drawn, (keep * 2, torch.rand(100), torch.randn(9)))
