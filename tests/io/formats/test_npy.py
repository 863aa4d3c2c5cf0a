import os
from typing import ClassVar

import numpy as np
import pytest

import hyperslab as hs
from hyperslab.errors import FormatError
from hyperslab.io.formats.npy import Npy
from hyperslab.testing import ReaderContract
from hyperslab.testing.specimens import numbered, read


class TestNpy(ReaderContract):
    format = "npy"
    file_name = "array.npy"
    dtypes = ("uint8", "int16", "bool", "float16", "float32", "int64", "complex64")
    ways: ClassVar = {
        "little-endian": {},
        "big-endian": {"order": ">"},
        "fortran": {"fortran": True},
        "big-endian-fortran": {"order": ">", "fortran": True},
    }

    def write(self, path, array, *, order="<", fortran=False):
        stored = array.astype(array.dtype.newbyteorder(order))
        np.save(path, np.asfortranarray(stored) if fortran else stored)
        return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "array.npy"


def saved(path, array, version=None):
    with path.open("wb") as stream:
        np.lib.format.write_array(stream, array, version)
    return path


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_is_read(path, version):
    array = numbered((4, 5, 6), "float32")
    (reader,) = Npy.open(saved(path, array, version), ["data"])
    np.testing.assert_array_equal(read(reader), array)


def test_a_version_of_the_future_is_refused(path):
    content = saved(path, numbered((3,), "int16")).read_bytes()
    path.write_bytes(content[:6] + bytes([4, 0]) + content[8:])
    with pytest.raises(FormatError, match=r"array\.npy is of \.npy version \(4, 0\)"):
        Npy.open(path, ["data"])


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([1, "a", None], object), "Python objects"),
        (np.zeros(3, [("mass", "f4"), ("größe", "i2")]), "records"),
        (np.zeros(3, "V2"), "raw bytes"),
        (np.array(["text"]), "no numbers"),
        (np.zeros(3, "M8[s]"), "no numbers"),
    ],
    ids=["objects", "records", "bytes", "text", "dates"],
)
@pytest.mark.filterwarnings("ignore:Stored array in format 3.0")
def test_what_is_no_array_of_numbers_is_refused(path, array, words):
    np.save(path, array)
    with pytest.raises(FormatError, match=rf"array\.npy holds .*{words}"):
        Npy.open(path, ["data"])


def test_nothing_in_a_header_is_executed(path):
    header = b"{'descr': '<i2', 'fortran_order': False, 'shape': (__import__('os').getpid(),)}"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64))
    with pytest.raises(FormatError, match="header is damaged"):
        Npy.open(path, ["data"])


@pytest.mark.parametrize(
    "inner", [b"(" * 9000, b"[" * 200 + b"]" * 200, b"'\\x'", b"{[]: 1}", b"\0"]
)
def test_strange_headers_are_refused(path, inner):
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(inner).to_bytes(2, "little") + inner + bytes(64))
    with pytest.raises(FormatError, match="header is damaged"):
        Npy.open(path, ["data"])


def test_a_damaged_length_of_the_header_does_not_read_the_whole_file(path):
    path.write_bytes(b"\x93NUMPY\x02\x00" + (3 << 30).to_bytes(4, "little"))
    os.truncate(path, 4 << 30)  # a hole: takes no disk
    with pytest.raises(FormatError, match="header is damaged: EOF"):
        Npy.open(path, ["data"])


@pytest.mark.parametrize("shape", ["(-1, 4)", "(10**30,)".replace("10**30", "1" + "0" * 30)])
def test_impossible_shapes_are_refused(path, shape):
    header = f"{{'descr': '<i2', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64))
    with pytest.raises(FormatError, match=r"damaged|truncated"):
        Npy.open(path, ["data"])


def test_what_follows_the_array_is_mentioned(path):
    np.save(path, numbered((3, 4), "int16"))
    (reader,) = Npy.open(path, ["data"])
    assert reader.storage().note is None
    with path.open("ab") as stream:
        np.save(stream, numbered((3, 4), "int16"))
    (reader,) = Npy.open(path, ["data"])
    assert reader.storage().note == "152 bytes follow the array"
    np.testing.assert_array_equal(read(reader), numbered((3, 4), "int16"))


def test_many_samples_in_one_file(path):
    array = numbered((7, 6, 5, 2), ">i2")
    np.save(path, np.asfortranarray(array))
    data = hs.open(path, axes="NHWC")
    assert len(data) == 7
    assert data.shape == (2, 6, 5)
    box = (slice(0, 2), slice(1, 4), slice(2, 5))
    np.testing.assert_array_equal(data.read(3, box), array[3].transpose(2, 0, 1)[box])
