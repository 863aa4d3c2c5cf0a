"""Decoders of compressed bytes that the libraries in Python wheels bring along.

They are called by ctypes, which lets other threads run meanwhile, and write into memory of the size
that the caller knows the result to have. What a damaged header says is checked before it is used:
the decoders called trust some of it.
"""

from __future__ import annotations

import ctypes
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from ctypes import c_int, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hyperslab.errors import FormatError
from hyperslab.io.engine.buffers import Bytes, address_of, scratch
from hyperslab.io.engine.chunked import BlockReader
from hyperslab.io.engine.read_ahead import Range

_UINT32 = struct.Struct(">I")


class MissingLibrary(ImportError):  # noqa: N818 - like the name of a thing, not of a fault
    """A decoder's library is not installed, or not as expected."""


@cache
def plugin(name: str) -> ctypes.CDLL:
    """The library of one filter of the hdf5plugin package."""
    return _library(_package("hdf5plugin") / "plugins" / f"libh5{name}.so")


@cache
def h5py_library() -> ctypes.CDLL:
    """The part of h5py that has its LZF filter, and through it the HDF5 library."""
    for library in _package("h5py").glob("h5z.*.so"):
        return _library(library)
    raise MissingLibrary("h5py has no library h5z")


def _package(name: str) -> Path:
    """The folder of an installed package, found without importing it."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise MissingLibrary(f"{name} is not installed")
    return Path(spec.submodule_search_locations[0])


def _library(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise MissingLibrary(f"{path} cannot be loaded: {error}") from error


@cache
def function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    try:
        found = library[name]
    except AttributeError as error:
        raise MissingLibrary(f"{library._name} has no function {name}") from error
    found.restype, found.argtypes = result, list(arguments)
    return found


def lzf(stored: Bytes, nbytes: int) -> Bytes:
    decompress = function(
        h5py_library(), "lzf_decompress", c_uint32, c_void_p, c_uint32, c_void_p, c_uint32
    )
    out = scratch.take(nbytes)
    _check(decompress(address_of(stored), stored.size, address_of(out), nbytes), nbytes, "LZF")
    return out


def fletcher32(data: Bytes) -> int:
    checksum = function(h5py_library(), "H5_checksum_fletcher32", c_uint32, c_void_p, c_size_t)
    return int(checksum(address_of(data), data.size))


def zstd(stored: Bytes, nbytes: int) -> Bytes:
    decompress = function(
        plugin("zstd"), "ZSTD_decompress", c_size_t, c_void_p, c_size_t, c_void_p, c_size_t
    )
    out = scratch.take(nbytes)
    _check(
        decompress(address_of(out), nbytes, address_of(stored), stored.size), nbytes, "Zstandard"
    )
    return out


def lz4(stored: Bytes, nbytes: int) -> Bytes:
    """Blocks after a header of 12 bytes, as HDF5's LZ4 filter writes them."""
    block_nbytes = min(_block_header(stored, nbytes, "LZ4"), nbytes)
    if not block_nbytes:
        raise FormatError("LZ4 data has blocks of 0 bytes")
    out = scratch.take(nbytes)
    place = 12
    for start in range(0, nbytes, block_nbytes):
        size = min(block_nbytes, nbytes - start)
        packed = _block_nbytes(stored, place)
        if packed == size:  # it did not get smaller
            out[start : start + size] = stored[place + 4 : place + 4 + size]
        else:
            _lz4_block(stored, place + 4, packed, out, start, size)
        place += 4 + packed
    return out


def _lz4_block(stored: Bytes, place: int, packed: int, out: Bytes, start: int, size: int) -> None:
    decompress = function(
        plugin("lz4"), "LZ4_decompress_safe", c_int, c_void_p, c_void_p, c_int, c_int
    )
    done = decompress(address_of(stored) + place, address_of(out) + start, packed, size)
    _check(done, size, "LZ4")


_BITSHUFFLE = (c_int64, c_void_p, c_void_p, c_size_t, c_size_t, c_size_t)


def bitunshuffled(stored: Bytes, nbytes: int, itemsize: int) -> Bytes:
    """What bitshuffle only reordered."""
    _check(stored.size, nbytes, "bitshuffle")
    out = scratch.take(nbytes)
    decode = function(plugin("bshuf"), "bshuf_bitunshuffle", *_BITSHUFFLE)
    _check_code(decode(address_of(stored), address_of(out), nbytes // itemsize, itemsize, 0))
    return out


class BitshuffledBlocks(BlockReader):
    """A chunk that bitshuffle compressed with LZ4 (``compression`` 2) or Zstandard (3).

    The decoder goes from block to block by their lengths and reads on in one that is damaged until
    it has made as many bytes as a block has, from ``_reach`` bytes at most. Blocks that lie so near
    the end are decoded from a copy with zeros behind, which end that.
    """

    def __init__(self, stored: Bytes, nbytes: int, itemsize: int, compression: int) -> None:
        name = {2: "bshuf_decompress_lz4", 3: "bshuf_decompress_zstd"}[compression]
        self._decode = function(plugin("bshuf"), name, *_BITSHUFFLE)
        self._stored, self._itemsize = stored, itemsize
        self._block = _block_header(stored, nbytes, "bitshuffle") // itemsize
        num_items = nbytes // itemsize
        self._places = _places_of_blocks(stored, num_items, itemsize, self._block)
        self._reach = 2 * min(self._block, num_items) * itemsize + 64
        self.nbytes, self.block_nbytes = nbytes, self._block * itemsize

    def decode(self, ranges: Sequence[Range], out: Bytes) -> None:
        # One call for all: a thread that comes back from a short one waits for Python's lock.
        done = self._decode_in_place(ranges[0], out) if len(ranges) == 1 else 0
        if done < out.size:
            copied = self._copied([(start + done, size - done) for start, size in ranges])
            self._undo(copied, out[done:])

    def _decode_in_place(self, range_: Range, out: Bytes) -> int:
        """Decodes the blocks that are far enough from the end; gives how many bytes that made."""
        start, size = range_
        num_safe = bisect_right(self._places, self._stored.size - self._reach)
        done = min(size // self.block_nbytes, num_safe - start // self.block_nbytes)
        if done <= 0:
            return 0
        self._undo(self._stored[self._place(start) :], out[: done * self.block_nbytes])
        return done * self.block_nbytes

    def _copied(self, ranges: Sequence[Range]) -> Bytes:
        """The stored bytes of ``ranges``, with zeros behind."""
        pieces = [
            self._stored[self._place(start) : self._place(start + size)] for start, size in ranges
        ]
        copied = scratch.take(sum(piece.size for piece in pieces) + self._reach)
        end = 0
        for piece in pieces:
            begin, end = end, end + piece.size
            copied[begin:end] = piece
        copied[end:] = 0
        return copied

    def _place(self, offset: int) -> int:
        """Where the block that begins at ``offset`` is stored."""
        if offset == self.nbytes:
            return self._stored.size
        return self._places[offset // self.block_nbytes]

    def _undo(self, stored: Bytes, out: Bytes) -> None:
        """Decodes as many blocks as fill ``out``."""
        num_items = out.size // self._itemsize
        found = self._decode(
            address_of(stored), address_of(out), num_items, self._itemsize, self._block
        )
        _check_code(found)


def _check_code(code: int) -> None:
    if code < 0:
        raise FormatError(f"bitshuffle data is damaged (code {code})")


def _places_of_blocks(stored: Bytes, num_items: int, itemsize: int, block: int) -> list[int]:
    """Where the blocks that follow the header begin, if every one of them ends inside."""
    if block <= 0 or block % 8:
        raise FormatError(f"bitshuffle data is damaged: it has blocks of {block} items")
    full, rest = divmod(num_items, block)
    read_length, memory = _UINT32.unpack_from, stored.data
    place, places = 12, []
    try:
        for _ in range(full + bool(rest // 8)):
            places.append(place)
            place += 4 + read_length(memory, place)[0]
    except struct.error as error:
        raise FormatError("bitshuffle data is damaged: blocks are missing") from error
    _check(stored.size, place + (rest % 8) * itemsize, "bitshuffle")
    return [*places, place]  # fewer than 8 items may come without a block


def _block_header(stored: Bytes, nbytes: int, what: str) -> int:
    """The size of blocks, from a header that must also tell the right size of the whole."""
    if stored.size < 12:
        raise FormatError(f"{what} data of {stored.size} bytes has no header")
    total, block_nbytes = struct.unpack_from(">QI", stored.data)
    _check(total, nbytes, what)
    return int(block_nbytes)


def _block_nbytes(stored: Bytes, place: int) -> int:
    """The stored size of the LZ4 block at ``place``, which must lie inside."""
    if place + 4 <= stored.size:
        (packed,) = _UINT32.unpack_from(stored.data, place)
        if place + 4 + packed <= stored.size:
            return int(packed)
    raise FormatError(f"LZ4 data is damaged or cut off: a block at byte {place} goes on")


def blosc(stored: Bytes, nbytes: int) -> Bytes:
    if stored.size < 16:
        raise FormatError(f"Blosc data of {stored.size} bytes has no header")
    unpacked, _, packed = struct.unpack_from("<III", stored.data, 4)
    _check(unpacked, nbytes, "Blosc")
    _check(packed, stored.size, "Blosc", "stored bytes")
    library = plugin("blosc")
    validate = function(library, "blosc_cbuffer_validate", c_int, c_void_p, c_size_t, c_void_p)
    decompress = function(
        library, "blosc_decompress_ctx", c_int, c_void_p, c_void_p, c_size_t, c_int
    )
    if validate(address_of(stored), stored.size, ctypes.byref(c_size_t())) < 0:
        raise FormatError("Blosc data has a damaged header")
    out = scratch.take(nbytes)
    _check(decompress(address_of(stored), address_of(out), nbytes, 1), nbytes, "Blosc")
    return out


def _check(found: int, expected: int, what: str, unit: str = "bytes") -> None:
    if found != expected:
        raise FormatError(f"{what} data is damaged: it has not {expected} {unit}")
