"""Zarr hierarchies in directories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from hyperslab.errors import FormatError
from hyperslab.io.engine.chunked import ChunkedArray
from hyperslab.io.engine.files import DataFile
from hyperslab.io.formats.zarr.chunks import ChunkFiles, Shards
from hyperslab.io.formats.zarr.codecs import UnknownPart, check_safe
from hyperslab.io.formats.zarr.documents import Node, array_names, find_array, read_document
from hyperslab.io.formats.zarr.fallback import ForeignArray, stored_nbytes
from hyperslab.io.formats.zarr.metadata import ArrayMetadata
from hyperslab.io.formats.zarr.v2 import parse_v2
from hyperslab.io.formats.zarr.v3 import parse_v3
from hyperslab.io.reader import ArrayReader, Format, Storage


class Zarr(Format):
    """Arrays of versions 2 and 3, named by their path in the hierarchy.

    A directory that is itself an array has one, called ``data``. By the specification a chunk whose
    file is missing holds the fill value, so that a lost file cannot be told from one that was never
    written; open data that has no holes with ``holes=False``, and a missing file is an error.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".zarr",)

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
        return replace(super().storage(), nbytes=stored_nbytes(self._directory))


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
