"""Counter-based random bits: they depend on the seed and the global index, not on the mesh."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hyperslab.comm.journal import DRAWN, journal
from hyperslab.comm.mesh import Mesh
from hyperslab.layout import Grid, Layout, Span
from hyperslab.torch_private import is_traced, untraced

NUM_VALUES = 1 << 32
"""How many values the 32 bits of an element may have."""
_MASK = NUM_VALUES - 1
_HALF = NUM_VALUES // 2
_FACTORS = 0x21F0AAAD, 0x735A2D97  # of the hash lowbias32; below 2**31: no int64 product overflows

KEPT_NUMEL = 1 << 17
"""The hashes of indices are kept for tensors of up to as many elements, as dense layers have."""


def bits_of(
    drawn: Drawn,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    num_dims: int,
    rows: Span | None = None,
) -> Tensor:
    """32 random bits, in int64, for each element that this rank holds, by its global index.

    They follow from what was ``drawn``; of a large tensor there may be only some ``rows``. Only the
    first ``num_dims`` dims count; the result has extent 1 along the others. The bits are
    a hash of the index and a seed. For small tensors, where every call counts, they are a random
    multiple of a hash that is kept, plus a random number: the high bits are as good, the lowest
    ones less.
    """
    return _bits(drawn, layout, mesh.grid, mesh.rank, num_dims, device, rows)


def random_bits_reach(
    least: int, layout: Layout, mesh: Mesh, device: torch.device, num_dims: int
) -> Tensor:
    """Whether each element's bits, newly drawn, are ``least`` or more, in fewer calls."""
    drawn = draw_or_ask()
    place = layout, mesh.grid, mesh.rank, num_dims, device
    if isinstance(drawn, Tensor) or not is_small(layout) or least == NUM_VALUES:
        return _bits(drawn, *place) >= least
    return _reach(least, kept_signed_hashes(*place), *drawn)


def kept_bits_reach(least: int, hashes: Tensor) -> Tensor:
    """``random_bits_reach`` of a small tensor's ``kept_signed_hashes``, where it ``draws_now``."""
    seed, number = draw().tolist()
    journal.note(torch.randint, (seed,))
    return _reach(least, hashes, seed, number)


def _reach(least: int, hashes: Tensor, seed: int, number: int) -> Tensor:
    # In 32 bits with a sign sums wrap around as the mask does it; all is shifted by half.
    shifted = torch.rsub(hashes, number - _HALF, alpha=-_factor(seed))
    return shifted >= least - _HALF


def is_small(layout: Layout) -> bool:
    """Whether the hashes of a tensor's indices are kept."""
    return math.prod(layout.shape) <= KEPT_NUMEL


def draws_now() -> bool:
    """Whether numbers are drawn when they are asked for.

    Replays draw theirs later, and compiled graphs in every step.
    """
    return not _sources.stack and not is_traced()


Drawn = tuple[int, int] | Tensor
"""A seed and a number; a tensor of both where they will be others later."""


def draw_or_ask() -> Drawn:
    """What the bits of one tensor follow from.

    It comes from torch's CPU generator: all ranks draw the same, and activation checkpointing,
    which restores that generator, draws the same again.
    """
    if draws_now():
        seed, number = draw().tolist()
        journal.note(torch.randint, (seed,))  # ranks compare what they drew
        return seed, number
    if not _sources.stack:
        return draw()
    journal.note(torch.randint, (DRAWN,))
    return _sources.stack[-1]()


def _bits(
    drawn: Drawn,
    layout: Layout,
    grid: Grid,
    rank: int,
    num_dims: int,
    device: torch.device,
    rows: Span | None = None,
) -> Tensor:
    place = layout, grid, rank, num_dims, device
    drawn_later = isinstance(drawn, Tensor)
    seed, number = drawn.unbind() if isinstance(drawn, Tensor) else drawn
    if not is_small(layout):
        return _hashes(seed, *place, rows)
    # The sum is below 2**63: hashes and number are below 2**32, the factor below 2**31.
    if drawn_later:
        sums: Tensor = _hashes(0, *place) * _factor(seed) + number
    else:
        sums = torch.rsub(_kept_hashes(0, *place), number, alpha=-_factor(seed))  # in one call
    return sums & _MASK


def _factor(seed: Any) -> Any:
    """An odd number below 2**31."""
    return seed >> 1 | 1


def draw() -> Tensor:
    """A seed and a number for one tensor, from torch's CPU generator."""
    return torch.randint(NUM_VALUES, (2,))


class _Sources(threading.local):
    """The sources of one thread: others may run passes meanwhile, and draw from torch."""

    def __init__(self) -> None:
        self.stack: list[Callable[[], Tensor]] = []


_sources = _Sources()


@contextmanager
def drawing_from(source: Callable[[], Tensor]) -> Iterator[None]:
    """Within it this thread calls ``source`` for ``draw``; its numbers may change later."""
    _sources.stack.append(source)
    try:
        yield
    finally:
        _sources.stack.remove(source)


def _hashes(
    seed: int | Tensor,
    layout: Layout,
    grid: Grid,
    rank: int,
    num_dims: int,
    device: torch.device,
    rows: Span | None = None,
) -> Tensor:
    """32 bits, in int64, for each element that ``rank`` holds, or for some ``rows`` of them."""
    bits = torch.as_tensor(seed)
    spans = layout.box(grid.coords[rank]).spans
    spans = spans if rows is None else (rows, *spans[1:])
    for dim, span in enumerate(spans[:num_dims]):
        index = torch.arange(span.start, span.stop, dtype=torch.int64, device=device)
        bits = _mixed(bits ^ index.view(-1, *[1] * (len(spans) - 1 - dim)))
    return bits


_kept_hashes = lru_cache(maxsize=32)(untraced()(_hashes))


@lru_cache(maxsize=32)
@untraced()
def kept_signed_hashes(
    layout: Layout, grid: Grid, rank: int, num_dims: int, device: torch.device
) -> Tensor:
    """The same bits in int32."""
    hashes = _hashes(0, layout, grid, rank, num_dims, device)
    return ((hashes + _HALF & _MASK) - _HALF).int()


def _mixed(bits: Tensor) -> Tensor:
    """A hash of each 32-bit number: each of its bits changes all others."""
    bits = (bits + 0x9E3779B9) & _MASK
    bits = ((bits ^ bits >> 16) * _FACTORS[0]) & _MASK
    bits = ((bits ^ bits >> 15) * _FACTORS[1]) & _MASK
    return bits ^ bits >> 15
