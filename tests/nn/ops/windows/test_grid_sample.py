"""Images sampled at points."""

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place

SHAPE = (3, 2, 9, 10)


def check_batch(place):
    mesh, x = place.mesh(), seeded(*SHAPE)
    points = torch.tanh(seeded(3, 5, 6, 2, seed=1))

    def warp(x, points):
        return F.grid_sample(x, points, align_corners=False, padding_mode="border")

    cuts = place.cuts_of(4)
    assert_same_as_serial(warp, [x], [points], mesh=mesh, cuts=cuts)


def check_points(place):
    """Whole images at points that are split."""
    mesh = place.mesh()

    def warp(points, images):
        return F.grid_sample(images, torch.tanh(points).movedim(1, -1), align_corners=True)

    cuts = place.cuts_of(4)
    assert_same_as_serial(warp, [seeded(3, 2, 9, 10)], [seeded(3, 4, 7, 5)], mesh=mesh, cuts=cuts)


@pytest.mark.parametrize(
    "place", [Place({}), Place({"sample": 2}), Place({"sample": 2}, {"sample": [0, 0, 3]})], ids=str
)
def test_split_samples_are_warped_each_by_its_rank(run, place):
    run(place, check_batch)


@pytest.mark.parametrize(
    "place",
    [Place({"height": 2}), Place({"sample": 2, "width": 2}, {"width": [0, 0, 10]})],
    ids=str,
)
def test_points_may_be_split_where_images_are_whole(run, place):
    run(place, check_points)


def check_channels(place):
    """Of images, and of the field that tells where to look, as in registration."""

    def warp(x, field):
        moved = F.grid_sample(x, torch.tanh(field).movedim(1, -1), align_corners=True)
        return F.grid_sample(moved, torch.tanh(x[:, :2]).movedim(1, -1), align_corners=False)

    x, field = seeded(3, 5, 4, 6), seeded(3, 2, 4, 6, seed=1)
    assert_same_as_serial(warp, [x, field], mesh=place.mesh())


@pytest.mark.parametrize("axes", [{"channel": 2}, {"channel": 3, "sample": 2}], ids=str)
def test_channels_are_warped_each_by_its_rank(run, axes):
    run(Place(axes), check_channels)


@pytest.mark.ranks(2)
def test_split_images_are_refused():
    mesh = hs.init(height=2, device="cpu")
    with pytest.raises(hs.UnsupportedOp, match="a point may lie on another rank"):
        F.grid_sample(hs.shard(seeded(*SHAPE), mesh), torch.zeros(3, 5, 6, 2).double())


@pytest.mark.ranks(2)
def test_distributions_check_their_arguments_and_give_their_divergence():
    mesh = hs.init(height=2, device="cpu")
    x = seeded(*SHAPE)

    def divergence(x):
        given = torch.distributions.Normal(x, x.exp())
        other = torch.distributions.Normal(x.mean((2, 3), keepdim=True), 1.0)
        return torch.distributions.kl_divergence(given, other).mean()

    torch.testing.assert_close(divergence(hs.shard(x, mesh)), divergence(x))
