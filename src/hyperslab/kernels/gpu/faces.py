"""The Triton kernel that moves boxes of a tensor to and from a buffer; face_tasks.py plans it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["x_start"])
def move_boxes(
    x, buffer, tasks, owners, x_start,
    doing: tl.constexpr, num_rest: tl.constexpr, num_sources: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """Moves one tile of task ``owners[program]``. All but the tile's dims is decoded only once."""
    width: tl.constexpr = 7 + 2 * num_rest + num_sources * (3 + num_rest)
    task = tasks + tl.load(owners + tl.program_id(0)).to(tl.int64) * width
    number = tl.program_id(0) - tl.load(task).to(tl.int32)
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
    here = x_start + tl.load(task + 1) + a * tl.load(task + 5) + b * tl.load(task + 6)
    task += 7
    digits = ()
    for dim in tl.static_range(num_rest):
        size = tl.load(task + 2 * dim).to(tl.int32)
        here += (number % size) * tl.load(task + 2 * dim + 1)
        digits += (number % size,)
        number = number // size
    task += 2 * num_rest
    if doing == "add":
        wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
        total = tl.load(x + here, mask=inside, other=0.0)
    for _ in tl.static_range(num_sources):
        start = tl.load(task)
        there = start + a * tl.load(task + 1) + b * tl.load(task + 2)
        for dim in tl.static_range(num_rest):
            there += digits[dim] * tl.load(task + 3 + dim)
        task += 3 + num_rest
        exists = inside & (start >= 0)
        if doing == "pack":
            tl.store(buffer + there, tl.load(x + here, mask=exists), mask=exists)
        elif doing == "unpack":
            tl.store(x + here, tl.load(buffer + there, mask=exists), mask=exists)
        else:
            # Rounded after each box, as if they were added one by one.
            piece = tl.load(buffer + there, mask=exists, other=0.0)
            total = (total.to(wide) + piece.to(wide)).to(total.dtype)
    if doing == "add":
        tl.store(x + here, total, mask=inside)
