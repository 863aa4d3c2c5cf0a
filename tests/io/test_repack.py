import math
import os
import resource
import subprocess
import sys
from collections import namedtuple
from multiprocessing import active_children

import h5py
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hyperslab.errors import ConfigError, FormatError, LayoutError
from hyperslab.io import open as open_data
from hyperslab.io.info import mesh_reads
from hyperslab.io.repack import repack as repack_by_processes, run, write
from hyperslab.io.repack.plan import (
    CHUNK_NBYTES,
    ChunkDim,
    choose_chunks,
    plan_targets,
    slab_chunks,
)
from hyperslab.io.spec import READINGS
from hyperslab.layout import Grid, cut_evenly

Size = namedtuple("Size", "extent num")


def grid(**axes):
    return Grid(
        tuple(axes.get(axis, 1) for axis in ("sample", "channel", "depth", "height", "width"))
    )


def repack(*arguments, **options):
    return repack_by_processes(*arguments, **{"jobs": 0, **options})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def dataset(tmp_path):
    """Two files like those of CosmoFlow, in one chunk each."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(2):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            counts = rng.poisson(2, (16, 12, 10, 4)).astype("i2")
            file.create_dataset("full", data=counts, chunks=counts.shape, compression="gzip")
            file["unitPar"] = rng.random(4).astype("f4")
            file["group/redshifts"] = np.arange(5.0)
            file["soft"] = h5py.SoftLink("/full")
            file["alias"] = file["full"]
            file["elsewhere"] = h5py.ExternalLink("other.h5", "/x")
            file["names"] = ["Omega_m", "sigma_8"]
            file.attrs["box_size"] = 512.0
            file["full"].attrs["unit"] = "particles"
            file["group"].attrs["text"] = "words"
            file["full"].attrs["ref"] = file["unitPar"].ref
    return open_data(str(folder / "*.h5"), preset="cosmoflow")


def check_equal(directory, dataset, **arguments):
    found = open_data(f"{directory}/*.h5", **(arguments or {"preset": "cosmoflow"}))
    assert len(found) == len(dataset)
    for name in dataset.arrays:
        for index in range(len(dataset)):
            expected = dataset.read(index, array=name)
            np.testing.assert_array_equal(found.read(index, array=name), expected)
    return found


# Chunks


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 5),
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 5)).map(lambda p: Size(p[0] * p[1], p[1])),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([1, 2, 4, 8]),
)
def test_where_cuts_are_even_no_chunk_has_parts_of_two_boxes(channels, sizes, itemsize):
    dims = [ChunkDim(cut_evenly(channels, 1), False)]
    dims += [ChunkDim(cut_evenly(size.extent, size.num), True) for size in sizes]
    chunks = choose_chunks(dims, itemsize, is_cubic=False)
    for size, length in zip(sizes, chunks[1:], strict=True):
        assert size.num == 1 or size.extent // size.num % length == 0


@pytest.mark.parametrize("num", [2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("extent", [512, 500, 97])
def test_chunks_are_neither_small_nor_wasteful_where_cuts_are_not_even(extent, num):
    dims = [ChunkDim(cut_evenly(extent, num), True)] + [ChunkDim(cut_evenly(extent, 1), True)] * 2
    chunks = choose_chunks(dims, 2, is_cubic=False)
    assert math.prod(d.amplification(c) for d, c in zip(dims, chunks, strict=True)) < 1.25
    box = extent**3 * 2 / num
    assert min(CHUNK_NBYTES, box) / 20 < math.prod(chunks) * 2 < CHUNK_NBYTES * 2


def test_chunks_for_a_mesh_are_slabs_and_for_any_mesh_cubes():
    cut, whole = cut_evenly(512, 4), cut_evenly(512, 1)
    dims = [ChunkDim(cut, True), ChunkDim(whole, True), ChunkDim(whole, True)]
    assert choose_chunks(dims, 4, is_cubic=False) == (1, 512, 512)
    cube = choose_chunks([ChunkDim(cut_evenly(512, 8), True)] * 3, 4, is_cubic=True)
    assert cube == (64, 64, 64)


def test_arrays_that_are_read_whole_are_in_runs():
    assert slab_chunks((10, 1000, 1000), 4) == (1, 262, 1000)
    assert slab_chunks((3, 4), 8) == (3, 4)


# Files


@pytest.mark.parametrize("compression", ["bitshuffle-lz4", "zstd", "gzip", "none"])
def test_the_samples_are_the_same(dataset, tmp_path, compression):
    report = repack(
        dataset, tmp_path / "out", grid=grid(depth=4, height=2), compression=compression
    )
    assert (report.num_written, report.num_kept) == (2, 0)
    found = check_equal(tmp_path / "out", dataset)
    storage = found.reader(0, "full").storage()
    assert storage.chunks == (4, 6, 10, 4)
    assert (storage.compression is None) == (compression == "none")
    reads = mesh_reads(found, grid(depth=4, height=2))
    assert reads.worst.cost.amplification == 1.0


def test_channels_come_first_if_asked(dataset, tmp_path):
    report = repack(dataset, tmp_path / "out", channels_first=True)
    assert [array.axes for array in report.arrays] == ["CDHW", ""]
    found = check_equal(tmp_path / "out", dataset, preset="cosmoflow-cdhw")
    assert found.reader(0, "full").shape == (4, 16, 12, 10)


def test_what_else_the_files_hold_is_copied(dataset, tmp_path):
    report = repack(dataset, tmp_path / "out")
    with h5py.File(tmp_path / "out/1.h5") as new, h5py.File(dataset.paths[1]) as old:
        assert set(new) == set(old)
        np.testing.assert_array_equal(new["group/redshifts"], old["group/redshifts"])
        assert list(new["names"]) == list(old["names"])
        assert new["alias"] == new["full"] == new["soft"]
        assert new["full"].attrs["unit"] == "particles"
        assert new["group"].attrs["text"] == "words"
        assert new.attrs["box_size"] == 512.0
        beside = str(dataset.paths[1].parent / "other.h5")
        assert new.get("elsewhere", getlink=True).filename == beside
    assert report.left_out == ("attribute 'ref' of /full",)


def test_samples_in_many_files_of_other_formats(tmp_path):
    rng = np.random.default_rng(0)
    paths = [tmp_path / folder / "x.npy" for folder in ("train", "test")]
    for path in paths:
        path.parent.mkdir()
        np.save(path, np.asfortranarray(rng.random((5, 3, 20, 24)).astype(">f4")))
    data = open_data(paths, axes="NCHW")
    report = repack(data, tmp_path / "out", grid=grid(height=2))
    assert report.arrays[0].chunks == (2, 3, 10, 24)
    assert sorted(map(str, (tmp_path / "out").rglob("*.h5"))) == [
        f"{tmp_path}/out/{folder}/x.h5" for folder in ("test", "train")
    ]
    found = open_data([f"{tmp_path}/out/{f}/x.h5" for f in ("train", "test")], axes="NCHW")
    for index in range(10):
        np.testing.assert_array_equal(found.read(index), data.read(index))


def test_large_samples_pass_through_memory_in_tiles(dataset, tmp_path, monkeypatch):
    npy = tmp_path / "x.npy"
    np.save(npy, dataset.read(0))
    data = open_data(npy, axes="CDHW")
    monkeypatch.setattr(write, "TILE_NBYTES", 4000)
    repack(data, tmp_path / "out", grid=grid(depth=4, width=2))
    check_equal(tmp_path / "out", data, sample="data", axes="CDHW")


@pytest.mark.parametrize("shape", [(0, 4, 4), (1, 1, 1), (2, 0, 3), (0, 1, 2, 2, 2)])
def test_samples_with_few_values_or_none(tmp_path, shape):
    np.save(tmp_path / "x.npy", np.ones(shape))
    axes = READINGS[len(shape)][0]
    data = open_data(tmp_path / "x.npy", axes=axes)
    repack(data, tmp_path / "out")
    check_equal(tmp_path / "out", data, sample="data", axes=axes)


# Again and again


def test_finished_files_are_kept_and_others_written(dataset, tmp_path):
    out = tmp_path / "out"
    repack(dataset, out)
    assert repack(dataset, out).num_kept == 2
    os.utime(dataset.paths[0], ns=(0, 0))
    again = open_data([*dataset.paths], preset="cosmoflow")
    report = repack(again, out)
    assert (report.num_written, report.num_kept) == (1, 1)
    assert repack(again, out, compression="gzip").num_written == 2
    check_equal(out, again)


def test_data_that_changes_in_another_file_is_repacked_anew(tmp_path):
    values, out = tmp_path / "values.raw", tmp_path / "out"
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (4, 4, 4), "f4", external=[(str(values), 0, 256)])
    for value in (1, 100):
        np.full((4, 4, 4), value, "f4").tofile(values)
        dataset = open_data(tmp_path / "a.h5", sample="x", axes="DHW")
        assert repack(dataset, out).num_written == 1
        assert repack(dataset, out).num_kept == 1
        assert (open_data(out / "a.h5", sample="x", axes="DHW").read(0) == value).all()


def test_killed_in_the_middle_it_goes_on_where_it_was(dataset, tmp_path):
    out = tmp_path / "out"
    program = (
        "import os, signal, sys\n"
        "from hyperslab.io import open\n"
        "from hyperslab.io.repack import repack\n"
        "def progress(done, total):\n"
        "    if done > 0.75 * total:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "data = open(sys.argv[2:], preset='cosmoflow')\n"
        "repack(data, sys.argv[1], jobs=0, progress=progress)\n"
    )
    arguments = [sys.executable, "-c", program, out, *dataset.paths]
    killed = subprocess.run(arguments, capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    assert sorted(path.suffix for path in out.iterdir()) == [".h5", ".part"]
    report = repack(dataset, out)
    assert (report.num_written, report.num_kept) == (1, 1)
    assert names(out) == ["0.h5", "1.h5"]
    check_equal(out, dataset)


def test_a_process_that_dies_is_one_clear_error_that_names_the_file(dataset, tmp_path, monkeypatch):
    def die_while_writing(done, total):
        for child in active_children():
            child.kill()

    monkeypatch.setattr(run, "POLL_SECONDS", 0.01)
    out = tmp_path / "out"
    with pytest.raises(FormatError, match="was killed or crashed"):
        repack(dataset, out, jobs=1, progress=die_while_writing)
    assert not [name for name in names(out) if name.endswith(".part")]
    report = repack(dataset, out, jobs=2)
    assert report.num_written + report.num_kept == 2
    check_equal(out, dataset)


def test_ctrl_c_leaves_nothing_half_written(dataset, tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repack(dataset, tmp_path / "out", progress=interrupt)
    assert not names(tmp_path / "out")


def test_a_disk_that_fills_is_one_clear_error_and_leaves_nothing(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((4, 64, 64)))
    data = open_data(tmp_path / "x.npy", axes="CHW")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(FormatError, match=r"x\.h5 could not be written"):
            repack(data, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not names(tmp_path / "out")
    repack(data, tmp_path / "out")
    check_equal(tmp_path / "out", data, sample="data", axes="CHW")


def test_a_directory_without_room_is_refused_before_anything_is_written(
    dataset, tmp_path, monkeypatch
):
    real = os.statvfs
    monkeypatch.setattr(
        os, "statvfs", lambda path: os.statvfs_result([1, 1, 9, 9, *[100] * 6, real(path).f_fsid])
    )
    with pytest.raises(FormatError, match=r"too little room: repacking 2 files .* needs"):
        repack(dataset, tmp_path / "out")
    assert not names(tmp_path / "out")


def test_what_was_written_wrongly_is_found_out(dataset, tmp_path, monkeypatch):
    real = write._read
    monkeypatch.setattr(write, "_read", lambda *arguments: (real(*arguments)[0], 1))
    with pytest.raises(FormatError, match="would not hold what"):
        repack(dataset, tmp_path / "out")
    assert not names(tmp_path / "out")


def test_files_that_are_not_ours_are_not_written_over(dataset, tmp_path):
    with pytest.raises(ConfigError, match="would be written over"):
        repack(dataset, dataset.paths[0].parent)
    out = tmp_path / "out"
    out.mkdir()
    with h5py.File(out / "1.h5", "w"):
        pass
    with pytest.raises(FormatError, match="was not written by repack"):
        repack(dataset, out)
    (out / "1.h5").write_text("no HDF5")
    with pytest.raises(FormatError, match="cannot be read as a file that was repacked"):
        repack(dataset, out)


def test_a_damaged_source_is_one_clear_error(dataset, tmp_path):
    os.truncate(dataset.paths[1], 3000)
    with pytest.raises(FormatError, match=str(dataset.paths[1])):
        repack(dataset, tmp_path / "out")
    assert names(tmp_path / "out") == ["0.h5"]


def test_a_file_of_another_shape_is_one_clear_error(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((2, 4, 4)))
    np.save(tmp_path / "b.npy", np.zeros((2, 4, 5)))
    with pytest.raises(FormatError, match=r"b.npy has samples of float64 \(2, 4, 5\)"):
        repack(open_data(str(tmp_path / "*.npy"), axes="CHW"), tmp_path / "out")


def test_wrong_arguments_are_refused(dataset, tmp_path):
    with pytest.raises(ConfigError, match="chunks 4x4 have 2 dims"):
        repack(dataset, tmp_path / "out", chunks=(4, 4))
    with pytest.raises(ConfigError, match="compression must be one of"):
        repack(dataset, tmp_path / "out", compression="rar")
    with pytest.raises(LayoutError, match="cannot split"):
        repack(dataset, tmp_path / "out", grid=grid(depth=17))


def test_names_of_targets_do_not_collide(tmp_path):
    paths = [tmp_path / name for name in ("a.nii", "a.nii.gz")]
    assert [path.name for path in plan_targets(paths, tmp_path).values()] == [
        "a.nii.h5",
        "a.nii.gz.h5",
    ]


def test_references_are_left_out_and_told(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["z"], file["lat"] = np.zeros((2, 4)), np.ones((2, 4)), np.arange(2.0)
        file["lat"].make_scale("lat")
        file["z"].dims[0].attach_scale(file["lat"])
        file["z"].attrs["unit"] = "K"
        file["refs"] = [file["z"].ref]
    report = repack_by_processes(
        open_data(tmp_path / "a.h5", sample="x", axes="HW"), tmp_path / "out", jobs=0
    )
    told = " ".join(report.left_out)
    assert "references in /refs" in told
    assert "'DIMENSION_LIST' of /z" in told
    with h5py.File(tmp_path / "out/a.h5") as file:
        assert "refs" not in file
        assert file["z"].attrs["unit"] == "K"
        assert (file["z"][...] == 1).all()
