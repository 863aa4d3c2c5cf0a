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


def machine_name() -> str:
    """The same on all processes of one machine, in whatever containers they run."""
    if name := os.environ.get("HYPERSLAB_NODE"):
        return name
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()


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
                _allocate(self._fd, 0, max(1, nbytes))
            os.ftruncate(self._fd, max(1, nbytes))
            self._map = mmap.mmap(self._fd, max(1, nbytes))
        except OSError:
            os.close(self._fd)
            raise
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    @property
    def address(self) -> Address:
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        return Address(path, len(self.bytes), os.fstat(self._fd).st_ino)

    def duplicate_fd(self) -> int:
        """Another descriptor of the same file, for the caller to close."""
        return os.dup(self._fd)

    def reserve(self, start: int, stop: int) -> None:
        """Gives a part its pages at once, which is faster than one at a time as they are met.

        Raises ``OSError`` where there is no room: to meet a page that cannot be had ends a process.
        """
        if start == stop:
            return
        _allocate(self._fd, start, stop - start)
        place = self.bytes[start:stop].ctypes.data
        first = place // mmap.PAGESIZE * mmap.PAGESIZE
        if sys.platform == "linux":  # older kernels refuse; pages are mapped as they are met
            _madvise(first, place + stop - start - first, _MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Lets go of it; the memory is freed when no array views it any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.bytes = np.empty(0, np.uint8)


def map_segment(address: Address) -> NDArray[np.uint8]:
    """The bytes of another process's segment, read-only; OSError if it is out of reach."""
    fd = open_segment(address)
    try:
        return view_segment(fd, address)
    finally:
        os.close(fd)


def open_segment(address: Address) -> int:
    """A descriptor of another process's segment, for reading."""
    return os.open(address.path, os.O_RDONLY | os.O_CLOEXEC)


def view_segment(fd: int, address: Address) -> NDArray[np.uint8]:
    """The bytes behind a descriptor, read-only; OSError if they are not those announced."""
    status = os.fstat(fd)
    if (status.st_ino, status.st_size) != (address.inode, address.nbytes):
        raise OSError(f"{address.path} is not the segment that was announced")
    return np.frombuffer(mmap.mmap(fd, address.nbytes, prot=mmap.PROT_READ), np.uint8)


_MADV_POPULATE_WRITE = 23
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _allocate(fd: int, start: int, nbytes: int) -> None:
    """Reserves room for bytes of a file, where the system can: macOS cannot."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, start, nbytes)


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
