"""Which inputs an output of a convolution, a pool or an interpolation reads, along one dim."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from hyperslab.errors import LayoutError
from hyperslab.layout.box import Span
from hyperslab.layout.cuts import Cuts


class Reads(Protocol):
    """How the outputs along one dim depend on the inputs along it."""

    def output_extent(self, extent: int) -> int:
        """How many outputs there are for ``extent`` inputs."""

    def reads(self, output: Span) -> Span:
        """The inputs that ``output`` needs; may reach beyond the tensor's ends."""

    def output_cut(self, cut: int) -> int:
        """The first output of the piece whose first input is ``cut``; may lie beyond the ends."""


@dataclass(frozen=True, slots=True)
class Window:
    """Output ``o`` reads inputs ``o * stride - padding + d * dilation`` for ``0 <= d < kernel``.

    What lies outside the tensor is padding. There are ``padding + extra`` indices of it after the
    tensor's end: ``extra`` serves "same" padding of even kernels and the overhang of ``ceil_mode``.
    """

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    extra: int = 0

    @property
    def reach(self) -> int:
        """From the first input that an output reads to the last."""
        return self.dilation * (self.kernel - 1)

    def output_extent(self, extent: int) -> int:
        return (extent + 2 * self.padding + self.extra - self.reach - 1) // self.stride + 1

    def reads(self, output: Span) -> Span:
        first = output.start * self.stride - self.padding
        if not output.size:
            return Span(first, first)
        return Span(first, (output.stop - 1) * self.stride - self.padding + self.reach + 1)

    def output_cut(self, cut: int) -> int:
        """An output belongs to the rank that owns the middle of the inputs it reads.

        With "same" padding that is input ``o * stride``.
        """
        return -((self.reach // 2 - self.padding - cut) // self.stride)


@dataclass(frozen=True, slots=True)
class TransposedWindow:
    """Input ``i`` adds to outputs ``i * stride - padding + d * dilation``, ``0 <= d < kernel``."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    output_padding: int = 0

    @property
    def reach(self) -> int:
        return self.dilation * (self.kernel - 1)

    def output_extent(self, extent: int) -> int:
        return (extent - 1) * self.stride - 2 * self.padding + self.reach + self.output_padding + 1

    def reads(self, output: Span) -> Span:
        """The inputs that add to ``output``, and enough of them to write all of it.

        Where the stride is longer than the kernel some outputs get nothing; an input next to them
        is read all the same, so that ``writes(reads(output))`` covers ``output``.
        """
        first = min(self._first_to_reach(output.start), self._last_at(output.start))
        if not output.size:
            return Span(first, first)
        last = max(self._first_to_reach(output.stop - 1), self._last_at(output.stop - 1))
        return Span(first, last + 1)

    def _first_to_reach(self, output: int) -> int:
        return -((self.reach - self.padding - output) // self.stride)

    def _last_at(self, output: int) -> int:
        return (output + self.padding) // self.stride

    def writes(self, inputs: Span) -> Span:
        """The outputs that ``inputs`` add to, before any is cut off at the tensor's ends."""
        first = inputs.start * self.stride - self.padding
        if not inputs.size:
            return Span(first, first)
        return Span(first, first + (inputs.size - 1) * self.stride + self.reach + 1)

    def output_cut(self, cut: int) -> int:
        """The stride's worth of outputs in the middle of what an input adds to is its own."""
        return cut * self.stride - self.padding + (self.reach - self.stride + 2) // 2


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


@dataclass(frozen=True, slots=True)
class Resampling:
    """Output ``o`` of ``num`` lies at ``o * step + offset`` among the inputs.

    It reads the input there (the one before, between two), ``below`` inputs before that and
    ``above`` after it. At the tensor's ends the outermost input stands for those beyond.
    """

    extent: int
    num: int
    step: float
    offset: float
    below: int
    above: int
    shifts: bool
    """Whether whole steps shift outputs and inputs alike, without any rounding.

    Then a window that starts at a whole step is interpolated as the tensor is. Otherwise rounding
    may make an output read one input further on either side, which is therefore read too.
    """

    @property
    def reach(self) -> int:
        """How many inputs, from ``first(output)`` on, hold all that an output reads."""
        return self.below + self.above + 1 + 2 * self._margin

    @property
    def _margin(self) -> int:
        return 0 if self.shifts else 1

    def first(self, output: int) -> int:
        """The first input that ``output`` may read; may lie before the tensor's start."""
        return math.floor(output * self.step + self.offset) - self.below - self._margin

    def output_extent(self, extent: int) -> int:
        return self.num

    def reads(self, output: Span) -> Span:
        first = min(max(0, self.first(output.start)), self.extent - 1)
        if not output.size:
            return Span(first, first)
        stop = self.first(output.stop - 1) + self.reach
        if self.shifts:
            # From a whole step to a whole step, so that the window makes all of its outputs.
            whole = max(1, int(self.step))
            first -= first % whole
            stop = -(-max(stop, math.ceil(output.stop * self.step)) // whole) * whole
        return Span(first, max(first + 1, min(stop, self.extent)))

    def output_cut(self, cut: int) -> int:
        return -(-cut * self.num // self.extent)


def output_cuts(window: Reads, cuts: Cuts) -> Cuts:
    """The cuts of a windowed operator's output, from those of its input."""
    extent = window.output_extent(cuts.extent)
    if extent < 0:
        raise LayoutError(
            f"{window} does not fit an extent of {cuts.extent}: the output would have an extent of "
            f"{extent} (use a smaller kernel, or other padding)"
        )
    inner = [min(max(0, window.output_cut(cut)), extent) for cut in cuts.bounds[1:-1]]
    return Cuts((0, *inner, extent))
