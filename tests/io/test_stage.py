import json
import os
import resource
import subprocess
import sys
import threading

import h5py
import numpy as np
import pytest

from hyperslab.errors import ConfigError, FormatError
from hyperslab.io import open as open_data
from hyperslab.io.dataset import rank_boxes
from hyperslab.io.stage import open_staged, run, stage
from hyperslab.layout import Box, Grid

BOX = Box.of((0, 2), (3, 9), (5, 10), (0, 8))
"""Of samples of 2x12x10x8."""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def dataset(tmp_path):
    """Two files of the same name, three samples each, big-endian, channels last."""
    rng = np.random.default_rng(0)
    paths = [tmp_path / folder / "x.npy" for folder in "ab"]
    for path in paths:
        path.parent.mkdir()
        np.save(path, rng.integers(0, 99, (3, 12, 10, 8, 2)).astype(">i2"))
    return open_data(paths, axes="NDHWC")


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "staged"


def check_equal(staged, dataset, boxes=(None, BOX)):
    assert len(staged) == len(dataset)
    for index in range(len(dataset)):
        for box in boxes:
            np.testing.assert_array_equal(staged.read(index, box), dataset.read(index, box))


def hide(dataset):
    """Moves the originals away, so that only copies can be read."""
    for path in dict.fromkeys(dataset.paths):
        data = path.read_bytes()
        status = path.stat()
        path.write_bytes(bytes(len(data)))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def data_files(directory):
    return sorted(path for path in directory.iterdir() if path.suffix != ".json")


def test_whole_files_are_copied_as_they_are_and_read_from_there(dataset, directory):
    expected = [dataset.read(index) for index in range(6)]
    report = stage(dataset, directory)
    assert (report.num_files, report.num_staged, report.num_kept) == (2, 2, 0)
    assert report.nbytes == sum(path.stat().st_size for path in dataset.paths)
    originals = [path.read_bytes() for path in dataset.paths]
    assert sorted(path.read_bytes() for path in data_files(directory)) == sorted(originals)
    hide(dataset)
    staged = open_staged(dataset, directory, verify=True)
    for index in range(6):
        np.testing.assert_array_equal(staged.read(index), expected[index])


def test_of_a_box_only_the_box_is_written(dataset, directory):
    expected = [dataset.read(index, BOX) for index in range(6)]
    report = stage(dataset, directory, boxes={"data": BOX})
    assert report.nbytes == sum(each.nbytes for each in expected)
    for path in data_files(directory):
        assert np.load(path).shape == (3, 6, 5, 8, 2)
    hide(dataset)
    staged = open_staged(dataset, directory, boxes={"data": BOX})
    for index in range(6):
        np.testing.assert_array_equal(staged.read(index, BOX), expected[index])
        inner = (slice(1, 2), slice(4, 7), slice(6, 10), slice(0, 3))
        box = (slice(1, 2), slice(1, 4), slice(1, 5), slice(0, 3))
        np.testing.assert_array_equal(staged.read(index, inner), expected[index][box])


def test_what_was_not_staged_comes_from_the_originals(dataset, directory):
    arguments = {"boxes": {"data": BOX}, "samples": [1, 4, 5]}
    assert stage(dataset, directory, **arguments).nbytes == 3 * 2 * 6 * 5 * 8 * 2
    check_equal(open_staged(dataset, directory, **arguments), dataset)


def test_a_part_of_a_dataset_is_staged_by_itself(dataset, directory):
    part = dataset.take([5, 1])
    stage(part, directory)
    check_equal(open_staged(part, directory), part)


def test_boxes_of_ranks_are_staged_together(dataset, directory):
    grid = Grid((1, 1, 2, 2, 1))
    boxes = rank_boxes(dataset, grid, [0, 1])
    assert boxes == {"data": Box.of((0, 2), (0, 6), (0, 10), (0, 8))}
    stage(dataset, directory, boxes=boxes)
    check_equal(open_staged(dataset, directory, boxes=boxes), dataset, [boxes["data"]])


def test_staging_again_copies_nothing(dataset, directory):
    stage(dataset, directory)
    before = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    report = stage(dataset, directory)
    assert (report.num_staged, report.num_kept, report.nbytes) == (0, 2, 0)
    assert before == {path: path.stat().st_mtime_ns for path in directory.iterdir()}


def test_processes_of_a_node_share_the_work(dataset, directory):
    reports = [stage(dataset, directory, part=(number, 2)) for number in range(2)]
    assert [report.num_staged for report in reports] == [1, 1]
    check_equal(open_staged(dataset, directory), dataset)


def test_two_jobs_may_stage_into_one_directory_at_once(dataset, directory):
    jobs = [threading.Thread(target=stage, args=(dataset, directory)) for _ in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    check_equal(open_staged(dataset, directory, verify=True), dataset)
    assert len(names(directory)) == 4


def test_a_changed_source_is_staged_anew_and_the_old_copy_removed(dataset, directory):
    stage(dataset, directory)
    path = dataset.paths[0]
    np.save(path, np.load(path) + 1)
    os.utime(path, ns=(0, 12345))
    with pytest.raises(FormatError, match=f"1 of the files are not in .*{path}.*has changed"):
        open_staged(dataset, directory)
    changed = open_data(dataset.paths, axes="NDHWC")
    report = stage(changed, directory)
    assert (report.num_staged, report.num_kept) == (1, 1)
    check_equal(open_staged(changed, directory), changed)
    assert len(names(directory)) == 4


@pytest.mark.parametrize("boxes", [None, {"data": BOX}], ids=["file", "box"])
def test_a_truncated_copy_is_noticed_before_it_is_used(dataset, directory, boxes):
    stage(dataset, directory, boxes=boxes)
    path = data_files(directory)[0]
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(FormatError, match=f"{path.name} has .* bytes, and .* were staged"):
        open_staged(dataset, directory, boxes=boxes)
    assert stage(dataset, directory, boxes=boxes).num_staged == 1
    check_equal(open_staged(dataset, directory, boxes=boxes), dataset)


@pytest.mark.parametrize("boxes", [None, {"data": BOX}], ids=["file", "box"])
def test_a_damaged_copy_is_noticed_by_its_checksum(dataset, directory, boxes):
    stage(dataset, directory, boxes=boxes)
    path = data_files(directory)[0]
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(FormatError, match=f"{path.name} is damaged"):
        open_staged(dataset, directory, boxes=boxes, verify=True)
    assert stage(dataset, directory, boxes=boxes, verify=True).num_staged == 1
    check_equal(open_staged(dataset, directory, boxes=boxes, verify=True), dataset)


@pytest.mark.parametrize("boxes", [None, {"data": BOX}], ids=["file", "box"])
def test_a_copy_written_to_since_is_refused_without_being_asked_to_verify(
    dataset, directory, boxes
):
    stage(dataset, directory, boxes=boxes)
    path = data_files(directory)[0]
    later = path.stat().st_mtime_ns + 10**9
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(later, later))
    with pytest.raises(FormatError, match=f"{path.name} is damaged"):
        open_staged(dataset, directory, boxes=boxes)


@pytest.mark.parametrize("boxes", [None, {"data": BOX}], ids=["file", "box"])
def test_a_source_that_changed_in_size_or_time_is_not_read_from_its_old_copy(
    dataset, directory, boxes
):
    stage(dataset, directory, boxes=boxes)
    path = dataset.paths[0]
    status = path.stat()
    np.save(path, np.load(path) + 1)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
    changed = open_data(dataset.paths, axes="NDHWC")
    with pytest.raises(FormatError, match=r"1 of the files are not in .*has changed"):
        open_staged(changed, directory, boxes=boxes)
    staged = open_staged(changed, directory, boxes=boxes, allow_missing=True)
    check_equal(staged, changed)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"files": 3}', "\0", '{"source": 1}'])
def test_a_damaged_record_means_that_nothing_was_staged(dataset, directory, content):
    stage(dataset, directory)
    record = next(directory.glob("*.json"))
    record.write_text(content)
    with pytest.raises(FormatError, match="its record"):
        open_staged(dataset, directory)
    assert stage(dataset, directory).num_staged == 1


def test_missing_copies_may_be_read_from_the_originals(dataset, directory):
    stage(dataset, directory, part=(0, 2))
    with pytest.raises(FormatError, match="1 of the files"):
        open_staged(dataset, directory)
    check_equal(open_staged(dataset, directory, allow_missing=True), dataset)


def test_killed_in_the_middle_it_goes_on_where_it_was(dataset, directory, tmp_path):
    program = (
        "import os, signal, sys\n"
        "from hyperslab.io import open\n"
        "from hyperslab.io.stage import run, stage\n"
        "run.BLOCK_NBYTES = 1000\n"
        "def progress(done, total):\n"
        "    if done > 0.75 * total:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "data = open(sys.argv[2:], axes='NDHWC')\n"
        "stage(data, sys.argv[1], threads=1, progress=progress)\n"
    )
    arguments = [sys.executable, "-c", program, directory, *dataset.paths]
    killed = subprocess.run(arguments, capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    left = [path for path in directory.iterdir() if path.suffix == ".part"]
    assert len(left) == 1
    assert 0 < left[0].stat().st_size < dataset.paths[0].stat().st_size
    with pytest.raises(FormatError, match="1 of the files"):
        open_staged(dataset, directory)
    report = stage(dataset, directory)
    assert (report.num_staged, report.num_kept) == (1, 1)
    assert not list(directory.glob(".*"))
    check_equal(open_staged(dataset, directory, verify=True), dataset)


def test_a_directory_without_room_is_refused_before_anything_is_copied(
    dataset, directory, monkeypatch
):
    real = os.statvfs
    monkeypatch.setattr(
        os, "statvfs", lambda path: os.statvfs_result([1, 1, 9, 9, *[100] * 6, real(path).f_fsid])
    )
    with pytest.raises(FormatError, match=r"too little room: staging 2 of 2 files needs .* 100 B"):
        stage(dataset, directory)
    assert not names(directory)


@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_disk_that_fills_leaves_whole_files_and_no_others(dataset, directory, skip_bad):
    stage(dataset, directory, part=(1, 2))
    whole = names(directory)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(FormatError, match="could not be written: it is larger"):
            stage(dataset, directory, skip_bad=skip_bad)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(directory) == whole
    assert stage(dataset, directory).num_staged == 1


def test_a_disk_that_lies_is_found_out(dataset, directory, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, offset: real(fd, bytes(data)[:-1] + b"?", offset)
    )
    with pytest.raises(FormatError, match="does not hold what was written"):
        stage(dataset, directory)
    assert not names(directory)


def test_a_directory_that_may_not_be_written_is_one_clear_error(dataset, directory, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(directory), "mkdir", refuse)
    with pytest.raises(FormatError, match=f"{directory} may not be written: permission denied"):
        stage(dataset, directory)


def test_a_file_in_place_of_the_directory_is_one_clear_error(dataset, directory):
    directory.write_text("")
    with pytest.raises(FormatError, match=f"{directory} cannot be written: File exists"):
        stage(dataset, directory)


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_source_that_cannot_be_read_stops_or_is_skipped(dataset, directory, damage):
    if damage == "missing":
        dataset.paths[1].unlink()
    else:
        os.truncate(dataset.paths[1], 500)
    with pytest.raises(FormatError, match=str(dataset.paths[1])):
        stage(dataset, directory, threads=1)
    report = stage(dataset, directory, skip_bad=True)
    assert list(report.failed) == [str(dataset.paths[1])]
    assert not list(directory.glob(".*"))
    staged = open_staged(dataset, directory, allow_missing=True)
    np.testing.assert_array_equal(staged.read(0), dataset.read(0))
    with pytest.raises(FormatError, match="sample 3"):
        staged.read(3)


def test_large_boxes_pass_through_memory_in_tiles(dataset, directory, monkeypatch):
    monkeypatch.setattr(run, "TILE_NBYTES", 100)
    monkeypatch.setattr(run, "BLOCK_NBYTES", 64)
    stage(dataset, directory, boxes={"data": BOX})
    check_equal(open_staged(dataset, directory, boxes={"data": BOX}, verify=True), dataset)


def test_targets_are_staged_with_their_samples(tmp_path, directory):
    h5py = pytest.importorskip("h5py")
    rng = np.random.default_rng(1)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = rng.random((4, 2, 6, 8))
        file["g/labels"] = rng.integers(0, 3, (4, 6, 8))
        file["y"] = rng.random((4, 3)).astype("f4")
        file["weight"] = rng.random(4)
        file["beside"] = np.zeros(100_000)
    data = open_data(tmp_path / "a.h5", sample="x", target=["g/labels", "y", "weight"], axes="NCHW")
    for boxes in (None, rank_boxes(data, Grid((1, 1, 1, 2, 2)), [1])):
        stage(data, directory, boxes=boxes)
        staged = open_staged(data, directory, boxes=boxes, verify=True)
        for name in data.arrays:
            box = boxes[name] if boxes else None
            for index in range(4):
                found = staged.read(index, box, array=name)
                np.testing.assert_array_equal(found, data.read(index, box, array=name))
    # The array beside them is not needed: the file was not copied.
    assert all(path.suffix == ".npy" for path in data_files(directory))


@pytest.mark.parametrize("pad", [0, 200_000])
def test_data_in_other_files_is_staged_too(tmp_path, directory, pad):
    h5py = pytest.importorskip("h5py")
    array = np.random.default_rng(2).random((2, 30, 40))
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file.create_dataset("x", data=array, chunks=(1, 30, 40), compression="gzip")
    layout = h5py.VirtualLayout(array.shape, array.dtype)
    layout[:] = h5py.VirtualSource("other.h5", "x", array.shape)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["linked"] = h5py.ExternalLink("other.h5", "/x")
        file.create_virtual_dataset("virtual", layout)
        file["pad"] = np.zeros(pad // 8)
    for name in ("linked", "virtual"):
        data = open_data(tmp_path / "a.h5", sample=name, axes="CHW")
        stage(data, directory)
        staged = open_staged(data, directory)
        (tmp_path / "other.h5").rename(tmp_path / "away.h5")
        np.testing.assert_array_equal(staged.read(0), array)
        (tmp_path / "away.h5").rename(tmp_path / "other.h5")


def test_wrong_arguments_are_refused(dataset, directory):
    with pytest.raises(ConfigError, match="boxes are given for"):
        stage(dataset, directory, boxes={"labels": BOX})
    with pytest.raises(ConfigError, match="no sample 6"):
        stage(dataset, directory, samples=[6])
    with pytest.raises(ConfigError, match="part"):
        stage(dataset, directory, part=(2, 2))


def test_records_say_what_was_staged(dataset, directory):
    stage(dataset, directory)
    record = json.loads(next(directory.glob("*.json")).read_text())
    assert record["source"] in map(str, dataset.paths)
    assert record["is_copy"]


def test_data_that_changes_in_another_file_is_staged_anew(tmp_path, directory):
    values = tmp_path / "values.raw"
    np.ones((4, 4, 4), "f4").tofile(values)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (4, 4, 4), "f4", external=[(str(values), 0, 256)])
    for value in (1, 100):
        np.full((4, 4, 4), value, "f4").tofile(values)
        dataset = open_data(tmp_path / "a.h5", sample="x", axes="DHW")
        assert stage(dataset, directory).num_staged == 1
        assert stage(dataset, directory).num_staged == 0
        assert (open_staged(dataset, directory).read(0) == value).all()


def test_the_folder_of_the_files_is_refused(dataset):
    with pytest.raises(ConfigError, match="has the files that are to be staged"):
        stage(dataset, dataset.paths[0].parent)
