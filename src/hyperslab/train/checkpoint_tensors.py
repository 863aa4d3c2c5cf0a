"""The tensors of a checkpoint, read from files that may be made to do harm.

torch pickles its list of tensors, and its own way to read one runs what a pickle asks for and opens
the files that it names. Here only values that describe tensors are unpickled, all of them are
checked, and all tensors are filled, from files that the manifest lists.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from itertools import groupby
from pathlib import Path
from typing import IO, Any, ClassVar, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view as file_view
from torch.distributed.tensor import DTensor

from hyperslab.errors import FormatError
from hyperslab.layout import Box, Span
from hyperslab.train.checkpoint_folder import ADVICE, METADATA, FileSum, Manifest, open_in
from hyperslab.train.checkpoint_state import TENSOR, dtype_of, leaves, shape_of

ZIP = b"PK\x03\x04"
"""How the bytes of a tensor begin; torch reads older kinds too, in which values may be missing."""


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its bytes lie."""

    box: Box
    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in the files; its chunks cover each element once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


Index = Mapping[str, SavedTensor]
"""By the paths of the manifest's trees."""


def read_index(folder: Path, manifest: Manifest) -> Index:
    """Where the tensors of the manifest lie, all of them and no others."""
    path = folder / METADATA
    if METADATA not in manifest.files:
        raise FormatError(f"{folder} is damaged: its manifest does not list {METADATA}; {ADVICE}")
    try:
        with open_in(folder, METADATA) as file:
            metadata = _MetadataUnpickler(file).load()
        index = _checked_index(metadata, manifest.files)
        _check_alike(index, manifest)
    except Exception as error:
        raise FormatError(f"{path} is not to be used ({_words(error)}): {ADVICE}") from error
    return index


def read_tensors(tensors: Mapping[str, Tensor], index: Index, folder: Path) -> None:
    """Fills ``tensors``, which may be cut in another way than those in ``folder``."""
    wanted = [piece for name, tensor in tensors.items() for piece in _pieces(tensor, index[name])]
    wanted.sort(key=lambda piece: (piece.chunk.file, piece.chunk.offset))
    for name, pieces in groupby(wanted, key=lambda piece: piece.chunk.file):
        with open_in(folder, name) as file:
            for piece in pieces:
                found = _load(file, piece.chunk, piece.dtype, folder / name)
                piece.out.copy_(found[piece.place])


def read_chunks(index: Index, folder: Path) -> Iterator[tuple[str, Box, Tensor]]:
    """Names, boxes and values of all chunks, one at a time, in the order of the files."""
    chunks = [(chunk, name) for name, saved in index.items() for chunk in saved.chunks]
    chunks.sort(key=lambda each: (each[0].file, each[0].offset))
    for file_name, group in groupby(chunks, key=lambda each: each[0].file):
        with open_in(folder, file_name) as file:
            for chunk, name in group:
                yield name, chunk.box, _load(file, chunk, index[name].dtype, folder / file_name)


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor here that one chunk holds."""

    out: Tensor
    chunk: Chunk
    place: tuple[slice, ...]
    """Of ``out`` in the chunk."""
    dtype: torch.dtype


def _pieces(tensor: Tensor, saved: SavedTensor) -> Iterator[_Piece]:
    assert tuple(tensor.shape) == saved.shape
    assert tensor.dtype == saved.dtype
    own, box = local_piece(tensor)
    for chunk in saved.chunks:
        if part := chunk.box & box:
            out = own[part.slices_in(box)]
            yield _Piece(out, chunk, part.slices_in(chunk.box), saved.dtype)


def local_piece(tensor: Tensor) -> tuple[Tensor, Box]:
    """What this rank holds of a tensor, and which box of the whole that is."""
    if not isinstance(tensor, DTensor):
        return tensor, Box.whole(tensor.shape)
    (mine,) = tensor.__create_chunk_list__()
    return tensor.to_local(), _box(mine.offsets, mine.sizes)


def _load(file: BufferedReader, chunk: Chunk, dtype: torch.dtype, path: Path) -> Tensor:
    file.seek(chunk.offset)
    try:
        if file.read(len(ZIP)) != ZIP:
            raise ValueError("its first bytes are others")
        view = cast(IO[bytes], file_view(file, chunk.offset, chunk.nbytes))
        found: Tensor = torch.load(view, map_location="cpu", weights_only=True)
        is_dense = type(found) is Tensor and found.layout == torch.strided and found.is_cpu
        if not is_dense or found.dtype != dtype or tuple(found.shape) != chunk.box.shape:
            raise ValueError("it is another one")
    except Exception as error:
        raise FormatError(
            f"{path} holds no {dtype} tensor of {chunk.box.shape} at byte {chunk.offset} "
            f"({_words(error)}): {ADVICE}"
        ) from error
    return found


# The index


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the values that describe tensors in files, and no others."""

    _NAMES: ClassVar[Mapping[str, str]] = {
        "torch.distributed.checkpoint.metadata": "ChunkStorageMetadata Metadata MetadataIndex "
        "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem": "_StorageInfo",
        "torch": "Size",
        "torch.serialization": "_get_layout",
        "collections": "OrderedDict",
        "pathlib": "PosixPath Path",
        "pathlib._local": "PosixPath",
    }

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if is_dtype or name in self._NAMES.get(module, "").split():
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which describes no tensor")


def _checked_index(metadata: Any, files: Mapping[str, FileSum]) -> Index:
    """Values of our own: of what was unpickled, nothing stays."""
    if type(metadata) is not Metadata:
        raise ValueError(f"it holds a {type(metadata).__name__}")
    index = {}
    for name, entry in metadata.state_dict_metadata.items():
        if type(entry) is not TensorStorageMetadata:
            raise ValueError(f"{name} is a {type(entry).__name__}, and tensors alone are read")
        dtype = entry.properties.dtype
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} has the dtype {dtype!r}")
        places = [(_box(each.offsets, each.sizes), each.offsets) for each in entry.chunks]
        chunks = tuple(
            _checked_chunk(box, metadata.storage_data[MetadataIndex(name, at)], dtype, files)
            for box, at in places
            if box
        )
        index[name] = SavedTensor(_numbers(entry.size), dtype, chunks)
        _check_cover(name, index[name])
    return index


def _checked_chunk(box: Box, info: Any, dtype: torch.dtype, files: Mapping[str, FileSum]) -> Chunk:
    file, (offset, nbytes) = info.relative_path, _numbers((info.offset, info.length))
    if type(file) is not str or file not in files:
        raise ValueError(f"it names the file {file!r}, which the manifest does not list")
    if box.numel * dtype.itemsize > nbytes or offset + nbytes > files[file].nbytes:
        raise ValueError(
            f"{box.numel} numbers cannot lie in {nbytes} bytes at byte {offset} of {file}, which "
            f"has {files[file].nbytes}"
        )
    if info.transform_descriptors:
        raise ValueError(f"{file} is encoded, by {info.transform_descriptors!r}")
    return Chunk(box, file, offset, nbytes)


def _check_cover(name: str, saved: SavedTensor) -> None:
    """Raises unless the chunks are a grid, as tensors are cut, that covers the tensor once."""
    spans = [
        sorted({chunk.box.spans[dim] for chunk in saved.chunks}, key=lambda span: span.start)
        for dim in range(len(saved.shape))
    ]
    num = len({chunk.box for chunk in saved.chunks})
    is_grid = num == math.prod(map(len, spans)) and all(map(_is_row, spans, saved.shape))
    if num != len(saved.chunks) or not (is_grid or (num == 0 and 0 in saved.shape)):
        raise ValueError(
            f"its {len(saved.chunks)} chunks of {name} do not cover {saved.shape} once"
        )


def _is_row(spans: Sequence[Span], extent: int) -> bool:
    """Whether spans follow one another from 0 to ``extent``."""
    stops = [0, *(span.stop for span in spans)]
    return [span.start for span in spans] == stops[:-1] and stops[-1] == extent


def _check_alike(index: Index, manifest: Manifest) -> None:
    expected = {leaf[TENSOR]: leaf for leaf in leaves(manifest.trees)}
    if differing := sorted(index.keys() ^ expected.keys()):
        raise ValueError(f"{differing[0]} is in the manifest or in the files, but not in both")
    for name, leaf in expected.items():
        there, here = index[name], (shape_of(leaf), dtype_of(leaf))
        if (there.shape, there.dtype) != here:
            raise ValueError(
                f"{name} is {there.shape} {there.dtype} in the files, and {here[0]} {here[1]} in "
                "the manifest"
            )


def _box(offsets: Any, sizes: Any) -> Box:
    starts, lengths = _numbers(offsets), _numbers(sizes)
    return Box(tuple(Span(at, at + n) for at, n in zip(starts, lengths, strict=True)))


def _numbers(found: Any) -> tuple[int, ...]:
    numbers = tuple(found)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{numbers} are no whole numbers from 0")
    return numbers


def _words(error: Exception) -> str:
    """An error in one line; those of our own checks need no name."""
    words = str(error).partition("\n")[0]
    return words if type(error) is ValueError else f"{type(error).__name__}: {words}"
