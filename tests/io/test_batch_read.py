import errno
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hyperslab.io import batch_read, box_copy
from hyperslab.io.batch_read import BATCH_SIZE, can_batch, read_batch
from hyperslab.io.contiguous import ContiguousArray
from hyperslab.io.files import DataFile
from hyperslab.layout import Box
from hyperslab.testing.specimens import numbered, read

pytestmark = pytest.mark.skipif(not can_batch(), reason="this system has no io_submit")


@pytest.fixture
def path(tmp_path):
    numbered((200, 64), "uint8").tofile(tmp_path / "a.bin")
    return tmp_path / "a.bin"


@pytest.fixture
def contexts(monkeypatch):
    """As in a new process."""
    monkeypatch.setattr(batch_read, "_contexts", batch_read._Contexts())


def read_rows(path, wanted, nbytes=64, flags=0):
    out = np.zeros((len(wanted), nbytes), np.uint8)
    wanted = np.array(wanted)
    with path.open("rb") as file:
        addresses = out.ctypes.data + nbytes * np.arange(len(wanted))
        counts = read_batch(file.fileno(), wanted * 64, addresses, nbytes, flags)
    return counts, out


@pytest.mark.parametrize("num", [1, 2, BATCH_SIZE])
def test_every_read_of_a_batch_is_done(path, num):
    wanted = [(7 * row) % 200 for row in range(num)]
    counts, out = read_rows(path, wanted)
    assert counts.tolist() == [64] * num
    np.testing.assert_array_equal(out, numbered((200, 64), "uint8")[wanted])


def test_reads_past_the_end_are_short(path):
    counts, _ = read_rows(path, [0, 199, 200, 300], nbytes=100)
    assert counts.tolist() == [100, 64, 0, 0]


def test_a_descriptor_that_cannot_be_read_gives_nothing(path):
    out = np.zeros(64, np.uint8)
    with path.open("ab") as file:
        counts = read_batch(file.fileno(), np.zeros(1, int), np.array([out.ctypes.data]), 64)
    assert counts.max() <= 0
    assert read_rows(path, [3])[0].tolist() == [64]


def test_more_threads_than_contexts(path, contexts):
    def work(number):
        return all(
            np.array_equal(read_rows(path, [number, turn])[1][1], expected[turn])
            for turn in range(50)
        )

    expected = numbered((200, 64), "uint8")
    with ThreadPoolExecutor(3 * batch_read.MAX_CONTEXTS) as threads:
        assert all(threads.map(work, range(3 * batch_read.MAX_CONTEXTS)))


@pytest.mark.parametrize(("code", "again"), [(errno.EAGAIN, True), (errno.ENOSYS, False)])
def test_without_a_context_everything_is_read_all_the_same(
    path, contexts, monkeypatch, code, again
):
    def refuse(self):
        raise OSError(code, "no")

    monkeypatch.setattr(batch_read._Context, "__init__", refuse)
    assert read_rows(path, [1, 2])[0].tolist() == [0, 0]
    assert can_batch() is again
    monkeypatch.setattr(box_copy, "DIRECT_NBYTES", 1)
    reader = ContiguousArray(DataFile.look_at(path), 0, (200, 64), "uint8")
    array = numbered((200, 64), "uint8")
    np.testing.assert_array_equal(read(reader, Box.of((3, 180), (5, 60))), array[3:180, 5:60])


def test_a_context_is_not_used_again_after_an_interruption(path, contexts, monkeypatch):
    read_rows(path, [1])
    finished = batch_read._Context._finished

    def interrupt(self, num):
        raise KeyboardInterrupt

    monkeypatch.setattr(batch_read._Context, "_finished", interrupt)
    with pytest.raises(KeyboardInterrupt):
        read_rows(path, [2, 3])
    monkeypatch.setattr(batch_read._Context, "_finished", finished)
    assert not batch_read._contexts._free
    assert read_rows(path, [4])[0].tolist() == [64]


def test_a_forked_child_reads_too(path):
    read_rows(path, [1])
    if not (child := os.fork()):
        counts, _ = read_rows(path, [1, 2, 3])
        os._exit(0 if counts.tolist() == [64] * 3 else 1)
    assert os.waitpid(child, 0)[1] == 0
