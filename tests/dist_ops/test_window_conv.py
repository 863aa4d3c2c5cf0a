"""Halos received beside a piece, in its own memory: the numbers are those of one process."""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from hyperslab.dist_ops import choices, window_conv
from hyperslab.kernels import fused
from hyperslab.kernels.memory_format import empty_with_rows, has_rows, window_around
from hyperslab.testing import Team, assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place


class _Roomy(Function):
    """A copy with rows of memory beside it."""

    @staticmethod
    def forward(ctx, x, rows):
        return empty_with_rows(x.shape, rows, x.dtype, x.device).copy_(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def roomy(x, mesh):
    """``x`` as an operator leaves it that knows what the next one reads."""
    rows = window_conv.rows_beside(x.box, mesh) if isinstance(x, hs.Slab) else (0, 0)
    return x.with_local(_Roomy.apply(x.local, rows)) if any(rows) else x


def check(place, shape, options, kernel, twice):
    mesh, weights = place.mesh(), [seeded(4, 2, *kernel, seed=2), seeded(4, seed=3)]
    conv = getattr(F, f"conv{len(kernel)}d")

    def network(x, weight, bias):
        out = conv(roomy(x * 2, mesh), weight, bias, **options)
        if not twice:
            return out
        (grad,) = torch.autograd.grad(out.square().sum(), weight, create_graph=True)
        return grad

    apply = window_conv._WindowConv.apply
    with (
        patch.object(window_conv, "LARGE", 0),
        patch.object(choices, "hides_exchange", lambda *args, **options: False),
        patch.object(window_conv._WindowConv, "apply", side_effect=apply) as calls,
    ):
        for _ in range(2):
            x = [seeded(*shape)]
            assert_same_as_serial(network, x, weights, mesh=mesh, cuts=place.cuts)
    return calls.call_count


UNEVEN = Place({"depth": 3}, {"depth": [0, 1, 8, 12]})
CASES = {
    "volumes": (Place({"depth": 2}), (1, 2, 12, 5, 6), {"padding": 1}, (3, 3, 3)),
    "uneven": (UNEVEN, (1, 2, 12, 5, 6), {"padding": (2, 1, 1)}, (5, 3, 3)),
    "images, even kernel": (Place({"height": 2}), (1, 2, 13, 6), {"padding": 1}, (4, 2)),
    "strides": (Place({"height": 2}), (1, 2, 12, 6), {"padding": 1, "stride": 2}, (3, 3)),
}


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("case", CASES)
def test_the_second_pass_receives_halos_in_place(run, case, twice):
    """In the first one nobody knows of them."""
    place, *others = CASES[case]
    assert run(place, check, *others, twice) == [1] * place.num_ranks


@pytest.mark.parametrize(
    ("place", "shape"),
    [(Place({"depth": 2}), (2, 2, 12, 5, 6)), (Place({"width": 2}), (1, 2, 12, 5, 6))],
    ids=["two samples", "another dim"],
)
def test_rows_that_do_not_lie_beside_each_other_are_copied(run, place, shape):
    assert run(place, check, shape, {"padding": 1}, (3, 3, 3), False) == [0, 0]


def check_written(place):
    mesh = place.mesh()
    x = hs.shard(seeded(1, 2, 12, 6).requires_grad_(), mesh)
    weight = seeded(4, 2, 3, 3, seed=2).requires_grad_()
    with (
        patch.object(window_conv, "LARGE", 0),
        patch.object(choices, "hides_exchange", lambda *args, **options: False),
    ):
        for _ in range(2):
            piece = roomy(x * 2, mesh)
            out = F.conv2d(piece, weight, padding=1)
        piece.local.mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_piece_that_is_written_into_before_the_backward_pass_is_refused(run):
    run(Place({"height": 2}), check_written)


def test_rows_are_given_once():
    x = empty_with_rows((1, 3, 4, 5), (2, 1), torch.float64, torch.device("cpu")).fill_(1)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert not has_rows(x, (3, 1))
    window = window_around(x, (1, 1))
    window[:, :, :1] = 5
    assert window.shape == (1, 3, 6, 5)
    assert window[:, :, 1:-1].equal(x)
    assert x.eq(1).all()
    assert window_around(x, (1, 1)) is None


def compare_on_gpu(ends_in_norm):
    torch.backends.cudnn.allow_tf32 = False
    mesh = hs.init(depth=2, device="cuda", timeout_seconds=60)
    x = seeded(1, 2, 24, 8, 8).float().to(memory_format=torch.channels_last_3d)
    weights = [seeded(4, 2, 3, 3, 3, seed=2).float(), seeded(4, 4, 3, 3, 3, seed=3).float()]

    def network(x, first, second):
        y = F.relu(F.conv3d(x.sin(), first, padding=1))
        y = F.batch_norm(y, None, None, training=True) if ends_in_norm else F.avg_pool3d(y, 3, 2, 1)
        return F.conv3d(y, second, padding=1)

    apply = window_conv._WindowConv.apply
    with (
        patch.object(window_conv, "LARGE", 0),
        patch.object(choices, "joins_pool", lambda *args: True),
        patch.object(choices, "hides_exchange", lambda *args, **options: False),
        patch.object(window_conv._WindowConv, "apply", side_effect=apply) as calls,
    ):
        for _ in range(2):
            assert_same_as_serial(network, [x], weights, mesh=mesh, tolerance=2e-3)
    return calls.call_count, fused.is_measured(mesh.device)


@pytest.mark.gpu
@pytest.mark.parametrize("ends_in_norm", [False, True], ids=["pool", "norm"])
def test_kernels_leave_room_for_halos_on_a_gpu(ends_in_norm):
    with Team(2, timeout_seconds=120) as team:
        found = team.run(compare_on_gpu, ends_in_norm)
    is_left = [(1, True)] * 2
    assert found == is_left or (not found[0][1] and not ends_in_norm)


def check_checkpoint(place):
    mesh = place.mesh()
    weight = seeded(4, 2, 3, 3, seed=2)

    def network(x, weight):
        return checkpoint(
            lambda x, weight: F.conv2d(roomy(x * 2, mesh), weight, padding=1).sin(),
            x,
            weight,
            use_reentrant=False,
        )

    with (
        patch.object(window_conv, "LARGE", 0),
        patch.object(choices, "hides_exchange", lambda *args, **options: False),
    ):
        for _ in range(2):
            assert_same_as_serial(network, [seeded(1, 2, 11, 6)], [weight], mesh=mesh)
    return window_conv.rows_beside(hs.shard(seeded(1, 2, 11, 6), mesh).box, mesh)


def test_a_checkpoint_computes_again_what_it_computed(run):
    """Rows that it would learn in between are not asked for."""
    assert run(Place({"height": 2}), check_checkpoint) == [(0, 0)] * 2
