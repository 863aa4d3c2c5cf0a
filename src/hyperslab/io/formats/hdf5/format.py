"""The format: which datasets a file has, and a reader for each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import ge
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import FormatError
from hyperslab.io.engine.chunked import BlockReader, Chunk, ChunkedArray
from hyperslab.io.engine.contiguous import ContiguousArray
from hyperslab.io.engine.files import DataFile, Identity
from hyperslab.io.engine.tiles import tiles
from hyperslab.io.formats.hdf5.filters import FilterSpec, Pipeline, UnknownFilter
from hyperslab.io.formats.hdf5.library import library
from hyperslab.io.reader import ArrayReader, Format, Storage
from hyperslab.layout import Box

ALL_SKIPPED = 0xFFFFFFFF
"""The mask of a chunk that no filter was applied to."""
PIECE_NBYTES = 32 * 2**20
"""What the library is asked for at once."""


class Hdf5(Format):
    """HDF5, and with it NetCDF-4.

    The HDF5 library is asked once for each dataset where its data lies. Data that lies plainly in
    the file is then read without it; what only it can read takes the slow way through it.
    """

    reads_other_files = True

    @classmethod
    def names(cls, path: Path, *, external: bool = True) -> Sequence[str]:  # type: ignore[override]
        DataFile.look_at(path)
        answer, _ = library.ask("names", path, external=external)
        return list(map(str, answer["names"]))

    @classmethod
    def open(  # type: ignore[override]
        cls, path: Path, names: Sequence[str], *, external: bool = True
    ) -> list[ArrayReader]:
        named = DataFile.look_at(path)
        return [_reader(named, name, external) for name in names]


def _reader(named: DataFile, name: str, external: bool) -> ArrayReader:
    answer, blob = library.ask("describe", named.path, name=name, external=external)
    found = _Described.checked(named.path, name, answer, external)
    reader = _reader_of(found, blob)
    files = (found.file, *found.sources)
    reader.sources = tuple(file.path for file in files if file.identity != named.identity)
    return reader


def _reader_of(found: _Described, blob: NDArray[Any]) -> ArrayReader:
    if not found.is_plain:
        return LibraryArray(found, "its elements are converted by the HDF5 library")
    if found.kind == "contiguous":
        return _contiguous(found)
    if found.kind == "chunked":
        return _chunked(found, blob.view(np.int64).reshape(-1, len(found.shape) + 3))
    return LibraryArray(found, f"its data is {found.kind}, and read by the HDF5 library")


@dataclass(frozen=True)
class _Described:
    """What the library tells of a dataset, checked as far as it can be."""

    path: Path
    name: str
    file: DataFile
    """Where the data lies: another file if there was a link."""
    sources: tuple[DataFile, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    kind: str
    is_plain: bool
    """Whether the bytes are those of the dtype, and need no conversion."""
    offset: int | None
    stored_nbytes: int
    fill: NDArray[Any]
    chunk_shape: tuple[int, ...]
    filters: tuple[FilterSpec, ...]
    is_edge_unfiltered: bool
    external: bool
    """Whether data may lie in other files."""

    @classmethod
    def checked(cls, path: Path, name: str, answer: dict[str, Any], external: bool) -> _Described:
        dtype = np.dtype(answer["dtype"])
        where, *status = answer["status"]
        return cls(
            path=path,
            name=name,
            file=_unchanged(where, status),
            sources=tuple(_unchanged(source, status) for source, *status in answer["sources"]),
            shape=tuple(answer["shape"]),
            dtype=dtype,
            kind=answer["kind"],
            is_plain=answer["is_plain"],
            offset=answer.get("offset"),
            stored_nbytes=answer["stored_nbytes"],
            fill=np.frombuffer(bytes.fromhex(answer["fill"]), dtype),
            chunk_shape=tuple(answer["chunk_shape"]),
            filters=tuple(FilterSpec(code, tuple(v), n) for code, v, n in answer["filters"]),
            is_edge_unfiltered=answer["is_edge_unfiltered"],
            external=external,
        )

    def storage(self, note: str | None = None) -> Storage:
        return Storage(
            kind=self.kind,
            nbytes=self.stored_nbytes,
            chunks=self.chunk_shape or None,
            compression=" + ".join(map(str, self.filters)) or None,
            note=note,
        )

    def holes(self) -> ChunkedArray:
        """The array of a dataset that was never written."""
        return ChunkedArray(
            shape=self.shape,
            dtype=self.dtype,
            chunk_shape=[max(1, extent) for extent in self.shape],
            find=lambda position: None,
            decode=None,
            fill_value=self.fill[0],
            storage=self.storage("never written: all of it is the fill value"),
        )


def _unchanged(path: str, status: Sequence[int]) -> DataFile:
    """The file as the library saw it."""
    file = DataFile.look_at(path)
    if file.identity != Identity(*status):
        raise FormatError(f"{path} changed while it was opened: it is being written to")
    return file


def _contiguous(found: _Described) -> ArrayReader:
    if found.offset is None:
        return found.holes()
    nbytes = math.prod(found.shape) * found.dtype.itemsize
    if found.stored_nbytes != nbytes:
        raise FormatError(
            f"{found.file.path} is damaged: {found.name!r} of {found.dtype} {found.shape} has "
            f"{nbytes} bytes, and {found.stored_nbytes} are stored"
        )
    return ContiguousArray(found.file, found.offset, found.shape, found.dtype)


def _chunked(found: _Described, rows: NDArray[np.int64]) -> ArrayReader:
    if not all(found.chunk_shape) or len(found.chunk_shape) != len(found.shape):
        raise FormatError(
            f"{found.file.path} is damaged: {found.name!r} of shape {found.shape} has chunks of "
            f"shape {found.chunk_shape}"
        )
    chunk_nbytes = math.prod(found.chunk_shape) * found.dtype.itemsize
    try:
        pipeline = Pipeline(found.filters, chunk_nbytes)
    except UnknownFilter as error:
        _warn_once(found, str(error))
        return LibraryArray(found, f"slow: {error} is undone by the HDF5 library, on one thread")

    def decode(stored: memoryview, chunk: Chunk) -> NDArray[np.uint8] | BlockReader:
        return pipeline.undo(stored, chunk.mask)

    return ChunkedArray(
        shape=found.shape,
        dtype=found.dtype,
        chunk_shape=found.chunk_shape,
        find=ChunkIndex(found, rows).find,
        decode=decode if found.filters else None,
        fill_value=found.fill[0],
        storage=found.storage(),
        file=found.file,
    )


_has_warned = False


def _warn_once(found: _Described, filters: str) -> None:
    """Once a process: there may be many such files."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            f"{found.path}: dataset {found.name!r} has the filter {filters}, which only the HDF5 "
            "library can undo, slowly and on one thread; `hyperslab data repack` rewrites it",
            stacklevel=2,
        )


class ChunkIndex:
    """Finds a chunk by its place in the grid; made of the rows of ``contents.describe``."""

    def __init__(self, found: _Described, rows: NDArray[np.int64]) -> None:
        self._file, self._is_edge_unfiltered = found.file, found.is_edge_unfiltered
        pairs = list(zip(found.shape, found.chunk_shape, strict=True))
        self._grid = [-(-extent // n) for extent, n in pairs]
        # A chunk whose place is not full of elements; those at the upper edges may be.
        self._full = [extent // n for extent, n in pairs]
        if math.prod(self._grid) >= 2**63:
            raise FormatError(f"{self._file.path} is damaged: it has a grid of {self._grid} chunks")
        numbers = self._numbers(rows[:, : len(self._grid)], found.chunk_shape)
        order = np.argsort(numbers)
        self._numbers_of_rows = numbers[order]
        self._rows = rows[order, -3:]
        if (np.diff(self._numbers_of_rows) == 0).any():
            raise FormatError(f"{self._file.path} is damaged: a chunk is there twice")
        self._is_full = len(rows) == math.prod(self._grid)  # then a chunk's number is its row

    def find(self, position: tuple[int, ...]) -> Chunk | None:
        row = self._row(self._number(position))
        if row is None:
            return None
        mask, offset, nbytes = self._rows[row].tolist()
        if self._is_edge_unfiltered and any(map(ge, position, self._full)):
            mask = ALL_SKIPPED
        return Chunk(self._file, offset, nbytes, mask)

    def _row(self, number: int) -> int | None:
        if self._is_full:
            return number
        row = int(self._numbers_of_rows.searchsorted(number))
        is_there = row < len(self._rows) and self._numbers_of_rows[row] == number
        return row if is_there else None

    def _number(self, position: tuple[int, ...]) -> int:
        number = 0
        for place, extent in zip(position, self._grid, strict=True):
            number = number * extent + place
        return number

    def _numbers(self, starts: NDArray[np.int64], chunk_shape: Sequence[int]) -> NDArray[np.int64]:
        """The number in the grid of each chunk, from its first element."""
        places, rest = np.divmod(starts, np.asarray(chunk_shape, np.int64))
        if rest.any() or (places < 0).any() or (places >= self._grid).any():
            raise FormatError(f"{self._file.path} is damaged: a chunk lies outside its dataset")
        numbers = np.zeros(len(starts), np.int64)
        for place, extent in zip(places.T, self._grid, strict=True):
            numbers = numbers * extent + place
        return numbers


class LibraryArray(ArrayReader):
    """A dataset that only the HDF5 library can read, for the reason that ``note`` gives."""

    def __init__(self, found: _Described, note: str) -> None:
        self._path, self._name, self._external = found.path.absolute(), found.name, found.external
        self._files = (found.file, *found.sources)
        self.shape = found.shape
        self.dtype = found.dtype.newbyteorder("=")
        self._storage = found.storage(note)

    def storage(self) -> Storage:
        return self._storage

    def read(self, box: Box, out: NDArray[Any]) -> None:
        with ExitStack() as stack:
            for file in self._files:
                stack.enter_context(file.opened())  # raises if one has changed
            grain = (1,) * len(self.shape)
            for piece in tiles(box, grain, PIECE_NBYTES // self.dtype.itemsize) if box else ():
                place: tuple[Any, ...] = (..., *piece.slices_in(box))
                out[place] = self._read_piece(piece)

    def _read_piece(self, box: Box) -> NDArray[Any]:
        what = {"name": self._name, "box": list(box.spans), "external": self._external}
        _, blob = library.ask("read", self._path, **what)
        if blob.nbytes != box.numel * self.dtype.itemsize:
            raise FormatError(f"{self._path} has changed since it was opened")
        return blob.view(self.dtype).reshape(box.shape)
