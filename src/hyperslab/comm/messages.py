"""Boxes on their way between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hyperslab.comm.failure import lost_contact
from hyperslab.comm.mesh import Mesh
from hyperslab.layout import Message


@dataclass(frozen=True, slots=True)
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
            return [box.to(self.mesh.device, non_blocking=True) for box in self.received]
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

    ``doing`` says what the messages are for, should a peer be lost.
    """
    if not sends and not receives:
        return Pending([], [], [], mesh, doing)
    place = torch.device("cpu") if mesh.stages_through_host else mesh.device
    sent = [piece.detach().to(place).contiguous() for piece in pieces]
    received = [torch.empty(m.box.shape, dtype=dtype, device=place) for m in receives]
    group = mesh.group
    try:
        if place.type == "cuda":
            ops = [dist.P2POp(dist.isend, _raw(x), group=group, group_peer=m.peer) for x, m in zip(sent, sends)]
            ops += [dist.P2POp(dist.irecv, _raw(x), group=group, group_peer=m.peer) for x, m in zip(received, receives)]
            works = dist.batch_isend_irecv(ops)
        else:
            works = [group.send([_raw(x)], m.peer, 0) for x, m in zip(sent, sends, strict=True)]
            works += [group.recv([_raw(x)], m.peer, 0) for x, m in zip(received, receives, strict=True)]
    except RuntimeError as error:
        raise lost_contact(doing, mesh, error) from error
    return Pending(works, sent, received, mesh, doing)


def _raw(x: Tensor) -> Tensor:
    """``x`` as bytes: gloo does not know every dtype."""
    return x.view(-1).view(torch.uint8)
