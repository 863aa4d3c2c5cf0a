import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hyperslab.store.budget import is_memory
from hyperslab.store.segment import (
    LARGE_PAGE_NBYTES,
    Address,
    Segment,
    SlotFormat,
    map_segment,
)


@pytest.mark.parametrize("on_disk", [False, True])
def test_another_process_sees_what_is_written_and_cannot_write(on_disk, tmp_path):
    segment = Segment(8192, tmp_path if on_disk else None)
    segment.reserve(0, 8192)
    seen = map_segment(segment.address)
    segment.bytes[5000] = 7
    assert seen[5000] == 7
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 1
    segment.close()
    assert seen[5000] == 7
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_leaves_no_memory_behind():
    code = (
        "from hyperslab.store.segment import Segment\n"
        "s = Segment(1 << 20); s.bytes[:] = 1; print(s.address.path, flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    path = Path(process.stdout.readline().strip())
    assert path.exists()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not path.exists()


def test_a_descriptor_that_now_is_another_file_is_not_mapped(tmp_path):
    fd = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    try:
        with pytest.raises(OSError, match="not the segment that was announced"):
            map_segment(Address(f"/proc/{os.getpid()}/fd/{fd}", 100, 1))
    finally:
        os.close(fd)


def test_arrays_of_a_slot_lie_on_cache_lines_and_apart():
    slots = SlotFormat(((3, 5), (), (7,)), (np.dtype("i2"), np.dtype("f8"), np.dtype("u1")))
    memory = np.zeros(slots.nbytes, np.uint8)
    arrays = slots.arrays(memory)
    for number, array in enumerate(arrays, 1):
        array[...] = number
        assert (array.ctypes.data - memory.ctypes.data) % 64 == 0
    assert [array.flat[0] for array in arrays] == [1, 2, 3]
    assert [array.shape for array in arrays] == [(3, 5), (), (7,)]


def test_shared_memory_is_told_from_disks():
    shm = Path("/dev/shm")
    if shm.is_dir():
        assert is_memory(shm)
    assert not is_memory(Path("/proc"))


def test_segments_are_mapped_where_large_pages_can_be():
    segment = Segment(LARGE_PAGE_NBYTES + 5)
    seen = map_segment(segment.address)
    assert segment.bytes.ctypes.data % LARGE_PAGE_NBYTES == 0
    assert seen.ctypes.data % LARGE_PAGE_NBYTES == 0
    assert len(seen) == LARGE_PAGE_NBYTES + 5
    segment.close()


def test_parts_keep_what_was_written_while_others_are_reserved():
    part = LARGE_PAGE_NBYTES // 4 + 3 * 4096  # most large pages have several parts
    segment = Segment(7 * part)
    seen = map_segment(segment.address)
    for number in range(7):
        segment.reserve(number * part, (number + 1) * part)
        assert not segment.bytes[number * part : (number + 1) * part].any()
        segment.bytes[number * part : (number + 1) * part] = number + 1
    np.testing.assert_array_equal(seen, np.repeat(np.arange(1, 8, dtype=np.uint8), part))
    segment.close()


def test_what_is_reserved_lies_in_large_pages_where_the_kernel_makes_them(monkeypatch):
    advised = []
    monkeypatch.setattr(Segment, "_advise", lambda self, *advice: advised.append(advice))
    segment = Segment(5 * LARGE_PAGE_NBYTES + 4096)
    segment.reserve(LARGE_PAGE_NBYTES + 4096, 3 * LARGE_PAGE_NBYTES + 4096)
    collapse = 25
    assert advised[0] == (LARGE_PAGE_NBYTES, 4 * LARGE_PAGE_NBYTES, collapse)
    segment.reserve(5 * LARGE_PAGE_NBYTES, 5 * LARGE_PAGE_NBYTES + 4096)  # less than a large page
    assert [advice for *_, advice in advised].count(collapse) == 1
    segment.close()
