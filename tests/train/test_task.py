import contextlib
import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import hyperslab as hs
from hyperslab.errors import ConfigError
from hyperslab.layout import Grid
from hyperslab.testing import seeded
from hyperslab.train.config import TaskConfig
from hyperslab.train.loop import Standing, Trainer
from hyperslab.train.task import Batch, evaluate, make_task


def slab(x, axes=None, mesh=None):
    return hs.shard(x, mesh or hs.init(device="cpu"), axes=axes)


def batch_of(target=None, weight=None, *, x=None, axes=None, mesh=None):
    """A batch whose samples matter only to pictures."""
    num = len(x if target is None else target)
    x = seeded(num, 2, 4, 4).float() if x is None else x
    target = None if target is None else slab(target, axes, mesh)
    return Batch(
        slab(x, mesh=mesh), target, None if weight is None else slab(weight, ("sample",), mesh)
    )


def evaluated(task, pairs):
    """The scores of outputs and batches."""
    meter = task.meter()
    for output, batch in pairs:
        meter.add(output, batch, task.loss(output, batch))
    return meter.scores()


@pytest.mark.parametrize(
    ("output", "target"),
    [((4, 1), (4,)), ((4,), (4, 1)), ((4,), (4,)), ((4, 1, 1, 1), (4,)), ((1, 1), (1,))],
)
def test_one_number_a_sample_fits_with_or_without_a_dim_of_its_own(output, target):
    task, out, t = make_task(TaskConfig()), seeded(*output), seeded(*target, seed=1)
    batch = batch_of(t)
    expected = F.mse_loss(out.flatten(), t.flatten())
    assert_close(task.loss(slab(out), batch), expected)
    scores = evaluated(task, [(slab(out), batch)])
    assert scores["mse"] == pytest.approx(float(expected))
    assert set(scores) == {"loss", "mae", "mse", "r2"}


def test_values_that_do_not_fit_are_not_broadcast():
    task = make_task(TaskConfig())
    with pytest.raises(ConfigError, match=r"gives \(4, 3\) and the target is \(4,\): set the num"):
        task.loss(slab(seeded(4, 3)), batch_of(seeded(4)))
    with pytest.raises(ConfigError, match=r"gives \(2, 4\) and the target is \(4, 2\)"):
        task.loss(slab(seeded(2, 4)), batch_of(seeded(4, 2)))
    with pytest.raises(ConfigError, match="gives a tuple, and this loss compares one tensor"):
        task.loss((slab(seeded(4)),), batch_of(seeded(4)))
    with pytest.raises(ConfigError, match=r"gives torch.int64: a loss needs real numbers"):
        task.loss(slab(torch.ones(4).long()), batch_of(seeded(4)))
    with pytest.raises(ConfigError, match="batches have no target"):
        task.loss(slab(seeded(4)), batch_of(x=seeded(4, 1, 2, 2)))


def test_short_outputs_and_whole_targets_give_a_float32_loss():
    task = make_task(TaskConfig())
    loss = task.loss(slab(seeded(4, 2).bfloat16()), batch_of(torch.ones(4, 2).long()))
    assert loss.dtype == torch.float32
    task = make_task(TaskConfig(kind="classification", class_weights=[1, 2]))
    loss = task.loss(slab(seeded(4, 2).bfloat16()), batch_of(torch.tensor([0, 1, 1, 0])))
    assert loss.dtype == torch.float32


def test_regression_scores_have_names():
    target, output = seeded(6, 2), seeded(6, 2, seed=1)
    task = make_task(TaskConfig(names=["Omega_m", "sigma_8"]))
    scores = evaluated(task, [(slab(output), batch_of(target))])
    error = (output - target).numpy()
    assert scores["mae/sigma_8"] == pytest.approx(abs(error[:, 1]).mean())
    unexplained = (error[:, 0] ** 2).mean() / target[:, 0].numpy().var()
    assert scores["r2/Omega_m"] == pytest.approx(1 - unexplained)
    assert scores["r2"] == pytest.approx((scores["r2/Omega_m"] + scores["r2/sigma_8"]) / 2)
    assert (task.score, task.higher_is_better) == ("loss", False)
    with pytest.raises(ConfigError, match=r"2 names \(Omega_m, sigma_8\), but the model gives 3"):
        task.loss(slab(seeded(4, 3)), batch_of(seeded(4, 3)))


def test_predictions_that_are_no_numbers_are_not_hidden_by_others():
    output = seeded(6, 2)
    output[0, 1] = math.nan
    scores = evaluated(make_task(TaskConfig()), [(slab(output), batch_of(seeded(6, 2)))])
    assert all(math.isnan(scores[key]) for key in ("loss", "mse", "mae", "r2", "r2/1"))
    assert np.isfinite([scores["mse/0"], scores["r2/0"]]).all()


def test_classes_are_scored_by_weight():
    logits = torch.tensor([[2.0, 0], [0, 1], [3, 0], [0, 5]])
    labels, weight = torch.tensor([0, 1, 1, -100]), torch.tensor([1.0, 2, 3, 9])
    task = make_task(TaskConfig(kind="classification"))
    scores = evaluated(task, [(slab(logits), batch_of(labels, weight))])
    entropy = F.cross_entropy(logits[:3], labels[:3], reduction="none")
    assert scores["accuracy"] == pytest.approx(3 / 6)
    assert scores["cross_entropy"] == pytest.approx(float((entropy * weight[:3]).sum() / 6))
    assert scores["loss"] == pytest.approx(scores["cross_entropy"])
    assert scores["auc"] == pytest.approx(2 / 5)
    assert (task.score, task.higher_is_better) == ("accuracy", True)


def test_two_classes_may_have_one_logit_or_two():
    logits, labels = seeded(9), torch.arange(9) % 2
    two = make_task(TaskConfig(kind="classification"))
    pair = torch.stack([torch.zeros(9).double(), logits], 1)
    expected = evaluated(two, [(slab(pair), batch_of(labels))])
    one = make_task(TaskConfig(kind="classification", loss="bce"))
    for output in (logits, logits[:, None]):
        found = evaluated(one, [(slab(output), batch_of(labels))])
        assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    "target",
    [torch.tensor([0, 2, 1]), torch.tensor([0.0, 2, 1]), torch.tensor([[0], [2], [1]]),
     F.one_hot(torch.tensor([0, 2, 1])), F.one_hot(torch.tensor([0, 2, 1])).float()],
    ids=["whole", "as floats", "with a dim", "one-hot", "probabilities"],
)  # fmt: skip
def test_labels_come_in_many_ways(target):
    logits, task = seeded(3, 3), make_task(TaskConfig(kind="classification"))
    batch = batch_of(target)
    assert_close(task.loss(slab(logits), batch), F.cross_entropy(logits, torch.tensor([0, 2, 1])))
    assert 0 <= evaluated(task, [(slab(logits), batch)])["accuracy"] <= 1


@pytest.mark.parametrize(
    ("kind", "loss", "output", "target", "words"),
    [
        (
            "classification",
            None,
            seeded(3, 2),
            torch.tensor([0, 2, 1]),
            "a label is 2, and with 2 cl",
        ),
        ("classification", None, seeded(3, 2), torch.tensor([0, -1, 1]), "a label is -1, and with"),
        ("classification", None, seeded(3, 2), torch.tensor([0, 0.5, 1]), "must be whole numbers"),
        ("classification", None, seeded(3, 1), torch.ones(3).long(), "a logit for each class"),
        ("classification", "bce", seeded(3, 2), torch.ones(3).long(), "wants one logit"),
        (
            "classification",
            None,
            seeded(3, 2),
            torch.ones(3, 4).long(),
            r"labels of \(3,\) were ex",
        ),
        ("classification", None, seeded(3, 2), torch.ones(3, 2), "they do not sum to 1"),
        ("classification", None, seeded(3, 2, 4), torch.ones(3, 4).long(), "= 'segmentation'"),
        ("segmentation", None, seeded(3, 2, 4), torch.ones(3, 5).long(), r"gives \(3, 2, 4\) and"),
    ],
)
def test_labels_that_do_not_fit_are_refused(kind, loss, output, target, words):
    task = make_task(TaskConfig(kind=kind, loss=loss))
    with pytest.raises(ConfigError, match=words):
        task.loss(slab(output), batch_of(target))


def test_weights_must_be_one_a_sample_and_one_a_class():
    task = make_task(TaskConfig())
    with pytest.raises(ConfigError, match=r"a batch of 4 samples has weights of shape \(4, 2\)"):
        task.loss(
            slab(seeded(4)), Batch(slab(seeded(4, 1, 2)), slab(seeded(4)), slab(seeded(4, 2)))
        )
    task = make_task(TaskConfig(kind="segmentation", class_weights=[1, 2]))
    with pytest.raises(ConfigError, match="has 2 weights, and there are 3 classes"):
        task.loss(slab(seeded(2, 3, 4)), batch_of(torch.ones(2, 4).long()))
    for settings in ({}, {"kind": "segmentation", "loss": "dice"}, {"loss": "torch.nn:L1Loss"}):
        with pytest.raises(ConfigError, match="has no use for them"):
            make_task(TaskConfig(class_weights=[1, 2], **settings))


def test_reconstruction_is_of_the_sample_itself():
    x = seeded(3, 2, 4, 4)
    output, task = x + 0.1, make_task(TaskConfig(kind="reconstruction"))
    scores = evaluated(task, [(slab(output), batch_of(x=x))])
    assert scores["mse"] == pytest.approx(0.01)
    peak = float(x.max() - x.min())
    assert scores["psnr"] == pytest.approx(10 * math.log10(peak**2 / 0.01))
    assert evaluated(task, [(slab(x), batch_of(x=x))])["psnr"] == math.inf
    assert math.isnan(evaluated(task, [(slab(x * 0), batch_of(x=x * 0))])["psnr"])


@pytest.mark.parametrize("kind", ["regression", "classification", "segmentation", "reconstruction"])
def test_an_evaluation_of_nothing_scores_nan_and_draws_nothing(kind, tmp_path):
    for names in ((), ("a", "b")):
        task = make_task(TaskConfig(kind=kind, names=names))
        scores = task.meter().scores()
        assert task.score in scores
        assert all(math.isnan(value) for value in scores.values())
    assert task.meter().draw(tmp_path) == []


def test_a_loss_of_ones_own_may_take_what_no_score_understands(tmp_path, caplog):
    (tmp_path / "own.py").write_text(
        "def loss(output, target): return output[0].mean() + output.mean()"
    )
    task = make_task(TaskConfig(kind="classification", loss=f"{tmp_path}/own.py:loss"))
    output, batch = slab(seeded(4, 3, 2)), batch_of(torch.zeros(4).long())
    with caplog.at_level(logging.WARNING):
        scores = evaluated(task, [(output, batch), (output, batch)])
    assert set(scores) == {task.score} == {"loss"}
    assert caplog.text.count("the loss is the only score") == 1


X = seeded(5, 2, 4, 6).float()
KINDS = {
    "regression": (seeded(5, 3), seeded(5, 3, seed=1), None),
    "classification": (seeded(5, 3), torch.arange(5) % 3, None),
    "segmentation": (
        seeded(5, 3, 4, 6),
        torch.randint(0, 3, (5, 4, 6), generator=torch.Generator().manual_seed(1)),
        ("sample", "height", "width"),
    ),
    "reconstruction": (seeded(5, 2, 4, 6).float() * 0.9, None, None),
}


def scores_on(mesh, kind):
    """Of two batches, with weights."""
    output, target, dims = KINDS[kind]
    task, weight = make_task(TaskConfig(kind=kind)), seeded(5, seed=9).abs()
    pairs = []
    for part in (slice(0, 3), slice(3, 5)):
        given = (None if target is None else target[part], weight[part])
        batch = batch_of(*given, x=X[part], axes=dims, mesh=mesh)
        pairs.append((slab(output[part], mesh=mesh), batch))
    return evaluated(task, pairs)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axes", [{"sample": 2}, {"height": 2}, {"depth": 2}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_the_same_on_any_mesh_and_rank(kind, axes):
    mesh = hs.init(**axes, device="cpu")
    alone = hs.Mesh(Grid((1,) * 5), 0, mesh.device, None, mesh.timeout)
    found = scores_on(mesh, kind)
    assert found == pytest.approx(scores_on(alone, kind), rel=1e-6)
    everywhere = [None] * 2
    torch.distributed.all_gather_object(everywhere, found)
    assert everywhere[0] == everywhere[1]


def scores_on_gpu(kind, axes):
    return scores_on(hs.init(**axes, device="cuda"), kind)


@pytest.mark.gpu
@pytest.mark.parametrize("axes", [{"sample": 1}, {"sample": 2}, {"height": 2}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_scores_on_a_gpu_are_those_of_a_cpu(kind, axes, team_of):
    expected = scores_on(hs.init(device="cpu"), kind)
    for found in team_of(max(axes.values())).run(scores_on_gpu, kind, axes):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.ranks(2)
def test_ranks_refuse_a_label_together_that_only_one_of_them_holds():
    task, mesh = make_task(TaskConfig(kind="classification")), hs.init(sample=2, device="cpu")
    labels = torch.tensor([0, 1, 0, 7])
    with pytest.raises(ConfigError, match="a label is 7, and with 2 classes they go from 0 to 1"):
        task.loss(slab(seeded(4, 2), mesh=mesh), batch_of(labels, mesh=mesh))


@pytest.mark.ranks(2)
def test_ranks_without_samples_take_part():
    task, mesh = make_task(TaskConfig(kind="classification")), hs.init(sample=2, device="cpu")
    x, labels = seeded(1, 1, 4, 4), torch.tensor([1])
    cut = {"sample": [0, 1, 1]}
    batch = Batch(hs.shard(x, mesh, cuts=cut), hs.shard(labels, mesh, cuts=cut))
    output = hs.shard(seeded(1, 2), mesh, cuts=cut)
    scores = evaluated(task, [(output, batch)])
    assert np.isfinite(scores["loss"])
    assert math.isnan(scores["auc"])


def test_layers_that_were_frozen_stay_so_after_an_evaluation():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5)).train()
    model[0].eval()
    task = SimpleNamespace(meter=lambda: "meter")
    assert evaluate(model, [], task, None, contextlib.nullcontext()) == "meter"
    assert [part.training for part in model.modules()] == [True, False, True]


def test_the_best_score_is_the_lowest_unless_higher_is_better():
    for higher_is_better, verdicts in [(False, [True, True, False]), (True, [True, False, True])]:
        task = SimpleNamespace(score="score", higher_is_better=higher_is_better)
        trainer = SimpleNamespace(standing=Standing(), task=task)
        found = [Trainer._judge(trainer, {"score": score}) for score in (0.5, 0.4, 0.6)]
        assert found == verdicts
