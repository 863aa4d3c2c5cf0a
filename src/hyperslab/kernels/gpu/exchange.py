"""The Triton kernels that move boxes between ranks' memories and tell the other side.

A lane is a ring of slots in one rank's memory that one other rank writes into. Each side counts, in
its own memory, how many slots it has filled or emptied, and tells the other its count by a word in
the other's memory. kernels/exchange.py lays out the numbers that describe a lane.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from hyperslab.kernels.gpu.faces import move_tile

ROW = tl.constexpr(5)
"""Numbers of a lane: address of the awaited word, of the raised one, number of the counter, what to
report where the awaited word does not come, and the tag of the message. Behind the word that a
sender raises lie the tags of what is in the slots."""


@triton.jit
def await_emptied(
    lanes, state, report, limit, num_lanes, num_slots: tl.constexpr, timed: tl.constexpr
) -> None:
    """Waits until all lanes have an empty slot; one program, so that others find room."""
    _await_lanes(lanes, state, report, limit, num_lanes, 1 - num_slots, timed)


@triton.jit
def await_filled(
    lanes, state, report, limit, num_lanes, num_slots: tl.constexpr, timed: tl.constexpr
) -> None:
    """Waits until all lanes were filled; one program, so that others find room."""
    _await_messages(lanes, state, report, limit, num_lanes, num_slots, timed)


@triton.jit
def sum_and_tell(
    total, memory, starts, lanes, state, report, numel, limit, num_lanes, slot_nbytes, place,
    num_slots: tl.constexpr, timed: tl.constexpr, wide: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """Adds what is in the next slot of each lane to ``total``, in the order of ranks, and tells so.

    ``place`` is this rank's among them; ``starts`` are the first slots' in ``memory``, in bytes.
    Waits until the slots are filled. If that fails, all becomes NaN, or the least of integers.
    """
    failed = _await_messages(lanes, state, report, limit, num_lanes, num_slots, timed)
    for tile in range(tl.program_id(0), (numel + block - 1) // block, tl.num_programs(0)):
        numbers = tile * block + tl.arange(0, block)
        inside = numbers < numel
        mine = tl.load(total + numbers, mask=inside).to(wide)
        found = tl.full((block,), 0, wide)
        if wide == tl.int64:
            found = tl.where(failed == 0, found, -(1 << 62))
        else:
            found = tl.where(failed == 0, found, float("nan"))
        for rank in range(num_lanes + 1):
            if rank == place:
                found += mine
            else:
                lane = rank - (rank > place).to(tl.int32)
                count = tl.load(state + tl.load(lanes + lane * ROW + 2))
                start = tl.load(starts + lane) + (count % num_slots) * slot_nbytes
                slot = (memory + start).to(tl.pointer_type(total.dtype.element_ty), bitcast=True)
                # Not from a cache: another GPU has written it.
                found += tl.load(slot + numbers, mask=inside, volatile=True).to(wide)
        tl.store(total + numbers, found.to(total.dtype.element_ty), mask=inside)
    _finish_and_tell(lanes, state, num_lanes, num_slots, False)


@triton.jit
def _await_messages(
    lanes, state, report, limit, num_lanes, num_slots: tl.constexpr, timed: tl.constexpr
):
    """Waits until all lanes were filled; 0 unless that failed.

    A message with another tag than the lane's is as good as none: it has its own report.
    """
    failed = _await_lanes(lanes, state, report, limit, num_lanes, 1, timed)
    for number in range(num_lanes):
        row = lanes + number * ROW
        slot = tl.load(state + tl.load(row + 2)) % num_slots
        tags = tl.load(row).to(tl.pointer_type(tl.int64)) + 1
        tag = tl.atomic_add(tags + slot, 0, sem="relaxed", scope="sys")
        is_other = (failed == 0) & (tag != tl.load(row + 4))
        reason = -tl.load(row + 3)
        tl.atomic_xchg(state, reason, mask=is_other, sem="relaxed", scope="gpu")
        tl.store(report, reason, mask=is_other)
    return _failure(state)


@triton.jit
def move_and_tell(
    target, own, tasks, owners, lanes, state, report, num_tiles, limit, num_lanes, slot_nbytes,
    fills: tl.constexpr, waits: tl.constexpr, num_slots: tl.constexpr, timed: tl.constexpr,
    unit: tl.constexpr, num_rest: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """Moves all tiles of task ``i`` into, or out of, the next slot of lane ``i``, and tells so.

    With ``waits`` it first waits until the other sides have emptied the slots. If waiting failed,
    slots are not filled, and what should be in them becomes NaN.
    """
    if waits:
        failed = _await_lanes(lanes, state, report, limit, num_lanes, 1 - num_slots, timed)
    else:
        failed = _failure(state)
    poison = tl.where(failed == 0, 0, -1)
    if fills:
        num_tiles = tl.where(failed == 0, num_tiles, 0)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        lane = lanes + tl.load(owners + tile) * ROW
        count = tl.load(state + tl.load(lane + 2))
        slot = (count % num_slots) * slot_nbytes
        to = target.to(tl.pointer_type(tl.int8), bitcast=True)
        source = own.to(tl.pointer_type(tl.int8), bitcast=True)
        if fills:
            to += slot
        else:
            source += slot
        move_tile(tile, to, source, source, tasks, owners, poison, unit, num_rest, 1, block)
    _finish_and_tell(lanes, state, num_lanes, num_slots, fills)


@triton.jit
def _finish_and_tell(lanes, state, num_lanes, num_slots: tl.constexpr, fills: tl.constexpr):
    """The last program to come here says to all lanes that slots were filled, or emptied."""
    tl.debug_barrier()
    finished = tl.atomic_add(state + 1, 1, sem="acq_rel", scope="gpu")
    if finished == tl.num_programs(0) - 1:
        tl.store(state + 1, 0)
        if _failure(state) == 0:
            for number in range(num_lanes):
                row = lanes + number * ROW
                counter = state + tl.load(row + 2)
                total = tl.load(counter)
                tl.store(counter, total + 1)
                word = tl.load(row + 1).to(tl.pointer_type(tl.int64))
                if fills:
                    tl.atomic_xchg(
                        word + 1 + total % num_slots, tl.load(row + 4), sem="relaxed", scope="sys"
                    )
                tl.atomic_xchg(word, total + 1, sem="release", scope="sys")


@triton.jit
def _await_lanes(lanes, state, report, limit, num_lanes, ahead: tl.constexpr, timed: tl.constexpr):
    """Waits until the other sides' counts are this rank's plus ``ahead``; 0 unless that failed.

    After ``limit`` nanoseconds, or that many polls if not ``timed``, it gives up and notes why in
    ``state`` and ``report``. Once that is noted, nothing is waited for.
    """
    # All threads go by what an atomic operation returns, which is the same for all of them.
    failed = _failure(state)
    for lane in range(num_lanes):
        row = lanes + lane * ROW
        word = tl.load(row).to(tl.pointer_type(tl.int64))
        due = tl.load(state + tl.load(row + 2)) + ahead
        reason = tl.load(row + 3)
        begun = _clock(timed)
        polls = tl.full((), 0, tl.int64)
        count = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        while (count < due) & (failed == 0):
            count = tl.atomic_add(word, 0, sem="acquire", scope="sys")
            polls += 1
            waited = _clock(timed) - begun if timed else polls
            is_late = (waited > limit) & (count < due)
            tl.atomic_xchg(state, reason, mask=is_late, sem="relaxed", scope="gpu")
            tl.store(report, reason, mask=is_late)
            failed = _failure(state)
    return failed


@triton.jit
def _failure(state):
    return tl.atomic_add(state, 0, sem="relaxed", scope="gpu")


@triton.jit
def _clock(timed: tl.constexpr):
    return globaltimer() if timed else 0
