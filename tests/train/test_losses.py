"""Losses by name: against torch's own, weighted, and the same on every mesh."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import hyperslab as hs
from hyperslab.errors import ConfigError
from hyperslab.testing import seeded
from hyperslab.train.losses import LOSSES, OwnLoss, check_loss, weighted_mean

WEIGHT = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
CLASS_WEIGHTS = torch.tensor([1.0, 3.0, 0.5, 2.0], dtype=torch.float64)
LOGITS = seeded(3, 4, 6, 5)
LABELS = torch.randint(0, 4, (3, 6, 5), generator=torch.Generator().manual_seed(1))
HOLED = LABELS.where(LABELS != 2, -100)
BINARY = (LABELS > 1).long()


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("mse", F.mse_loss),
        ("l1", F.l1_loss),
        ("huber", F.huber_loss),
        ("smooth_l1", F.smooth_l1_loss),
        ("bce", F.binary_cross_entropy_with_logits),
    ],
)
def test_losses_of_values_are_torchs_own(name, function):
    output, target = seeded(3, 4), seeded(3, 4, seed=1).sigmoid()
    assert_close(LOSSES[name](output, target, None, None), function(output, target))
    each = torch.stack([function(o, t) for o, t in zip(output, target, strict=True)])
    assert_close(LOSSES[name](output, target, WEIGHT, None), (each * WEIGHT).sum() / WEIGHT.sum())


def test_cross_entropy_is_torchs_own():
    loss = LOSSES["cross_entropy"]
    assert_close(loss(LOGITS, HOLED, None, None), F.cross_entropy(LOGITS, HOLED))
    assert_close(
        loss(LOGITS, HOLED, None, CLASS_WEIGHTS), F.cross_entropy(LOGITS, HOLED, CLASS_WEIGHTS)
    )
    chances = seeded(3, 4, 6, 5, seed=3).softmax(1)
    assert_close(loss(LOGITS, chances, None, None), F.cross_entropy(LOGITS, chances))


def test_a_sample_that_weighs_two_counts_twice():
    twice = [0, 1, 1]
    for name, target in (("cross_entropy", HOLED), ("dice", HOLED), ("bce", BINARY)):
        output = LOGITS if name != "bce" else LOGITS[:, :1]
        weighted = LOSSES[name](output[:2], target[:2], torch.tensor([1.0, 2.0]).double(), None)
        assert_close(weighted, LOSSES[name](output[twice], target[twice], None, None))


def test_bce_of_labels_weighs_classes_and_leaves_holes_out():
    target = BINARY.clone()
    target[0] = -100
    weights = torch.tensor([1.0, 3.0], dtype=torch.float64)
    each = F.binary_cross_entropy_with_logits(
        LOGITS[1:, 0], BINARY[1:].double(), weights[BINARY[1:]], reduction="none"
    )
    expected = each.sum() / weights[BINARY[1:]].sum()
    assert_close(LOSSES["bce"](LOGITS[:, :1], target, None, weights), expected)


def test_dice_is_one_minus_the_overlap_of_each_class():
    chances = LOGITS.softmax(1)
    truth = F.one_hot(LABELS, 4).movedim(-1, 1).double()
    both, sizes = (chances * truth).sum((2, 3)), (chances + truth).sum((2, 3))
    expected = (1 - (2 * both + 1e-5) / (sizes + 1e-5)).mean()
    assert_close(LOSSES["dice"](LOGITS, LABELS, None, None), expected)
    assert_close(LOSSES["dice"](LOGITS, truth, None, None), expected)
    entropy = F.cross_entropy(LOGITS, LABELS)
    assert_close(LOSSES["dice_cross_entropy"](LOGITS, LABELS, None, None), expected + entropy)


def test_dice_of_a_perfect_prediction_is_zero_whatever_lies_in_holes():
    sure = F.one_hot(LABELS, 4).movedim(-1, 1) * 2000.0 - 1000
    sure[:, :, 0] = 7
    holed = LABELS.clone()
    holed[:, 0] = -100
    assert float(LOSSES["dice"](sure, holed, None, None)) == pytest.approx(0, abs=1e-6)
    one = (BINARY * 2000.0 - 1000).unsqueeze(1)
    assert float(LOSSES["dice"](one, BINARY, None, None)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", ["cross_entropy", "dice_cross_entropy"])
def test_where_nothing_counts_the_loss_and_its_gradient_are_finite(name):
    logits = LOGITS.clone().requires_grad_()
    for target, weight in ((torch.full_like(LABELS, -100), None), (LABELS, torch.zeros(3))):
        loss = LOSSES[name](logits, target, weight, None)
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(logits.grad).all()


CASES = {
    "mse": (LOGITS, seeded(3, 4, 6, 5, seed=1), None, None),
    "bce": (LOGITS[:, :1], BINARY, ("sample", "height", "width"), CLASS_WEIGHTS[:2]),
    "cross_entropy": (LOGITS, HOLED, ("sample", "height", "width"), CLASS_WEIGHTS),
    "dice_cross_entropy": (LOGITS, HOLED, ("sample", "height", "width"), None),
    "dice_bce": (LOGITS[:, :1], BINARY, ("sample", "height", "width"), None),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("axes", "cuts"),
    [({"sample": 2}, {}), ({"height": 2}, {"height": [0, 5, 6]}), ({"depth": 2}, {})],
    ids=str,
)
def test_losses_and_gradients_are_the_same_however_samples_are_cut(name, axes, cuts):
    output, target, dims, class_weights = CASES[name]
    mesh = hs.init(**axes, device="cpu")
    for weight in (None, WEIGHT):
        alone, shared = (output.clone().requires_grad_() for _ in range(2))
        expected = LOSSES[name](alone, target, weight, class_weights)
        found = LOSSES[name](
            hs.shard(shared, mesh, cuts=cuts),
            hs.shard(target, mesh, axes=dims),
            None if weight is None else hs.shard(weight, mesh),
            class_weights,
        )
        expected.backward()
        found.backward()
        assert_close(found, expected)
        assert_close(shared.grad, alone.grad)


def test_a_loss_that_is_not_there_is_named_with_its_nearest():
    with pytest.raises(ConfigError, match=r"'cross_entropi' is not known: did you mean 'cross_ent"):
        check_loss("cross_entropi", "classification", ("cross_entropy", "bce"))
    with pytest.raises(ConfigError, match=r"'mse' is not a loss for task.kind = 'classification'"):
        check_loss("mse", "classification", ("cross_entropy", "bce"))


OWN = """
import torch
from torch import nn

def one_number(output, target):
    return (output - target).abs().mean()

def each_sample(output, target):
    return (output - target).abs().mean(1)

def weighted(output, target, sample_weight=None):
    return ((output - target).abs().mean(1) * sample_weight).sum()

def nothing(output, target):
    return 1.0

def each_value(output, target):
    return (output - target).abs().mean(0)

class Module(nn.Module):
    def forward(self, output, target):
        return (output - target).abs().mean()

class Wanting(nn.Module):
    def __init__(self, scale):
        super().__init__()
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own_losses.py"
    path.write_text(OWN)
    return lambda name: OwnLoss(f"{path}:{name}")


def test_a_loss_of_ones_own_gives_one_number_or_one_a_sample(own):
    output, target = seeded(3, 4), seeded(3, 4, seed=1)
    each = (output - target).abs().mean(1)
    for name in ("one_number", "each_sample", "Module"):
        assert_close(own(name)(output, target, None), each.mean())
    assert_close(own("each_sample")(output, target, WEIGHT), weighted_mean(each, WEIGHT))
    assert_close(own("weighted")(output, target, WEIGHT), (each * WEIGHT).sum())


def test_a_loss_of_ones_own_that_cannot_be_weighted_or_is_no_tensor_is_refused(own):
    output, target = seeded(3, 4), seeded(3, 4, seed=1)
    with pytest.raises(ConfigError, match="gives one number, and samples have weights"):
        own("one_number")(output, target, WEIGHT)
    with pytest.raises(ConfigError, match="gives a float, not a tensor"):
        own("nothing")(output, target, None)
    with pytest.raises(ConfigError, match=r"shape \(4,\) for 3 samples: return one number"):
        own("each_value")(output, target, None)
    with pytest.raises(ConfigError, match=r"cannot be made without arguments .*'scale'"):
        own("Wanting")


def test_short_floats_are_widened_for_a_loss_of_ones_own(own):
    loss = own("one_number")(seeded(3, 4).bfloat16(), seeded(3, 4, seed=1).float(), None)
    assert loss.dtype == torch.float32


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, output, target):
        return (self.scale * (output - target)).square().mean()


def test_a_loss_with_parameters_of_its_own_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("hyperslab.train.losses.find_named", lambda name, what: Learned)
    with pytest.raises(ConfigError, match="has parameters, which would not be trained"):
        OwnLoss("mine.py:Learned")
