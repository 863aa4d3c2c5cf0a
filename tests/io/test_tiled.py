import math
import os
import pickle
from itertools import product

import h5py
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import hyperslab as hs
from hyperslab.io.info import describe, describe_slice, mesh_reads
from hyperslab.io.repack.run import repack
from hyperslab.io.stage import open_staged, stage
from hyperslab.layout import Box, Grid

SHAPE = (2, 4, 6, 8)


def tiles_of(image, extents):
    """The tiles of an array whose last dims are spatial, along a new first dim."""
    channels = image.shape[: image.ndim - len(extents)]
    space = image.shape[image.ndim - len(extents) :]
    counts = [whole // extent for whole, extent in zip(space, extents, strict=True)]
    cut = [n for pair in zip(counts, extents, strict=True) for n in pair]
    first = len(channels)
    outer = [first + 2 * dim for dim in range(len(extents))]
    inner = [dim + 1 for dim in outer]
    moved = image.reshape(*channels, *cut).transpose(*outer, *range(first), *inner)
    return moved.reshape(math.prod(counts), *channels, *extents)


def image(index, shape=SHAPE):
    return (np.arange(math.prod(shape)).reshape(shape) + 1000 * index).astype(np.int16)


@pytest.fixture
def folder(tmp_path):
    """Three files, each with an image (channels last), its label map and a vector."""
    (tmp_path / "data").mkdir()
    for index in range(3):
        with h5py.File(tmp_path / "data" / f"{index}.h5", "w") as file:
            file["image"] = np.moveaxis(image(index), 0, -1)
            file["label"] = (image(index)[0] % 5).astype(np.uint8)
            file["vector"] = np.arange(3, dtype=np.float32) + index
            file["number"] = index
            file["more"] = np.zeros(2**17, np.uint8)  # so that staging writes boxes, not a copy
    return tmp_path / "data"


@pytest.fixture
def data(folder):
    names = {"sample": "image", "target": ["label", "vector", "number"], "axes": "DHWC"}
    return hs.open(f"{folder}/*.h5", **names)


def write(path, kind, stacked, letters):
    """A file of ``stacked`` samples, with dims in the order of ``letters``."""
    order = [0, *(1 + "CDHW".index(letter) for letter in letters)]
    whole = stacked.transpose(order)
    if kind == "npy":
        np.save(path.with_suffix(".npy"), whole)
        return path.with_suffix(".npy")
    with h5py.File(path.with_suffix(".h5"), "w") as file:
        chunks = (1, *(max(1, extent // 2 + 1) for extent in whole.shape[1:]))
        options = {"chunks": chunks, "compression": 1} if kind == "chunked" else {}
        file.create_dataset("x", data=whole, **options)
    return path.with_suffix(".h5")


@settings(max_examples=30, deadline=None)
@given(draw=st.data())
def test_tiles_are_what_numpy_cuts(draw, tmp_path_factory):
    counts = draw.draw(st.tuples(*[st.integers(1, 3)] * 3))
    extents = draw.draw(st.tuples(*[st.integers(1, 4)] * 3))
    shape = (2, *(n * m for n, m in zip(counts, extents, strict=True)))
    letters = "".join(draw.draw(st.permutations("CDHW")))
    kind = draw.draw(st.sampled_from(["contiguous", "chunked", "npy"]))
    stacked = np.stack([image(index, shape) for index in range(3)])
    path = write(tmp_path_factory.mktemp("x") / "x", kind, stacked, letters)
    chosen = draw.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
    data = hs.open(path, axes=f"N{letters}").take(chosen).tiled(extents)
    expected = np.concatenate([tiles_of(stacked[index], extents) for index in chosen])
    assert len(data) == len(expected)
    assert data.shape == expected.shape[1:]
    for index in draw.draw(st.lists(st.integers(0, len(data) - 1), min_size=1, max_size=5)):
        bounds = [
            sorted(draw.draw(st.tuples(*[st.integers(0, extent)] * 2))) for extent in data.shape
        ]
        box = tuple(slice(*pair) for pair in bounds)
        np.testing.assert_array_equal(data.read(index, box), expected[index][box])


def test_label_maps_are_cut_alike_and_all_else_is_repeated(data):
    tiled = data.tiled((2, 3, 4))
    assert len(tiled) == 3 * 8
    assert tiled.shape == (2, 2, 3, 4)
    assert [spec.is_cut for spec in tiled.arrays.values()] == [True, True, False, False]
    for index in range(len(tiled)):
        sample, tile = divmod(index, 8)
        whole = image(sample)
        np.testing.assert_array_equal(tiled.read(index), tiles_of(whole, (2, 3, 4))[tile])
        label = tiled.read(index, array="label")
        np.testing.assert_array_equal(label, tiles_of(whole[0] % 5, (2, 3, 4))[tile])
        np.testing.assert_array_equal(tiled.read(index, array="vector"), np.arange(3) + sample)
        assert tiled.read(index, array="number") == sample
    assert repr(tiled) == "Dataset(24 tiles of 2x2x3x4 int16 in 3 files)"


def test_tiles_are_taken_split_pickled_and_cut_again(data):
    tiled = data.take([2, 0]).tiled(2)
    again = pickle.loads(pickle.dumps(tiled.take([25, 3])))
    first = tiles_of(image(0), (2, 2, 2))
    np.testing.assert_array_equal(again.read(0), first[1])
    np.testing.assert_array_equal(again.read(1), tiles_of(image(2), (2, 2, 2))[3])
    assert again.place_of(0) == (data.paths[0], 1)
    halves = data.tiled((2, 6, 8)).tiled(2)
    np.testing.assert_array_equal(halves.read(12), tiles_of(image(0)[:, 2:], (2, 2, 2))[0])
    parts = data.tiled(2).split(train=0.5, test=0.5)
    assert [len(part) for part in parts.values()] == [36, 36]


def test_tiles_lie_beside_tiles(tmp_path, data):
    for index in range(3):
        np.save(tmp_path / f"mask{index}.npy", image(index)[0] % 3)
    masks = hs.open(tmp_path / "mask*.npy", axes="DHW")
    before, after = data.beside(mask=masks).tiled(2), data.tiled(2).beside(mask=masks.tiled(2))
    expected = tiles_of(image(1)[0] % 3, (2, 2, 2))
    for joined in (before, after):
        assert joined.arrays["mask"].is_cut
        np.testing.assert_array_equal(joined.read(24 + 5, array="mask"), expected[5])
    with pytest.raises(hs.ConfigError, match="as many samples in each file"):
        data.tiled(2).beside(mask=masks)


@pytest.mark.parametrize(
    ("extents", "words"),
    [
        (4, "tiles of 4x4x4 do not fill samples of 4x6x8: their height of 4 does not divide 6, as"),
        ((2, 3, 16), "their width of 16 does not divide 8, as 2 or 4 or 8 would"),
        ((2, 3, 0), "their width of 0 does not divide 8"),
        ((2, -3, 4), "their height of -3 does not divide 6"),
        ((2, 2), r"tiles of 2x2 were asked for, but .* have 3 spatial dims \(DHW\)"),
        (2.5, "are whole numbers, such as 64 or .*, got 2.5"),
        ("64", "are whole numbers, .*, got '64'"),
    ],
)
def test_tiles_that_do_not_fill_the_samples_are_refused(extents, words, data):
    with pytest.raises(hs.ConfigError, match=words):
        data.tiled(extents)


def test_samples_without_space_have_no_tiles(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((5, 3)))
    with pytest.raises(hs.ConfigError, match=r"have 0 spatial dims \(none\)"):
        hs.open(tmp_path / "x.npy", axes="NC").tiled(1)


def test_what_cannot_be_read_is_named_with_file_sample_and_tile(folder, data):
    tiled = data.tiled(2)
    os.truncate(folder / "1.h5", 2500)
    with pytest.raises(
        hs.FormatError, match=r"sample 27 \(tile 3 of sample 0 in its file\).*1\.h5"
    ):
        tiled.read(27)
    with h5py.File(folder / "2.h5", "w") as file:
        file["image"], file["label"] = np.zeros((4, 6, 12, 2), np.int16), np.zeros((4, 6, 12))
        file["vector"], file["number"] = np.zeros(3, np.float32), 0
    with pytest.raises(hs.FormatError, match=r"2\.h5 has int16 \(4, 6, 12, 2\) as 'image', but"):
        tiled.read(50)


def test_a_file_that_was_looked_at_before_it_was_tiled_may_not_change(folder, data):
    tiled = data.tiled(2)
    with h5py.File(folder / "0.h5", "a") as file:
        file["even more"] = np.zeros(999)
    with pytest.raises(hs.FormatError, match=r"0\.h5 has changed since it was first looked at"):
        tiled.read(0)


@pytest.mark.parametrize("samples", [None, [3, 30, 31]])
@pytest.mark.parametrize("box", [None, Box.of((0, 2), (0, 1), (1, 2), (0, 2))])
def test_tiles_are_staged_like_samples(samples, box, data, tmp_path):
    tiled = data.tiled(2)
    boxes = {"image": box} if box else None
    report = stage(tiled, tmp_path / "staged", boxes=boxes, samples=samples)
    assert report.num_staged == (3 if samples is None else 2)
    staged = open_staged(tiled, tmp_path / "staged", boxes=boxes, samples=samples)
    for index, array in product(samples or range(72), tiled.arrays):
        wanted = box if array == "image" else None
        expected = tiled.read(index, wanted, array=array)
        np.testing.assert_array_equal(staged.read(index, wanted, array=array), expected)


def test_tiles_in_another_order_are_not_taken_for_those_staged(tmp_path):
    np.save(tmp_path / "x.npy", image(0, (2, 1, 4, 8)))
    whole = hs.open(tmp_path / "x.npy", axes="NCHW")
    cut = whole.tiled(4)  # both stage samples 0 and 1, and of each a box of 4x4
    stage(whole, tmp_path / "s", samples=[0, 1], boxes={"data": Box.of((0, 1), (0, 4), (0, 4))})
    stage(cut, tmp_path / "s", samples=[0, 1])
    staged = open_staged(cut, tmp_path / "s", samples=[0, 1])
    np.testing.assert_array_equal(staged.read(1), cut.read(1))
    twice, once = whole.tiled((4, 4)).tiled(2), whole.tiled(2)
    for tiles in (twice, once):
        stage(tiles, tmp_path / "s", samples=range(7))
        staged = open_staged(tiles, tmp_path / "s", samples=range(7))
        np.testing.assert_array_equal(staged.read(2), tiles.read(2))


def test_what_is_told_of_tiles_is_of_the_file(data, tmp_path):
    tiled = data.tiled(2)
    found = describe(tiled)
    assert found.num_samples == 72
    assert [array.file_shape for array in found.arrays] == [(4, 6, 8, 2), (4, 6, 8), (3,), ()]
    assert found.arrays[0].axes == "DHWC"
    assert describe_slice(tiled, 30).place.startswith("sample 30 (tile 6 of sample 0 in its file)")
    assert mesh_reads(tiled, Grid((1, 1, 2, 1, 1))).ranks[1].cost.wanted_nbytes == 16 + 4 + 12 + 8
    with pytest.raises(hs.ConfigError, match="whole files are repacked"):
        repack(tiled, tmp_path / "packed")


def test_a_tile_of_a_large_chunk_costs_all_of_it(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((64, 64)), chunks=(32, 32), compression=1)
    reads = mesh_reads(hs.open(tmp_path / "x.h5", axes="HW").tiled(16), Grid((1, 1, 1, 1, 1)), 5)
    assert reads.ranks[0].cost.touched_nbytes == 32 * 32 * 8
