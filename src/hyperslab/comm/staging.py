"""Boxes between a GPU and the host, whence they are sent and where they arrive.

Copies run on a stream of their own, beside what is launched on the current stream between ``begin``
and ``arrived``. Streams wait for each other by events; the host waits in ``outgoing`` alone, for
what is to be sent, and not for what was launched since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor

from hyperslab.kernels import faces

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Staging:
    """What leaves a GPU and what comes to it, on the host and on the GPU.

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
