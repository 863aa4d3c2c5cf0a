"""The shape of chunks: about a MiB each, and none with parts of two ranks' boxes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from hyperslab.layout import Cuts, Span

CHUNK_NBYTES = 1 << 20
"""Large enough that a disk reads it at speed, small enough that threads share the work."""
SMALL_NBYTES = 1 << 14
"""Samples below this share a chunk: one by one they would cost more by their number."""
SMALL_BOX_NBYTES = 1 << 16
"""A box that no mesh will cut further."""
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
"""Into how many chunks a piece may be cut along a dim, where no number divides it well."""


@dataclass(frozen=True)
class ChunkDim:
    """One dim of an array, in the order in which it is written."""

    extent: int
    cuts: Cuts
    """Where ranks' boxes end."""
    is_spatial: bool

    def lengths(self) -> list[int]:
        """What a chunk may measure along it.

        Where all pieces are equal, only what divides them; else no length fits all cuts, but 1, and
        the best is found by trying.
        """
        found = _divisors(math.gcd(*self.cuts.bounds))
        sizes = {span.size for span in self.cuts.spans}
        if len(sizes) > 1 or self.cuts.num == 1:
            found |= {-(-max(sizes) // count) for count in COUNTS if count <= max(sizes)}
        return _thinned(sorted(found, reverse=True))

    def amplification(self, length: int) -> float:
        """What the rank that is worst off decodes along it, as a multiple of what it wants."""
        spans = [span for span in self.cuts.spans if span.size]
        return max(_num_touched(span, length) * length / span.size for span in spans)


def choose_chunks(dims: Sequence[ChunkDim], itemsize: int, *, is_cubic: bool) -> tuple[int, ...]:
    """The best chunk for ranks that read the boxes between the cuts of ``dims``.

    Ranks read all channels of their box, so these may be in one chunk or in several. Of chunks that
    serve equally well, ``is_cubic`` takes the one with the most equal sides, which serves all
    meshes alike; else it is the one with the longest runs in memory, which is a slab.

    >>> from hyperslab.layout import cut_evenly
    >>> cut, whole = cut_evenly(512, 4), cut_evenly(512, 1)
    >>> dims = [ChunkDim(4, cut_evenly(4, 1), False), ChunkDim(512, cut, True)]
    >>> dims += [ChunkDim(512, whole, True)] * 2
    >>> choose_chunks(dims, 2, is_cubic=False)
    (1, 2, 512, 512)
    """
    fits = [{length: dim.amplification(length) for length in dim.lengths()} for dim in dims]

    def cost(lengths: tuple[int, ...]) -> tuple[float, ...]:
        excess = math.prod(fit[length] for fit, length in zip(fits, lengths, strict=True))
        size = math.log2(math.prod(lengths) * itemsize / CHUNK_NBYTES)
        # 6% too much, and sizes within a factor of 1.5, are as good as none.
        score = 4 * math.log2(max(1.06, excess)) + max(0.0, size - 0.6, -size / 2 - 0.3)
        sides = [length for length, dim in zip(lengths, dims, strict=True) if dim.is_spatial]
        shape = max(sides) / min(sides) if is_cubic and sides else 1.0
        return (round(score, 3), excess, shape, *(-length for length in reversed(lengths)))

    return min(product(*fits), key=cost)


def slab_chunks(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Chunks for an array that is read whole: runs of about a MiB."""
    chunks = list(shape)
    for dim, extent in enumerate(shape):
        row = math.prod(chunks[dim + 1 :]) * itemsize
        chunks[dim] = max(1, min(extent, CHUNK_NBYTES // row))
    return tuple(chunks)


def neutral_num(nbytes: int, ndim: int) -> int:
    """Into how many pieces along each of ``ndim`` dims any mesh may be thought to cut a sample."""
    return next((num for num in (8, 4, 2) if nbytes >= SMALL_BOX_NBYTES * num**ndim), 1)


def _num_touched(span: Span, length: int) -> int:
    return -(-span.stop // length) - span.start // length


def _divisors(number: int) -> set[int]:
    small = {i for i in range(1, math.isqrt(number) + 1) if number % i == 0}
    return small | {number // i for i in small}


def _thinned(lengths: Sequence[int]) -> list[int]:
    """``lengths``, which fall, without those that are nearly the same as another."""
    kept: list[int] = []
    for length in lengths:
        if not kept or length * 1.15 < kept[-1] or length == 1:
            kept.append(length)
    return kept
