"""Into Slabs and out of them, with gradients."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

import hyperslab as hs
from hyperslab.layout import Box
from hyperslab.testing import seeded
from hyperslab.testing.strategies import Place, places


def part(whole, slab):
    return whole[slab.box.slices_in(Box.whole(whole.shape))]


def check_round_trip(place, shape):
    mesh, cuts = place.mesh(), place.cuts_of(len(shape))
    whole = seeded(*shape).requires_grad_()
    x = hs.shard(whole, mesh, cuts=cuts)
    torch.testing.assert_close(x.local, part(whole, x))
    out = hs.gather(x)
    torch.testing.assert_close(out, whole)
    coefficients = seeded(*shape, seed=1)
    (out * coefficients).sum().backward()
    torch.testing.assert_close(whole.grad, coefficients)

    piece = part(whole, x).detach().clone().requires_grad_()
    y = hs.from_local(piece, mesh, shape, cuts=cuts)
    assert y.layout == x.layout
    (y * y * coefficients).sum().backward()
    torch.testing.assert_close(piece.grad, 2 * part(whole.detach() * coefficients, y))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_shard_from_local_and_gather_keep_values_and_gradients(run, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5)))
    run(data.draw(places(shape)), check_round_trip, shape)


def check_named_axes(place):
    mesh = place.mesh()
    labels = torch.arange(3 * 11 * 9 * 10).view(3, 11, 9, 10)
    x = hs.shard(labels, mesh, axes=("sample", "depth", "height", "width"), cuts=dict(place.cuts))
    image = hs.shard(seeded(3, 4, 11, 9, 10), mesh, cuts=dict(place.cuts))
    assert x.layout.splits == (image.layout.splits[0], *image.layout.splits[2:])
    torch.testing.assert_close(hs.gather(x), labels)


def test_a_label_map_names_its_axes_and_is_cut_like_the_image(run, place):
    run(place, check_named_axes)


def check_repeated(place):
    mesh = place.mesh()
    target = seeded(4, 3).requires_grad_()
    y = hs.shard(target, mesh)
    assert y.layout.axes == ("sample",)
    (y * y).sum().backward()
    torch.testing.assert_close(target.grad, 2 * target.detach())
    flat = hs.shard(seeded(4, 3, 6, 6), mesh)
    assert flat.layout.axes == ("sample",)


def test_an_axis_that_cuts_no_dim_repeats_the_tensor_and_its_gradient_counts_once(run):
    run(Place({"sample": 2, "depth": 2}), check_repeated)


def check_does_not_alias(place):
    whole = seeded(2, 2, 4, 4)
    before = whole.clone()
    hs.shard(whole, place.mesh()).mul_(0)
    torch.testing.assert_close(whole, before)


def test_on_several_ranks_changing_a_slab_in_place_leaves_the_given_tensor_alone(run):
    run(Place({"height": 2}), check_does_not_alias)


BAD = {
    "an axis longer than the dim": (
        lambda mesh: hs.shard(torch.zeros(2, 1, 1, 4, 4), mesh),
        hs.LayoutError,
        r"extent of 1, over depth=2",
    ),
    "cuts of another extent": (
        lambda mesh: hs.shard(torch.zeros(2, 1, 8, 4, 4), mesh, cuts={"depth": [0, 4, 9]}),
        hs.LayoutError,
        r"extent of 9.*depth=2.*extent of 8",
    ),
    "cuts of another number": (
        lambda mesh: hs.shard(torch.zeros(2, 1, 8, 4, 4), mesh, cuts={"depth": [0, 3, 6, 8]}),
        hs.LayoutError,
        r"3 pieces.*depth=2",
    ),
    "cuts that fall": (
        lambda mesh: hs.shard(torch.zeros(2, 1, 8, 4, 4), mesh, cuts={"depth": [0, 9, 8]}),
        hs.LayoutError,
        "not decrease",
    ),
    "cuts along an axis it does not have": (
        lambda mesh: hs.shard(torch.zeros(2, 1, 8, 4), mesh, cuts={"depth": [0, 3, 8]}),
        hs.LayoutError,
        "depth",
    ),
    "too many dims": (lambda mesh: hs.shard(torch.zeros((2,) * 6), mesh), hs.LayoutError, "6 dims"),
    "a piece of the wrong shape": (
        lambda mesh: hs.from_local(torch.zeros(2, 1, 5, 4, 4), mesh, (2, 1, 8, 4, 4)),
        (hs.LayoutError, hs.CommError),
        r"\(2, 1, 5, 4, 4\).*\(2, 1, 4, 4, 4\)",
    ),
    "a list": (lambda mesh: hs.shard([1.0, 2.0], mesh), hs.ConfigError, "list"),
    "a Slab": (
        lambda mesh: hs.shard(hs.shard(torch.zeros(2, 1, 8, 4, 4), mesh), mesh),
        hs.ConfigError,
        "Slab",
    ),
}


def check_bad(place, name):
    call, error, words = BAD[name]
    with pytest.raises(error, match=words):
        call(place.mesh())


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_on_all_ranks(run, name):
    run(Place({"depth": 2}), check_bad, name)


def check_different(place):
    mesh = place.mesh()
    with pytest.raises(hs.CommError, match=r"rank 0 has .*\(2, 1, 8.*rank 1 has .*\(2, 1, 9"):
        hs.shard(torch.zeros(2, 1, 8 + mesh.rank, 4, 4), mesh)
    with pytest.raises(hs.CommError, match=r"rank 0 has .*float32.*rank 1 has .*float64"):
        hs.shard(torch.zeros(2, 1, 8, 4, 4, dtype=[torch.float32, torch.float64][mesh.rank]), mesh)
    size = 4 + mesh.rank
    with pytest.raises(
        hs.HyperslabError, match=r"rank 1 brings a piece of shape \(2, 1, 5, 4, 4\)"
    ):
        hs.from_local(torch.zeros(2, 1, size, 4, 4), mesh, (2, 1, 8, 4, 4))


def test_ranks_that_bring_different_shapes_all_raise_and_name_the_rank(run):
    run(Place({"depth": 2}), check_different)
