"""Which inputs an interpolated output reads, along one dim."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hyperslab.layout.span import Span


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
