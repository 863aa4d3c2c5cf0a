"""A windowed operator computed piece by piece, along one dim.

The operator pads both ends of what it is given alike, as torch's convolutions and pools do. A piece
that ends inside the tensor so gets padding where there should be neighbours. The outputs that read
it are wrong, and are dropped.
"""

from __future__ import annotations

from typing import NamedTuple

from hyperslab.layout.span import Span
from hyperslab.layout.window import Window


class Tile(NamedTuple):
    """One call of the operator."""

    reads: Span
    """The inputs it is given."""
    drop: int
    """How many of its outputs come before the wanted ones."""


def plan_tile(window: Window, outputs: Span, extent: int) -> Tile:
    """The call that computes ``outputs``, which are not empty, of a tensor of ``extent``.

    Its inputs begin at a multiple of the stride, so that its windows are those of the tensor.

    >>> plan_tile(Window(kernel=3, stride=2, padding=1), Span(4, 8), extent=32)
    Tile(reads=Span(start=6, stop=16), drop=1)
    """
    needs = window.reads(outputs) & Span(0, extent)
    first = needs.start // window.stride
    return Tile(Span(first * window.stride, needs.stop), outputs.start - first)


def whole_outputs(window: Window, held: Span, extent: int) -> Span:
    """The outputs that read nothing but ``held`` and what lies outside the tensor."""
    first = -((-held.start - window.padding) // window.stride)
    stop = (held.stop - 1 + window.padding - window.reach) // window.stride + 1
    num = window.output_extent(extent)
    return Span(0 if held.start == 0 else first, num if held.stop == extent else stop)
