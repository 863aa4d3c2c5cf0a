import math
from fractions import Fraction

from hypothesis import given, strategies as st

from hyperslab.layout import AdaptiveWindow, Cuts, Span, UnpaddedStart, Window, output_cuts

EXTENTS = st.integers(1, 30)
SPANS = st.builds(
    lambda start, size: Span(start, start + size), st.integers(0, 12), st.integers(0, 6)
)


@given(EXTENTS, EXTENTS)
def test_an_adaptive_window_reads_its_share_of_the_inputs(extent: int, num: int) -> None:
    window = AdaptiveWindow(extent, num)
    for output in range(num):
        share = Fraction(extent, num)
        expected = Span(math.floor(output * share), math.ceil((output + 1) * share))
        assert window.reads(Span(output, output + 1)) == expected
    assert window.reads(Span(0, num)) == Span(0, extent)
    assert window.reads(Span(num, num)).size == 0


@given(EXTENTS, EXTENTS)
def test_windows_lie_apart_where_none_overlap_and_all_are_equally_long(
    extent: int, num: int
) -> None:
    window = AdaptiveWindow(extent, num)
    reads = [window.reads(Span(o, o + 1)) for o in range(num)]
    lengths = {span.size for span in reads}
    assert window.apart == (len(lengths) == 1 and sum(span.size for span in reads) == extent)


@given(EXTENTS, EXTENTS, st.lists(st.integers(0, 30), max_size=4))
def test_outputs_are_cut_where_their_inputs_are(extent: int, num: int, inner: list[int]) -> None:
    cuts = Cuts((0, *sorted(min(cut, extent) for cut in inner), extent))
    outputs = output_cuts(AdaptiveWindow(extent, num), cuts)
    assert outputs.extent == num
    for own, span in zip(cuts.spans, outputs.spans, strict=True):
        for output in range(*span):
            assert own.start <= Fraction(output * extent, num) < own.stop


@given(st.builds(UnpaddedStart, EXTENTS, st.integers(1, 6), st.integers(0, 9)), SPANS)
def test_padding_before_the_start_is_not_read(window: UnpaddedStart, output: Span) -> None:
    padded = Window(window.kernel, window.stride, window.padding).reads(output)
    reads = window.reads(output)
    assert reads == padded & Span(0, max(0, padded.stop))
    assert window.padding_before(output) == max(0, -padded.start)
