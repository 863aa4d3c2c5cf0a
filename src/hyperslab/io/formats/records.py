"""The records of a TFRecord file: where each lies, and whether it is as it was written."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import FormatError
from hyperslab.io.engine.buffers import empty_aligned
from hyperslab.io.engine.crc32c import crc32c
from hyperslab.io.engine.files import DataFile
from hyperslab.io.engine.inflated import InflatedStream, inflated
from hyperslab.io.engine.threads import ForkSafeLock
from hyperslab.io.formats.example import Extent, Feature, NotAnExample, read_features

HEADER = struct.Struct("<QI")
"""The length of a record, and the sum of those eight bytes; the record and its sum follow."""
SUM = struct.Struct("<I")
WINDOW_NBYTES = 512
"""Read at a time while hopping from one field to the next."""
SUMMED_NBYTES = 2**20
"""Read and summed at a time."""

Features = dict[str, Feature]


def masked(crc: int) -> int:
    """A CRC-32C as it is stored: so that sums of data which holds sums are not degenerate."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class RecordFile:
    """The records of ``file``, plain or inside gzip; offsets are those of the plain bytes.

    With ``verify``, the sum of a record is checked before its features are first given out.
    """

    def __init__(self, file: DataFile, *, verify: bool) -> None:
        self.file, self._verify = file, verify
        head = bytes(file.read(0, min(file.size, HEADER.size)))
        # A record of 560 KB may begin like a gzip file, but for the sum of its length.
        self.is_gzip = head[:3] == b"\x1f\x8b\x08" and not _is_header(head)
        self._lock = ForkSafeLock()
        self._extents: NDArray[np.int64] | None = None
        self._features: dict[int, Features] = {}
        self._verified: set[int] = set()

    def __len__(self) -> int:
        return len(self._all_extents())

    def features(self, number: int) -> Features:
        """The features of a record, once it is known to be as it was written."""
        offset, nbytes = map(int, self._all_extents()[number])
        if self.is_gzip:
            return self._features[number]
        self._check(number, Extent(offset, nbytes))
        with self.file.opened() as fd:
            stream = FileStream(self.file, fd, offset)
            return self._parsed(number, stream, offset + nbytes)

    def first_features(self) -> Features:
        """Those of the first record, unchecked, without a look at the others."""
        if not self.is_gzip:
            return self.features(0)
        with inflated(self.file).opened(check=False) as stream:
            for _, features in self._scan_inflated(stream):
                return features
        raise FormatError(f"{self.file.path} has no records")

    def read(self, extent: Extent) -> bytes:
        if not self.is_gzip:
            return bytes(self.file.read(*extent))
        with inflated(self.file).opened(extent.offset) as stream:
            return stream.read(extent.nbytes)

    def _all_extents(self) -> NDArray[np.int64]:
        """Where each record lies, looked up when that is first asked for."""
        with self._lock:
            if self._extents is None:
                found = self._find_inflated() if self.is_gzip else self._find_plain()
                self._extents = np.array(found, np.int64).reshape(-1, 2)
            return self._extents

    def _find_plain(self) -> list[Extent]:
        found: list[Extent] = []
        with self.file.opened() as fd:
            stream = FileStream(self.file, fd, 0)
            while header := stream.read_up_to(HEADER.size):
                extent = self._extent(len(found), header, stream.position)
                self.file.check_range(extent.offset, extent.nbytes + SUM.size)
                stream.skip(extent.nbytes + SUM.size)
                found.append(extent)
        return found

    def _find_inflated(self) -> list[Extent]:
        """Gzip must be passed through as a whole, so that everything is done in one pass."""
        found: list[Extent] = []
        with inflated(self.file).opened() as stream:
            for extent, features in self._scan_inflated(stream):
                self._features[len(found)] = features
                found.append(extent)
        return found

    def _scan_inflated(self, stream: InflatedStream) -> Iterator[tuple[Extent, Features]]:
        number = 0
        while header := stream.read_up_to(HEADER.size):
            extent = self._extent(number, header, stream.position)
            total = _Sum()
            stream.watch = total.add if self._verify else None
            features = self._parsed(number, stream, extent.offset + extent.nbytes)
            stream.watch = None
            self._check_sum(number, total.crc, stream.read(SUM.size))
            yield extent, features
            number += 1

    def _extent(self, number: int, header: bytes, position: int) -> Extent:
        if not _is_header(header):
            raise FormatError(
                f"{self.file.path} is damaged or not a TFRecord: the length of record {number}, at "
                f"byte {position - len(header)}, does not have its checksum"
            )
        return Extent(position, HEADER.unpack(header)[0])

    def _parsed(self, number: int, stream: InflatedStream | FileStream, end: int) -> Features:
        try:
            return read_features(stream, end)
        except NotAnExample as error:
            raise FormatError(f"record {number} of {self.file.path}: {error}") from error

    def _check(self, number: int, extent: Extent) -> None:
        if not self._verify or number in self._verified:
            return
        total, end = _Sum(), extent.offset + extent.nbytes
        buffer = empty_aligned((min(SUMMED_NBYTES, extent.nbytes),), np.uint8)
        with self.file.opened() as fd:
            for start in range(extent.offset, end, SUMMED_NBYTES):
                part = buffer[: end - start]
                self.file.fill(fd, part.data, start)
                total.add(part)
        self._check_sum(number, total.crc, self.file.read(end, SUM.size))
        self._verified.add(number)

    def _check_sum(self, number: int, crc: int, stored: bytes | bytearray) -> None:
        if self._verify and SUM.pack(masked(crc)) != stored:
            raise FormatError(
                f"record {number} of {self.file.path} is damaged: its checksum is "
                f"{masked(crc):#010x}, and {SUM.unpack(stored)[0]:#010x} is stored"
            )


class FileStream:
    """The bytes of a plain file from ``position``; what is skipped is not read."""

    def __init__(self, file: DataFile, fd: int, position: int) -> None:
        self._file, self._fd = file, fd
        self.position = position
        self._window, self._window_start = b"", 0

    def read(self, nbytes: int) -> bytes:
        self._file.check_range(self.position, nbytes)
        return self.read_up_to(nbytes)

    def read_up_to(self, nbytes: int) -> bytes:
        """As many bytes as there are until the end."""
        start = self.position - self._window_start
        if not 0 <= start <= len(self._window) - nbytes:
            self._fetch(nbytes)
            start = 0
        found = self._window[start : start + nbytes]
        self.position += len(found)
        return found

    def skip(self, nbytes: int) -> None:
        self.position += nbytes

    def _fetch(self, nbytes: int) -> None:
        left = max(0, self._file.size - self.position)
        buffer = bytearray(min(left, max(nbytes, WINDOW_NBYTES)))
        self._file.fill(self._fd, memoryview(buffer), self.position)
        self._window, self._window_start = bytes(buffer), self.position


class _Sum:
    """The CRC-32C of what is added to it."""

    def __init__(self) -> None:
        self.crc = 0

    def add(self, piece: memoryview | NDArray[Any]) -> None:
        self.crc = crc32c(piece, self.crc)


def _is_header(header: bytes) -> bool:
    if len(header) < HEADER.size:
        return False
    return header[8:] == SUM.pack(masked(crc32c(header[:8])))
