"""safetensors files that are written box by box, so that no tensor need be whole anywhere.

A file is the length of its header in 8 bytes, the header in JSON, and the bytes of all tensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from hyperslab.errors import FormatError
from hyperslab.partial import partial_file

SHARD_NBYTES = 5 << 30
"""Tensors of more bytes than this together go to several files."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def index_path(path: Path) -> Path:
    """The list of files that stand for ``path`` where one is not enough."""
    return path.with_name(f"{path.name}.index.json")


def find_weights(path: Path) -> Path | None:
    """What stands for ``path``: itself, the index of several files, or nothing."""
    return next((each for each in (index_path(path), path) if each.exists()), None)


@dataclass(frozen=True)
class _Place:
    """Where a tensor begins in the files, and how it is shaped."""

    fd: int
    offset: int
    shape: tuple[int, ...]
    itemsize: int


class WeightFiles:
    """Files for ``tensors``, of which only shapes and dtypes are looked at.

    One file ``path``, or, for more than ``shard_nbytes``, several beside it and an index of them.
    They have their names when the ``with`` block ends without an error.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        about: Mapping[str, str],
        shard_nbytes: int = SHARD_NBYTES,
    ) -> None:
        self._path, self._tensors, self._about = path, tensors, about
        self._shards = _shards(path, tensors, shard_nbytes)
        self._places: dict[str, _Place] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for names, keys in _named(self._path, self._shards):
                _, fd = stack.enter_context(partial_file(names))
                self._begin(fd, keys)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._stack.__exit__(kind, error, trace)
        if error is not None:
            return
        if len(self._shards) > 1:
            self._write_index()
        else:  # of an export before, which is no longer what counts
            index_path(self._path).unlink(missing_ok=True)

    def write(self, key: str, start: Sequence[int], values: Tensor) -> None:
        """Puts ``values`` where they begin at ``start`` in tensor ``key``."""
        place = self._places[key]
        data = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        at = 0
        for offset, numel in _runs(place.shape, start, values.shape):
            nbytes = numel * place.itemsize
            _write_all(place.fd, data[at : at + nbytes], place.offset + offset * place.itemsize)
            at += nbytes

    def _begin(self, fd: int, keys: Sequence[str]) -> None:
        header: dict[str, Any] = {"__metadata__": dict(self._about)}
        places, at = [], 0
        for key in keys:
            tensor = self._tensors[key]
            stop = at + tensor.numel() * tensor.itemsize
            header[key] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": [*tensor.shape],
                "data_offsets": [at, stop],
            }
            places.append((key, at, tensor))
            at = stop
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        _write_all(fd, memoryview(len(text).to_bytes(8, "little") + text), 0)
        os.ftruncate(fd, 8 + len(text) + at)
        for key, offset, tensor in places:
            shape = tuple(tensor.shape)
            self._places[key] = _Place(fd, 8 + len(text) + offset, shape, tensor.itemsize)

    def _write_index(self) -> None:
        total = sum(each.numel() * each.itemsize for each in self._tensors.values())
        files = {key: path.name for path, keys in _named(self._path, self._shards) for key in keys}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=1)
        with partial_file(index_path(self._path)) as (_, fd):
            _write_all(fd, memoryview(text.encode()), 0)


def _shards(path: Path, tensors: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """The names of tensors that share a file; longer dtypes come first, so that all are aligned."""
    for key, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise FormatError(
                f"{path} could not be written: safetensors files hold no {tensor.dtype} ({key})"
            )
    shards: list[list[str]] = [[]]
    nbytes = 0
    for key, tensor in tensors.items():
        own = tensor.numel() * tensor.itemsize
        if shards[-1] and nbytes + own > limit:
            shards.append([])
            nbytes = 0
        shards[-1].append(key)
        nbytes += own
    return [sorted(keys, key=lambda key: (-tensors[key].itemsize, key)) for keys in shards]


def _named(path: Path, shards: Sequence[Sequence[str]]) -> Iterator[tuple[Path, Sequence[str]]]:
    if len(shards) == 1:
        yield path, shards[0]
        return
    for number, keys in enumerate(shards, 1):
        name = f"{path.stem}-{number:05d}-of-{len(shards):05d}{path.suffix}"
        yield path.with_name(name), keys


def _runs(
    shape: Sequence[int], start: Sequence[int], lengths: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """First elements and lengths of what a box has in a row, in its own order.

    >>> list(_runs((4, 6), (1, 2), (2, 3))), list(_runs((4, 6), (1, 0), (2, 6)))
    ([(8, 3), (14, 3)], [(6, 12)])
    """
    if 0 in lengths:
        return
    outer = len(shape)
    while outer and lengths[outer - 1] == shape[outer - 1]:
        outer -= 1
    outer = max(0, outer - 1)  # of the last dim that is cut, all is still in a row
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(at * stride for at, stride in zip(start, strides, strict=True))
    for index in np.ndindex(*lengths[:outer]):
        ahead = sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield first + ahead, math.prod(lengths[outer:])


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done
