import copy
import functools
import math
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import hyperslab as hs
from hyperslab.comm.mesh import Mesh, mesh_of_device_mesh
from hyperslab.layout import AXES
from hyperslab.testing import Team

init = functools.partial(hs.init, device="cpu", timeout_seconds=100)


def test_alone_a_mesh_has_one_rank_and_needs_no_process_group():
    mesh = init()
    assert (mesh.num_ranks, mesh.rank, mesh.backend) == (1, 0, None)
    assert set(mesh.coords.values()) == {0}
    assert not dist.is_initialized()
    assert str(mesh) == "Mesh(one rank, rank 0 of 1, cpu)"


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"depth": 2}, r"depth=2 needs 2 ranks, but there is 1: .* torchrun --nproc-per-node 2"),
        (
            {"sample": 2, "height": 3},
            r"a mesh of sample=2 x height=3 needs 6 ranks, but there is 1: change the axes, or "
            r"start 6 processes \(torchrun --nproc-per-node 6 \.\.\.\)",
        ),
        ({"depth": 0}, "axis depth must have at least 1 rank, got 0"),
        ({"width": -1}, "axis width must have at least 1 rank, got -1"),
        ({"sample": 0}, "axis sample must have at least 1 rank, got 0"),
        ({"height": 1.0}, r"axis height must have at least 1 rank, got 1\.0"),
        ({"depth": True}, "axis depth must have at least 1 rank, got True"),
        ({"sample": False}, "axis sample must have at least 1 rank, got False"),
        (
            {"transport": "device"},
            r"'device' needs GPUs .* \(the one rank's device is cpu, not a GPU\)",
        ),
        ({"channel": None}, "axis channel must have at least 1 rank, got None"),
        ({"timeout_seconds": 0}, "timeout_seconds must be above 0 and at most 10000000, got 0"),
        ({"timeout_seconds": math.nan}, "timeout_seconds must be above 0 .*, got nan"),
        ({"timeout_seconds": 1e300}, "timeout_seconds must be .* at most 10000000, got 1e.300"),
        ({"device": "tpu"}, "device must be 'cpu' or 'cuda', got 'tpu'"),
        ({"device": "meta"}, "device must be 'cpu' or 'cuda', got 'meta'"),
    ],
    ids=str,
)
def test_what_cannot_be_a_mesh_is_refused_with_its_numbers(axes, words):
    with pytest.raises(hs.ConfigError, match=words):
        hs.init(**({"device": "cpu"} | axes))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(hs.ConfigError, match="device 'cuda' was asked for, but torch finds no"):
        hs.init(device="cuda")


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("axes", "sizes"),
    [
        ({}, (4, 1, 1, 1, 1)),
        ({"sample": -1, "width": 2}, (2, 1, 1, 1, 2)),
        ({"sample": None, "depth": 4}, (1, 1, 4, 1, 1)),
        ({"sample": 2, "height": 2}, (2, 1, 1, 2, 1)),
        ({"sample": 1, "channel": 2, "depth": 2}, (1, 2, 2, 1, 1)),
    ],
    ids=str,
)
def test_sample_takes_the_ranks_that_the_other_axes_leave(axes, sizes):
    mesh = init(**axes)
    assert mesh.grid.sizes == sizes
    assert mesh.num_ranks == 4
    assert mesh.rank == dist.get_rank()


@pytest.mark.ranks(4)
def test_a_mesh_that_does_not_fit_is_refused_on_every_rank_before_any_message():
    with pytest.raises(hs.ConfigError, match="depth=3 needs 3 ranks, but there are 4"):
        init(sample=1, depth=3)
    with pytest.raises(hs.ConfigError, match="4 ranks cannot be spread over width=3"):
        init(sample=-1, width=3)
    assert init(depth=2).grid.sizes == (2, 1, 2, 1, 1)


@pytest.mark.ranks(4)
def test_ranks_next_to_each_other_differ_in_the_last_axis():
    mesh = init(sample=2, width=2)
    assert (mesh.coords["sample"], mesh.coords["width"]) == divmod(mesh.rank, 2)


@pytest.mark.ranks(8)
def test_a_group_holds_the_ranks_that_differ_along_its_axes_only():
    mesh = init(sample=2, depth=2, width=2)
    for axes in (
        (),
        ("sample",),
        ("depth",),
        ("width", "sample"),
        ("sample", "depth", "height"),
        AXES,
    ):
        group = mesh.group_over(axes)
        expected = [
            rank
            for rank, coords in enumerate(mesh.grid.coords)
            if all(coords[axis] == mesh.coords[axis] for axis in AXES if axis not in axes)
        ]
        assert dist.get_process_group_ranks(group) == expected
        total = torch.tensor([2**mesh.rank])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(2**rank for rank in expected)
        assert mesh.group_over(reversed(axes)) is group
    assert mesh.axes_beside(["depth"]) == ("sample", "width")
    assert mesh.axes_beside([]) == ("sample", "depth", "width")


@pytest.mark.ranks(4)
def test_meshes_of_the_same_ranks_live_side_by_side_and_share_groups():
    meshes = [init(depth=2, height=2), init(sample=4), init(sample=2, depth=2)]
    assert len({mesh.group for mesh in meshes}) == 1
    for mesh in meshes:
        x = torch.arange(16.0).view(4, 1, 2, 2)
        assert torch.equal(hs.gather(hs.shard(x, mesh)), x)


@pytest.mark.ranks(2)
def test_groups_with_another_time_out_are_other_groups():
    patient, hasty = init(depth=2), hs.init(depth=2, device="cpu", timeout_seconds=7)
    assert hasty.timeout == timedelta(seconds=7)
    assert patient.group is not hasty.group


@pytest.mark.ranks(3)
def test_ranks_that_ask_for_different_meshes_all_hear_of_it():
    init()
    axes = {"depth": 3} if dist.get_rank() == 2 else {"height": 3}
    words = "ranks ask for different meshes: rank 0 for height=3, rank 2 for depth=3"
    with pytest.raises(hs.CommError, match=words):
        init(**axes)


@pytest.mark.ranks(2)
def test_a_copy_of_a_mesh_is_the_mesh():
    mesh = init(depth=2)
    assert mesh.group is not None
    assert copy.deepcopy({"mesh": mesh})["mesh"] is mesh
    assert isinstance(mesh, Mesh)


def init_in_groups_of_others(folder):
    """Makes and destroys process groups one after the other, with a mesh on each."""
    rank = int(os.environ["RANK"])
    for name in ("first", "second"):
        # Not through the store of MASTER_PORT: a fast rank would meet the store that a slow one is
        # about to leave.
        place = f"file://{folder / name}"
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
        world = dist.group.WORLD
        mesh = init(depth=2)
        x = torch.arange(8.0).view(1, 1, 4, 2, 1)
        assert torch.equal(hs.gather(hs.shard(x, mesh)), x)
        assert dist.group.WORLD is world
        assert mesh.group is not world  # our messages are not mixed with those of others
        assert mesh_of_device_mesh(mesh.device_mesh("depth")) is mesh
        dist.destroy_process_group()


def test_a_process_group_may_be_there_before_and_be_destroyed(tmp_path):
    with Team(2, timeout_seconds=30) as team:
        team.run(init_in_groups_of_others, tmp_path)


@pytest.mark.ranks(3)
def test_what_rank_0_finds_out_all_are_told_and_its_errors_too():
    mesh = init()
    assert mesh.ask_first(lambda: f"from rank {mesh.rank}") == "from rank 0"
    assert mesh.tell_all(2 * mesh.rank) == [0, 2, 4]

    def fail():
        raise hs.FormatError(f"no such file, says rank {mesh.rank}")

    with pytest.raises(hs.FormatError, match="no such file, says rank 0"):
        mesh.ask_first(fail)
    assert mesh.tell_all(1) == [1, 1, 1]
