"""Scores against sums written down as their definitions, on one rank and on several."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.testing import assert_allclose

import hyperslab as hs
from hyperslab.errors import ConfigError
from hyperslab.testing import seeded
from hyperslab.train.metrics import (
    Errors,
    WeightedMean,
    auc,
    by_name,
    check_names,
    confusion,
    log_softmax,
    macro_auc,
    map_confusion,
    mean_of,
    overlaps,
    roc,
)

examples = settings(max_examples=40, deadline=None)
few_scores = st.lists(
    st.tuples(st.integers(-3, 3), st.booleans(), st.floats(0.01, 5)), min_size=1, max_size=12
)


def pairwise_auc(samples):
    """Over all pairs of a positive and a negative sample."""
    won = total = 0.0
    for score, is_positive, weight in samples:
        for other, other_positive, other_weight in samples:
            if is_positive and not other_positive:
                won += weight * other_weight * (1.0 if score > other else 0.5 * (score == other))
                total += weight * other_weight
    return won / total if total else math.nan


@examples
@given(few_scores)
def test_auc_is_the_share_of_pairs_in_the_right_order(samples):
    scores, kinds, weights = (np.array(column) for column in zip(*samples, strict=True))
    found = auc(scores.astype(float), kinds.astype(bool), weights)
    assert_allclose(found, pairwise_auc(samples), rtol=1e-12)


@examples
@given(few_scores)
def test_the_area_under_the_roc_is_the_auc(samples):
    scores, kinds, weights = (np.array(column) for column in zip(*samples, strict=True))
    if kinds.all() or not kinds.any():
        return
    false, true = roc(scores.astype(float), kinds, weights)
    area = float(np.sum(np.diff(false) * (true[1:] + true[:-1]) / 2))
    assert_allclose(area, pairwise_auc(samples), rtol=1e-12)


def test_auc_of_one_class_or_of_nan_is_nan():
    ones = np.ones(3)
    assert math.isnan(auc(np.arange(3.0), np.array([True] * 3), ones))
    assert math.isnan(auc(np.array([0, math.nan, 1]), np.array([True, False, True]), ones))
    assert math.isnan(auc(np.zeros(0), np.zeros(0, bool), np.zeros(0)))
    assert math.isnan(macro_auc(np.zeros((2, 3)), np.array([1, 1]), np.ones(2)))


def test_auc_tells_apart_what_rounds_to_the_same_probability():
    logits = np.array([[0.0, 800.0], [0.0, 900.0]])
    assert macro_auc(logits, np.array([0, 1]), np.ones(2)) == 1


def test_auc_of_many_classes_is_the_mean_of_each_against_the_rest():
    logits, labels = seeded(20, 4).numpy(), np.arange(20) % 3  # nobody is of class 3
    scores = log_softmax(logits)
    each = [
        pairwise_auc(
            [(score, label == k, 1.0) for score, label in zip(scores[:, k], labels, strict=True)]
        )
        for k in range(3)
    ]
    assert_allclose(macro_auc(logits, labels, np.ones(20)), np.mean(each))


@examples
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.floats(-1e6, 1e6),
    st.booleans(),
    st.integers(0, 100),
)
def test_errors_of_batches_are_those_of_all_samples(sizes, offset, is_weighted, seed):
    shape = (sum(sizes), 3, 4)
    target = seeded(*shape, seed=seed) + offset
    output, weight = (
        target + seeded(*shape, seed=seed + 1),
        seeded(len(target), seed=seed + 2).abs(),
    )
    errors = Errors()
    batches = zip(output.split(sizes), target.split(sizes), weight.split(sizes), strict=True)
    for mine, theirs, weights in batches:
        errors.add(mine, theirs, weights if is_weighted else None)
    w = np.broadcast_to(weight.numpy()[:, None, None] if is_weighted else 1.0, shape)
    error, t = (output - target).numpy(), target.numpy()
    mean = (w * t).sum((0, 2)) / w.sum((0, 2))
    spread = (w * (t - mean[:, None]) ** 2).sum((0, 2))
    assert_allclose(errors.mae, (w * abs(error)).sum((0, 2)) / w.sum((0, 2)), rtol=1e-9)
    assert_allclose(errors.mse, (w * error**2).sum((0, 2)) / w.sum((0, 2)), rtol=1e-9)
    assert_allclose(errors.r2, 1 - (w * error**2).sum((0, 2)) / spread, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_r2_of_targets_that_are_all_the_same_is_nan(is_weighted):
    errors = Errors()
    for number in range(3):
        weight = torch.rand(5, generator=torch.Generator().manual_seed(number))
        target = torch.full((5, 2), 0.1)
        errors.add(target + seeded(5, 2).float(), target, weight if is_weighted else None)
    assert np.isnan(errors.r2).all()
    assert np.isfinite(errors.mse).all()


def test_what_was_never_added_or_weighs_nothing_has_no_score():
    assert math.isnan(WeightedMean().value)
    assert Errors().mse.size == 0
    errors = Errors()
    errors.add(seeded(2, 2), seeded(2, 2), torch.zeros(2))
    assert np.isnan([errors.mae, errors.mse, errors.r2]).all()
    mean = WeightedMean()
    mean.add(math.nan, 0)
    mean.add(2.0, 3)
    assert mean.value == 2


def test_overlaps_leave_out_classes_that_are_nowhere():
    counts = np.array([[3.0, 1, 0], [2, 4, 0], [0, 0, 0]])
    found = overlaps(counts)
    assert_allclose(found["iou"], [3 / 6, 4 / 7, math.nan])
    assert_allclose(found["dice"], [6 / 9, 8 / 11, math.nan])
    assert mean_of(found["iou"]) == pytest.approx((3 / 6 + 4 / 7) / 2)
    assert math.isnan(mean_of(overlaps(np.zeros((2, 2)))["iou"]))


def test_names_must_be_as_many_as_numbers():
    check_names((), 3, "numbers")
    with pytest.raises(
        ConfigError, match=r"task.names has 2 names \(a, b\), but the model gives 3"
    ):
        check_names(("a", "b"), 3, "numbers")


def test_scores_have_names_or_numbers():
    values = np.array([1.0, 2.0])
    assert by_name("mae", values, ("a", "b")) == {"mae/a": 1, "mae/b": 2}
    assert by_name("mae", values, ()) == {"mae/0": 1, "mae/1": 2}
    assert by_name("mae", values[:1], ()) == {}


MAPS = torch.randint(0, 3, (3, 8, 6), generator=torch.Generator().manual_seed(1))
GUESSES = torch.randint(0, 3, (3, 8, 6), generator=torch.Generator().manual_seed(2))
WEIGHT = torch.tensor([0.5, 2.0, 1.0])
CUTS = [
    ({"sample": 2}, {}),
    ({"sample": 2}, {"sample": [0, 0, 3]}),
    ({"height": 2}, {"height": [0, 7, 8]}),
    ({"height": 2}, {"height": [0, 8, 8]}),
    ({"depth": 2}, {}),  # which cuts no map: both ranks hold all of it
]


def brute_force(labels, guesses, weight):
    counts = np.zeros((3, 3))
    for place in np.ndindex(*labels.shape):
        if labels[place] != -100:
            counts[labels[place], guesses[place]] += weight[place[0]]
    return counts


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("axes", "cuts"), CUTS, ids=str)
def test_cells_are_counted_once_however_maps_are_cut(axes, cuts):
    mesh = hs.init(**axes, device="cpu")
    labels = MAPS.clone()
    labels[:, 3] = -100
    dims = ("sample", "height", "width")
    truth = hs.shard(labels, mesh, axes=dims, cuts=cuts)
    weight = hs.shard(WEIGHT, mesh, cuts={a: c for a, c in cuts.items() if a == "sample"})
    guesses = hs.shard(GUESSES, mesh, axes=dims)  # cut evenly: otherwise than the labels
    expected = brute_force(labels.numpy(), GUESSES.numpy(), WEIGHT.numpy())
    assert_allclose(map_confusion(truth, guesses, weight, 3), expected)
    assert_allclose(map_confusion(truth, GUESSES, weight, 3), expected)
    assert_allclose(
        map_confusion(truth, guesses, None, 3),
        brute_force(labels.numpy(), GUESSES.numpy(), np.ones(3)),
    )
    mine, theirs = labels.flatten(), GUESSES.flatten()
    counted = (mine != -100).numpy()
    weights = WEIGHT.double().repeat_interleave(48).numpy()[counted]
    assert_allclose(confusion(mine.numpy()[counted], theirs.numpy()[counted], weights, 3), expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axes", [{"sample": 2}, {"depth": 2}, {"height": 2}], ids=str)
def test_errors_are_the_same_however_samples_are_cut(axes):
    mesh = hs.init(**axes, device="cpu")
    ours, whole = Errors(), Errors()
    for number, size in enumerate((3, 2)):
        output, target = (seeded(size, 2, 4, 6, 5, seed=number + k) for k in (0, 10))
        weight = seeded(size, seed=number + 20).abs()
        ours.add(*(hs.shard(x, mesh) for x in (output, target, weight)))
        whole.add(output, target, weight)
    for name in ("mae", "mse", "r2"):
        assert_allclose(getattr(ours, name), getattr(whole, name), rtol=1e-12)
