"""Slices, mirrors and lists of indices: who reads what, against numpy."""

import math
from itertools import product

import numpy as np
from hypothesis import given, strategies as st

from hyperslab.layout import (
    AXES,
    Box,
    Chosen,
    Cuts,
    Entry,
    Grid,
    Layout,
    Span,
    Split,
    Strided,
    output_cuts,
    plan_index,
)

GRIDS = [Grid(sizes) for sizes in product((1, 2, 3), repeat=len(AXES)) if math.prod(sizes) <= 8]


@st.composite
def cuts(draw: st.DrawFn, extent: int, num: int) -> Cuts:
    inner = draw(st.lists(st.integers(0, extent), min_size=num - 1, max_size=num - 1))
    return Cuts((0, *sorted(inner), extent))


@st.composite
def picks(draw: st.DrawFn) -> tuple[int, Strided | Chosen]:
    extent = draw(st.integers(1, 12))
    if draw(st.booleans()):
        indices = draw(st.lists(st.integers(0, extent - 1), max_size=12))
        block = draw(st.sampled_from([n for n in range(1, 5) if len(indices) % n == 0]))
        return extent, Chosen(tuple(indices), block)
    run = range(extent)[draw(st.slices(extent))]
    return extent, Strided(run)


@given(picks(), st.data())
def test_every_output_is_read_from_the_span_that_its_rank_asks_for(
    drawn: tuple[int, Strided | Chosen], data: st.DataObject
) -> None:
    extent, pick = drawn
    found = output_cuts(pick, data.draw(cuts(extent, data.draw(st.integers(1, 4)))))
    assert found.extent == pick.output_extent(extent) == len(pick.indices)
    for span in found.spans:
        reads = pick.reads(span)
        picked = pick.indices[span.start : span.stop]
        assert all(reads.start <= index < reads.stop for index in picked)
        assert reads.size == (max(picked) - min(picked) + 1 if picked else 0)


@given(picks(), st.data())
def test_ascending_indices_stay_with_their_owners(
    drawn: tuple[int, Strided | Chosen], data: st.DataObject
) -> None:
    extent, pick = drawn
    ascending = (
        Chosen(tuple(sorted(pick.indices)))
        if isinstance(pick, Chosen)
        else Strided(pick.indices if pick.indices.step > 0 else pick.indices[::-1])
    )
    owned = data.draw(cuts(extent, 3))
    for mine, output in zip(owned.spans, output_cuts(ascending, owned).spans, strict=True):
        assert mine.contains(ascending.reads(output))


def test_blocks_of_outputs_are_not_cut() -> None:
    pick = Chosen((0, 5, 1, 6, 2, 7), block=2)
    assert output_cuts(pick, Cuts((0, 1, 8))).bounds == (0, 0, 6)
    assert output_cuts(pick, Cuts((0, 3, 8))).bounds == (0, 2, 6)
    assert pick.reads(Span(2, 4)) == Span(1, 7)


@st.composite
def indices(draw: st.DrawFn) -> tuple[Grid, Layout, tuple[Entry, ...]]:
    grid = draw(st.sampled_from(GRIDS))
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    axes = draw(st.permutations((*grid.long_axes, *[None] * len(shape))))
    splits = [
        Split(axis, draw(cuts(extent, grid.size(axis)))) if axis else None
        for axis, extent in zip(axes, shape, strict=False)
    ]
    entries: list[Entry] = []
    for extent in shape:
        entries += [None] * draw(st.integers(0, 1))
        if extent and draw(st.booleans()):
            entries.append(draw(st.integers(0, extent - 1)))
        else:
            part = draw(st.slices(extent))
            step = abs(part.step or 1)
            entries.append(range(*slice(part.start, part.stop, step).indices(extent)))
    return grid, Layout(shape, tuple(splits)), tuple(entries)


@given(indices())
def test_an_index_of_the_pieces_gives_the_pieces_of_the_index(
    drawn: tuple[Grid, Layout, tuple[Entry, ...]],
) -> None:
    grid, source, entries = drawn
    array = np.arange(math.prod(source.shape)).reshape(source.shape)
    slices = [
        slice(entry.start, entry.stop, entry.step) if isinstance(entry, range) else entry
        for entry in (range(0) if isinstance(e, range) and not e else e for e in entries)
    ]
    expected = array[tuple(slices)]
    for rank, coords in enumerate(grid.coords):
        plan = plan_index(grid, rank, source, entries)
        assert plan.output.shape == expected.shape
        piece = array[source.box(coords).slices_in(Box.whole(source.shape))]
        mine = expected[plan.output.box(coords).slices_in(Box.whole(expected.shape))]
        if not plan.moves:
            np.testing.assert_array_equal(piece[plan.direct], mine)
            continue
        narrowed = array[plan.before]
        fetched = narrowed[plan.exchange.wanted.slices_in(Box.whole(narrowed.shape))]
        np.testing.assert_array_equal(fetched[plan.after], mine)
