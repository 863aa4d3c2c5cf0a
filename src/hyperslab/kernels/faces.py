"""Boxes of a tensor, such as the faces, edges and corners of a halo, to and from a buffer.

On a GPU one kernel moves all boxes: a call for each takes longer than its numbers do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hyperslab.kernels import fused
from hyperslab.kernels.face_tasks import (
    BLOCK,
    Doing,
    Plan,
    buffer_starts,
    plan_copies,
    plan_tasks,
)
from hyperslab.kernels.memory import memory_format_of

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
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
    *,
    pinned: bool = False,
) -> list[Tensor]:
    """Uninitialised tensors of ``shapes``, one after the other in one buffer."""
    starts = buffer_starts(shapes, dtype.itemsize)
    return _parts(torch.empty(starts[-1], dtype=dtype, device=device, pin_memory=pinned), shapes)


def zeros_for(
    shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Tensors of ``shapes``, one after the other in one buffer, all zero."""
    starts = buffer_starts(shapes, dtype.itemsize)
    return _parts(torch.zeros(starts[-1], dtype=dtype, device=device), shapes)


def zeros_alike(shapes: Sequence[Sequence[int]], like: Tensor) -> list[Tensor]:
    """As ``zeros_for``, of the dtype and memory format of ``like``."""
    if memory_format_of(like) is torch.contiguous_format:
        return zeros_for(shapes, like.dtype, like.device)
    parts = zeros_for([(n, *rest, c) for n, c, *rest in shapes], like.dtype, like.device)
    return [part.movedim(-1, 1) for part in parts]


def copy_views_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each of ``sources`` to its target, which do not overlap.

    On a GPU by one kernel, if all targets lie in one memory and all sources in another.
    """
    plan = _plan_copies(targets, sources)
    if plan is not None:
        _launch("unpack", targets[0], sources[0], 0, plan)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each of ``sources`` to its target, by one call where both are parts of one buffer.

    Between pinned memory and a GPU the host does not wait.
    """
    target, source = _buffer_of(targets), _buffer_of(sources)
    if target is not None and source is not None:
        target.copy_(source, non_blocking=True)
        return
    for part, piece in zip(targets, sources, strict=True):
        part.copy_(piece, non_blocking=True)


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


def _plan_copies(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Plan | None:
    every = (*targets, *sources)
    if not every or not all(type(t) is Tensor and t.is_cuda for t in every):
        return None
    return plan_views(targets, sources) if fused.is_measured(targets[0].device) else None


def plan_views(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Plan | None:
    """How one kernel copies ``sources``; None where it does not."""
    every = (*targets, *sources)
    memories = [{t.untyped_storage().data_ptr() for t in side} for side in (targets, sources)]
    is_one_each = all(len(memory) == 1 for memory in memories)
    dtype = targets[0].dtype
    if not is_one_each or dtype.itemsize not in _UNITS or any(t.dtype != dtype for t in every):
        return None
    if any(t.is_conj() or t.is_neg() or not t.numel() for t in every):
        return None
    views = [
        (tuple(t.shape), t.stride(), t.storage_offset(), s.stride(), s.storage_offset())
        for t, s in zip(targets, sources, strict=True)
    ]
    return plan_copies(tuple(views), dtype.itemsize, targets[0].device)


def _move(doing: Doing, x: Tensor, pieces: Sequence[Tensor], plan: Plan) -> None:
    buffer = _buffer_of(pieces)
    if buffer is None:
        parts = room_for([piece.shape for piece in pieces], x.dtype, x.device)
        torch._foreach_copy_(parts, list(pieces))
        buffer = _buffer_of(parts)
    assert buffer is not None
    _launch(doing, x, buffer, x.storage_offset() * x.itemsize // plan.unit, plan)


def _launch(doing: Doing, x: Tensor, buffer: Tensor, start: int, plan: Plan) -> None:
    """Moves between the memory of ``x``, from ``start`` on, and that of ``buffer``."""
    from hyperslab.kernels.gpu.faces import move_boxes

    unit = x.dtype if doing == "add" else _UNITS[plan.unit]
    with torch.cuda.device_of(x):
        move_boxes[(len(plan.owners),)](
            _memory(x, unit), _memory(buffer, unit), plan.tasks, plan.owners, start,
            doing=doing, num_rest=plan.num_rest, num_sources=plan.num_sources, block=BLOCK,
        )  # fmt: skip


def _memory(x: Tensor, dtype: torch.dtype) -> Tensor:
    """All memory of ``x`` as numbers of ``dtype``."""
    memory = x.untyped_storage()
    numbers = torch.empty(0, dtype=dtype, device=x.device)
    return numbers.set_(memory, 0, (memory.nbytes() // dtype.itemsize,), (1,))
