"""Memory, or a file on local disk, that the ranks of a node share.

Neither has a name in a file system: others map it through the owner's descriptor, and the kernel
frees it with the last process that has it, however that ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGE_PAGE_NBYTES = 2 << 20


def node_name() -> str:
    """The same on all processes that can see each other's descriptors.

    ``HYPERSLAB_NODE`` overrides it: processes with different names share no memory.
    """
    if name := os.environ.get("HYPERSLAB_NODE"):
        return name
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink()
    except OSError:  # not Linux
        return f"{socket.gethostname()}:{os.getpid()}"
    return f"{socket.gethostname()} {boot} {namespace}"


@dataclass(frozen=True)
class Address:
    """Where another process of the node finds a segment."""

    path: str
    nbytes: int
    inode: int


class Segment:
    """Bytes that this process fills and others of its node read."""

    def __init__(self, nbytes: int, folder: Path | None = None) -> None:
        """In memory, or in a file in ``folder`` whose blocks are reserved now."""
        self._fd = _unnamed_file(folder)
        try:
            if folder:
                os.posix_fallocate(self._fd, 0, max(1, nbytes))
            os.ftruncate(self._fd, max(1, nbytes))
            self.bytes = _mapped(self._fd, max(1, nbytes), mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:
            os.close(self._fd)
            raise

    @property
    def address(self) -> Address:
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        return Address(path, len(self.bytes), os.fstat(self._fd).st_ino)

    def reserve(self, start: int, stop: int) -> None:
        """Gives a part its pages at once, which is faster than one at a time as they are met.

        Raises ``OSError`` where there is no room: to meet a page that cannot be had ends a process.
        """
        if start == stop:
            return
        self._make_large_pages(start, stop)
        os.posix_fallocate(self._fd, start, stop - start)
        # Older kernels refuse; pages are then mapped as they are met.
        self._advise(start // mmap.PAGESIZE * mmap.PAGESIZE, stop, _MADV_POPULATE_WRITE)

    def _make_large_pages(self, start: int, stop: int) -> None:
        """Has a part lie in large pages, from which others copy a fifth faster, where it can.

        By default Linux gives shared memory small pages, but those of a stretch are made into one
        when asked, if it has any: one is enough, and the rest need not be made before.
        """
        first = start // LARGE_PAGE_NBYTES * LARGE_PAGE_NBYTES
        last = min(-(-stop // LARGE_PAGE_NBYTES), len(self.bytes) // LARGE_PAGE_NBYTES)
        if (end := last * LARGE_PAGE_NBYTES) > first:
            for place in range(first, end, LARGE_PAGE_NBYTES):
                os.posix_fallocate(self._fd, place, mmap.PAGESIZE)
            # Older kernels refuse, and so do those without a free large page.
            self._advise(first, end, _MADV_COLLAPSE)

    def _advise(self, start: int, stop: int, advice: int) -> None:
        _libc.madvise(self.bytes.ctypes.data + start, stop - start, advice)

    def close(self) -> None:
        """Lets go of it; the memory is freed when no array views it any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.bytes = np.empty(0, np.uint8)


def map_segment(address: Address) -> NDArray[np.uint8]:
    """The bytes of another process's segment, read-only; OSError if it is out of reach."""
    fd = os.open(address.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if (status.st_ino, status.st_size) != (address.inode, address.nbytes):
            raise OSError(f"{address.path} is not the segment that was announced")
        return _mapped(fd, address.nbytes, mmap.PROT_READ)
    finally:
        os.close(fd)


_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
)


def _mapped(fd: int, nbytes: int, prot: int) -> NDArray[np.uint8]:
    """The first bytes of a file, at an address where large pages can be mapped, if it has room."""
    if nbytes < LARGE_PAGE_NBYTES or sys.platform != "linux":
        return np.frombuffer(mmap.mmap(fd, nbytes, prot=prot), np.uint8)
    # Python maps at any address: this finds free ones, and unmaps them in the end.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    room = np.frombuffer(mmap.mmap(-1, nbytes + LARGE_PAGE_NBYTES, flags, prot), np.uint8)
    start = -room.ctypes.data % LARGE_PAGE_NBYTES
    place = room.ctypes.data + start
    if _libc.mmap(place, nbytes, prot, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != place:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return room[start : start + nbytes]


def _unnamed_file(folder: Path | None) -> int:
    if folder is None and hasattr(os, "memfd_create"):
        return os.memfd_create("hyperslab", os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp(prefix="hyperslab-", dir=folder)
    os.unlink(path)  # noqa: PTH108
    return fd


@dataclass(frozen=True)
class SlotFormat:
    """How the arrays of one sample lie in a slot: one after the other, each on a cache line."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype[Any], ...]

    @property
    def sizes(self) -> list[int]:
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return [int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for shape, dtype in pairs]

    @property
    def nbytes(self) -> int:
        total = sum(map(_rounded, self.sizes))
        return -(-total // mmap.PAGESIZE) * mmap.PAGESIZE if total > mmap.PAGESIZE else total

    def arrays(self, slot: NDArray[np.uint8]) -> list[NDArray[Any]]:
        found, start = [], 0
        for shape, dtype, size in zip(self.shapes, self.dtypes, self.sizes, strict=True):
            found.append(slot[start : start + size].view(dtype).reshape(shape))
            start += _rounded(size)
        return found


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
