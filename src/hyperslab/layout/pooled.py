"""Which inputs an output of a pool reads, along one dim."""

from __future__ import annotations

from dataclasses import dataclass

from hyperslab.layout.span import Span
from hyperslab.layout.window import Window


@dataclass(frozen=True, slots=True)
class UnpaddedStart(Window):
    """A window of an operator that pads the tensor's start itself, so that it is not fetched."""

    def reads(self, output: Span) -> Span:
        reads = Window.reads(self, output)
        return Span(max(0, reads.start), max(0, reads.stop))

    def padding_before(self, output: Span) -> int:
        """How much padding the first of ``output`` reads."""
        return max(0, -Window.reads(self, output).start)


@dataclass(frozen=True, slots=True)
class AdaptiveWindow:
    """Output ``o`` reads from ``floor(o * extent / num)`` to ``ceil((o + 1) * extent / num)``.

    ``num`` is the number of outputs, ``extent`` that of inputs; neither is 0.
    """

    extent: int
    num: int

    def first(self, output: int) -> int:
        return output * self.extent // self.num

    def stop(self, output: int) -> int:
        return -(-(output + 1) * self.extent // self.num)

    @property
    def apart(self) -> bool:
        """Whether all windows are equally long and none overlap."""
        return self.extent % self.num == 0

    def output_extent(self, extent: int) -> int:
        return self.num

    def reads(self, output: Span) -> Span:
        first = self.first(output.start)
        return Span(first, self.stop(output.stop - 1) if output.size else first)

    def output_cut(self, cut: int) -> int:
        return -(-cut * self.num // self.extent)
