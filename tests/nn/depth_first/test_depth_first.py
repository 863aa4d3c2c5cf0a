"""Chains that are computed tile by tile give what they give layer by layer."""

import copy
import functools
import math
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from hyperslab.errors import UnsupportedOp
from hyperslab.kernels import act_pool, fused
from hyperslab.models.cosmoflow import ConvBlock
from hyperslab.nn.depth_first import tile_windows
from hyperslab.testing import seeded
from hyperslab.testing.strategies import Place, places

close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


def same_module(make):
    torch.manual_seed(5)
    return make().double()


def results(model, x, mesh=None, cuts=None):
    """Its output, and the gradients of input and parameters, of a loss in which all count."""
    x = x.clone().requires_grad_()
    out = model(x if mesh is None else hs.shard(x, mesh, cuts=cuts))
    (out * seeded(*out.shape, seed=1).to(out.dtype)).sum().backward()
    return out, [x.grad, *(whole(p.grad) for p in model.parameters())]


def whole(grad):
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def assert_same(make, x, mesh, names, cuts=None, **options):
    """Depth first, layer by layer and in one process: all the same, and laid out alike."""
    ours = hs.parallelize(same_module(make), mesh, depth_first=names, **options)
    layers = hs.parallelize(same_module(make), mesh)
    serial, expected = results(same_module(make), x)
    out, grads = results(ours, x, mesh, cuts)
    assert out.layout == layers(hs.shard(x, mesh, cuts=cuts)).layout
    assert tuple(out.local.shape) == out.box.shape
    close(hs.gather(out.detach()), serial.detach())
    for number, (mine, theirs) in enumerate(zip(grads, expected, strict=True)):
        close(mine, theirs, msg=lambda text, n=number: f"gradient {n}: {text}")


class Net(nn.Module):
    """A chain and what follows it."""

    def __init__(self, body, tail=None):
        super().__init__()
        self.body, self.tail = body, tail or nn.Identity()

    def forward(self, x):
        return self.tail(self.body(x))


# Any chain on any mesh


def of_dims(name, x):
    return getattr(F, name.format(x.ndim - 2))


def conv(x, w, **kwargs):
    return of_dims("conv{}d", x)(x, w, **kwargs)


def if_fits(size, step):
    return lambda x, w, earlier: step(x, w) if min(x.shape[2:]) >= size else x


def if_small(size, step):
    return lambda x, w, earlier: step(x, w) if max(x.shape[2:]) <= size else x


def met(join):
    """``x`` joined to an earlier tensor of its shape, if there is one."""

    def meet(x, w, earlier):
        same = [y for y in earlier if y.shape == x.shape]
        return join(x, same[0]) if same else x

    return meet


STEPS = {
    "conv": lambda x, w, _: conv(x, w, padding=1),
    "conv valid": if_fits(3, conv),
    "conv dilated": lambda x, w, _: conv(x, w, padding=3, dilation=2),
    "conv strided": lambda x, w, _: conv(x, w, padding=1, stride=2),
    "conv skipping": lambda x, w, _: conv(x, w[..., :1], padding=1, stride=3),
    "conv even": lambda x, w, _: conv(x, w[..., :2], padding="same", dilation=1),
    "widen": if_small(
        7,
        lambda x, w: of_dims("conv_transpose{}d", x)(x, w, stride=2, padding=1, output_padding=1),
    ),
    "spread": if_small(
        4, lambda x, w: of_dims("conv_transpose{}d", x)(x, w[..., :2], stride=4, output_padding=2)
    ),
    "max": lambda x, w, _: of_dims("max_pool{}d", x)(x, 3, 2, 1, ceil_mode=True),
    "max dilated": if_fits(4, lambda x, w: of_dims("max_pool{}d", x)(x, 2, 1, 0, 3)),
    "mean": if_fits(3, lambda x, w: of_dims("avg_pool{}d", x)(x, 3, 2, 1)),
    "mean inside": if_fits(3, lambda x, w: of_dims("avg_pool{}d", x)(x, 3, 2, 1, True, False)),
    "powers": if_fits(
        2, lambda x, w: of_dims("lp_pool{}d", x)(x.abs() + 0.1, 2.0, 2, ceil_mode=True)
    ),
    "pad": lambda x, w, _: F.pad(x, (2, 0, 0, 1)[: 2 * x.ndim - 4], value=0.5),
    "edge": lambda x, w, _: F.pad(x, (1, 2) * (x.ndim - 2), "replicate"),
    "bend": lambda x, w, _: F.leaky_relu(x * 1, 0.1, inplace=True),
    "channels": lambda x, w, _: x * w.flatten()[:2].view(-1, *[1] * (x.ndim - 2)),
    "join": met(torch.add),
    "join in place": met(lambda x, y: (x * 1).add_(y)),
    "side by side": lambda x, w, _: conv(torch.cat([x, x * x], 1), torch.cat([w, w], 1), padding=1),
}


class Steps(nn.Module):
    def __init__(self, num_dims, steps):
        super().__init__()
        self.steps = steps
        scale = math.sqrt(2 * 3**num_dims)
        self.weight = nn.Parameter(torch.randn(2, 2, *[3] * num_dims) / scale)

    def forward(self, x):
        earlier = []
        for step in self.steps:
            x = STEPS[step](x, self.weight, earlier)
            earlier.append(x)
        return x + self.weight.mean()


@st.composite
def cases(draw):
    num_dims = draw(st.sampled_from([1, 2, 2, 3]))
    shape = (draw(st.integers(1, 2)), 2, *(draw(st.integers(1, 8)) for _ in range(num_dims)))
    steps = tuple(draw(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5)))
    place = draw(places(shape).filter(lambda place: place.num_ranks < 4))
    return place, shape, steps, draw(st.sampled_from([100, 300, 1000]))


def check_case(place, shape, steps, tile_numel):
    def make():
        return Net(Steps(len(shape) - 2, steps))

    names, cuts = {"body": tile_numel}, place.cuts_of(len(shape))
    assert_same(make, seeded(*shape), place.mesh(), names, cuts)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@settings(max_examples=5, deadline=None)
@given(cases())
def test_any_chain_is_what_it_is_layer_by_layer(run, case):
    run(case[0], check_case, *case[1:])


# Networks


def cosmo_blocks():
    block = functools.partial(ConvBlock, num_pools=1, batch_norm=False)
    return Net(nn.Sequential(block(2, 3, stride=1), block(3, 4, stride=2), nn.Conv3d(4, 2, 1)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("place", "shard_weights"),
    [
        (Place({"depth": 2}, {"depth": [0, 5, 17]}), False),
        (Place({"height": 2}), True),
        (Place({"sample": 2}), True),
    ],
    ids=str,
)
def test_blocks_of_cosmoflow(place, shard_weights):
    names = {"body.0": 2000, "body.1-2": 500}
    x, cuts = seeded(2, 2, 17, 13, 14), place.cuts
    assert_same(cosmo_blocks, x, place.mesh(), names, cuts, shard_weights=shard_weights)


class Branches(nn.Module):
    """Functional code, branches of unequal reach, tensors for channels and for all positions."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(2, 4, 5, padding=2), nn.Conv2d(2, 4, 1, bias=False)
        self.even = nn.Conv2d(4, 4, (4, 2), stride=(1, 2), padding=(2, 0))
        self.norm, self.bend = nn.BatchNorm2d(8).eval(), nn.PReLU(4)
        self.place = nn.Parameter(torch.randn(1, 4, 11, 9))
        self.scale = nn.Parameter(torch.randn(8, 1, 1))

    def forward(self, x, power=2):
        y = F.silu(self.wide(x))
        y += self.narrow(x) * self.place
        first, second = F.avg_pool2d(y, 3, (1, 2), 1), F.pad(y, (1, 0, 2, 0))
        second = F.dropout(self.bend(F.relu_(self.even(second))), 0.5, training=False)
        y = self.norm(torch.cat([first, F.max_pool2d(second, (4, 1), 1)], 1))
        y *= self.scale
        y = torch.where(y > 0, y, y.abs() ** power)
        return F.max_pool2d(y, 3, 2, 1, ceil_mode=True).to(x.dtype)


class Calling(Net):
    def forward(self, x):
        return self.tail(self.body(x, power=3))


@pytest.mark.ranks(2)
def test_functional_code_with_branches_options_and_frozen_parameters():
    mesh = hs.init(height=2, device="cpu")

    def make():
        model = Calling(Branches(), nn.Conv2d(8, 2, 1))
        model.body.wide.bias.requires_grad_(False)
        model.body.narrow.requires_grad_(False)
        return model

    assert_same(make, seeded(3, 2, 11, 9), mesh, {"body": 200}, {"height": [0, 4, 11]})


def alone(body, names=("body",), **options):
    """The body as a chain on one rank, the same body as it is, and the mesh."""
    mesh = hs.init(device="cpu")
    model = same_module(lambda: Net(body()))
    return (
        hs.parallelize(model, mesh, depth_first=names, **options),
        same_module(lambda: Net(body())),
        mesh,
    )


def conv_twice():
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 3, stride=2))


def test_a_module_that_is_called_twice_runs_twice():
    bend = nn.PReLU(init=0.3).double()

    def make():
        return nn.Sequential(nn.Conv2d(2, 2, 3), bend, nn.Conv2d(2, 2, 3), bend)

    model, plain, mesh = alone(make, {"body.0-1": 40, "body.2-3": 40})
    close(results(model, seeded(1, 2, 9, 9), mesh)[0].local, plain(seeded(1, 2, 9, 9)))


def test_without_gradients():
    model, plain, mesh = alone(conv_twice, {"body": 100})
    x = seeded(1, 2, 9, 9)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            out = model.eval()(hs.shard(x, mesh))
            assert not out.requires_grad
            close(out.local, plain(x))
    assert model(hs.shard(x, mesh)).requires_grad
    close(model.body(x), plain(x))  # plain tensors run as they are


def test_a_parameter_that_is_not_used_gets_no_gradient():
    model, _, mesh = alone(lambda: Lambda(lambda m, x: m.conv(x)), {"body": 10})
    _, grads = results(model, seeded(1, 2, 5, 5), mesh)
    assert [grad is not None for grad in grads] == [True, True, True, False, False]


def test_gradients_of_gradients():
    model, plain, mesh = alone(conv_twice, {"body": 40})

    def penalty(net, x):
        out = net(hs.shard(x, mesh) if net is model else x)
        first = torch.autograd.grad((out**3).sum(), [x, *net.parameters()], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [x, *net.parameters()])

    x = seeded(1, 2, 7, 6).requires_grad_()
    for mine, theirs in zip(penalty(model, x), penalty(plain, x), strict=True):
        close(mine, theirs)


def test_autocast_holds_in_the_backward_pass_too():
    def make():
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 3))

    model, plain, mesh = alone(make, {"body": 60})
    x = seeded(1, 2, 9, 8).float()
    outs = []
    for net in (model.float(), plain.float()):
        with torch.autocast("cpu", torch.bfloat16):
            out = net(hs.shard(x, mesh) if net is model else x)
        (out * seeded(*out.shape, seed=1).to(out.dtype)).sum().backward()
        outs.append(out)
    assert outs[0].dtype == outs[1].dtype == torch.bfloat16
    torch.testing.assert_close(outs[0].local, outs[1])
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.05, atol=0.05)


def test_a_chain_that_ran_without_autocast_heeds_it_in_later_passes():
    model, plain, mesh = alone(conv_twice, {"body": 60})
    x = seeded(1, 2, 9, 8).float()
    for enabled in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled):
            out, expected = model.float()(hs.shard(x, mesh)), plain.float()(x)
        torch.testing.assert_close(out.local, expected)


def test_weight_gradients_of_short_floats_do_not_lose_what_small_tiles_add():
    model, _, mesh = alone(lambda: nn.Conv2d(1, 1, 1, bias=False), {"body": 4})
    x = torch.full((1, 1, 9, 4), 0.25)
    x[:, :, 0] = 64
    model.bfloat16()(hs.shard(x.bfloat16(), mesh)).sum().backward()
    assert model.body.weight.grad.item() == 4 * 64 + 8  # of which a bfloat16 forgets each 1


class Checkpointed(Net):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.ranks(2)
def test_inside_activation_checkpointing():
    mesh = hs.init(height=2, device="cpu")
    assert_same(lambda: Checkpointed(conv_twice()), seeded(1, 2, 9, 8), mesh, {"body": 50})


def test_copies_of_a_module_compute_depth_first_with_their_own_weights():
    model, plain, mesh = alone(conv_twice, {"body.0-2": 50})
    twin = copy.deepcopy(model)
    for net in (twin, plain):
        with torch.no_grad():
            net.body[0].weight.mul_(2)
    _, expected = results(plain, seeded(1, 2, 9, 9))
    with Largest() as seen:
        _, grads = results(twin, seeded(1, 2, 9, 9), mesh)
    close(grads, expected)
    assert seen.numel < 3 * 9 * 9
    assert list(twin.state_dict()) == list(plain.state_dict())


class Largest(TorchDispatchMode):
    """The size of the largest tensor that an operator gives."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.parametrize("names", [["body"], {"body": 3000}], ids=["one tile", "tiles"])
def test_tensors_between_layers_never_exist_as_a_whole(names):
    def make():
        return nn.Sequential(nn.Conv3d(1, 16, 3, padding=1), nn.ReLU(), nn.AvgPool3d(4))

    model, _, mesh = alone(make, names)
    x = seeded(1, 1, 16, 16, 16)
    with Largest() as seen:
        results(model, x, mesh)
    between = 16 * 16**3
    assert seen.numel == between if names == ["body"] else seen.numel < between / 8


def test_memory_formats_are_those_of_the_layers():
    model, plain, mesh = alone(conv_twice, {"body": 100})
    x = seeded(2, 2, 9, 9).to(memory_format=torch.channels_last)
    out = model(hs.shard(x, mesh)).local
    assert out.is_contiguous(memory_format=torch.channels_last)
    close(out, plain(x))


def test_convolutions_at_the_ends_make_no_outputs_to_be_dropped():
    model, plain, mesh = alone(conv_twice, {"body": 100})
    x = seeded(2, 2, 9, 9)
    with patch.object(tile_windows, "single_rank_slab", side_effect=AssertionError):
        out, grads = results(model, x, mesh)
    expected = results(plain, x)
    close(out.local, expected[0])
    close(grads, expected[1])


def test_tiles_take_the_kernels_that_a_single_rank_takes():
    calls = []

    def pool(y, slope, pool):
        calls.append((pool.mode, slope, tuple(y.shape[2:])))
        return F.avg_pool3d(F.leaky_relu(y, slope), pool.kernel, pool.stride, pool.padding)

    block = functools.partial(ConvBlock, num_pools=1, batch_norm=False)

    def make():
        return nn.Sequential(block(2, 3, stride=1), block(3, 4, stride=1))

    model, plain, mesh = alone(make, {"body": 3 * 20 * 14 * 15})
    x = seeded(1, 2, 36, 14, 15)
    with (
        patch.object(fused, "pays", lambda x: type(x) is torch.Tensor),
        patch.object(act_pool, "is_supported", lambda *args: act_pool._refusal(*args) is None),
        patch.object(act_pool, "activate_and_pool", pool),
    ):
        out, grads = results(model, x, mesh)
    expected = results(plain, x)
    close(out.local, expected[0])
    close(grads, expected[1])
    assert {call[:2] for call in calls} == {("avg", 0.01)}
    planes = [call[2][0] for call in calls]
    assert planes == 2 * [14, 6, 19, 7, 17, 7]  # of two blocks in three tiles, forward and backward


@pytest.mark.gpu
def test_tiles_by_fused_kernels_on_a_gpu():
    block = functools.partial(ConvBlock, num_pools=1, batch_norm=False)
    found = []
    for names in ((), {"0-1": 2**23}):
        torch.manual_seed(5)
        mesh = hs.init(device="cuda")
        body = nn.Sequential(block(4, 16, stride=1), block(16, 32, stride=1))
        body.to(memory_format=torch.channels_last_3d)
        model = hs.parallelize(body, mesh, depth_first=names)
        x = seeded(1, 4, 96, 100, 90).float().to("cuda", memory_format=torch.channels_last_3d)
        with patch.object(fused, "FASTER_ON", {torch.cuda.get_device_capability()}):
            out = model(hs.shard(x, mesh))
            (out * seeded(*out.shape, seed=1).float().cuda()).sum().backward()
        found.append([out.local.detach(), *(p.grad for p in model.parameters())])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * theirs.abs().max().item())


# What is refused


class Wasteful(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.unused = nn.Conv2d(2, 4, 3), nn.Conv2d(2, 4, 5)

    def forward(self, x):
        self.unused(x)
        return F.relu(self.conv(x))


def test_what_the_output_is_not_made_of_is_refused():
    model, _, mesh = alone(Wasteful)
    with pytest.raises(hs.UnsupportedOp, match=r"\(1, 4, 5, 5\) that is not used for it"):
        model(hs.shard(seeded(1, 2, 9, 9), mesh))


def test_a_chain_cannot_be_compiled():
    model, _, mesh = alone(conv_twice)
    with pytest.raises(Exception, match="ConfigError: body, a depth-first chain, cannot be compil"):
        torch.compile(model, backend="eager")(hs.shard(seeded(1, 2, 9, 9), mesh))


@pytest.mark.ranks(2)
def test_weights_may_be_sharded_by_the_chain_and_not_within_it():
    mesh = hs.init(height=2, device="cpu")
    over = init_device_mesh("cpu", (2,))

    def make():
        model = Net(conv_twice().double())
        fully_shard(model.body, mesh=over)
        return fully_shard(model, mesh=over)

    ours = hs.parallelize(same_module(make), mesh, depth_first={"body": 50})
    _, grads = results(ours, seeded(1, 2, 9, 8), mesh)
    close(grads, results(same_module(lambda: Net(conv_twice())), seeded(1, 2, 9, 8))[1])
    inner = same_module(lambda: Net(conv_twice()))
    fully_shard(inner.body[0], mesh=over)
    with pytest.raises(hs.ConfigError, match="'body', and fully_shard was applied to a part"):
        hs.parallelize(inner, mesh, depth_first=["body"])


def test_a_chain_takes_one_tensor():
    class Masked(Net):
        def forward(self, x):
            return self.body(x, torch.ones(1))

    mesh = hs.init(device="cpu")
    model = hs.parallelize(Masked(Lambda(None)), mesh, depth_first=["body"])
    with pytest.raises(hs.UnsupportedOp, match="body, a depth-first chain, takes one tensor and"):
        model(hs.shard(torch.ones(1, 2, 3, 3), mesh))


def test_a_chain_that_changes_in_ways_nobody_sees_says_so():
    strides = [1]
    model, _, mesh = alone(lambda: Lambda(lambda m, x: F.avg_pool2d(x, 1, strides[0])))
    x = hs.shard(seeded(1, 2, 5, 5), mesh)
    model(x)
    strides[0] = 2
    with pytest.raises(hs.ConfigError, match="does something else than when it first got"):
        model(x)


def make_list():
    return nn.ModuleDict({"list": nn.ModuleList([nn.ReLU()]), "block": conv_twice()})


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["blok.0"], "has 'blok.0', which is no module's name: did you mean 'block.0'"),
        (["block.1-7"], "has 'block.1-7', which is no module's name"),
        (["block", "block.0"], "'block' and 'block.0', which have modules in common"),
        (["block.0-1", "block.1-2"], "have modules in common"),
        (["list"], "a ModuleList, which is never called"),
        (["list.0-0"], "only children of an nn.Sequential"),
        ("block", r"is a list of names, or 'auto', got 'block': write \['block'\]"),
        ([["block"]], r"names of modules, which are strings, got \[\['block'\]\]"),
        ({"block": 0}, "must be a number of elements, got 0"),
    ],
    ids=str,
)
def test_names_that_do_not_fit(names, words):
    with pytest.raises(hs.ConfigError, match=words):
        hs.parallelize(make_list(), hs.init(device="cpu"), depth_first=names)


class Lambda(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)
        self.register_buffer("count", torch.zeros(()))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x


OUTSIDE = nn.Conv2d(2, 2, 1)


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda m, x: x.mean((2, 3), keepdim=True), "torch.Tensor.mean cannot be computed in"),
        (lambda m, x: F.dropout(m.conv(x)), "dropout .* draws random numbers"),
        (lambda m, x: x * torch.rand(1), "aten.rand.default draws random numbers"),
        (lambda m, x: F.batch_norm(x, None, None, training=True), "statistics are of the whole"),
        (lambda m, x: m.norm(x), "writes into a tensor of the module"),
        (lambda m, x: x * m.count.add_(1), "writes into a tensor of the module"),
        (lambda m, x: m.conv(F.relu_(x)), "cannot write into its own input"),
        (lambda m, x: OUTSIDE(x), "uses others, of shape"),
        (lambda m, x: Double.apply(x), "Double.apply cannot be computed"),
        (lambda m, x: hs.gather(x), "no Slab with a layout"),
        (lambda m, x: (x, x), "gives one tensor, .* gives a tuple"),
        (lambda m, x: x if m.count > 0 else -x, "cannot depend on the values of tensors"),
        (lambda m, x: F.max_pool2d(x, 2, return_indices=True)[0], "max_pool2d"),
        (lambda m, x: F.conv2d(x, m.conv.weight, dilation=2), "does not fit"),
        (lambda m, x: torch.cat([x, x], 2), "joins along dim 2"),
        (lambda m, x: x + m.conv.weight.new_zeros(4, 1, 1, 1), "another shape"),
    ],
)
def test_what_cannot_be_computed_tile_by_tile(forward, words):
    mesh = hs.init(device="cpu")
    model = hs.parallelize(Net(Lambda(forward)), mesh, depth_first=["body"])
    with pytest.raises(hs.HyperslabError, match=words) as caught:
        model(hs.shard(torch.ones(1, 2, 3, 3), mesh))
    assert "in body" in str(caught.value)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("change", ["attribute", "buffer", "another buffer", "frozen weight"])
def test_what_changes_before_the_backward_pass_is_noticed(change):
    chain = nn.Sequential(nn.Conv3d(2, 2, 3, padding=1), nn.BatchNorm3d(2).eval(), nn.LeakyReLU())
    chain[1].requires_grad_(False)
    mesh = hs.init(device="cpu")
    net = hs.parallelize(nn.Sequential(chain), mesh, depth_first={"0": 300})
    chain[1].eval()
    out = net(hs.shard(torch.randn(1, 2, 6, 6, 6), mesh))
    if change == "attribute":
        chain[2].negative_slope = 0.5
    elif change == "buffer":
        chain[1].running_mean.add_(1)
    elif change == "another buffer":
        chain[1].running_mean = torch.ones(2)
    else:
        with torch.no_grad():
            chain[1].weight.mul_(2)
    with pytest.raises(UnsupportedOp, match="since its forward pass an attribute, a buffer or"):
        out.sum().backward()


@pytest.mark.ranks(1)
def test_a_checkpoint_inside_a_chain_is_refused():
    class Checkpointed(nn.Conv3d):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    mesh = hs.init(device="cpu")
    net = nn.Sequential(Checkpointed(2, 2, 3, padding=1))
    net = hs.parallelize(net, mesh, depth_first={"0": 300})
    out = net(hs.shard(torch.randn(1, 2, 6, 6, 6), mesh))
    with pytest.raises(UnsupportedOp, match="0, a depth-first chain, has activation checkpointing"):
        out.sum().backward()


def test_a_layer_may_be_taken_out_of_a_chain_later():
    mesh = hs.init(device="cpu")
    layers = [nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 1), nn.Tanh()]
    model = hs.parallelize(nn.Sequential(*layers).double(), mesh, depth_first=["0-1", "2-3"])
    x = seeded(1, 2, 6, 6)
    del model[-1]
    model.append(nn.Sigmoid())
    out = model(hs.shard(x, mesh))
    torch.testing.assert_close(hs.gather(out), layers[2](layers[1](layers[0](x))).sigmoid())
