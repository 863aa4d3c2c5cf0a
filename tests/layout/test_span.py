from hypothesis import given, strategies as st

from hyperslab.layout import Span

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
