"""Boxes that one kernel moves into, or out of, memory that ranks share, and then tells them.

Planned once for shapes, strides and addresses, because calls are frequent; see gpu/exchange.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hyperslab.kernels import face_tasks
from hyperslab.kernels.face_tasks import BLOCK, Dim, Task, items_in_unit, task_tables
from hyperslab.kernels.fused import Launch

STATE_WORDS = 2
"""The first words of ``Endpoint.state``: why waiting failed, or 0; how many programs are done."""


class Lane(NamedTuple):
    """One end of a ring of slots that one rank fills and another one empties."""

    awaited: int
    """Address of the word in this rank's memory with the other end's count."""
    raised: int
    """Address of the word in the other rank's memory with this end's count."""
    counter: int
    """Number of the word of ``Endpoint.state`` with this end's count."""
    reason: int
    """What ``Endpoint.report`` says if the other end is not heard of in time; above 0.

    Its negative says that a message has another tag.
    """
    tag: int
    """Of the message: where ranks disagree on what is sent, it tells."""


class Endpoint(NamedTuple):
    """What all exchanges of a rank have in common."""

    state: Tensor
    """On the device: ``STATE_WORDS``, then a counter for each end of a lane."""
    report: Tensor
    """In host memory that the device writes into: why waiting failed, or 0."""
    num_slots: int
    slot_nbytes: int
    num_programs: int
    """How many may wait at once, on a GPU where others need room."""
    limit: int
    """How long they wait: nanoseconds, or polls where there is no GPU."""

    @property
    def is_timed(self) -> bool:
        return self.state.is_cuda


class Run(NamedTuple):
    """Bytes in a row: where to and where from."""

    start: int
    source_start: int
    nbytes: int


class Move:
    """Moves a box for each of ``lanes`` and tells its other end, by one kernel.

    Where slots are concerned, tasks speak of the first one of a lane.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        itemsize: int,
        offset: int,
        lanes: Sequence[Lane],
        endpoint: Endpoint,
        *,
        fills: bool,
    ) -> None:
        """``tasks`` count in items; the source begins ``offset`` of them off a multiple of 8 bytes.

        It ``fills`` slots or empties them.
        """
        from hyperslab.kernels.gpu.exchange import move_and_tell
        from hyperslab.kernels.gpu.faces import UNITS

        device = endpoint.state.device
        items = items_in_unit(tasks, offset, itemsize)
        tables = task_tables([task.in_units(items) for task in tasks], device)
        self.tables = tables.rows, tables.owners, _lane_table(lanes, device), *endpoint[:2]
        num_tiles = len(tables.owners)
        # Programs that wait take room from those that others wait for: many leave it to one.
        waits = fills and num_tiles <= endpoint.num_programs
        self.wait = Wait(lanes, endpoint, fills=True) if fills and not waits else None
        constants = {
            "fills": fills,
            "waits": waits,
            "num_slots": endpoint.num_slots,
            "timed": endpoint.is_timed,
            "unit": UNITS[items * itemsize],
            "num_rest": tables.num_rest,
            "block": BLOCK,
        }
        numbers = (num_tiles, endpoint.limit, len(lanes), endpoint.slot_nbytes)
        self.launch = Launch(move_and_tell, (num_tiles,), device, numbers, constants)

    def __call__(self, target: Tensor, source: Tensor) -> None:
        """Each tensor stands for its memory, from its first number on."""
        if self.wait is not None:
            self.wait()
        self.launch(target, source, *self.tables)


class Wait:
    """Has the stream wait until the other ends have filled, or emptied, a slot of each lane."""

    def __init__(self, lanes: Sequence[Lane], endpoint: Endpoint, *, fills: bool) -> None:
        """``fills`` as for the ``Move`` that follows."""
        from hyperslab.kernels.gpu.exchange import await_emptied, await_filled

        device = endpoint.state.device
        self.tables = _lane_table(lanes, device), *endpoint[:2]
        numbers = endpoint.limit, len(lanes)
        constants = {"num_slots": endpoint.num_slots, "timed": endpoint.is_timed}
        kernel = await_emptied if fills else await_filled
        self.launch = Launch(kernel, (1,), device, numbers, constants, {"num_warps": 1})

    def __call__(self) -> None:
        self.launch(*self.tables)


class Sum:
    """Adds what comes on ``lanes`` to a tensor of ``numel`` numbers in place, by one kernel.

    ``starts`` are the first slots of the lanes, in bytes of the shared memory; lanes are in the
    order of their ranks, among which this one is at ``place``.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        starts: Sequence[int],
        lanes: Sequence[Lane],
        place: int,
        endpoint: Endpoint,
    ) -> None:
        import triton.language as tl

        from hyperslab.kernels.gpu.exchange import sum_and_tell

        device = endpoint.state.device
        self.tables = torch.tensor(starts).to(device), _lane_table(lanes, device), *endpoint[:2]
        wide = tl.float64 if dtype == torch.float64 else tl.float32
        constants = {
            "num_slots": endpoint.num_slots,
            "timed": endpoint.is_timed,
            "wide": wide if dtype.is_floating_point else tl.int64,
            "block": BLOCK,
        }
        numbers = numel, endpoint.limit, len(lanes), endpoint.slot_nbytes, place
        grid = (min(-(-numel // BLOCK), endpoint.num_programs),)
        self.launch = Launch(sum_and_tell, grid, device, numbers, constants)

    def __call__(self, total: Tensor, memory: Tensor) -> None:
        self.launch(total, memory, *self.tables)


def _lane_table(lanes: Sequence[Lane], device: torch.device) -> Tensor:
    return torch.tensor(lanes, dtype=torch.int64).to(device)


def run_tasks(runs: Iterable[Run]) -> list[Task]:
    """The tasks of ``runs``, with bytes as items."""
    return [
        Task.of(face_tasks.OWN, run.start, [run.source_start], [Dim(run.nbytes, 1, (1,))])
        for run in runs
    ]
