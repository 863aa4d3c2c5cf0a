"""Masks that depend on the seed and the global index alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place

X = (3, 4, 11, 9, 10)

KINDS = {
    "elements": lambda x: F.dropout(x, 0.3),
    "elements, by module": nn.Dropout(0.3),
    "in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "channels": nn.Dropout3d(0.3),
}


def dropped(place, kind, seed):
    torch.manual_seed(seed)
    x = hs.shard(torch.ones(X, dtype=torch.float64), place.mesh(), cuts=place.cuts_of(5))
    return hs.gather(KINDS[kind](x))


@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_the_same_on_every_mesh(run, place, kind):
    (alone,) = run(Place({}), dropped, kind, 7)
    for whole in run(place, dropped, kind, 7):
        assert torch.equal(whole, alone)


def test_masks_differ_between_seeds_and_drop_the_asked_share(run):
    (first,), (second,) = (run(Place({}), dropped, "elements", seed) for seed in (1, 2))
    assert not torch.equal(first, second)
    for whole in (first, second):
        kept = whole != 0
        assert abs(kept.double().mean() - 0.7) < 0.02
        torch.testing.assert_close(whole[kept], torch.full_like(whole[kept], 1 / 0.7))
    agree = ((first != 0) == (second != 0)).double().mean()
    assert abs(agree - (0.7**2 + 0.3**2)) < 0.02


def test_neighbours_are_dropped_independently(run):
    (whole,) = run(Place({}), dropped, "elements", 3)
    kept = (whole != 0).double() - 0.7
    for dim in range(whole.ndim):
        ahead = kept.narrow(dim, 1, whole.shape[dim] - 1)
        behind = kept.narrow(dim, 0, whole.shape[dim] - 1)
        assert abs((ahead * behind).mean()) < 0.01, dim


def test_channels_are_dropped_as_a_whole(run):
    (whole,) = run(Place({}), dropped, "channels", 5)
    per_channel = whole.flatten(2)
    assert torch.equal(per_channel.amin(2), per_channel.amax(2))


def check_gradient(place):
    def function(x):
        torch.manual_seed(11)
        slab = x if isinstance(x, hs.Slab) else hs.shard(x, hs.init(sample=-1))
        out = F.dropout(slab, 0.4)
        return out if isinstance(x, hs.Slab) else hs.gather(out)

    if place.mesh().num_ranks == 1:
        assert_same_as_serial(function, [seeded(*X)], mesh=place.mesh())
        return
    torch.manual_seed(11)
    leaf = seeded(*X).requires_grad_()
    out = F.dropout(hs.shard(leaf, place.mesh(), cuts=place.cuts_of(5)), 0.4)
    coefficients = seeded(*X, seed=1)
    (out * coefficients).sum().backward()
    kept = hs.gather(out).detach() != 0
    torch.testing.assert_close(leaf.grad, coefficients * kept / 0.6)


def test_the_gradient_passes_where_the_value_did(run, place):
    run(place, check_gradient)


def check_off(place):
    x = hs.shard(seeded(*X), place.mesh(), cuts=place.cuts_of(5))
    for out in (F.dropout(x, 0.5, training=False), F.dropout(x, 0.0), nn.Dropout(0.5).eval()(x)):
        assert torch.equal(out.local, x.local)
    assert not F.dropout(x, 1.0).local.any()
    with pytest.raises(hs.HyperslabError, match=r"between 0 and 1, got 1.5"):
        F.dropout(x, 1.5)


def test_nothing_is_dropped_in_evaluation_and_all_at_probability_one(run, place):
    run(place, check_off)


def check_checkpoint(place):
    torch.manual_seed(3)
    leaf = seeded(2, 2, 6, 6, 6).requires_grad_()
    x = hs.shard(leaf, place.mesh())
    out = checkpoint(lambda x: F.dropout(x * x, 0.5), x, use_reentrant=False)
    out.sum().backward()
    kept = hs.gather(out).detach() != 0
    torch.testing.assert_close(leaf.grad, 4 * leaf.detach() * kept)


def test_activation_checkpointing_draws_the_same_mask_again(run):
    run(Place({"depth": 2}), check_checkpoint)
