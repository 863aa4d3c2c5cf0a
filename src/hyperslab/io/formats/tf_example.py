"""The wire format of ``tf.train.Example``: which features a record has, and where their values lie.

An Example is nested protobuf messages::

    Example { features=1: Features { feature=1: map entries { key=1, value=2: Feature } } }
    Feature { one of bytes_list=1, float_list=2, int64_list=3, each { value=1, repeated } }

The numbers are those of the fields. Values are passed over, not read: a record may be large.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

KINDS = {1: "bytes", 2: "float", 3: "int64"}
"""Of lists, by the number of their field in a Feature."""
MAX_KEY_NBYTES = 4096

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class NotAnExample(ValueError):  # noqa: N818 - what it says about a record
    """Bytes that are not what they should be; whoever knows the file says which one it is."""


class ByteStream(Protocol):
    """Bytes that are passed through from first to last."""

    @property
    def position(self) -> int: ...
    def read(self, nbytes: int) -> bytes: ...
    def skip(self, nbytes: int) -> None: ...


class Extent(NamedTuple):
    """Bytes of a file."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class Feature:
    """A named list of values in a record."""

    kind: str
    list: Extent
    """The message with the values."""
    values: Extent | None
    """Their bytes, where they lie in one piece: one string of bytes, or floats packed together."""


def read_features(stream: ByteStream, end: int) -> dict[str, Feature]:
    """The features of the Example that reaches from the stream's position to ``end``.

    Raises ``NotAnExample`` for what is none.
    """
    found: dict[str, Feature] = {}
    for number, features_end in _messages(stream, end):
        if number == 1:
            for entry, entry_end in _messages(stream, features_end):
                if entry == 1:
                    key, feature = _map_entry(stream, entry_end)
                    found[key] = feature
    return found


def decode_list(kind: str, raw: bytes) -> NDArray[Any]:
    """All values of a float or int64 list, from the bytes of its message."""
    data = np.frombuffer(raw, np.uint8)
    unpacked = _unpacked(kind, data)
    if unpacked is not None:
        return unpacked
    parts = [_decode_field(kind, *field) for field in _list_fields(data)]
    dtype = np.float32 if kind == "float" else np.int64
    return np.concatenate([np.empty(0, dtype), *parts])


def _map_entry(stream: ByteStream, end: int) -> tuple[str, Feature]:
    key, feature = "", Feature("empty", Extent(end, 0), None)
    for number, field_end in _messages(stream, end):
        nbytes = field_end - stream.position
        if number == 1:
            if nbytes > MAX_KEY_NBYTES:
                raise NotAnExample(f"a feature's name is {nbytes} bytes long")
            key = _decoded(stream.read(nbytes))
        elif number == 2:
            feature = _feature(stream, field_end)
    return key, feature


def _decoded(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise NotAnExample(f"the name of a feature, {name[:80]!r}, is not UTF-8") from error


def _feature(stream: ByteStream, end: int) -> Feature:
    found = Feature("empty", Extent(end, 0), None)
    for number, list_end in _messages(stream, end):
        if number in KINDS:
            if found.kind != "empty":
                raise NotAnExample("a feature has several lists, and one was expected")
            found = _list(KINDS[number], stream, list_end)
    return found


def _list(kind: str, stream: ByteStream, end: int) -> Feature:
    whole = Extent(stream.position, end - stream.position)
    values = None
    if stream.position < end and kind != "int64":
        tag = _varint(stream, end)
        if tag == 1 << 3 | _BYTES:
            nbytes = _varint(stream, end)
            if stream.position + nbytes == end:
                values = Extent(stream.position, nbytes)
    return Feature(kind, whole, values)


def _messages(stream: ByteStream, end: int) -> Iterator[tuple[int, int]]:
    """The number and the end of each field with a length; others, and what is left, are skipped."""
    while stream.position < end:
        tag = _varint(stream, end)
        field_end = _field_end(stream, tag, end)
        if tag & 7 == _BYTES:
            yield tag >> 3, field_end
        stream.skip(field_end - stream.position)


def _field_end(stream: ByteStream, tag: int, end: int) -> int:
    wire_type = tag & 7
    if not tag >> 3 or wire_type not in (_VARINT, _FIXED64, _BYTES, _FIXED32):
        raise NotAnExample(f"it is no tf.train.Example (field {tag >> 3} of type {wire_type})")
    nbytes = {_FIXED64: 8, _FIXED32: 4}.get(wire_type, 0)
    if wire_type in (_VARINT, _BYTES):
        value = _varint(stream, end)
        nbytes = value if wire_type == _BYTES else 0
    if stream.position + nbytes > end:
        raise NotAnExample(
            f"a field of {nbytes} bytes reaches beyond what it is part of, by "
            f"{stream.position + nbytes - end} bytes"
        )
    return stream.position + nbytes


def _varint(stream: ByteStream, end: int) -> int:
    """Seven bits a byte, the lowest first; the high bit says that more follow."""
    value = 0
    for shift in range(0, 70, 7):
        if stream.position >= end:
            raise NotAnExample("a number is cut off")
        (byte,) = stream.read(1)
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value
    raise NotAnExample("a number has more than ten bytes")


def _unpacked(kind: str, data: NDArray[np.uint8]) -> NDArray[Any] | None:
    """The values of a list in which each is a field of its own, as they were written of old."""
    tag = 1 << 3 | (_FIXED32 if kind == "float" else _VARINT)
    if not len(data) or data[0] != tag:
        return None
    if kind == "float":
        fields = data[: len(data) // 5 * 5].reshape(-1, 5)
        is_unpacked = fields.size == len(data) and (fields[:, 0] == tag).all()
        return _decode_field(kind, _FIXED32, fields[:, 1:].reshape(-1)) if is_unpacked else None
    numbers = _decode_varints(data)
    return numbers[1::2] if len(numbers) % 2 == 0 and (numbers[::2] == tag).all() else None


def _list_fields(data: NDArray[np.uint8]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """The wire type and the bytes of each value, or run of packed values, of a list."""
    stream = _Bytes(data)
    while stream.position < len(data):
        tag = _varint(stream, len(data))
        start = stream.position
        end = _field_end(stream, tag, len(data))
        if tag >> 3 == 1:
            yield tag & 7, data[start if tag & 7 == _VARINT else stream.position : end]
        stream.position = end


def _decode_field(kind: str, wire_type: int, data: NDArray[np.uint8]) -> NDArray[Any]:
    if kind == "float" and wire_type in (_BYTES, _FIXED32) and len(data) % 4 == 0:
        return np.ascontiguousarray(data).view("<f4").astype(np.float32, copy=False)
    if kind == "int64" and wire_type in (_BYTES, _VARINT):
        return _decode_varints(data)
    raise NotAnExample(f"{len(data)} bytes of wire type {wire_type} are no {kind} values")


def _decode_varints(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    ends = np.flatnonzero(data < 0x80)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends + 1 - starts
    whole = int(ends[-1]) + 1 if len(ends) else 0
    if whole != len(data) or lengths.max(initial=0) > 10:
        raise NotAnExample("numbers are cut off, or have more than ten bytes")
    values = np.zeros(len(ends), np.uint64)
    for place in range(int(lengths.max(initial=0))):
        some = np.flatnonzero(lengths > place)
        bits = (data[starts[some] + place] & 0x7F).astype(np.uint64)
        values[some] |= bits << np.uint64(7 * place)
    return values.view(np.int64)


class _Bytes:
    """A stream of bytes in memory."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data
        self.position = 0

    def read(self, nbytes: int) -> bytes:
        self.position += nbytes
        return self._data[self.position - nbytes : self.position].tobytes()

    def skip(self, nbytes: int) -> None:
        self.position += nbytes
