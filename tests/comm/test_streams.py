"""Halo exchanges on a GPU run beside what is computed, and the host waits for neither.

NCCL wants a GPU for every rank. Here one rank sends its faces to itself: as all ranks do, but its
neighbour below is a mirror, and so is the one above.
"""

import dataclasses
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import distributed_c10d

import hyperslab as hs
from hyperslab.comm.fetch import fetch
from hyperslab.comm.mesh import Mesh, group_of
from hyperslab.dist_ops.halo_conv import HaloConv
from hyperslab.kernels.conv import Settings
from hyperslab.layout import AXES, Grid, Layout, Split, Window, cut_evenly, plan_halo
from hyperslab.testing import Team

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),  # that it is a prototype
]

SETTINGS = Settings((1, 1, 1), (1, 1, 1), 1)
WINDOWS = (Window(3, 1, 1),) * 3
CYCLES = 1 << 28
"""Of a GPU that waits for more than a tenth of a second."""


def mirrored_mesh(axis):
    """The middle of three ranks along ``axis``."""
    backend, timeout = "cpu:gloo,cuda:nccl", timedelta(seconds=60)
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timeout)
    grid = Grid(tuple(3 if each == axis else 1 for each in AXES))
    mesh = Mesh(grid, 1, torch.device("cuda", 0), backend, timeout)
    mesh._groups[frozenset({axis})] = group_of([(0,)], 0, backend, timeout)
    return mesh


def mirrored_plan(mesh, axis, shape):
    """The plan of a convolution whose messages all go to this rank."""
    dim = AXES.index(axis)
    whole = tuple(3 * n if d == dim else n for d, n in enumerate(shape))
    split = Split(axis, cut_evenly(whole[dim], 3))
    layout = Layout(whole, tuple(split if d == dim else None for d in range(5)))
    plan = plan_halo(mesh.grid, mesh.rank, layout, WINDOWS)

    def to_itself(messages):
        return tuple(message._replace(peer=0) for message in messages)

    exchange = plan.exchange
    exchange = dataclasses.replace(
        exchange, sends=to_itself(exchange.sends), receives=to_itself(exchange.receives)
    )
    return dataclasses.replace(plan, exchange=exchange)


def mirrored(x, dim):
    """``x`` between its first and last planes, as the mirrors show them."""
    return torch.cat([x.narrow(dim, 0, 1), x, x.narrow(dim, x.shape[dim] - 1, 1)], dim)


def draw(*shape, last=False):
    x = torch.randn(shape, dtype=torch.float64, device="cuda")
    return x.to(memory_format=torch.channels_last_3d) if last else x


def serial_conv(x, weight, bias, dim):
    pads = [0 if each == dim else 1 for each in (2, 3, 4)]
    return F.conv3d(mirrored(x, dim), weight, bias, padding=pads)


@contextmanager
def no_waiting(enabled):
    """Within it, whatever makes the host wait for the GPU raises an error."""
    torch.cuda.set_sync_debug_mode("error" if enabled else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module")
def one_rank():
    with Team(1, timeout_seconds=120) as team:
        yield team


def check_conv(axis, last):
    distributed_c10d._check_not_self_rank = lambda *args: None  # NCCL can
    torch.backends.cudnn.allow_tf32 = False
    mesh, dim, shape = mirrored_mesh(axis), AXES.index(axis), (2, 3, 9, 8, 7)
    plan = mirrored_plan(mesh, axis, shape)
    for number in range(4):
        with no_waiting(number == 3):  # when all that is done once has been done
            torch.cuda._sleep(CYCLES // 32)
            tensors = [draw(*shape, last=last), draw(4, 3, 3, 3, 3), draw(4)]
            ours = [t.clone().requires_grad_() for t in tensors]
            theirs = [t.clone().requires_grad_() for t in tensors]
            out = HaloConv.apply(*ours, plan, SETTINGS, mesh)
            expected = serial_conv(*theirs, dim)
            coefficients = torch.randn_like(expected)
            grads = torch.autograd.grad(out, ours, coefficients)
            expected_grads = torch.autograd.grad(expected, theirs, coefficients)
        torch.testing.assert_close(out, expected)
        for mine, right in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("axis", ["depth", "height", "width"])
def test_a_convolution_over_nccl_is_right_and_the_host_never_waits(one_rank, axis, last):
    one_rank.run(check_conv, axis, last)


def check_fetch(axis):
    distributed_c10d._check_not_self_rank = lambda *args: None
    mesh, dim, shape = mirrored_mesh(axis), AXES.index(axis), (2, 3, 9, 8, 7)
    exchange = mirrored_plan(mesh, axis, shape).exchange
    for number in range(3):
        with no_waiting(number == 2):
            torch.cuda._sleep(CYCLES // 32)
            x = draw(*shape).requires_grad_()
            out = fetch(x, exchange, mesh)
            coefficients = torch.randn_like(out)
            (grad,) = torch.autograd.grad(out, x, coefficients)
            (right,) = torch.autograd.grad(mirrored(x, dim), x, coefficients)
        assert torch.equal(out, mirrored(x, dim))
        torch.testing.assert_close(grad, right)


@pytest.mark.parametrize("axis", ["depth", "width"])
def test_a_fetch_over_nccl_is_right_and_the_host_never_waits(one_rank, axis):
    one_rank.run(check_fetch, axis)


def seconds_of_slow_interior(backward):
    """Until the host has launched a convolution whose interior takes the GPU very long."""
    mesh = hs.init(depth=2, device="cuda", timeout_seconds=60)
    shape = (1, 3, 16, 8, 8)
    layout = Layout(shape, (None, None, Split("depth", cut_evenly(16, 2)), None, None))
    plan = plan_halo(mesh.grid, mesh.rank, layout, WINDOWS)
    slow = SlowSettings(*SETTINGS)
    x, weight = draw(1, 3, 8, 8, 8).requires_grad_(), draw(4, 3, 3, 3, 3).requires_grad_()
    for number in range(3):
        torch.cuda.synchronize()
        dist.barrier(group=mesh.group)
        settings = slow if number == 2 else SETTINGS
        begun = time.perf_counter()
        out = HaloConv.apply(x, weight, None, plan, settings, mesh)
        if backward:
            torch.cuda.synchronize()
            dist.barrier(group=mesh.group)
            begun = time.perf_counter()
            torch.autograd.grad(out, [x, weight], torch.ones_like(out))
        launched = time.perf_counter()
        torch.cuda.synchronize()
        done = time.perf_counter()
    return launched - begun, done - begun


class SlowSettings(Settings):
    """What it computes of a whole piece, it computes after a long sleep of the GPU."""

    __slots__ = ()

    def run(self, x, weight, bias, padding):
        if max(padding) == padding[0]:  # the interior's, which pads all dims
            torch.cuda._sleep(CYCLES)
        return super().run(x, weight, bias, padding)

    def run_backward(self, grad, x, weight, padding, *, wants):
        if max(padding) == padding[0]:
            torch.cuda._sleep(CYCLES)
        return super().run_backward(grad, x, weight, padding, wants=wants)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_messages_through_the_host_travel_while_the_interior_is_computed(backward):
    with Team(2, timeout_seconds=60) as team:
        for launched, done in team.run(seconds_of_slow_interior, backward):
            assert launched < done / 2
