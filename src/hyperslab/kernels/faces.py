"""Boxes of a tensor, such as the faces, edges and corners of a halo, to and from a buffer.

On a GPU one kernel moves all boxes: a call for each takes longer than its numbers do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hyperslab.kernels import fused
from hyperslab.kernels.face_tasks import BLOCK, Doing, Plan, buffer_starts, plan_tasks

Where = tuple[slice, ...]
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack(x: Tensor, boxes: Sequence[Where]) -> list[Tensor]:
    """``boxes`` of ``x``, contiguous: as parts of one buffer, or of ``x`` where that will do."""
    plan = _plan("pack", x, boxes)
    if plan is None:
        return [x[where].contiguous() for where in boxes]
    pieces = room_for(plan.shapes, x.dtype, x.device)
    _move("pack", x, pieces, plan)
    return pieces


def unpack_(out: Tensor, boxes: Sequence[Where], pieces: Sequence[Tensor]) -> None:
    """Writes ``pieces`` to ``boxes`` of ``out``; where these overlap, the last remains."""
    plan = _plan("unpack", out, boxes)
    if plan is not None:
        _move("unpack", out, pieces, plan)
        return
    for where, piece in zip(boxes, pieces, strict=True):
        out[where] = piece


def add_(out: Tensor, boxes: Sequence[Where], pieces: Sequence[Tensor]) -> None:
    """Adds ``pieces`` to ``boxes`` of ``out``, one after the other where these overlap."""
    plan = _plan("add", out, boxes) if out.is_floating_point() else None
    if plan is not None:
        _move("add", out, pieces, plan)
        return
    for where, piece in zip(boxes, pieces, strict=True):
        out[where].add_(piece)


def room_for(
    shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Uninitialised tensors of ``shapes``, one after the other in one buffer."""
    starts = buffer_starts(shapes, dtype.itemsize)
    return _parts(torch.empty(starts[-1], dtype=dtype, device=device), shapes)


def to_device(pieces: Sequence[Tensor], device: torch.device, *, wait: bool) -> list[Tensor]:
    """``pieces`` on ``device``, by one copy where they are parts of one buffer."""
    buffer = _buffer_of(pieces)
    if buffer is None:
        return [piece.to(device, non_blocking=not wait) for piece in pieces]
    return _parts(buffer.to(device, non_blocking=not wait), [piece.shape for piece in pieces])


def _parts(buffer: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    starts = buffer_starts(shapes, buffer.itemsize)
    ends = (start + math.prod(shape) for start, shape in zip(starts, shapes, strict=False))
    return [
        buffer[start:end].view(tuple(shape))
        for start, end, shape in zip(starts, ends, shapes, strict=False)
    ]


def _buffer_of(pieces: Sequence[Tensor]) -> Tensor | None:
    """The buffer of which ``pieces`` are the parts, if ``room_for`` made them."""
    if not pieces:
        return None
    first, starts = pieces[0], buffer_starts([p.shape for p in pieces], pieces[0].itemsize)
    memory = first.untyped_storage()
    are_parts = memory.nbytes() == starts[-1] * first.itemsize and all(
        piece.is_contiguous()
        and piece.dtype == first.dtype
        and piece.untyped_storage().data_ptr() == memory.data_ptr()
        and piece.storage_offset() == start
        for piece, start in zip(pieces, starts, strict=False)
    )
    return first.as_strided((starts[-1],), (1,), 0) if are_parts else None


def _plan(doing: Doing, x: Tensor, boxes: Sequence[Where]) -> Plan | None:
    """How one kernel moves ``boxes``; None where they are left to torch."""
    # Other types of tensors are a compiler's, and have no values.
    if not boxes or not x.is_cuda or type(x) is not Tensor or not fused.is_measured(x.device):
        return None
    return plan_boxes(doing, x, boxes)


def plan_boxes(doing: Doing, x: Tensor, boxes: Sequence[Where]) -> Plan | None:
    """How one kernel moves ``boxes``; None where it does not, or torch does it as well."""
    if x.itemsize not in _UNITS or x.is_conj() or x.is_neg():
        return None
    slices = tuple([tuple([(s.start, s.stop, s.step) for s in where]) for where in boxes])
    start = x.storage_offset() * x.itemsize % 8 // x.itemsize
    return plan_tasks(doing, slices, x.shape, x.stride(), start, x.itemsize, x.device)


def _move(doing: Doing, x: Tensor, pieces: Sequence[Tensor], plan: Plan) -> None:
    from hyperslab.kernels.gpu.faces import move_boxes

    buffer = _buffer_of(pieces)
    if buffer is None:
        parts = room_for([piece.shape for piece in pieces], x.dtype, x.device)
        torch._foreach_copy_(parts, list(pieces))
        buffer = _buffer_of(parts)
    assert buffer is not None
    unit = x.dtype if doing == "add" else _UNITS[plan.unit]
    start = x.storage_offset() * x.itemsize // plan.unit
    with torch.cuda.device_of(x):
        move_boxes[(len(plan.owners),)](
            _memory(x, unit), buffer.view(unit), plan.tasks, plan.owners, start,
            doing=doing, num_rest=plan.num_rest, num_sources=plan.num_sources, block=BLOCK,
        )  # fmt: skip


def _memory(x: Tensor, dtype: torch.dtype) -> Tensor:
    """All memory of ``x`` as numbers of ``dtype``."""
    memory = x.untyped_storage()
    numbers = torch.empty(0, dtype=dtype, device=x.device)
    return numbers.set_(memory, 0, (memory.nbytes() // dtype.itemsize,), (1,))
