"""Boxes of tensors, such as the faces, edges and corners of a halo, to and from other tensors.

On a GPU one kernel moves all boxes: a call for each takes longer than its numbers do. What follows
from shapes and strides is planned once (face_plans.py), because calls are frequent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hyperslab.kernels import fused
from hyperslab.kernels.face_plans import (
    ALIGNMENT,
    Room,
    is_one_run,
    plan_add,
    plan_assembly,
    plan_received_grads,
    plan_room,
)
from hyperslab.kernels.memory_format import memory_format_of
from hyperslab.layout import OWN, Assembly
from hyperslab.torch_private import foreach_copy_

_DTYPES = frozenset(
    [
        torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64,
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    ]
)  # fmt: skip


MANY = 16
"""Pieces of one box: so many are summed before they are added, not one after the other."""


def has_kernel(x: Tensor) -> bool:
    """Whether one kernel moves all boxes of ``x``."""
    # Other types of tensors are a compiler's, and have no values.
    return x.is_cuda and type(x) is Tensor and fused.is_measured(x.device) and is_movable(x)


def is_movable(x: Tensor) -> bool:
    """Whether the kernel knows the dtype of ``x``, and its memory says it all."""
    return x.dtype in _DTYPES and not x.is_conj() and not x.is_neg()


def pack(x: Tensor, boxes: Assembly) -> list[Tensor]:
    """``boxes`` of ``x``, contiguous: as parts of one buffer, or of ``x`` where that will do."""
    if boxes.is_full and has_kernel(x) and not is_one_run(boxes, x.stride()):
        return _assemble(x, (), boxes, last=False, fill=0.0)
    return [x[piece.of].contiguous() for piece in boxes.pieces]


def assemble(
    x: Tensor, received: Sequence[Tensor], assembly: Assembly, *, fill: float = 0.0
) -> list[Tensor]:
    """The tensors of ``assembly``, of the memory format of ``x``; elsewhere they are ``fill``."""
    last = memory_format_of(x)
    if assembly.is_full and has_kernel(x):
        is_last = last is not torch.contiguous_format
        return _assemble(x, received, assembly, last=is_last, fill=fill)
    found = [
        torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=last)
        for shape in assembly.shapes
    ]
    for target, where in assembly.outside:
        found[target][where] = fill
    for source, of, target, to in assembly.pieces:
        found[target][to] = (x if source == OWN else received[source])[of]
    return found


def _assemble(
    x: Tensor, received: Sequence[Tensor], assembly: Assembly, *, last: bool, fill: float
) -> list[Tensor]:
    start = x.data_ptr() % 8
    plan = plan_assembly(assembly, x.stride(), start, last, fill, x.dtype, x.device)
    found = _make_room(plan.room, x.dtype, x.device)
    if plan.move is not None:
        buffer = _in_one(received, plan.received, x) if received else x
        plan.move(_real(found[0]), _real(x), _real(buffer))
    for piece in plan.by_torch:
        found[piece.target][piece.to] = x[piece.of]
    return found


def place_(target: Tensor, received: Sequence[Tensor], assembly: Assembly) -> None:
    """Writes ``received`` into ``target``, the only one and channels last: nothing but that."""
    if assembly.is_full and has_kernel(target):
        start = target.data_ptr() % 8
        plan = plan_assembly(
            assembly, target.stride(), start, True, None, target.dtype, target.device
        )
        assert plan.move is not None
        plan.move(target, target, _in_one(received, plan.received, target))
        return
    for source, of, _, to in assembly.pieces:
        target[to] = received[source][of]


def cast(pieces: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """``pieces`` in ``dtype``, one after the other in one buffer; themselves if they have it."""
    if not pieces or pieces[0].dtype == dtype:
        return list(pieces)
    copies = room_for([piece.shape for piece in pieces], dtype, pieces[0].device)
    foreach_copy_(copies, list(pieces))
    return copies


def complete_(window: Tensor, x: Tensor, received: Sequence[Tensor], assembly: Assembly) -> None:
    """Writes what ``assemble`` would copy into ``window``, the only target, but for ``x``.

    That is there: it has so many elements that ``assemble`` would copy it by itself.
    """
    if assembly.is_full and has_kernel(x):
        start = window.data_ptr() % 8
        plan = plan_assembly(assembly, x.stride(), start, True, 0.0, x.dtype, x.device)
        if plan.move is not None:
            buffer = _in_one(received, plan.received, x) if received else x
            plan.move(_real(window), _real(x), _real(buffer))
        return
    for _, where in assembly.outside:
        window[where] = 0
    for source, of, _, to in assembly.pieces:
        if source != OWN:
            window[to] = received[source][of]


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def add_(out: Tensor, pieces: Sequence[Tensor], boxes: Assembly) -> None:
    """The adjoint of ``pack``: adds ``pieces`` to ``boxes`` of ``out``, one after the other."""
    if boxes.is_full and out.is_floating_point() and has_kernel(out):
        if len(pieces) >= MANY and all(box.of == boxes.pieces[0].of for box in boxes.pieces):
            out[boxes.pieces[0].of].add_(_sum(pieces, plan_room(boxes.shapes, out.itemsize), out))
            return
        move = plan_add(boxes, out.stride(), out.itemsize, out.device)
        if move is not None:
            move(out, out, _in_one(pieces, plan_room(boxes.shapes, out.itemsize), out))
            return
    for box, piece in zip(boxes.pieces, pieces, strict=True):
        out[box.of].add_(piece)


def _sum(pieces: Sequence[Tensor], room: Room, like: Tensor) -> Tensor:
    """The sum of ``pieces``, all of one shape."""
    first, step = _in_one(pieces, room, like), room.parts[1].start
    return first.as_strided((len(pieces), *first.shape), (step, *first.stride())).sum(0)


def received_grads(grads: Sequence[Tensor], assembly: Assembly) -> list[Tensor]:
    """The adjoint of ``assemble``: gradients of what was received, by those of what was made."""
    like = grads[0]
    found = zeros_for(assembly.received, like.dtype, like.device)
    by_kernel = assembly.is_full and like.is_floating_point() and all(map(has_kernel, grads))
    for number, grad in enumerate(grads):
        if by_kernel:
            add = plan_received_grads(assembly, number, grad.stride(), grad.itemsize, grad.device)
            if add is not None:
                add(found[0], grad, grad)
            continue
        for source, of, target, to in assembly.pieces:
            if target == number and source != OWN:
                found[source][of].add_(grad[to])
    return found


def _in_one(pieces: Sequence[Tensor], room: Room, like: Tensor) -> Tensor:
    """The first of ``pieces``, or of copies, which lie as ``room`` says."""
    if pieces[0].dtype == like.dtype and _lie_in(room, pieces):
        return pieces[0]
    copies = _make_room(room, like.dtype, like.device)
    foreach_copy_(copies, list(pieces))
    return copies[0]


def in_one(pieces: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The first of ``pieces``, or of copies, which lie as ``room_for`` would have them."""
    room = plan_room(tuple(tuple(piece.shape) for piece in pieces), dtype.itemsize)
    first = pieces[0]
    return _in_one(pieces, room, first if first.dtype == dtype else first.new_empty(0, dtype=dtype))


def _lie_in(room: Room, pieces: Sequence[Tensor]) -> bool:
    first, start = pieces[0], pieces[0].data_ptr()
    return start % ALIGNMENT == 0 and all(
        piece.data_ptr() == start + part.start * first.itemsize
        and piece.dtype == first.dtype
        and piece.is_contiguous()
        for piece, part in zip(pieces, room.parts, strict=True)
    )


def room_for(
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
    *,
    pinned: bool = False,
) -> list[Tensor]:
    """Uninitialised tensors of ``shapes``, one after the other in one buffer."""
    room = plan_room(tuple(map(tuple, shapes)), dtype.itemsize)
    return _make_room(room, dtype, device, pinned=pinned)


def zeros_for(
    shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Tensors of ``shapes``, one after the other in one buffer, all zero."""
    room = plan_room(tuple(map(tuple, shapes)), dtype.itemsize)
    return _parts(torch.zeros(room.numel, dtype=dtype, device=device), room)


def _make_room(
    room: Room, dtype: torch.dtype, device: torch.device, *, pinned: bool = False
) -> list[Tensor]:
    if len(room.parts) == 1:  # which is then no view, and may be written into
        shape, strides, _ = room.parts[0]
        return [torch.empty_strided(shape, strides, dtype=dtype, device=device, pin_memory=pinned)]
    return _parts(torch.empty(room.numel, dtype=dtype, device=device, pin_memory=pinned), room)


def _parts(buffer: Tensor, room: Room) -> list[Tensor]:
    return [buffer.as_strided(*part) for part in room.parts]


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


def _buffer_of(pieces: Sequence[Tensor]) -> Tensor | None:
    """The buffer of which ``pieces`` are the parts, if ``room_for`` made them."""
    if len(pieces) < 2:
        return None
    room = plan_room(tuple(tuple(piece.shape) for piece in pieces), pieces[0].itemsize)
    memory = pieces[0].untyped_storage()
    if memory.nbytes() != room.numel * pieces[0].itemsize or not _lie_in(room, pieces):
        return None
    return pieces[0].as_strided((room.numel,), (1,), 0)
