"""Which columns of a matrix of patches a row of the image that they make up reads."""

from __future__ import annotations

from dataclasses import dataclass

from hyperslab.layout.span import Span
from hyperslab.layout.window import TransposedWindow


@dataclass(frozen=True, slots=True)
class FoldedRows:
    """The rows of an image, each patch of which is a column; ``num_across`` patches are a row."""

    rows: TransposedWindow
    num_across: int

    def output_extent(self, extent: int) -> int:
        return self.rows.output_extent(extent // self.num_across)

    def reads(self, output: Span) -> Span:
        start, stop = self.rows.reads(output)
        return Span(start * self.num_across, stop * self.num_across)

    def output_cut(self, cut: int) -> int:
        return self.rows.output_cut(round(cut / self.num_across))
