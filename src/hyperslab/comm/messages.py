"""Boxes on their way between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hyperslab.comm.failure import lost_contact
from hyperslab.comm.mesh import Mesh
from hyperslab.layout import Message

Addressed = Sequence[tuple[Tensor, int]]

_HOST = torch.device("cpu")


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
    place = _HOST if mesh.stages_through_host else mesh.device
    sent = [_dense(piece.detach().to(place)) for piece in pieces]
    received = [torch.empty(m.box.shape, dtype=dtype, device=place) for m in receives]
    going = [(_raw(box), m.peer) for box, m in zip(sent, sends, strict=True)]
    coming = [(_raw(box), m.peer) for box, m in zip(received, receives, strict=True)]
    post = _post_together if place.type == "cuda" else _post_each
    try:
        works = post(going, coming, mesh.group)
    except RuntimeError as error:
        raise lost_contact(doing, mesh, error) from error
    return Pending(works, sent, received, mesh, doing)


def _post_each(going: Addressed, coming: Addressed, group: ProcessGroup) -> list[dist.Work]:
    works = [group.send([box], peer, 0) for box, peer in going]
    return works + [group.recv([box], peer, 0) for box, peer in coming]


def _post_together(going: Addressed, coming: Addressed, group: ProcessGroup) -> list[dist.Work]:
    """All in one NCCL call: one after the other, they could wait for each other in a circle."""
    ops = [dist.P2POp(dist.isend, box, group=group, group_peer=peer) for box, peer in going]
    ops += [dist.P2POp(dist.irecv, box, group=group, group_peer=peer) for box, peer in coming]
    return dist.batch_isend_irecv(ops)


def _dense(x: Tensor) -> Tensor:
    """``x`` in one run of memory that says it all.

    A conjugate or negative view has a bit beside it, and torch's stand-in for zero gradients (of
    ``sgn``) has no memory.
    """
    x = x.clone() if x._is_zerotensor() else x
    return x.resolve_conj().resolve_neg().contiguous()


def _raw(x: Tensor) -> Tensor:
    """``x`` as bytes: gloo does not know every dtype."""
    return x.view(-1).view(torch.uint8)
