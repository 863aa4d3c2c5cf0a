"""The checksum that TFRecord and Zarr files carry."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError

SMALL_NBYTES = 2**16
"""What is short enough to be summed without the library."""

_POLYNOMIAL = 0x82F63B78


def crc32c(data: bytes | bytearray | memoryview | NDArray[Any], before: int = 0) -> int:
    """The CRC-32C (Castagnoli) of ``data``, or of what ``before`` is the sum of, and ``data``.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    extend = _library()
    flat = np.frombuffer(data, np.uint8)
    if extend is not None:
        return extend(before, flat)
    if len(flat) > SMALL_NBYTES:
        raise ConfigError(
            "checksums of this file need the package google-crc32c: install it with "
            "pip install 'hyperslab[tfrecord]' (TFRecords can be read with verify=False, too)"
        )
    return _small_crc32c(flat.tobytes(), before)


@cache
def _library() -> Callable[[int, NDArray[Any]], int] | None:
    try:
        import google_crc32c
    except ImportError:
        return None
    found: Callable[[int, NDArray[Any]], int] = google_crc32c.extend
    return found


def _small_crc32c(data: bytes, before: int) -> int:
    crc = before ^ 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
