"""Passes of a module on one rank: plain tensors in every one of them, and torch's numbers."""

import copy
import pickle
import sys
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from hyperslab.kernels import fused, tiles
from hyperslab.nn.op import IMPLEMENTED, OPS, USERS, Implementation, implement
from hyperslab.nn.single_rank import served
from hyperslab.nn.single_rank.mode import active_mode
from hyperslab.nn.single_rank.served import conv_needs, conv_transpose_needs
from hyperslab.testing import on_ranks, seeded as seeded64

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
        self.seen = []

    def forward(self, x, *args, **kwargs):
        self.seen.append(type(x))
        y = F.relu(self.norm(self.conv(x)))
        return self.function(self, y, *args, **kwargs)


def pair(function=None, **parts):
    """A plain module and a parallel one with the same weights, and the mesh."""
    torch.manual_seed(0)
    plain, mesh = Net(function, **parts), hs.init(device="cpu")
    return plain, hs.parallelize(copy.deepcopy(plain), mesh), mesh


USES = {
    "nothing": lambda net, y: y,
    "shapes": lambda net, y: y.reshape(len(y), y.size(1), -1).permute(0, 2, 1) * y.dim(),
    "a view of memory with gaps": lambda net, y: y.transpose(1, 2).flatten(1),
    "writing": lambda net, y: (y * 3).add_(1).mul_(2),
    "items": lambda net, y: y[:, 1:3] + y[:, :2],
    "dtypes": lambda net, y: y.to(y.dtype).to(y.device) if y.is_floating_point() else None,
    "joining": lambda net, y: torch.cat([y, F.max_pool2d(y, 3, 1, 1)], 1),
    "numbers": lambda net, y: y / float(y.detach().abs().max()),
    "attributes": lambda net, y: y.mT @ y,
    "hooks": lambda net, y: y.register_hook(lambda grad: grad * 2) and y,
    "parts": lambda net, y: sum(y.unbind(0)),
    "iteration": lambda net, y: torch.stack([*y]),
    "no rule": lambda net, y: y + torch.histc(y.detach(), 4).mean(),
    "words": lambda net, y: y * len(str(y)),
    "a copy": lambda net, y: copy.copy(y),
    "bytes": lambda net, y: y * len(pickle.dumps(y.detach())),
    "numpy": lambda net, y: y * float(y.detach().numpy().max()),
    "a tensor of it": lambda net, y: torch.as_tensor(y) + torch.as_tensor(y, dtype=y.dtype),
    "all of it": lambda net, y: hs.gather(y) * hs.gather(y, dims=[2]),
    "random numbers": lambda net, y: y * torch.rand(()),
    "a class": lambda net, y: y * 2 if isinstance(y, Tensor) and type(y) is Tensor else y,
    "vmap": lambda net, y: torch.vmap(torch.sin)(y) + torch.func.grad(lambda t: t.sum())(y),
}


@pytest.mark.parametrize("name", USES)
def test_results_gradients_and_buffers_are_those_of_the_plain_module_in_every_pass(name):
    plain, net, mesh = pair(USES[name])
    for seed in range(3):
        x = seeded(*X, seed=seed)
        torch.manual_seed(seed)
        due = plain(x)
        torch.manual_seed(seed)
        out = net(hs.shard(x, mesh))
        assert type(out) is hs.Slab
        torch.testing.assert_close(out.local, due)
        due.square().sum().backward()
        (out * out).sum().backward()
        for (key, p), q in zip(plain.named_parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=key)
        for (key, b), c in zip(plain.named_buffers(), net.buffers(), strict=True):
            torch.testing.assert_close(b, c, msg=key)
    assert net.seen == [Tensor] * 3


class Model(nn.Module):
    """A base class that asks what it is given, where subclasses do not show it."""

    def forward(self, x):
        return self.run(x) * (2 if isinstance(x, torch.Tensor) else 3)


class Derived(Model):
    def __init__(self):
        super().__init__()
        self.run = nn.Conv2d(3, 4, 3)


def test_a_base_class_that_asks_for_tensors_gives_the_same_in_every_pass():
    mesh, x = hs.init(device="cpu"), seeded(*X)
    net = hs.parallelize(Derived(), mesh)
    due = F.conv2d(x, net.run.weight, net.run.bias) * 2
    for _ in range(3):
        torch.testing.assert_close(net(hs.shard(x, mesh)).local, due)


@dataclass
class Record:
    y: Tensor
    name: str = "mine"


def test_outputs_are_slabs_if_arguments_are_and_numbers_and_weights_are_plain():
    def function(net, y):
        more = (y.mean(), y.flatten(1), None, 3)
        return {"y": y, "pair": more, "weight": net.conv.weight, "record": Record(y)}

    _, net, mesh = pair(function)
    out = net(hs.shard(seeded(*X), mesh))
    assert [type(v) for v in out["pair"]] == [Tensor, hs.Slab, type(None), int]
    assert type(out["y"]) is type(out["record"].y) is hs.Slab
    assert out["record"].name == "mine"
    assert out["pair"][1].is_view
    assert not out["y"].is_view
    assert out["weight"] is net.conv.weight
    plain = net(seeded(*X))
    assert type(plain["y"]) is type(plain["record"].y) is Tensor


def test_slabs_in_containers_records_and_keywords_are_unwrapped():
    def function(net, y, others, *, record):
        assert type(others["x"][0]) is type(record.y) is Tensor
        return y + others["x"][0].mean() + record.y.mean()

    _, net, mesh = pair(function)
    x = hs.shard(seeded(*X), mesh)
    assert type(net(x, {"x": [x]}, record=Record(x))) is hs.Slab


def test_what_a_module_returns_of_what_it_was_given_is_that_slab():
    net = hs.parallelize(nn.Identity(), mesh := hs.init(device="cpu"))
    x = hs.shard(seeded(*X), mesh)
    assert net(x).local is x.local
    assert not net(x).is_view
    assert net(x[:1]).is_view


def test_slabs_that_are_made_within_a_pass_may_meet_plain_tensors():
    plain, net, mesh = pair(lambda net, y: y + torch.ones(y.shape))
    net.function = lambda net, y: y + hs.shard(torch.ones(y.shape), mesh)
    out = net(hs.shard(seeded(*X), mesh))
    assert type(out) is hs.Slab
    torch.testing.assert_close(out.local, plain(seeded(*X)))


def test_a_pass_that_writes_into_its_argument_does_so():
    net = hs.parallelize(nn.Sequential(nn.ReLU(inplace=True)), mesh := hs.init(device="cpu"))
    for _ in range(2):
        x = seeded(*X)
        out = net(hs.shard(x, mesh))
        assert torch.equal(x, seeded(*X).relu())
        assert torch.equal(out.local, x)


DRAWS = {
    "layers": lambda net, y: net.d3(net.d2(net.d1(net.d0(y)))),
    "functions": lambda net, y: F.dropout(y, 0.5) + torch.dropout(y, 0.5, True),
    "channels": lambda net, y: F.dropout2d(y) + torch.feature_dropout(y, 0.5, True),
    "in place": lambda net, y: F.dropout(y * 1, 0.5, True, True),
    "like": lambda net, y: y * torch.rand_like(y) + torch.randn_like(y),
    "bernoulli": lambda net, y: torch.bernoulli(input=y.detach().sigmoid()) * y,
    "filled": lambda net, y: y * torch.empty_like(y).uniform_() * y.new_empty(y.shape).normal_(),
    "by samples": lambda net, y: F.gumbel_softmax(y, dim=1),
    "checkpoint": lambda net, y: checkpoint(net.d0, y, use_reentrant=False),
}


def dropouts():
    return {
        "d0": nn.Dropout(0.3),
        "d1": nn.Dropout2d(0.5),
        "d2": nn.AlphaDropout(0.2),
        "d3": nn.Dropout(0.4, inplace=True),
    }


def run_draws(name, mesh):
    torch.manual_seed(0)
    net = Net(DRAWS[name], **dropouts())
    net.norm = nn.Identity()  # whose sums are rounded otherwise
    net = hs.parallelize(net.double(), mesh)
    outs = []
    for seed in range(2):
        torch.manual_seed(seed)
        out = net(hs.shard(seeded64(4, *X[1:]), mesh))
        out.square().sum().backward()
        outs.append(hs.gather(out))
    return outs, net.conv.weight.grad


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_those_of_two_ranks(name):
    halves = run_draws(name, hs.init(device="cpu", height=2))
    torch.testing.assert_close(run_draws(name, hs.init(device="cpu")), halves)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_dropout_has_one_mask_in_both_passes(reentrant):
    def function(net, y):
        return checkpoint(net.d0, y, use_reentrant=reentrant) if net.again else net.d0(y)

    grads = []
    for again in (False, True):
        _, net, mesh = pair(function, d0=nn.Dropout(0.5))
        net.again = again
        torch.manual_seed(1)
        net(hs.shard(seeded(*X), mesh)).square().sum().backward()
        grads.append(net.conv.weight.grad)
    assert torch.equal(*grads)


class Recomputed(torch.autograd.Function):
    """A checkpoint of the user's own, which restores torch's generators."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run, ctx.state = run, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.random.fork_rng(), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            out = ctx.run(x)
        return None, torch.autograd.grad(out, x, grad)[0]


def test_a_function_that_computes_again_in_its_backward_pass_draws_the_same_numbers():
    _, net, mesh = pair(lambda net, y: Recomputed.apply(net.d0, y) * 1, d0=nn.Dropout(0.5))
    net.norm = nn.Identity()
    out = net(hs.shard(seeded(*X), mesh)).local
    (grad,) = torch.autograd.grad(out.sum(), net.conv.bias)
    due = (out != 0).sum((0, 2, 3)) * 2.0
    torch.testing.assert_close(grad, due)


def test_a_whole_pass_can_be_checkpointed():
    plain, net, mesh = pair(lambda net, y: net.d0(F.normalize(y)), d0=nn.Dropout(0.5))
    for each, x in ((net, hs.shard(seeded(*X), mesh)), (plain, seeded(*X))):
        out = checkpoint(each, x, use_reentrant=False)
        mask = (out != 0).sum()
        out.square().sum().backward()
        assert 0 < int(mask) < out.numel()
        assert each.conv.weight.grad.isfinite().all()


@pytest.fixture
def users_rule():
    before = OPS[F.softplus]
    hs.register(F.softplus)(lambda x: x.with_local(x.local + 7))
    yield
    OPS[F.softplus] = before
    USERS.discard(F.softplus)


def test_a_rule_of_the_users_serves_layers_of_torchs_own():
    before = OPS[F.silu]
    hs.register(F.silu)(lambda input, inplace=False: input.with_local(input.local + 7))
    try:
        net, x = hs.parallelize(nn.Sequential(nn.SiLU()), hs.init(device="cpu")), seeded(2, 3)
        torch.testing.assert_close(net(x), x + 7)
    finally:
        OPS[F.silu] = before
        USERS.discard(F.silu)


@pytest.mark.usefixtures("users_rule")
def test_rules_of_the_users_are_used():
    _, net, mesh = pair(lambda net, y: F.softplus(y))
    plain = Net()
    plain.load_state_dict(net.state_dict())
    for seed in range(2):
        x = seeded(*X, seed=seed)
        torch.testing.assert_close(net(hs.shard(x, mesh)).local, plain(x) + 7)


def test_an_implementation_of_the_users_serves_layers_of_torchs_own():
    before = OPS[F.conv2d]
    _, net, mesh = pair()
    net.norm = nn.Identity()
    ones = Implementation("ones", lambda *_: True, lambda *_: torch.ones(2, 4, 6, 5))
    implement(F.conv2d, ones)
    try:
        assert torch.equal(net(hs.shard(seeded(*X), mesh)).local, torch.ones(2, 4, 6, 5))
    finally:
        OPS[F.conv2d] = before
        IMPLEMENTED.discard(F.conv2d)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_a_rule_of_a_users_function_is_used():
    _, net, mesh = pair(lambda net, y: Twice.apply(y))
    due = net(hs.shard(seeded(*X), mesh)).local
    hs.register(Twice.apply)(lambda x: x.with_local(x.local * 5))
    try:
        net.norm.load_state_dict(Net().norm.state_dict())
        torch.testing.assert_close(net(hs.shard(seeded(*X), mesh)).local, due * 2.5)
    finally:
        USERS.clear()


@pytest.mark.parametrize("limit", [100, 400])
def test_tensors_that_are_too_large_for_a_call_are_cut(monkeypatch, limit):
    def function(net, y):
        y = F.max_pool2d(F.interpolate(y, scale_factor=2), 3, 2, 1)
        y = F.avg_pool2d(net.up(y), 2)
        return F.group_norm(F.instance_norm(y), 2)

    plain, net, mesh = pair(function, up=nn.ConvTranspose2d(4, 4, 2, 2))
    due = plain(seeded(*X))
    due.square().sum().backward()
    num_tiles = []
    pick = tiles.pick_tiles
    monkeypatch.setattr(tiles, "MAX_NUMEL", limit)
    monkeypatch.setattr(tiles, "TILE_NUMEL", limit // 2)
    monkeypatch.setattr(
        tiles, "pick_tiles", lambda *args: num_tiles.append(len(pick(*args))) or pick(*args)
    )
    out = net(hs.shard(seeded(*X), mesh))
    out.square().sum().backward()
    assert max(num_tiles) > 1
    torch.testing.assert_close(out.local, due, rtol=1e-4, atol=1e-5)
    for p, q in zip(plain.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-4)


def test_hooks_of_layers_fire_and_see_plain_tensors():
    _, net, mesh = pair()
    seen = []
    net.conv.register_forward_pre_hook(lambda layer, args: seen.append(type(args[0])))
    net.conv.register_forward_hook(lambda layer, args, y: seen.append(type(y)))
    net.conv.register_full_backward_hook(lambda layer, *grads: seen.append(len(grads)))
    for _ in range(2):
        net(hs.shard(seeded(*X).requires_grad_(), mesh)).square().sum().backward()
    assert seen == [Tensor, Tensor, 2] * 2


def test_hooks_of_the_module_itself_see_slabs():
    _, net, mesh = pair()
    seen = []
    net.register_forward_pre_hook(lambda layer, args: seen.append(type(args[0])))
    net.register_forward_hook(lambda layer, args, y: seen.append(type(y)))
    net(hs.shard(seeded(*X), mesh))
    assert seen == [hs.Slab, hs.Slab]


def test_a_module_computed_depth_first_runs_on_plain_tensors():
    x, mesh = seeded(*X), hs.init(device="cpu")
    plain = Net()
    net = hs.parallelize(copy.deepcopy(plain), mesh, depth_first={"conv": 40})
    due, out = plain(x), net(hs.shard(x, mesh))
    assert net.seen == [Tensor]
    torch.testing.assert_close(out.local, due)
    due.square().sum().backward()
    out.square().sum().backward()
    torch.testing.assert_close(net.conv.weight.grad, plain.conv.weight.grad, rtol=1e-3, atol=1e-4)


def test_a_pass_that_fails_leaves_nothing_behind():
    def function(net, y):
        if net.fails:
            raise ValueError("mine")
        return y

    _, net, mesh = pair(function)
    net.fails = True
    with pytest.raises(ValueError, match="mine"):
        net(hs.shard(seeded(*X), mesh))
    assert active_mode() is None
    net.fails = False
    assert type(net(hs.shard(seeded(*X), mesh))) is hs.Slab


def test_a_parallel_module_can_be_used_in_the_pass_of_another():
    plain, inner, mesh = pair(lambda net, y: net.d0(y), d0=nn.Dropout(0.5))
    others = [inner]  # in a list, out of sight of the outer module
    _, net, _ = pair(lambda net, y: y + others[0](y[:, :3]))
    torch.manual_seed(0)
    first = net(hs.shard(seeded(*X), mesh)).local
    others[0] = hs.parallelize(plain, mesh)
    net.norm.load_state_dict(Net().norm.state_dict())
    torch.manual_seed(0)
    torch.testing.assert_close(net(hs.shard(seeded(*X), mesh)).local, first)


@on_ranks(1)  # Dynamo stays loaded, and then functions hold their arguments longer
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo reads
def test_a_compiled_part_computes_as_the_plain_one_does():
    plain, net, mesh = pair(lambda net, y: net.last(y), last=nn.Conv2d(4, 2, 1))
    net.last = torch.compile(net.last, backend="eager")
    for _ in range(2):
        out = net(hs.shard(seeded(*X), mesh))
        torch.testing.assert_close(out.local, plain(seeded(*X)))


class Doubled(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) * 2


class Copying(nn.Module):
    """Runs a copy of its layer with another weight."""

    def __init__(self):
        super().__init__()
        self.conv, self.other = nn.Conv2d(3, 4, 3), nn.Parameter(torch.ones(4, 3, 3, 3))

    def forward(self, x):
        twin = copy.copy(self.conv)
        twin._parameters = {**twin._parameters, "weight": self.other}
        return twin(x)


def test_layers_may_be_changed_copied_and_pruned():
    mesh, x = hs.init(device="cpu"), torch.randn(2, 3, 5, 5)
    net = hs.parallelize(nn.Sequential(nn.Conv2d(3, 4, 3)), mesh)
    out = net(x)
    net[0].__class__ = Doubled
    torch.testing.assert_close(net(x), out * 2)
    plain = Copying()
    torch.testing.assert_close(hs.parallelize(copy.deepcopy(plain), mesh)(x), plain(x))
    pruned = prune.l1_unstructured(nn.Conv2d(3, 4, 3), "weight", 0.5)
    due = pruned(x)
    torch.testing.assert_close(hs.parallelize(nn.Sequential(pruned), mesh)(x), due)


@pytest.mark.usefixtures("users_rule")
def test_a_rule_of_the_users_is_not_asked_for_what_no_rank_splits():
    _, net, _ = pair(lambda net, y: y + F.softplus(net.norm.running_mean).sum())
    plain = Net(lambda net, y: y + F.softplus(net.norm.running_mean).sum())
    plain.load_state_dict(net.state_dict())
    torch.testing.assert_close(net(seeded(*X)), plain(seeded(*X)))


def test_a_forward_of_the_users_own_for_a_layer_is_called():
    _, net, mesh = pair()
    net.conv.forward = lambda x: x.repeat(1, 2, 1, 1)[:, :4]
    net.norm = nn.Identity()
    out = net(hs.shard(seeded(*X), mesh))
    assert torch.equal(out.local, F.relu(seeded(*X).repeat(1, 2, 1, 1)[:, :4]))


def test_functions_of_slabs_outside_of_modules_are_torchs_own():
    mesh, x = hs.init(device="cpu"), seeded(*X)
    slab, plain = hs.shard(x, mesh), torch.zeros(X)
    assert torch.equal((slab * 2 + x).local, x * 2 + x)
    values, places = slab.max(1)
    assert torch.equal(values.local, x.max(1).values)
    assert torch.equal(places.local, x.max(1).indices)
    assert type(slab.mean()) is Tensor
    assert plain.add_(slab) is plain
    assert torch.equal(plain, x)
    doubled = slab.mul_(2)
    assert doubled is slab
    assert torch.equal(F.mse_loss(slab, hs.shard(x, mesh)), F.mse_loss(x, x))


@pytest.mark.parametrize(("shape", "due"), [((1, 2, 2, 2, 2), False), ((8, 64, 32, 32, 32), True)])
def test_a_transposed_convolution_that_may_grow_too_large_is_left_to_its_rule(shape, due):
    x = torch.empty(shape, device="meta")
    weight = torch.empty(shape[1], 64, 4, 4, 4, device="meta")
    assert conv_transpose_needs(x, weight) is due


def meta(*shape):
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize(
    ("shape", "weight", "numbers", "due"),
    [
        ((64, 3, 224, 224), (64, 3, 7, 7), (2, 3), False),  # a bound alone would not tell
        ((64, 256, 56, 56), (512, 256, 1, 1), (2, 0), False),
        ((1, 64, 2**12, 2**12), (128, 64, 3, 3), (1, 1), True),  # makes 2**31
        ((1, 64, 2**12, 2**12), (128, 64, 3, 3), ((1, 2), (1, 1)), False),
        ((1, 64, 2**12, 2**12), (128, 64, 3, 3), (1, (0, 1)), False),
        ((1, 64, 2**12, 2**12), (128, 64, 3, 3), (1, "same"), True),
        ((1, 64, 2**12, 2**12), (128, 64, 3, 3), (1, 1, (2, 1)), False),
        ((1, 64, 2**12, 2**13), (64, 64, 3, 3), (4, 1), True),  # reads 2**31
        ((64, 2**12, 2**12), (128, 64, 3, 3), (1, 1), True),  # one sample
        ((64, 2**12, 2**12), (127, 64, 3, 3), (1, 1), False),
        ((1, 64, 2**11, 2**11), (64, 64, 3, 3), (1, 2**11), True),  # of much padding
        ((1, 2**12, 2**9, 2**9), (2**12, 1, 3, 3), (1, 1), False),  # each filter sees a channel
    ],
)
def test_a_convolution_goes_to_its_rule_where_one_call_is_too_large(shape, weight, numbers, due):
    assert conv_needs(meta(*shape), meta(*weight), *numbers) is due
    named = dict(zip(("stride", "padding", "dilation"), numbers, strict=False))
    needs = served.SERVED[F.conv2d]
    assert needs(meta(*shape), (meta(*shape), meta(*weight)), named) is due
    given = (meta(*shape), meta(*weight), None, *numbers)
    assert needs(meta(*shape), given, {}) is due


def test_a_norm_goes_to_its_rule_where_its_input_is_too_large():
    for function in (F.batch_norm, F.group_norm, F.layer_norm, F.instance_norm):
        assert not served.SERVED[function](meta(2**31 - 1), (), {})
        assert served.SERVED[function](meta(2**31), (), {})


def test_fused_kernels_serve_where_they_gain_more_than_they_cost_the_host(monkeypatch):
    monkeypatch.setattr(fused, "pays", lambda x: x.numel() >= fused.MIN_NUMEL)
    few, many = meta(1, 16, 2**19 - 1), meta(1, 16, 2**19)
    for function in (F.avg_pool1d, F.max_pool1d, F.relu, F.leaky_relu):
        assert not served.SERVED[function](few, (), {})
        assert served.SERVED[function](many, (), {})


ACTIVATIONS = {
    "relu": lambda y: F.relu(y),
    "relu in place": lambda y: F.relu(y, inplace=True),
    "relu by name": lambda y: F.relu(input=y, inplace=False),
    "leaky relu": lambda y: F.leaky_relu(y),
    "leaky relu in place": lambda y: F.leaky_relu(y, inplace=True),
    "leaky relu of a slope": lambda y: F.leaky_relu(y, 0.3),
    "leaky relu of a slope, in place": lambda y: F.leaky_relu(y, negative_slope=0.3, inplace=True),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_that_of_torch_and_runs_once(name):
    entered = []

    def activate(net, y):
        y = y * 2 - 1
        sys.setprofile(note)
        try:
            out = ACTIVATIONS[name](y)
        finally:
            sys.setprofile(None)
        assert (out is y) == ("in place" in name)
        return out

    def note(frame, event, function):
        if event == "call" and frame.f_code in (F.relu.__code__, F.leaky_relu.__code__):
            entered.append(frame.f_code)

    plain, net, mesh = pair(activate)
    x = seeded(*X)
    expected = plain(x)
    entered.clear()
    out = net(hs.shard(x, mesh)).local
    assert torch.equal(out, expected)
    assert len(entered) == 1  # in the mode a function would call itself again
    out.sum().backward()
    expected.sum().backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def norms():
    """Batch norms of all settings, and an input for each."""
    for num_dims, shape in ((1, (4, 3)), (1, (4, 3, 5)), (2, (2, 3, 4, 5)), (3, (2, 3, 4, 3, 2))):
        cls = getattr(nn, f"BatchNorm{num_dims}d")
        yield cls(3), shape
        yield cls(3, eps=0.1, momentum=0.5, affine=False), shape
        yield cls(3, momentum=None), shape
        yield cls(3, track_running_stats=False), shape


def convolutions():
    for num_dims, shape in ((1, (2, 4, 9)), (2, (2, 4, 9, 8)), (3, (2, 4, 9, 8, 7))):
        cls = getattr(nn, f"Conv{num_dims}d")
        yield cls(4, 6, 3), shape
        yield cls(4, 6, 3, stride=2, padding=2, dilation=2, groups=2, bias=False), shape
        yield cls(4, 6, 3, padding="same"), shape
        yield cls(4, 6, 3, padding=1, padding_mode="circular"), shape
    yield nn.Conv2d(4, 6, 3), (4, 9, 8)  # one sample


def others():
    yield nn.Linear(5, 3), (2, 4, 5)
    yield nn.Linear(5, 3, bias=False), (5,)
    yield nn.ConvTranspose2d(4, 2, 2, 2), (2, 4, 3, 5)
    yield nn.Sequential(nn.ReLU(inplace=True), nn.LeakyReLU(0.3), nn.ELU(), nn.Flatten()), (2, 3, 4)
    yield nn.Sequential(nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)), (2, 4, 6, 6)


@pytest.mark.parametrize(
    ("layer", "shape"), [*norms(), *convolutions(), *others()], ids=lambda each: str(each)[:60]
)
def test_layers_that_leave_the_mode_compute_what_torchs_do(layer, shape):
    net = hs.parallelize(nn.Sequential(copy.deepcopy(layer)), hs.init(device="cpu"))
    for seed in range(4):
        net.train(seed < 3)
        layer.train(seed < 3)
        found, due = [seeded(*shape, seed=seed).requires_grad_() for _ in range(2)]
        outs = net(found * 1), layer(due * 1)
        assert torch.equal(*outs)
        for out in outs:
            (out * seeded(*out.shape, seed=9)).sum().backward()
        assert torch.equal(found.grad, due.grad)
    pairs = [*zip(net.parameters(), layer.parameters(), strict=True)]
    assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in pairs)
    for mine, theirs in zip(net.buffers(), layer.buffers(), strict=True):
        assert torch.equal(mine, theirs)


class Noisy(nn.Conv2d):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, True)


def drop_after(layer):
    layer.register_forward_hook(lambda layer, args, out: F.dropout(out, 0.5, True))


def drop_before(layer):
    layer.register_forward_pre_hook(lambda layer, args: F.dropout(args[0], 0.5, True))


def drop_instead(layer):
    layer.forward = lambda x: F.dropout(F.conv2d(x, layer.weight, layer.bias), 0.5, True)


def drop_within(layer):
    forward = layer._conv_forward
    layer._conv_forward = lambda *args: F.dropout(forward(*args), 0.5, True)


def drop_in_class(layer):
    layer.__class__ = Noisy


def drop_of_a_weight_held_elsewhere(layer):
    weight = layer.weight.detach() * 2
    del layer.weight
    layer.weight = weight
    drop_after(layer)


CHANGES = [
    *(drop_after, drop_before, drop_instead, drop_within, drop_in_class),
    drop_of_a_weight_held_elsewhere,
]


def run_changed(change, mesh):
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 1)
    change(layer)
    net = hs.parallelize(nn.Sequential(layer), mesh)
    torch.manual_seed(1)
    return hs.gather(net(hs.shard(seeded(*X), mesh)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_users_add_to_a_layer_draws_the_same_numbers_on_any_mesh(change):
    due = run_changed(change, hs.init(device="cpu", height=2))
    torch.testing.assert_close(run_changed(change, hs.init(device="cpu")), due)
    assert not torch.equal(run_changed(lambda layer: None, hs.init(device="cpu")), due)


def test_a_layer_that_refuses_its_input_is_named():
    net = hs.parallelize(Net(), hs.init(device="cpu"))
    with pytest.raises(RuntimeError, match="channels") as caught:
        net(seeded(2, 7, 5, 5))
    assert "in conv, a Conv2d" in "".join(caught.value.__notes__)
    with pytest.raises(ValueError, match="4D input") as caught:
        hs.parallelize(nn.Sequential(nn.BatchNorm2d(3)), hs.init(device="cpu"))(seeded(2, 3, 5))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        hs.parallelize(nn.Sequential(nn.BatchNorm2d(3)), hs.init(device="cpu"))(seeded(1, 3, 1, 1))
