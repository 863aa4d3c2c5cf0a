"""What the HDF5 library writes to: a file that never fails while the library looks."""

from __future__ import annotations

import os


class Sink:
    """The open file ``fd``, as h5py wants its file objects.

    The library cannot be left in peace after a write that failed, as when the disk is full: it
    tries again whenever it closes something. So an error is kept for ``check``, and what is written
    after it is dropped.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._position = 0
        self._error: OSError | None = None

    def check(self) -> None:
        """Raises the first error there was."""
        if self._error is not None:
            raise self._error

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {
            os.SEEK_SET: 0,
            os.SEEK_CUR: self._position,
            os.SEEK_END: os.fstat(self._fd).st_size,
        }
        self._position = start[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int) -> bytes:
        data = os.pread(self._fd, size, self._position)
        self._position += len(data)
        return data

    def readinto(self, buffer: memoryview) -> int:
        count = os.preadv(self._fd, [buffer], self._position)
        self._position += count
        return count

    def write(self, data: memoryview) -> int:
        view = memoryview(data).cast("B")
        if self._error is None:
            self._write(view)
        self._position += len(view)
        return len(view)

    def _write(self, view: memoryview) -> None:
        done = 0
        try:
            while done < len(view):
                done += os.pwrite(self._fd, view[done:], self._position + done)
        except OSError as error:
            self._error = error

    def truncate(self, size: int | None = None) -> int:
        size = self._position if size is None else size
        if self._error is None:
            try:
                os.ftruncate(self._fd, size)
            except OSError as error:
                self._error = error
        return size

    def flush(self) -> None:
        """Nothing is held back."""
