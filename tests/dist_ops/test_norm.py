"""Batch norm by the kernels of SyncBatchNorm, which stand-ins replace where there is no GPU.

The stand-ins do what torch's functions do, in float64, and take only what these take.
"""

import copy
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.comm.reduce import reduce_sum
from hyperslab.kernels import norm, tiles
from hyperslab.testing import assert_same_as_serial, averaged, seeded
from hyperslab.testing.strategies import Place

PLACES = [
    Place({"depth": 2}, {"depth": [0, 1, 11]}),
    Place({"depth": 3}, {"depth": [0, 5, 5, 11]}),
    Place({"sample": 2, "width": 2}, {"width": [0, 3, 10]}),
    Place({"sample": 2}, {"sample": [0, 0, 3]}),
]
X5, X4, X2 = (3, 4, 11, 9, 10), (3, 4, 9, 10), (3, 4)
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
LAST = {ndim: {"memory_format": kind} for ndim, kind in FORMATS.items()}


def takes(rows, *per_channel):
    """Whether the kernels for channels-last memory are those that torch picks."""
    assert rows.ndim == 2
    assert rows.numel() > 0
    assert rows.is_contiguous()
    wide = torch.float32 if rows.element_size() < 4 else rows.dtype
    for t in per_channel:
        assert t is None or (t.shape == rows.shape[1:] and t.is_contiguous() and t.dtype == wide)
    return rows.double()


def update_stats(x, running_mean, running_var, momentum):
    assert running_mean is None
    assert running_var is None
    wide = torch.float32 if x.element_size() < 4 else x.dtype
    var, mean = torch.var_mean(takes(x), 0, correction=0)
    return mean.to(wide), var.to(wide)


def elemt(x, weight, bias, mean, invstd, eps, *, out):
    assert out.stride() == x.stride()
    made = (takes(x, weight, bias, mean, invstd) - mean) * invstd
    made = made if weight is None else made * weight
    return out.copy_(made if bias is None else made + bias)


def backward_reduce(grad, x, mean, invstd, weight, input_g, weight_g, bias_g):
    assert grad.dtype == x.dtype
    wide, distance = takes(grad, mean, invstd), takes(x, weight) - mean
    nothing = mean.new_empty(0)
    return wide.sum(0).to(mean), (wide * distance).sum(0).to(mean), nothing, nothing


def backward_elemt(grad, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    assert count.dtype == torch.int32
    distance = takes(x, weight, mean, invstd, sum_dy, sum_dy_xmu) - mean
    slope = invstd.double() ** 2 * sum_dy_xmu / count.sum()
    made = (takes(grad) - sum_dy / count.sum() - distance * slope) * invstd
    return (made if weight is None else made * weight).to(x.dtype)


STAND_INS = {
    "batch_norm_update_stats": update_stats,
    "batch_norm_elemt": elemt,
    "batch_norm_backward_reduce": backward_reduce,
    "batch_norm_backward_elemt": backward_elemt,
}


@contextmanager
def kernels():
    """Makes the kernels of SyncBatchNorm be there; ``calls`` are the names of those that ran."""
    calls = []

    def noted(name, function):
        def call(*args, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        there = patch.object(norm, "_has_kernels", lambda x: x.dtype in norm._NATIVE)
        stack.enter_context(there)
        for name, function in STAND_INS.items():
            stack.enter_context(patch.object(torch, name, noted(name, function)))
        yield calls


def in_last(function):
    """``function`` of an input whose channels are last in memory."""

    def call(x, *weights):
        return function(x.contiguous(**LAST.get(x.ndim, {})), *weights)

    return call


CASES = {
    "weights": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), X5, 2),
    "no weights": (lambda x: F.batch_norm(x, None, None, training=True), X5, 0),
    "weight alone": (lambda x, w: F.batch_norm(x, None, None, w, training=True, eps=0.1), X4, 1),
    "bias alone": (lambda x, b: F.batch_norm(x, None, None, bias=b, training=True), X4, 1),
    "little eps": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True, eps=1e-30), X4, 2),
    "vectors": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), X2, 2),
    "changed in place": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True).mul_(2), X4, 2),
    "gradients in other memory": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True).contiguous() * 2,
        X5,
        2,
    ),
    "one gradient for all": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True).sum(), X5, 2),
}


def check_case(place, name):
    function, shape, num_weights = CASES[name]
    mesh, cuts = place.mesh(), place.cuts_of(len(shape))
    with kernels() as calls:
        assert_same_as_serial(
            in_last(function),
            [seeded(*shape) + 3],
            [seeded(4, seed=1 + number) for number in range(num_weights)],
            mesh=mesh,
            cuts=cuts,
        )
    x = hs.shard(seeded(*shape), mesh, cuts=cuts)
    is_split = any(x.layout.splits)
    assert calls == ([*STAND_INS] if is_split and x.local.numel() else [])


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_one_pass_for_each_part_gives_the_numbers_of_one_process(run, place, name):
    run(place, check_case, name)


def check_pieces_that_differ(place):
    """One rank's channels are not last, and another's piece is too large for one call."""
    mesh, weights = place.mesh(), [seeded(4, seed=1), seeded(4, seed=2)]

    def norm(x, w, b):
        if isinstance(x, hs.Slab) and mesh.rank == 0:
            return F.batch_norm(x, None, None, w, b, True)
        return in_last(CASES["weights"][0])(x, w, b)

    limit = 90 if mesh.rank == 1 else tiles.TILE_NUMEL
    with kernels() as calls, patch.object(tiles, "TILE_NUMEL", limit):
        assert_same_as_serial(norm, [seeded(*X5) + 3], weights, mesh=mesh)
    numels = {0: 0, 1: 3 * 4 * 9 * 10 * 4, 2: 1}  # depth is cut into 4, 4, 3
    num_calls = -(-numels[mesh.rank] // 88)  # rows of 4 channels
    assert [calls.count(name) for name in STAND_INS] == [num_calls] * 4


def test_every_rank_picks_what_its_own_piece_allows(run):
    run(Place({"depth": 3}), check_pieces_that_differ)


def check_large_alone(place):
    weights = [seeded(4, seed=1), seeded(4, seed=2)]
    with kernels() as calls, patch.multiple(tiles, MAX_NUMEL=800, TILE_NUMEL=400):
        assert_same_as_serial(
            in_last(CASES["weights"][0]), [seeded(*X4) + 3], weights, mesh=place.mesh()
        )
    assert [calls.count(name) for name in STAND_INS] == [3] * 4


def test_a_tensor_too_large_for_one_call_is_read_in_parts(run):
    run(Place({}), check_large_alone)


def check_without_input_gradient(place):
    with kernels() as calls:
        assert_same_as_serial(
            in_last(CASES["weights"][0]),
            [seeded(*X5)],
            [seeded(4, seed=1), seeded(4, seed=2)],
            mesh=place.mesh(),
            input_grads=False,
        )
    assert "batch_norm_backward_elemt" not in calls


def test_an_input_that_wants_no_gradient_gets_none(run):
    run(Place({"depth": 2}), check_without_input_gradient)


def check_module(place, dtype):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    serial = nn.BatchNorm3d(4)
    ours, close = copy.deepcopy(serial), torch.testing.assert_close
    rounding = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
    with kernels():
        for step in range(2):
            x = (seeded(*X5, seed=step) * (step + 1) + step).to(dtype)
            slab = hs.shard(x, mesh, cuts=cuts).contiguous(**LAST[5])
            out, expected = ours(slab), serial(x.float())
            assert out.dtype == dtype
            close(hs.gather(out).float(), expected, **rounding)
            (out * seeded(*X5, seed=9).to(dtype)).sum().backward()
            (expected * seeded(*X5, seed=9).to(dtype).float()).sum().backward()
    for key, value in serial.state_dict().items():
        close(ours.state_dict()[key], value, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(ours.parameters(), serial.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        close(averaged(mine, mesh), theirs.grad, rtol=1e-2, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_module_of_float32_keeps_its_statistics(run, dtype):
    run(Place({"depth": 3}, {"depth": [0, 5, 5, 11]}), check_module, dtype)


def check_short_weights(place):
    x, mesh = (seeded(*X4) * 3 + 100).bfloat16(), place.mesh()
    weight = seeded(4).bfloat16().requires_grad_()
    bias = seeded(4, seed=1).bfloat16().requires_grad_()
    with kernels() as calls:
        out = in_last(CASES["weights"][0])(hs.shard(x, mesh), weight, bias)
        (out * seeded(*X4).bfloat16()).sum().backward()
    assert calls == [*STAND_INS][:3]  # the input wants no gradient
    expected = F.batch_norm(x.double(), None, None, weight.double(), bias.double(), True)
    torch.testing.assert_close(hs.gather(out).double(), expected, rtol=0.01, atol=0.01)
    assert {weight.grad.dtype, bias.grad.dtype} == {torch.bfloat16}


def test_weights_of_short_floats_get_gradients_of_their_dtype(run):
    run(Place({"height": 2}), check_short_weights)


def check_spatial(place):
    mesh = replace(place.mesh(), batch_stats="spatial")
    x = seeded(4, *X5[1:])
    with kernels() as calls:
        slab = hs.shard(x, mesh).contiguous(**LAST[5])
        out = hs.gather(F.batch_norm(slab, None, None, training=True))
    groups = x.split(2)
    expected = torch.cat([F.batch_norm(group, None, None, training=True) for group in groups])
    torch.testing.assert_close(out, expected)
    assert calls == [*STAND_INS][:2]


def test_spatial_statistics_are_those_of_one_group_of_samples(run):
    run(Place({"sample": 2, "depth": 2}), check_spatial)


def check_penalty(place):
    """The gradients of the squared norm of a gradient."""
    mesh, grads = place.mesh(), []
    for parallel in (False, True):
        ends = [seeded(4, seed=1).requires_grad_(), seeded(4, seed=2).requires_grad_()]
        leaf = seeded(*X4).requires_grad_()
        x = hs.shard(leaf, mesh, cuts=place.cuts_of(4)) if parallel else leaf
        with kernels():
            out = in_last(lambda x, w, b: F.batch_norm(x, None, None, w, b, True) ** 3)(x, *ends)
            loss, local = (out * seeded(*X4, seed=3)).sum(), x.local if parallel else x
            (grad,) = torch.autograd.grad(loss, local, create_graph=True)
            grad = x.with_local(grad / mesh.num_ranks) if parallel else grad
            (grad**2).sum().backward()
        grads.append((leaf.grad, *(averaged(t, mesh) if parallel else t.grad for t in ends)))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "place",
    [Place({"height": 2}, {"height": [0, 9, 9]}), Place({"sample": 2, "width": 2})],
    ids=str,
)
def test_a_gradient_penalty_has_the_gradients_of_one_process(run, place):
    run(place, check_penalty)


def check_penalty_on_weights(place):
    """Gradients of the weights' gradients, where the input wants none."""
    mesh, found = place.mesh(), []
    for parallel in (False, True):
        ends = [seeded(4, seed=1).requires_grad_(), seeded(4, seed=2).requires_grad_()]
        x = hs.shard(seeded(*X4), mesh) if parallel else seeded(*X4)
        with kernels():
            loss = in_last(lambda x, w, b: F.batch_norm(x, None, None, w, b, True) ** 3)(x, *ends)
            loss = (loss * seeded(*X4, seed=3)).sum() / (mesh.num_ranks if parallel else 1)
            grads = torch.autograd.grad(loss, ends, create_graph=True)
            if parallel:
                grads = [reduce_sum(grad, mesh, ["height"]) for grad in grads]
            sum((grad**2).sum() for grad in grads).backward()
        found.append([averaged(t, mesh) if parallel else t.grad for t in ends])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


def test_gradients_of_weights_have_gradients(run):
    run(Place({"height": 2}), check_penalty_on_weights)
