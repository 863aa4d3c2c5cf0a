"""Zarr hierarchies in directories."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import FormatError
from hyperslab.io.engine.chunked import Chunk, ChunkedArray
from hyperslab.io.engine.crc32c import crc32c
from hyperslab.io.engine.files import DataFile, nbytes_on_disk
from hyperslab.io.formats.zarr.codecs import UnknownPart, check_safe
from hyperslab.io.formats.zarr.documents import Node, array_names, find_array, read_document
from hyperslab.io.formats.zarr.metadata import (
    ArrayMetadata,
    KeyEncoding,
    Sharding,
    parse_v2,
    parse_v3,
)
from hyperslab.io.reader import ArrayReader, Format, Storage
from hyperslab.layout import Box

NUM_REMEMBERED = 2**16
"""Files of which is remembered how they were when they were first looked at."""
NUM_INDEXES = 64
NO_CHUNK = 2**64 - 1


class Zarr(Format):
    """Arrays of versions 2 and 3, named by their path in the hierarchy.

    A directory that is itself an array has one, called ``data``. By the specification a chunk whose
    file is missing holds the fill value, so that a lost file cannot be told from one that was never
    written; open data that has no holes with ``holes=False``, and a missing file is an error.
    """

    @classmethod
    def names(cls, path: Path, **_: Any) -> Sequence[str]:
        return array_names(path)

    @classmethod
    def open(  # type: ignore[override]
        cls, path: Path, names: Sequence[str], *, holes: bool = True
    ) -> list[ArrayReader]:
        return [_open_array(find_array(path, name), holes) for name in names]


class ZarrArray(ChunkedArray):
    """One array; its files are counted only when somebody asks for their size."""

    def __init__(self, node: Node, metadata: ArrayMetadata, holes: bool) -> None:
        files = ChunkFiles(node.directory, node.file, metadata.keys, holes)
        sharding, pipeline = metadata.sharding, metadata.pipeline
        find = Shards(files, sharding, metadata.chunk_shape).chunk if sharding else files.chunk
        self._directory = node.directory
        super().__init__(
            shape=metadata.shape,
            dtype=metadata.dtype,
            chunk_shape=pipeline.chunk_shape,
            find=find,
            decode=None if pipeline.is_plain else pipeline.decode,
            fill_value=metadata.fill_value,
            storage=Storage(
                kind="chunked",
                nbytes=0,
                chunks=pipeline.chunk_shape,
                compression=pipeline.words,
                note=f"in shards of {metadata.chunk_shape}" if sharding else None,
            ),
            axes=metadata.axes,
        )

    def storage(self) -> Storage:
        return replace(super().storage(), nbytes=nbytes_on_disk(self._directory))


def _open_array(node: Node, holes: bool) -> ArrayReader:
    try:
        for key in ("codecs", "filters", "compressor"):  # whoever reads them
            check_safe(node.metadata.get(key))
        metadata = parse_v3(node.metadata) if node.version == 3 else _parse_v2(node)
    except UnknownPart as error:
        return ForeignArray(node.directory, str(error))
    except KeyError as error:
        raise FormatError(f"{node.file.path} is damaged: it has no {error}") from error
    except FormatError as error:
        raise FormatError(f"{node.file.path}: {error}") from error
    return ZarrArray(node, metadata, holes)


def _parse_v2(node: Node) -> ArrayMetadata:
    attributes = node.directory / ".zattrs"
    names = None
    if attributes.exists():
        names = read_document(DataFile.look_at(attributes)).get("_ARRAY_DIMENSIONS")
    return parse_v2(node.metadata, names)


class ChunkFiles:
    """The files of an array, one a chunk or shard, each looked at when it is first wanted.

    One that is not there was never written, as far as anyone can tell: Zarr keeps no list. What can
    be told is that the array itself has gone, or that a link leads nowhere. With ``holes=False``
    every chunk must be there.
    """

    def __init__(self, directory: Path, document: DataFile, keys: KeyEncoding, holes: bool) -> None:
        self._directory, self._document, self._keys = directory, document, keys
        self._holes = holes
        self.find = lru_cache(NUM_REMEMBERED)(self._look_at)

    def _look_at(self, position: tuple[int, ...]) -> DataFile | None:
        path = self._directory / self._keys.path(position)
        if DataFile.look_at(self._document.path) != self._document:
            raise FormatError(f"{self._document.path} has changed since it was opened")
        try:
            return DataFile.look_at(path)
        except FormatError as error:
            if not isinstance(error.__cause__, FileNotFoundError) or path.is_symlink():
                raise
        if not self._holes:
            raise FormatError(f"{path} does not exist, and holes=False says that all chunks do")
        return None

    def chunk(self, position: tuple[int, ...]) -> Chunk | None:
        """The chunk that fills a file."""
        file = self.find(position)
        return None if file is None else Chunk(file, 0, file.size)


class Shards:
    """Chunks inside the files of ``files``, found by the index of each."""

    def __init__(self, files: ChunkFiles, sharding: Sharding, shard_shape: Sequence[int]) -> None:
        self._files, self._sharding = files, sharding
        pairs = zip(shard_shape, sharding.chunk_shape, strict=True)
        self._counts = tuple(shard // chunk for shard, chunk in pairs)
        self._index = lru_cache(NUM_INDEXES)(self._read_index)

    def chunk(self, position: tuple[int, ...]) -> Chunk | None:
        pairs = list(zip(position, self._counts, strict=True))
        file = self._files.find(tuple(place // num for place, num in pairs))
        if file is None:
            return None
        found = self._index(file)[tuple(place % num for place, num in pairs)]
        offset, nbytes = map(int, found)
        if offset == nbytes == NO_CHUNK:
            return None
        file.check_range(offset, nbytes)
        return Chunk(file, offset, nbytes)

    def _read_index(self, file: DataFile) -> NDArray[Any]:
        crc_nbytes = 4 if self._sharding.index_has_crc else 0
        nbytes = math.prod(self._counts) * 16 + crc_nbytes
        if nbytes > file.size:
            raise FormatError(
                f"{file.path} is truncated: its {file.size} bytes are fewer than the {nbytes} of "
                "the index of a shard"
            )
        start = file.size - nbytes if self._sharding.index_is_last else 0
        raw = bytes(file.read(start, nbytes))
        body = raw[: nbytes - crc_nbytes]
        if crc_nbytes and crc32c(body).to_bytes(4, "little") != raw[-4:]:
            raise FormatError(f"{file.path} is damaged: the checksum of its index does not fit")
        return np.frombuffer(body, self._sharding.index_dtype).reshape(*self._counts, 2)


class ForeignArray(ArrayReader):
    """The array in ``directory``, read by zarr-python because of ``reason``."""

    def __init__(self, directory: Path, reason: str) -> None:
        self._directory = directory
        self._array = _opened(directory, reason)
        self.shape = tuple(self._array.shape)
        self.dtype = np.dtype(self._array.dtype).newbyteorder("=")
        if self.dtype.kind not in "biufc":
            raise FormatError(f"{directory} has values of type {self.dtype}: numbers are read")
        _warn_once(reason)

    def storage(self) -> Storage:
        return Storage(
            kind="chunked",
            nbytes=nbytes_on_disk(self._directory),
            chunks=tuple(self._array.chunks),
            compression="unknown here",
            note="read by zarr-python, which is slower",
        )

    def read(self, box: Box, out: NDArray[Any]) -> None:
        try:
            out[...] = self._array[tuple(slice(*span) for span in box.spans)]
        except Exception as error:  # whatever a codec of others raises
            raise FormatError(
                f"{self._directory} cannot be read by zarr-python: {error}"
            ) from error


def _opened(directory: Path, reason: str) -> Any:
    try:
        import zarr
    except ImportError as error:
        raise FormatError(
            f"{directory} has {reason}, which is not read here: zarr-python may know it (pip "
            "install zarr)"
        ) from error
    try:
        with warnings.catch_warnings(action="ignore"):  # ours says enough
            return zarr.open_array(store=str(directory), mode="r")
    except Exception as error:  # whatever it makes of a damaged document
        raise FormatError(
            f"{directory} has {reason}, which neither hyperslab nor zarr-python knows: {error}"
        ) from error


@lru_cache(maxsize=256)
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"Zarr arrays with {reason} are read by zarr-python, which is slower", stacklevel=2
    )
