import contextlib
from types import SimpleNamespace

from torch import nn

from hyperslab.train.evaluate import evaluate
from hyperslab.train.loop import Standing, Trainer


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
