"""How small data will be, found by compressing a little of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hyperslab.io.dataset import Dataset
from hyperslab.io.engine.buffers import empty_aligned
from hyperslab.io.repack.plan import ArrayPlan, filter_options
from hyperslab.layout import Box, Span

NUM_CHUNKS = 4
MARGIN = 1.2
"""What other files may need beyond what the first tells."""


def estimated_ratio(dataset: Dataset, plans: Sequence[ArrayPlan], compression: str) -> float:
    """The bytes on disk for a byte in memory, from a few chunks of the first file."""
    plan = plans[0]
    if compression == "none" or plan.chunks is None or not len(dataset):
        return 1.0
    options = filter_options(compression)
    reader = dataset.reader(0, plan.name)
    total = stored = 0
    for number in range(NUM_CHUNKS):
        box = _chunk_at(plan, reader.shape, (number + 0.5) / NUM_CHUNKS)
        data = empty_aligned(box.shape, reader.dtype)
        reader.read(box, data)
        total += data.nbytes
        stored += _stored_nbytes(data.transpose(plan.order), options)
    return min(1.0, MARGIN * stored / total)


def _chunk_at(plan: ArrayPlan, shape: Sequence[int], place: float) -> Box:
    """A chunk that lies ``place`` of the way along each dim, in the source's order."""
    assert plan.chunks is not None
    spans = {}
    for dim, length in zip(plan.order, plan.chunks, strict=True):
        start = math.floor(shape[dim] * place) // length * length
        spans[dim] = Span(start, min(shape[dim], start + length))
    return Box(tuple(spans[dim] for dim in range(len(shape))))


def _stored_nbytes(data: Any, options: dict[str, Any]) -> int:
    import h5py

    with h5py.File("estimate.h5", "w", driver="core", backing_store=False) as file:
        new = file.create_dataset("data", data=data, chunks=data.shape, **options)
        return int(new.id.get_storage_size())
