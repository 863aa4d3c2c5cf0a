from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from hyperslab.layout import Box, Span

EDGE = 6
"""Boxes are compared as masks of an array that holds ``-EDGE:EDGE`` along every dim."""

ANY = st.tuples(st.integers(-EDGE, EDGE), st.integers(-EDGE, EDGE))
WIDE = st.tuples(st.integers(-EDGE, 0), st.integers(1, EDGE))
BOUNDS = st.one_of(WIDE, WIDE, WIDE, ANY)
"""Mostly wide, so that boxes of several dims meet; some stop before they start and are empty."""


def boxes(num_dims: int) -> st.SearchStrategy[Box]:
    return st.lists(BOUNDS, min_size=num_dims, max_size=num_dims).map(lambda pairs: Box.of(*pairs))


PAIRS = st.integers(0, 3).flatmap(lambda num_dims: st.tuples(boxes(num_dims), boxes(num_dims)))


def around(num_dims: int) -> Box:
    return Box.of(*[(-EDGE, EDGE)] * num_dims)


def mask(box: Box) -> NDArray[np.bool_]:
    """True where ``box`` has an index."""
    outer = around(len(box.spans))
    found = np.ones(outer.shape, bool)
    for index, span in zip(np.indices(outer.shape, sparse=True), box.spans, strict=True):
        found &= (span.start <= index - EDGE) & (index - EDGE < span.stop)
    return found


def num_boxes_over(pieces: Iterable[Box], num_dims: int) -> NDArray[np.int64]:
    """In how many of ``pieces`` each index lies."""
    count = np.zeros(around(num_dims).shape, np.int64)
    for piece in pieces:
        count += mask(piece)
    return count


@given(PAIRS)
def test_shape_and_number_of_elements_are_those_of_the_mask(pair: tuple[Box, Box]) -> None:
    box, _ = pair
    assert box.numel == mask(box).sum()
    assert mask(box)[box.slices_in(around(len(box.spans)))].shape == box.shape or not box


@given(PAIRS)
def test_a_box_is_true_where_it_has_an_index(pair: tuple[Box, Box]) -> None:
    box, _ = pair
    assert bool(box) == mask(box).any()


@given(PAIRS)
def test_the_intersection_is_that_of_the_masks(pair: tuple[Box, Box]) -> None:
    a, b = pair
    np.testing.assert_array_equal(mask(a & b), mask(a) & mask(b))


@given(PAIRS)
def test_a_box_contains_another_where_its_mask_does(pair: tuple[Box, Box]) -> None:
    a, b = pair
    assert a.contains(b) == (not (mask(b) & ~mask(a)).any())


@given(PAIRS)
def test_the_faces_around_a_hole_are_disjoint_and_cover_the_rest(pair: tuple[Box, Box]) -> None:
    box, hole = pair
    faces = box.minus(hole)
    expected = mask(box) & ~mask(hole)
    np.testing.assert_array_equal(num_boxes_over(faces, len(box.spans)), expected)
    assert all(faces), "a face without any index is not worth a message"
    assert len(faces) <= max(1, 2 * len(box.spans))


@given(PAIRS)
def test_slices_pick_a_box_from_an_array_that_holds_an_outer_one(pair: tuple[Box, Box]) -> None:
    a, outer = pair
    inner = a & outer
    world = np.arange(around(len(outer.spans)).numel).reshape(around(len(outer.spans)).shape)
    held = world[outer.slices_in(around(len(outer.spans)))]
    picked = held[inner.slices_in(outer)]
    np.testing.assert_array_equal(np.sort(picked, axis=None), world[mask(inner)])
    assert picked.shape == inner.shape or not outer


@given(st.lists(st.integers(0, 4), max_size=4))
def test_the_whole_box_of_a_shape_has_that_shape(shape: list[int]) -> None:
    assert Box.whole(shape).shape == tuple(shape)
    assert all(span.start == 0 for span in Box.whole(shape).spans)


def test_one_span_is_replaced_and_the_others_stay() -> None:
    box = Box.of((0, 4), (2, 5), (1, 3))
    assert box.with_span(1, Span(7, 9)) == Box.of((0, 4), (7, 9), (1, 3))


def test_boxes_of_different_numbers_of_dims_do_not_mix() -> None:
    line, plane = Box.of((0, 4)), Box.of((0, 4), (0, 4))
    with pytest.raises(ValueError, match="zip"):
        line & plane
    with pytest.raises(ValueError, match="zip"):
        line.contains(plane)
    with pytest.raises(ValueError, match="zip"):
        line.slices_in(plane)


NEAR = st.integers(-6, 12)
SPANS = st.builds(Span, NEAR, NEAR)
"""Some of them stop before they start: they are empty."""


def indices(span: Span) -> set[int]:
    return set(range(span.start, span.stop))


@given(SPANS)
def test_the_size_of_a_span_is_the_number_of_its_indices(span: Span) -> None:
    assert span.size == len(indices(span))


@given(SPANS, SPANS)
def test_the_intersection_holds_the_indices_of_both(a: Span, b: Span) -> None:
    assert indices(a & b) == indices(a) & indices(b)


@given(SPANS, SPANS)
def test_an_intersection_never_stops_before_it_starts(a: Span, b: Span) -> None:
    assert (a & b).start <= (a & b).stop


@given(SPANS, SPANS)
def test_a_span_contains_another_where_it_has_all_of_its_indices(a: Span, b: Span) -> None:
    assert a.contains(b) == (indices(b) <= indices(a))


@given(SPANS, st.integers(0, 5))
def test_a_slice_picks_the_span_from_an_array_that_begins_at_the_origin(
    span: Span, before: int
) -> None:
    origin = span.start - before
    array = list(range(origin, 20))
    assert array[span.slice_from(origin)] == sorted(indices(span))
