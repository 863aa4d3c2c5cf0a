"""What a sample is: one table, made once, saved, told to all ranks."""

import json
import os
import pickle

import h5py
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import hyperslab as hs
from hyperslab.io import manifest as manifest_module, sharing
from hyperslab.io.sharing import shared
from hyperslab.io.stage import open_staged, stage
from hyperslab.layout import Box


def save_cubes(folder, num, per_file=None, shape=(4, 6)):
    """Files whose numbers tell which they are."""
    folder.mkdir(exist_ok=True)
    for number in range(num):
        stacked = shape if per_file is None else (per_file, *shape)
        values = np.full(stacked, number, np.int16)
        if per_file is not None:
            values += 100 * np.arange(per_file, dtype=np.int16)[:, None, None]
        np.save(folder / f"c{number:02}.npy", values)
    return folder


def first_values(data, array=None):
    return [int(data.read(i, array=array).flat[0]) for i in range(len(data))]


@pytest.fixture
def counted_stats(monkeypatch):
    """The paths that are looked at to make or to check a manifest."""
    seen = []

    def version_of(path):
        seen.append(path)
        return original(path)

    original = manifest_module.version_of
    for module in (manifest_module, sharing):
        monkeypatch.setattr(module, "version_of", version_of)
    return seen


def test_a_sample_says_where_each_of_its_arrays_lies(tmp_path):
    images = save_cubes(tmp_path / "images", 3, per_file=2)
    labels = save_cubes(tmp_path / "labels", 3, per_file=2)
    data = hs.open(images / "*.npy", axes="NHW")
    data = data.beside(label=hs.open(labels / "*.npy", axes="NHW")).tiled((2, 3))
    assert len(data.manifest) == 3 * 2 * 4
    sample = data.manifest[8 + 4 + 3]
    assert sample.key == "c01[1]#3"
    where = sample.arrays["label"]
    assert (where.file, where.array, where.row) == (labels / "c01.npy", "data", 1)
    assert where.box == Box.of((2, 4), (3, 6))
    assert (where.shape, where.dtype) == ((2, 3), np.int16)
    status = (labels / "c01.npy").stat()
    assert where.version == (status.st_size, status.st_mtime_ns)
    whole = np.load(where.file)[where.row][2:4, 3:6]
    np.testing.assert_array_equal(data.read(15, array="label"), whole)
    with pytest.raises(IndexError, match="no sample 24: the manifest has 24"):
        data.manifest[24]


def test_keys_tell_samples_apart(tmp_path):
    for name in ("p/scan", "q/scan"):
        (tmp_path / name).parent.mkdir()
        np.save(tmp_path / f"{name}.npy", np.zeros((2, 2)))
    data = hs.open(tmp_path / "*/scan.npy", axes="HW")
    assert [data.manifest[i].key for i in range(2)] == ["p/scan", "q/scan"]


@settings(max_examples=15, deadline=None)
@given(draw=st.data())
def test_a_saved_manifest_opens_as_the_same_samples(draw, tmp_path_factory):
    folder = tmp_path_factory.mktemp("x")
    stacked = draw.draw(st.sampled_from([None, 1, 3]))
    images = save_cubes(folder / "images", 4, per_file=stacked)
    save_cubes(folder / "labels", 4, per_file=stacked)
    axes = "HW" if stacked is None else "NHW"
    data = hs.open(images, axes=axes)
    steps = draw.draw(st.lists(st.sampled_from(["beside", "tile", "take"]), unique=True))
    for step in sorted(steps):  # "beside" comes before samples are taken
        if step == "beside":
            data = data.beside(label=hs.open(folder / "labels", axes=axes))
        elif step == "tile":
            data = data.tiled(draw.draw(st.sampled_from([2, (4, 3), (1, 6)])))
        else:
            numbers = st.integers(0, len(data) - 1)
            data = data.take(draw.draw(st.lists(numbers, min_size=1, max_size=5, unique=True)))
    data.save(folder / "data.json")
    again = hs.open(folder / "data.json")
    assert [again.manifest[i] for i in range(len(again))] == [
        data.manifest[i] for i in range(len(data))
    ]
    assert list(again.arrays) == list(data.arrays)
    for array in data.arrays:
        assert first_values(again, array) == first_values(data, array)
    assert again.manifest.digest() == data.manifest.digest()


def test_an_index_moves_with_its_folder(tmp_path):
    save_cubes(tmp_path / "here", 3)
    hs.open(tmp_path / "here", axes="HW").save(tmp_path / "here" / "data.json")
    (tmp_path / "here").rename(tmp_path / "there")
    data = hs.open(str(tmp_path / "there" / "data.json"))
    assert data.paths[2] == tmp_path / "there" / "c02.npy"
    assert first_values(data) == [0, 1, 2]


def test_files_that_are_not_as_they_were_indexed_are_named(tmp_path):
    folder = save_cubes(tmp_path / "x", 6)
    hs.open(folder, axes="HW").save(tmp_path / "data.json")
    os.utime(folder / "c01.npy", ns=(0, (folder / "c01.npy").stat().st_mtime_ns + 1))
    (folder / "c02.npy").unlink()
    np.save(folder / "c03.npy", np.zeros((4, 7), np.int16))
    np.save(folder / "c99.npy", np.zeros((4, 6), np.int16))
    with pytest.raises(hs.FormatError) as raised:
        hs.open(tmp_path / "data.json")
    words = str(raised.value)
    assert "data.json is out of date, in 4 of 6 files" in words
    for part in ("c01.npy is newer than", "c02.npy is missing", "c99.npy is not in it"):
        assert part in words
    assert "c03.npy has changed (from 176 to 184 bytes)" in words
    assert "index the data again" in words
    assert "\n" not in words


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("nonsense", "cannot be read as an index"),
        ("[1]", "it is no manifest"),
        ('{"hyperslab": "manifest", "version": 99}', "it is of version 99"),
        ('{"hyperslab": "manifest", "version": 1}', "cannot be read as an index"),
    ],
)
def test_what_is_no_index_is_refused(content, words, tmp_path):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(hs.FormatError, match=words):
        hs.open(tmp_path / "a.json")


def test_samples_that_an_index_places_outside_its_files_are_refused(tmp_path):
    data = hs.open(save_cubes(tmp_path / "x", 3, per_file=2), axes="NHW").take([5, 0])
    data.save(tmp_path / "a.json")
    content = json.loads((tmp_path / "a.json").read_text())
    for place in ([3, 0], [-1, 0], [0, 2], [0, -1]):
        content["samples"][1] = [place]
        (tmp_path / "a.json").write_text(json.dumps(content))
        with pytest.raises(hs.FormatError, match="a sample lies"):
            hs.open(tmp_path / "a.json")


def test_an_index_tells_what_its_files_hold(tmp_path):
    hs.open(save_cubes(tmp_path / "x", 2), axes="HW").save(tmp_path / "a.json")
    with pytest.raises(hs.ConfigError, match="what its files hold: leave out axes"):
        hs.open(tmp_path / "a.json", axes="HW")


def test_an_index_of_strangers_may_be_held_to_its_own_files(tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.zeros((4, 4))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = h5py.ExternalLink("other.h5", "x")
    hs.open(tmp_path / "a.h5", sample="x", axes="HW").save(tmp_path / "a.json")
    assert hs.open(tmp_path / "a.json").read(0).shape == (4, 4)
    with pytest.raises(hs.FormatError, match="which external=False refuses"):
        hs.open(tmp_path / "a.json", external=False).read(0)


class OneOfMany:
    """A rank of several that are told what rank 0 has found."""

    num_ranks = 8

    def __init__(self, rank, told):
        self.rank, self._told = rank, told

    def ask_first(self, call):
        if self.rank == 0:
            self._told.append(pickle.dumps(call()))
        return pickle.loads(self._told[0])


def test_rank_0_alone_looks_at_the_files_one_stat_each(tmp_path, counted_stats):
    folder = save_cubes(tmp_path / "x", 50)
    told = []
    parts = [hs.open(folder / "*.npy", axes="HW", mesh=OneOfMany(r, told)) for r in range(8)]
    assert sorted(set(counted_stats)) == sorted(folder.iterdir())
    assert len(counted_stats) == 50 + 8  # each looks whether the first is the same here
    assert {part.manifest.digest() for part in parts} == {parts[0].manifest.digest()}
    assert first_values(parts[7])[-1] == 49


def test_an_index_is_opened_with_one_stat_a_file(tmp_path, counted_stats):
    folder = save_cubes(tmp_path / "x", 30)
    hs.open(folder, axes="HW").save(tmp_path / "data.json")
    counted_stats.clear()
    data = hs.open(tmp_path / "data.json")
    assert sorted(counted_stats) == sorted(data.paths)


def test_files_of_another_node_are_looked_at_there(tmp_path):
    folder = save_cubes(tmp_path / "x", 3)
    made = hs.open(folder, axes="HW").manifest
    for number in range(3):  # copied to another node: the same bytes, another time
        os.utime(folder / f"c0{number}.npy", ns=(5, 5))
    there = hs.Dataset(shared(lambda: made, OneOfMany(0, [])))
    assert [file.version[1] for file in there.manifest.files] == [5, 5, 5]
    assert first_values(there) == [0, 1, 2]
    with pytest.raises(hs.FormatError, match="has changed since it was first looked at"):
        first_values(hs.Dataset(made))


def test_parts_of_a_manifest_are_those_of_the_data(tmp_path):
    data = hs.open(save_cubes(tmp_path / "x", 10), axes="HW")
    parts = data.manifest.split({"train": 0.8, "test": 0.2}, seed=3)
    expected = data.split(seed=3, train=0.8, test=0.2)
    for name, part in parts.items():
        assert first_values(hs.Dataset(part)) == first_values(expected[name])
    numbers = [number for part in parts.values() for number in first_values(hs.Dataset(part))]
    assert sorted(numbers) == [*range(10)]


def test_what_lies_beside_samples_is_staged_with_them(tmp_path):
    images = save_cubes(tmp_path / "images", 3)
    save_cubes(tmp_path / "labels", 3)
    (tmp_path / "t.csv").write_text("file,a\nc00,0\nc01,1\nc02,2\n")
    data = hs.open(images, axes="HW").beside(
        label=hs.open(tmp_path / "labels", axes="HW"), y=hs.table(tmp_path / "t.csv")
    )
    report = stage(data, tmp_path / "staged")
    assert report.num_staged == 6
    staged = open_staged(data, tmp_path / "staged")
    for file in (*images.iterdir(), *(tmp_path / "labels").iterdir()):
        file.unlink()
    for array in ("data", "label", "y"):
        assert first_values(staged, array) == [0, 1, 2]
    with pytest.raises(hs.ConfigError, match="what is staged is this node's own"):
        staged.save(tmp_path / "a.json")


def test_a_folder_stands_for_its_files_of_one_format(tmp_path):
    folder = save_cubes(tmp_path / "x", 3)
    (folder / "notes.txt").write_text("no sample")
    (folder / "targets.csv").write_text("file,a\nc00,1\n")
    assert len(hs.open(folder, axes="HW")) == 3
    with h5py.File(folder / "a.h5", "w"):
        pass
    with pytest.raises(hs.FormatError, match=r"files of several formats \(1 of hdf5, 3 of npy\)"):
        hs.open(folder, axes="HW")


@pytest.mark.ranks(2)
def test_ranks_open_what_rank_0_has_found_or_stop_together(tmp_path):
    mesh = hs.init(device="cpu")
    if mesh.rank == 0:
        save_cubes(tmp_path / "x", 4)
    data = mesh.ask_first(lambda: None) or hs.open(tmp_path / "x", axes="HW", mesh=mesh)
    assert first_values(data) == [0, 1, 2, 3]
    assert len({*mesh.tell_all(data.manifest.digest())}) == 1
    with pytest.raises(hs.FormatError, match="no file fits"):
        hs.open(tmp_path / "y*.npy", axes="HW", mesh=mesh)
    with pytest.raises(hs.ConfigError, match="does not tell its dims"):
        hs.open(tmp_path / "x", mesh=mesh)


@pytest.mark.slow
def test_20_000_files_are_looked_at_once_each_for_8_ranks(tmp_path, counted_stats):
    (tmp_path / "x").mkdir()
    np.save(tmp_path / "x" / "00000.npy", np.zeros((2, 2), np.int16))
    for number in range(1, 20_000):
        os.link(tmp_path / "x" / "00000.npy", tmp_path / "x" / f"{number:05}.npy")
    told = []
    parts = [hs.open(tmp_path / "x", axes="HW", mesh=OneOfMany(r, told)) for r in range(8)]
    assert len(counted_stats) == 20_000 + 8
    parts[0].save(tmp_path / "data.json")
    counted_stats.clear()
    assert hs.open(tmp_path / "data.json").manifest.digest() == parts[7].manifest.digest()
    assert len(counted_stats) == 20_000


def test_names_of_files_may_be_any_bytes(tmp_path):
    path = tmp_path / b"a\xff.npy".decode(errors="surrogateescape")
    np.save(path, np.zeros((2, 3)))
    assert hs.open(path, axes="NC").manifest.digest()
