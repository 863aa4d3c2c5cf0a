import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hyperslab.errors import FormatError
from hyperslab.io.engine import box_copy, read_ahead
from hyperslab.io.engine.buffers import empty_aligned
from hyperslab.io.engine.contiguous import ContiguousArray
from hyperslab.io.engine.files import DataFile
from hyperslab.io.engine.threads import limited_to
from hyperslab.layout import Box
from hyperslab.testing.specimens import boxes, buffers, numbered, random_boxes, read, slices


def stored(path, array, offset=0, fortran=False):
    order = "F" if fortran else "C"
    path.write_bytes(b"#" * offset + array.tobytes(order))
    file = DataFile.look_at(path)
    return ContiguousArray(file, offset, array.shape, array.dtype, fortran=fortran)


@pytest.fixture
def small_limits(monkeypatch):
    """Limits at which small arrays take every path of large ones."""

    def scratch():
        return np.empty(box_copy.SCRATCH_NBYTES + 2 * mmap.PAGESIZE, np.uint8)

    def set_limits(direct, gap, scratch_nbytes, piece):
        monkeypatch.setattr(box_copy, "DIRECT_NBYTES", direct)
        monkeypatch.setattr(box_copy, "GAP_NBYTES", gap)
        monkeypatch.setattr(read_ahead, "GAP_NBYTES", gap)
        monkeypatch.setattr(box_copy, "SCRATCH_NBYTES", scratch_nbytes)
        monkeypatch.setattr(box_copy, "PIECE_NBYTES", piece)
        monkeypatch.setattr(box_copy, "LONE_PIECE_NBYTES", piece)
        monkeypatch.setattr(box_copy, "_scratch", scratch)
        box_copy._loops.cache_clear()

    yield set_limits
    box_copy._loops.cache_clear()


@pytest.mark.parametrize("dtype", ["<i2", ">i2", "u1", ">f8", "<c8"])
@pytest.mark.parametrize("fortran", [False, True], ids=["C", "F"])
def test_any_box_by_every_path(tmp_path, small_limits, dtype, fortran):
    array = numbered((3, 5, 8, 6), dtype)

    @settings(max_examples=25, deadline=None)
    @given(st.data())
    def check(data):
        small_limits(
            direct=data.draw(st.sampled_from([1, 24, 200])),
            gap=data.draw(st.sampled_from([0, 40, 1000])),
            scratch_nbytes=data.draw(st.sampled_from([16, 100, 700, 1 << 16])),
            piece=data.draw(st.sampled_from([16, 1 << 16])),
        )
        reader = stored(tmp_path / "a.bin", array, data.draw(st.integers(0, 40)), fortran)
        box = data.draw(boxes(array.shape))
        out, _ = data.draw(buffers(box.shape, reader.dtype))
        reader.read(box, out)
        np.testing.assert_array_equal(out, array[slices(box)])

    check()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_a_single_number_is_an_array_too(tmp_path, shape):
    array = np.full(shape, 42, ">i4")
    assert read(stored(tmp_path / "a.bin", array, 3)) == array


def test_boxes_larger_than_the_scratch(tmp_path):
    array = numbered((6, 64, 130, 100), "int16")
    reader = stored(tmp_path / "a.bin", array, 2048)
    for box in random_boxes(array.shape, 10):
        np.testing.assert_array_equal(read(reader, box), array[slices(box)])
        backwards = np.zeros(box.shape[::-1], "int16").T
        reader.read(box, backwards)
        np.testing.assert_array_equal(backwards, array[slices(box)])


def test_a_buffer_is_filled_where_it_lies(tmp_path, monkeypatch):
    """Long runs take no way round by a scratch."""
    array = numbered((4, 64, 256), "int16")
    reader = stored(tmp_path / "a.bin", array)
    monkeypatch.setattr(box_copy, "_scratch", lambda: pytest.fail("copied twice"))
    box = Box.of((1, 3), (0, 64), (0, 256))
    out = empty_aligned((4, 64, 256), "int16")[::2]
    reader.read(box, out)
    np.testing.assert_array_equal(out, array[1:3])


def test_a_buffer_that_the_kernel_fills_slowly_is_filled_by_the_scratch(tmp_path, monkeypatch):
    array = numbered((64, 256), "int16")
    reader = stored(tmp_path / "a.bin", array)
    asked = []
    scratch = box_copy._scratch
    monkeypatch.setattr(box_copy, "_scratch", lambda: asked.append(1) or scratch())
    for shift, num_asked in ((0, 0), (2, 1), (30, 1), (32, 0), (4094, 0)):
        memory = empty_aligned((array.nbytes + mmap.PAGESIZE,), np.uint8)
        out = memory[shift : shift + array.nbytes].view("int16").reshape(array.shape)
        reader.read(Box.whole(array.shape), out)
        np.testing.assert_array_equal(out, array)
        assert len(asked) == num_asked, shift
        asked.clear()


def test_threads_share_a_reader(tmp_path):
    array = numbered((4, 50, 60, 70), ">i4")
    reader = stored(tmp_path / "a.bin", array, 5)
    wanted = random_boxes(array.shape, 60)
    with ThreadPoolExecutor(6) as threads:
        for box, found in zip(wanted, threads.map(lambda b: read(reader, b), wanted), strict=True):
            np.testing.assert_array_equal(found, array[slices(box)])


@pytest.fixture
def cold(monkeypatch):
    """Nothing is in memory, as it seems; gives the ranges that the kernel is told of."""
    told = []
    preadv = os.preadv

    def advise(fd, offset, nbytes, advice):
        if advice == os.POSIX_FADV_WILLNEED:
            told.append((offset, nbytes))

    def wait_for_disk(fd, buffers, offset, flags=0):
        if flags:
            raise BlockingIOError
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(os, "preadv", wait_for_disk)
    return told


@pytest.mark.parametrize("ahead", [1, 40_000, 1 << 20])
def test_data_that_is_not_in_memory_is_asked_for_ahead(tmp_path, monkeypatch, cold, ahead):
    monkeypatch.setattr(read_ahead, "AHEAD_NBYTES", ahead)
    array = numbered((4, 32, 4096), "int16")
    reader = stored(tmp_path / "a.bin", array)
    box = Box.of((0, 4), (5, 13), (0, 4096))
    np.testing.assert_array_equal(read(reader, box), array[:, 5:13])
    assert cold == [(plane * 32 * 8192 + 5 * 8192, 8 * 8192) for plane in range(4)]


ROWS = Box.of((0, 6), (1, 3), (0, 4096))
"""Runs of 16 KiB of an array of (6, 4, 4096) int16, with as much between them."""


@pytest.fixture
def calls(monkeypatch):
    """How many buffers each call was given that could be answered from memory."""
    found = []
    preadv = os.preadv

    def counted(fd, buffers, offset, flags=0):
        found.append(len(buffers))
        return preadv(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", counted)
    return found


@pytest.mark.parametrize("apart", [2, 3])
def test_runs_with_small_gaps_are_read_with_one_call(tmp_path, calls, apart):
    array = numbered((6, 4, 4096), "int16")
    reader = stored(tmp_path / "a.bin", array)
    out = empty_aligned((6, apart, 4096), "int16")[:, :2]
    reader.read(ROWS, out)
    np.testing.assert_array_equal(out, array[:, 1:3])
    assert calls == [11]  # six runs, and five gaps


def test_wide_gaps_are_not_read(tmp_path, calls):
    array = numbered((6, 5, 4096), "int16")
    reader = stored(tmp_path / "a.bin", array)
    out = empty_aligned(ROWS.shape, "int16")
    reader.read(ROWS, out)
    np.testing.assert_array_equal(out, array[:, 1:3])
    assert calls == [1] * 6


def test_runs_whose_gaps_are_not_in_memory_are_read_one_by_one(tmp_path, monkeypatch):
    array = numbered((600, 4, 4096), "int16")
    reader = stored(tmp_path / "a.bin", array)
    preadv, calls = os.preadv, []

    def until_first_gap(fd, buffers, offset, flags=0):
        calls.append(len(buffers))
        return preadv(fd, buffers[:1], offset, flags)

    monkeypatch.setattr(os, "preadv", until_first_gap)
    box = Box.of((0, 600), (1, 3), (0, 4096))
    out = empty_aligned(box.shape, "int16")
    with limited_to(1):
        reader.read(box, out)
    np.testing.assert_array_equal(out, array[:, 1:3])
    assert calls == [2 * read_ahead.MAX_ROWS - 1] + [1] * 600  # once is enough to know


def test_of_runs_with_small_gaps_the_disk_is_told_without_the_gaps(tmp_path, cold):
    array = numbered((6, 4, 4096), "int16")
    reader = stored(tmp_path / "a.bin", array)
    box = Box.of((0, 3), (1, 3), (0, 4096))
    out = empty_aligned(box.shape, "int16")
    reader.read(box, out)
    np.testing.assert_array_equal(out, array[:3, 1:3])
    assert cold == [(32768 * row + 8192, 16384) for row in range(3)]


def test_the_rest_of_an_array_is_left_to_the_kernel(tmp_path, cold):
    array = numbered((4, 32, 4096), "int16")
    reader = stored(tmp_path / "a.bin", array, 128)
    for box in (Box.whole(array.shape), Box.of((1, 4), (0, 32), (8, 4000))):
        np.testing.assert_array_equal(read(reader, box), array[slices(box)])
    assert not cold


def test_a_file_system_that_takes_no_advice_is_read_all_the_same(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EINVAL, "no advice")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    array = numbered((4, 32, 40), "int16")
    reader = stored(tmp_path / "a.bin", array)
    np.testing.assert_array_equal(read(reader, Box.of((0, 4), (5, 13), (0, 40))), array[:, 5:13])


def test_a_truncated_file_says_how_many_bytes_are_missing(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(100))
    with pytest.raises(FormatError, match=r"a\.bin is truncated: 39 bytes are missing"):
        ContiguousArray(DataFile.look_at(path), 19, (3, 10), "int32")


def test_a_damaged_place_or_shape_is_refused(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(100))
    for offset, shape in ((-8, (3,)), (0, (-3, 2)), (0, (-3, -2))):
        with pytest.raises(FormatError, match=r"a\.bin is damaged"):
            ContiguousArray(DataFile.look_at(path), offset, shape, "int16")


def test_a_file_cut_short_while_it_is_read_is_an_error_and_no_crash(tmp_path):
    array = numbered((64, 64, 64), "int32")
    path = tmp_path / "a.bin"
    reader = stored(path, array)
    assert read(reader, Box.of((0, 1), (0, 1), (0, 1))) == 0
    os.truncate(path, 1000)
    for box in (Box.whole(array.shape), Box.of((0, 64), (0, 64), (0, 5))):
        with pytest.raises(FormatError, match=r"a\.bin"):
            read(reader, box)


@pytest.mark.parametrize("missing", [1, 4, 5])
def test_a_file_that_is_a_little_too_short_is_refused(tmp_path, missing):
    array = numbered((3, 4), "<f4")
    path = tmp_path / "a.bin"
    path.write_bytes(array.tobytes()[:-missing])
    with pytest.raises(FormatError, match=f"{missing} bytes are missing"):
        ContiguousArray(DataFile.look_at(path), 0, array.shape, array.dtype)
