"""What a trainer lays out for others: which of its ranks holds which boxes, and where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hyperslab.layout import Box, Span, cut_evenly
from hyperslab.store.segment import Address

HEADER_NBYTES = 64
"""In front of what is laid out: the number of the match that it is for."""
PART_NBYTES = 1 << 20
"""Of a tensor that several ranks hold no part is smaller, where each copies one."""
Bounds = Sequence[tuple[int, int]]
"""A box as JSON holds it."""


class Piece(NamedTuple):
    """A box of a tensor that one rank lays out."""

    name: str
    itemsize: int
    bounds: Bounds
    offset: int

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.itemsize

    @property
    def box(self) -> Box:
        return Box.of(*self.bounds)


class RankOffer(NamedTuple):
    """What one rank lays out, and where."""

    node: str
    path: str
    nbytes: int
    inode: int
    pieces: tuple[Piece, ...]

    @property
    def address(self) -> Address:
        return Address(self.path, self.nbytes, self.inode)


class Offer(NamedTuple):
    """What a trainer lays out for a match."""

    number: int
    """Of the match."""
    ranks: tuple[RankOffer, ...]
    cut: tuple[Mapping[str, Bounds], ...]
    """By rank and name the boxes that the rank holds of tensors that are not whole there."""
    store: Sequence[Any]
    """Host and port at which messages can be arranged."""

    @classmethod
    def of_note(cls, note: Any) -> Offer:
        number, ranks, cut, store = note
        told = [(*each[:4], tuple(Piece(*piece) for piece in each[4])) for each in ranks]
        return cls(number, tuple(RankOffer(*each) for each in told), tuple(cut), store)

    @property
    def pieces(self) -> Iterable[tuple[int, Piece]]:
        """Ranks and what they lay out."""
        return ((rank, piece) for rank, each in enumerate(self.ranks) for piece in each.pieces)

    def box_of(self, rank: int, piece: Piece) -> Box:
        """What ``rank`` holds of the tensor that ``piece`` is of, or more than the piece."""
        held = self.cut[rank].get(piece.name)
        return piece.box if held is None else Box.of(*held)


def bounds_of(box: Box) -> Bounds:
    return tuple((span.start, span.stop) for span in box.spans)


def share(
    boxes: Mapping[str, Box],
    itemsizes: Mapping[str, int],
    cut: Sequence[Mapping[str, Bounds]],
    shared: frozenset[str],
) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each rank: every box once, about as many bytes on each rank."""
    ends = [HEADER_NBYTES for _ in cut]
    pieces: list[list[Piece]] = [[] for _ in cut]
    for name in sorted(boxes, key=lambda name: (-boxes[name].numel * itemsizes[name], name)):
        holders: dict[Box, list[int]] = {}
        for rank, held in enumerate(cut):
            box = Box.of(*held[name]) if name in held else boxes[name]
            holders.setdefault(box, []).append(rank)
        for box, ranks in holders.items():
            is_shared = name.partition("/")[0] in shared
            for part in parts_of(box, len(ranks) if is_shared else 1, itemsizes[name]):
                rank = min(ranks, key=ends.__getitem__) if is_shared else 0
                piece = Piece(name, itemsizes[name], bounds_of(part), ends[rank])
                pieces[rank].append(piece)
                ends[rank] += -(-piece.nbytes // 64) * 64
    return tuple(map(tuple, pieces))


def parts_of(box: Box, most: int, itemsize: int) -> Iterator[Box]:
    """A box in up to ``most`` parts along its first dim; a small one as it is, an empty one not."""
    num = min(most, box.spans[0].size if box.spans else 1, -(-box.numel * itemsize // PART_NBYTES))
    if num <= 1:
        yield from [box] if box.numel else []
        return
    first = box.spans[0]
    for span in cut_evenly(first.size, num).spans:
        yield box.with_span(0, Span(first.start + span.start, first.start + span.stop))
