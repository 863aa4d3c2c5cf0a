"""HDF5's filter pipelines, undone without the HDF5 library and its lock."""

from __future__ import annotations

import bz2
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from hyperslab.errors import FormatError
from hyperslab.io.engine.buffers import Bytes, scratch
from hyperslab.io.engine.chunked import BlockReader
from hyperslab.io.formats.hdf5 import codecs
from hyperslab.io.formats.hdf5.codecs import MissingLibrary

Undo = Callable[[Bytes, int], Bytes]
"""Makes of the stored bytes those before the filter, whose number it is told."""


class UnknownFilter(Exception):  # noqa: N818 - asks for another way to read
    """A filter that only the HDF5 library may know how to undo."""


@dataclass(frozen=True)
class FilterSpec:
    """One filter of a dataset, as its header has it."""

    code: int
    values: tuple[int, ...]
    name: str

    def __str__(self) -> str:
        if self.code == DEFLATE:
            return f"gzip({self.values[0]})" if self.values else "gzip"
        return _KNOWN[self.code][0] if self.code in _KNOWN else self.name or f"filter {self.code}"


class Pipeline:
    """Undoes the filters of a dataset's chunks, the last one first.

    Raises ``UnknownFilter`` if it cannot; the HDF5 library may.
    """

    def __init__(self, filters: Sequence[FilterSpec], chunk_nbytes: int) -> None:
        self._steps = [(spec.code, _undo(spec)) for spec in filters]
        self._nbytes = chunk_nbytes
        if sum(code not in _KEEP_SIZE for code, _ in self._steps) > 1:
            # What lies between two compressors has a size that nobody wrote down.
            raise UnknownFilter(" + ".join(map(str, filters)))

    def undo(self, stored: memoryview, skipped: int) -> Bytes | BlockReader:
        """The chunk stored as these bytes; bit ``i`` of ``skipped`` leaves out filter ``i``."""
        steps = [step for i, step in enumerate(self._steps) if not skipped >> i & 1]
        data = np.frombuffer(stored, np.uint8)
        if len(steps) == 1 and isinstance(bitshuffled := steps[0][1], _Bitshuffled):
            return bitshuffled.blocks(data, self._nbytes)
        sizes = [self._nbytes]
        for code, _ in steps:
            sizes.append(sizes[-1] + 4 * (code == FLETCHER32))
        for (_, undo), nbytes in zip(reversed(steps), reversed(sizes[:-1]), strict=True):
            data = undo(data, nbytes)
        return data


def _undo(spec: FilterSpec) -> Undo:
    if spec.code not in _KNOWN:
        raise UnknownFilter(str(spec))
    try:
        return _KNOWN[spec.code][1](spec.values)
    except (MissingLibrary, IndexError) as error:
        raise UnknownFilter(f"{spec} ({error})") from error


@cache
def _inflate() -> Undo:
    """By libdeflate where it is installed, which takes two thirds of the time of zlib-ng."""
    try:
        import deflate
    except ImportError:
        return _inflate_by_zlib

    def inflate(stored: Bytes, nbytes: int) -> Bytes:
        try:
            data = deflate.zlib_decompress(stored.data, nbytes)
        except deflate.DeflateError as error:
            raise FormatError(f"gzip data is damaged, or is not {nbytes} bytes long") from error
        return _whole(data, True, nbytes, "gzip")

    return inflate


def _decompressed(stored: Bytes, nbytes: int, begin: Callable[[], Any], what: str) -> Bytes:
    stream = begin()
    try:
        # One byte more than expected lets the decoder reach the checksum at the end.
        data = stream.decompress(stored.data, nbytes + 1)
    except (zlib.error, OSError, ValueError) as error:
        raise FormatError(f"{what} data is damaged: {error}") from error
    return _whole(data, stream.eof, nbytes, what)


_inflate_by_zlib = partial(_decompressed, begin=zlib.decompressobj, what="gzip")
_bunzip = partial(_decompressed, begin=bz2.BZ2Decompressor, what="bzip2")


def _whole(data: bytes | bytearray, ended: bool, nbytes: int, what: str) -> Bytes:
    if len(data) != nbytes:
        than = "more" if len(data) > nbytes else "fewer"
        raise FormatError(f"{what} data is damaged: it holds {than} than the {nbytes} bytes due")
    if not ended:
        raise FormatError(f"{what} data is damaged: its end is missing")
    return np.frombuffer(data, np.uint8)


def unshuffled(stored: Bytes, nbytes: int, itemsize: int) -> Bytes:
    """First bytes of all items, then second bytes: put together again."""
    if itemsize < 1:
        raise FormatError("the shuffle filter has items of 0 bytes")
    num_items = stored.size // itemsize
    if itemsize == 1 or num_items < 2:
        return stored
    out = scratch.take(stored.size)
    whole = num_items * itemsize
    planes = stored[:whole].reshape(itemsize, num_items)
    if itemsize in (2, 4):  # shifts run at several times the speed of copies with a stride
        items = out[:whole].view(f"<u{itemsize}")
        items[...] = planes[-1]
        for plane in planes[-2::-1]:
            items <<= 8
            items |= plane
    else:
        for place, plane in enumerate(planes):
            out[:whole].reshape(num_items, itemsize)[:, place] = plane
    out[whole:] = stored[whole:]
    return out


def checked(stored: Bytes, nbytes: int) -> Bytes:
    """Without the Fletcher32 checksum at the end, which must fit."""
    if stored.size < 5:
        raise FormatError(f"{stored.size} bytes are too few to have a checksum")
    data = np.ascontiguousarray(stored[:-4])
    (expected,) = struct.unpack("<I", stored[-4:].data)
    found = codecs.fletcher32(data)
    # HDF5 1.6.2 and before wrote the bytes of each half the other way round.
    swapped = (found & 0x00FF00FF) << 8 | found >> 8 & 0x00FF00FF
    if expected not in (found, swapped):
        raise FormatError(
            f"its data is damaged: the Fletcher32 checksum is {found:08x}, and {expected:08x} "
            "was stored with it"
        )
    return data


@dataclass(frozen=True)
class _Bitshuffled:
    """Undoes bitshuffle with compression, of all of a chunk or block by block."""

    itemsize: int
    compression: int

    def __call__(self, stored: Bytes, nbytes: int) -> Bytes:
        out = scratch.take(nbytes)
        self.blocks(stored, nbytes).decode([(0, nbytes)], out)
        return out

    def blocks(self, stored: Bytes, nbytes: int) -> BlockReader:
        return codecs.BitshuffledBlocks(stored, nbytes, self.itemsize, self.compression)


def _bitunshuffle(values: Sequence[int]) -> Undo:
    codecs.plugin("bshuf")
    compression = values[4] if len(values) > 4 else 0
    if compression not in (0, 2, 3):
        raise UnknownFilter(f"bitshuffle with compression {compression}")
    if not compression:
        return partial(codecs.bitunshuffled, itemsize=values[2])

    return _Bitshuffled(values[2], compression)


def _needing(load: Callable[[], object], undo: Undo) -> Callable[[Sequence[int]], Undo]:
    def make(values: Sequence[int]) -> Undo:
        load()  # raises early where the library is not installed
        return undo

    return make


DEFLATE, SHUFFLE, FLETCHER32, BITSHUFFLE = 1, 2, 3, 32008

_KNOWN: dict[int, tuple[str, Callable[[Sequence[int]], Undo]]] = {
    DEFLATE: ("gzip", lambda values: _inflate()),
    SHUFFLE: ("shuffle", lambda values: partial(unshuffled, itemsize=values[0])),
    FLETCHER32: ("fletcher32", _needing(codecs.h5py_library, checked)),
    307: ("bzip2", lambda values: _bunzip),
    32000: ("lzf", _needing(codecs.h5py_library, codecs.lzf)),
    32001: ("blosc", _needing(partial(codecs.plugin, "blosc"), codecs.blosc)),
    32004: ("lz4", _needing(partial(codecs.plugin, "lz4"), codecs.lz4)),
    BITSHUFFLE: ("bitshuffle", _bitunshuffle),
    32015: ("zstd", _needing(partial(codecs.plugin, "zstd"), codecs.zstd)),
}
"""Names, and what makes the step that undoes the filter with its values."""

_KEEP_SIZE = {SHUFFLE, FLETCHER32}
