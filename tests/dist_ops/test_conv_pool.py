"""A convolution, an activation and a pool with one exchange: the numbers of one process."""

from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings, strategies as st
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from hyperslab.dist_ops import choices
from hyperslab.kernels import conv_pool, fused
from hyperslab.layout import Cuts, Grid, Layout, Split, Window, plan_conv_pool
from hyperslab.nn.ops.windows import fused as rules
from hyperslab.testing import Team, assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place, places


@contextmanager
def joining():
    """Has convolutions wait for pools on CPUs too; what ran with one exchange."""
    rules._COMPUTED_TWICE.clear()
    runs = []

    def run(x, *args):
        runs.append(tuple(x.shape))
        return conv_and_pool(x, *args)

    conv_and_pool = rules.conv_and_pool
    with (
        patch.object(fused, "defers_pieces", lambda x: type(x) is torch.Tensor),
        patch.object(choices, "joins_pool", lambda *args: True),
        patch.object(rules, "conv_and_pool", run),
    ):
        yield runs


class Network(NamedTuple):
    shape: tuple[int, ...]
    conv: dict
    kernel: tuple[int, ...]
    slope: float | None
    kind: str
    pool: dict
    bias: bool = True

    @property
    def weights(self):
        groups = self.conv.get("groups", 1)
        weight = seeded(4, 2 // groups, *self.kernel, seed=2)
        return [weight, seeded(4, seed=3)] if self.bias else [weight]

    def __call__(self, x, weight, bias=None):
        num_dims = len(self.shape) - 2
        y = getattr(F, f"conv{num_dims}d")(x.sin(), weight, bias, **self.conv)
        if self.slope is not None:
            y = F.leaky_relu(y, self.slope, True) if self.slope else F.relu(y)
        return getattr(F, f"{self.kind}_pool{num_dims}d")(y, **self.pool)


@st.composite
def cases(draw):
    num_dims = draw(st.integers(2, 3))
    kernel = draw(st.tuples(*[st.integers(1, 4)] * num_dims))
    dilation = draw(st.sampled_from([1, 1, 2]))
    conv = {
        "stride": draw(st.sampled_from([1, 1, 2])),
        "padding": tuple(draw(st.integers(0, dilation * (k - 1))) for k in kernel),
        "dilation": dilation,
        "groups": draw(st.sampled_from([1, 1, 2])),
    }
    kind = draw(st.sampled_from(["avg", "max"]))
    sizes = draw(st.tuples(*[st.integers(1, 3)] * num_dims))
    pool = {
        "kernel_size": sizes,
        "stride": tuple(draw(st.integers(1, k + 1)) for k in sizes),
        "padding": tuple(draw(st.integers(0, k // 2)) for k in sizes),
    }
    if kind == "avg":
        pool["count_include_pad"] = draw(st.sampled_from([True, True, False]))
    shape = (draw(st.integers(1, 2)), 2, *draw(st.tuples(*[st.integers(12, 16)] * num_dims)))
    slope = draw(st.sampled_from([None, 0.0, 0.2]))
    network = Network(shape, conv, kernel, slope, kind, pool, draw(st.booleans()))
    return network, draw(places(shape))


def check_network(place, network):
    mesh = place.mesh()
    cuts = place.cuts_of(len(network.shape))
    with joining() as runs:
        assert_same_as_serial(
            network, [seeded(*network.shape)], network.weights, mesh=mesh, cuts=cuts
        )
    return len(runs)


SAME, COSMOFLOW = {"padding": 1}, {"kernel_size": 3, "stride": 2, "padding": 1}
AVERAGES = Network((1, 2, 12, 6, 6), SAME, (3, 3, 3), 0.2, "avg", COSMOFLOW)
MAXIMA = Network((2, 2, 12, 9, 10), SAME, (3, 3, 3), 0.0, "max", COSMOFLOW, False)
EVEN = Network((1, 2, 13, 12), {"padding": (2, 1)}, (4, 2), None, "avg", {"kernel_size": (2, 3)})


@example((AVERAGES, Place({"depth": 2})))
@example((AVERAGES, Place({"depth": 3}, {"depth": [0, 5, 9, 12]})))
@example((AVERAGES, Place({"depth": 4}, {"depth": [0, 1, 2, 3, 12]})))
@example((MAXIMA, Place({"height": 2, "width": 2}, {"height": [0, 3, 9]})))
@example((EVEN, Place({"height": 3}, {"height": [0, 4, 5, 13]})))
@settings(max_examples=12, deadline=None)
@given(cases())
def test_any_network_gives_the_numbers_of_one_process(run, case):
    network, place = case
    run(place, check_network, network)


@pytest.mark.parametrize("network", [AVERAGES, MAXIMA, EVEN], ids=["averages", "maxima", "even"])
def test_one_exchange_serves_a_convolution_and_its_pool(run, network):
    axis = "depth" if len(network.shape) == 5 else "height"
    assert run(Place({axis: 2}), check_network, network) == [1, 1]


def check_skip(place):
    mesh = place.mesh()
    x, weight = hs.shard(seeded(1, 2, 12, 6, 6), mesh), seeded(4, 2, 3, 3, 3, seed=2)

    def network(x, weight):
        y = F.relu(F.conv3d(x, weight, padding=1))
        return F.avg_pool3d(y, 3, 2, 1).sum() + y.square().sum()

    found = []
    with joining() as runs:
        for _ in range(3):
            found.append(network(x, weight))
            found.append(len(runs))
    serial = network(seeded(1, 2, 12, 6, 6), weight)
    for loss in found[::2]:
        torch.testing.assert_close(loss, serial)
    return found[1::2]


def test_an_output_that_is_wanted_besides_its_pool_is_not_computed_twice_again(run):
    assert run(Place({"depth": 2}), check_skip) == [[1, 1, 1]] * 2


def check_checkpoint(place):
    mesh = place.mesh()

    def block(x, weight):
        y = F.relu(F.conv3d(x, weight, padding=1))
        return F.avg_pool3d(y, 3, 2, 1) + y.square().mean()

    def network(x, weight):
        return checkpoint(block, x, weight, use_reentrant=False)

    with joining() as runs:
        for _ in range(2):
            x, weight = seeded(1, 2, 12, 6, 6), seeded(4, 2, 3, 3, 3, seed=2)
            assert_same_as_serial(network, [x], [weight], mesh=mesh)
    return len(runs)


def test_a_checkpoint_joins_the_same_when_it_computes_again(run):
    assert run(Place({"depth": 2}), check_checkpoint) == [4, 4]


def check_autocast(place):
    """What waits is computed in the dtype of where it was called."""
    mesh = place.mesh()
    x, weight = hs.shard(seeded(1, 2, 12, 6).float(), mesh), seeded(4, 2, 3, 3).float()
    with joining() as runs:
        y = F.conv2d(x, weight, padding=1)
        with torch.autocast("cpu", torch.bfloat16):
            outs = [F.avg_pool2d(y, 3, 2, 1)]
            del y  # or it would be computed before the next function
            y = F.conv2d(x, weight, padding=1)
        outs.append(F.avg_pool2d(y, 3, 2, 1))
    return len(runs), [out.dtype for out in outs]


def test_a_convolution_waits_in_its_own_dtype(run):
    assert run(Place({"height": 2}), check_autocast) == [(2, [torch.float32, torch.bfloat16])] * 2


def test_ranks_that_would_have_no_outputs_have_all_exchange_twice():
    cuts = Cuts((0, 1, 2, 12))
    layout = Layout((1, 2, 12, 6), (None, None, Split("height", cuts), None))
    grid, conv = Grid((1, 1, 1, 3, 1)), (Window(3, 1, 1),) * 2
    wide, narrow = (Window(3, 3, 1),) * 2, (Window(3, 1, 1),) * 2
    assert plan_conv_pool(grid, 0, layout, conv, wide, 4) is None
    plan = plan_conv_pool(grid, 1, layout, conv, narrow, 4)
    assert plan.exchange.wanted.spans[2] == (-1, 4)
    assert (plan.before, plan.after) == ((0, 1), (0, 1))
    assert plan.overlap == pytest.approx(4 / 12)


def compare_on_gpu(network, axes):
    torch.backends.cudnn.allow_tf32 = False
    mesh = hs.init(**axes, device="cuda", timeout_seconds=60)
    run = rules.conv_and_pool
    with (
        patch.object(choices, "joins_pool", lambda *args: True),
        patch.object(rules, "conv_and_pool", side_effect=run) as calls,
    ):
        x = seeded(*network.shape)
        assert_same_as_serial(network, [x], network.weights, mesh=mesh)
    return calls.call_count, fused.defers_pieces(torch.empty(1, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("axes", [{"depth": 2}, {"depth": 2, "width": 2}], ids=["2", "2x2"])
def test_one_exchange_serves_both_on_a_gpu(axes):
    with Team(2 if len(axes) == 1 else 4, timeout_seconds=120) as team:
        for network in (AVERAGES, MAXIMA):
            found = team.run(compare_on_gpu, network, axes)
            assert set(found) in ({(1, True)}, {(0, False)})


def compare_one_kernel(axes):
    """The kernel that convolves and pools in one, in float32 with the rounding of TF32."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    mesh = hs.init(**axes, device="cuda", timeout_seconds=60)
    x, weight = seeded(1, 4, 24, 16, 32).float(), seeded(16, 4, 3, 3, 3, seed=2).float()
    x, weight = x.bfloat16().float(), weight.bfloat16().float()

    def run(x, weight):
        return F.avg_pool3d(F.leaky_relu(F.conv3d(x, weight, padding=1), 0.1), 3, 2, 1)

    kernel = weight.cuda().requires_grad_()
    with (
        patch.object(fused, "MIN_NUMEL", 0),
        patch.object(conv_pool, "MIN_NUMEL", 0),
        patch.object(choices, "joins_pool", lambda *args: True),
        patch.object(conv_pool, "conv_and_pool", side_effect=conv_pool.conv_and_pool) as calls,
    ):
        out = run(hs.shard(x.cuda(), mesh), kernel)
        (out * out).sum().backward()
    reference = weight.double().requires_grad_()
    right = run(x.double(), reference)
    (right * right).sum().backward()
    whole = hs.gather(out).cpu().double()
    torch.testing.assert_close(whole, right.detach(), rtol=2e-3, atol=2e-3)
    error = (kernel.grad.cpu().double() - reference.grad).norm() / reference.grad.norm()
    assert error < 3e-3
    return calls.call_count, fused.defers_pieces(kernel.detach())


@pytest.mark.gpu
@pytest.mark.parametrize("axes", [{"depth": 2}, {"height": 2}], ids=["depth", "height"])
def test_one_kernel_convolves_and_pools_pieces_with_halos(axes):
    with Team(2, timeout_seconds=120) as team:
        found = team.run(compare_one_kernel, axes)
        assert set(found) in ({(1, True)}, {(0, False)})
