import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hyperslab.store.budget import is_memory
from hyperslab.store.segment import Address, Segment, SlotFormat, map_segment


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
