"""Models on their way between trainers, in memory.

Each trainer lays a copy of its tensors out, every box once, whichever of its ranks hold it. On one
node that is memory which the others read at the speed of memory; between nodes messages of ``comm``
carry the boxes. Meshes may differ: a rank takes the parts of the boxes that its own consist of.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from hyperslab.comm.mesh import Mesh
from hyperslab.comm.messages import post_messages
from hyperslab.comm.side_channel import SideChannel, do_together
from hyperslab.comm.worlds import open_store, pair_mesh
from hyperslab.errors import CommError
from hyperslab.layout import Box, Message, Span
from hyperslab.store.segment import Address, Segment, map_segment, node_name
from hyperslab.train.checkpoint_tensors import local_piece
from hyperslab.train.tournament.offer import (
    HEADER_NBYTES,
    Bounds,
    Offer,
    Piece,
    RankOffer,
    bounds_of,
    share,
)

_EMPTY = -1
LOOK_SECONDS = (0.00005, 0.005)
"""From one look whether a rank has copied to the next: at first, and at most."""


class GoneError(CommError):
    """The other trainer has died, or has gone on; the text goes behind its name."""


@dataclass(frozen=True)
class _Layout:
    """Who lays out what, for tensors of given names, shapes and dtypes."""

    signature: tuple[object, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    """By rank."""
    cut: tuple[Mapping[str, Bounds], ...]

    def nbytes(self, rank: int) -> int:
        last = self.pieces[rank][-1:]
        return max((each.offset + each.nbytes for each in last), default=HEADER_NBYTES)


class Mailbox:
    """What this rank lays out for other trainers, and reads of theirs.

    All methods are collective over the ranks of the trainer.
    """

    def __init__(self, mesh: Mesh, channel: SideChannel, timeout: timedelta) -> None:
        """``timeout``: so long it waits until another trainer has copied what it offers."""
        self._mesh, self._channel, self._patience = mesh, channel, timeout
        self._nodes = channel.tell_all(node_name())
        """Of the trainer's ranks."""
        self._layout: _Layout | None = None
        self._told: tuple[_Layout, list[tuple[RankOffer, Sequence[Any]]]] | None = None
        """What the ranks have told each other of a layout."""
        self._segment: Segment | None = None
        self._mapped: dict[Address, NDArray[np.uint8]] = {}
        self._timeout = mesh.timeout
        self._store = open_store(mesh.timeout) if mesh.rank == 0 else None

    def offer(self, number: int, tensors: Mapping[str, Tensor], shared: Iterable[str]) -> Offer:
        """Where ``fill`` will copy ``tensors`` for the match of that ``number``.

        Those whose names do not begin with one of ``shared`` may differ between ranks, and are
        rank 0's.
        """
        layout = self._find_layout(tensors, frozenset(shared))
        mine = layout.pieces[self._mesh.rank]
        room = self._room(layout.nbytes(self._mesh.rank))
        if self._told is None or self._told[0] is not layout:
            room[:8].view(np.int64)[0] = _EMPTY
            assert self._segment is not None
            at = self._segment.address
            offer = RankOffer(self._nodes[self._mesh.rank], at.path, at.nbytes, at.inode, mine)
            store = self._store[1] if self._store else ()
            self._told = layout, self._channel.tell_all((offer, store))
        told = self._told[1]
        return Offer(number, tuple(each for each, _ in told), layout.cut, told[0][1])

    def fill(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Copies this rank's pieces of ``tensors``; who reads them sees when they are there.

        Collective over nobody.
        """
        assert self._layout is not None
        assert self._segment is not None
        header = self._segment.bytes[:8].view(np.int64)
        header[0] = _EMPTY
        for piece in self._layout.pieces[self._mesh.rank]:
            raw, held = _raw_piece(tensors[piece.name], "cpu")
            source = _part(raw.numpy(), piece.box, held)
            np.copyto(_view(self._segment.bytes, piece), source)
        header[0] = number

    def read(self, theirs: Offer, tensors: Mapping[str, Tensor]) -> None:
        """Fills ``tensors`` with what another trainer of this node has laid out.

        Raises ``GoneError`` on all ranks if it is gone, or has gone on.
        """
        do_together(lambda: self._read(theirs, tensors), self._channel)

    def can_read(self, theirs: Offer) -> bool:
        """Whether all ranks of both trainers are on one node."""
        return len({each.node for each in theirs.ranks} | {*self._nodes}) == 1

    def _read(self, theirs: Offer, tensors: Mapping[str, Tensor]) -> None:
        wanted = {name: _raw_piece(tensor, "cpu") for name, tensor in tensors.items()}
        left = {name: box.numel for name, (_, box) in wanted.items()}
        for offer in theirs.ranks:
            room = self._look_into(offer)
            self._await_filled(room, offer, theirs.number)
            for piece in offer.pieces:
                if piece.name not in wanted:
                    continue
                raw, box = wanted[piece.name]
                if part := piece.box & box:
                    source = _part(_view(room, piece), part, piece.box)
                    np.copyto(_part(raw.numpy(), part, box), source)
                    left[piece.name] -= part.numel
            _check(int(room[:8].view(np.int64)[0]), theirs.number)
        _check_complete(left)
        _to_devices(tensors, wanted)

    def _await_filled(self, room: NDArray[np.uint8], offer: RankOffer, number: int) -> None:
        """Returns when a rank has copied all for a match."""
        header, until = room[:8].view(np.int64), time.monotonic() + self._patience.total_seconds()
        pause, most = LOOK_SECONDS
        while (found := int(header[0])) < number:
            if not Path(offer.path).exists():
                raise GoneError("is gone")
            if time.monotonic() > until:
                raise GoneError(f"did not copy its model for match {number} in time")
            time.sleep(pause)
            pause = min(most, 1.2 * pause)
        _check(found, number)

    def _look_into(self, offer: RankOffer) -> NDArray[np.uint8]:
        if offer.address not in self._mapped:
            try:
                self._mapped[offer.address] = map_segment(offer.address)
            except OSError as error:
                raise GoneError(f"is gone ({error.strerror})") from error
        return self._mapped[offer.address]

    # Between nodes

    def swap(
        self, name: str, mine: Offer, theirs: Offer, tensors: Mapping[str, Tensor], *, first: bool
    ) -> None:
        """As ``read``, by messages; what is laid out here goes to the other trainer.

        One of the two is the ``first``, and both know their meeting by ``name``. Who brings no
        ``tensors`` only gives.

        Collective over the ranks of both trainers.
        """
        do_together(lambda: self._swap(name, mine, theirs, tensors, first), self._channel)

    def _swap(
        self, name: str, mine: Offer, theirs: Offer, tensors: Mapping[str, Tensor], first: bool
    ) -> None:
        try:
            self._send_and_receive(name, mine, theirs, tensors, first)
        except CommError as error:
            raise GoneError(f"cannot be reached ({error})") from error

    def _send_and_receive(
        self, name: str, mine: Offer, theirs: Offer, tensors: Mapping[str, Tensor], first: bool
    ) -> None:
        num_mine, num_theirs = len(mine.ranks), len(theirs.ranks)
        begin, there = (0, num_mine) if first else (num_theirs, 0)
        store = mine.store if first else theirs.store
        rank = begin + self._mesh.rank
        mesh = pair_mesh(store, name, rank, num_mine + num_theirs, self._timeout)
        wanted = {key: _raw_piece(tensor, "cpu") for key, tensor in tensors.items()}
        left = {key: box.numel for key, (_, box) in wanted.items()}
        sends, receives = self._sends(mine, theirs, there), _receives(theirs, wanted, there)
        posted = []
        for key in sorted({*sends, *receives}):
            messages, pieces = _unzip(sends.get(key, []))
            awaited, places = _unzip(receives.get(key, []))
            dtype = (pieces or places)[0].dtype
            pending = post_messages(pieces, messages, awaited, dtype, mesh, "exchanging models")
            posted.append((key, places, pending))
        for key, places, pending in posted:
            for place, found in zip(places, pending.wait(), strict=True):
                place.copy_(found)
                left[key] -= place.numel()
        _check_complete(left)
        _to_devices(tensors, wanted)

    def _sends(self, mine: Offer, theirs: Offer, there: int) -> _Messages:
        """What the other trainer's ranks hold of the boxes that this rank has laid out."""
        assert self._segment is not None
        found: _Messages = {}
        for piece in mine.ranks[self._mesh.rank].pieces:
            laid_out = torch.from_numpy(_view(self._segment.bytes, piece))
            for rank in range(len(theirs.ranks)):
                if part := piece.box & theirs.box_of(rank, piece):
                    message = _message(there + rank, piece, part)
                    part_of = laid_out[part.slices_in(piece.box)]
                    found.setdefault(piece.name, []).append((message, part_of))
        return found

    # What is laid out where

    def _find_layout(self, tensors: Mapping[str, Tensor], shared: frozenset[str]) -> _Layout:
        signature = tuple((name, x.shape, x.dtype) for name, x in tensors.items())
        if self._layout is None or self._layout.signature != signature:
            boxes = {name: _raw_piece(x)[1] for name, x in tensors.items()}
            cut = {
                name: bounds_of(boxes[name])
                for name, x in tensors.items()
                if isinstance(x, DTensor)
            }
            told = tuple(self._channel.tell_all(cut))
            itemsizes = {name: _raw_dtype(x).itemsize for name, x in tensors.items()}
            pieces = share(boxes, itemsizes, told, shared)
            self._layout = _Layout(signature, pieces, told)
        return self._layout

    def _room(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory of this rank for so many bytes, the same from match to match."""
        if self._segment is None or len(self._segment.bytes) < nbytes:
            self.close()
            self._segment = Segment(nbytes)
            self._segment.reserve(0, nbytes)
        return self._segment.bytes

    def close(self) -> None:
        """Lets go of what is laid out here; who maps it keeps it."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None


_Messages = dict[str, list[tuple[Message, Tensor]]]
"""Messages by the tensor that they are of, and the memory that they come from or go to."""


def _receives(theirs: Offer, wanted: Mapping[str, tuple[Tensor, Box]], there: int) -> _Messages:
    found: _Messages = {}
    for rank, piece in theirs.pieces:
        if piece.name in wanted:
            raw, box = wanted[piece.name]
            if part := piece.box & box:
                message = _message(there + rank, piece, part)
                found.setdefault(piece.name, []).append((message, raw[part.slices_in(box)]))
    return found


def _unzip(pairs: Sequence[tuple[Message, Tensor]]) -> tuple[list[Message], list[Tensor]]:
    return [message for message, _ in pairs], [tensor for _, tensor in pairs]


def _message(peer: int, piece: Piece, part: Box) -> Message:
    tag = crc32(f"{piece.name} {part.spans!r}".encode()) >> 8
    return Message(peer, part, part.slices_in(piece.box), tag)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of a number: what travels, whatever the dtype."""


def _raw_dtype(tensor: Tensor) -> torch.dtype:
    nbytes = tensor.element_size()
    return _INTEGERS[nbytes // 2 if tensor.is_complex() else nbytes]


def _raw_piece(tensor: Tensor, device: str | None = None) -> tuple[Tensor, Box]:
    """What this rank holds of a tensor, as integers, and its box; complex numbers have a dim more.

    On the tensor's own device it is its memory.
    """
    own, box = local_piece(tensor)
    own = own.detach().resolve_conj().resolve_neg()
    if device is not None and own.device.type != device:
        own = own.to(device)
    dtype = _raw_dtype(tensor)
    if own.is_complex():
        own, box = torch.view_as_real(own), Box((*box.spans, Span(0, 2)))
    return own.view(dtype), box


def _to_devices(tensors: Mapping[str, Tensor], raw: Mapping[str, tuple[Tensor, Box]]) -> None:
    """Copies what came to the CPU to the tensors that it is for, if they are elsewhere."""
    for name, tensor in tensors.items():
        own, _ = _raw_piece(tensor)
        if own.device != raw[name][0].device:
            own.copy_(raw[name][0])


def _view(room: NDArray[np.uint8], piece: Piece) -> NDArray[Any]:
    dtype = f"{'u' if piece.itemsize == 1 else 'i'}{piece.itemsize}"
    shape = piece.box.shape
    return room[piece.offset : piece.offset + piece.nbytes].view(dtype).reshape(shape)


def _part(array: NDArray[Any], part: Box, of: Box) -> NDArray[Any]:
    """A view, also where there are no dims."""
    where: Any = (*part.slices_in(of), ...)
    found: NDArray[Any] = array[where]
    return found


def _check(found: int, number: int) -> None:
    """Raises if what was laid out for a match is no longer there."""
    if found != number:
        raise GoneError(f"has gone on, from match {number} to {found}")


def _check_complete(left: Mapping[str, int]) -> None:
    if missing := [name for name, numel in left.items() if numel]:
        raise GoneError(
            f"has laid out no whole {missing[0]}: its model or optimizer is another one"
        )
