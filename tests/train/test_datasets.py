"""Which samples each part of a run gets, and what lies beside them."""

import numpy as np
import pytest

from hyperslab.errors import ConfigError
from hyperslab.train.config import Config, DataConfig, ModelConfig
from hyperslab.train.datasets import open_parts


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(folder, numbers, name="{}", shape=(4, 4)):
    """Files that hold the number in their name."""
    for number in numbers:
        path = folder / f"{name.format(number)}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.full(shape, number, np.int16))


def opened(**data):
    settings = {"validation": 0, "test": 0, "axes": "HW", **data}
    return open_parts(Config(model=ModelConfig(name="x"), data=DataConfig(**settings)))


def pairs(part):
    """The numbers of each sample and of the label beside it."""
    return [
        (int(part.read(index).flat[0]), int(part.read(index, array="label").flat[0]))
        for index in range(len(part))
    ]


def test_labels_lie_beside_their_images_in_every_part(folder):
    save(folder / "images", range(12))
    save(folder / "labels", range(12))
    beside = {"label": "labels/*.npy"}
    val, test = ["images/3.npy", "images/7.npy"], "images/1*.npy"
    parts = opened(files="images/*.npy", beside=beside, validation=val, test=test)
    found = {name: [a for a, b in pairs(part) if a == b] for name, part in parts.items()}
    assert found == {"train": [0, 2, 4, 5, 6, 8, 9], "validation": [3, 7], "test": [1, 10, 11]}
    drawn = opened(files="images/*.npy", beside=beside, validation=0.25, test=0.25)
    assert sorted(pair for part in drawn.values() for pair in pairs(part)) == [
        (n, n) for n in range(12)
    ]


def test_labels_of_separate_validation_files_lie_where_they_are_said_to(folder):
    for part, numbers in (("train", range(5)), ("val", range(3))):
        save(folder / part / "images", numbers)
    save(folder / "train" / "labels", range(5), name="seg{}")
    save(folder / "val" / "masks", range(3), shape=(4, 4))
    settings = {
        "files": "train/images/*.npy",
        "validation": "val/images/*.npy",
        "beside": {"label": "train/labels/seg*.npy"},
    }
    parts = opened(**settings, validation_beside={"label": "val/masks/*.npy"})
    assert pairs(parts["validation"]) == [(0, 0), (1, 1), (2, 2)]
    assert "masks" in str(parts["validation"].manifest[0].arrays["label"].file)

    words = r"data\.beside: .* another of the same name as images/0\.npy.* data\.validation_beside"
    with pytest.raises(ConfigError, match=words):
        opened(**settings)


def test_images_without_a_label_are_listed(folder):
    save(folder / "images", [1, 2, 3])
    save(folder / "labels", [1, 3, 4])
    words = r"no 'label' for images/2\.npy; nothing to go with labels/4\.npy; .* data\.pair_by = "
    with pytest.raises(ConfigError, match=words):
        opened(files="images/*.npy", beside={"label": "labels/*.npy"})


def test_names_may_be_compared_by_what_they_have_in_common(folder):
    save(folder / "images", [1, 2, 10], name="img{}")
    save(folder / "labels", [1, 2, 10], name="seg{:02}")
    settings = {"files": "images/*.npy", "beside": {"label": "labels/*.npy"}}
    parts = opened(**settings, pair_by=r"0*(\d+)\.")
    assert sorted(pairs(parts["train"])) == [(1, 1), (2, 2), (10, 10)]
    in_order = opened(**settings, pair_by="order")
    assert pairs(in_order["train"]) == [(1, 1), (10, 2), (2, 10)]  # as it was asked for
    with pytest.raises(ConfigError, match="does not tell which of labels"):
        opened(**settings, pair_by="order", validation="images/img1.npy")


def test_dims_of_labels_are_those_of_the_samples_or_are_said(folder):
    save(folder / "images", range(2), shape=(4, 6, 3))
    save(folder / "labels", range(2), shape=(4, 6))
    save(folder / "turned", range(2), shape=(6, 4))
    save(folder / "vectors", range(2), shape=(5,))
    settings = {"files": "images/*.npy", "axes": {"data": "HWC"}}
    label = opened(**settings, beside={"label": "labels/*.npy"})["train"].arrays["label"]
    assert (label.shape, label.is_cut) == ((4, 6), True)
    settings["axes"]["label"] = "WH"
    label = opened(**settings, beside={"label": "turned/*.npy"})["train"].arrays["label"]
    assert (label.shape, label.is_cut) == ((4, 6), True)
    with pytest.raises(ConfigError, match="'label' does not fit its samples"):
        opened(**settings, beside={"label": "labels/*.npy"})
    settings["axes"].pop("label")
    vector = opened(**settings, beside={"label": "vectors/*.npy"})["train"].arrays["label"]
    assert (vector.shape, vector.is_cut) == ((5,), False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"validation_beside": {"label": "a"}}, r"data\.validation = 0\.1 takes them from"),
        ({"test": "t", "test_beside": {"mask": "a"}}, r"has 'mask', which data\.beside has not"),
    ],
)
def test_labels_of_parts_that_have_no_files_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        DataConfig(files="x", beside={"label": "b"}, **settings)


def test_every_part_gets_a_sample_or_it_is_told_that_there_are_too_few(folder):
    save(folder / "images", range(8))
    parts = opened(files="images/*.npy", validation=0.5, test=0.49)
    assert [len(parts[name]) for name in ("train", "validation", "test")] == [1, 3, 4]
    assert len(opened(files="images/*.npy", validation=0.01)["validation"]) == 1
    words = r"data\.validation = 0\.1 and data\.test = 0\.1 leave none of 2 samples to train on"
    with pytest.raises(ConfigError, match=words):
        opened(files=["images/0.npy", "images/1.npy"], validation=0.1, test=0.1)
