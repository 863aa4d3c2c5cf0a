"""Rows of a batch that have come to the device, where they are turned and converted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyperslab.store.augment import Symmetry
from hyperslab.store.rows import Rows

_MOVED_AS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Not every torch mirrors unsigned numbers on a GPU."""


@dataclass(frozen=True)
class Arrived:
    """``memory`` is that of ``rows``, on the device."""

    rows: Rows
    memory: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    def as_read(self) -> Tensor:
        """(samples, channels, ...), of which none is to be turned; its memory is the file's."""
        assert not self.rows.turns
        return self._laid_out(self.memory, self.rows.shape)

    def converted(self, dtype: torch.dtype, owned: bool = False) -> Tensor:
        """(samples, channels, ...) in ``dtype``, in that order in memory too; a copy if ``owned``.

        What is to be turned is. That takes one pass, and another over samples that are mirrored.
        """
        if not self.rows.turns and dtype == self.dtype and not owned:
            boxes = self.as_read()
            if boxes.is_contiguous():
                return boxes
        shape = (len(self.memory), *self.rows.shape)
        out = torch.empty(shape, dtype=dtype, device=self.memory.device)
        if not self.rows.turns:
            return out.copy_(self.as_read())
        for row, turn in enumerate(self.rows.turns):
            out[row].copy_(turned(self._source(row), turn))
        return out

    def _source(self, row: int) -> Tensor:
        """The box of a sample as it was read, channels first."""
        shape = self.rows.turns[row].source_shape(self.rows.shape)
        return self._laid_out(self.memory[row : row + 1], shape)[0]

    def _laid_out(self, memory: Tensor, shape: Sequence[int]) -> Tensor:
        axes = self.rows.spec.axes
        in_file = memory.reshape(len(memory), *axes.in_file_order(shape))
        return in_file.permute(0, *(1 + dim for dim in axes.order))


def turned(source: Tensor, turn: Symmetry) -> Tensor:
    """The box of the result that ``source`` becomes: a view, or a copy where it is mirrored."""
    box = source.permute(turn.forth(source.ndim))
    mirrored = turn.mirrored(source.ndim)
    if not mirrored:
        return box
    return box.view(_MOVED_AS.get(box.dtype, box.dtype)).flip(mirrored).view(box.dtype)
