"""From the stored bytes of a chunk to its elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import FormatError, HyperslabError
from hyperslab.io.engine.chunked import Chunk

Buffer = bytes | bytearray | memoryview | NDArray[Any]


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
