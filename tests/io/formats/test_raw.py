from typing import ClassVar

import numpy as np
import pytest

import hyperslab as hs
from hyperslab.errors import ConfigError, FormatError
from hyperslab.io.formats.raw import Raw
from hyperslab.testing import ReaderContract
from hyperslab.testing.specimens import numbered, read


class TestRaw(ReaderContract):
    format = "raw"
    file_name = "array.raw"
    dtypes = ("uint8", "int16", "bool", "float64")

    def write(self, path, array):
        array.tofile(path)
        return path

    def options(self, array):
        return {"dtype": array.dtype.str, "shape": array.shape}


class TestBigEndianFortranAfterAHeader(ReaderContract):
    format = "raw"
    file_name = "array.bin"
    dtypes: ClassVar = ("int16", "float32")

    def write(self, path, array):
        stored = array.astype(array.dtype.newbyteorder(">"))
        path.write_bytes(b"header" + stored.tobytes("F"))
        return path

    def options(self, array):
        dtype = array.dtype.newbyteorder(">").str
        return {"dtype": dtype, "shape": array.shape, "offset": 6, "order": "F"}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "array.raw"
    numbered((6, 5, 4), "int16").tofile(path)
    return path


def test_the_first_extent_may_be_read_off_the_file(path):
    (reader,) = Raw.open(path, ["data"], dtype="int16", shape=(-1, 5, 4))
    np.testing.assert_array_equal(read(reader), numbered((6, 5, 4), "int16"))
    (reader,) = Raw.open(path, ["data"], dtype="int16", shape=-1, offset=20)
    assert reader.shape == (110,)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((6, 5, 5), r"has 240 bytes .* has 300: 60 are missing"),
        ((6, 5, 3), r"has 240 bytes .* has 180: 60 too many"),
        ((-1, 7), r"240 bytes .* no whole number of items of int16 \(7,\) \(14 bytes each\)"),
        ((-1, 0), "no whole number"),
    ],
)
def test_a_file_of_another_size_is_refused_with_numbers(path, shape, words):
    with pytest.raises(FormatError, match=words):
        Raw.open(path, ["data"], dtype="int16", shape=shape)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int17"}, "dtype 'int17' is not known"),
        ({"shape": (6, -1, 4)}, "only the first may be -1"),
        ({"shape": (-2, 5, 4)}, "only the first may be -1"),
        ({"shape": ("a",)}, "not made of whole numbers"),
        ({"shape": 2.5}, "not made of whole numbers"),
        ({"offset": -1}, "offset must not be negative"),
        ({"offset": "12"}, "offset '12' is not made of whole numbers"),
        ({"order": "A"}, "order 'A' is not known"),
        ({"dtype": "O"}, "Python objects"),
    ],
)
def test_options_that_cannot_be_are_refused(path, options, words):
    given = {"dtype": "int16", "shape": (6, 5, 4), **options}
    with pytest.raises((ConfigError, FormatError), match=words):
        Raw.open(path, ["data"], **given)


def test_without_options_the_user_is_told_what_is_needed(path):
    with pytest.raises(ConfigError, match="'dtype' and 'shape'"):
        hs.open(path)


def test_samples_of_a_dataset(path):
    data = hs.open(path, dtype="int16", shape=(-1, 5, 4), axes="NHW")
    assert len(data) == 6
    np.testing.assert_array_equal(data.read(-1), numbered((6, 5, 4), "int16")[5])
