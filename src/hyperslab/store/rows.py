"""One array of the samples of a batch, in the memory that they are read into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from hyperslab.io import ArraySpec
from hyperslab.store.augment import Symmetry


@dataclass(frozen=True)
class Rows:
    """This rank's box of every sample that came to it.

    Samples are turned as their rows are filled, or later: until then a row holds the pre-image of
    its box, which may have another shape, but as many elements.
    """

    spec: ArraySpec
    shape: tuple[int, ...]
    """Of the boxes, channels first."""
    memory: NDArray[Any]
    """(samples, elements), those of a sample in the file's order of dims."""
    turns: tuple[Symmetry, ...] = ()
    """What is yet to be done with each sample, if anything is."""

    def place(self, row: int) -> NDArray[Any]:
        """The memory of a sample, with the shape that is to be filled, channels first."""
        shape = self.turns[row].source_shape(self.shape) if self.turns else self.shape
        return self._laid_out(self.memory[row : row + 1], shape)[0, ...]

    @property
    def boxes(self) -> NDArray[Any]:
        """(samples, channels, ...), where nothing is left to be turned."""
        assert not self.turns
        return self._laid_out(self.memory, self.shape)

    def _laid_out(self, memory: NDArray[Any], shape: Sequence[int]) -> NDArray[Any]:
        axes = self.spec.axes
        in_file = memory.reshape(len(memory), *axes.in_file_order(shape))
        return in_file.transpose(0, *(1 + dim for dim in axes.order))

    def only(self, rows: Sequence[int]) -> Rows:
        kept = tuple(self.turns[row] for row in rows) if self.turns else ()
        return replace(self, memory=self.memory[list(rows)], turns=kept)
