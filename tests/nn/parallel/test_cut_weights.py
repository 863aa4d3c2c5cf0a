"""Weights that are cut along the channel axis, in the ways in which people use weights."""

import copy
import functools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from hyperslab.layout import Grid
from hyperslab.nn.cuda_graphs.graphed import can_record
from hyperslab.testing import seeded, whole
from hyperslab.testing.strategies import Place

MESHES = [
    {"channel": 2},
    {"channel": 3},
    {"channel": 2, "height": 2},
    {"sample": 2, "channel": 2},
]
NUM_STEPS = 5
X, Y = (4, 3, 6, 8), (4, 5)


class Net(nn.Module):
    """Layers whose weights are cut along filters, along channels, by groups, or not at all."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.slopes, self.slope = nn.PReLU(8), nn.PReLU()
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.narrow = nn.Conv2d(8, 5, 3, stride=2, padding=1)
        self.scale = nn.Parameter(torch.ones(5, 1, 1))
        self.head = nn.Linear(5, 5)

    def body(self, x):
        x = self.slopes(self.norm(self.wide(x)))
        return self.narrow(self.slope(self.grouped(x))) * self.scale

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class Checkpointed(Net):
    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False).mean((2, 3)))


class Standardised(Net):
    def body(self, x):
        w = self.wide.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.square().mean().sqrt() + 1)
        v = self.narrow.weight
        v = (v - v.mean()) / (v - v.mean()).square().mean().sqrt()
        x = self.slopes(self.norm(F.conv2d(x, w, self.wide.bias, padding=1)))
        return F.conv2d(self.slope(self.grouped(x)), v, self.narrow.bias, 2, 1) * self.scale


class Tied(Net):
    """A layer that is used twice, and a weight that two layers share."""

    def __init__(self):
        super().__init__()
        self.again = nn.Conv2d(3, 8, 3, padding=1)
        self.again.weight = self.wide.weight

    def body(self, x):
        x = self.slopes(self.norm(self.wide(x) + self.again(x * x)))
        x = self.grouped(self.grouped(x))
        return self.narrow(x) * self.scale

    def forward(self, x):
        hidden = self.head(self.body(x).mean((2, 3)))
        return F.linear(torch.tanh(hidden), self.head.weight.t())


def normed_weights():
    net = Net()
    for layer in (net.wide, net.narrow, net.grouped, net.head):
        weight_norm(layer)
    return net


def frozen():
    net = Net()
    net.wide.weight.requires_grad_(False)
    net.narrow.bias.requires_grad_(False)
    net.norm.weight.requires_grad_(False)
    return net


def loss_of(net, batch):
    x, y = batch
    return F.mse_loss(net(x), y)


def step(net, optimizer, batches):
    optimizer.zero_grad()
    loss = loss_of(net, batches[0])
    loss.backward()
    optimizer.step()
    return [loss.detach()]


def clipped(net, optimizer, batches):
    optimizer.zero_grad()
    loss_of(net, batches[0]).backward()
    norm = clip_grad_norm_(net.parameters(), 0.05)
    optimizer.step()
    return [whole(norm)]


def accumulated(net, optimizer, batches):
    """Two passes without messages and one with them."""
    optimizer.zero_grad()
    with net.no_sync() if hasattr(net, "no_sync") else nullcontext():
        first = loss_of(net, batches[0])
        first.backward()
        loss_of(net, batches[1]).backward()
    loss_of(net, batches[0]).backward()
    optimizer.step()
    return [first.detach()]


def by_autograd_grad(net, optimizer, batches):
    trained = [*net.parameters()]
    loss = loss_of(net, batches[0])
    for weight, grad in zip(trained, torch.autograd.grad(loss, trained), strict=True):
        weight.grad = grad
    optimizer.step()
    return [loss.detach()]


def penalised(net, optimizer, batches):
    """A loss of outputs and of weights, which no Slab meets."""
    optimizer.zero_grad()
    decay = sum(whole(p.square().sum()) for p in net.parameters())
    loss = loss_of(net, batches[0]) + 0.01 * decay
    loss.backward()
    optimizer.step()
    return [loss.detach()]


def penalised_at_once(net, optimizer, batches):
    """The same as people write it, and numbers that they look at."""
    optimizer.zero_grad()
    decay = sum(p.square().sum() for p in net.parameters())
    loss = loss_of(net, batches[0]) + 0.01 * decay + 0.1 * net.narrow.weight.norm()
    loss.backward()
    norms = [p.grad.norm().item() for p in net.parameters()]
    optimizer.step()
    return [torch.tensor([loss.item(), net.wide.weight.abs().max().item(), *norms])]


def hooked(net, optimizer, batches):
    """Hooks see the gradient of one process, and may change it."""
    seen = {}

    def note(grad, name):
        seen[name] = whole(grad)
        return grad * 2

    handles = [
        weight.register_hook(functools.partial(note, name=name))
        for name, weight in net.named_parameters()
    ]
    out = step(net, optimizer, batches)
    for handle in handles:
        handle.remove()
    return [*out, *(seen[name] for name, _ in net.named_parameters())]


def copied(net, optimizer, batches):
    """A copy that follows the weights, and is evaluated."""
    out = step(net, optimizer, batches)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for mine, theirs in zip(twin.parameters(), net.parameters(), strict=True):
            mine.lerp_(theirs, 0.5)
    loss = loss_of(twin, batches[1])
    loss.backward()
    return [*out, loss.detach(), whole(twin.wide.weight.grad)]


def evaluated(net, optimizer, batches):
    out = step(net, optimizer, batches)
    net.eval()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            out.append(hs.gather(net(batches[1][0])))
    net.train()
    return out


def twice(net, optimizer, batches):
    """The gradient of a gradient."""
    optimizer.zero_grad()
    x = batches[0][0]
    out = net(x).square().sum()
    (grad,) = torch.autograd.grad(out, [net.head.weight], create_graph=True)
    penalty = grad.square().sum()
    penalty = whole(penalty)
    (out + 1e-3 * penalty).backward()
    optimizer.step()
    return [penalty.detach()]


SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)
WAYS = {
    "adam": (Net, ADAM, step),
    "sgd": (Net, SGD, step),
    "adamw, for each": (Net, functools.partial(torch.optim.AdamW, foreach=True), step),
    "clipped": (Net, SGD, clipped),
    "accumulated": (Net, ADAM, accumulated),
    "autograd.grad": (Net, SGD, by_autograd_grad),
    "penalised": (Net, SGD, penalised),
    "penalised at once": (Net, SGD, penalised_at_once),
    "hooked": (Net, SGD, hooked),
    "copied": (Net, ADAM, copied),
    "evaluated": (Net, ADAM, evaluated),
    "gradients of gradients": (Net, SGD, twice),
    "checkpointed": (Checkpointed, ADAM, step),
    "standardised": (Standardised, SGD, step),
    "standardised, clipped": (Standardised, SGD, clipped),
    "tied": (Tied, ADAM, step),
    "tied, accumulated": (Tied, SGD, accumulated),
    "weight norm": (normed_weights, SGD, step),
    "frozen": (frozen, ADAM, step),
}


def trained(place, name, **options):
    """What each step gives, then weights and buffers; on Slabs if there is a place."""
    make, optimizer_of, way = WAYS[name]
    torch.manual_seed(5)
    mesh = None if place is None else place.mesh()
    torch.manual_seed(5)
    net = make().double()
    if mesh is not None:
        net = hs.parallelize(net, mesh, **options)
    optimizer = optimizer_of([p for p in net.parameters() if p.requires_grad])
    out = []
    for number in range(NUM_STEPS):
        batches = [(seeded(*X, seed=s), seeded(*Y, seed=s)) for s in (number, 100 + number)]
        if mesh is not None:
            batches = [(hs.shard(x, mesh), hs.shard(y, mesh)) for x, y in batches]
        out += way(net, optimizer, batches)
    return out, {key: whole(x).clone() for key, x in net.state_dict().items()}


@functools.cache
def serial(name):
    before = torch.get_rng_state()
    found = trained(None, name)
    torch.set_rng_state(before)
    return found


@pytest.mark.every(4)
@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_training_gives_the_weights_of_one_process(run, name, axes):
    for ours in run(Place(axes), trained, name):
        torch.testing.assert_close(ours, serial(name), rtol=1e-9, atol=1e-9)


def trained_sharded(place, name):
    return trained(place, name, shard_weights=True)


SHARDED = ("clipped", "accumulated", "sgd", "evaluated", "checkpointed", "frozen")


@pytest.mark.every(5)
@pytest.mark.parametrize("axes", [{"sample": 2, "channel": 2}, {"channel": 3}], ids=str)
@pytest.mark.parametrize("name", SHARDED)
def test_fsdp_spreads_cut_weights_further_and_trains_them_alike(run, name, axes):
    for ours in run(Place(axes), trained_sharded, name):
        torch.testing.assert_close(ours, serial(name), rtol=1e-9, atol=1e-9)


def check_penalty(place):
    """Of weights that torch can add up: a weight of one number, which is cut, it cannot."""
    mesh, x = place.mesh(), seeded(*X)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 5, 1)).double()
    net = hs.parallelize(copy.deepcopy(plain), mesh, shard_weights=True)
    for each, batch in ((plain, x), (net, hs.shard(x, mesh))):
        penalty = sum(p.square().sum() for p in each.parameters())
        (each(batch).square().mean() + 0.1 * penalty).backward()
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("axes", [{"sample": 2}, {"sample": 2, "channel": 2}], ids=str)
def test_a_penalty_meets_the_loss_where_fsdp_spreads_weights(run, axes):
    run(Place(axes), check_penalty)


def numbers_held(place, shard_weights):
    """Those of weights, gradients and Adam's state on this rank, and in one process."""
    layers = [nn.Conv3d(8, 16, 3, padding=1), nn.BatchNorm3d(16), nn.PReLU(16)]
    layers += [nn.Conv3d(16, 8, 3, stride=2), nn.ConvTranspose3d(8, 8, 2, 2), nn.Conv3d(8, 8, 1)]
    layers += [nn.GroupNorm(4, 8), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, 8)]
    net = nn.Sequential(*layers)
    total = 4 * sum(p.numel() for p in net.parameters())
    mesh = place.mesh()
    net = hs.parallelize(net, mesh, shard_weights=shard_weights)
    optimizer = torch.optim.Adam(net.parameters())
    net(hs.shard(torch.ones(2, 8, 4, 4, 4), mesh)).sum().backward()
    optimizer.step()
    kept = [*net.parameters()] + [p.grad for p in net.parameters()]
    kept += [x for p in net.parameters() for x in optimizer.state[p].values() if x.ndim]
    return sum(each.to_local().numel() for each in kept), total


@pytest.mark.parametrize(
    ("axes", "shard_weights", "num"),
    [
        ({"channel": 2}, False, 2),
        ({"channel": 4}, False, 4),
        ({"channel": 2, "depth": 2}, False, 2),
        ({"sample": 2, "channel": 2}, True, 4),
    ],
    ids=str,
)
def test_a_rank_keeps_its_share_of_weights_gradients_and_optimizer_state(
    run, axes, shard_weights, num
):
    for held, total in run(Place(axes), numbers_held, shard_weights):
        assert held <= 1.1 * total / num


def check_mixed(place):
    """Weights that stay whole meet plain tensors."""
    mesh = place.mesh()

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(6, 4)
            self.bias = nn.Parameter(torch.arange(7.0))
            self.conv = nn.Conv1d(4, 4, 1)

        def forward(self, x):
            where = self.table(torch.arange(6)).t() + self.bias[torch.tensor([0, 2, 4, 6, 1, 3])]
            return self.conv(x + where)

    torch.manual_seed(0)
    plain = Positions()
    net = hs.parallelize(copy.deepcopy(plain), mesh)
    x = torch.randn(2, 4, 6)
    plain(x).square().mean().backward()
    net(hs.shard(x, mesh)).square().mean().backward()
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), theirs.grad)


@pytest.mark.parametrize("axes", [{"channel": 2}, {"sample": 2, "channel": 2}], ids=str)
def test_weights_of_unknown_layers_meet_plain_tensors(run, axes):
    run(Place(axes), check_mixed)


class Meetings(nn.Module):
    """Weights that are cut meet what every rank holds whole: masks, learnable gains, ones."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.conv, self.head = nn.Conv2d(4, 6, 3, padding=1), nn.Linear(6, 5)
        self.mask = nn.Buffer((torch.arange(6 * 4 * 9) % 3 > 0).view(6, 4, 3, 3))
        self.gain, self.table = nn.Parameter(torch.rand(6, 1, 1, 1)), nn.Embedding(7, 6)

    def forward(self, x):
        return getattr(self, self.name)(x)

    def masked(self, x):
        return F.conv2d(x, self.conv.weight * self.mask, self.conv.bias, padding=1)

    def scaled(self, x):
        return F.conv2d(x, self.conv.weight * self.gain, padding=1)

    def shifted(self, x):
        shifts = self.conv.bias + torch.linspace(0, 1, 6, dtype=x.dtype)
        return self.conv(x) * shifts.view(-1, 1, 1)

    def projected(self, x):
        column = self.head.weight @ torch.ones(6, dtype=x.dtype)
        return self.head(self.conv(x).mean((2, 3))) * column

    def convolved(self, x):
        return self.conv(x) * self.conv(torch.ones(1, 4, 8, 8, dtype=x.dtype)).mean()

    def looked_up(self, x):
        return self.conv(x) * self.head(self.table(torch.arange(7))).square().mean()

    def joined(self, x):
        more = torch.cat([self.conv.weight, torch.ones(8, 4, 3, 3, dtype=x.dtype)])
        return self.conv(x) * more.square().mean()


MEETINGS = ("masked", "scaled", "shifted", "projected", "convolved", "looked_up", "joined")


def check_meeting(place, name):
    mesh = place.mesh()
    torch.manual_seed(0)
    plain, x = Meetings(name).double(), seeded(2, 4, 8, 8)
    net = hs.parallelize(copy.deepcopy(plain), mesh)
    expected, out = plain(x), net(hs.shard(x, mesh))
    torch.testing.assert_close(hs.gather(out), expected, rtol=1e-10, atol=1e-12)
    coefficients = seeded(*expected.shape, seed=3)
    (expected * coefficients).sum().backward()
    (out * coefficients).sum().backward()
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.every(2)
@pytest.mark.parametrize("axes", [{"channel": 2}, {"sample": 2, "channel": 2}], ids=str)
@pytest.mark.parametrize("name", MEETINGS)
def test_cut_weights_meet_tensors_that_every_rank_holds(run, name, axes):
    run(Place(axes), check_meeting, name)


def check_autocast(place):
    mesh = place.mesh()
    torch.manual_seed(0)
    plain = Net()
    net = hs.parallelize(copy.deepcopy(plain), mesh)
    x = torch.randn(*X)
    with torch.autocast("cpu", torch.bfloat16):
        expected, out = plain(x), net(hs.shard(x, mesh))
        assert out.dtype == expected.dtype
        expected.float().square().mean().backward()
        out.float().square().mean().backward()
    torch.testing.assert_close(hs.gather(out), expected, rtol=0.05, atol=0.05)
    for (name, mine), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
        grad, due = whole(mine.grad), theirs.grad
        assert grad.dtype == due.dtype
        assert (grad - due).norm() < 0.1 * due.norm() + 1e-4, name


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_autocast_gives_about_what_it_gives_in_one_process(run, axes):
    run(Place(axes), check_autocast)


def statistics(place):
    """With those of a spatial group, which is two ranks along channel here."""
    mesh = place.mesh()
    torch.manual_seed(0)
    net = hs.parallelize(Net().double(), mesh, batch_stats="spatial")
    out = net(hs.shard(seeded(*X), mesh))
    out.square().mean().backward()
    found = [hs.gather(out), net.norm.running_mean, net.norm.running_var, net.wide.weight.grad]
    return [whole(each).detach() for each in found]


def test_spatial_statistics_are_those_of_meshes_that_cut_no_channels(run):
    due = run(Place({"sample": 2}), statistics)[0]
    for ours in run(Place({"sample": 2, "channel": 2}), statistics):
        torch.testing.assert_close(ours, due, rtol=1e-10, atol=1e-10)


def check_refused(place):
    """In one line, on all ranks, and the module can be used afterwards."""
    mesh = place.mesh()
    net = hs.parallelize(Net(), mesh)
    x = hs.shard(torch.ones(X), mesh)
    with pytest.raises(Exception, match="weights are cut along channels cannot be compiled: use"):
        torch.compile(net, backend="eager")(x)
    chain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
    chain = hs.parallelize(chain, mesh, depth_first=["0-2"])
    with pytest.raises(hs.UnsupportedOp, match=r"0-2, a depth-first chain, wants all channels"):
        chain(x)
    with pytest.raises(hs.UnsupportedOp, match="batch_norm cannot run on a plain tensor of shape"):
        F.batch_norm(torch.ones(2, 3, 4, 4), None, None, x.mean((0, 2, 3)), training=True)
    for convert in (net.double, lambda: net.to(memory_format=torch.channels_last)):
        with pytest.raises(hs.ConfigError, match=r"keep their dtype.*: convert the module before"):
            convert()
    assert net.to("cpu", torch.float32) is net
    net(x).sum().backward()


def test_what_cut_weights_cannot_do_is_refused(run):
    run(Place({"channel": 2}), check_refused)


def test_passes_by_cut_weights_are_not_recorded(caplog):
    grid = Grid((1, 2, 1, 1, 1))
    mesh = SimpleNamespace(device=torch.device("cuda"), grid=grid, rank=0, transport=object())
    assert not can_record(mesh)
    assert "passes run without CUDA graphs: weights are cut over channel=2" in caplog.text
