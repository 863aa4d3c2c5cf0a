import base64
import gzip
import struct
from typing import ClassVar

import numpy as np
import pytest
from fuzzing.tfrecords import example, field, framed, varint, write_records

import hyperslab.io
from hyperslab.errors import ConfigError, FormatError
from hyperslab.io.engine import crc32c
from hyperslab.io.engine.files import DataFile
from hyperslab.io.formats.tf_example import NotAnExample, decode_list, read_features
from hyperslab.io.formats.tfrecord import RecordFile, TFRecord, masked
from hyperslab.layout import Box
from hyperslab.testing import ReaderContract
from hyperslab.testing.specimens import read


class TestTFRecord(ReaderContract):
    format = "tfrecord"
    file_name = "array.tfrecord"
    ways: ClassVar = {"plain": {}, "gzip": {"gz": True}}
    is_checksummed = True

    def write(self, path, array, gz=False):
        return write_records(path, [{"x": one.tobytes()} for one in array], gz=gz)

    def options(self, array):
        return {"shape": {"x": array.shape[1:]}, "dtype": {"x": array.dtype}}


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 999, (3, 6, 5, 4, 2)).astype(np.int16)


def test_the_bytes_are_those_that_tensorflow_writes():
    # Written by TensorFlow; published with the tests of Apache Beam.
    assert framed(b"foo") == base64.b64decode("AwAAAAAAAACwmUkOZm9vYYq+/g==")
    assert masked(crc32c.crc32c(bytes(32))) == 0x0FD7FFFA
    assert masked(crc32c.crc32c(b"\xff" * 32)) == 0xF909B029


def test_the_checksum_without_the_library_is_the_same(monkeypatch):
    expected = crc32c.crc32c(b"some bytes"), crc32c.crc32c(b"bytes", crc32c.crc32c(b"some "))
    monkeypatch.setattr(crc32c, "_library", lambda: None)
    found = crc32c.crc32c(b"some bytes"), crc32c.crc32c(b"bytes", crc32c.crc32c(b"some "))
    assert found == expected
    assert found[0] == found[1]


def test_without_the_library_large_records_are_refused_or_read_unverified(monkeypatch, tmp_path):
    array = np.arange(60_000, dtype=np.int16)
    path = write_records(tmp_path / "a.tfrecord", [{"x": array.tobytes()}])
    monkeypatch.setattr(crc32c, "_library", lambda: None)
    options = {"shape": {"x": array.shape}, "dtype": {"x": "int16"}}
    with pytest.raises(ConfigError, match=r"hyperslab\[tfrecord\]"):
        read(TFRecord.open(path, ["x"], **options)[0])
    found = read(TFRecord.open(path, ["x"], **options, verify=False)[0])
    np.testing.assert_array_equal(found[0], array)


@pytest.mark.parametrize("gz", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_lists_of_numbers_need_neither_shape_nor_dtype(tmp_path, gz, packed):
    floats = np.random.default_rng(0).random((3, 4)).astype(np.float32)
    ints = np.array([[0, 1, -1], [2**63 - 1, -(2**63), 300], [5, 6, 7]])
    rows = [{"f": f, "i": i} for f, i in zip(floats, ints, strict=True)]
    path = write_records(tmp_path / "a.tfrecord", rows, packed=packed, gz=gz)
    assert TFRecord.names(path) == ["f", "i"]
    found = [read(reader) for reader in TFRecord.open(path, ["f", "i"])]
    np.testing.assert_array_equal(found[0], floats)
    np.testing.assert_array_equal(found[1], ints)
    assert [array.dtype for array in found] == [np.float32, np.int64]


def test_cosmoflow_records_open_by_their_preset(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 99, (2, 128, 128, 128, 4), np.int16)
    y = rng.random((2, 4)).astype(np.float32)
    for number, gz in enumerate([False, True]):  # as in version 0.7, and in 1.0
        row = {"x": x[number].tobytes(), "y": y[number]}
        data = framed(example(row))
        path = tmp_path / f"univ_{number:03}.tfrecord"
        path.write_bytes(gzip.compress(data, 1) if gz else data)
    monkeypatch.chdir(tmp_path)
    data = hyperslab.io.open("*.tfrecord", preset="cosmoflow-tfrecord")
    assert (len(data), data.shape, data.dtype) == (2, (4, 128, 128, 128), np.int16)
    box = (slice(1, 3), slice(64, 128), slice(0, 128), slice(5, 69))
    for number in range(2):
        np.testing.assert_array_equal(data.read(number, box), x[number].transpose(3, 0, 1, 2)[box])
        np.testing.assert_array_equal(data.read(number, array="y"), y[number])


def test_counting_samples_of_one_record_files_opens_none_of_them(tmp_path, images, monkeypatch):
    for number, image in enumerate(images):
        write_records(tmp_path / f"{number}.tfrecord", [{"x": image.tobytes()}], gz=True)

    def fail(*_):
        raise AssertionError("it was looked into")

    monkeypatch.setattr(RecordFile, "_all_extents", fail)
    options = {"shape": {"x": images.shape[1:]}, "dtype": {"x": "int16"}, "stacked": False}
    data = hyperslab.io.open(tmp_path / "*.tfrecord", sample="x", axes="DHWC", **options)
    assert len(data) == 3


def test_files_of_several_records_are_stacked(tmp_path, images):
    for number in range(2):
        rows = [{"x": image.tobytes()} for image in images]
        write_records(tmp_path / f"{number}.tfrecord", rows[: 2 + number])
    options = {"shape": {"x": images.shape[1:]}, "dtype": {"x": "int16"}}
    data = hyperslab.io.open(tmp_path / "*.tfrecord", axes="DHWC", **options)
    assert (len(data), data.shape) == (5, (2, 6, 5, 4))
    np.testing.assert_array_equal(data.read(4), images[2].transpose(3, 0, 1, 2))
    with pytest.raises(ConfigError, match=r"does not tell its dims: .* axes='NDHWC'") as raised:
        hyperslab.io.open(tmp_path / "*.tfrecord", **options)
    assert "one sample" not in str(raised.value)


def test_a_file_of_two_records_is_refused_where_one_was_expected(tmp_path, images):
    path = write_records(tmp_path / "a.tfrecord", [{"x": b"ab"}, {"x": b"cd"}])
    (reader,) = TFRecord.open(path, ["x"], shape=(2,), dtype="u1", stacked=False)
    with pytest.raises(FormatError, match=r"has 2 records.*stacked=True"):
        read(reader)


def test_a_string_of_bytes_without_shape_is_refused_with_what_to_give(tmp_path, images):
    path = write_records(tmp_path / "a.tfrecord", [{"x": images[0].tobytes()}])
    with pytest.raises(ConfigError, match=r"is 480 bytes .*: give its shape and dtype, such as"):
        TFRecord.open(path, ["x"])
    with pytest.raises(FormatError, match=r"has no feature 'z'; it has \['x'\]"):
        TFRecord.open(path, ["z"])
    with pytest.raises(ConfigError, match=r"is not one of numbers"):
        TFRecord.open(path, ["x"], shape=(6,), dtype="object")
    with pytest.raises(ConfigError, match=r"is not a tuple of extents"):
        TFRecord.open(path, ["x"], shape=(6, -1), dtype="i2")
    with pytest.raises(ConfigError, match=r"given for 2 arrays"):
        TFRecord.open(path, ["x", "y"], shape=(6,), dtype="i2")


def test_other_sizes_kinds_and_missing_features_are_named_by_record(tmp_path):
    rows = [{"x": b"abcd"}, {"x": b"abc"}, {"y": b"abcd"}, {"x": [b"ab", b"cd"]}, {"x": b"wxyz"}]
    rows.append({"x": np.ones(1, np.float32)})
    path = write_records(tmp_path / "a.tfrecord", rows)
    (reader,) = TFRecord.open(path, ["x"], shape=(2,), dtype="i2")
    expected = {
        1: "has 3 bytes, and int16 (2,) has 4",
        2: "is missing",
        3: "is several strings of bytes, and one was expected",
        5: "is a list of float32, and int16 was expected",
    }
    for number, words in expected.items():
        with pytest.raises(FormatError) as caught:
            read(reader, Box.of((number, number + 1), (0, 2)))
        assert f"record {number}" in str(caught.value)
        assert words in str(caught.value)
    assert read(reader, Box.of((4, 5), (0, 2))).tobytes() == b"wxyz"


@pytest.mark.parametrize("gz", [False, True], ids=["plain", "gzip"])
def test_a_flipped_bit_is_found_by_the_checksum_unless_told_not_to_look(tmp_path, gz):
    data = bytearray(framed(example({"x": bytes(5000)})))
    data[2000] ^= 4
    path = tmp_path / "a.tfrecord"
    path.write_bytes(gzip.compress(data) if gz else data)  # damaged before it was compressed
    options = {"shape": (5000,), "dtype": "u1"}
    with pytest.raises(FormatError, match=r"record 0 of .*damaged: its checksum"):
        read(TFRecord.open(path, ["x"], **options)[0], Box.of((0, 1), (0, 10)))
    found = read(TFRecord.open(path, ["x"], **options, verify=False)[0])
    assert np.count_nonzero(found) == 1


def test_a_record_is_verified_once_and_a_box_reads_only_its_bytes(tmp_path, monkeypatch):
    path = write_records(tmp_path / "a.tfrecord", [{"x": bytes(3 << 20)}])
    read_nbytes = []
    fill = DataFile.fill

    def counting(self, fd, buffer, offset):
        read_nbytes.append(len(buffer))
        fill(self, fd, buffer, offset)

    monkeypatch.setattr(DataFile, "fill", counting)
    (reader,) = TFRecord.open(path, ["x"], shape=(3 << 20,), dtype="u1")
    assert sum(read_nbytes) < 4096  # it hops from header to header
    read(reader, Box.of((0, 1), (0, 100_000)))
    assert sum(read_nbytes) > 3 << 20
    read_nbytes.clear()
    read(reader, Box.of((0, 1), (0, 100_000)))
    assert sum(read_nbytes) < 120_000


def test_a_plain_file_that_begins_like_gzip_is_read_as_it_is(tmp_path):
    length = int.from_bytes(b"\x1f\x8b\x08", "little")
    overhead = len(example({"x": bytes(length)})) - length
    path = write_records(tmp_path / "a.tfrecord", [{"x": bytes(length - overhead)}])
    assert path.read_bytes()[:3] == b"\x1f\x8b\x08"
    assert TFRecord.names(path) == ["x"]


def test_unknown_fields_and_the_order_of_key_and_value_do_not_matter():
    value = field(2, field(1, field(1, b"data")))
    entry = value + b"\x18\x07" + b"\x25" + bytes(4) + field(1, b"late")
    features = field(1, field(1, entry) + field(9, b"new") + b"\x51" + bytes(8))
    stream = _Memory(features + field(1, field(1, field(1, b"empty"))))
    found = read_features(stream, len(stream.data))
    assert found["late"].values is not None
    offset, nbytes = found["late"].values
    assert stream.data[offset : offset + nbytes] == b"data"
    assert found["empty"].kind == "empty"


def test_numbers_may_be_packed_in_several_runs_or_not_at_all():
    mixed = field(1, varint(5) + varint(-1)) + b"\x08" + varint(300) + field(1, varint(7))
    assert decode_list("int64", mixed).tolist() == [5, -1, 300, 7]
    floats = field(1, struct.pack("<2f", 1, 2)) + b"\x0d" + struct.pack("<f", 3)
    assert decode_list("float", floats).tolist() == [1, 2, 3]
    assert decode_list("float", b"").shape == decode_list("int64", b"").shape == (0,)
    tricky = b"\x08\x08\x08\x08" + field(1, varint(8))  # tags that look like values
    assert decode_list("int64", tricky).tolist() == [8, 8, 8]
    for damaged in (field(1, b"\xff"), field(1, b"\x80" * 11 + b"\0"), b"\x0d\0", b"\x0a\x05\0"):
        with pytest.raises(NotAnExample):
            decode_list("int64", damaged)


def test_a_record_that_is_no_example_is_refused_by_its_number(tmp_path):
    path = tmp_path / "a.tfrecord"
    for record in (b"foo", field(1, b"\xff" * 12), field(1, field(1, field(1, b"\xff")))):
        path.write_bytes(framed(record))
        with pytest.raises(FormatError, match="record 0 of"):
            TFRecord.names(path)


class _Memory:
    def __init__(self, data):
        self.data, self.position = data, 0

    def read(self, nbytes):
        self.position += nbytes
        return self.data[self.position - nbytes : self.position]

    def skip(self, nbytes):
        self.position += nbytes
