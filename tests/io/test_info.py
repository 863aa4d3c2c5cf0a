import h5py
import numpy as np
import pytest

from hyperslab.errors import ConfigError, LayoutError
from hyperslab.io import open as open_data
from hyperslab.io.info import describe, describe_slice, draw_slice, mesh_reads
from hyperslab.io.info.reads import find_trouble, read_cost
from hyperslab.io.info.slices import slice_box
from hyperslab.io.spec import READINGS
from hyperslab.layout import Box, Grid


@pytest.fixture
def climate(tmp_path):
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "climate.h5", "w") as file:
        data = rng.random((16, 64, 96)).astype("f4")
        file.create_dataset("climate/data", data=data, chunks=(16, 64, 96), compression="gzip")
        file["climate/labels"] = rng.integers(0, 3, (64, 96))
        file["climate/stats"] = rng.random((16, 4))
    arrays = {"sample": "climate/data", "target": ["climate/labels", "climate/stats"]}
    return open_data(tmp_path / "climate.h5", axes="CHW", **arrays)


def saved(tmp_path, array, **arguments):
    np.save(tmp_path / "x.npy", array)
    return open_data(tmp_path / "x.npy", **{"axes": READINGS[array.ndim][0], **arguments})


def test_arrays_have_roles_and_sizes(climate):
    found = describe(climate)
    assert [array.role for array in found.arrays] == [
        "sample",
        "cut like the sample",
        "whole on every rank",
    ]
    sample = found.arrays[0]
    assert (sample.layout, sample.chunks, sample.axes) == ("chunked", (16, 64, 96), "CHW")
    assert 1 < sample.ratio < 2
    assert found.memory_nbytes == 16 * 64 * 96 * 4 + 64 * 96 * 8 + 16 * 4 * 8
    assert found.disk_nbytes == climate.paths[0].stat().st_size
    assert (found.num_files, found.num_samples) == (1, 1)


def test_each_rank_of_a_mesh_and_what_it_decodes(climate):
    reads = mesh_reads(climate, Grid((2, 1, 1, 2, 2)))
    assert len(reads.ranks) == 8
    assert reads.ranks[5].box == reads.ranks[1].box == Box.of((0, 16), (0, 32), (48, 96))
    cost = reads.ranks[1].cost
    assert cost.wanted_nbytes == 16 * 32 * 48 * 4 + 32 * 48 * 8 + 16 * 4 * 8
    assert cost.touched_nbytes > 16 * 64 * 96 * 4
    (warning,) = find_trouble(climate, reads)
    assert "depth" not in warning
    assert "times as much" in warning


def test_a_mesh_along_an_axis_that_is_not_there_is_refused(climate):
    with pytest.raises(LayoutError, match="cuts along depth, but the samples have dims CHW"):
        mesh_reads(climate, Grid((1, 1, 2, 1, 1)))


def test_chunks_are_counted_where_the_box_touches_them(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", (10, 100), "i4", chunks=(3, 40))
    reader = open_data(tmp_path / "x.h5", axes="HW").reader(0, "x")
    cost = read_cost(reader, Box.of((2, 4), (39, 81)))
    assert cost.num_reads == 2 * 3
    assert cost.touched_nbytes == 6 * 3 * 40 * 4
    assert read_cost(reader, Box.of((2, 2), (39, 81))).amplification == 1.0


@pytest.mark.parametrize(
    ("box", "touched", "num"),
    [
        (Box.of((0, 4), (0, 64), (0, 1024)), 4 * 64 * 1024, 1),
        (Box.of((0, 4), (8, 40), (0, 1024)), 4 * 32 * 1024, 4),  # runs of 256 KiB, one by one
        (Box.of((0, 4), (0, 64), (0, 512)), 4 * 64 * 1024 - 512, 1),  # with the gaps of 4 KiB
        (Box.of((1, 2), (3, 4), (5, 6)), 1, 1),
    ],
)
def test_runs_are_counted_in_arrays_of_one_piece(tmp_path, box, touched, num):
    reader = saved(tmp_path, np.zeros((4, 64, 1024), "f8")).reader(0, "data")
    cost = read_cost(reader, box)
    assert (cost.touched_nbytes, cost.num_reads) == (touched * 8, num)


def test_small_and_giant_chunks_are_warned_of(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("small", (200, 200, 20), "i4", chunks=(4, 4, 20))
        file.create_dataset("giant", (2, 4096, 4096), "f8", chunks=(2, 4096, 4096))
        file.create_dataset("good", (2, 512, 512), "f4", chunks=(1, 512, 512))
    for name, words in {"small": "about 2500 small reads", "giant": "decodes all of one"}.items():
        data = open_data(tmp_path / "x.h5", sample=name, axes="CHW")
        (warning,) = find_trouble(data, None)
        assert words in warning
    assert not find_trouble(open_data(tmp_path / "x.h5", sample="good", axes="CHW"), None)


def test_values_of_the_middle_slice(tmp_path):
    array = np.zeros((2, 5, 4, 3), "i2")
    array[1, 2] = 7
    found = describe_slice(saved(tmp_path, array))
    assert found.place == "sample 0, depth 2"
    assert [(c.minimum, c.maximum, c.zeros) for c in found.channels] == [(0, 0, 1), (7, 7, 0)]
    assert sum(found.channels[1].histogram) == 12


def test_values_that_are_not_numbers_are_counted_apart(tmp_path):
    array = np.array([[[1.0, np.nan], [np.inf, 3.0]]])
    (channel,) = describe_slice(saved(tmp_path, array)).channels
    assert (channel.minimum, channel.maximum, channel.not_finite) == (1, 3, 0.5)
    (channel,) = describe_slice(saved(tmp_path, array * np.nan)).channels
    assert channel.mean is None


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", ["bool", "u1", "i8", "f2", "c8"])
@pytest.mark.parametrize(("shape", "axes"), [((7,), "W"), ((3, 7), "CW"), ((5, 6, 7), "DHW")])
def test_all_dtypes_and_dims_have_a_slice_and_a_picture(tmp_path, dtype, shape, axes):
    data = saved(tmp_path, np.ones(shape, dtype), axes=axes)
    assert describe_slice(data).channels[0].maximum == 1
    pytest.importorskip("matplotlib")
    draw_slice(data, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size


def test_of_a_very_large_picture_the_middle_is_looked_at(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", (1, 100_000, 90_000), "u1", chunks=(1, 1000, 1000))
    box = slice_box(open_data(tmp_path / "x.h5", axes="CHW").spec)
    assert box == Box.of((0, 1), (47952, 52048), (42952, 47048))


@pytest.mark.parametrize("shape", [(1, 0, 4), (2, 0, 4, 4), (2, 4, 4, 0)])
def test_samples_without_values_are_described_and_not_drawn(tmp_path, shape):
    data = saved(tmp_path, np.zeros(shape))
    assert describe_slice(data).channels[0].mean is None
    with pytest.raises(ConfigError, match="no values to draw"):
        draw_slice(data, tmp_path / "x.png")


@pytest.mark.parametrize(("extent", "label"), [(0, "u1"), (8, "bool"), (8, "f4")])
def test_label_maps_of_any_size_and_dtype_are_drawn_or_refused(tmp_path, extent, label):
    pytest.importorskip("matplotlib")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"], file["y"] = np.ones((3, extent, 8), "f4"), np.ones((extent, 8), label)
    data = open_data(tmp_path / "x.h5", sample="x", target="y", axes="CHW")
    if extent:
        draw_slice(data, tmp_path / "x.png")
    else:
        with pytest.raises(ConfigError, match="no values to draw"):
            draw_slice(data, tmp_path / "x.png")


def test_the_picture_has_channels_and_labels(climate, tmp_path):
    pytest.importorskip("matplotlib")
    draw_slice(climate, tmp_path / "slice.png")
    assert (tmp_path / "slice.png").read_bytes().startswith(b"\x89PNG")
