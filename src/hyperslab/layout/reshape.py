"""What becomes of a layout when a tensor is seen in another shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from hyperslab.errors import LayoutError
from hyperslab.layout.cuts import Cuts
from hyperslab.layout.layout import Layout, Split


def infer_shape(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """``shape`` with its -1, if any, replaced so that it holds ``numel`` elements.

    >>> infer_shape((2, -1), 12)
    (2, 6)
    """
    known = math.prod(extent for extent in shape if extent != -1)
    unknown = sum(extent == -1 for extent in shape)
    negative = any(extent < -1 for extent in shape)
    if unknown == 1 and known and numel % known == 0 and not negative:
        return tuple(numel // known if extent == -1 else extent for extent in shape)
    if unknown or known != numel or negative:
        raise LayoutError(f"shape {tuple(shape)} does not hold the {numel} elements of the tensor")
    return tuple(shape)


class _Merge(NamedTuple):
    """A run of input dims and the run of output dims with the same elements in the same order."""

    inputs: range
    outputs: range


def _merges(before: Sequence[int], after: Sequence[int]) -> list[_Merge]:
    """The shortest runs of dims of ``before`` and ``after`` that hold equally many elements."""
    merges, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        first_in, first_out = i, j
        size_in = size_out = 1
        while True:
            if i < len(before) and (size_in <= size_out and (i == first_in or size_in < size_out)):
                size_in, i = size_in * before[i], i + 1
            elif j < len(after) and (j == first_out or size_out < size_in):
                size_out, j = size_out * after[j], j + 1
            else:
                break
        merges.append(_Merge(range(first_in, i), range(first_out, j)))
    return merges


@lru_cache(maxsize=4096)
def merges_dims(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether a dim of ``after`` is made of several of ``before`` that are longer than 1."""
    return any(
        sum(before[dim] != 1 for dim in merge.inputs) > 1 for merge in _merges(before, after)
    )


@lru_cache(maxsize=4096)
def plan_reshape(source: Layout, shape: tuple[int, ...]) -> tuple[Layout, Layout]:
    """The layout to bring a tensor to before each rank reshapes its piece, and the layout after.

    A dim stays split where its cuts are also cuts of the new shape: where it is the first of the
    dims it is merged with and the new first dim can be cut at the same elements. Other split dims
    become whole on every rank.
    """
    if 0 in source.shape:
        return source.whole_along(source.split_dims), Layout.unsplit(shape)
    gathered, splits = [], dict[int, Split]()
    for merge in _merges(source.shape, shape):
        # Where two dims lead, the one of extent 1 is soon gathered.
        for dim in sorted(merge.inputs, key=lambda dim: source.shape[dim] == 1):
            if (split := source.splits[dim]) is None:
                continue
            cut = _carried(source, dim, split, shape, merge)
            if cut is None or cut[0] in splits:
                gathered.append(dim)
            else:
                splits[cut[0]] = cut[1]
    before = source.whole_along(gathered)
    return before, Layout(shape, tuple(splits.get(dim) for dim in range(len(shape))))


def _carried(
    source: Layout, dim: int, split: Split, shape: tuple[int, ...], merge: _Merge
) -> tuple[int, Split] | None:
    """The output dim and split that carry on the split of ``dim``, if it leads its merge."""
    if math.prod(source.shape[d] for d in merge.inputs if d < dim) != 1:
        return None
    inner_in = math.prod(source.shape[d] for d in merge.inputs if d > dim)
    lead = next((d for d in merge.outputs if shape[d] > 1), None)
    if lead is None:
        return None
    inner_out = math.prod(shape[d] for d in merge.outputs if d > lead)
    bounds = split.cuts.scaled(inner_in).bounds
    if any(bound % inner_out for bound in bounds):
        return None
    return lead, Split(split.axis, Cuts(tuple(bound // inner_out for bound in bounds)))
