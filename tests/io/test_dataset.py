import os

import h5py
import numpy as np
import pytest

import hyperslab as hs
from hyperslab.io import PRESETS, ArrayReader, Format, Storage, register_format

SHAPE = (5, 6, 7, 2)


@pytest.fixture
def folder(tmp_path):
    """Three files, each with an image (channels last), its label map and a vector."""
    for index in range(3):
        with h5py.File(tmp_path / f"{index}.h5", "w") as file:
            image = np.arange(np.prod(SHAPE)).reshape(SHAPE) + 1000 * index
            file["image"] = image.astype(np.int16)
            file["label"] = (image[..., 0] % 4).astype(np.uint8)
            file["vector"] = np.arange(3, dtype=np.float32) + index
    return tmp_path


def test_samples_come_channels_first_and_targets_as_they_are(folder):
    data = hs.open(f"{folder}/*.h5", sample="image", target=["label", "vector"], axes="DHWC")
    assert len(data) == 3
    assert data.shape == (2, 5, 6, 7)
    assert data.dtype == np.int16
    assert [spec.is_cut for spec in data.arrays.values()] == [True, True, False]
    box = (slice(1, 2), slice(0, 3), slice(2, 5), slice(None))
    whole = np.moveaxis(np.arange(np.prod(SHAPE)).reshape(SHAPE) + 2000, -1, 0)
    np.testing.assert_array_equal(data.read(2, box), whole[box])
    np.testing.assert_array_equal(data.read(-1, box), whole[box])
    label = data.read(2, box[1:], array="label")
    np.testing.assert_array_equal(label, whole[0][box[1:]] % 4)
    np.testing.assert_array_equal(data.read(1, array="vector"), [1, 2, 3])
    out = np.empty((1, 3, 3, 7), np.int16)
    assert data.read(2, box, out=out) is out
    np.testing.assert_array_equal(out, whole[box])


def test_many_samples_may_lie_in_each_of_several_files(tmp_path):
    images = np.arange(5 * 3 * 4 * 4, dtype=np.float32).reshape(5, 3, 4, 4)
    for name, part in (("a", images[:2]), ("b", images[2:])):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["data"], file["label"] = part, part[:, 0, 0, 0].astype(np.int32)
    data = hs.open(tmp_path / "*.h5", sample="data", target="label", axes="NCHW")
    assert len(data) == 5
    for index in range(5):
        np.testing.assert_array_equal(data.read(index), images[index])
        assert data.read(index, array="label") == images[index, 0, 0, 0]


def test_presets_name_what_is_opened(tmp_path):
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file["climate/data"] = np.zeros((16, 4, 6), np.float32)
        file["climate/labels"] = np.zeros((4, 6), np.uint8)
        file["climate/stats"] = np.zeros((16, 4), np.float32)
    data = hs.open(tmp_path / "c.h5", preset="climate")
    assert list(data.arrays) == ["climate/data", "climate/labels", "climate/stats"]
    assert data.arrays["climate/labels"].is_cut
    assert data.stats == "climate/stats"
    assert set(PRESETS) >= {"cosmoflow", "cosmoflow-tfrecord", "hepcnn", "climate"}


def test_files_of_targets_may_lie_beside_those_of_samples(tmp_path):
    for index in range(3):
        np.save(tmp_path / f"image{index}.npy", np.full((4, 5, 6), index, np.float32))
        np.save(tmp_path / f"label{index}.npy", np.full((4, 5, 6), 10 + index, np.uint8))
    labels = hs.open(tmp_path / "label*.npy", axes="DHW")
    data = hs.open(tmp_path / "image*.npy", axes="DHW").beside(label=labels)
    part = data.take([2, 0])
    assert data.arrays["label"].is_cut
    assert part.read(0, array="label")[0, 0, 0] == 12
    with hs.Loader(part, shuffle="none", batch_size=2) as loader:
        [(image, label)] = loader.numpy()
    assert image[:, 0, 0, 0].tolist() == [2, 0]
    assert label[:, 0, 0, 0].tolist() == [12, 10]
    with pytest.raises(hs.ConfigError, match="an array 'label' already"):
        data.beside(label=labels)


def test_parts_of_a_dataset_share_its_files(folder):
    data = hs.open(folder / "*.h5", sample="image", axes="DHWC")
    parts = data.split(train=[0, 2], test=1.0)
    assert [len(part) for part in parts.values()] == [2, 1]
    np.testing.assert_array_equal(parts["train"].read(1), data.read(2))
    np.testing.assert_array_equal(parts["test"].read(0), data.read(1))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, r"has 3 arrays \(image, label, vector\): say which holds the sample"),
        ({"sample": "images"}, "images"),
        ({"sample": "image", "axes": "DH"}, "axes 'DH' name 2 dims, but array 'image'"),
        ({"sample": "image", "axes": {"other": "DHWC"}}, r"axes are given for \['other'\]"),
        ({"sample": "image", "target": "image"}, "named twice"),
        ({"preset": "nothing"}, "no preset 'nothing': known are cosmoflow"),
        ({"sample": "image", "format": "tiff"}, "no format 'tiff': known are hdf5"),
        ({"sample": "image", "colour": "red"}, r"cannot be opened with options \['colour'\]"),
    ],
)
def test_what_cannot_be_opened_is_told_in_a_line(arguments, words, folder):
    with pytest.raises(hs.HyperslabError, match=words) as raised:
        hs.open(folder / "*.h5", **arguments)
    assert "\n" not in str(raised.value)


AMBIGUOUS = {
    (9,): ["axes='W' (one sample of 9)", "axes='C' (one sample of 9 channels)"],
    (8, 9): ["axes='HW' (one sample of 8x9)", "axes='NC' (8 samples of 9 channels)"],
    (3, 8, 9): [
        "axes='CHW' (one sample of 3 channels of 8x9)",
        "axes='HWC' (one sample of 9 channels of 3x8)",
        "axes='DHW' (one sample of 3x8x9)",
        "axes='NHW' (3 samples of 8x9)",
    ],
    (40, 16, 16, 16): [
        "axes='CDHW' (one sample of 40 channels of 16x16x16)",
        "axes='NDHW' (40 samples of 16x16x16)",
        "axes='NHWC' (40 samples of 16 channels of 16x16)",
    ],
    (2, 3, 4, 5, 6): [
        "axes='NCDHW' (2 samples of 3 channels of 4x5x6)",
        "axes='NDHWC' (2 samples of 6 channels of 3x4x5)",
    ],
    (2, 3, 4, 5, 6, 7): ["samples have one to four, of C, D, H and W, each once"],
    (): ["samples have one to four"],
}


@pytest.mark.parametrize("shape", AMBIGUOUS, ids=str)
def test_dims_are_asked_for_with_what_they_may_be(shape, tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(shape))
    with pytest.raises(hs.ConfigError, match="does not tell its dims") as raised:
        hs.open(tmp_path / "a.npy")
    assert f"a.npy has shape {shape}" in str(raised.value)
    assert "\n" not in str(raised.value)
    for words in AMBIGUOUS[shape]:
        assert words in str(raised.value)


def test_a_letter_that_is_missing_does_not_mean_many_samples(folder):
    with pytest.raises(hs.ConfigError, match=r"name 3 dims, .* has 4: .* 'NDHW' if its first dim"):
        hs.open(folder / "*.h5", sample="image", axes="DHW")
    axes = {"image": "DHWC", "label": "HW"}
    with pytest.raises(hs.ConfigError, match=r"axes 'HW' name 2 dims, but array 'label' .* has 3"):
        hs.open(folder / "*.h5", sample="image", target="label", axes=axes)


def test_files_that_are_not_there_are_named(tmp_path):
    with pytest.raises(hs.FormatError, match=r"no file fits '.*nothing/\*\.h5'"):
        hs.open(tmp_path / "nothing" / "*.h5")
    with pytest.raises(hs.FormatError, match=r"gone\.h5 does not exist"):
        hs.open(tmp_path / "gone.h5")
    with pytest.raises(hs.ConfigError, match="no files were given"):
        hs.open([])
    with pytest.raises(hs.FormatError, match="has no files of a known format: name those"):
        hs.open(tmp_path)
    with pytest.raises(hs.FormatError, match="no suffix that tells its format"):
        hs.open(tmp_path / "image.tiff")


def test_a_file_unlike_the_first_is_named_with_its_sample(folder):
    with h5py.File(folder / "1.h5", "w") as file:
        file["image"] = np.zeros((5, 6, 8, 2), np.int16)
    data = hs.open(folder / "*.h5", sample="image", axes="DHWC")
    data.read(0)
    words = r"sample 1, array 'image': .*1\.h5 has int16 \(5, 6, 8, 2\) as 'image', but samples of"
    with pytest.raises(hs.FormatError, match=words):
        data.read(1)


def test_a_file_that_changes_is_not_read_on(folder):
    data = hs.open(folder / "*.h5", sample="image", axes="DHWC")
    data.read(0)
    path = folder / "0.h5"
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(hs.FormatError, match=r"0\.h5 has changed since it was opened"):
        data.read(0)


def test_files_stay_the_same_wherever_the_process_goes(folder, monkeypatch):
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder)
    data = hs.open("*.h5", sample="image", axes="DHWC")
    monkeypatch.chdir(folder / "elsewhere")
    assert data.read(1)[0, 0, 0, 0] == 1000


def test_a_number_beside_many_samples_is_no_target(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = np.zeros((3, 1, 4, 4)), 5
    with pytest.raises(hs.ConfigError, match="does not hold as many samples as array 'x'"):
        hs.open(tmp_path / "a.h5", sample="x", target="y", axes="NCHW")


@pytest.mark.parametrize(
    "arguments",
    [
        {"paths": None},
        {"paths": 5},
        {"paths": ""},
        {"paths": "a\0b.h5"},
        {"paths": [["a.h5"]]},
        {"axes": ["C", "D", "H", "W"]},
        {"axes": 5},
        {"target": 5},
        {"target": [5]},
        {"sample": b"image"},
    ],
    ids=str,
)
def test_arguments_of_another_kind_are_refused(arguments, folder):
    given = {"paths": folder / "*.h5", "sample": "image", **arguments}
    with pytest.raises(hs.ConfigError):
        hs.open(given.pop("paths"), **given)


@pytest.mark.parametrize("index", [3, -4, 1.5, "1", None])
def test_samples_that_are_not_there_are_refused(index, folder):
    data = hs.open(folder / "*.h5", sample="image", axes="DHWC")
    with pytest.raises(hs.ConfigError):
        data.read(index)


@pytest.mark.parametrize(
    "box",
    [
        (slice(0, 1),),
        slice(0, 1),
        (slice(0, 9), slice(0, 1), slice(0, 1), slice(0, 1)),
        (slice(0, 2, 2), slice(0, 1), slice(0, 1), slice(0, 1)),
        (0, slice(0, 1), slice(0, 1), slice(0, 1)),
        (slice(0.5, 1), slice(0, 1), slice(0, 1), slice(0, 1)),
    ],
)
def test_boxes_that_do_not_fit_are_refused(box, folder):
    data = hs.open(folder / "*.h5", sample="image", axes="DHWC")
    with pytest.raises(hs.LayoutError, match="box"):
        data.read(0, box)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (np.empty((2, 5, 6, 7), np.int32), r"out is int32 \(2, 5, 6, 7\)"),
        (np.empty((2, 5, 6, 6), np.int16), r"out is int16 \(2, 5, 6, 6\)"),
        (np.broadcast_to(np.int16(0), (2, 5, 6, 7)), "cannot be written to"),
        ([1, 2], "out must be a NumPy array, got list"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(out, words, folder):
    data = hs.open(folder / "*.h5", sample="image", axes="DHWC")
    with pytest.raises(hs.LayoutError, match=words):
        data.read(0, None, out=out)


def test_a_format_is_one_class_and_one_registration(tmp_path):
    class Text(ArrayReader):
        axes = "HW"

        def __init__(self, path):
            self.values = np.loadtxt(path)
            self.shape, self.dtype = self.values.shape, self.values.dtype

        def read(self, box, out):
            out[...] = self.values[tuple(slice(*span) for span in box.spans)]

        def storage(self):
            return Storage(kind="text", nbytes=1)

    class TextFormat(Format):
        suffixes = (".table",)

        @classmethod
        def names(cls, path):
            return ["values"]

        @classmethod
        def open(cls, path, names):
            return [Text(path)]

    register_format("table", TextFormat)
    np.savetxt(tmp_path / "a.table", np.eye(3))
    data = hs.open(tmp_path / "a.table")
    assert data.read(0, (slice(1, 2), slice(0, 2))).tolist() == [[0, 1]]
