"""The bytes inside gzip files, and arrays among them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import FormatError
from hyperslab.io.engine.contiguous import ContiguousArray
from hyperslab.io.engine.files import DataFile
from hyperslab.io.engine.threads import ForkSafeLock
from hyperslab.io.reader import Storage
from hyperslab.layout import Box
from hyperslab.trace import active

PIECE_NBYTES = 2**20
"""Inflated at a time at most, so that a small file which inflates to a huge one fills no memory."""
INPUT_NBYTES = 2**16
"""Read from the file at a time."""
MAX_RATIO = 1032
"""Deflate cannot do better: a byte becomes at most this many."""
MAX_MARKS = 32
FIRST_SPACING = 4 * 2**20
"""Between two marks, in inflated bytes; in large files it grows, so that marks stay few."""
GZIP, ZLIB = 31, 15
"""What surrounds the deflated bytes, with a sum and a length to check: 16 more stands for gzip."""


def inflater(surrounding: int = GZIP) -> Any:
    """A decompressor of one gzip member, or zlib stream, which checks its sum at the end."""
    return _library().decompressobj(surrounding)


@lru_cache(maxsize=1)
def _library() -> Any:
    """The faster library of the same interface, where there is one."""
    try:
        from zlib_ng import zlib_ng
    except ImportError:
        return zlib
    return zlib_ng


@dataclass(frozen=True)
class _Mark:
    """A place in the inflated bytes from which inflating can go on."""

    position: int
    file_position: int
    rest: bytes
    """Read from the file before ``file_position``, and not yet inflated."""
    inflater: Any


class InflatedFile:
    """What ``file`` holds when its gzip compression is undone; get it from ``inflated``.

    gzip has no index. The first read therefore runs through the whole file, checks its sums, and
    leaves marks behind, some 100 KB each; later reads begin at the last mark before what they want,
    and end with it. No more than a piece is inflated at a time.
    """

    def __init__(self, file: DataFile) -> None:
        self.file = file
        self._is_checked = False
        self._lock = ForkSafeLock()
        self._marks: list[_Mark] = []
        self._spacing = FIRST_SPACING

    @contextmanager
    def opened(self, offset: int = 0, *, check: bool = True) -> Iterator[InflatedStream]:
        """A stream that stands at ``offset``.

        Leaving the block raises ``FormatError`` for a file that is damaged anywhere: only then is
        what was read to be believed. Without ``check``, it is not.
        """
        with self.file.opened() as fd:
            stream = InflatedStream(self.file, fd, self._mark_before(offset), self._passed)
            stream.skip(offset - stream.position)
            yield stream
            if check and not self._is_checked:
                stream.skip_to_end()
                self._is_checked = True

    def _mark_before(self, offset: int) -> _Mark | None:
        if not self._is_checked:
            return None
        with self._lock:
            return next((m for m in reversed(self._marks) if m.position <= offset), None)

    def _passed(self, position: int, mark: Callable[[], _Mark]) -> None:
        with self._lock:
            last = self._marks[-1].position if self._marks else 0
            if position < last + self._spacing:
                return
            self._marks.append(mark())
            if len(self._marks) > MAX_MARKS:
                self._marks = self._marks[1::2]
                self._spacing *= 2


@lru_cache(maxsize=16)
def inflated(file: DataFile) -> InflatedFile:
    """The inside of ``file``, one for all its readers; that of the last few files is kept."""
    return InflatedFile(file)


class InflatedStream:
    """Inflated bytes, passed through from first to last."""

    def __init__(
        self,
        file: DataFile,
        fd: int,
        start: _Mark | None,
        passed: Callable[[int, Callable[[], _Mark]], None],
    ) -> None:
        self._file, self._fd, self._passed = file, fd, passed
        start = start or _Mark(0, 0, b"", inflater())
        self._end = start.position
        self._file_position = start.file_position
        self._rest = start.rest
        self._inflater = start.inflater.copy()
        self._ready = memoryview(b"")
        """What is inflated and not yet passed, up to ``_end``."""
        self.watch: Callable[[memoryview], object] | None = None
        """Is told of all bytes that are passed."""

    @property
    def position(self) -> int:
        return self._end - len(self._ready)

    def read_into(self, buffer: memoryview) -> None:
        done = 0
        for piece in self._pieces(len(buffer)):
            buffer[done : done + len(piece)] = piece
            done += len(piece)

    def read(self, nbytes: int) -> bytes:
        return b"".join(self._pieces(nbytes))

    def read_up_to(self, nbytes: int) -> bytes:
        """As many bytes as there are until the end; for small numbers of them."""
        found = b""
        while len(found) < nbytes and (piece := self._next(nbytes - len(found))):
            found += bytes(piece)
        return found

    def skip(self, nbytes: int) -> None:
        for _ in self._pieces(nbytes):
            pass

    def skip_to_end(self) -> None:
        while self._next(PIECE_NBYTES):
            pass

    def _pieces(self, nbytes: int) -> Iterator[memoryview]:
        end = self.position + nbytes
        while self.position < end:
            piece = self._next(end - self.position)
            if not piece:
                raise FormatError(
                    f"{self._file.path} is truncated or damaged: it inflates to {self.position} "
                    f"bytes, and bytes up to {end} were to be read"
                )
            yield piece

    def _next(self, at_most: int) -> memoryview:
        """The next bytes; none at the end of the file."""
        if not self._ready:
            self._ready = memoryview(self._inflated())
            self._end += len(self._ready)
            if self._ready and not self._inflater.eof:
                self._passed(self._end, self._mark)
        piece, self._ready = self._ready[:at_most], self._ready[at_most:]
        if self.watch is not None:
            self.watch(piece)
        return piece

    def _inflated(self) -> bytes:
        while not self._inflater.eof or self._begin_member():
            source = self._rest or self._fetch()
            if piece := self._inflate(source):
                return piece
            if not source and not self._inflater.eof:
                raise FormatError(
                    f"{self._file.path} is truncated: its gzip data breaks off after "
                    f"{self._file.size} bytes"
                )
        return b""

    def _inflate(self, source: bytes) -> bytes:
        try:
            with active.decoding(self._file.path) as span:
                piece: bytes = self._inflater.decompress(source, PIECE_NBYTES)
                span.nbytes = len(piece)
        except (zlib.error, _library().error) as error:
            raise FormatError(f"{self._file.path} is damaged: {error}") from error
        ended = self._inflater.eof
        self._rest = self._inflater.unused_data if ended else self._inflater.unconsumed_tail
        return piece

    def _begin_member(self) -> bool:
        """Gets ready for the gzip member after the one that has ended, if there is one.

        Files may be several members in a row, and end in zeros.
        """
        while not (rest := self._rest.lstrip(b"\0")):
            self._rest = self._fetch()
            if not self._rest:
                return False
        self._rest = rest
        self._inflater = inflater()
        return True

    def _fetch(self) -> bytes:
        nbytes = min(INPUT_NBYTES, self._file.size - self._file_position)
        buffer = bytearray(nbytes)
        with active.reading(self._file.path, nbytes):
            self._file.fill(self._fd, memoryview(buffer), self._file_position)
        self._file_position += nbytes
        return bytes(buffer)

    def _mark(self) -> _Mark:
        return _Mark(self._end, self._file_position, self._rest, self._inflater.copy())


class StreamedArray(ContiguousArray):
    """An array whose bytes begin at ``offset`` of what the gzip file ``file`` holds.

    A read passes through the file up to the box's end, and keeps only the box.
    """

    def _check(self, start: int, stop: int) -> None:
        if stop > self._file.size * MAX_RATIO:
            raise FormatError(
                f"{self._file.path} is truncated or damaged: its array of {self.dtype} "
                f"{self.shape} would end at byte {stop}, more than its {self._file.size} "
                "compressed bytes can hold"
            )

    def storage(self) -> Storage:
        return Storage(
            kind="contiguous",
            nbytes=self._file.size,
            compression="gzip",
            fortran=self._fortran,
            note="gzip around the whole file: every box inflates all that comes before it",
        )

    def read(self, box: Box, out: NDArray[Any]) -> None:
        if not box:
            return
        copy = self._copy_of(box, out)
        with inflated(self._file).opened(copy.offset) as stream:
            copy.run(_RowReader(stream), max_threads=1)


class _RowReader:
    """Fills rows, which ascend, from a stream that only goes forward."""

    def __init__(self, stream: InflatedStream) -> None:
        self._stream = stream

    def fill_rows(self, rows: NDArray[np.uint8], offset: int, step: int) -> None:
        for number, row in enumerate(rows):
            self._stream.skip(offset + number * step - self._stream.position)
            self._stream.read_into(row.data)
