import functools

import pytest
import torch
import torch.distributed as dist

import hyperslab as hs
from hyperslab.comm.reduce import gather_stacked, reduce_sum, reduce_sum_
from hyperslab.testing import seeded

init = functools.partial(hs.init, device="cpu", timeout_seconds=100)
AXES = [(), ("sample",), ("height",), ("sample", "height"), ("depth", "height")]


def peers(mesh, axes):
    return dist.get_process_group_ranks(mesh.group_over(axes))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axes", AXES, ids="-".join)
def test_a_sum_and_its_gradient_run_over_the_same_ranks(axes):
    mesh = init(sample=2, height=2)
    x = seeded(3, 4, seed=mesh.rank).requires_grad_()
    total = reduce_sum(x, mesh, axes)
    torch.testing.assert_close(total, sum(seeded(3, 4, seed=r) for r in peers(mesh, axes)))
    (total * seeded(3, 4, seed=10 + mesh.rank)).sum().backward()
    expected = sum(seeded(3, 4, seed=10 + r) for r in peers(mesh, axes))
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.ranks(2)
def test_a_sum_can_be_differentiated_twice():
    mesh = init(height=2)
    x = seeded(3, seed=mesh.rank).requires_grad_()
    [grad] = torch.autograd.grad(reduce_sum(x**3, mesh, ["height"]).sum(), x, create_graph=True)
    grad.sum().backward()
    torch.testing.assert_close(x.grad, 2 * 6 * x.detach())


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "dtype",
    [torch.int16, torch.int64, torch.uint8, torch.bfloat16, torch.float16, torch.complex64],
    ids=str,
)
def test_every_dtype_is_summed(dtype):
    mesh = init(height=3)
    x = torch.full((2, 3), mesh.rank + 1).to(dtype)
    assert torch.equal(reduce_sum(x, mesh, ["height"]), torch.full((2, 3), 6).to(dtype))
    assert torch.equal(x, torch.full((2, 3), mesh.rank + 1).to(dtype))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,)], ids=str)
def test_scalars_and_empty_tensors_are_summed(shape):
    mesh = init(height=2)
    x = torch.ones(shape).requires_grad_()
    total = reduce_sum(x, mesh, ["height"])
    assert torch.equal(total, torch.full(shape, 2.0))
    total.sum().backward()
    assert torch.equal(x.grad, torch.full(shape, 2.0))


@pytest.mark.ranks(2)
def test_strided_tensors_are_summed():
    mesh = init(height=2)
    whole = seeded(4, 6, seed=mesh.rank)
    for view in (lambda t: t.T, lambda t: t[::2, 1::2], lambda t: t[:1].expand(3, 6)):
        expected = view(seeded(4, 6, seed=0)) + view(seeded(4, 6, seed=1))
        torch.testing.assert_close(reduce_sum(view(whole), mesh, ["height"]), expected)
    assert torch.equal(whole, seeded(4, 6, seed=mesh.rank))


@pytest.mark.ranks(2)
def test_without_several_ranks_along_the_axes_nothing_happens():
    mesh = init(height=2)
    x = seeded(3, seed=mesh.rank)
    assert reduce_sum(x, mesh, ["depth", "sample"]) is x
    assert reduce_sum_(x, mesh, ["depth"]) is x
    assert torch.equal(gather_stacked(x, mesh, ["depth"]), x[None])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int16], ids=str)
def test_a_sum_in_place_changes_its_argument(dtype):
    mesh = init(height=2)
    x = torch.full((3,), 10 * (mesh.rank + 1), dtype=dtype)
    assert reduce_sum_(x, mesh, ["height"]) is x
    assert torch.equal(x, torch.full((3,), 30, dtype=dtype))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axes", AXES, ids="-".join)
def test_gathered_tensors_come_in_the_order_of_the_ranks(axes):
    mesh = init(sample=2, height=2)
    gathered = gather_stacked(seeded(6, 2, seed=mesh.rank).T, mesh, axes)
    expected = torch.stack([seeded(6, 2, seed=r).T for r in peers(mesh, axes)])
    assert torch.equal(gathered, expected)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axes", AXES, ids="-".join)
def test_the_gradient_of_gathered_tensors_goes_home_summed(axes):
    mesh = init(sample=2, height=2)
    x = seeded(3, 2, seed=mesh.rank).requires_grad_()
    gathered = gather_stacked(x**3, mesh, axes)
    (gathered * seeded(*gathered.shape, seed=10 + mesh.rank)).sum().backward()
    ranks = peers(mesh, axes)
    weights = sum(seeded(*gathered.shape, seed=10 + r) for r in ranks)[ranks.index(mesh.rank)]
    torch.testing.assert_close(x.grad, weights * 3 * x.detach() ** 2)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.uint8, torch.bfloat16], ids=str)
def test_every_dtype_is_gathered(dtype):
    mesh = init(height=3)
    x = torch.full((2, 0, 3), mesh.rank).to(dtype), torch.full((2, 3), mesh.rank).to(dtype)
    for each in x:
        expected = torch.stack([torch.full_like(each, r) for r in range(3)])
        assert torch.equal(gather_stacked(each, mesh, ["height"]), expected)
