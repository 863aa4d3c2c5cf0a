"""Figures: drawn for whatever values there are, whole files or none."""

import json
import logging
import math
import sys
from itertools import combinations

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

import hyperslab as hs
from hyperslab.io.info.pictures import Picture
from hyperslab.testing import seeded
from hyperslab.train import figures as figures_module
from hyperslab.train.config import TaskConfig
from hyperslab.train.figures import draw_confusion, draw_curves, draw_predictions, draw_roc
from hyperslab.train.slices import draw_pictures, input_pictures, on_one_scale, pictures_of
from hyperslab.train.task import Batch, make_task


def is_picture(path):
    image = imread(path)
    return min(image.shape[:2]) > 100 and float(image.std()) > 0


@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved."""
    saved, save = [], Figure.savefig

    def savefig(figure, *args, **kwargs):
        saved.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


def check_layout(figure):
    """All of it lies within the figure, and no title covers another."""
    FigureCanvasAgg(figure).draw()
    box, all_of_it = figure.bbox_inches, figure.get_tightbbox()
    assert min(all_of_it.x0, all_of_it.y0) >= -0.01
    assert all_of_it.x1 <= box.x1 + 0.01
    assert all_of_it.y1 <= box.y1 + 0.01
    titles = [axes.title for axes in figure.axes if axes.get_title()]
    titles += [figure._suptitle] if figure.get_suptitle() else []
    for one, other in combinations([title.get_window_extent() for title in titles], 2):
        assert not one.padded(2).overlaps(other)


def words_of(figure):
    return {text.get_text() for text in figure.findobj(Text)}


def write_log(path, losses):
    lines = [
        {"kind": "step", "step": step, "loss": loss, "lr": 1e-3} for step, loss in enumerate(losses)
    ]
    lines += [{"kind": "scores", "part": "validation", "step": 1, "loss": 0.5}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')


@pytest.mark.parametrize("losses", [[1.0, 0.1, 0.01], [1.0], [None, None]], ids=str)
def test_curves_are_drawn_from_any_log(losses, tmp_path, figures):
    write_log(tmp_path / "log.jsonl", losses)
    (path,) = draw_curves(tmp_path / "log.jsonl", tmp_path / "figures")
    assert path == tmp_path / "figures" / "curves.png"
    assert is_picture(path)
    assert [p.name for p in path.parent.iterdir()] == ["curves.png"]
    check_layout(figures[0])


def test_the_rate_of_a_single_step_and_a_constant_one_are_seen(tmp_path, figures):
    write_log(tmp_path / "log.jsonl", [1.0])
    draw_curves(tmp_path / "log.jsonl", tmp_path)
    lower = figures[0].axes[1]
    assert lower.lines[0].get_marker() == "o"
    assert lower.get_ylim() == (0, pytest.approx(1.15e-3))
    assert all(tick == round(tick) for tick in lower.get_xticks())


def test_without_steps_there_are_no_curves(tmp_path):
    assert draw_curves(tmp_path / "log.jsonl", tmp_path) == []


def test_predictions_that_are_no_numbers_are_left_out(tmp_path):
    true, predicted = np.array([[1.0, 1], [2, math.nan]]), np.array([[math.inf, 1], [2, 3]])
    path = tmp_path / "x.png"
    assert draw_predictions(true, predicted, np.array([math.nan, 0.5]), ("a", "b"), path) == [path]
    assert is_picture(path)


@pytest.mark.parametrize("num", [1, 7])
def test_titles_of_predictions_have_room(num, tmp_path, figures):
    values = seeded(9, num).numpy()
    draw_predictions(values, values, np.ones(num), (), tmp_path / "x.png")
    check_layout(figures[0])


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "names", [(), tuple("abcdefghij"), tuple(f"a name of {k} words" for k in range(10))]
)
def test_nothing_of_a_confusion_of_ten_classes_is_cut_off(names, tmp_path, figures):
    draw_confusion(np.eye(10), names, tmp_path / "c.png")
    check_layout(figures[0])
    assert {"true class", "predicted class", *names} <= words_of(figures[0])


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


@pytest.mark.every(3)
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
def test_every_task_draws_its_figures(kind, output, target, names, tmp_path, figures):
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
    for figure in figures:
        check_layout(figure)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("kind", "output", "target", "remarks"),
    [
        (
            "regression",
            torch.tensor([[0.5, 2]]),
            torch.tensor([[0.25, 3]]),
            "a: true 0.25, predicted 0.5\nb: true 3, predicted 2",
        ),
        (
            "classification",
            torch.tensor([[0.0, math.log(3)]]),
            torch.tensor([0]),
            "true: a, predicted: b (75%)",
        ),
        (
            "classification",
            torch.tensor([[0.0, math.log(3)]]),
            torch.tensor([-100]),
            "true: unknown, predicted: b (75%)",
        ),
    ],
)
def test_the_sample_is_shown_with_what_is_true_and_what_was_predicted(
    kind, output, target, remarks, tmp_path, figures
):
    mesh = hs.init(device="cpu")
    task = make_task(TaskConfig(kind=kind, names=("a", "b")))
    batch = Batch(hs.shard(seeded(1, 18, 4, 4, 4), mesh), hs.shard(target, mesh))
    meter = task.meter()
    meter.add(hs.shard(output, mesh), batch, torch.tensor(1.0))
    meter.draw(tmp_path)
    shown = "The first sample at depth 2: channels 0-2 of 18, as the network sees them"
    assert figures[0].get_suptitle() == f"{shown}\n{remarks}"


def test_an_image_of_three_channels_is_drawn_in_its_colours(tmp_path, figures):
    mesh = hs.init(device="cpu")
    x = seeded(2, 3, 4, 6)
    (picture,) = input_pictures(hs.shard(x, mesh))
    draw_pictures([picture], tmp_path / "x.png")
    shown = figures[0].axes[0].images[0].get_array()
    low, high = x[0].min(), x[0].max()
    np.testing.assert_allclose(shown, ((x[0] - low) / (high - low)).permute(1, 2, 0), atol=1e-6)
    assert [p.title for p in input_pictures(hs.shard(seeded(2, 4, 4, 6), mesh))] == [
        f"input, channel {k}" for k in range(3)
    ]
    counts = torch.zeros(1, 3, 8, 8)
    counts[:, :, 0, 0] = 100
    assert len(input_pictures(hs.shard(counts, mesh))) == 3  # a picture of them would be black


def test_true_and_predicted_maps_share_a_scale_that_none_is_beyond(tmp_path, figures):
    true = [Picture("true", np.zeros((3, 3)))]
    predicted = [Picture("predicted", np.arange(9.0).reshape(3, 3) - 2)]
    pictures = on_one_scale(true, predicted)
    draw_pictures(pictures, tmp_path / "x.png")
    images = [axes.images[0] for axes in figures[0].axes[:2]]
    assert [image.get_clim() for image in images] == [(-2, 6), (-2, 6)]


def test_counts_are_drawn_by_their_logarithm_whatever_is_predicted():
    counts = np.r_[np.zeros(99), 1e4].reshape(10, 10)
    pictures = on_one_scale([Picture("true", counts)], [Picture("predicted", counts - 1)])
    assert all(each.scale.even_to is not None and each.scale.low == -1 for each in pictures)


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


def test_a_picture_is_not_worth_a_failure(tmp_path, caplog):
    picture = [Picture("input", np.ones((4, 4)))]
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert draw_pictures(picture, tmp_path / "file" / "x.png") == []
        assert draw_pictures([Picture(r"$\x$", np.ones((4, 4)))], tmp_path / "y.png") == []
    assert caplog.text.count("figure x.png is missing") == 1
    assert caplog.text.count("figure y.png is missing") == 1


def test_that_there_is_no_matplotlib_is_told_once(tmp_path, monkeypatch, caplog):
    figures_module._warn_once_of_no_figures.cache_clear()  # another test may have been told
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with caplog.at_level(logging.WARNING):
        for name in ("x.png", "y.png"):
            assert draw_pictures([Picture("input", np.ones((4, 4)))], tmp_path / name) == []
    assert caplog.text.count("pip install 'hyperslab[train]'") == 1
