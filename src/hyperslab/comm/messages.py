"""Boxes on their way between ranks: by NCCL, by gloo, by sockets, or on the GPU itself.

By gloo they go through host memory. Sockets carry small ones between CPUs of one node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hyperslab.comm.device_transport import DeviceTransport, Incoming
from hyperslab.comm.failure_report import contact, lost_contact
from hyperslab.comm.graph import TensorSpec, as_operator
from hyperslab.comm.local_sockets import Receive, Send
from hyperslab.comm.mesh import Mesh
from hyperslab.comm.message_spans import recorded
from hyperslab.kernels import faces
from hyperslab.layout import Message
from hyperslab.torch_private import is_traced
from hyperslab.trace import Category

Result = TypeVar("Result")

_HOST = torch.device("cpu")
Work = dist.Work | Receive | Send


@dataclass(frozen=True, slots=True)
class Staging:
    """Boxes between a GPU and the host, whence they are sent and where they arrive.

    Copies run on a stream of their own, beside what is launched on the current stream between
    ``begin`` and ``arrived``. Streams wait for each other by events; the host waits in ``outgoing``
    alone, for what is to be sent, and not for what was launched since.

    Boxes on the GPU are of the current stream's memory, made before the copies' stream waits for
    it: whoever had that memory has then left it, and who gets it next comes after the copies, for
    which the current stream waits.
    """

    pieces: Sequence[Tensor]  # alive until they are copied
    room: list[Tensor]
    """On the GPU, for what comes."""
    leaving: list[Tensor]
    incoming: list[Tensor]
    """On the host, to be received into."""
    left: torch.cuda.Event

    @classmethod
    def begin(
        cls,
        pieces: Sequence[Tensor],
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """Begins to copy ``pieces`` to the host; boxes of ``shapes`` will come from it."""
        room = faces.room_for(shapes, dtype, device)
        incoming = faces.room_for(shapes, dtype, _HOST, pinned=True)
        leaving = faces.room_for([p.shape for p in pieces], dtype, _HOST, pinned=True)
        stream = _copy_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            faces.copy_(leaving, pieces)
        return cls(pieces, room, leaving, incoming, stream.record_event())

    def outgoing(self) -> list[Tensor]:
        """The pieces on the host, once they are there."""
        self.left.synchronize()
        return self.leaving

    def arrived(self) -> list[Tensor]:
        """What was received, on the GPU for whatever is launched next."""
        device = self.room[0].device if self.room else None
        if device is None:
            return []
        stream = _copy_stream(device)
        with torch.cuda.stream(stream):
            faces.copy_(self.room, self.incoming)
        torch.cuda.current_stream(device).wait_stream(stream)
        return self.room


@lru_cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@dataclass(slots=True)
class Pending:
    """Messages that have been posted; ``wait`` gives what was received."""

    works: list[Work]
    sent: list[Tensor]  # alive until they have left
    received: list[Tensor]
    mesh: Mesh
    doing: str
    staging: Staging | None = None
    send: Callable[[], list[Work]] | None = None
    """Sends what has not been sent yet, because it is still on its way to the host."""

    def wait(self) -> list[Tensor]:
        """The received boxes, in the order of the messages, on the mesh's device.

        On a GPU the host does not wait for NCCL: what is launched next does.
        """
        try:
            if self.send is not None:
                self.works += self.send()
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise lost_contact(self.doing, self.mesh, error) from error
        return self.received if self.staging is None else self.staging.arrived()


@dataclass(frozen=True, slots=True)
class PendingOnDevice:
    """Messages that ranks write into each other's GPU memory: as ``Pending``."""

    incoming: Incoming
    mesh: Mesh
    doing: str

    def wait(self) -> list[Tensor]:
        """The received boxes, for whatever is launched next."""
        try:
            return self.incoming.wait()
        except TimeoutError as error:
            raise lost_contact(self.doing, self.mesh, error) from error


Posted = Pending | PendingOnDevice


class Traffic:
    """What is sent while somebody counts."""

    def __init__(self) -> None:
        self.is_counted = False
        self.nbytes = 0

    def add_boxes(self, messages: Sequence[Message], itemsize: int) -> None:
        self.nbytes += sum(message.box.numel for message in messages) * itemsize

    def add_sum(self, nbytes: int, num_ranks: int) -> None:
        """That of a sum over ranks, each of which sums a part and sends it to all."""
        self.nbytes += 2 * nbytes * (num_ranks - 1) // num_ranks


traffic = Traffic()


@contextmanager
def counted_traffic() -> Iterator[Traffic]:
    """Within it ``nbytes`` grows with what is sent."""
    traffic.is_counted, traffic.nbytes = True, 0
    try:
        yield traffic
    finally:
        traffic.is_counted = False


def post_messages(
    pieces: Sequence[Tensor],
    sends: Sequence[Message],
    receives: Sequence[Message],
    dtype: torch.dtype,
    mesh: Mesh,
    doing: str,
) -> Posted:
    """Sends ``pieces[i]`` as ``sends[i]`` says and asks for ``receives``, without waiting.

    ``doing`` says what the messages are for, should a peer be lost. A small halo costs about as
    much time here as on its way, so little is done.
    """
    if traffic.is_counted:
        traffic.add_boxes(sends, dtype.itemsize)
    if not sends and not receives:
        return Pending([], [], [], mesh, doing)
    if is_traced():
        specs = [TensorSpec(message.box.shape, dtype, mesh.device) for message in receives]
        nbytes = sum(message.box.numel for message in receives) * dtype.itemsize

        def run(boxes: list[Tensor]) -> list[Tensor]:
            def post() -> Posted:
                return post_messages(boxes, sends, receives, dtype, mesh, doing)

            return recorded(post, Category.halo, "boxes", nbytes, mesh.device).wait()

        received = as_operator(run, pieces, specs)
        return Pending([], [], received, mesh, doing)
    if mesh.transport is not None:
        return post_on_device(
            lambda transport, limit: transport.post_pieces(pieces, sends, receives, dtype, limit),
            mesh,
            doing,
        )
    if mesh.stages_through_host:
        return _post_staged(pieces, sends, receives, dtype, mesh, doing)
    sent = [piece.contiguous() for piece in pieces]
    shapes = [message.box.shape for message in receives]
    try:
        if mesh.device.type == "cuda":
            received = faces.room_for(shapes, dtype, mesh.device)
            works: list[Work] = [*_post_together(sent, sends, received, receives, mesh)]
        else:
            received = [torch.empty(shape, dtype=dtype) for shape in shapes]
            works = _send(sent, sends, mesh) + _receive(received, receives, mesh)
    except RuntimeError as error:
        raise lost_contact(doing, mesh, error) from error
    return Pending(works, sent, received, mesh, doing)


def post_on_device(
    post: Callable[[DeviceTransport, int], Incoming],
    mesh: Mesh,
    doing: str,
    *,
    beside: bool = False,
) -> PendingOnDevice:
    """What ``post`` brings, which posts messages; see ``run_on_device``."""
    return PendingOnDevice(run_on_device(post, mesh, doing, beside=beside), mesh, doing)


def run_on_device(
    run: Callable[[DeviceTransport, int], Result], mesh: Mesh, doing: str, *, beside: bool = False
) -> Result:
    """What ``run(transport, limit)`` returns; its kernels wait ``limit`` nanoseconds for others.

    Messages ``beside`` keep no order with others.
    """
    transport = mesh.transport
    if beside and transport is not None:
        transport = transport.beside
    assert transport is not None
    try:
        return run(transport, int(mesh.timeout.total_seconds() * 1e9))
    except TimeoutError as error:
        raise lost_contact(doing, mesh, error) from error


def without_messages(mesh: Mesh) -> AbstractContextManager[None]:
    """Within it, exchanges on the device bring zeros and send nothing, and others raise.

    So that a rank can try out a pass by itself, whatever the others do.
    """
    return nullcontext() if mesh.transport is None else mesh.transport.silence()


def follow_exchanges(mesh: Mesh) -> None:
    """Has the current stream go on after all exchanges on the device so far.

    To be called before a CUDA graph is replayed that exchanges. Raises if an exchange has failed.
    """
    if mesh.transport is not None:
        run_on_device(lambda transport, _: transport.follow(), mesh, "replaying a recorded pass")


def _post_staged(
    pieces: Sequence[Tensor],
    sends: Sequence[Message],
    receives: Sequence[Message],
    dtype: torch.dtype,
    mesh: Mesh,
    doing: str,
) -> Pending:
    """Through host memory. What can leave only from there does so when it is waited for."""
    shapes = [message.box.shape for message in receives]
    staging = Staging.begin(pieces, shapes, dtype, mesh.device)
    with contact(doing, mesh):
        works = _receive(staging.incoming, receives, mesh)
    return Pending(
        works,
        [],
        [],
        mesh,
        doing,
        staging,
        lambda: _send(staging.outgoing(), sends, mesh),
    )


def _send(boxes: Sequence[Tensor], messages: Sequence[Message], mesh: Mesh) -> list[Work]:
    works: list[Work] = []
    for box, message in zip(boxes, messages, strict=True):
        # A message of another size than is awaited would end the process.
        peer, tag = message.peer, message.tag + box.itemsize
        if mesh.sockets is not None and mesh.sockets.carries(peer, box):
            send = mesh.sockets.send(peer, tag, box, mesh.timeout.total_seconds())
            works += [send] if send else []
        else:
            works.append(mesh.group.send([box], peer, tag))
    return works


def _receive(boxes: Sequence[Tensor], messages: Sequence[Message], mesh: Mesh) -> list[Work]:
    works: list[Work] = []
    for box, message in zip(boxes, messages, strict=True):
        peer, tag = message.peer, message.tag + box.itemsize
        if mesh.sockets is not None and mesh.sockets.carries(peer, box):
            works.append(mesh.sockets.receive(peer, tag, box, mesh.timeout.total_seconds()))
        else:
            works.append(mesh.group.recv([box], peer, tag))
    return works


def _post_together(
    sent: Sequence[Tensor],
    sends: Sequence[Message],
    received: Sequence[Tensor],
    receives: Sequence[Message],
    mesh: Mesh,
) -> list[dist.Work]:
    """All in one NCCL call: one after the other, they could wait for each other in a circle.

    NCCL runs it on a stream of its own, after what was launched before.
    """
    group = mesh.group
    ops = [
        dist.P2POp(dist.isend, _raw(box), group=group, group_peer=message.peer)
        for box, message in zip(sent, sends, strict=True)
    ]
    ops += [
        dist.P2POp(dist.irecv, _raw(box), group=group, group_peer=message.peer)
        for box, message in zip(received, receives, strict=True)
    ]
    return dist.batch_isend_irecv(ops)


_KNOWN_TO_NCCL = {torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64}


def _raw(x: Tensor) -> Tensor:
    """``x``, as bytes where its dtype may not be known to NCCL."""
    return x if x.dtype in _KNOWN_TO_NCCL else x.view(-1).view(torch.uint8)


def plain_memory(x: Tensor) -> Tensor:
    """``x``, copied where its memory alone does not hold its values, so that it can be sent.

    A conjugate or negative view has a bit beside it, and torch's stand-in for zero gradients (of
    ``sgn``) has no memory.
    """
    if x._is_zerotensor():
        return x.clone()
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x
