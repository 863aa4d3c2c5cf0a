import pytest
import torch

import hyperslab as hs


def whole(*shape, mesh):
    """A Slab that no axis splits."""
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return hs.shard(x, mesh, axes=(None,) * len(shape))


def a_mesh():
    return hs.init(depth=2, device="cpu", timeout_seconds=100)


@pytest.mark.ranks(2)
def test_a_function_without_a_rule_runs_where_every_rank_holds_the_whole():
    x = whole(4, 4, mesh=a_mesh())
    sign, logabsdet = torch.linalg.slogdet(x + torch.eye(4))
    assert sign.shape == logabsdet.shape == ()
    q, r = torch.linalg.qr(x)
    assert isinstance(q, hs.Slab)
    assert torch.allclose(hs.gather(q) @ hs.gather(r), hs.gather(x), atol=1e-5)


@pytest.mark.ranks(2)
def test_what_is_no_tensor_is_returned_as_it_is():
    x = whole(2, 3, mesh=a_mesh())
    assert x.stride() == (3, 1)
    assert x.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


@pytest.mark.ranks(2)
def test_a_view_of_a_whole_tensor_shares_its_memory():
    x = whole(3, 3, mesh=a_mesh())
    x.diagonal().zero_()
    assert hs.gather(x).diagonal().eq(0).all()


@pytest.mark.ranks(2)
def test_a_tensor_written_in_place_is_the_same_slab():
    x = whole(3, 3, mesh=a_mesh())
    assert x.fill_diagonal_(7.0) is x
    assert hs.gather(x).diagonal().eq(7).all()


@pytest.mark.ranks(2)
def test_a_change_of_shape_in_place_is_refused_and_leaves_the_slab_alone():
    mesh = a_mesh()
    x = whole(2, 3, mesh=mesh)
    with pytest.raises(hs.UnsupportedOp, match="shape in place"):
        torch.resize_as_(x, whole(3, mesh=mesh))
    assert x.shape == x.local.shape == (2, 3)


@pytest.mark.ranks(2)
def test_an_out_argument_is_refused():
    mesh = a_mesh()
    x, out = whole(3, 3, mesh=mesh), whole(2, mesh=mesh)
    with pytest.raises(hs.UnsupportedOp, match="out= is not supported"):
        torch.linalg.inv(x, out=out)
    assert out.local.shape == (2,)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("generator", [None, torch.Generator], ids=["global", "own"])
def test_random_numbers_are_refused_as_ranks_may_draw_others(generator):
    x = whole(2, 3, mesh=a_mesh())
    with pytest.raises(hs.UnsupportedOp, match="random numbers"):
        x.cauchy_(generator=generator and generator())


def test_one_rank_draws_random_numbers_as_it_likes():
    x = whole(2, 3, mesh=hs.init(device="cpu"))
    assert isinstance(x.cauchy_(), hs.Slab)
