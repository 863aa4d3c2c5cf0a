"""What waits for the next function: the numbers are those of torch, whatever comes next."""

import copy
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from hyperslab.errors import UnsupportedOp
from hyperslab.kernels import act_pool, conv, conv_pool, few_channels, fused
from hyperslab.kernels.few_channels_operands import Geometry, Packed
from hyperslab.nn.single_rank import served
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place


def activate(y, slope):
    return F.leaky_relu(y, slope) if slope else F.relu(y)  # -inf * 0 would be no number


def plain_conv(x, weight, bias, padding):
    return (F.conv3d if x.ndim == 5 else F.conv2d)(x, weight, bias, padding=padding)


@contextmanager
def fusing():
    """Has CPU tensors take the paths of fused kernels, with plain torch in the kernels' place."""
    calls = []

    def conv_and_pool(x, weight, bias, padding, slope, pool):
        calls.append((f"conv and {pool.mode}", slope))
        return pooled(plain_conv(x, weight, bias, padding), slope, pool)

    def activate_and_pool(y, slope, pool):
        calls.append((pool.mode, slope))
        return pooled(y, slope, pool)

    class Call(act_pool.Call):
        """Keeps y itself for the backward pass."""

        def run(self, y, *, keeps, out=None):
            calls.append((f"halo {self.pool.mode}", self.slope))
            return pooled(y, self.slope, self.pool), y.clone()

        def run_backward(self, grad, kept):
            leaf = kept.detach().requires_grad_()
            with torch.enable_grad():
                return torch.autograd.grad(pooled(leaf, self.slope, self.pool), leaf, grad)[0]

    def pooled(y, slope, pool):
        sizes = pool.kernel, pool.stride, pool.padding
        ends = [n for end in reversed(pool.extra) for n in (0, end)]
        y = F.pad(activate(y, slope), ends, value=-torch.inf if pool.mode == "max" else 0.0)
        if pool.mode == "max":
            return getattr(F, f"max_pool{y.ndim - 2}d")(y, *sizes)
        run = getattr(F, f"avg_pool{y.ndim - 2}d")
        return run(y, *sizes, count_include_pad=pool.count_include_pad)

    def convolve(x, weight, bias, padding, slope=1.0):
        calls.append(("conv", slope))
        return activate(plain_conv(x, weight, bias, padding), slope), packed(x, weight, padding)

    def packed(x, weight, padding):
        return Packed(x, Geometry(len(x), (), (), padding, (), x.ndim, has_room=False))

    def input_grad(grad, weight, padding):
        sizes = zip(grad.shape[2:], weight.shape[2:], padding, strict=True)
        shape = [n + k - 1 - 2 * p for n, k, p in sizes]
        x = grad.new_zeros(len(grad), weight.shape[1], *shape).requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(plain_conv(x, weight, None, padding), x, grad)[0]

    def weight_grads(packed, grad, weight, out=None, slope=1.0, *, want_bias):
        grad = grad if out is None else torch.where(out > 0, grad, grad * slope)
        leaf = weight.detach().requires_grad_()
        with torch.enable_grad():
            made = plain_conv(packed.memory.detach(), leaf, None, packed.geometry.pads)
        bias_grad = grad.sum((0, *range(2, grad.ndim))) if want_bias else None
        return torch.autograd.grad(made, leaf, grad)[0], bias_grad

    def pays(x):
        return type(x) is torch.Tensor and x.ndim in (4, 5)

    with (
        patch.object(fused, "pays", pays),
        patch.object(served, "MIN_NUMEL", 0),
        patch.object(act_pool, "is_supported", lambda *args: act_pool._refusal(*args) is None),
        patch.object(act_pool, "activate_and_pool", activate_and_pool),
        patch.object(act_pool, "Call", Call),
        patch.object(conv_pool, "conv_and_pool", conv_and_pool),
        patch.object(conv_pool, "MIN_NUMEL", 0),
        patch.object(few_channels, "convolve", convolve),
        patch.object(few_channels, "input_grad", input_grad),
        patch.object(few_channels, "weight_grads", weight_grads),
        patch.object(conv, "pack", packed),
        patch.object(few_channels, "DTYPES", (torch.float64,)),
    ):
        yield calls


def network(body):
    """A first convolution, which fused kernels may take, and ``body`` after it."""

    def run(x, weight, bias, more):
        return body(lambda y: F.conv3d(y, more, padding=1), F.conv3d(x, weight, bias, padding=1))

    return run


WEIGHTS = [seeded(3, 2, 3, 3, 3), seeded(3, seed=2), seeded(3, 3, 3, 3, 3, seed=3)]


def _skip(conv, y):
    z = F.relu(y)
    return F.max_pool3d(z, 2).sum() * z.mean((2, 3, 4))


def _view_before(conv, y):
    part = y[:, 1:]
    F.leaky_relu_(y, 0.3)
    return F.avg_pool3d(y, 2).sum() + part


def _written_after(conv, y):
    z = F.relu(y)
    y.mul_(3)
    return F.avg_pool3d(z, 2) + y.mean()


def _without_grad(conv, y):
    with torch.no_grad():
        z = F.leaky_relu(y, 0.2)
    return F.avg_pool3d(z, 2) + y.mean()


def _in_checkpoint(conv, y):
    run = checkpoint(lambda t: F.avg_pool3d(F.relu(conv(t)), 3, 2, 1), y, use_reentrant=False)
    return F.relu(run)


BODIES = {
    "activation and average": lambda conv, y: F.avg_pool3d(F.leaky_relu(y, 0.1), 3, 2, 1),
    "in place": lambda conv, y: F.avg_pool3d(F.leaky_relu(y, 0.1, inplace=True), 3, 2, 1),
    "by its method, and maximum": lambda conv, y: F.max_pool3d(y.relu(), 3, 2, 1),
    "a pool alone": lambda conv, y: F.max_pool3d(y, 2),
    "padding that does not count": lambda conv, y: F.avg_pool3d(
        F.relu(y), 3, 2, 1, count_include_pad=False
    ),
    "a pool that no kernel does": lambda conv, y: F.avg_pool3d(F.relu(y), 4, ceil_mode=True),
    "two activations": lambda conv, y: F.max_pool3d(F.relu(F.leaky_relu(y, -0.5)), 2),
    "an activation and nothing after it": lambda conv, y: F.relu_(y),
    "a convolution and nothing after it": lambda conv, y: y,
    "another convolution": lambda conv, y: F.relu(conv(F.relu(y))),
    "a pool twice": lambda conv, y: F.avg_pool3d(F.avg_pool3d(y.relu_(), 2), 2),
    "both the activation and the pool are used": _skip,
    "a view shows what is written in place": _view_before,
    "what was activated is written into": _written_after,
    "an activation that autograd does not see": _without_grad,
    "in a checkpoint": _in_checkpoint,
    "batch norm between": lambda conv, y: F.avg_pool3d(
        F.relu(F.batch_norm(y, None, None, training=True)), 2
    ),
}
PLACES = [Place({}), Place({"depth": 2}), Place({"sample": 2, "width": 2}, {"width": [0, 3, 10]})]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", BODIES)
def test_a_network_gives_the_numbers_of_one_process(run, place, name):
    run(place, _check_body, name)


def _check_body(place, name):
    x = seeded(3, 2, 9, 8, 10)
    with fusing():
        assert_same_as_serial(
            network(BODIES[name]),
            [x],
            WEIGHTS,
            mesh=place.mesh(),
            cuts=place.cuts,
            input_grads=False,
        )


@pytest.mark.parametrize("name", ["activation and average", "in place", "two activations"])
def test_ranks_need_not_fuse_alike(run, name):
    run(Place({"width": 2}, {"width": [0, 3, 10]}), _check_unlike, name)


def _check_unlike(place, name):
    def pays(x):
        return type(x) is torch.Tensor and x.ndim == 5 and x.shape[-1] > 4

    x = seeded(3, 2, 9, 8, 10)
    with fusing(), patch.object(fused, "pays", pays):
        assert_same_as_serial(
            network(BODIES[name]), [x], WEIGHTS, mesh=place.mesh(), cuts=place.cuts
        )


def fused_calls(body):
    with fusing() as calls:
        out = network(body)(hs.shard(seeded(1, 2, 6, 6, 6), hs.init()), *WEIGHTS)
        assert torch.isfinite(hs.gather(out)).all()
    return calls


def test_a_pool_does_the_convolution_and_the_activation_before_it():
    assert fused_calls(BODIES["in place"]) == [("conv and avg", 0.1)]


def test_a_pool_does_the_activation_alone_where_no_kernel_does_both():
    def body(conv, y):
        return F.avg_pool3d(F.relu_(y), 3, 3)

    assert fused_calls(body) == [("conv", 1.0), ("avg", 0.0)]


def test_a_convolution_does_the_activation_after_it():
    with fusing() as calls:
        y = F.conv3d(hs.shard(seeded(1, 2, 6, 6, 6), hs.init()), *WEIGHTS[:2], padding=1)
        y = F.relu(y)  # nobody else holds the convolution, as callers of a function may
        y + 1
    assert calls == [("conv", 0.0)]


def test_what_is_used_twice_is_computed_once():
    assert fused_calls(_skip) == [("conv", 1.0), ("max", 0.0)]


def _skipped(x, weight, bias):
    z = F.relu(F.conv3d(x, weight, bias, padding=1))
    return F.max_pool3d(z, 2).sum() * z.mean((2, 3, 4))


def test_what_a_pool_and_a_skip_connection_want_is_computed_once_in_every_pass():
    steps = []
    with fusing() as calls:
        for _ in range(2):
            weights = [t.clone().requires_grad_() for t in WEIGHTS[:2]]
            out = _skipped(hs.shard(seeded(1, 2, 6, 6, 6), hs.init()), *weights)
            out.sum().backward()
            steps.append((calls.copy(), weights[0].grad))
            calls.clear()
    assert steps[0][0] == steps[1][0] == [("conv", 0.0), ("max", 1.0)]
    weights = [t.clone().requires_grad_() for t in WEIGHTS[:2]]
    _skipped(seeded(1, 2, 6, 6, 6), *weights).sum().backward()
    for _, grad in steps:
        torch.testing.assert_close(grad, weights[0].grad)


def test_a_checkpoint_runs_the_same_kernels_both_times():
    with fusing() as calls:
        for _ in range(2):
            weights = [t.clone().requires_grad_() for t in WEIGHTS[:2]]
            x = hs.shard(seeded(1, 2, 6, 6, 6), hs.init())
            checkpoint(_skipped, x, *weights, use_reentrant=False).sum().backward()
    assert calls == [("conv", 0.0), ("max", 1.0)] * 4


def test_a_write_past_the_slab_is_noticed():
    def body(conv, y):
        y = conv(y)
        piece = y.local
        y = F.relu(y)
        piece.add_(1)
        return y + 1

    with pytest.raises(UnsupportedOp, match="meanwhile a tensor it needs was written into"):
        fused_calls(body)


def test_nothing_waits_in_inference_mode_which_keeps_no_account_of_writes():
    def body(conv, y):
        return F.max_pool3d(F.relu(conv(y)), 2)

    expected = network(body)(seeded(1, 2, 6, 6, 6), *WEIGHTS)
    with fusing() as calls, torch.inference_mode():
        x = hs.shard(seeded(1, 2, 6, 6, 6), hs.init())
        torch.testing.assert_close(network(body)(x, *WEIGHTS).local, expected)
    assert calls[0] == ("conv", 1.0)


class Net(nn.Module):
    """A network of plain tensors on one rank; it notes the classes of tensors it is given."""

    def __init__(self, body):
        super().__init__()
        self.first, self.bias, self.more = (nn.Parameter(w.clone()) for w in WEIGHTS)
        self.body, self.seen = body, []

    def forward(self, x):
        self.seen.append(type(x))
        return network(self.body)(x, self.first, self.bias, self.more)


def run_net(body, *, parallel):
    """The output, the gradients of weights and input, and the kernels that were called."""
    net, x = Net(body), seeded(3, 2, 9, 8, 10)
    with fusing() as calls:
        if parallel:
            mesh = hs.init(device="cpu")
            out = hs.parallelize(net, mesh)(hs.shard(x, mesh))
            assert net.seen == [torch.Tensor]
            assert type(out) is hs.Slab
            out = out.local
        else:
            out = net(x)
        assert type(out) is torch.Tensor
        out.square().sum().backward()
    return out, [w.grad for w in net.parameters()], calls


@pytest.mark.parametrize("name", BODIES)
def test_a_module_on_one_rank_gives_the_numbers_of_the_plain_one(name):
    due, ours = (run_net(BODIES[name], parallel=parallel) for parallel in (False, True))
    torch.testing.assert_close(ours[0], due[0])
    torch.testing.assert_close(ours[1], due[1])


def _seen_weakly(conv, y):
    seen = weakref.ref(y)
    return F.max_pool3d(F.relu(y * 2), 2) + seen().mean()


class _Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return y.clone() * 3

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * 3 + 0 * y


def _past_python(conv, y):
    with torch._C.DisableTorchFunction():  # as an operator of C++ does
        z = y * 2
    return z.mean() + F.max_pool3d(F.relu(y), 2) + y.sum()


def _written_past_python(conv, y):
    with torch._C.DisableTorchFunction():
        assert y.mul_(2) is y
    return F.max_pool3d(F.relu(y), 2)


def _in_thread(conv, y):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: y * 2).result()


def _with_an_attribute(conv, y):
    y.scale = 5
    return (y + 1) * y.scale


def _slope_of_one(conv, y):
    z = F.leaky_relu(y, 1.0)
    z.mul_(5)
    return y + z


USES = {
    "an attribute": _with_an_attribute,
    "a slope of one": _slope_of_one,
    "weakly": _seen_weakly,
    "a Function": lambda conv, y: _Triple.apply(F.relu(y)),
    "past Python": _past_python,
    "written into past Python": _written_past_python,
    "another thread": _in_thread,
    "a list": lambda conv, y: torch.cat([y, F.relu(y)], 1),
    "a keyword": lambda conv, y: F.max_pool3d(input=F.relu(input=y), kernel_size=2),
    "a hook of its gradient": lambda conv, y: y.register_hook(lambda grad: grad * 2) and y * 1,
    "its gradient within": lambda conv, y: y * torch.autograd.grad(y.sum(), y)[0],
    "numbers": lambda conv, y: y * float(F.relu(y).detach().max()),
    "a copy": lambda conv, y: copy.copy(y) * 2,
    "bytes": lambda conv, y: y * len(pickle.dumps(y.detach())),
    "numpy": lambda conv, y: y * float(y.detach().numpy().max()),
    "both activated and not": lambda conv, y: F.relu(y) * y,
    "pooled and then as it was": lambda conv, y: F.avg_pool3d(y, 3, 3).mean() + y,
    "a reentrant checkpoint": lambda conv, y: checkpoint(
        lambda t: F.max_pool3d(F.relu(conv(t)), 2), y, use_reentrant=True
    ),
}


@pytest.mark.parametrize("name", USES)
def test_a_deferred_tensor_is_like_any_other_to_whoever_uses_it(name):
    due, ours = (run_net(USES[name], parallel=parallel) for parallel in (False, True))
    torch.testing.assert_close(ours[0], due[0])
    torch.testing.assert_close(ours[1], due[1])


def test_a_module_on_one_rank_has_the_kernels_of_slabs():
    assert run_net(BODIES["in place"], parallel=True)[2][0] == ("conv and avg", 0.1)
    body = BODIES["another convolution"]
    assert ("conv", 0.0) in run_net(body, parallel=True)[2]


def test_a_deferred_tensor_that_nobody_uses_is_not_computed():
    def body(conv, y):
        F.relu(conv(y))
        return y.detach().mean() * conv(y).mean((2, 3, 4))

    kinds = [name for name, _ in run_net(body, parallel=True)[2]]
    assert kinds.count("conv") <= 3


KEPT = {
    "an activation": lambda conv, y, kept: F.max_pool3d(kept(F.relu(y)), 2),
    "an activation and its convolution": lambda conv, y, kept: F.avg_pool3d(
        kept(F.relu(kept(conv(y)))), 2
    ),
    "a convolution": lambda conv, y, kept: F.max_pool3d(kept(conv(y)), 2),
    "an activation of what was there": lambda conv, y, kept: F.avg_pool3d(kept(F.relu(y * 2)), 2),
    "a pool": lambda conv, y, kept: F.relu(kept(F.max_pool3d(kept(F.relu(conv(y))), 2))),
    "what is used twice": lambda conv, y, kept: _added(kept(F.relu(conv(y)))),
    "a pool that no kernel does": lambda conv, y, kept: F.avg_pool3d(
        kept(F.relu(conv(y))), 4, ceil_mode=True
    ),
}


def _added(z):
    return F.max_pool3d(z, 2).mean() + z


def grads_of_kept(name, way, *, parallel):
    held, weakly = [], []

    def kept(t):
        held.append(t)
        if way == "held weakly too":
            weakly.append(weakref.ref(t))
        if way == "hooks":
            t.register_hook(lambda grad: seen.append(grad))
        if way == "retained":
            t.retain_grad()
        return t

    seen = []
    net, x = Net(lambda conv, y: KEPT[name](conv, y, kept)), seeded(3, 2, 9, 8, 10)
    with fusing():
        net = hs.parallelize(net, hs.init(device="cpu")) if parallel else net
        loss = (net(x) ** 2 * 0.5).sum()
        if way in ("asked for", "held weakly too"):
            return torch.autograd.grad(loss, held)
        loss.backward()
    return seen[::-1] if way == "hooks" else [t.grad for t in held]


@pytest.mark.parametrize("way", ["hooks", "retained", "asked for", "held weakly too"])
@pytest.mark.parametrize("name", KEPT)
def test_the_gradient_of_a_tensor_that_is_kept_is_whole(name, way):
    due, ours = (grads_of_kept(name, way, parallel=parallel) for parallel in (False, True))
    torch.testing.assert_close(ours, due)


def check_kept_pieces(mesh):
    held, grads = [], []
    for is_slab in (False, True):
        weights = [t.clone().requires_grad_() for t in WEIGHTS[:2]]
        x = seeded(2, 2, 6, 6, 6)
        z = F.relu(F.conv3d(hs.shard(x, mesh) if is_slab else x, *weights, padding=1))
        out = F.max_pool3d(z, 2)
        loss = (out * out).sum()
        held.append(z)
        (grad,) = torch.autograd.grad(loss, z.local if is_slab else z)
        grads.append(z.with_local(grad / mesh.num_ranks) if is_slab else grad)
    torch.testing.assert_close(hs.gather(grads[1]), grads[0])


@pytest.mark.parametrize("axes", [{}, {"sample": 2}, {"depth": 2}], ids=str)
def test_the_gradient_of_a_piece_that_is_kept_is_whole(run, axes):
    run(Place(axes), check_kept_pieces_fused)


def check_kept_pieces_fused(place):
    with fusing():
        check_kept_pieces(place.mesh())


@pytest.mark.parametrize("name", ["weakly", "past Python"])
def test_hooks_of_operands_fire_once_where_a_deferred_tensor_is_held(name):
    seen = []
    net, mesh = Net(USES[name]), hs.init(device="cpu")
    due = run_net(USES[name], parallel=False)[1][0]
    net.first.register_hook(lambda grad: seen.append(grad))
    with fusing():
        hs.parallelize(net, mesh)(seeded(3, 2, 9, 8, 10)).square().sum().backward()
    torch.testing.assert_close(seen, [due])


def test_double_backward_through_a_deferred_tensor():
    net, mesh = Net(lambda conv, y: _past_python(conv, y)), hs.init(device="cpu")
    plain, grads = copy.deepcopy(net), []
    with fusing():
        for each in (hs.parallelize(net, mesh), plain):
            x = seeded(1, 2, 4, 4, 4)
            out = each(x).square().sum()
            (first,) = torch.autograd.grad(out, each.first, create_graph=True)
            grads.append(torch.autograd.grad(first.square().sum(), each.first)[0])
    torch.testing.assert_close(*grads)


@pytest.mark.gpu
def test_a_deferred_tensor_is_ready_for_whoever_uses_it_on_another_stream():
    class Side(nn.Module):
        def forward(self, x):
            y = F.relu(x * 2)
            here, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(here)
            with torch.cuda.stream(side):
                z = y + 1
            here.wait_stream(side)
            return z + y

    x, mesh = torch.randn(8, 16, 64, 64, 32, device="cuda"), hs.init(device="cuda")
    out = hs.parallelize(Side(), mesh)(hs.shard(x, mesh)).local
    torch.testing.assert_close(out, 2 * F.relu(x * 2) + 1)


def pools():
    yield nn.MaxPool2d(3, 2, 1), 4, [("max", 1.0)]
    yield nn.MaxPool3d((3, 2, 3), (2, 1, 2), (1, 0, 1)), 5, [("max", 1.0)]
    yield nn.AvgPool2d(3, 2, 1, count_include_pad=False), 4, [("avg", 1.0)]
    yield nn.AvgPool3d(2), 5, [("avg", 1.0)]
    yield nn.AvgPool2d(2, divisor_override=3), 4, []
    yield nn.MaxPool2d(3, 2, 1, ceil_mode=True), 4, []
    yield nn.MaxPool2d(2, dilation=2), 4, []
    yield nn.MaxPool2d(5, 2, 2), 4, []


@pytest.mark.parametrize(("layer", "ndim", "due"), [*pools()], ids=str)
def test_pools_of_one_rank_go_to_a_kernel_by_themselves_where_there_is_one(layer, ndim, due):
    x = seeded(2, 3, *(8, 7, 6)[: ndim - 2])
    net = hs.parallelize(nn.Sequential(layer), hs.init(device="cpu"))
    found, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    with fusing() as calls:
        out = net(found * 1)
    assert calls == due
    expected = layer(plain * 1)
    torch.testing.assert_close(out, expected)
    for each in (out, expected):
        (each * seeded(*each.shape, seed=1)).sum().backward()
    torch.testing.assert_close(found.grad, plain.grad)


def test_a_pool_within_vmap_is_torchs_own():
    net = hs.parallelize(nn.Sequential(nn.MaxPool2d(2)), hs.init(device="cpu"))
    with fusing() as calls:
        torch.func.vmap(net)(seeded(2, 3, 4, 6, 6))
    assert not calls
