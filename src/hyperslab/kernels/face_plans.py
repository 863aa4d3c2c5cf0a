"""How boxes are moved by one kernel: planned once for shapes and strides, and kept.

No box is empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, product
from operator import mul
from typing import NamedTuple

import torch

from hyperslab.kernels import face_tasks
from hyperslab.kernels.face_tasks import Dim, Moves, Strides, Task, items_in_unit
from hyperslab.layout import OWN, Assembly, Piece

ALIGNMENT = 16
"""Bytes: at a multiple of them each tensor of a buffer begins."""
LARGE = 1 << 22
"""Numbers of an own piece that torch copies by itself: what is so long may cost a call more."""
_MAX_CELLS = 4096

Shape = tuple[int, ...]
Spans = tuple[tuple[int, int], ...]


class Part(NamedTuple):
    """Where a tensor lies in a buffer."""

    shape: Shape
    strides: Strides
    start: int

    def at(self, box: Sequence[slice]) -> int:
        """Where ``box`` of it begins."""
        steps = zip(box, self.strides, strict=True)
        return self.start + sum(int(s.start) * stride for s, stride in steps)


class Room(NamedTuple):
    """Tensors one after the other in a buffer."""

    parts: tuple[Part, ...]
    numel: int


@lru_cache(maxsize=4096)
def plan_room(shapes: tuple[Shape, ...], itemsize: int, *, last: bool = False) -> Room:
    """Room for tensors of ``shapes``, contiguous or with channels last."""
    step = max(1, ALIGNMENT // itemsize)
    sizes = (math.ceil(math.prod(shape) / step) * step for shape in shapes)
    *starts, numel = accumulate(sizes, initial=0)
    strides = map(_channels_last if last else _contiguous, shapes)
    return Room(tuple(map(Part, shapes, strides, starts)), numel)


@lru_cache(maxsize=4096)
def is_one_run(boxes: Assembly, strides: Strides) -> bool:
    """Whether there is one box, and it lies contiguous in a tensor with ``strides``."""
    if len(boxes.shapes) != 1:
        return False
    steps = zip(boxes.shapes[0], strides, _contiguous(boxes.shapes[0]), strict=True)
    return all(size == 1 or stride == step for size, stride, step in steps)


class AssemblyPlan(NamedTuple):
    """How the tensors of an assembly are made."""

    room: Room
    received: Room
    move: Moves | None
    by_torch: tuple[Piece, ...]
    """Own pieces that are copied by themselves."""


@lru_cache(maxsize=4096)
def plan_assembly(
    assembly: Assembly, strides: Strides, start: int, last: bool, fill: float | None,
    dtype: torch.dtype, device: torch.device,
) -> AssemblyPlan:  # fmt: skip
    """How tensors, with channels last or contiguous, are made of an own one with ``strides``.

    It begins ``start`` bytes behind a multiple of 8. What is ``fill`` elsewhere is left as it is
    where that is None.
    """
    size = dtype.itemsize
    room = plan_room(assembly.shapes, size, last=last)
    received = plan_room(assembly.received, size)
    large = tuple(p for p in assembly.pieces if p.source == OWN and _numel(p.of) >= LARGE)
    own = Part((), strides, 0)
    tasks = list(_piece_tasks(assembly, room, received, own))
    if fill is not None:
        tasks += _fill_tasks(assembly, room)
    if not tasks:
        return AssemblyPlan(room, received, None, large)
    items = items_in_unit(tasks, start // size, size)
    bits = 0 if fill is None or not assembly.outside else _bits(fill, dtype, items)
    move = Moves([task.in_units(items) for task in tasks], items * size, device, bits)
    return AssemblyPlan(room, received, move, large)


def _piece_tasks(assembly: Assembly, room: Room, received: Room, own: Part) -> Iterator[Task]:
    for piece in assembly.pieces:
        is_own = piece.source == OWN
        if is_own and _numel(piece.of) >= LARGE:
            continue
        source, target = own if is_own else received.parts[piece.source], room.parts[piece.target]
        origin = face_tasks.OWN if is_own else face_tasks.RECEIVED
        steps = ((step,) for step in source.strides)
        dims = map(Dim, _sizes(piece.to), target.strides, steps)
        yield Task.of(origin, target.at(piece.to), [source.at(piece.of)], dims)


def box_tasks(boxes: Assembly, strides: Strides, starts: Iterable[int]) -> Iterator[Task]:
    """``boxes`` of a tensor with ``strides``, each contiguous from one of ``starts`` on."""
    own = Part((), strides, 0)
    for piece, start in zip(boxes.pieces, starts, strict=True):
        shape = _sizes(piece.of)
        steps = ((step,) for step in strides)
        dims = map(Dim, shape, _contiguous(shape), steps)
        yield Task.of(face_tasks.OWN, start, [own.at(piece.of)], dims)


def _fill_tasks(assembly: Assembly, room: Room) -> Iterator[Task]:
    """As if what is filled came from a place like its own."""
    for number, box in assembly.outside:
        target = room.parts[number]
        dims = map(Dim, _sizes(box), target.strides, ((step,) for step in target.strides))
        yield Task.of(face_tasks.FILL, target.at(box), [target.at(box)], dims)


def _bits(fill: float, dtype: torch.dtype, items: int) -> int:
    """``items`` numbers side by side, as one integer."""
    raw = torch.full((items,), fill, dtype=dtype, device="cpu").view(torch.uint8).tolist()
    return int.from_bytes(bytes(raw), "little", signed=True)


@lru_cache(maxsize=4096)
def plan_add(
    boxes: Assembly, strides: Strides, itemsize: int, device: torch.device
) -> Moves | None:
    """How boxes are added to those of a tensor with ``strides`` of which they were cut out.

    None where they overlap in too many ways.
    """
    spans = tuple(tuple((s.start, s.stop) for s in piece.of) for piece in boxes.pieces)
    cells = _cells(spans)
    if cells is None:
        return None
    parts = plan_room(boxes.shapes, itemsize).parts
    return Moves([_add_task(cell, at, spans, strides, parts) for cell, at in cells], None, device)


@lru_cache(maxsize=4096)
def plan_received_grads(
    assembly: Assembly, target: int, strides: Strides, itemsize: int, device: torch.device
) -> Moves | None:
    """How the gradient of a target, with ``strides``, is added to those of what was received.

    None where nothing of the target was received.
    """
    parts, grad = plan_room(assembly.received, itemsize).parts, Part((), strides, 0)
    tasks = []
    for piece in assembly.pieces:
        if piece.target == target and piece.source != OWN:
            part, steps = parts[piece.source], ((step,) for step in strides)
            dims = map(Dim, _sizes(piece.of), part.strides, steps)
            start, source = part.at(piece.of), grad.at(piece.to)
            tasks.append(Task.of(face_tasks.RECEIVED, start, [source], dims))
    return Moves(tasks, None, device) if tasks else None


def _add_task(
    cell: Spans,
    sources: list[int],
    boxes: tuple[Spans, ...],
    strides: Strides,
    parts: tuple[Part, ...],
) -> Task:
    target = sum(first * stride for (first, _), stride in zip(cell, strides, strict=True))
    starts = [
        parts[i].at([slice(c[0] - b[0], None) for c, b in zip(cell, boxes[i], strict=True)])
        for i in sources
    ]
    steps = zip(*(parts[i].strides for i in sources), strict=True)
    dims = map(Dim, (stop - first for first, stop in cell), strides, steps)
    return Task.of(face_tasks.RECEIVED, target, starts, dims)


def _cells(boxes: tuple[Spans, ...]) -> list[tuple[Spans, list[int]]] | None:
    """Boxes that do not overlap, each with the numbers of those of ``boxes`` that hold it."""
    if not any(_overlap(one, two) for i, one in enumerate(boxes) for two in boxes[:i]):
        return [(box, [i]) for i, box in enumerate(boxes)]
    cuts = [sorted({edge for box in boxes for edge in box[dim]}) for dim in range(len(boxes[0]))]
    if math.prod(len(edges) - 1 for edges in cuts) > _MAX_CELLS:
        return None
    cells = (
        (cell, [i for i, box in enumerate(boxes) if _overlap(cell, box)])
        for cell in product(*map(pairwise, cuts))
    )
    return [(cell, holders) for cell, holders in cells if holders]


def _overlap(one: Spans, two: Spans) -> bool:
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, two, strict=True))


def _sizes(box: Sequence[slice]) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in box)


def _numel(box: Sequence[slice]) -> int:
    return math.prod(_sizes(box))


def _contiguous(shape: Shape) -> Strides:
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1][: len(shape)]


def _channels_last(shape: Shape) -> Strides:
    samples, channels, *sizes = shape
    first, *steps, step = _contiguous((samples, *sizes, channels))
    return (first, step, *steps)
