"""Where the chunks of a Zarr array lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import FormatError
from hyperslab.io.engine.chunked import Chunk
from hyperslab.io.engine.crc32c import crc32c
from hyperslab.io.engine.files import DataFile
from hyperslab.io.formats.zarr.metadata import KeyEncoding, Sharding

NUM_REMEMBERED = 2**16
"""Files of which is remembered how they were when they were first looked at."""
NUM_INDEXES = 64
NO_CHUNK = 2**64 - 1


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
