"""Pooled values put back where they were found, on every mesh."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place

X5, X4, X3 = (3, 4, 11, 9, 10), (3, 4, 9, 10), (3, 4, 10)


def there_and_back(pool, unpool, **options):
    """What a network does: the values change between the pool and its inverse."""

    def run(x):
        out, indices = pool(x)
        return unpool(out.sin() * 3, indices, **options)

    return run


CASES = {
    "3-d": (
        lambda x: there_and_back(nn.MaxPool3d(2, return_indices=True), nn.MaxUnpool3d(2))(
            F.pad(x, (0, 0, -1, 0, 0, -1))
        ),
        X5,
    ),
    "3-d, to the size of the input": (
        there_and_back(nn.MaxPool3d(2, return_indices=True), nn.MaxUnpool3d(2), output_size=X5),
        X5,
    ),
    "padded": (
        there_and_back(
            nn.MaxPool3d(3, 2, 1, return_indices=True),
            nn.MaxUnpool3d(3, 2, 1),
            output_size=(11, 9, 10),
        ),
        X5,
    ),
    "overlapping": (
        there_and_back(nn.MaxPool2d(3, 1, 1, return_indices=True), nn.MaxUnpool2d(3, 1, 1)),
        X4,
    ),
    "with gaps": (
        there_and_back(nn.MaxPool2d(2, (3, 4), return_indices=True), nn.MaxUnpool2d(2, (3, 4))),
        X4,
    ),
    "1-d": (
        there_and_back(
            nn.MaxPool1d(3, 2, return_indices=True), nn.MaxUnpool1d(3, 2), output_size=[10]
        ),
        X3,
    ),
    "one sample": (
        lambda x: there_and_back(nn.MaxPool2d((3, 2), return_indices=True), nn.MaxUnpool2d((3, 2)))(
            x.sum(0)
        ),
        X4,
    ),
}


def check_case(place, name):
    function, shape = CASES[name]
    cuts = place.cuts_of(len(shape))
    assert_same_as_serial(function, [seeded(*shape)], mesh=place.mesh(), cuts=cuts)


@pytest.mark.parametrize("name", CASES)
def test_an_unpool_equals_that_of_one_process(run, place, name):
    run(place, check_case, name)


def check_plain_indices(place):
    x = seeded(*X4)
    out, indices = F.max_pool2d(x, 2, return_indices=True)
    found = F.max_unpool2d(hs.shard(out, place.mesh()), indices, 2)
    torch.testing.assert_close(hs.gather(found), F.max_unpool2d(out, indices, 2))


def test_indices_may_be_a_plain_tensor(run):
    run(Place({"height": 2, "width": 2}), check_plain_indices)


def check_refused(place, name):
    change, error, words = REFUSED[name]
    mesh = place.mesh()
    out, indices = F.max_pool2d(seeded(*X4), 2, return_indices=True)
    out, indices = hs.shard(out, mesh), hs.shard(change(indices), mesh)
    with pytest.raises(error, match=words):
        F.max_unpool2d(out, indices, 2)
    assert tuple(hs.gather(out).shape) == (3, 4, 4, 5)  # no rank is left with half an exchange


REFUSED = {
    "other windows'": (lambda i: i.flip(2), hs.UnsupportedOp, "some indices lie outside"),
    "one of them": (
        lambda i: i.index_fill(3, torch.tensor([4]), 0),
        hs.UnsupportedOp,
        "some indices lie outside",
    ),
    "of no pixel": (lambda i: i + 1000, hs.UnsupportedOp, "some indices lie outside"),
    "of another shape": (lambda i: i[:, :2], hs.LayoutError, "indices of shape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_indices_that_lie_elsewhere_are_refused_by_all_ranks(run, name):
    run(Place({"height": 2, "width": 2}), check_refused, name)


def check_size(place):
    out, indices = F.max_pool2d(hs.shard(seeded(*X4), place.mesh()), 2, return_indices=True)
    with pytest.raises(hs.LayoutError, match=r"an output size of \(12, 10\) does not fit"):
        F.max_unpool2d(out, indices, 2, output_size=(12, 10))


def test_an_output_size_that_does_not_fit_is_refused(run):
    run(Place({"height": 2}), check_size)
