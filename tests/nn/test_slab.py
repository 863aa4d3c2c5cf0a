"""What a Slab shows, and what it refuses."""

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.layout import Box
from hyperslab.testing import seeded
from hyperslab.testing.strategies import Place

X = (3, 4, 11, 9, 10)


def slab_on(place, shape=X):
    return hs.shard(seeded(*shape), place.mesh(), cuts=place.cuts_of(len(shape)))


def check_attributes(place):
    x, whole = slab_on(place), seeded(*X)
    assert x.shape == whole.shape
    assert isinstance(x.shape, torch.Size)
    assert (x.size(), x.size(2), x.size(dim=-1)) == (whole.size(), 11, 10)
    assert (x.ndim, x.dim(), x.numel(), len(x)) == (5, 5, whole.numel(), 3)
    assert (x.dtype, x.device) == (torch.float64, torch.device("cpu"))
    assert not x.requires_grad
    assert not x.is_cuda
    assert x.is_floating_point()
    assert x.local.shape == x.box.shape
    torch.testing.assert_close(x.local, whole[x.box.slices_in(Box.whole(X))])


def test_attributes_are_those_of_the_global_tensor(run, place):
    run(place, check_attributes)


def check_repr(place):
    x = slab_on(place)
    return repr(x), str(x)


def test_a_slab_prints_its_global_shape_its_split_and_its_piece(run):
    place = Place({"depth": 2, "height": 2})
    for rank, (text, again) in enumerate(run(place, check_repr)):
        assert text == again
        assert "3x4x11x9x10" in text
        assert "dim 2 split over depth=2, dim 3 split over height=2" in text
        assert f"rank {rank} holds 3x4x" in text
        assert "float64" in text


SPLIT = Place({"depth": 2})

REFUSED = {
    "torch.roll": lambda x: torch.roll(x, 1, 2),
    "torch.Tensor.roll": lambda x: x.roll(1, 2),
    "torch.sort": lambda x: torch.sort(x, 2),
    "torch.cumsum": lambda x: torch.cumsum(x, 2),
    "torch.fft.fft": lambda x: torch.fft.fft(x),
    "torch.nn.functional.grid_sample": lambda x: F.grid_sample(x, torch.zeros(3, 2, 2, 2, 3)),
    "torch.rand_like": lambda x: torch.rand_like(x),
    "torch.Tensor.uniform_": lambda x: x.uniform_(),
    "torch.Tensor.numpy": lambda x: x.numpy(),
    "torch.Tensor.tolist": lambda x: x.tolist(),
    "torch.Tensor.item": lambda x: x.item(),
    "torch.Tensor.backward": lambda x: x.backward(),
}


def check_refused(place, name):
    x = slab_on(place)
    with pytest.raises(hs.UnsupportedOp) as caught:
        REFUSED[name](x)
    words = str(caught.value)
    assert words.startswith(name)
    assert "3x4x11x9x10, dim 2 split over depth=2" in words
    assert "hyperslab.gather" in words
    assert "hyperslab.register" in words


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_without_a_rule_says_its_name_the_split_and_what_to_do(run, name):
    run(SPLIT, check_refused, name)


def check_a_refusal_leaves_no_rank_behind(place):
    x = slab_on(place)
    for _ in range(3):
        with pytest.raises(hs.UnsupportedOp):
            torch.roll(x, 1, 2)
    return float(x.sum())


def test_after_a_refusal_all_ranks_go_on_together(run):
    first, second = run(SPLIT, check_a_refusal_leaves_no_rank_behind)
    assert first == second


def check_whole(place):
    x = hs.shard(seeded(3, 4), place.mesh())
    rolled = torch.roll(x, 1, 0)
    assert isinstance(rolled, hs.Slab)
    torch.testing.assert_close(rolled.local, torch.roll(seeded(3, 4), 1, 0))
    values, order = torch.sort(x, 1)
    assert isinstance(order, hs.Slab)
    torch.testing.assert_close(values.local, seeded(3, 4).sort(1).values)
    with pytest.raises(hs.UnsupportedOp, match="random"):
        torch.bernoulli(torch.sigmoid(x))


def test_a_function_without_a_rule_runs_where_every_rank_holds_the_whole(run):
    run(SPLIT, check_whole)


def check_register(place):
    x = slab_on(place)
    with pytest.raises(hs.UnsupportedOp):
        torch.special.entr(x)

    @hs.register(torch.special.entr)
    def entr(x):
        return x.with_local(torch.special.entr(x.local))

    out = torch.special.entr(x)
    torch.testing.assert_close(hs.gather(out), torch.special.entr(seeded(*X)))


def test_a_user_can_add_a_rule(run):
    run(SPLIT, check_register)


def check_no_silent_use(place):
    x = slab_on(place)
    for use in (bool, iter, float, int):
        with pytest.raises((TypeError, hs.UnsupportedOp)):
            use(x)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = x.no_such_thing
    assert isinstance(x == x, hs.Slab)
    assert x in {x}


def test_a_slab_is_not_mistaken_for_a_number_or_a_sequence(run):
    run(SPLIT, check_no_silent_use)
