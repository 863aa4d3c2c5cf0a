"""TFRecord files as TensorFlow writes them, made without it."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.io.engine.crc32c import crc32c
from hyperslab.io.formats.tfrecord import masked

Value = bytes | Sequence[bytes] | NDArray[Any]
"""Of a feature: strings of bytes, floats or ints."""


def write_records(
    path: Path, examples: Iterable[Mapping[str, Value]], *, packed: bool = True, gz: bool = False
) -> Path:
    """A file with a record for each of ``examples``, compressed with gzip if ``gz``."""
    data = b"".join(framed(example(features, packed=packed)) for features in examples)
    path.write_bytes(gzip.compress(data, mtime=0) if gz else data)
    return path


def framed(record: bytes) -> bytes:
    """A record between its length and its checksum."""
    length = struct.pack("<Q", len(record))
    return length + _sum(length) + record + _sum(record)


def example(features: Mapping[str, Value], *, packed: bool = True) -> bytes:
    """A ``tf.train.Example``; unless ``packed``, each number is a field of its own."""
    entries = (
        field(1, name.encode()) + field(2, _feature(value, packed))
        for name, value in features.items()
    )
    return field(1, b"".join(field(1, entry) for entry in entries))


def field(number: int, content: bytes) -> bytes:
    """A protobuf field that has a length."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    """A protobuf integer: seven bits a byte, the lowest first."""
    value &= 2**64 - 1
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _sum(data: bytes) -> bytes:
    return struct.pack("<I", masked(crc32c(data)))


def _feature(value: Value, packed: bool) -> bytes:
    if not isinstance(value, np.ndarray):
        strings = [value] if isinstance(value, bytes) else value
        return field(1, b"".join(field(1, string) for string in strings))
    number, tag = (2, b"\x0d") if value.dtype.kind == "f" else (3, b"\x08")
    items = [_item(item) for item in value.reshape(-1)]
    return field(number, field(1, b"".join(items)) if packed else b"".join(map(tag.__add__, items)))


def _item(item: Any) -> bytes:
    return struct.pack("<f", item) if isinstance(item, np.floating) else varint(int(item))
