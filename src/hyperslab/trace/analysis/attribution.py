"""What the loop of a rank waited for: each moment is given to one category.

A moment in which the rank computes is *compute*: where its GPU's own time was recorded, that of
the GPU; elsewhere that of the host, without the waiting that happens inside. Every other moment
goes to the first of ``claims`` that covers it, and what nothing covers is *other*. What a category
was given is its *exposed* time; the rest of the time in which it went on was *hidden*.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hyperslab.trace.analysis.intervals import Intervals
from hyperslab.trace.analysis.loop import READERS, Rank
from hyperslab.trace.span import Category

MESSAGES = (Category.halo, Category.all_reduce)


@dataclass(frozen=True)
class Attribution:
    """Of one rank."""

    busy: dict[Category, Intervals] = field(default_factory=dict)
    """When each category went on at all."""
    exposed: dict[Category, Intervals] = field(default_factory=dict)
    """When it was what the loop did or waited for; these are apart, and cover ``rank.extent``."""
    making: Intervals = field(default_factory=Intervals)
    """When the loop waited for code of its own that makes batches: user, and compute."""


def attribute(rank: Rank) -> Attribution:
    """Who is given which moment."""
    compute = computing(rank)
    busy = dict(rank.by_category)
    if Category.compute in busy:
        busy[Category.compute] = compute
    for category in (*MESSAGES, Category.copy):
        if len(rank.chosen(category, rank.on_device)):  # the host's part is the posting of it
            busy[category] = rank.chosen(category, rank.on_device | rank.exposed)
    left, exposed = rank.extent, dict[Category, Intervals]()
    for category, claimed in claims(rank, compute):
        given = left & claimed
        if len(given):
            exposed[category] = exposed.get(category, Intervals()) | given
            left = left - given
    if len(left):
        exposed[Category.other] = exposed.get(Category.other, Intervals()) | left
        busy[Category.other] = busy.get(Category.other, Intervals()) | left
    return Attribution(busy, exposed, _making(rank, exposed))


def _making(rank: Rank, exposed: dict[Category, Intervals]) -> Intervals:
    waited = rank.by_category.get(Category.wait, Intervals())
    by_loop = rank.chosen(Category.compute, rank.on_loop & rank.lies_in(waited))
    nothing = Intervals()
    made = exposed.get(Category.user, nothing) & waited
    return made | (exposed.get(Category.compute, nothing) & by_loop)


def claims(rank: Rank, compute: Intervals) -> Iterator[tuple[Category, Intervals]]:
    """The order in which categories are given moments, the first first.

    1. compute
    2. halo, all_reduce: on the GPU, or where the loop waits for them by construction
    3. copy on the GPU or in the loop, optimizer, checkpoint in the loop
    4. what the loop does itself of what readers do: stage, read, decode, exchange, copy
    5. while the loop waits for a batch: user and compute in which the loop makes it itself, then
       what readers do, then user of anybody; in a trace without ``wait``, what readers do always
    6. wait: nobody recorded anything for the batch
    7. what else goes on: halo, all_reduce, copy, checkpoint, evaluation, user
    """
    busy = rank.by_category
    nothing = Intervals()
    waited = busy.get(Category.wait, nothing)
    loop_waits = rank.on_device | rank.exposed
    in_loop = loop_waits | rank.on_loop
    yield Category.compute, compute
    for category in MESSAGES:
        yield category, rank.chosen(category, loop_waits)
    yield Category.copy, rank.chosen(Category.copy, in_loop)
    yield Category.optimizer, busy.get(Category.optimizer, nothing)
    yield Category.checkpoint, rank.chosen(Category.checkpoint, in_loop)
    for category in (*READERS, Category.copy):
        yield category, rank.chosen(category, in_loop)
    yield from _made_while_waiting(rank, waited)
    yield Category.wait, waited
    for category in (*MESSAGES, Category.copy, Category.checkpoint, Category.evaluation):
        yield category, busy.get(category, nothing)
    yield Category.user, busy.get(Category.user, nothing)


def _made_while_waiting(rank: Rank, waited: Intervals) -> Iterator[tuple[Category, Intervals]]:
    by_loop = rank.on_loop & rank.lies_in(waited)
    for category in (Category.user, Category.compute):
        yield category, rank.chosen(category, by_loop)
    for category in (*READERS, Category.copy):
        going_on = rank.by_category.get(category, Intervals())
        yield category, going_on & waited if len(waited) else going_on
    others = ~rank.on_loop & ~rank.on_device
    yield Category.user, rank.chosen(Category.user, others) & waited


def computing(rank: Rank) -> Intervals:
    """When the rank computes: in passes, but for the waiting within them."""
    device = _passes(rank, rank.on_device)
    host = _passes(rank, ~rank.on_device)
    return device | (host - _recorded_on_device(rank, device)) if len(device) else host


def _passes(rank: Rank, among: NDArray[np.bool_]) -> Intervals:
    passes, waits = rank.chosen(Category.compute, among), among & rank.exposed
    waits = waits & (rank.categories != Category.compute)
    return passes - Intervals.of(rank.starts[waits], rank.stops[waits])


def _recorded_on_device(rank: Rank, device: Intervals) -> Intervals:
    """The steps in which the GPU's time is known, from the first work of it to the last."""
    starts, stops = rank.edges()
    if not rank.has_steps or not len(starts):
        return Intervals(device.starts[:1], device.stops[-1:])
    has = device.before(stops) > device.before(starts)
    return Intervals.of(starts[has], stops[has])
