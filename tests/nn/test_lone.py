"""Passes of a module on one rank: the first on Slabs, then without, where they change nothing."""

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from hyperslab.kernels import fused, tiles
from hyperslab.nn.op import OPS
from hyperslab.testing import seeded as seeded64

X = (2, 3, 6, 5)


def seeded(*shape, seed=0):
    return seeded64(*shape, seed=seed).float()


class Net(nn.Module):
    """Notes what its forward pass is given."""

    def __init__(self, function=None, **parts):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        for name, part in parts.items():
            self.add_module(name, part)
        self.function = function or (lambda net, y: y)
        self.kind = None
        self.seen = []

    def forward(self, x, *args, **kwargs):
        self.kind = type(x)
        y = F.relu(self.norm(self.conv(x)))
        return self.function(self, y, *args, **kwargs)


def pair(function=None, **parts):
    """A plain module and a parallel one with the same weights, and the mesh."""
    torch.manual_seed(0)
    plain, mesh = Net(function, **parts), hs.init(device="cpu")
    return plain, hs.parallelize(copy.deepcopy(plain), mesh), mesh


def kinds_of_passes(net, mesh, *args, num=3, **kwargs):
    """What each of some passes runs on: ``S`` for Slabs, ``t`` for plain tensors."""
    found = ""
    for seed in range(num):
        net(hs.shard(seeded(*X, seed=seed), mesh), *args, **kwargs)
        found += "S" if issubclass(net.kind, hs.Slab) else "t"
    return found


def test_results_gradients_and_buffers_are_those_of_the_plain_module():
    plain, net, mesh = pair()
    kinds = []
    for seed in range(4):
        x = seeded(*X, seed=seed)
        due, out = plain(x), net(hs.shard(x, mesh))
        kinds.append(net.kind)
        assert type(out) is hs.Slab
        assert torch.equal(out.local, due)
        due.square().sum().backward()
        (out * out).sum().backward()
        for (name, p), q in zip(plain.named_parameters(), net.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), name
        for (name, b), c in zip(plain.named_buffers(), net.named_buffers(), strict=True):
            assert torch.equal(b, c[1]), name
    assert kinds[1:] == [Tensor] * 3


def test_shapes_dtypes_modes_and_arguments_are_told_apart():
    _, net, mesh = pair(lambda net, y, scale=1: y * scale)
    known = net._hyperslab.run._known
    assert kinds_of_passes(net, mesh) == "Stt"
    assert len(known) == 1
    assert kinds_of_passes(net, mesh, 2) == "Stt"
    assert kinds_of_passes(net, mesh, scale=3) == "Stt"
    assert len(known) == 3
    net.norm.eval()
    kinds_of_passes(net, mesh)
    assert len(known) == 4
    with torch.no_grad():
        kinds_of_passes(net, mesh)
    with torch.autocast("cpu", torch.bfloat16):
        assert kinds_of_passes(net, mesh) == "Stt"
        assert net(hs.shard(seeded(*X), mesh)).dtype == torch.bfloat16
    net(hs.shard(seeded(1, *X[1:]), mesh))
    assert len(known) == 7


@dataclass
class Record:
    y: hs.Slab


def test_outputs_are_slabs_where_they_were():
    def function(net, y):
        return {"y": y, "pair": (y.mean(), y.flatten(1), None, 3), "weight": net.conv.weight}

    _, net, mesh = pair(function)
    first, second = (net(hs.shard(seeded(*X), mesh)) for _ in range(2))
    assert net.kind is Tensor
    assert [type(v) for v in (*first["pair"], first["y"])] == [
        type(v) for v in (*second["pair"], second["y"])
    ]
    assert type(first["y"]) is hs.Slab
    assert first["pair"][1].is_view
    assert second["pair"][1].is_view
    assert second["weight"] is net.conv.weight


DROPOUTS = {
    "d0": nn.Dropout(0.3),
    "d1": nn.Dropout2d(0.5),
    "d2": nn.AlphaDropout(0.2),
    "d3": nn.Dropout(0.4, inplace=True),
}


def run_dropouts(net, y):
    return net.d3(net.d2(net.d1(net.d0(y))))


def test_dropout_has_the_masks_of_slabs_and_draws_as_often():
    _, net, mesh = pair(run_dropouts, **DROPOUTS)
    _, slabs, _ = pair(run_dropouts, **DROPOUTS)
    slabs.conv.register_forward_hook(lambda *_: None)  # so that it runs on Slabs
    for seed in range(3):
        outs = []
        for each in (net, slabs):
            torch.manual_seed(seed)
            outs.append((each(hs.shard(seeded(*X), mesh)).local, torch.get_rng_state()))
        assert torch.equal(outs[0][0], outs[1][0])
        assert torch.equal(outs[0][1], outs[1][1])
    assert net.kind is Tensor
    assert issubclass(slabs.kind, hs.Slab)


def grad_with(changes, function, **parts):
    """Of the first weight, after passes before which settings that nobody sees are changed."""
    _, net, mesh = pair(function, **parts)
    for seed, settings in enumerate(changes):
        net.hidden = [settings]
        torch.manual_seed(seed)
        net.zero_grad()
        net(hs.shard(seeded(*X), mesh)).square().sum().backward()
    assert "forward" not in net.conv.__dict__
    return net.conv.weight.grad


@pytest.mark.parametrize("changes", [[True] * 3, [False, False, True], [False, True, True]])
def test_checkpointed_dropout_has_one_mask_in_both_passes(changes):
    def function(net, y):
        return checkpoint(net.d0, y, use_reentrant=False) if net.hidden[0] else net.d0(y)

    due = grad_with([False] * 3, function, d0=nn.Dropout(0.5))
    assert torch.equal(grad_with(changes, function, d0=nn.Dropout(0.5)), due)


def test_random_numbers_that_come_later_are_told_of_and_passes_then_stay_on_slabs(caplog):
    _, net, mesh = pair(lambda net, y: F.dropout(y, 0.5) if net.seen else y)
    assert kinds_of_passes(net, mesh) == "Stt"
    net.seen = [True]
    assert kinds_of_passes(net, mesh) == "tSS"
    assert "drew random numbers" in caplog.text


def test_arguments_that_are_never_the_same_are_not_watched_for_ever(caplog):
    caplog.set_level("DEBUG", "hyperslab")
    _, net, mesh = pair(lambda net, y, number: y * number)
    for number in range(30):
        net(hs.shard(seeded(*X), mesh), number)
    assert "other kinds" in caplog.text
    assert net.kind is hs.Slab


def test_slabs_that_a_later_pass_returns_are_left_as_they_are():
    _, net, mesh = pair(lambda net, y: net.seen[0] if net.seen else y)
    assert kinds_of_passes(net, mesh) == "Stt"
    net.seen = [hs.shard(torch.ones(2), mesh, axes=[None])]
    assert net(hs.shard(seeded(*X), mesh)) is net.seen[0]


def test_views_are_told_apart_from_what_they_are_views_of():
    net = hs.parallelize(nn.Identity(), mesh := hs.init(device="cpu"))
    x = hs.shard(seeded(*X), mesh)
    for _ in range(2):
        assert not net(x[:1].clone()).is_view
        assert net(x[:1]).is_view


def keep(net, y):
    net.seen[:] = [y * 2]
    return y


def shard_more(net, y):
    return y + hs.shard(torch.ones(y.shape), hs.init(device="cpu"))


class Box:
    def __init__(self, y):
        self.y = y


NEED_SLABS = {
    "dropout without a layer": lambda net, y: F.dropout(y, 0.5),
    "dropout of a plain tensor": lambda net, y: y + net.d0(net.conv.bias.sum().reshape(1)),
    "random numbers": lambda net, y: y * torch.rand(()),
    "no rule": lambda net, y: torch.histc(y.detach(), 4),
    "a view of memory with gaps": lambda net, y: y.transpose(1, 2).view(2, -1),
    "noise": lambda net, y: y + torch.rand_like(y),
    "a Slab that is kept": keep,
    "a Slab that is kept and returned": lambda net, y: setattr(net, "z", y) or y,
    "an output that hides a Slab": lambda net, y: Box(y),
    "an output in a dataclass": lambda net, y: Record(y),
    "a Slab from elsewhere": shard_more,
    "the piece": lambda net, y: y.with_local(y.local * 2),
    "the layout": lambda net, y: y.reshape(y.layout.shape),
    "all pieces": lambda net, y: hs.gather(y),
    "words": lambda net, y: y * len(str(y)),
    "a copy": lambda net, y: copy.copy(y),
    "bytes": lambda net, y: y * len(pickle.dumps(y.detach().local)),
}


@pytest.mark.parametrize("name", NEED_SLABS)
def test_slabs_stay_where_they_are_needed(name):
    _, net, mesh = pair(NEED_SLABS[name], d0=nn.Dropout(0.5))
    assert kinds_of_passes(net, mesh) == "SSS"


DO_NOT_NEED_SLABS = {
    "shapes": lambda net, y: y.reshape(len(y), y.size(1), -1).permute(0, 2, 1) * y.dim(),
    "writing": lambda net, y: (y * 3).add_(1).mul_(2),
    "items": lambda net, y: y[:, 1:3] + y[:, :2],
    "kinds": lambda net, y: y.to(y.dtype).to(y.device) if y.is_floating_point() else None,
    "joining": lambda net, y: torch.cat([y, F.max_pool2d(y, 3, 1, 1)], 1),
    "numbers": lambda net, y: y / float(y.detach().abs().max()),
    "attributes": lambda net, y: y.mT @ y,
    "hooks": lambda net, y: y.register_hook(lambda grad: grad * 2) and y,
    "parts": lambda net, y: sum(y.unbind(0)),
    "iteration": lambda net, y: torch.stack([*y]),
}


@pytest.mark.parametrize("name", DO_NOT_NEED_SLABS)
def test_what_tensors_have_does_not_need_slabs_and_comes_to_the_same(name):
    plain, net, mesh = pair(DO_NOT_NEED_SLABS[name])
    assert kinds_of_passes(net, mesh, num=1) == "S"
    plain.load_state_dict(net.state_dict())
    for seed in range(1, 3):
        x = seeded(*X, seed=seed)
        due, out = plain(x), net(hs.shard(x, mesh))
        assert net.kind is Tensor
        torch.testing.assert_close(out.local, due)
        due.square().sum().backward()
        (out * out).sum().backward()
        torch.testing.assert_close(net.conv.weight.grad, plain.conv.weight.grad)


class Asking(Net):
    def forward(self, x):
        return super().forward(x) * (2 if isinstance(x, hs.Slab) else 3)


def test_slabs_stay_where_a_module_asks_for_them():
    net = hs.parallelize(Asking(), mesh := hs.init(device="cpu"))
    assert kinds_of_passes(net, mesh) == "SSS"


def test_slabs_stay_where_the_whole_pass_is_checkpointed():
    _, net, mesh = pair(lambda net, y: F.normalize(y))
    for seed in range(3):
        out = checkpoint(net, hs.shard(seeded(*X, seed=seed), mesh), use_reentrant=False)
        out.square().sum().backward()
        assert issubclass(net.kind, hs.Slab)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_part_keeps_the_module_on_slabs():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), torch.jit.script(nn.Dropout(0.5)))
    net = hs.parallelize(net, hs.init(device="cpu"))
    assert net._hyperslab.run._kind((), {}) is None


def test_after_an_error_passes_run_on_slabs():
    def function(net, y):
        return y.local if net.seen else y

    _, net, mesh = pair(function)
    assert kinds_of_passes(net, mesh) == "Stt"
    net.seen = [True]
    with pytest.raises(AttributeError) as error:
        net(hs.shard(seeded(*X), mesh))
    assert "plain tensors" in "".join(error.value.__notes__)
    assert kinds_of_passes(net, mesh) == "SSS"


def test_what_is_kept_of_a_pass_is_a_slab_like_any_other():
    _, net, mesh = pair(keep)
    net(hs.shard(seeded(*X), mesh))
    (kept,) = net.seen
    assert type(kept) is hs.Slab
    assert type(kept + 1) is hs.Slab
    assert kept.layout.shape == (2, 4, 6, 5)


def test_a_pass_that_writes_into_its_argument_does_so():
    net = hs.parallelize(nn.Sequential(nn.ReLU(inplace=True)), mesh := hs.init(device="cpu"))
    for _ in range(3):
        x = seeded(*X)
        out = net(hs.shard(x, mesh))
        assert torch.equal(x, seeded(*X).relu())
        assert torch.equal(out.local, x)


def test_slabs_stay_where_rules_are_the_users():
    before = OPS[F.softplus]
    _, net, mesh = pair()  # it might call the function in a later pass
    assert kinds_of_passes(net, mesh) == "Stt"
    try:
        hs.register(F.softplus)(lambda x: x.with_local(x.local + 7))
        assert kinds_of_passes(net, mesh) == "SSS"
    finally:
        OPS[F.softplus] = before
    assert kinds_of_passes(net, mesh, num=1) == "t"


def test_slabs_stay_where_tensors_are_cut(monkeypatch):
    _, net, mesh = pair()
    monkeypatch.setattr(tiles, "MAX_NUMEL", 200)
    assert kinds_of_passes(net, mesh) == "SSS"


@pytest.mark.parametrize(
    ("function", "due"),
    [
        (lambda net, y: F.max_pool2d(y, 2), "SSS"),
        (lambda net, y: F.max_pool2d(y.flatten(2)[:, :, :2, None].contiguous(), 1), "Stt"),
    ],
    ids=["much is pooled", "little is pooled"],
)
def test_slabs_stay_where_fused_pools_do_a_share_of_the_work(monkeypatch, function, due):
    monkeypatch.setattr(fused, "is_measured", lambda device: True)
    monkeypatch.setattr(fused, "MIN_NUMEL", 1)
    _, net, mesh = pair(function)
    net.conv = nn.Conv2d(3, 65, 3, padding=1)  # too many filters for kernels of ours
    net.norm = nn.BatchNorm2d(65)
    assert kinds_of_passes(net, mesh) == due


@pytest.mark.parametrize(("kernel", "due"), [(3, "SSS"), (7, "Stt")])
def test_slabs_stay_where_a_kernel_of_ours_convolves(monkeypatch, kernel, due):
    _, net, mesh = pair()
    net.conv = nn.Conv2d(3, 4, kernel, padding=kernel // 2)
    monkeypatch.setattr(fused, "is_measured", lambda device: True)
    monkeypatch.setattr(fused, "MIN_NUMEL", 1)
    assert kinds_of_passes(net, mesh) == due


def test_slabs_stay_where_layers_have_hooks_and_as_long_as_they_do():
    _, net, mesh = pair()
    shapes = []
    assert kinds_of_passes(net, mesh) == "Stt"
    hook = net.conv.register_forward_hook(lambda layer, args, y: shapes.append(y.layout.shape))
    assert kinds_of_passes(net, mesh, num=2) == "SS"
    hook.remove()
    assert kinds_of_passes(net, mesh, num=1) == "t"
    assert len(shapes) == 2


def test_a_module_computed_depth_first_stays_on_slabs():
    net = hs.parallelize(Net(), mesh := hs.init(device="cpu"), depth_first=["conv"])
    assert kinds_of_passes(net, mesh) == "SSS"


def test_a_layer_that_comes_later_is_seen():
    _, net, mesh = pair(lambda net, y: net.last(y), last=nn.Identity())
    assert kinds_of_passes(net, mesh) == "Stt"
    net.last = nn.Dropout(0.5)
    assert kinds_of_passes(net, mesh) == "Stt"


def test_attributes_that_are_numbers_are_watched():
    _, net, mesh = pair(lambda net, y: F.dropout(y, net.p) if net.p else y)
    net.p = 0.0
    assert kinds_of_passes(net, mesh) == "Stt"
    net.p = 0.5
    assert kinds_of_passes(net, mesh) == "SSS"
    net.p = 0.0
    assert kinds_of_passes(net, mesh, num=1) == "t"


def test_a_pass_that_fails_leaves_slabs_like_any_others_and_may_succeed_later():
    def function(net, y):
        if net.fails:
            net.seen.append(y)
            raise ValueError("mine")
        return y

    _, net, mesh = pair(function)
    net.fails = True
    with pytest.raises(ValueError, match="mine"):
        net(hs.shard(seeded(*X), mesh))
    assert type(net.seen[0]) is hs.Slab
    net.fails = False
    assert kinds_of_passes(net, mesh) == "Stt"


def test_a_parallel_module_inside_another_ones_pass_keeps_it_on_slabs():
    _, inner, mesh = pair()
    others = [inner]  # in a list, out of sight of the outer module
    _, net, _ = pair(lambda net, y: y + others[0](y[:, :3]))
    assert kinds_of_passes(net, mesh) == "SSS"


def test_a_copy_of_the_module_has_layers_of_dropout_of_its_own():
    _, net, mesh = pair(lambda net, y: net.d0(y), d0=nn.Dropout(0.5))
    twin = copy.deepcopy(net)
    twin.d0.eval()
    for each in (net, twin):
        assert kinds_of_passes(each, mesh) == "Stt"
    x = hs.shard(seeded(*X), mesh)
    assert (net(x).local == 0).sum() > (twin(x).local == 0).sum()
