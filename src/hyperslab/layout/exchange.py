"""Who sends which box to whom, so that every rank holds the box it asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple
from zlib import crc32

from hyperslab.layout.assembly import OWN, Assembly, Piece, cut_out
from hyperslab.layout.box import Box, Span
from hyperslab.layout.layout import Grid, Layout, Split
from hyperslab.layout.window import Reads, output_cuts


class Message(NamedTuple):
    """A box that goes to, or comes from, rank ``peer``."""

    peer: int
    box: Box
    where: tuple[slice, ...]
    """Where the box lies in the owned piece (sends) or in the wanted one (receives)."""
    tag: int
    """A number of the box: where ranks disagree on what is sent, messages find no taker."""


def _message(peer: int, box: Box, piece: Box) -> Message:
    tag = crc32(repr(box.spans).encode()) >> 8  # room for what the sender adds to it
    return Message(peer, box, box.slices_in(piece), tag)


class Row(NamedTuple):
    """Boxes that lie one after the other along one dim."""

    dim: int
    order: tuple[int, ...]
    """The numbers of the boxes, first to last."""


def _row(parts: Sequence[Box], whole: Box) -> Row | None:
    """How ``parts``, which fill ``whole``, lie in a row, if they do."""
    dims = [
        dim
        for dim, span in enumerate(whole.spans)
        if any(part.spans[dim] != span for part in parts)
    ]
    if len(dims) != 1:
        return None
    starts = [part.spans[dims[0]].start for part in parts]
    return Row(dims[0], tuple(sorted(range(len(parts)), key=starts.__getitem__)))


@dataclass(frozen=True)
class Exchange:
    """One rank's part in an exchange of boxes.

    ``wanted`` may reach beyond the tensor; what lies outside is nobody's to send.
    """

    owned: Box
    wanted: Box
    kept: Box
    """What is wanted and already here."""
    kept_from: tuple[slice, ...]
    kept_to: tuple[slice, ...]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    outside: tuple[tuple[slice, ...], ...]
    """Where the wanted box lies outside the tensor."""
    row: Row | None
    """How the parts of the wanted box lie, if they do so in a row."""
    stays: bool
    """Whether just what is owned is wanted."""
    keeps_all: bool
    """Whether all that is owned is wanted."""
    idle: bool
    """Whether no rank of the grid sends anything."""

    @cached_property
    def sent(self) -> Assembly:
        """The boxes of the owned piece that others want."""
        return _cut_out(self.sends)

    @cached_property
    def returned(self) -> Assembly:
        """The boxes of the wanted one whose gradients go home."""
        return _cut_out(self.receives)

    @cached_property
    def assembled(self) -> Assembly:
        """The wanted box, of what is here and what is received."""
        kept = (Piece(OWN, self.kept_from, 0, self.kept_to),) if self.kept else ()
        shapes = tuple(message.box.shape for message in self.receives)
        pieces = tuple(
            Piece(number, tuple(slice(0, size) for size in shape), 0, message.where)
            for number, (message, shape) in enumerate(zip(self.receives, shapes, strict=True))
        )
        return Assembly((self.wanted.shape,), kept + pieces, shapes)


def _cut_out(messages: Sequence[Message]) -> Assembly:
    return cut_out(tuple(m.where for m in messages), tuple(m.box.shape for m in messages))


def plan_exchange(grid: Grid, rank: int, source: Layout, wanted: Sequence[Box]) -> Exchange:
    """What ``rank`` sends and receives when rank ``r`` asks for ``wanted[r]`` of ``source``.

    Where ``source`` is equal on several ranks, a rank asks the one that shares its coords along the
    axes that do not split ``source``: itself first, and no rank is asked by all.
    """
    mine = grid.coords[rank]
    replicated = [axis for axis in grid.long_axes if axis not in source.axes]
    boxes = [source.box(coords) for coords in grid.coords]
    owned, asked = boxes[rank], wanted[rank]
    sends, receives = [], []
    for peer, theirs in enumerate(grid.coords):
        if peer == rank or any(theirs[axis] != mine[axis] for axis in replicated):
            continue
        if piece := owned & wanted[peer]:
            sends.append(_message(peer, piece, owned))
        if piece := boxes[peer] & asked:
            receives.append(_message(peer, piece, asked))
    kept = owned & asked
    whole = Box.whole(source.shape)
    outside = asked.minus(whole)
    parts = (*outside, *([kept] if kept else []), *(message.box for message in receives))
    return Exchange(
        owned=owned,
        wanted=asked,
        kept=kept,
        kept_from=kept.slices_in(owned),
        kept_to=kept.slices_in(asked),
        sends=tuple(sends),
        receives=tuple(receives),
        outside=tuple(part.slices_in(asked) for part in outside),
        row=_row(parts, asked),
        stays=asked == owned,
        keeps_all=kept == owned,
        idle=all(own.contains(want & whole) for own, want in zip(boxes, wanted, strict=True)),
    )


@lru_cache(maxsize=4096)
def plan_recut(grid: Grid, rank: int, source: Layout, target: Layout) -> Exchange:
    """How ``rank`` gets its piece under ``target`` of a tensor that lies under ``source``."""
    return plan_exchange(grid, rank, source, [target.box(coords) for coords in grid.coords])


@lru_cache(maxsize=4096)
def plan_move(grid: Grid, rank: int, source: Layout, other: Grid, target: Layout) -> Exchange:
    """As ``plan_recut``, where ``target`` is on ``other``, a grid of the same ranks."""
    return plan_exchange(grid, rank, source, [target.box(coords) for coords in other.coords])


@dataclass(frozen=True, slots=True)
class Windowed:
    """A windowed operator's output layout and how a rank gets the inputs it reads."""

    output: Layout
    box: Box
    """The outputs that this rank owns."""
    exchange: Exchange


@lru_cache(maxsize=4096)
def plan_windows(
    grid: Grid, rank: int, source: Layout, windows: tuple[Reads | None, ...]
) -> Windowed:
    """The plan of an operator that reads ``windows[dim]`` along each dim (None: index by index).

    The wanted box reaches beyond the tensor where the operator reads padding along a split dim. A
    dim that is whole on every rank is wanted whole and without its padding: the local operator pads
    it as ever.
    """
    output = source
    for dim, window in enumerate(windows):
        if window is not None:
            extent, split = window.output_extent(source.shape[dim]), source.splits[dim]
            cut = split and Split(split.axis, output_cuts(window, split.cuts))
            output = output.with_dim(dim, extent, cut)

    def reads(coords: Mapping[str, int]) -> Box:
        return output_box_reads(source, windows, output.box(coords))

    wanted = [reads(coords) for coords in grid.coords]
    exchange = plan_exchange(grid, rank, source, wanted)
    return Windowed(output, output.box(grid.coords[rank]), exchange)


def output_box_reads(source: Layout, windows: tuple[Reads | None, ...], output: Box) -> Box:
    """The box of ``source`` that the outputs in ``output`` read; see ``plan_windows``."""
    spans = []
    for dim, (window, span) in enumerate(zip(windows, output.spans, strict=True)):
        if window is None:
            spans.append(span)
        elif source.splits[dim] is None:
            spans.append(Span(0, source.shape[dim]))
        else:
            spans.append(window.reads(span))
    return Box(tuple(spans))
