"""What a windowed operator can compute of a part of its input, along one dim."""

from __future__ import annotations

from typing import NamedTuple

from hyperslab.layout.span import Span
from hyperslab.layout.tile import whole_outputs
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


def plan_piece_call(window: Window, held: Span, extent: int) -> PieceCall:
    """The call that makes the most of ``held``, a part of a tensor of ``extent``.

    Outputs that read padding want inputs that begin at a multiple of the stride, as the operator
    pads both ends alike; others take theirs from where they are.

    >>> plan_piece_call(Window(kernel=3, stride=2, padding=1), Span(5, 12), extent=32)
    PieceCall(reads=Span(start=5, stop=12), outputs=Span(start=3, stop=6), drop=0, at_end=False)
    """
    outputs = whole_outputs(window, held, extent)
    reads = window.reads(outputs)
    if outputs.size and reads.start >= 0 and reads.stop <= extent:
        return PieceCall(reads, outputs, 0, at_end=False)
    first = -(-held.start // window.stride)
    reads = Span(first * window.stride, held.stop)
    outputs = whole_outputs(window, reads, extent)
    return PieceCall(reads, outputs, outputs.start - first, at_end=True)


def plan_transposed_call(window: TransposedWindow, held: Span, extent: int) -> PieceCall:
    """The same for a transposed convolution that pads nothing, as it is called on parts.

    At the tensor's end it adds its output padding.
    """
    written, at_end = window.writes(held), held.stop == extent
    start = (held.start - 1) * window.stride + window.reach - window.padding + 1
    stop = min(written.stop, held.stop * window.stride - window.padding)
    outputs = Span(
        max(0, written.start, start) if held.start else 0,
        window.output_extent(extent) if at_end else stop,
    )
    return PieceCall(held, outputs, outputs.start - written.start, at_end)
