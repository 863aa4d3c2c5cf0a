"""Boxes that ranks of one node write straight into each other's GPU memory.

Every rank keeps a ring of slots for each other rank, which fills them; a kernel on the stream moves
a message into the next slot, or out of it, and tells the other side. The host waits for nothing.

A slot is filled again only after its reader has said that it is empty. Ranks cannot wait for each
other in a circle: all make the same exchanges in the same order, and before a rank takes part in
another one, its stream has emptied all slots but those of the latest ``NUM_SLOTS - 1`` messages.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyperslab.errors import ConfigError
from hyperslab.kernels import faces
from hyperslab.kernels.exchange import STATE_WORDS, Endpoint, Lane, Move, Run, Sum, Wait, run_tasks
from hyperslab.kernels.face_plans import box_tasks, plan_room
from hyperslab.layout import Assembly, Message
from hyperslab.torch_private import current_stream_key

NUM_SLOTS = 2
"""Of a ring: one is filled while another is emptied."""
MAX_SLOT_NBYTES = 1 << 24
"""Longer messages travel in parts."""
MAX_NBYTES = 1 << 28
"""Of all slots of a rank."""
_LINE = 128
"""Bytes between words that ranks tell each other."""
_PAGE = 4096
_GAVE_UP = 1 << 62
"""In place of a reason: this rank waits for no other any more."""
_MAX_PROGRAMS = 48
"""That may wait on a GPU, by each of two transports: together fewer than it has processors, or none
could go on."""

_SUMMED = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64
}  # fmt: skip

Shapes = tuple[tuple[int, ...], ...]


class _Envelope(NamedTuple):
    """To or from whom a message goes, and its tag."""

    peer: int
    tag: int


Envelopes = tuple[_Envelope, ...]


def _envelopes(messages: Sequence[Message], itemsize: int) -> Envelopes:
    return tuple([_Envelope(message.peer, message.tag + itemsize) for message in messages])


class SharedMemory(NamedTuple):
    """Memory of this rank that other ranks reach, and theirs."""

    own: Tensor
    """Bytes, all zero before any rank uses them."""
    addresses: Sequence[int]
    """Of every rank's memory, as this process sees it."""
    keeper: object = None
    """What must live as long."""

    def after(self, nbytes: int) -> SharedMemory:
        """All but the first ``nbytes``."""
        return SharedMemory(self.own[nbytes:], [a + nbytes for a in self.addresses], self.keeper)


def slot_nbytes_for(num_ranks: int) -> int:
    """The size of a slot that leaves all slots of a rank within ``MAX_NBYTES``."""
    share = MAX_NBYTES // (2 * NUM_SLOTS * max(1, num_ranks - 1))
    return max(_PAGE, min(MAX_SLOT_NBYTES, share) // _PAGE * _PAGE)


def shared_nbytes(num_ranks: int, slot_nbytes: int) -> int:
    """How much memory each rank shares: half of it for messages beside the others."""
    return 2 * _lanes_nbytes(num_ranks, slot_nbytes)


def _lanes_nbytes(num_ranks: int, slot_nbytes: int) -> int:
    return _words_nbytes(num_ranks) + (num_ranks - 1) * NUM_SLOTS * slot_nbytes


def _words_nbytes(num_ranks: int) -> int:
    return -(-2 * _LINE * num_ranks // _PAGE) * _PAGE


class _Round(NamedTuple):
    """One message, or part of one, to and from each peer."""

    put: Move | None
    wait: Wait | None
    take: Move | None


@dataclass(slots=True)
class Incoming:
    """What an exchange brings; ``wait`` gives it."""

    transport: DeviceTransport
    shapes: Shapes
    dtype: torch.dtype
    num_open: int = 0
    """Rounds that are still to be taken out of their slots."""
    room: list[Tensor] = field(default_factory=list)

    def wait(self) -> list[Tensor]:
        """The received boxes, for whatever is launched next; ``TimeoutError`` if a peer is late."""
        while self.num_open:
            self.transport.take_oldest()
        self.transport.check()
        return self.room

    def take(self, each: _Round, memory: Tensor) -> None:
        """Moves what a round brings out of its slots, once it is there."""
        if not self.room:
            self.room = faces.room_for(self.shapes, self.dtype, memory.device)
        assert each.wait is not None
        assert each.take is not None
        each.wait()
        each.take(_real(self.room[0]), memory)
        self.num_open -= 1


class DeviceTransport:
    """This rank's end of all lanes to and from the other ranks."""

    def __init__(
        self,
        memory: SharedMemory,
        rank: int,
        slot_nbytes: int,
        num_sharing: int = 1,
        *,
        is_beside: bool = False,
    ) -> None:
        """``num_sharing`` ranks share this rank's GPU."""
        device, num_ranks = memory.own.device, len(memory.addresses)
        self.memory, self.rank, self.slot_nbytes = memory, rank, slot_nbytes
        self.beside: DeviceTransport | None = None
        """Lanes of their own, for messages that keep no order with those of this transport."""
        if not is_beside:
            assert memory.own.numel() >= shared_nbytes(num_ranks, slot_nbytes)
            rest = memory.after(_lanes_nbytes(num_ranks, slot_nbytes))
            self.beside = type(self)(rest, rank, slot_nbytes, num_sharing, is_beside=True)
        words = STATE_WORDS + 2 * num_ranks
        self._endpoint = Endpoint(
            torch.zeros(words, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda"),
            NUM_SLOTS,
            slot_nbytes,
            max(1, _MAX_PROGRAMS // num_sharing),
            0,
        )
        self._report = self._endpoint.report.numpy()
        # Never forgotten: CUDA graphs hold the addresses of their tables.
        self._plans: dict[Any, list[_Round]] = {}
        self._sums: dict[Any, tuple[Move, Sum]] = {}
        self._open: deque[tuple[Incoming, _Round]] = deque()
        self._stream: torch.cuda.Stream | None = None
        self._stream_key: object = None
        self.is_silent = False
        """Whether nothing is sent for now; see ``silence``."""
        self._own_stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __repr__(self) -> str:
        return f"DeviceTransport(rank {self.rank} of {len(self.memory.addresses)})"

    def post_boxes(
        self,
        x: Tensor,
        boxes: Assembly,
        sends: Sequence[Message],
        receives: Sequence[Message],
        limit: int,
    ) -> Incoming:
        """Sends ``boxes[i]`` of ``x`` as ``sends[i]`` says, straight from ``x`` where it can.

        Who waits for another rank gives up after ``limit`` nanoseconds.
        """
        if not self._can_cut(x, boxes):
            return self.post_pieces(faces.pack(x, boxes), sends, receives, x.dtype, limit)
        size, strides, offset = x.itemsize, x.stride(), x.data_ptr() % 8 // x.itemsize
        leaving, coming = _envelopes(sends, size), _envelopes(receives, size)
        wants = tuple([message.box.shape for message in receives])
        endpoint = self._endpoint_within(limit)

        def put_rounds() -> list[Move]:
            starts = [self._start(self.rank, envelope.peer) // size for envelope in leaving]
            tasks = list(box_tasks(boxes, strides, starts))
            return [Move(tasks, size, offset, list(map(self._to, leaving)), endpoint, fills=True)]

        key = boxes, strides, offset, leaving, coming, wants, size, limit
        rounds = self._plan(key, put_rounds, coming, wants, size, endpoint)
        return self._post(rounds, x, wants, x.dtype)

    def post_pieces(
        self,
        pieces: Sequence[Tensor],
        sends: Sequence[Message],
        receives: Sequence[Message],
        dtype: torch.dtype,
        limit: int,
    ) -> Incoming:
        """Sends ``pieces[i]`` as ``sends[i]`` says; see ``post_boxes``."""
        shapes = tuple([tuple(piece.shape) for piece in pieces])
        wants = tuple([message.box.shape for message in receives])
        size, endpoint = dtype.itemsize, self._endpoint_within(limit)
        leaving, coming = _envelopes(sends, size), _envelopes(receives, size)

        def put_rounds() -> list[Move]:
            return self._moves(leaving, shapes, size, endpoint, fills=True)

        key = shapes, leaving, coming, wants, size, limit
        rounds = self._plan(key, put_rounds, coming, wants, size, endpoint)
        source = faces.in_one(pieces, dtype) if pieces else self.memory.own
        return self._post(rounds, source, wants, dtype)

    def can_sum(self, x: Tensor) -> bool:
        """Whether ``sum_`` takes tensors like ``x``."""
        return x.dtype in _SUMMED and x.nbytes <= self.slot_nbytes and x.is_contiguous()

    def sum_(
        self, x: Tensor, boxes: Assembly, messages: Sequence[Message], place: int, limit: int
    ) -> None:
        """Adds the ``x`` of other ranks to this rank's, in place: the same sum on all of them.

        ``messages`` send the whole of it to each of them, in the order of ranks, and bring theirs;
        ``place`` is this rank's among them. See ``post_boxes`` for the rest.
        """
        size, endpoint = x.itemsize, self._endpoint_within(limit)
        offset, envelopes = x.data_ptr() % 8 // size, _envelopes(messages, size)
        key = x.shape, x.dtype, offset, envelopes, place, limit
        found = self._sums.get(key)
        if found is None:
            peers = [envelope.peer for envelope in envelopes]
            starts = [self._start(self.rank, peer) // size for peer in peers]
            tasks = list(box_tasks(boxes, x.stride(), starts))
            put = Move(tasks, size, offset, list(map(self._to, envelopes)), endpoint, fills=True)
            own = [self._start(peer, self.rank) for peer in peers]
            lanes = list(map(self._from, envelopes))
            found = put, Sum(x.numel(), x.dtype, own, lanes, place, endpoint)
            self._sums[key] = found
        self.check()
        if self.is_silent:
            return
        while self._open:
            self.take_oldest()
        self._keep_order()
        put, add = found
        put(self.memory.own, x)
        add(x, self.memory.own)

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Within it nothing is sent, and zeros stand for what would be received.

        So that a rank can try out a pass by itself.
        """
        assert not self._open
        self.is_silent = True
        try:
            with nullcontext() if self.beside is None else self.beside.silence():
                yield
        finally:
            self.is_silent = False

    def follow(self) -> None:
        """Has the current stream go on after all exchanges so far; raises as ``check`` does.

        To be called before exchanges that a CUDA graph makes, of which the host sees nothing.
        """
        self.check()
        self._keep_order()
        if self.beside is not None:
            self.beside.follow()

    def check(self) -> None:
        """Raises ``TimeoutError`` if a kernel has waited for another rank in vain."""
        if reason := int(self._report[0]):
            if reason == _GAVE_UP:
                raise TimeoutError("this rank has given up")
            peer, comes = divmod(abs(reason) - 1, 2)
            what = "sent nothing in time" if comes else "did not take in time what it was sent"
            if reason < 0:
                what = "sent something else than was awaited"
            raise TimeoutError(f"rank {peer} {what}")

    def give_up(self) -> None:
        """Has kernels that wait for other ranks, and those to come, wait no longer.

        For a rank that knows that others are gone: it could not even end before its kernels do.
        """
        if self._report[0] == 0:
            self._report[0] = _GAVE_UP
            with suppress(RuntimeError), torch.cuda.stream(self._own_stream):  # or the GPU failed
                self._endpoint.state[:1].fill_(_GAVE_UP)
        if self.beside is not None:
            self.beside.give_up()

    def take_oldest(self) -> None:
        """Moves the oldest messages that are still in their slots out of them."""
        self._keep_order()
        incoming, each = self._open.popleft()
        incoming.take(each, self.memory.own)

    def _post(
        self, rounds: list[_Round], source: Tensor, wants: Shapes, dtype: torch.dtype
    ) -> Incoming:
        self.check()
        if source.device != self.memory.own.device:
            raise ConfigError(
                f"a tensor on {source.device} cannot be sent between ranks whose device is "
                f"{self.memory.own.device}: move it there first"
            )
        self._keep_order()
        incoming = Incoming(self, wants, dtype)
        if self.is_silent:
            if wants:
                incoming.room = faces.zeros_for(wants, dtype, self.memory.own.device)
            return incoming
        for each in rounds:
            while len(self._open) >= NUM_SLOTS:
                self.take_oldest()
            if each.put is not None:
                each.put(self.memory.own, _real(source))
            if each.take is not None:
                self._open.append((incoming, each))
                incoming.num_open += 1
        return incoming

    def _keep_order(self) -> None:
        """Kernels run in the order of their launches, whatever stream is the current one."""
        device = self.memory.own.device
        if device.type != "cuda":
            return
        key = current_stream_key(device)
        if key != self._stream_key:
            stream = torch.cuda.current_stream(device)
            if self._stream is not None and not torch.cuda.is_current_stream_capturing():
                stream.wait_stream(self._stream)
            self._stream, self._stream_key = stream, key

    def _endpoint_within(self, limit: int) -> Endpoint:
        return self._endpoint._replace(limit=limit)

    def _can_cut(self, x: Tensor, boxes: Assembly) -> bool:
        longest = max((math.prod(shape) for shape in boxes.shapes), default=0)
        return (
            boxes.is_full
            and longest * x.itemsize <= self.slot_nbytes
            and x.itemsize <= 8
            and type(x) is Tensor
            and not x.is_conj()
            and not x.is_neg()
        )

    def _plan(
        self,
        key: object,
        put_rounds: Callable[[], list[Move]],
        coming: Envelopes,
        wants: Shapes,
        size: int,
        endpoint: Endpoint,
    ) -> list[_Round]:
        found = self._plans.get(key)
        if found is None:
            takes = self._moves(coming, wants, size, endpoint, fills=False)
            waits = [
                Wait([self._from(coming[i]) for i, _ in members], endpoint, fills=False)
                for members in self._parts(wants, size)
            ]
            arrivals = zip(waits, takes, strict=True)
            found = self._plans[key] = [
                _Round(put, *(arrival or (None, None)))
                for put, arrival in zip_longest(put_rounds(), arrivals)
            ]
        return found

    def _moves(
        self, envelopes: Envelopes, shapes: Shapes, size: int, endpoint: Endpoint, *, fills: bool
    ) -> list[Move]:
        """Between slots and a buffer of contiguous tensors, part after part."""
        found = []
        starts = [part.start * size for part in plan_room(shapes, size).parts]
        for number, members in enumerate(self._parts(shapes, size)):
            lanes, runs = [], []
            for i, nbytes in members:
                envelope, local = envelopes[i], starts[i] + number * self.slot_nbytes
                if fills:
                    lanes.append(self._to(envelope))
                    runs.append(Run(self._start(self.rank, envelope.peer), local, nbytes))
                else:
                    lanes.append(self._from(envelope))
                    runs.append(Run(local, self._start(envelope.peer, self.rank), nbytes))
            found.append(Move(run_tasks(runs), 1, 0, lanes, endpoint, fills=fills))
        return found

    def _parts(self, shapes: Shapes, size: int) -> list[list[tuple[int, int]]]:
        """For each round, the messages that have a part left, and its bytes."""
        left = {i: math.prod(shape) * size for i, shape in enumerate(shapes)}
        found = []
        while left:
            found.append([(i, min(nbytes, self.slot_nbytes)) for i, nbytes in left.items()])
            left = {i: n - self.slot_nbytes for i, n in left.items() if n > self.slot_nbytes}
        return found

    def _to(self, envelope: _Envelope) -> Lane:
        """This rank's end of the lane to a peer."""
        addresses, peer = self.memory.addresses, envelope.peer
        emptied = addresses[self.rank] + (2 * peer + 1) * _LINE
        filled = addresses[peer] + 2 * self.rank * _LINE
        return Lane(emptied, filled, STATE_WORDS + 2 * peer, 2 * peer + 1, envelope.tag)

    def _from(self, envelope: _Envelope) -> Lane:
        """This rank's end of the lane from a peer."""
        addresses, peer = self.memory.addresses, envelope.peer
        filled = addresses[self.rank] + 2 * peer * _LINE
        emptied = addresses[peer] + (2 * self.rank + 1) * _LINE
        return Lane(filled, emptied, STATE_WORDS + 2 * peer + 1, 2 * peer + 2, envelope.tag)

    def _start(self, source: int, target: int) -> int:
        """Where the slots for ``source`` in the memory of ``target`` begin, from our own on."""
        addresses = self.memory.addresses
        place = source - (source > target)
        within = _words_nbytes(len(addresses)) + place * NUM_SLOTS * self.slot_nbytes
        return addresses[target] - addresses[self.rank] + within


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x
