import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import hyperslab as hs
from hyperslab.comm import collectives
from hyperslab.comm.collectives import broadcast_, gather_pieces
from hyperslab.testing import seeded

init = functools.partial(hs.init, device="cpu", timeout_seconds=100)


def tensors(rank):
    """Every kind of tensor that a module may hold, different on every rank."""
    x = seeded(4, 6, 2, 3, seed=rank)
    return [
        x,
        x[0].permute(2, 0, 1),
        x.to(memory_format=torch.channels_last) + 1,
        torch.tensor(rank),
        torch.tensor([rank == 0, True]),
        torch.full((3,), rank, dtype=torch.int16),
        torch.full((5,), rank + 1j, dtype=torch.complex64),
        torch.full((2, 2), rank, dtype=torch.bfloat16),
        torch.empty(0, 3),
        nn.Parameter(torch.full((3,), float(rank))),
    ]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("batch_nbytes", [1, 100, 1 << 26])
def test_every_tensor_becomes_that_of_rank_0(batch_nbytes):
    mesh = init(height=3)
    before, collectives.BATCH_NBYTES = collectives.BATCH_NBYTES, batch_nbytes
    mine = tensors(mesh.rank)
    strides = [x.stride() for x in mine]
    broadcast_(iter(mine), mesh, "testing")
    collectives.BATCH_NBYTES = before
    for ours, theirs in zip(mine, tensors(0), strict=True):
        assert torch.equal(ours, theirs)
    assert [x.stride() for x in mine] == strides


@pytest.mark.ranks(2)
def test_a_graph_that_holds_a_tensor_stays_valid():
    mesh = init(height=2)
    x, weight = torch.tensor(3.0), torch.tensor(2.0, requires_grad=True)
    y = x * weight
    broadcast_([x], mesh, "testing")
    y.backward()
    assert weight.grad == 3


def test_alone_nothing_happens():
    x = seeded(3)
    broadcast_([x], init(), "testing")
    assert torch.equal(x, seeded(3))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("placements", "shape"),
    [((Replicate(), Shard(0)), (3, 2)), ((Shard(1), Shard(0)), (5, 3)), ((Shard(0),) * 2, (1,))],
)
def test_a_sharded_tensor_comes_to_rank_0_piece_by_piece(placements, shape):
    mesh = hs.init(sample=4, device="cpu")
    grid = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    cut = distribute_tensor(whole, grid, placements)
    found = torch.full(shape, -1.0)
    for nbytes in (1, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "BATCH_NBYTES", nbytes)
            pieces = [*gather_pieces({"x": cut, "y": whole}, mesh)]
        assert not pieces or mesh.rank == 0
        for name, start, values in pieces:
            assert nbytes > 1 or len(values) == 1  # row by row
            place = tuple(slice(at, at + n) for at, n in zip(start, values.shape, strict=True))
            assert torch.equal(values, whole[place])
            if name == "x":
                assert (found[place] == -1).all()  # each element comes once
                found[place] = values
        assert mesh.rank > 0 or torch.equal(found, whole)
        found.fill_(-1)
