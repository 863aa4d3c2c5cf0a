"""The grid of chunks itself; the formats that have one test the rest."""

import itertools
import os
import zlib

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hyperslab.errors import FormatError
from hyperslab.io import Storage
from hyperslab.io.engine.chunked import Chunk, ChunkedArray
from hyperslab.io.engine.files import DataFile
from hyperslab.layout import Box
from hyperslab.testing.specimens import boxes, buffers, numbered, read, slices

STORAGE = Storage(kind="chunked", nbytes=1)


def inflate(stored, chunk):
    if chunk.mask:
        return stored
    try:
        return zlib.decompress(stored)
    except zlib.error as error:
        raise FormatError(f"bad zlib data: {error}") from error


def stored_array(
    path, array, chunk_shape, *, compressed, hole=None, decode=inflate, is_open=False, order=1
):
    """``array`` in one file, chunk after chunk, but for one that is left out.

    With ``is_open``, the file is opened once for all of a box; an ``order`` of -1 stores the last
    chunk first.
    """
    content, places = bytearray(b"head"), {}
    grid = [range(-(-n // c)) for n, c in zip(array.shape, chunk_shape, strict=True)]
    for number, place in enumerate(list(itertools.product(*grid))[::order]):
        chunk = np.zeros(chunk_shape, array.dtype)
        at = tuple(slice(p * c, (p + 1) * c) for p, c in zip(place, chunk_shape, strict=True))
        chunk[tuple(slice(0, n) for n in array[at].shape)] = array[at]
        mask = int(compressed and number % 3 == 1)
        data = zlib.compress(chunk.tobytes()) if compressed and not mask else chunk.tobytes()
        if place == hole:
            array[at] = 9
        else:
            places[place] = (len(content), len(data), mask)
            content += data
    path.write_bytes(content)
    file = DataFile.look_at(path)
    return ChunkedArray(
        shape=array.shape,
        dtype=array.dtype,
        chunk_shape=chunk_shape,
        find=lambda place: Chunk(file, *places[place]) if place in places else None,
        decode=decode if compressed else None,
        fill_value=9,
        storage=STORAGE,
        file=file if is_open else None,
    )


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dtype", ["<i2", ">f4", "bool", "<c16"])
@pytest.mark.parametrize(
    ("shape", "chunk_shape", "hole"),
    [
        ((7, 9, 20), (3, 4, 5), (1, 2, 0)),
        ((7, 9, 20), (8, 9, 32), None),
        ((9,), (1,), (4,)),
        ((6, 40), (2, 40), (0, 0)),
    ],
)
def test_any_box_of_any_grid(tmp_path, shape, chunk_shape, hole, dtype, compressed, is_open):
    array = numbered(shape, "uint8").astype(dtype)
    reader = stored_array(
        tmp_path / "a", array, chunk_shape, compressed=compressed, hole=hole, is_open=is_open
    )

    @settings(max_examples=12, deadline=None)
    @given(st.data())
    def check(data):
        box = data.draw(boxes(shape))
        out, _ = data.draw(buffers(box.shape, reader.dtype))
        reader.read(box, out)
        np.testing.assert_array_equal(out, array[slices(box)])

    check()


@pytest.mark.parametrize("compressed", [False, True])
def test_an_array_without_dims(tmp_path, compressed):
    array = np.array(7, ">i4")
    assert read(stored_array(tmp_path / "a", array, (), compressed=compressed)) == 7


@pytest.fixture
def reads(monkeypatch):
    """What is read of files, as (offset, nbytes)."""
    found, preadv = [], os.preadv

    def record(fd, buffers, offset, *flags):
        found.append((offset, sum(map(len, buffers))))
        return preadv(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", record)
    return found


def test_unfiltered_chunks_in_a_row_are_read_with_one_call(tmp_path, reads):
    array = numbered((4, 6, 20), "<i2")
    reader = stored_array(tmp_path / "a", array, (2, 3, 5), compressed=False, is_open=True)
    np.testing.assert_array_equal(read(reader), array)
    assert sorted(reads) == [(4 + 240 * row, 240) for row in range(4)]
    reads.clear()
    box = Box.of((0, 2), (0, 3), (5, 15))
    np.testing.assert_array_equal(read(reader, box), array[slices(box)])
    assert reads == [(64, 120)]


@pytest.mark.parametrize(
    ("how", "num_reads"), [({"order": -1}, 16), ({"hole": (1, 1, 2)}, 6), ({"hole": (0, 0, 0)}, 6)]
)
def test_unfiltered_chunks_that_do_not_lie_in_a_row(tmp_path, reads, how, num_reads):
    array = numbered((4, 6, 20), "<i2")
    reader = stored_array(tmp_path / "a", array, (2, 3, 5), compressed=False, is_open=True, **how)
    np.testing.assert_array_equal(read(reader), array)
    assert len(reads) == num_reads


def test_the_chunk_that_is_cut_off_is_named(tmp_path):
    array = numbered((2, 20), "<i2")
    path = tmp_path / "a"
    reader = stored_array(path, array, (2, 5), compressed=False, is_open=True)
    content, modified_ns = path.read_bytes(), path.stat().st_mtime_ns
    path.write_bytes(content[:-1])
    os.utime(path, ns=(modified_ns, modified_ns))
    with pytest.raises(FormatError, match="has changed"):
        read(reader)
    short = ChunkedArray(
        shape=(2, 20),
        dtype=np.dtype("<i2"),
        chunk_shape=(2, 5),
        find=lambda place: Chunk(short_file, 4 + 20 * place[1], 20),
        decode=None,
        fill_value=0,
        storage=STORAGE,
        file=(short_file := DataFile.look_at(path)),
    )
    with pytest.raises(FormatError, match=r"chunk \(0, 3\) at byte 64: .*truncated or damaged"):
        read(short)


def test_of_an_unfiltered_chunk_only_what_is_needed_is_read(tmp_path, monkeypatch):
    array = numbered((1, 1000, 1000), "int16")
    reader = stored_array(tmp_path / "a", array, (1, 1000, 1000), compressed=False)
    counted = []
    fill = DataFile.fill

    def count(self, fd, buffer, offset):
        counted.append(len(buffer))
        fill(self, fd, buffer, offset)

    monkeypatch.setattr(DataFile, "fill", count)
    box = Box.of((0, 1), (10, 20), (0, 1000))
    np.testing.assert_array_equal(read(reader, box), array[slices(box)])
    assert sum(counted) < 40_000


def test_a_damaged_chunk_is_named_with_its_file(tmp_path):
    array = numbered((6, 8), "int16")
    path = tmp_path / "a"
    reader = stored_array(path, array, (2, 8), compressed=True)
    content = bytearray(path.read_bytes())
    content[6] ^= 255
    file = DataFile.look_at(path)
    path.write_bytes(content)
    with pytest.raises(FormatError, match="has changed"):
        read(reader)
    os.utime(path, ns=(file.identity.modified_ns,) * 2)
    with pytest.raises(FormatError, match=r"a, chunk \(0, 0\) at byte 4: bad zlib data"):
        read(reader)
    np.testing.assert_array_equal(read(reader, Box.of((2, 6), (0, 8))), array[2:])


@pytest.mark.parametrize("decode", [lambda stored, chunk: b"12345", None])
def test_a_chunk_of_the_wrong_size_is_refused(tmp_path, decode):
    (tmp_path / "a").write_bytes(b"12345")
    file = DataFile.look_at(tmp_path / "a")
    reader = ChunkedArray(
        shape=(4,),
        dtype=np.dtype("i2"),
        chunk_shape=(2,),
        find=lambda place: Chunk(file, 0, 5),
        decode=decode,
        fill_value=0,
        storage=STORAGE,
    )
    with pytest.raises(FormatError, match=r"holds 5 bytes, and a chunk of int16 \(2,\) has 4"):
        read(reader)


def test_a_chunk_beyond_the_end_of_the_file_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    file = DataFile.look_at(tmp_path / "a")
    reader = ChunkedArray(
        shape=(4,),
        dtype=np.dtype("i2"),
        chunk_shape=(2,),
        find=lambda place: Chunk(file, 2, 2**60),
        decode=inflate,
        fill_value=0,
        storage=STORAGE,
    )
    with pytest.raises(FormatError, match="truncated or damaged"):
        read(reader)


def test_a_chunk_that_memory_cannot_hold_is_refused(tmp_path):
    def decode(stored, chunk):
        raise MemoryError

    reader = stored_array(
        tmp_path / "a", numbered((4,), "i2"), (2,), compressed=True, decode=decode
    )
    with pytest.raises(FormatError, match="no memory for chunk"):
        read(reader)
