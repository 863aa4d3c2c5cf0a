"""Images and labels that lie in files of their own."""

import os

import numpy as np
import pytest

import hyperslab as hs
from hyperslab.io.opening import looked_at


def save_all(folder, names, **values):
    """Files whose numbers tell where their names stand in ``names``."""
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        np.save(folder / f"{name}.npy", np.full(values.get(name, (4, 5)), number, np.int16))
    return folder


def paired(images, labels, by=None):
    """The number of the label that each image has got."""
    data = hs.open(images, axes="HW").beside(by=by, label=hs.open(labels, axes="HW"))
    return [int(data.read(index, array="label")[0, 0]) for index in range(len(data))]


def test_files_go_together_by_name_whatever_their_order(tmp_path):
    images = save_all(tmp_path / "images", ["a", "b", "c"])
    labels = save_all(tmp_path / "labels", ["c", "a", "b"])
    assert paired(images / "*.npy", labels / "*.npy") == [1, 2, 0]
    some = [images / "c.npy", images / "a.npy"]
    assert paired(some, [labels / "a.npy", labels / "c.npy"]) == [0, 1]
    assert paired(some, [labels / "a.npy", labels / "c.npy"], by="order") == [1, 0]
    assert paired(images / "a.npy", labels / "c.npy") == [0]  # one of each was named outright


def test_files_go_together_by_what_wildcards_stand_for(tmp_path):
    numbers = [2, 10, 1]
    save_all(tmp_path / "all", [f"img{n}" for n in numbers] + [f"{n}_seg" for n in numbers])
    assert paired(tmp_path / "all/img*.npy", tmp_path / "all/*_seg.npy") == [5, 4, 3]
    for patient in ("p", "q"):
        (tmp_path / patient).mkdir()
        save_all(tmp_path / patient / "scans", ["one", "two"])
        save_all(tmp_path / patient / "labels", ["label_two", "label_one"])
    found = paired(tmp_path / "[pq]/scans/*.npy", tmp_path / "?/labels/label_*.npy")
    assert found == [1, 0, 1, 0]
    assert paired(tmp_path / "**/scans/*.npy", tmp_path / "**/labels/label_*.npy") == found


def test_files_go_together_by_a_regular_expression(tmp_path):
    images = save_all(tmp_path / "images", ["img1", "img10", "img2"]) / "*.npy"
    labels = save_all(tmp_path / "labels", ["seg01", "seg02", "seg10"]) / "*.npy"
    assert paired(images, labels, by=r"0*(\d+)") == [0, 2, 1]
    with pytest.raises(hs.ConfigError, match="has no group"):
        paired(images, labels, by=r"\d+")
    with pytest.raises(hs.ConfigError, match="is not a regular expression"):
        paired(images, labels, by=r"(\d+")


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (
            ["a", "b", "c"],
            ["a", "c", "d"],
            r"no 'label' for images/b\.npy; nothing .*labels/d\.npy",
        ),
        (
            ["a", "b"],
            ["a"],
            r"1 files of 'label' .* beside 2 by name: no 'label' for images/b\.npy;",
        ),
        (["a"], ["a", "b"], r"nothing to go with labels/b\.npy;"),
        (
            ["img1", "img10", "img2"],
            ["seg01", "seg02", "seg10"],
            r"no 'label' for images/img1\.npy,",
        ),
        (["a"], ["b"], r"no 'label' for images/a\.npy; nothing to go with labels/b\.npy"),
        ([f"{n:02}" for n in range(12)], ["00"], r"images/08\.npy and 3 more; name"),
    ],
)
def test_names_without_a_partner_are_listed(images, labels, words, tmp_path):
    save_all(tmp_path / "images", images)
    save_all(tmp_path / "labels", labels)
    with pytest.raises(hs.ConfigError, match=words) as raised:
        paired(tmp_path / "images/*.npy", tmp_path / "labels/*.npy")
    assert "\n" not in str(raised.value)


def test_files_of_the_same_name_are_not_told_apart_by_their_order(tmp_path):
    for side in ("x", "y"):
        (tmp_path / side).mkdir()
        for patient in ("p", "q"):
            save_all(tmp_path / side / patient, ["scan"])
    lists = [[tmp_path / side / patient / "scan.npy" for patient in "pq"] for side in "xy"]
    with pytest.raises(
        hs.ConfigError, match=r"another of the same name as q/scan\.npy, q/scan\.npy"
    ):
        paired(*lists)
    assert paired(tmp_path / "x/*/scan.npy", tmp_path / "y/*/scan.npy") == [0, 0]


def test_label_maps_that_do_not_fit_are_listed(tmp_path):
    images = save_all(tmp_path / "images", "abcd") / "*.npy"
    odd = {"b": (4, 6), "d": (5, 4)}
    labels = save_all(tmp_path / "labels", "abcd", **odd) / "*.npy"
    words = r"2 of 4 files of 'label' .*: labels/b\.npy has int16 \(4, 6\), labels/d\.npy has int16"
    with pytest.raises(hs.FormatError, match=words):
        paired(images, labels)
    all_odd = save_all(tmp_path / "others", "abcd", **dict.fromkeys("abcd", (4, 6))) / "*.npy"
    words = r"'label' does not fit its samples: .*a\.npy has H 4, W 6, the samples have H 4, W 5"
    with pytest.raises(hs.ConfigError, match=words):
        paired(images, all_odd)
    blocks = save_all(tmp_path / "blocks", "abcd", **dict.fromkeys("abcd", (2, 1))) / "*.npy"
    assert paired(images, blocks) == [0, 1, 2, 3]


def test_label_maps_may_differ_from_each_other_as_their_images_do(tmp_path):
    sizes = {"b": (4, 6), "d": (7, 5)}
    images = save_all(tmp_path / "images", "abcd", **sizes) / "*.npy"
    labels = save_all(tmp_path / "labels", "abcd", **sizes) / "*.npy"
    data = hs.open(images, axes="HW").beside(label=hs.open(labels, axes="HW"))
    indexed = looked_at(data.manifest)
    for name in ("data", "label"):
        assert [indexed[i].arrays[name].shape for i in range(4)] == [(4, 5), (4, 6), (4, 5), (7, 5)]
    np.save(tmp_path / "labels" / "d.npy", np.zeros((5, 7), np.int16))
    with pytest.raises(
        hs.FormatError, match=r"1 of 4 files of 'label' .*: labels/d\.npy has int16"
    ):
        hs.open(images, axes="HW").beside(label=hs.open(labels, axes="HW"))


def test_a_label_file_that_cannot_be_read_is_told_when_it_is(tmp_path):
    images = save_all(tmp_path / "images", "ab") / "*.npy"
    labels = save_all(tmp_path / "labels", "ab")
    os.truncate(labels / "b.npy", 10)
    data = hs.open(images, axes="HW").beside(label=hs.open(labels / "*.npy", axes="HW"))
    assert data.read(0, array="label").max() == 0
    with pytest.raises(hs.FormatError, match=r"sample 1, array 'label': .*b\.npy"):
        data.read(1, array="label")


def test_partners_have_as_many_samples(tmp_path):
    save_all(tmp_path / "images", "ab", a=(3, 4), b=(2, 4))
    save_all(tmp_path / "labels", "ab", a=(3, 4), b=(3, 4))
    labels = hs.open(tmp_path / "labels/*.npy", axes="NW")
    with pytest.raises(hs.ConfigError, match=r"as many samples .*: b\.npy has 2, b\.npy 3"):
        hs.open(tmp_path / "images/*.npy", axes="NW").beside(label=labels)
