"""Boxes on their way between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hyperslab.comm.failure import lost_contact
from hyperslab.comm.graph import Kind, as_operator, is_watched
from hyperslab.comm.mesh import Mesh
from hyperslab.kernels import faces
from hyperslab.layout import Message

_HOST = torch.device("cpu")


@dataclass(slots=True)
class Pending:
    """Messages that have been posted; ``wait`` gives what was received."""

    works: list[dist.Work]
    sent: list[Tensor]  # alive until they have left
    received: list[Tensor]
    mesh: Mesh
    doing: str

    def wait(self) -> list[Tensor]:
        """The received boxes, in the order of the messages, on the mesh's device."""
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise lost_contact(self.doing, self.mesh, error) from error
        if self.mesh.stages_through_host:
            return faces.to_device(self.received, self.mesh.device, wait=False)
        return self.received


def post_messages(
    pieces: Sequence[Tensor],
    sends: Sequence[Message],
    receives: Sequence[Message],
    dtype: torch.dtype,
    mesh: Mesh,
    doing: str,
) -> Pending:
    """Sends ``pieces[i]`` as ``sends[i]`` says and asks for ``receives``, without waiting.

    ``doing`` says what the messages are for, should a peer be lost. A small halo costs about as
    much time here as on its way, so little is done.
    """
    if not sends and not receives:
        return Pending([], [], [], mesh, doing)
    if is_watched():
        kinds = [Kind(message.box.shape, dtype, mesh.device) for message in receives]
        received = as_operator(
            lambda boxes: post_messages(boxes, sends, receives, dtype, mesh, doing).wait(),
            pieces,
            kinds,
        )
        return Pending([], [], received, mesh, doing)
    place = mesh.device
    if mesh.stages_through_host:
        pieces, place = faces.to_device(pieces, _HOST, wait=True), _HOST
    sent = [piece.contiguous() for piece in pieces]
    received = _room_for(receives, dtype, place, mesh)
    try:
        if place.type == "cuda":
            works = _post_together(sent, sends, received, receives, mesh)
        else:
            # A message of another size than is awaited would end the process.
            post, ask, size = mesh.group.send, mesh.group.recv, dtype.itemsize
            works = [post([box], m.peer, m.tag + size) for box, m in zip(sent, sends, strict=True)]
            works += [
                ask([box], m.peer, m.tag + size) for box, m in zip(received, receives, strict=True)
            ]
    except RuntimeError as error:
        raise lost_contact(doing, mesh, error) from error
    return Pending(works, sent, received, mesh, doing)


def _room_for(
    receives: Sequence[Message], dtype: torch.dtype, place: torch.device, mesh: Mesh
) -> list[Tensor]:
    if mesh.device.type == "cuda":  # where they are moved together
        return faces.room_for([m.box.shape for m in receives], dtype, place)
    return [torch.empty(m.box.shape, dtype=dtype, device=place) for m in receives]


def _post_together(
    sent: Sequence[Tensor],
    sends: Sequence[Message],
    received: Sequence[Tensor],
    receives: Sequence[Message],
    mesh: Mesh,
) -> list[dist.Work]:
    """All in one NCCL call: one after the other, they could wait for each other in a circle."""
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


def _raw(x: Tensor) -> Tensor:
    """``x`` as bytes: NCCL does not know every dtype."""
    return x.view(-1).view(torch.uint8)


def plain_memory(x: Tensor) -> Tensor:
    """``x`` with memory that says it all, so that it can travel.

    A conjugate or negative view has a bit beside it, and torch's stand-in for zero gradients (of
    ``sgn``) has no memory.
    """
    if x._is_zerotensor():
        return x.clone()
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x
