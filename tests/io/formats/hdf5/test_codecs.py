"""Chunks that bitshuffle compressed, decoded block by block."""

import math
from itertools import combinations, pairwise

import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import given, strategies as st

import hyperslab as hs
from hyperslab.errors import FormatError
from hyperslab.io.engine.box_copy import BoxCopy, strides_of
from hyperslab.io.engine.buffers import scratch
from hyperslab.io.formats.hdf5.codecs import BitshuffledBlocks

COMPRESSION = {"lz4": 2, "zstd": 3}
BLOCK = 64
NUM_ITEMS = 3 * BLOCK + 24 + 5
"""Three whole blocks, a shorter one, and items that are too few to be shuffled."""


def written(path, values, cname, block=BLOCK):
    """The stored bytes of a file whose dataset has one chunk."""
    with h5py.File(path, "w") as file:
        filters = hdf5plugin.Bitshuffle(nelems=block, cname=cname)
        dataset = file.create_dataset("x", data=values, chunks=values.shape, **filters)
        return np.frombuffer(dataset.id.read_direct_chunk((0,))[1], np.uint8)


def some_values(dtype, num=NUM_ITEMS):
    """Different everywhere, and with zeros among the bits: so that blocks get smaller."""
    return (np.arange(num) % 251 + np.arange(num) // 7).astype(dtype)


def filled(blocks, start, stop):
    """What ``read`` gives; asserts that it writes nowhere else."""
    memory = np.full(stop - start + 32, 0xA5, np.uint8)
    blocks.read(BoxCopy.of(0, np.dtype(np.uint8), (1,), (start,), memory[16:-16]))
    assert (memory[:16] == 0xA5).all()
    assert (memory[-16:] == 0xA5).all()
    return memory[16:-16]


@pytest.mark.parametrize("cname", COMPRESSION)
@pytest.mark.parametrize("dtype", ["u1", "<i2", ">i2", "<f4", "<f8", "<c16"])
@pytest.mark.parametrize("block", [8, 64, 128, 1024])
def test_bytes_from_anywhere_to_anywhere(tmp_path, cname, dtype, block):
    values = some_values(dtype)
    stored = written(tmp_path / "x.h5", values, cname, block)
    expected, itemsize = values.view(np.uint8), values.itemsize
    edges = {0, *range(0, values.nbytes, block * itemsize), 216 * itemsize, values.nbytes}
    near = {edge + shift for edge in sorted(edges)[-4:] for shift in (-itemsize - 1, -1, 0, 1)}
    places = sorted({0, 3} | {place for place in near if 0 <= place <= values.nbytes})
    with scratch.borrowed():
        blocks = BitshuffledBlocks(stored, values.nbytes, itemsize, COMPRESSION[cname])
        for start, stop in combinations(places, 2):
            np.testing.assert_array_equal(filled(blocks, start, stop), expected[start:stop])


def places_of_blocks(stored, num=4):
    """Where each block's length is stored, and where the last one ends."""
    places = [12]
    for _ in range(num):
        length = int.from_bytes(stored[places[-1] : places[-1] + 4].tobytes(), "big")
        places.append(places[-1] + 4 + length)
    return places


def damaged_file(path, values, cname, stored):
    """As ``written``, with ``stored`` in place of what was stored."""
    written(path, values, cname)
    with h5py.File(path, "r+") as file:
        file["x"].id.write_direct_chunk((0,), stored.tobytes())
    return hs.open(path, sample="x", axes="W")


@pytest.mark.parametrize("cname", COMPRESSION)
@pytest.mark.parametrize("number", range(4))
def test_a_damaged_block_names_the_file_and_leaves_the_others_readable(tmp_path, cname, number):
    values = some_values("<i2")
    stored = written(tmp_path / "good.h5", values, cname).copy()
    start, stop = list(pairwise(places_of_blocks(stored)))[number]
    stored[start + 4 : stop] = 0xFF
    data = damaged_file(tmp_path / "bad.h5", values, cname, stored)
    first, last = number * BLOCK, min((number + 1) * BLOCK, 216)
    for box in (slice(0, len(values)), slice(first + 3, first + 4), slice(last - 1, last)):
        with pytest.raises(FormatError, match=r"bad\.h5, chunk \(0,\).*bitshuffle data is damaged"):
            data.read(0, (box,), np.empty(box.stop - box.start, "<i2"))
    out = np.empty(BLOCK, "<i2")
    other = (number + 1) % 3 * BLOCK
    data.read(0, (slice(other, other + BLOCK),), out)
    np.testing.assert_array_equal(out, values[other : other + BLOCK])


@pytest.mark.parametrize("cname", COMPRESSION)
@pytest.mark.parametrize("columns", [slice(0, 64), slice(70, 120), slice(60, 70), slice(192, 256)])
def test_blocks_between_rows_are_not_decoded(tmp_path, cname, columns):
    values = some_values("<i2", 5 * 4 * BLOCK).reshape(5, 4 * BLOCK)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        filters = hdf5plugin.Bitshuffle(nelems=BLOCK, cname=cname)
        dataset = file.create_dataset("x", data=values, chunks=values.shape, **filters)
        stored = np.frombuffer(dataset.id.read_direct_chunk((0, 0))[1], np.uint8).copy()
        places = places_of_blocks(stored, 20)
        wanted = {row * 4 + column // BLOCK for row in (1, 2, 3) for column in range(256)[columns]}
        for number in set(range(20)) - wanted:
            stored[places[number] + 4 : places[number + 1]] = 0xFF
        dataset.id.write_direct_chunk((0, 0), stored.tobytes())
    data, rows = hs.open(tmp_path / "x.h5", sample="x", axes="HW"), slice(1, 4)
    out = np.zeros((3, columns.stop - columns.start), "<i2")
    data.read(0, (rows, columns), out)
    np.testing.assert_array_equal(out, values[rows, columns])


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 200)),
    block=st.sampled_from([8, 16, 64]),
    cname=st.sampled_from(list(COMPRESSION)),
    order=st.permutations(range(3)),
    draw=st.data(),
)
def test_any_box_of_a_chunk_into_any_buffer(tmp_path_factory, shape, block, cname, order, draw):
    values = some_values("<i2", math.prod(shape)).reshape(shape)
    stored = written(tmp_path_factory.mktemp("x") / "x.h5", values.reshape(-1), cname, block)
    spans = [sorted(draw.draw(st.sets(st.integers(0, n), min_size=2, max_size=2))) for n in shape]
    box = tuple(slice(*span) for span in spans)
    out = np.zeros([values[box].shape[dim] for dim in order], "<i2").transpose(np.argsort(order))
    starts, strides = [start for start, _ in spans], strides_of(shape, values.dtype)
    with scratch.borrowed():
        blocks = BitshuffledBlocks(stored, values.nbytes, 2, COMPRESSION[cname])
        blocks.read(BoxCopy.of(0, values.dtype, strides, starts, out))
    np.testing.assert_array_equal(out, values[box])


@pytest.mark.parametrize("cname", COMPRESSION)
def test_stored_bytes_that_are_too_few_or_too_many_name_the_file(tmp_path, cname):
    values = some_values("<i2")
    good = written(tmp_path / "good.h5", values, cname)
    places = places_of_blocks(good)
    cut = [good[:size] for size in (5, 12, places[1], places[2] + 3, places[4], good.size - 1)]
    for stored in (*cut, np.append(good, np.uint8(0))):
        data = damaged_file(tmp_path / "bad.h5", values, cname, stored)
        with pytest.raises(FormatError, match=r"bad\.h5, chunk \(0,\).*bitshuffle data"):
            data.read(0, (slice(0, 1),), np.empty(1, "<i2"))


@pytest.mark.parametrize("cname", COMPRESSION)
@pytest.mark.parametrize("length", [0, 3, 2**31, 2**32 - 1])
def test_a_wrong_length_of_a_block_is_refused(tmp_path, cname, length):
    values = some_values("<i2")
    stored = written(tmp_path / "good.h5", values, cname).copy()
    place = places_of_blocks(stored)[1]
    stored[place : place + 4] = np.frombuffer(length.to_bytes(4, "big"), np.uint8)
    data = damaged_file(tmp_path / "bad.h5", values, cname, stored)
    with pytest.raises(FormatError, match=r"bad\.h5, chunk \(0,\).*bitshuffle data is damaged"):
        data.read(0, (slice(0, len(values)),), np.empty(len(values), "<i2"))
