"""Files that many threads, and forked processes, have open at once."""

import gzip
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

import hyperslab as hs
from hyperslab.io.engine import files
from hyperslab.io.engine.files import DataFile
from hyperslab.io.engine.inflated import inflated
from hyperslab.io.formats import npy
from hyperslab.io.formats.tfrecord import RecordFile
from hyperslab.testing.specimens import num_open_files


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(100)))
    return path


def test_a_file_that_is_slow_to_open_holds_up_no_other(path, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.write_bytes(b"other")
    slow, quick = DataFile.look_at(path), DataFile.look_at(other)
    is_opening, other_was_read, real_open = threading.Event(), threading.Event(), os.open

    def slow_open(name, *args):
        if name == path:
            is_opening.set()
            assert other_was_read.wait(60)
        return real_open(name, *args)

    monkeypatch.setattr(os, "open", slow_open)
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(slow.read, 0, 2)
        assert is_opening.wait(60)
        assert quick.read(0, 5) == b"other"
        other_was_read.set()
        assert waits.result() == b"\0\1"


def test_threads_that_open_a_file_together_keep_one_descriptor(path, monkeypatch):
    file, real_open = DataFile.look_at(path), os.open
    both_are_at_it = threading.Barrier(2, timeout=60)

    def open_together(name, *args):
        both_are_at_it.wait()
        return real_open(name, *args)

    monkeypatch.setattr(files, "MAX_OPEN", 10**6)  # those of other tests stay open
    before = num_open_files()
    monkeypatch.setattr(os, "open", open_together)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda start: file.read(start, 3), [0, 50]))
    assert found == [b"\0\1\2", b"234"]
    assert num_open_files() == before + 1


def read_plain(folder):
    (folder / "a").write_bytes(b"plain")
    file = DataFile.look_at(folder / "a")
    return files._open_files._lock, lambda: bytes(file.read(0, 5)) == b"plain"


def read_npy(folder):
    np.save(folder / "a.npy", np.arange(5))
    data = hs.open(folder / "a.npy", axes="W")
    return npy._EVALUATES, lambda: data.read(0).tolist() == [0, 1, 2, 3, 4]


def read_gzip(folder):
    (folder / "a.gz").write_bytes(gzip.compress(b"inside"))
    file = inflated(DataFile.look_at(folder / "a.gz"))

    def read():
        for _ in range(2):  # from the second time on, it looks for a mark
            with file.opened() as stream:
                found = stream.read(6)
        return found == b"inside"

    return file._lock, read


def read_records(folder):
    (folder / "a.tfrecord").write_bytes(gzip.compress(b""))
    file = RecordFile(DataFile.look_at(folder / "a.tfrecord"), verify=True)
    return file._lock, lambda: len(file) == 0


@pytest.mark.parametrize("reads", [read_plain, read_npy, read_gzip, read_records])
def test_a_forked_process_reads_whoever_held_the_lock_in_its_parent(reads, tmp_path):
    lock, read = reads(tmp_path)
    with ExitStack() as held:
        held.enter_context(lock)
        child = os.fork()
        if not child:
            held.pop_all()  # the parent's
            signal.alarm(30)
            os._exit(0 if read() else 1)
    assert os.waitpid(child, 0)[1] == 0


LINUX_ONLY = [name for name in dir(os) if name.startswith(("POSIX_FADV", "RWF_", "MFD_"))]
LINUX_ONLY += ["posix_fadvise", "posix_fallocate", "memfd_create", "sched_getaffinity"]


def test_systems_without_advice_read_and_keep_samples_too(tmp_path, monkeypatch):
    images = np.arange(3 * 40 * 50, dtype=np.int16).reshape(3, 40, 50)
    np.save(tmp_path / "images.npy", images)
    for name in LINUX_ONLY:
        monkeypatch.delattr(os, name)
    data = hs.open(tmp_path / "images.npy", axes="NHW")
    np.testing.assert_array_equal(data.read(1, (slice(3, 30), slice(5, 9))), images[1, 3:30, 5:9])
    with hs.Loader(data, shuffle="none", batch_size=3) as loader:
        for _ in range(2):
            [found] = loader.numpy()
            np.testing.assert_array_equal(found, images)
