"""How a windowed operator is called on a part of its input, along one dim.

The operator pads both ends of what it is given alike, as torch's convolutions and pools do. A part
that ends inside the tensor then gets padding where there should be neighbours. The outputs that
read it are wrong, and are dropped.
"""

from __future__ import annotations

from typing import NamedTuple

from hyperslab.layout.box import Span
from hyperslab.layout.window import TransposedWindow, Window


class PieceCall(NamedTuple):
    """One call of an operator on a part of its input."""

    reads: Span
    """The inputs it is given."""
    outputs: Span
    """Those of its outputs that read no index that is in the tensor and not in the part."""
    drop: int
    """How many of its outputs come before them."""
    at_end: bool
    """Whether it pads as the operator on the whole tensor does. Else it pads nothing."""


def plan_piece_call(window: Window, outputs: Span, extent: int) -> PieceCall:
    """The call that computes ``outputs``, which are not empty, of a tensor of ``extent``.

    Outputs that read padding want inputs that begin at a multiple of the stride, as the operator
    pads both ends alike, and enough of them for one window: some operators refuse fewer. Others
    take what they read.

    >>> plan_piece_call(Window(kernel=3, stride=2, padding=1), Span(3, 6), extent=32)
    PieceCall(reads=Span(start=5, stop=12), outputs=Span(start=3, stop=6), drop=0, at_end=False)
    """
    reads = window.reads(outputs)
    if reads.start >= 0 and reads.stop <= extent:
        return PieceCall(reads, outputs, 0, at_end=False)
    least = min(window.reach + 1, extent)
    first = max(0, min(reads.start, extent - least)) // window.stride
    start = first * window.stride
    reads = Span(start, min(extent, max(reads.stop, start + least)))
    return PieceCall(reads, outputs, outputs.start - first, at_end=True)


def plan_transposed_call(window: TransposedWindow, held: Span, extent: int) -> PieceCall:
    """The call of a transposed convolution that makes the most of ``held``, a part of the tensor.

    On parts it pads nothing. At the tensor's end it adds its output padding.
    """
    written, at_end = window.writes(held), held.stop == extent
    start = (held.start - 1) * window.stride + window.reach - window.padding + 1
    stop = min(written.stop, held.stop * window.stride - window.padding)
    outputs = Span(
        max(0, written.start, start) if held.start else 0,
        window.output_extent(extent) if at_end else stop,
    )
    return PieceCall(held, outputs, outputs.start - written.start, at_end)
