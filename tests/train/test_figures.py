"""Figures: drawn for whatever values there are, whole files or none."""

import json
import logging
import math
import sys

import numpy as np
import pytest
import torch
from matplotlib.image import imread

import hyperslab as hs
from hyperslab.testing import seeded
from hyperslab.train.batch import Batch
from hyperslab.train.class_figures import draw_confusion, draw_roc
from hyperslab.train.config import TaskConfig
from hyperslab.train.figures import draw_curves, draw_predictions
from hyperslab.train.slices import Picture, draw_pictures, pictures_of
from hyperslab.train.task import make_task


def is_picture(path):
    image = imread(path)
    return min(image.shape[:2]) > 100 and float(image.std()) > 0


def write_log(path, losses):
    lines = [
        {"kind": "step", "step": step, "loss": loss, "lr": 1e-3} for step, loss in enumerate(losses)
    ]
    lines += [{"kind": "scores", "part": "validation", "step": 1, "loss": 0.5}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')


@pytest.mark.parametrize("losses", [[1.0, 0.1, 0.01], [None, None]], ids=str)
def test_curves_are_drawn_from_any_log(losses, tmp_path):
    write_log(tmp_path / "log.jsonl", losses)
    (path,) = draw_curves(tmp_path / "log.jsonl", tmp_path / "figures")
    assert path == tmp_path / "figures" / "curves.png"
    assert is_picture(path)
    assert [p.name for p in path.parent.iterdir()] == ["curves.png"]


def test_without_steps_there_are_no_curves(tmp_path):
    assert draw_curves(tmp_path / "log.jsonl", tmp_path) == []


def test_predictions_that_are_no_numbers_are_left_out(tmp_path):
    true, predicted = np.array([[1.0, 1], [2, math.nan]]), np.array([[math.inf, 1], [2, 3]])
    path = tmp_path / "x.png"
    assert draw_predictions(true, predicted, np.array([math.nan, 0.5]), ("a", "b"), path) == [path]
    assert is_picture(path)


def test_figures_of_classes_need_no_class_to_be_there(tmp_path):
    counts = np.array([[3.0, 1], [0, 0]])
    assert is_picture(draw_confusion(counts, ("a", "b"), tmp_path / "c.png")[0])
    scores, labels = seeded(6, 3).numpy(), np.array([0, 0, 0, 1, 1, 1])
    assert is_picture(draw_roc(scores, labels, np.ones(6), (), tmp_path / "r.png")[0])
    assert draw_roc(scores, np.zeros(6, int), np.ones(6), (), tmp_path / "n.png") == []


def test_pictures_are_drawn_of_any_values(tmp_path):
    counts = np.r_[np.zeros(99), 1e4].reshape(10, 10)
    values = [np.full((4, 5), math.nan), counts, np.zeros((1, 1)), np.arange(7.0)]
    pictures = [Picture("input", each) for each in values]
    assert is_picture(draw_pictures(pictures, tmp_path / "x.png")[0])


@pytest.mark.parametrize(
    ("kind", "output", "target", "names"),
    [
        ("regression", (2, 2), seeded(2, 2), ["predictions", "sample"]),
        ("regression", (2, 1, 4, 6), seeded(2, 4, 6), ["sample"]),
        ("classification", (2, 2), torch.arange(2), ["confusion", "roc", "sample"]),
        ("segmentation", (2, 3, 4, 6), torch.full((2, 4, 6), -100), ["sample"]),
        ("segmentation", (2, 3, 4, 6), torch.ones(2, 4, 6).long(), ["confusion", "sample"]),
        ("reconstruction", (2, 1, 4, 6), None, ["sample"]),
    ],
)
def test_every_task_draws_its_figures(kind, output, target, names, tmp_path):
    mesh = hs.init(device="cpu")
    task = make_task(TaskConfig(kind=kind))
    batch = Batch(
        hs.shard(seeded(2, 1, 4, 6), mesh),
        None if target is None else hs.shard(target, mesh),
    )
    out, meter = hs.shard(seeded(*output, seed=5), mesh), task.meter()
    meter.add(out, batch, task.loss(out, batch))
    drawn = meter.draw(tmp_path)
    assert sorted(path.stem for path in drawn) == names
    assert all(map(is_picture, drawn))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axes", [{"sample": 2}, {"depth": 2}, {"height": 2}], ids=str)
def test_the_slice_that_is_drawn_is_the_same_however_samples_are_cut(axes):
    mesh = hs.init(**axes, device="cpu")
    for shape, place in (((2, 5, 6, 4, 7), (0, 1, 3)), ((2, 5, 4, 7), (0, 1))):
        x = seeded(*shape)
        pictures = pictures_of(hs.shard(x, mesh), "input")
        assert [picture.title for picture in pictures] == [f"input, channel {k}" for k in range(3)]
        np.testing.assert_array_equal(pictures[1].values, x[place].float().numpy())


def test_large_maps_are_thinned_out():
    x = hs.shard(torch.arange(3000.0).expand(1, 1, 2, 3000), hs.init(device="cpu"))
    (picture,) = pictures_of(x, "input")
    assert picture.title == "input"
    np.testing.assert_array_equal(picture.values[0], np.arange(0, 3000, 3))


def test_a_picture_is_not_worth_a_failure(tmp_path, monkeypatch, caplog):
    picture = [Picture("input", np.ones((4, 4)))]
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert draw_pictures(picture, tmp_path / "file" / "x.png") == []
        assert draw_pictures([Picture(r"$\x$", np.ones((4, 4)))], tmp_path / "y.png") == []
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert draw_pictures(picture, tmp_path / "x.png") == []
    assert caplog.text.count("figure x.png is missing") == 1
    assert caplog.text.count("figure y.png is missing") == 1
    assert "pip install 'hyperslab[train]'" in caplog.text
