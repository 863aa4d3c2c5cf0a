"""Chunks whose blocks were compressed each by itself: only those that a box touches are decoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from hyperslab.io.engine.box_copy import BoxCopy, copy, strides_of, walk
from hyperslab.io.engine.read_ahead import Range
from hyperslab.io.engine.scratch import Bytes, scratch


class BlockReader(ABC):
    """A chunk of ``nbytes`` in blocks of ``block_nbytes``, the last of which may be shorter."""

    nbytes: int
    block_nbytes: int

    @abstractmethod
    def decode(self, ranges: Sequence[Range], out: Bytes) -> None:
        """Fills ``out`` with ``ranges`` of the chunk, which ascend and consist of whole blocks."""

    def read(self, box: BoxCopy) -> None:
        """Copies a box out of the chunk; its offset counts from the chunk's first byte."""
        ranges, (start, strides) = self._blocks_of(box)
        nbytes = sum(size for _, size in ranges)
        if nbytes == box.out.nbytes and box.loops.is_run:
            self.decode(ranges, box.target.reshape(-1).view(np.uint8))
            return
        with scratch.borrowed():
            decoded = scratch.take(nbytes)
            self.decode(ranges, decoded)
            sizes, _ = box.loops.target
            copy(np.ndarray(sizes, box.loops.dtype, decoded.data, start, strides), box.target)

    def _blocks_of(self, box: BoxCopy) -> tuple[list[Range], tuple[int, tuple[int, ...]]]:
        """The blocks that hold a box, and where in them it begins, with its strides there.

        Blocks between two indices of a dim are left out where those lie alike in their blocks: then
        what is decoded is strided too. Otherwise all blocks from the first to the last are taken.
        """
        loops, block = box.loops, self.block_nbytes
        num_outer = 0
        for dim, gap in zip(loops.dims, loops.gaps, strict=True):
            if gap < block or dim.in_file % block:
                break
            num_outer += 1
        outer, inner = loops.dims[:num_outer], loops.dims[num_outer:]
        start = box.offset % block
        pitch = -(-(start + loops.covers[num_outer]) // block) * block
        ranges = [
            (first, min(pitch, self.nbytes - first)) for _, first in walk(outer, box.offset - start)
        ]
        *steps, _ = strides_of([*(dim.size for dim in outer), pitch], np.dtype(np.uint8))
        return ranges, (start, (*steps, *(dim.in_file for dim in inner)))
