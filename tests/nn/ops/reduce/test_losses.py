"""Losses over the global batch and volume: one number, the same on every rank and mesh."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

import hyperslab as hs
from hyperslab.nn.ops.reduce import losses as rules
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place, cuts_for, places

pytestmark = pytest.mark.filterwarnings("ignore:size_average and reduce args")
examples = settings(max_examples=12, deadline=None)
X5, X4, X2 = (3, 4, 11, 9, 10), (3, 4, 9, 10), (3, 4)


def labels(*shape, num=4, ignored=None):
    numbers = torch.randint(0, num, shape, generator=torch.Generator().manual_seed(3))
    return numbers if ignored is None else numbers.where(numbers != 1, ignored)


TARGET, WEIGHT = seeded(*X5, seed=7), seeded(4, seed=8).square() + 0.1
ROWS, ROW_WEIGHT = labels(3, 4, 9, 10, num=11, ignored=-100), seeded(11, seed=9).square() + 0.1
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
    "rows as classes": (
        lambda x: F.cross_entropy(x.transpose(1, 2), ROWS, ROW_WEIGHT, label_smoothing=0.2),
        X5,
    ),
    "weights made of scores": (
        lambda x: F.cross_entropy(x.transpose(1, 2), ROWS, x.detach().square().mean((0, 1, 3, 4))),
        X5,
    ),
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
    "likelihood": (lambda x: F.nll_loss(x, SOME) + F.nll_loss(x, CLASSES, WEIGHT), X5),
    "likelihood, summed": (lambda x: F.nll_loss(x, SOME, WEIGHT, reduction="sum"), X5),
    "likelihood of each": (lambda x: F.nll_loss(x, CLASSES, ignore_index=2, reduce=False), X5),
    "likelihood of samples": (lambda x: nn.NLLLoss()(x.log_softmax(1), CLASSES[:, 0, 0, 0]), X2),
    "smoothed, weighted, another ignored": (
        lambda x: F.cross_entropy(x, CLASSES, WEIGHT, ignore_index=2, label_smoothing=0.2),
        X5,
    ),
    "entropy module": (lambda x: nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1)(x, SOME), X5),
}


def check_cases(place):
    mesh = place.mesh()
    for name, (function, shape) in CASES.items():
        cuts = place.cuts_of(len(shape))
        try:
            assert_same_as_serial(function, [seeded(*shape)], mesh=mesh, cuts=cuts)
        except Exception as error:
            error.add_note(name)
            raise


def test_a_loss_equals_that_of_one_process(run, place):
    run(place, check_cases)


REDUCED = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "each": {"reduction": "none"},
    "old sum": {"size_average": False},
    "old each": {"reduce": False},
}
Y, POSITIVE = TARGET[:, :, 0], TARGET[:, :, 0].sigmoid()
SIGNS, FAR = Y.sign(), Y[:, :, 0, 0]

ELEMENTWISE = {
    "l1": lambda x, how: F.l1_loss(x, Y, **how),
    "smooth l1": lambda x, how: F.smooth_l1_loss(x, Y, beta=0.5, **how),
    "smooth l1 without bend": lambda x, how: F.smooth_l1_loss(x, Y, beta=0.0, **how),
    "binary": lambda x, how: F.binary_cross_entropy(x.sigmoid(), POSITIVE, WEIGHT[0], **how),
    "binary, weighted": lambda x, how: F.binary_cross_entropy(
        x.sigmoid(), POSITIVE, POSITIVE[:, :1], **how
    ),
    "logits": lambda x, how: F.binary_cross_entropy_with_logits(x, POSITIVE, **how),
    "logits, weighted": lambda x, how: F.binary_cross_entropy_with_logits(
        x, POSITIVE, weight=POSITIVE[0, 0], pos_weight=WEIGHT.view(4, 1, 1), **how
    ),
    "divergence": lambda x, how: F.kl_div(x.log_softmax(1), Y.softmax(1), **how),
    "divergence of logarithms": lambda x, how: F.kl_div(x, Y, log_target=True, **how),
    "poisson": lambda x, how: F.poisson_nll_loss(x, POSITIVE * 9, full=True, **how),
    "poisson rates": lambda x, how: F.poisson_nll_loss(x.sigmoid(), POSITIVE, False, **how),
    "soft margin": lambda x, how: F.soft_margin_loss(x, SIGNS, **how),
    "hinge": lambda x, how: F.hinge_embedding_loss(x, SIGNS, margin=0.5, **how),
    "ranking": lambda x, how: F.margin_ranking_loss(x, Y, SIGNS, 0.2, **how),
    "several labels": lambda x, how: F.multilabel_soft_margin_loss(x, POSITIVE, WEIGHT[0], **how),
}  # fmt: skip
NEWER = {
    "huber": lambda x, how: F.huber_loss(x, Y, delta=0.5, **how),
    "huber, weighted": lambda x, how: F.huber_loss(x, Y, weight=POSITIVE, **how),
    "l1, weighted": lambda x, how: F.l1_loss(x, Y, weight=POSITIVE, **how),
    "gauss": lambda x, how: F.gaussian_nll_loss(x, Y, POSITIVE, full=True, **how),
    "gauss of one": lambda x, how: F.gaussian_nll_loss(x, Y, POSITIVE[..., 0], **how),
    "gauss of channels": lambda x, how: F.gaussian_nll_loss(x, Y, POSITIVE[:, :1], **how),
    "gauss of a number": lambda x, how: F.gaussian_nll_loss(x, Y, 0.5, **how),
    "learned variance": lambda x, how: F.gaussian_nll_loss(Y, POSITIVE, x.square(), **how),
}  # fmt: skip
PER_SAMPLE = {
    "margins": lambda x, how: F.multi_margin_loss(x, CLASSES[:, 0, 0, 0], 2, weight=WEIGHT, **how),
    "margins of several labels": lambda x, how: F.multilabel_margin_loss(x, LABELS, **how),
    "cosines": lambda x, how: F.cosine_embedding_loss(x, FAR, SIGNS[:, 0, 0, 0], 0.1, **how),
    "triplets": lambda x, how: F.triplet_margin_loss(x, FAR, Y[:, :, 0, 1], swap=True, **how),
}  # fmt: skip
LABELS = torch.tensor([[1, 2, -1, 0], [0, -1, 1, 1], [3, 2, 1, 0]])


def check_losses(place, kind):
    mesh = place.mesh()
    losses = {"elementwise": ELEMENTWISE, "newer": NEWER, "per sample": PER_SAMPLE}[kind]
    shape = X2 if kind == "per sample" else X4
    cuts = place.cuts_of(len(shape))
    for name, loss in losses.items():
        for how, options in REDUCED.items():
            if kind == "newer" and "old" in how:
                continue
            try:
                assert_same_as_serial(
                    lambda x, loss=loss, options=options: loss(x, options),
                    [seeded(*shape)],
                    mesh=mesh,
                    cuts=cuts,
                )
            except Exception as error:
                error.add_note(f"{name}: {how}")
                raise


LOSS_PLACES = [
    Place({"height": 3}, {"height": [0, 5, 5, 9]}),
    Place({"sample": 2, "width": 2}, {"sample": [0, 0, 3], "width": [0, 3, 10]}),
]


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("kind", ["elementwise", "newer", "per sample"])
@pytest.mark.parametrize("place", LOSS_PLACES, ids=str)
def test_every_other_loss_equals_that_of_one_process(run, place, kind):
    run(place, check_losses, kind)


def dice(scores, labels):
    """A soft Dice loss as its users write it."""
    truth = F.one_hot(labels, 4).movedim(-1, 1).to(scores.dtype)
    guess = scores.softmax(1)
    dims = tuple(range(2, scores.ndim))
    shared = (guess * truth).sum(dims)
    return 1 - ((2 * shared + 1) / (guess.sum(dims) + truth.sum(dims) + 1)).mean()


def scattered_dice(scores, labels):
    truth = torch.zeros_like(scores).scatter_(1, labels.unsqueeze(1), 1)
    guess = torch.sigmoid(scores).flatten(2)
    truth = truth.flatten(2)
    return 1 - (2 * (guess * truth).sum(-1) / (guess + truth).sum(-1)).mean(1)


def focal(scores, labels):
    each = F.cross_entropy(scores, labels, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def picked_focal(scores, labels):
    each = torch.gather(scores.log_softmax(1), 1, labels.unsqueeze(1)).squeeze(1)
    return -((1 - each.exp()) ** 2 * each).mean()


def tversky(scores, labels):
    guess = scores.softmax(1)[:, 1]
    truth = (labels == 1).double()
    hits, extra = torch.sum(guess * truth), torch.sum(guess * (1 - truth))
    return 1 - hits / (hits + 0.3 * extra + 0.7 * ((1 - guess) * truth).sum())


def contrast(scores, labels):
    vectors = F.normalize(scores.mean((2, 3, 4)), dim=1)
    return F.cosine_similarity(vectors, vectors.mean(0, keepdim=True)).sum() + labels.sum() * 0


def check_written_losses(place):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    along = ("sample", "depth", "height", "width")
    target = hs.shard(CLASSES, mesh, axes=along, cuts=cuts)
    for loss in (dice, scattered_dice, focal, picked_focal, tversky, contrast):
        try:
            assert_same_as_serial(
                lambda x, loss=loss: loss(x, target if isinstance(x, hs.Slab) else CLASSES),
                [seeded(*X5)],
                mesh=mesh,
                cuts=cuts,
            )
        except Exception as error:
            error.add_note(loss.__name__)
            raise


def test_losses_written_in_plain_torch_equal_those_of_one_process(run, place):
    run(place, check_written_losses)


def check_wrong_values(place, name):
    function, words = WRONG[name]
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    with pytest.raises((hs.CommError, IndexError, RuntimeError, ValueError), match=words):
        function(x)


LAST = SOME.clone()
LAST[-1, -1, -1, -1] = 7  # on one rank
WRONG = {
    "a label": (lambda x: F.cross_entropy(x, LAST), "Target 7 is out of bounds"),
    "a label of a likelihood": (lambda x: F.nll_loss(x, LAST), "Target 7 is out of bounds"),
    "a probability": (
        lambda x: F.binary_cross_entropy(x - 4, TARGET),
        "all elements of input should be between 0 and 1",
    ),
    "a variance": (
        lambda x: F.gaussian_nll_loss(x, x, LAST.unsqueeze(1) * 0 - (LAST == 7).unsqueeze(1) * 1.0),
        "var has negative entry",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_on_one_rank_stops_all(run, name):
    run(Place({"depth": 3}, {"depth": [0, 5, 5, 11]}), check_wrong_values, name)


PAIRS = {
    "mse": F.mse_loss,
    "mse of each": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "mse weighted": lambda x, y: F.mse_loss(x, y, weight=y.square()),
    "l1 of each": lambda x, y: F.l1_loss(x, y, reduction="none"),
    "logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), y.detach()),
    "gauss": lambda x, y: F.gaussian_nll_loss(x, y, y.square()),
    "divergence": lambda x, y: F.kl_div(x, y.softmax(1), reduction="batchmean"),
    "probabilities": lambda x, y: F.cross_entropy(x, y.sigmoid()),
    "probabilities, weighted": lambda x, y: F.cross_entropy(x, y.sigmoid(), WEIGHT),
}


def check_pairs(place):
    mesh, cuts = place.mesh(), [place.cuts_of(5), None]
    for name, function in PAIRS.items():
        try:
            assert_same_as_serial(function, [seeded(*X5), TARGET], mesh=mesh, cuts=cuts)
        except Exception as error:
            error.add_note(name)
            raise


def test_a_loss_between_slabs_of_other_cuts_equals_that_of_one_process(run, place):
    run(place, check_pairs)


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
    "other targets of split classes": (
        lambda x: F.cross_entropy(x.transpose(1, 2), SOME),
        hs.LayoutError,
        r"targets of shape \(3, 11, 9, 10\) for scores of shape \(3, 11, 4, 9, 10\)",
    ),
    "classes without a batch": (
        lambda x: F.cross_entropy(x.mean((0, 1, 3, 4)), torch.tensor(3)),
        hs.UnsupportedOp,
        "its classes must lie along dim 1",
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
    "split vectors": (
        lambda x: F.triplet_margin_loss(*[x.transpose(2, 4)] * 3),
        hs.UnsupportedOp,
        "triplet_margin_loss .* a dim along which it compares is split",
    ),
    "probabilities of another shape": (
        lambda x: F.binary_cross_entropy(x, TARGET[:1]),
        hs.LayoutError,
        "binary_cross_entropy of an input of shape .* give them one shape",
    ),
    "sequences": (
        lambda x: F.ctc_loss(x[0, 0], SOME[0, 0], torch.ones(9), torch.ones(9)),
        hs.UnsupportedOp,
        "ctc_loss cannot run",
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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.huber_loss, F.smooth_l1_loss])
def test_losses_of_any_values_have_ranks_ask_nobody_for_errors(loss):
    with pytest.MonkeyPatch.context() as monkeypatch:
        mesh = hs.init(channel=2, device="cpu", timeout_seconds=100)
        monkeypatch.setattr(rules, "run_together", None)
        x, target = seeded(*X2), seeded(*X2, seed=1)
        found = loss(hs.shard(x, mesh), hs.shard(target, mesh))
        torch.testing.assert_close(found, loss(x, target))
