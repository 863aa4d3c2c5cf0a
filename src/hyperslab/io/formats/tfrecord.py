"""TFRecord files of ``tf.train.Example``, such as MLPerf's CosmoFlow records."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hyperslab.errors import ConfigError, FormatError
from hyperslab.io.engine.buffers import empty_aligned
from hyperslab.io.engine.contiguous import ContiguousArray
from hyperslab.io.engine.crc32c import crc32c
from hyperslab.io.engine.files import DataFile
from hyperslab.io.engine.inflated import InflatedStream, StreamedArray, inflated
from hyperslab.io.engine.threads import ForkSafeLock
from hyperslab.io.formats.tf_example import (
    Extent,
    Feature,
    NotAnExample,
    decode_list,
    read_features,
)
from hyperslab.io.reader import STACKED, ArrayReader, Format, Storage
from hyperslab.layout import Box, Span
from hyperslab.trace import active

LIST_DTYPES: dict[str, np.dtype[Any]] = {"float": np.dtype(np.float32), "int64": np.dtype(np.int64)}
DESCRIPTIONS = {"bytes": "several strings of bytes", "empty": "empty", "missing": "missing"}
MISSING = Feature("missing", Extent(0, 0), None)
HEADER = struct.Struct("<QI")
"""The length of a record, and the sum of those eight bytes; the record and its sum follow."""
SUM = struct.Struct("<I")
WINDOW_NBYTES = 512
"""Read at a time while hopping from one field to the next."""
SUMMED_NBYTES = 2**20
"""Read and summed at a time."""

Features = dict[str, Feature]


class TFRecord(Format):
    """Records with named features, plain or compressed with gzip as a whole.

    Options of ``hyperslab.open``:
        shape: Of each array in one record, by its name. Needed for features that are strings of
            bytes; for others it is that of a vector if it is left out.
        dtype: Of features that are strings of bytes, by name. Floats are float32, ints int64.
        stacked: Whether arrays have a dim of records before all others. With ``stacked=False`` a
            file must hold one record alone, and files need not be looked into to count samples.
        verify: Whether a record's checksum is checked before it is first read from. This reads the
            whole record once, where a box may be a small part of it.
    """

    @classmethod
    def names(cls, path: Path, *, verify: bool = True, **_: Any) -> Sequence[str]:
        features = RecordFile(DataFile.look_at(path), verify=verify).first_features()
        return sorted(features)

    @classmethod
    def open(  # type: ignore[override]
        cls,
        path: Path,
        names: Sequence[str],
        *,
        shape: Mapping[str, Sequence[int]] | None = None,
        dtype: Mapping[str, DTypeLike] | None = None,
        stacked: bool = True,
        verify: bool = True,
    ) -> list[ArrayReader]:
        file = RecordFile(DataFile.look_at(path), verify=verify)
        shapes, dtypes = _by_name("shape", shape, names), _by_name("dtype", dtype, names)
        return [
            RecordArray(file, name, *_type_of(file, name, shapes, dtypes), stacked=stacked)
            for name in names
        ]


class RecordArray(ArrayReader):
    """The feature ``name`` of every record, each of ``shape``; ``dtype`` is that of its bytes."""

    def __init__(
        self,
        file: RecordFile,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        stacked: bool,
    ) -> None:
        self._file, self._name, self._stacked = file, name, stacked
        self._record_shape, self._stored = shape, dtype
        self.shape = (len(file), *shape) if stacked else shape
        self.dtype = dtype.newbyteorder("=")
        self.axes = STACKED if stacked else None

    def storage(self) -> Storage:
        size = self._file.file.size
        if self._file.is_gzip:
            note = "gzip around the whole file, whose size this is, with all its features"
            return Storage(kind="records", nbytes=size, compression="gzip", note=note)
        nbytes = math.prod(self.shape) * self.dtype.itemsize  # ints are stored in fewer
        return Storage(kind="records", nbytes=min(size, nbytes))

    def read(self, box: Box, out: NDArray[Any]) -> None:
        if not self._stacked:
            self._check_single()
            box, out = Box((Span(0, 1), *box.spans)), out[None]
        numbers, part = box.spans[0], Box(box.spans[1:])
        for number in range(*numbers) if part else ():
            self._read_record(number, part, out[number - numbers.start, ...])

    def _check_single(self) -> None:
        if len(self._file) != 1:
            raise FormatError(
                f"{self._file.file.path} has {len(self._file)} records, and one was expected: open "
                "it with stacked=True"
            )

    def _read_record(self, number: int, part: Box, out: NDArray[Any]) -> None:
        feature = self._file.features(number).get(self._name, MISSING)
        what = f"feature {self._name!r} in record {number} of {self._file.file.path}"
        if feature.kind in LIST_DTYPES and self.dtype != LIST_DTYPES[feature.kind]:
            raise FormatError(
                f"{what} is a list of {LIST_DTYPES[feature.kind]}, and {self.dtype} was expected"
            )
        if feature.values is not None:
            self._check_nbytes(feature.values.nbytes, what)
            cls = StreamedArray if self._file.is_gzip else ContiguousArray
            offset = feature.values.offset
            cls(self._file.file, offset, self._record_shape, self._stored).read(part, out)
        elif feature.kind in LIST_DTYPES:
            values = _decoded(self._file, feature, what)
            self._check_nbytes(values.nbytes, what)
            out[...] = values.reshape(self._record_shape)[tuple(slice(*s) for s in part.spans)]
        else:
            raise FormatError(f"{what} is {DESCRIPTIONS[feature.kind]}, and one was expected")

    def _check_nbytes(self, nbytes: int, what: str) -> None:
        expected = math.prod(self._record_shape) * self._stored.itemsize
        if nbytes != expected:
            raise FormatError(
                f"{what} has {nbytes} bytes, and {self.dtype} {self._record_shape} has {expected}"
            )


def _by_name(option: str, given: Any, names: Sequence[str]) -> dict[str, Any]:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    if len(names) != 1:
        raise ConfigError(
            f"{option}={given!r} is given for {len(names)} arrays: give one for each, such as "
            f"{option}={{{names[0]!r}: {given!r}}}"
        )
    return {names[0]: given}


def _type_of(
    file: RecordFile, name: str, shapes: Mapping[str, Any], dtypes: Mapping[str, Any]
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape of one record's array, and the dtype of its bytes.

    The file is looked into only for what was not given.
    """
    shape = _checked_shape(name, shapes[name]) if name in shapes else None
    dtype = _checked_dtype(name, dtypes[name]) if name in dtypes else None
    if shape is not None and dtype is not None:
        return shape, dtype
    features = file.first_features()
    if name not in features:
        raise FormatError(f"{file.file.path} has no feature {name!r}; it has {sorted(features)}")
    feature = features[name]
    what = f"feature {name!r} of {file.file.path}"
    if feature.kind == "empty":
        raise FormatError(f"{what} has no values")
    if feature.kind == "bytes":
        nbytes = (feature.values or feature.list).nbytes
        raise ConfigError(
            f"{what} is {nbytes} bytes of any kind: give its shape and dtype, such as "
            f"shape={{{name!r}: (128, 128, 128, 4)}}, dtype={{{name!r}: 'int16'}}"
        )
    if shape is None:
        shape = (len(_decoded(file, feature, what)),)
    return shape, LIST_DTYPES[feature.kind] if dtype is None else dtype


def _checked_shape(name: str, given: Any) -> tuple[int, ...]:
    try:
        shape = tuple(index(extent) for extent in given)
    except TypeError:
        shape = (-1,)
    if any(extent < 0 for extent in shape):
        raise ConfigError(f"shape {given!r} of {name!r} is not a tuple of extents, such as (4,)")
    return shape


def _checked_dtype(name: str, given: DTypeLike) -> np.dtype[Any]:
    try:
        dtype = np.dtype(given)
    except (TypeError, ValueError, SyntaxError):
        dtype = np.dtype(object)
    if dtype.kind not in "biufc":
        raise ConfigError(f"dtype {given!r} of {name!r} is not one of numbers, such as 'int16'")
    return dtype


def _decoded(file: RecordFile, feature: Feature, what: str) -> NDArray[Any]:
    try:
        return decode_list(feature.kind, file.read(feature.list))
    except NotAnExample as error:
        raise FormatError(f"{what}: {error}") from error


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
                with active.reading(self.file.path, len(part)):
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
        with active.reading(self._file.path, len(buffer)):
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
