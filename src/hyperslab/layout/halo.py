"""A convolution cut into an interior, which needs no other rank, and strips, which do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from hyperslab.layout.assembly import OWN, Assembly, Piece
from hyperslab.layout.box import Box, Span
from hyperslab.layout.exchange import Exchange, output_box_reads, plan_windows
from hyperslab.layout.layout import Grid, Layout
from hyperslab.layout.window import Window

Slices = tuple[slice, ...]


class Part(NamedTuple):
    """Where a box lies in what it comes from and in what it goes to."""

    source: Slices
    target: Slices


@dataclass(frozen=True, slots=True)
class Strip:
    """Outputs that need received inputs, and what their inputs are made of."""

    output: Slices
    """Where the outputs lie in the rank's output."""
    shape: tuple[int, ...]
    """Of the inputs, padding along split dims included."""
    own: Part
    """The inputs that are the rank's own."""
    halo: tuple[tuple[int, Part], ...]
    """Those that were received, with the number of the message."""


@dataclass(frozen=True, slots=True)
class Interior:
    """One call on the rank's own piece, as it lies in memory, that computes all outputs.

    The call pads with zeros what other ranks hold, so outputs that read there are wrong until
    strips overwrite them. It pads both ends alike, which may make outputs that are not the rank's;
    ``output`` says where its own are.
    """

    padding: tuple[int, ...]
    output: Slices
    exact: bool
    """Whether the call makes the rank's outputs and no others."""


@dataclass(frozen=True)
class HaloPlan:
    """How one rank convolves a piece that has an interior."""

    exchange: Exchange
    interior: Interior
    strips: tuple[Strip, ...]
    strip_padding: tuple[int, ...]
    min_numel: int
    """Of the smallest piece of any rank."""

    @cached_property
    def strip_inputs(self) -> Assembly:
        """What strips are computed from."""
        own = [
            Piece(OWN, strip.own.source, number, strip.own.target)
            for number, strip in enumerate(self.strips)
            if all(s.start < s.stop for s in strip.own.target)
        ]
        halos = self.strip_halos
        return Assembly(halos.shapes, (*own, *halos.pieces), halos.received)

    @cached_property
    def strip_halos(self) -> Assembly:
        """The received inputs of strips."""
        pieces = (
            Piece(message, part.source, number, part.target)
            for number, strip in enumerate(self.strips)
            for message, part in strip.halo
        )
        shapes = tuple(strip.shape for strip in self.strips)
        received = tuple(message.box.shape for message in self.exchange.receives)
        return Assembly(shapes, tuple(pieces), received)

    @cached_property
    def single_readers(self) -> tuple[Piece, ...] | None:
        """For each received box its one reader, if every box is read whole by a single strip."""
        shapes = self.strip_halos.received
        pieces = sorted(self.strip_halos.pieces, key=lambda piece: piece.source)
        wholes = [
            (number, tuple(slice(0, size) for size in shape)) for number, shape in enumerate(shapes)
        ]
        return tuple(pieces) if [(p.source, p.of) for p in pieces] == wholes else None


@lru_cache(maxsize=4096)
def plan_halo(
    grid: Grid, rank: int, source: Layout, windows: tuple[Window, ...]
) -> HaloPlan | None:
    """The plan for a convolution with ``windows`` along the spatial dims, which follow dim 1.

    None where some rank's piece has no interior to hide messages behind: ranks do all alike, so
    that they also differentiate alike.
    """
    everything = (None, None, *windows)
    windowed = plan_windows(grid, rank, source, everything)
    exchange, outputs = windowed.exchange, windowed.box
    owned = [source.box(coords) for coords in grid.coords]
    inner = [
        _interior_outputs(source, windows, own, windowed.output.box(coords))
        for own, coords in zip(owned, grid.coords, strict=True)
    ]
    if not all(inner):
        return None
    split = [source.splits[2 + dim] is not None for dim in range(len(windows))]
    return HaloPlan(
        exchange,
        _plan_interior(windows, split, exchange.owned, outputs),
        tuple(
            _plan_strip(source, everything, exchange, outputs, border)
            for border in outputs.minus(inner[rank])
        ),
        local_padding(source, windows),
        min(own.numel for own in owned),
    )


def local_padding(source: Layout, windows: Sequence[Window]) -> tuple[int, ...]:
    """What the local call pads once padding along split dims has been fetched."""
    splits = source.splits[2:]
    return tuple(0 if cut else w.padding for cut, w in zip(splits, windows, strict=True))


def _interior_outputs(source: Layout, windows: Sequence[Window], owned: Box, outputs: Box) -> Box:
    """The outputs that read nothing but the rank's own inputs and padding."""
    spans = list(outputs.spans)
    for dim, window in enumerate(windows, start=2):
        spans[dim] &= _whole_outputs(window, owned.spans[dim], source.shape[dim])
    return Box(tuple(spans)) if owned else Box.of(*[(0, 0)] * len(spans))


def _whole_outputs(window: Window, held: Span, extent: int) -> Span:
    """The outputs that read nothing but ``held`` and what lies outside the tensor."""
    first = -((-held.start - window.padding) // window.stride)
    stop = (held.stop - 1 + window.padding - window.reach) // window.stride + 1
    num = window.output_extent(extent)
    return Span(0 if held.start == 0 else first, num if held.stop == extent else stop)


def _plan_interior(
    windows: Sequence[Window], split: Sequence[bool], owned: Box, outputs: Box
) -> Interior:
    padding, where, exact = [], [slice(None), slice(None)], True
    for dim, window in enumerate(windows, start=2):
        if not split[dim - 2]:
            padding.append(window.padding)
            where.append(slice(None))
            continue
        own, out = owned.spans[dim], outputs.spans[dim]
        # With this padding the call's first output is out.start. Each stride more of padding puts
        # one output before it, until padding is not negative and the last output is reached.
        pad, before = own.start + window.padding - out.start * window.stride, 0
        while pad < 0 or _num_outputs(window, own.size + 2 * pad) < before + out.size:
            pad, before = pad + window.stride, before + 1
        exact &= _num_outputs(window, own.size + 2 * pad) == out.size
        padding.append(pad)
        where.append(slice(before, before + out.size))
    return Interior(tuple(padding), tuple(where), exact)


def _num_outputs(window: Window, num_inputs: int) -> int:
    return (num_inputs - window.reach - 1) // window.stride + 1


def _plan_strip(
    source: Layout,
    windows: tuple[Window | None, ...],
    exchange: Exchange,
    outputs: Box,
    border: Box,
) -> Strip:
    reads = output_box_reads(source, windows, border)
    own = exchange.owned & reads
    halo = tuple(
        (number, Part(part.slices_in(message.box), part.slices_in(reads)))
        for number, message in enumerate(exchange.receives)
        if (part := message.box & reads)
    )
    where = (slice(None), slice(None), *border.slices_in(outputs)[2:])
    kept = Part(own.slices_in(exchange.owned), own.slices_in(reads))
    return Strip(where, reads.shape, kept, halo)
