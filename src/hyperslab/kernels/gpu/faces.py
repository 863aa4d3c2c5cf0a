"""The Triton kernel that moves boxes between tensors; face_tasks.py says what it is told."""

from __future__ import annotations

import triton
import triton.language as tl

UNITS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
"""What is moved as one number, by its bytes."""


@triton.jit
def move_boxes(
    target, own, received, tasks, owners,
    unit: tl.constexpr, num_rest: tl.constexpr, num_sources: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """Moves one tile of task ``owners[program]``."""
    move_tile(
        tl.program_id(0), target, own, received, tasks, owners, 0,
        unit, num_rest, num_sources, block,
    )  # fmt: skip


@triton.jit
def move_tile(
    tile, target, own, received, tasks, owners, extra_bits,
    unit: tl.constexpr, num_rest: tl.constexpr, num_sources: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """Moves tile number ``tile``. All but its dims is decoded only once.

    ``extra_bits`` are set in all that is moved: -1 makes every floating-point number a NaN.
    """
    width: tl.constexpr = 9 + 2 * num_rest + num_sources * (3 + num_rest)
    task = tasks + tl.load(owners + tile).to(tl.int64) * width
    number = tile - tl.load(task).to(tl.int32)
    num_a, num_b = tl.load(task + 2).to(tl.int32), tl.load(task + 3).to(tl.int32)
    log = tl.load(task + 4).to(tl.int32)
    tile_a, tile_b = block >> log, 1 << log
    e = tl.arange(0, block)
    blocks = (num_b + tile_b - 1) // tile_b
    b = (number % blocks) * tile_b + (e & (tile_b - 1))
    number = number // blocks
    blocks = (num_a + tile_a - 1) // tile_a
    a = (number % blocks) * tile_a + (e >> log)
    number = number // blocks
    inside = (a < num_a) & (b < num_b)
    here = tl.load(task + 1) + a * tl.load(task + 5) + b * tl.load(task + 6)
    origin, fill = tl.load(task + 7), tl.load(task + 8)
    task += 9
    digits = ()
    for dim in tl.static_range(num_rest):
        size = tl.load(task + 2 * dim).to(tl.int32)
        here += (number % size) * tl.load(task + 2 * dim + 1)
        digits += (number % size,)
        number = number // size
    task += 2 * num_rest
    if unit is None:
        wide: tl.constexpr = tl.float64 if target.dtype.element_ty == tl.float64 else tl.float32
        total = tl.load(target + here, mask=inside, other=0.0)
    for _ in tl.static_range(num_sources):
        start = tl.load(task)
        there = start + a * tl.load(task + 1) + b * tl.load(task + 2)
        for dim in tl.static_range(num_rest):
            there += digits[dim] * tl.load(task + 3 + dim)
        task += 3 + num_rest
        if unit is None:
            # Rounded after each box, as if they were added one by one.
            piece = tl.load(received + there, mask=inside & (start >= 0), other=0.0)
            total = (total.to(wide) + piece.to(wide)).to(total.dtype)
        else:
            pointer: tl.constexpr = tl.pointer_type(unit)
            mine = own.to(pointer, bitcast=True) + there
            theirs = received.to(pointer, bitcast=True) + there
            # One of the three is there, and the others are zero.
            bits = tl.load(mine, mask=inside & (origin == 1), other=0)
            bits |= tl.load(theirs, mask=inside & (origin == 2), other=0)
            bits |= (fill | extra_bits).to(unit)
            tl.store(target.to(pointer, bitcast=True) + here, bits, mask=inside)
    if unit is None:
        tl.store(target + here, total, mask=inside)
