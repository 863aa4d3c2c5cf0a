"""Losses over the whole global batch and volume."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place, places

X = (3, 4, 11, 9, 10)
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)


def labels_of(shape, ignored=0):
    labels = (seeded(*shape, seed=3) * 13).long().remainder(4)
    labels.view(-1)[:ignored] = -100
    return labels


PAIRS = {
    "mean squared error": lambda x, y: F.mse_loss(x, y),
    "summed": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "each": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "by module": nn.MSELoss(),
    "soft targets": lambda x, y: F.cross_entropy(x, y.sigmoid()),
    "soft targets, smoothed": lambda x, y: F.cross_entropy(
        x, y.sigmoid(), WEIGHT, label_smoothing=0.2
    ),
}


def check_pair(place, name):
    inputs = [seeded(*X), seeded(*X, seed=7)]
    cuts = [place.cuts_of(5), None]
    assert_same_as_serial(PAIRS[name], inputs, mesh=place.mesh(), cuts=cuts)


@pytest.mark.parametrize("name", PAIRS)
def test_a_loss_between_two_slabs_equals_that_of_one_process(run, place, name):
    run(place, check_pair, name)


CLASSES = {
    "mean": {},
    "summed": {"reduction": "sum"},
    "each": {"reduction": "none"},
    "weighted": {"weight": WEIGHT},
    "some ignored": {"ignored": 500},
    "weighted, some ignored, smoothed": {"weight": WEIGHT, "ignored": 500, "label_smoothing": 0.1},
    "another ignored class": {"ignore_index": 2},
}


def check_classes(place, name, shape):
    options = dict(CLASSES[name])
    labels = labels_of((shape[0], *shape[2:]), options.pop("ignored", 0))
    assert_same_as_serial(
        lambda x: F.cross_entropy(x, labels, **options),
        [seeded(*shape)],
        mesh=place.mesh(),
        cuts=place.cuts_of(len(shape)),
    )


@pytest.mark.parametrize("name", CLASSES)
def test_cross_entropy_with_plain_labels_equals_that_of_one_process(run, place, name):
    run(place, check_classes, name, X)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_cross_entropy_on_any_shape(run, data):
    spatial = data.draw(st.lists(st.integers(1, 6), max_size=3))
    shape = (data.draw(st.integers(1, 4)), 4, *spatial)
    name = data.draw(st.sampled_from([name for name in CLASSES if "some" not in name]))
    run(data.draw(places(shape)), check_classes, name, shape)


def check_slab_labels(place):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    scores, labels = seeded(*X), labels_of((3, 11, 9, 10), 100)
    expected = F.cross_entropy(scores, labels)
    x = hs.shard(scores, mesh, cuts=cuts)
    by_number = hs.shard(labels, mesh)  # cut along other dims, so it is re-cut
    named = hs.shard(labels, mesh, axes=("sample", "depth", "height", "width"), cuts=cuts)
    for target in (by_number, named):
        torch.testing.assert_close(F.cross_entropy(x, target), expected)


def test_labels_may_be_slabs_cut_in_any_way(run, place):
    run(place, check_slab_labels)


def check_equal_everywhere(place):
    x = hs.shard(seeded(*X), place.mesh(), cuts=place.cuts_of(5))
    loss = F.mse_loss(x, seeded(*X, seed=7))
    assert isinstance(loss, torch.Tensor)
    return loss.item()


def test_every_rank_has_the_same_loss_to_the_bit(run, place):
    assert len(set(run(place, check_equal_everywhere))) == 1


def check_bad_targets(place):
    x = hs.shard(seeded(*X), place.mesh())
    with pytest.raises(hs.LayoutError, match=r"\(3, 11, 9, 9\).*\(3, 4, 11, 9, 10\)"):
        F.cross_entropy(x, torch.zeros(3, 11, 9, 9, dtype=torch.long))
    with pytest.raises(ValueError, match="'most' is not"):
        F.mse_loss(x, x, reduction="most")


def test_targets_of_another_shape_are_refused(run):
    run(Place({"depth": 2}), check_bad_targets)
