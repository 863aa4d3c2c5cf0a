"""Counter-based random bits: they depend on the seed and the global index, not on the mesh."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from hyperslab.comm.journal import DRAWN, journal
from hyperslab.comm.mesh import Mesh
from hyperslab.layout import Grid, Layout
from hyperslab.torch_private import is_traced, untraced

NUM_VALUES = 1 << 32
"""How many values the 32 bits of an element may have."""
_MASK = NUM_VALUES - 1
_FACTORS = 0x21F0AAAD, 0x735A2D97  # of the hash lowbias32; below 2**31: no int64 product overflows

KEPT_NUMEL = 1 << 17
"""The hashes of indices are kept for tensors of up to as many elements, as dense layers have."""


def random_bits(layout: Layout, mesh: Mesh, device: torch.device, num_dims: int) -> Tensor:
    """32 random bits, in int64, for each element that this rank holds, by its global index.

    Only the first ``num_dims`` dims count; the result has extent 1 along the others. The bits are
    a hash of the index and a seed. For small tensors, where every call counts, they are a random
    multiple of a hash that is kept, plus a random number: the high bits are as good, the lowest
    ones less.

    The seed comes from torch's CPU generator: all ranks draw the same one, and activation
    checkpointing, which restores that generator, draws the same numbers again.
    """
    sources = _sources.stack
    drawn = sources[-1]() if sources else draw()
    place = (layout, mesh.grid, mesh.rank, num_dims, device)
    hashes = _hashes
    drawn_later = bool(sources) or is_traced()  # by replays, and in every step by compiled graphs
    if drawn_later:
        seed, number = drawn.unbind()
        if sources:
            journal.note(torch.randint, (DRAWN,))
    else:
        seed, number = drawn.tolist()
        journal.note(torch.randint, (seed,))  # ranks compare what they drew
        hashes = _kept_hashes
    if math.prod(layout.shape) > KEPT_NUMEL:
        return _hashes(seed, *place)
    # The sum is below 2**63: hashes and number are below 2**32, the factor below 2**31.
    factor, kept = seed >> 1 | 1, hashes(0, *place)
    if drawn_later:
        return (kept * factor + number) & _MASK
    return torch.rsub(kept, number, alpha=-factor) & _MASK  # type: ignore[call-overload, no-any-return]  # in one call


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
) -> Tensor:
    """32 bits, in int64, for each element that ``rank`` holds."""
    bits = torch.as_tensor(seed)
    spans = layout.box(grid.coords[rank]).spans
    for dim, span in enumerate(spans[:num_dims]):
        index = torch.arange(span.start, span.stop, dtype=torch.int64, device=device)
        bits = _mixed(bits ^ index.view(-1, *[1] * (len(spans) - 1 - dim)))
    return bits


_kept_hashes = lru_cache(maxsize=32)(untraced()(_hashes))


def _mixed(bits: Tensor) -> Tensor:
    """A hash of each 32-bit number: each of its bits changes all others."""
    bits = (bits + 0x9E3779B9) & _MASK
    bits = ((bits ^ bits >> 16) * _FACTORS[0]) & _MASK
    bits = ((bits ^ bits >> 15) * _FACTORS[1]) & _MASK
    return bits ^ bits >> 15
