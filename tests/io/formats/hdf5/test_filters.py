import random
import sys
import zlib

import numpy as np
import pytest

from hyperslab.errors import FormatError
from hyperslab.io.engine.chunked import BlockReader
from hyperslab.io.formats.hdf5 import codecs
from hyperslab.io.formats.hdf5.filters import (
    FilterSpec,
    Pipeline,
    UnknownFilter,
    checked,
    unshuffled,
)
from hyperslab.testing.specimens import damaged, numbered

GZIP = FilterSpec(1, (4,), "deflate")


@pytest.mark.parametrize("itemsize", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("rest", [0, 1, 3])
def test_shuffled_bytes_are_put_together_again(itemsize, rest):
    items = numbered((50, itemsize), "uint8")
    tail = np.arange(rest % itemsize, dtype=np.uint8)
    stored = np.concatenate([items.T.reshape(-1), tail])
    found = unshuffled(stored, stored.size, itemsize)
    np.testing.assert_array_equal(found, np.concatenate([items.reshape(-1), tail]))


def fletcher32(data):
    """As its definition has it: sums of big-endian words modulo 65535, an odd byte padded."""
    first = second = 0
    for place in range(0, len(data), 2):
        first = (first + int.from_bytes(data[place : place + 2].ljust(2, b"\0"), "big")) % 65535
        second = (second + first) % 65535
    return second << 16 | first


@pytest.mark.parametrize("size", [1, 2, 7, 721, 5000])
@pytest.mark.parametrize("is_old", [False, True])
def test_a_checksum_is_checked(size, is_old):
    data = random.Random(size).randbytes(size)
    stored = fletcher32(data).to_bytes(4, "little")
    if is_old:  # HDF5 1.6.2 swapped the bytes of each half
        stored = stored[1::-1] + stored[:1:-1]
    whole = np.frombuffer(data + stored, np.uint8)
    np.testing.assert_array_equal(checked(whole, size), whole[:-4])
    bad = whole.copy()
    bad[size // 2] ^= 4
    with pytest.raises(FormatError, match="Fletcher32 checksum is"):
        checked(bad, size)


def test_gzip_data_is_refused_where_zlib_refuses_it():
    data = numbered((4000,), "int16").tobytes()
    good = zlib.compress(data)
    pipeline = Pipeline([GZIP], len(data))
    for seed in range(300):
        bad = damaged(good, random.Random(seed))
        try:
            expected = zlib.decompress(bad)
        except zlib.error:
            expected = b""
        try:
            found = pipeline.undo(memoryview(bad), 0).tobytes()
        except FormatError:
            assert len(expected) != len(data)
        else:
            assert found == expected


def test_a_bomb_is_not_inflated():
    bomb = zlib.compress(bytes(50_000_000))
    with pytest.raises(FormatError, match="damaged, or is not 1000 bytes long"):
        Pipeline([GZIP], 1000).undo(memoryview(bomb), 0)


def test_without_libdeflate_zlib_inflates(monkeypatch):
    from hyperslab.io.formats.hdf5 import filters

    data = numbered((400,), "int16").tobytes()
    filters._inflate.cache_clear()
    monkeypatch.setitem(sys.modules, "deflate", None)
    stored = zlib.compress(data)
    assert Pipeline([GZIP], len(data)).undo(memoryview(stored), 0).tobytes() == data
    with pytest.raises(FormatError, match="holds more than the 1000 bytes due"):
        Pipeline([GZIP], 1000).undo(memoryview(zlib.compress(bytes(50_000_000))), 0)
    assert filters._inflate() is filters._inflate_by_zlib
    filters._inflate.cache_clear()


@pytest.mark.parametrize(
    "filters",
    [
        [FilterSpec(32013, (1,), "zfp")],
        [GZIP, FilterSpec(307, (9,), "bzip2")],
        [FilterSpec(2, (), "shuffle")],
        [FilterSpec(32008, (0, 4, 2, 0, 9), "bitshuffle")],
        [FilterSpec(65000, (), "")],
    ],
    ids=["zfp", "two compressors", "no size", "unknown compression", "no name"],
)
def test_a_pipeline_that_cannot_be_undone_is_told(filters):
    with pytest.raises(UnknownFilter):
        Pipeline(filters, 100)


def test_a_missing_package_makes_its_filters_unknown(monkeypatch):
    monkeypatch.setattr(codecs, "find_spec", lambda name: None)
    codecs.plugin.cache_clear()
    with pytest.raises(UnknownFilter, match=r"lz4 .*hdf5plugin is not installed"):
        Pipeline([FilterSpec(32004, (0,), "lz4")], 100)
    codecs.plugin.cache_clear()


def decoded(pipeline, stored, nbytes=80):
    found = pipeline.undo(memoryview(stored), 0)
    if isinstance(found, BlockReader):
        out = np.zeros(nbytes, np.uint8)
        found.decode([(0, nbytes)], out)
        return out
    return found


LENGTHS = (b"\0" * 8, b"\xff" * 8, (80).to_bytes(8, "big"))


@pytest.mark.parametrize("code", [32000, 32001, 32004, 32008, 32015, 307, 1])
@pytest.mark.parametrize("size", [0, 1, 11, 12, 15, 16, 17, 100])
def test_rubbish_is_refused(code, size):
    dice = random.Random(size)
    values = (0, 4, 2, 0, 2) if code == 32008 else (1,)
    pipeline = Pipeline([FilterSpec(code, values, "")], 80)
    for start in LENGTHS:
        rubbish = (start + dice.randbytes(100))[:size]
        with pytest.raises(FormatError):
            decoded(pipeline, rubbish)


def test_a_filter_that_a_chunk_skipped_leaves_the_others_to_be_undone():
    data = numbered((40, 4), "uint8")
    shuffled = np.ascontiguousarray(data.T).reshape(-1)
    pipeline = Pipeline([FilterSpec(2, (4,), "shuffle"), GZIP], data.size)
    for skipped, stored in [(0b10, shuffled.tobytes()), (0b01, zlib.compress(data.tobytes()))]:
        found = np.asarray(pipeline.undo(memoryview(stored), skipped))
        np.testing.assert_array_equal(found, data.reshape(-1))
