"""Losses over the global batch and volume: one number, the same on every rank and mesh."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place, cuts_for, places

pytestmark = pytest.mark.filterwarnings("ignore:size_average and reduce args")
examples = settings(max_examples=120, deadline=None)
X5, X4, X2 = (3, 4, 11, 9, 10), (3, 4, 9, 10), (3, 4)


def labels(*shape, num=4, ignored=None):
    numbers = torch.randint(0, num, shape, generator=torch.Generator().manual_seed(3))
    return numbers if ignored is None else numbers.where(numbers != 1, ignored)


TARGET, WEIGHT = seeded(*X5, seed=7), seeded(4, seed=8).square() + 0.1
CLASSES, SOME = labels(3, 11, 9, 10), labels(3, 11, 9, 10, ignored=-100)

CASES = {
    "mse": (lambda x: F.mse_loss(x, TARGET), X5),
    "mse from the right": (lambda x: F.mse_loss(TARGET, x), X5),
    "mse summed": (lambda x: F.mse_loss(x, TARGET, reduction="sum"), X5),
    "mse of each": (lambda x: F.mse_loss(x, TARGET, reduction="none"), X5),
    "mse by old arguments": (lambda x: F.mse_loss(x, TARGET, False, True), X5),
    "mse of each by old arguments": (lambda x: F.mse_loss(x, TARGET, reduce=False), X5),
    "mse weighted": (lambda x: F.mse_loss(x, TARGET, weight=TARGET.square()), X5),
    "mse weighted of each": (
        lambda x: F.mse_loss(x, TARGET, weight=TARGET.square(), reduction="none"),
        X5,
    ),
    "mse module": (lambda x: nn.MSELoss()(x, TARGET), X5),
    "mse of itself": (lambda x: F.mse_loss(x, x.mean((2, 3, 4), keepdim=True) + 0 * x), X5),
    "mse of vectors": (lambda x: F.mse_loss(x, TARGET[:, :, 0, 0, 0]), X2),
    "classes": (lambda x: F.cross_entropy(x, CLASSES), X5),
    "classes, some ignored": (lambda x: F.cross_entropy(x, SOME), X5),
    "classes, another ignored": (lambda x: F.cross_entropy(x, CLASSES, ignore_index=2), X5),
    "classes, weighted": (lambda x: F.cross_entropy(x, SOME, WEIGHT), X5),
    "classes, smoothed": (lambda x: F.cross_entropy(x, SOME, label_smoothing=0.1), X5),
    "classes, weighted and smoothed": (
        lambda x: F.cross_entropy(x, SOME, weight=WEIGHT, label_smoothing=0.1),
        X5,
    ),
    "classes, summed": (lambda x: F.cross_entropy(x, SOME, WEIGHT, reduction="sum"), X5),
    "classes, each": (lambda x: F.cross_entropy(x, SOME, WEIGHT, reduction="none"), X5),
    "classes of images": (lambda x: F.cross_entropy(x, CLASSES[:, 0]), X4),
    "classes of samples": (lambda x: F.cross_entropy(x, CLASSES[:, 0, 0, 0], WEIGHT), X2),
    "probabilities": (lambda x: F.cross_entropy(x, TARGET.softmax(1)), X5),
    "probabilities, weighted and smoothed": (
        lambda x: F.cross_entropy(x, TARGET.softmax(1), WEIGHT, label_smoothing=0.1),
        X5,
    ),
    "probabilities, each": (
        lambda x: F.cross_entropy(x, TARGET.softmax(1), reduction="none"),
        X5,
    ),
    "probabilities of samples": (
        lambda x: F.cross_entropy(x, TARGET[:, :, 0, 0, 0].softmax(1)),
        X2,
    ),
    "entropy module": (lambda x: nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1)(x, SOME), X5),
}


def check_case(place, name):
    function, shape = CASES[name]
    cuts = place.cuts_of(len(shape))
    assert_same_as_serial(function, [seeded(*shape)], mesh=place.mesh(), cuts=cuts)


@pytest.mark.parametrize("name", CASES)
def test_a_loss_equals_that_of_one_process(run, place, name):
    run(place, check_case, name)


PAIRS = {
    "mse": F.mse_loss,
    "mse of each": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "mse weighted": lambda x, y: F.mse_loss(x, y, weight=y.square()),
    "probabilities": lambda x, y: F.cross_entropy(x, y.sigmoid()),
    "probabilities, weighted": lambda x, y: F.cross_entropy(x, y.sigmoid(), WEIGHT),
}


def check_pair(place, name):
    cuts = [place.cuts_of(5), None]
    assert_same_as_serial(PAIRS[name], [seeded(*X5), TARGET], mesh=place.mesh(), cuts=cuts)


@pytest.mark.parametrize("name", PAIRS)
def test_a_loss_between_slabs_of_other_cuts_equals_that_of_one_process(run, place, name):
    run(place, check_pair, name)


def check_split_targets(place):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    x = hs.shard(seeded(*X5), mesh, cuts=cuts)
    expected = F.cross_entropy(seeded(*X5), SOME, WEIGHT)
    along = ("sample", "depth", "height", "width")
    for axes, bounds in ((along, cuts), (along, None), (None, None), ((None,) * 4, None)):
        target = hs.shard(SOME, mesh, axes=axes, cuts=bounds)
        torch.testing.assert_close(F.cross_entropy(x, target, WEIGHT), expected)
    target = hs.shard(SOME, mesh, axes=along, cuts=cuts)
    torch.testing.assert_close(F.cross_entropy(seeded(*X5), target, WEIGHT), expected)
    soft = hs.shard(TARGET.softmax(1), mesh)
    expected = F.cross_entropy(seeded(*X5), TARGET.softmax(1))
    torch.testing.assert_close(F.cross_entropy(x, soft), expected)


def test_targets_may_be_split_in_any_way(run, place):
    run(place, check_split_targets)


class Loss(NamedTuple):
    """A cross entropy as hypothesis draws it; ``cuts`` are those of its target, None if plain."""

    shape: tuple[int, ...]
    soft: bool
    weighted: bool
    cuts: dict | None
    options: dict

    def target(self):
        if self.soft:
            return seeded(*self.shape, seed=1).softmax(1)
        drawn = labels(self.shape[0], *self.shape[2:], num=self.shape[1], ignored=-100)
        drawn.view(-1)[0] = 0  # not all are ignored
        return drawn

    def __call__(self, x, target):
        weight = seeded(self.shape[1], seed=2).square() + 0.1 if self.weighted else None
        return F.cross_entropy(x, target, weight, **self.options)


@st.composite
def losses(draw):
    extents = draw(st.lists(st.integers(1, 6), max_size=3))
    shape = (draw(st.integers(1, 4)), draw(st.sampled_from([1, 3])), *extents)
    place, soft = draw(places(shape)), draw(st.booleans())
    others = shape if soft else (shape[0], *shape[2:])
    cuts = draw(st.none() | cuts_for(others, place.axes))
    options = {
        "reduction": draw(st.sampled_from(["none", "mean", "sum"])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.2])),
    }
    return place, Loss(shape, soft, draw(st.booleans()), cuts, options)


def check_loss(place, loss):
    target = loss.target()
    plain = [] if loss.cuts is not None else [target]
    assert_same_as_serial(
        (lambda x: loss(x, target)) if plain else loss,
        [seeded(*loss.shape)] if plain else [seeded(*loss.shape), target],
        mesh=place.mesh(),
        cuts=[place.cuts_of(len(loss.shape))] + ([] if plain else [loss.cuts]),
    )


@examples
@given(losses())
def test_any_cross_entropy_equals_that_of_one_process(run, drawn):
    run(drawn[0], check_loss, drawn[1])


def check_all_ignored(place):
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    assert F.cross_entropy(x, torch.full_like(SOME, -100)).isnan()  # as in one process
    assert float(F.cross_entropy(x, torch.full_like(SOME, -100), reduction="sum")) == 0


def test_nothing_to_learn_from_is_not_a_number(run, place):
    run(place, check_all_ignored)


def check_same_number(place):
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    return float(F.mse_loss(x, TARGET)), float(F.cross_entropy(x, SOME))


def test_every_rank_gets_the_same_number(run, place):
    assert len(set(run(place, check_same_number))) == 1


def check_warning(place):
    x = hs.shard(seeded(3, 1), place.mesh())
    with pytest.warns(UserWarning, match=r"input of shape \(3, 1\) and a target of shape \(3,\)"):
        out = F.mse_loss(x, seeded(3, seed=1))
    expected = (seeded(3, 1) - seeded(3, seed=1)).square().mean()
    torch.testing.assert_close(out, expected)


def test_shapes_that_broadcast_by_mistake_are_told(run):
    run(Place({"sample": 3}), check_warning)


def check_autocast(place):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    x, y = seeded(*X5).bfloat16(), TARGET.bfloat16()
    slab = hs.shard(x, mesh, cuts=cuts)
    with torch.autocast("cpu", torch.bfloat16):
        for loss, target in ((F.mse_loss, y), (F.cross_entropy, SOME)):
            ours, expected = loss(slab, target), loss(x, target)
            assert ours.dtype == expected.dtype == torch.float32
            torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


def test_autocast_computes_losses_in_float32(run, place):
    run(place, check_autocast)


REFUSED = {
    "other targets": (
        lambda x: F.cross_entropy(x, SOME[:, :5]),
        hs.LayoutError,
        r"targets of shape \(3, 5, 9, 10\) for scores of shape \(3, 4, 11, 9, 10\)",
    ),
    "split classes": (
        lambda x: F.cross_entropy(x.transpose(1, 2), SOME),
        hs.UnsupportedOp,
        "torch.nn.functional.cross_entropy .* classes must lie along dim 1 and be whole",
    ),
    "unknown reduction": (
        lambda x: F.mse_loss(x, x, reduction="max"),
        ValueError,
        "'max' is not a reduction",
    ),
    "weight of another shape": (
        lambda x: F.mse_loss(x, x, weight=torch.ones(1)),
        hs.LayoutError,
        r"weight of shape \(1,\) for errors of shape \(3, 4, 11, 9, 10\)",
    ),
    "another loss": (lambda x: F.l1_loss(x, x), hs.UnsupportedOp, "l1_loss cannot run"),
    "split class weights": (
        lambda x: F.cross_entropy(x, SOME, x.mean((0, 2, 3, 4))),
        hs.UnsupportedOp,
        "all but its input must be plain tensors",
    ),
}


def check_refused(place, name):
    function, error, words = REFUSED[name]
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    with pytest.raises(error, match=words):
        function(x)


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_in_the_same_words(run, name):
    run(Place({"depth": 3}, {"depth": [0, 5, 5, 11]}), check_refused, name)
