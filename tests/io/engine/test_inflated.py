import gzip
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hyperslab.errors import FormatError
from hyperslab.io.engine import inflated as module
from hyperslab.io.engine.files import DataFile
from hyperslab.io.engine.inflated import InflatedFile, inflated


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(module, "PIECE_NBYTES", 1000)
    monkeypatch.setattr(module, "INPUT_NBYTES", 100)
    monkeypatch.setattr(module, "FIRST_SPACING", 3000)
    monkeypatch.setattr(module, "MAX_MARKS", 7)


@pytest.fixture(params=["zlib_ng", "zlib"])
def library(request, monkeypatch):
    found = zlib if request.param == "zlib" else pytest.importorskip("zlib_ng.zlib_ng")
    monkeypatch.setattr(module, "_library", lambda: found)


def content(nbytes=100_000):
    return np.random.default_rng(0).integers(0, 7, nbytes).astype(np.uint8).tobytes()


def in_file(tmp_path, data):
    path = tmp_path / "a.gz"
    path.write_bytes(data)
    return InflatedFile(DataFile.look_at(path))


def piece(file, start, nbytes):
    with file.opened(start) as stream:
        return stream.read(nbytes)


def test_any_range_is_read_in_any_order(tmp_path, library):
    data = content()
    file = in_file(tmp_path, gzip.compress(data))

    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, len(data)), st.integers(0, 20_000))
    def check(start, nbytes):
        nbytes = min(nbytes, len(data) - start)
        assert piece(file, start, nbytes) == data[start : start + nbytes]

    check()
    assert 1 < len(file._marks) <= 7


def test_a_second_read_begins_at_a_mark(tmp_path, library, monkeypatch):
    data = content()
    file = in_file(tmp_path, gzip.compress(data))
    piece(file, 0, 1)
    with file.opened(90_000) as stream:
        assert stream._file_position < file.file.size
        starts = [mark.position for mark in file._marks if mark.position <= 90_000]
        assert starts[-1] > 60_000
        assert stream.read(10) == data[90_000:90_010]


def test_many_threads_read_at_once(tmp_path, library):
    data = content()
    file = in_file(tmp_path, gzip.compress(data))
    starts = range(0, 99_000, 1_777)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda start: piece(file, start, 1000), starts))
    assert found == [data[start : start + 1000] for start in starts]


def test_members_in_a_row_and_zeros_at_the_end_are_one_content(tmp_path, library):
    data = content()
    parts = [data[start : start + 9_999] for start in range(0, len(data), 9_999)]
    for padding in (0, 1, 512):
        packed = b"".join(gzip.compress(part) for part in parts) + bytes(padding)
        file = in_file(tmp_path, packed)
        assert piece(file, 0, len(data)) == data
        assert piece(file, 77_777, 500) == data[77_777:78_277]


@pytest.mark.parametrize("where", [-1, -5, 5_000, 12_000])
def test_damage_anywhere_is_found_by_the_first_read_of_anything(tmp_path, library, where):
    packed = bytearray(gzip.compress(content()))
    packed[where] ^= 1
    file = in_file(tmp_path, packed)
    for _ in range(2):
        with pytest.raises(FormatError, match=r"a\.gz is (damaged|truncated)"):
            piece(file, 0, 10)


def test_a_file_that_breaks_off_or_goes_on_with_something_else_is_refused(tmp_path, library):
    packed = gzip.compress(content())
    for cut in (1, 8, 100, len(packed) - 3):
        with pytest.raises(FormatError, match="breaks off"):
            piece(in_file(tmp_path, packed[:-cut]), 0, 0)
    with pytest.raises(FormatError, match="damaged"):
        piece(in_file(tmp_path, packed + b"something else"), 0, 10)


def test_reading_beyond_the_end_is_refused(tmp_path, library):
    with pytest.raises(FormatError, match="inflates to 100000 bytes, and bytes up to 100010"):
        piece(in_file(tmp_path, gzip.compress(content())), 99_990, 20)


def test_a_small_file_that_inflates_to_a_huge_one_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.undo()
    file = in_file(tmp_path, gzip.compress(bytes(200 << 20), 9))
    with file.opened(150 << 20) as stream:
        seen = []
        stream.watch = lambda piece: seen.append(len(piece))
        assert stream.read(10) == bytes(10)
    assert max(seen) <= module.PIECE_NBYTES
    assert len(file._marks) <= module.MAX_MARKS


def test_readers_of_one_file_share_its_inside_and_a_new_file_has_a_new_one(tmp_path):
    file = in_file(tmp_path, gzip.compress(b"one")).file
    assert inflated(file) is inflated(DataFile.look_at(file.path))
    file.path.write_bytes(gzip.compress(b"other"))
    assert inflated(file) is not inflated(DataFile.look_at(file.path))
