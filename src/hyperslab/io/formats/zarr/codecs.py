"""The codecs of Zarr: from the stored bytes of a chunk to its elements."""

from __future__ import annotations

import bz2
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hyperslab.errors import ConfigError, FormatError, HyperslabError
from hyperslab.io.engine.chunked import Buffer, Chunk
from hyperslab.io.engine.crc32c import crc32c
from hyperslab.io.engine.inflated import GZIP, ZLIB, inflater

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

NUMCODECS = {
    *("blosc", "zlib", "gzip", "bz2", "lzma", "lz4", "zstd", "shuffle"),
    *("delta", "fixedscaleoffset", "quantize", "bitround", "astype", "packbits"),
    *("crc32", "crc32c", "adler32", "fletcher32", "jenkins_lookup3"),
}
"""What is decoded by numcodecs, and cannot run code that a file brings along."""

REFUSED = {"pickle"}
"""Run code that a file brings along."""


class Step(NamedTuple):
    """One codec, undone."""

    words: str
    decode: Callable[[Buffer, int], Buffer]
    """Given the bytes, and how many may come out at most."""


@dataclass(frozen=True)
class Pipeline:
    """Steps, and the order of dims in what they end with."""

    steps: tuple[Step, ...]
    dtype: np.dtype[Any]
    chunk_shape: tuple[int, ...]
    order: tuple[int, ...]
    """The chunk's dims as they are stored, the slowest first."""

    @property
    def words(self) -> str | None:
        """The codecs in the order of writing."""
        return " + ".join(step.words for step in reversed(self.steps)) or None

    @property
    def is_plain(self) -> bool:
        """Whether chunks are stored just as they are."""
        return not self.steps and self._is_in_order

    @property
    def nbytes(self) -> int:
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    def decode(self, stored: memoryview, chunk: Chunk) -> Buffer:
        """The elements of a chunk in C order, as ``ChunkedArray`` wants them."""
        data: Buffer = stored
        for step in self.steps:
            data = self._undone(step, data)
        return data if self._is_in_order else self._reordered(data)

    @property
    def _is_in_order(self) -> bool:
        return self.order == tuple(range(len(self.order)))

    def _undone(self, step: Step, data: Buffer) -> Buffer:
        # A filter may have made the values narrower or wider.
        limit = 16 * self.nbytes + 2**16
        try:
            return step.decode(data, limit)
        except HyperslabError:
            raise
        except Exception as error:  # codecs are other people's, and raise what they like
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise FormatError(f"damaged: {step.words} cannot be undone ({reason})") from error

    def _reordered(self, data: Buffer) -> Buffer:
        flat = np.frombuffer(data, np.uint8)
        if flat.nbytes != self.nbytes:
            raise FormatError(f"it holds {flat.nbytes} bytes, and a chunk has {self.nbytes}")
        stored_shape = [self.chunk_shape[dim] for dim in self.order]
        there = flat.view(self.dtype).reshape(stored_shape)
        back = there.transpose(np.argsort(self.order))
        return np.ascontiguousarray(back).reshape(-1).view(np.uint8)


class UnknownPart(Exception):  # noqa: N818 - an error only if nobody else knows it
    """A codec, or another part of the format, that is not read here."""


def step_v2(config: object) -> Step:
    """The step that undoes the compressor or filter of ``config``."""
    if not isinstance(config, dict) or not isinstance(config.get("id"), str):
        raise FormatError(f"damaged: a codec is {config!r:.80}")
    name = config["id"]
    if name not in NUMCODECS:
        raise UnknownPart(f"codec {name!r}")
    words = _words(name, config)
    if name in _BOUNDED:
        return Step(words, _BOUNDED[name])
    return Step(words, partial(_by_numcodecs, _numcodec(config), _CHECKS.get(name)))


def step_v3(name: str, config: Mapping[str, Any]) -> Step:
    """The step that undoes one of the codecs that turn bytes into bytes."""
    if name == "crc32c":
        return Step(name, _checked_crc32c)
    if name not in ("gzip", "zstd", "blosc"):
        raise UnknownPart(f"codec {name!r}")
    return step_v2({"id": name})._replace(words=_words(name, config))


def check_safe(found: object) -> None:
    """Raises if a codec's name, or one anywhere in its configuration, is of those refused."""
    if isinstance(found, str):
        name = re.split(r"[./]", found)[-1]  # numcodecs.pickle
        if name in REFUSED:
            raise FormatError(f"codec {name!r} runs code from the file, and is refused")
    elif isinstance(found, dict | list):
        for each in found.values() if isinstance(found, dict) else found:
            check_safe(each)


def _words(name: str, config: Mapping[str, Any]) -> str:
    values = [config[key] for key in ("cname", "clevel", "level", "shuffle") if key in config]
    return f"{name}({', '.join(map(str, values))})" if values else name


def _numcodec(config: Mapping[str, Any]) -> Any:
    try:
        import numcodecs
        import numcodecs.registry
    except ImportError as error:
        raise ConfigError(
            f"codec {config['id']!r} needs the package numcodecs: pip install numcodecs"
        ) from error
    try:
        return numcodecs.registry.get_codec(dict(config))
    except Exception as error:  # whatever it makes of a damaged configuration
        raise FormatError(f"damaged: its codec {dict(config)!r:.200} cannot be used") from error


def _by_numcodecs(
    codec: Any, check: Callable[[bytes, int, int], None] | None, data: Buffer, limit: int
) -> Buffer:
    if check is not None:
        stored = np.frombuffer(data, np.uint8)
        check(stored[:32].tobytes(), len(stored), limit)
    decoded = codec.decode(data)
    if isinstance(decoded, bytes | bytearray | memoryview):
        return decoded
    return np.ascontiguousarray(decoded).reshape(-1).view(np.uint8)


def _check_blosc(head: bytes, nbytes: int, limit: int) -> None:
    """The library believes this header, and would read beyond the end of its input."""
    if nbytes < 16:
        raise FormatError(f"damaged: {nbytes} bytes are too few for blosc")
    inflated_nbytes, _, stored_nbytes = struct.unpack_from("<III", head, 4)
    if stored_nbytes != nbytes:
        raise FormatError(f"damaged: blosc wrote {stored_nbytes} bytes, and there are {nbytes}")
    _check_claim(inflated_nbytes, limit)


def _check_zstd(head: bytes, nbytes: int, limit: int) -> None:
    """The frame header tells how much memory would be taken."""
    if head[:4] != ZSTD_MAGIC or nbytes < 6:
        raise FormatError("damaged: it does not begin like zstd data")
    flags = head[4]
    is_single = flags >> 5 & 1
    start = 5 + (not is_single) + (0, 1, 2, 4)[flags & 3]
    size = (is_single, 2, 4, 8)[flags >> 6]
    _check_claim(int.from_bytes(head[start : start + size], "little"), limit)


def _check_lz4(head: bytes, nbytes: int, limit: int) -> None:
    if nbytes < 4:
        raise FormatError(f"damaged: {nbytes} bytes are too few for lz4")
    _check_claim(int.from_bytes(head[:4], "little"), limit)


def _check_claim(nbytes: int, limit: int) -> None:
    if nbytes > limit:
        raise FormatError(f"damaged: it claims to hold {nbytes} bytes")


def _bounded(begin: Callable[[], Any], data: Buffer, limit: int) -> Buffer:
    """All streams in ``data``, one after another, undone by the decompressors that begin gives."""
    found: list[bytes] = []
    rest = data
    while len(rest) or not found:
        stream, left = begin(), limit - sum(map(len, found))
        found.append(stream.decompress(rest, left + 1))
        if len(found[-1]) > left:
            raise FormatError(f"damaged: it holds more than {limit} bytes")
        if not stream.eof:
            raise FormatError("damaged: its compressed data breaks off")
        rest = stream.unused_data.lstrip(b"\0")
    return found[0] if len(found) == 1 else b"".join(found)


def _checked_crc32c(data: Buffer, limit: int) -> Buffer:
    """``data`` without the sum at its end, which it must have."""
    whole = np.frombuffer(data, np.uint8)
    body, stored = whole[:-4], whole[-4:].tobytes()
    if struct.pack("<I", crc32c(body)) != stored:
        raise FormatError(f"damaged: its checksum {stored.hex()} does not fit")
    return body


_BOUNDED: dict[str, Callable[[Buffer, int], Buffer]] = {
    "gzip": partial(_bounded, partial(inflater, GZIP)),
    "zlib": partial(_bounded, partial(inflater, ZLIB)),
    "bz2": partial(_bounded, bz2.BZ2Decompressor),
}
_CHECKS = {"blosc": _check_blosc, "zstd": _check_zstd, "lz4": _check_lz4}
