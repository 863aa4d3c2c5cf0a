"""The spans of what becomes of a sample on its way from the file to the batch."""

import gzip

import h5py
import numpy as np
import pytest

import hyperslab as hs
from hyperslab.io.engine.threads import limited_to
from hyperslab.trace import Category, Flag, Tier, active, load_trace


@pytest.fixture(autouse=True)
def nothing_goes_on():
    yield
    active.stop()


def read_all(data, folder):
    """The trace of a whole epoch."""
    with hs.trace.recording(folder), hs.Loader(data, batch_size=2, store="none") as loader:
        for _ in loader.numpy():
            pass
    return load_trace(folder)


@pytest.fixture
def cubes():
    return np.arange(4 * 16**3, dtype=np.int32).reshape(4, 16, 16, 16)


def test_chunks_are_read_and_decoded_by_all_threads_for_their_sample(cubes, tmp_path):
    path = tmp_path / "cubes.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=cubes, chunks=(1, 4, 16, 16), compression="gzip")
        stored = file["x"].id.get_storage_size()
    data = hs.open(path, sample="x", axes="NDHW")
    with limited_to(3):
        trace = read_all(data, tmp_path / "trace")
    reads, decodes = trace.of(Category.read), trace.of(Category.decode)
    assert {trace.strings[number] for number in reads["name"]} == {str(path)}
    assert np.count_nonzero(reads["flags"] == Flag.opening) >= 1
    in_epoch = reads[(reads["sample"] >= 0) & (reads["flags"] == 0)]
    for of in (in_epoch, decodes):
        samples, counts = np.unique(of["sample"][of["epoch"] == 0], return_counts=True)
        assert samples.tolist() == [0, 1, 2, 3]
        assert counts.tolist() == [4, 4, 4, 4]
    assert in_epoch["nbytes"][in_epoch["epoch"] == 0].sum() == stored
    assert decodes["nbytes"][decodes["epoch"] == 0].sum() == cubes.nbytes
    assert (reads["tier"] == Tier.file).all()


def test_gzip_around_a_file_is_reading_and_decoding(cubes, tmp_path):
    plain = tmp_path / "x.nii"
    header = bytearray(352)
    header[:4] = (348).to_bytes(4, "little")
    dims = np.array([3, 16, 16, 16, 1, 1, 1, 1], "<i2").tobytes()
    header[40:56] = dims
    header[70:74] = np.array([8, 32], "<i2").tobytes()
    header[108:112] = np.array([352], "<f4").tobytes()
    header[344:348] = b"n+1\0"
    plain.with_suffix(".nii.gz").write_bytes(gzip.compress(bytes(header) + cubes[0].tobytes()))
    data = hs.open(tmp_path / "x.nii.gz")
    with hs.trace.recording(tmp_path / "trace"):
        data.read(0)
    trace = load_trace(tmp_path)
    # Once for the header, and once for the sample: it is one piece.
    assert set(trace.of(Category.decode)["nbytes"].tolist()) == {352 + cubes[0].nbytes}
    size = (tmp_path / "x.nii.gz").stat().st_size
    assert np.count_nonzero(trace.of(Category.read)["nbytes"] == size) == 2


def test_staged_samples_are_copied_once_and_read_from_disk(cubes, tmp_path):
    np.save(tmp_path / "x.npy", cubes)
    data = hs.open(tmp_path / "x.npy", axes="NDHW")
    with (
        hs.trace.recording(tmp_path / "trace"),
        hs.Loader(data, batch_size=2, stage_dir=tmp_path / "staged") as loader,
    ):
        for _ in range(2):
            for _ in loader.numpy():
                pass
    trace = load_trace(tmp_path)
    (stage,) = trace.of(Category.stage)
    assert trace.strings[stage["name"]] == str(tmp_path / "x.npy")
    assert stage["nbytes"] >= cubes.nbytes
    reads = trace.of(Category.read)
    of_samples = reads[reads["sample"] >= 0]
    assert set(of_samples["tier"].tolist()) == {Tier.disk}
    # Once: then they are in memory.
    assert np.count_nonzero(of_samples["nbytes"] == cubes[0].nbytes) == len(cubes)
    exchanged = trace.of(Category.exchange)
    assert set(exchanged["tier"].tolist()) == {Tier.memory}
    assert exchanged["nbytes"][exchanged["epoch"] < 2].sum() == 2 * cubes.nbytes


def test_batches_that_wait_for_the_loop_are_told(cubes, tmp_path):
    """The loop takes a batch when the next one is there: that has then been waiting."""
    np.save(tmp_path / "x.npy", cubes)
    data = hs.open(tmp_path / "x.npy", axes="NDHW")
    with hs.trace.recording(tmp_path / "trace"), hs.Loader(data, prefetch=1) as loader:
        for _ in loader.numpy():
            while not loader._pipeline._prefetcher._ready:
                pass
    trace = load_trace(tmp_path)
    delays = trace.of(Category.delay)
    assert [(span["epoch"], span["step"]) for span in delays] == [(0, 1), (0, 2), (0, 3)]
    for delay, step in zip(delays, trace.of(Category.step)[1:], strict=True):
        assert delay["start"] < step["start"]
