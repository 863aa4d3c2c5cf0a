import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import assume, example, given, strategies as st

from hyperslab.errors import LayoutError
from hyperslab.layout import (
    AdaptiveWindow,
    Cuts,
    FoldedRows,
    Reads,
    Resampling,
    Span,
    TransposedWindow,
    UnpaddedStart,
    Window,
    output_cuts,
)

KERNELS = STRIDES = st.integers(1, 6)
DILATIONS = st.integers(1, 4)

WINDOWS = st.builds(
    Window, KERNELS, STRIDES, st.integers(-3, 20), DILATIONS, extra=st.integers(-2, 5)
)
"""Padding may be longer than the reach; below 0 it crops, as ``F.pad`` does."""

TRANSPOSED = st.builds(
    TransposedWindow, KERNELS, STRIDES, st.integers(0, 8), DILATIONS, st.integers(0, 5)
)
SPANS = st.builds(
    lambda start, size: Span(start, start + size), st.integers(-8, 12), st.integers(0, 6)
)
FULL_SPANS = SPANS.filter(lambda span: span.size > 0)


@st.composite
def any_cuts(draw: st.DrawFn) -> Cuts:
    """One to six pieces, some of them empty."""
    inner, extent = draw(st.lists(st.integers(0, 30), max_size=5)), draw(st.integers(0, 30))
    return Cuts((0, *sorted(min(cut, extent) for cut in inner), extent))


def inputs_of(window: Window, output: int) -> list[int]:
    """The inputs under the kernel's taps, padding included."""
    first = output * window.stride - window.padding
    return [first + tap * window.dilation for tap in range(window.kernel)]


def outputs_of(window: TransposedWindow, index: int) -> list[int]:
    first = index * window.stride - window.padding
    return [first + tap * window.dilation for tap in range(window.kernel)]


def hull(indices: list[int]) -> Span:
    return Span(min(indices), max(indices) + 1)


@given(WINDOWS, st.integers(0, 30))
def test_there_are_as_many_outputs_as_fit_the_padded_input(window: Window, extent: int) -> None:
    end = extent + window.padding + window.extra
    fitting = 0
    while max(inputs_of(window, fitting)) < end:
        fitting += 1
    assert max(0, window.output_extent(extent)) == fitting


@given(WINDOWS, SPANS)
def test_outputs_read_exactly_the_hull_of_the_taps(window: Window, output: Span) -> None:
    touched = [i for o in range(output.start, output.stop) for i in inputs_of(window, o)]
    if touched:
        assert window.reads(output) == hull(touched)
    else:
        assert window.reads(output).size == 0


@given(WINDOWS, any_cuts())
def test_an_output_goes_to_the_owner_of_the_middle_of_its_inputs(
    window: Window, cuts: Cuts
) -> None:
    extent = window.output_extent(cuts.extent)
    assume(extent >= 0)
    middles = [inputs_of(window, o)[0] + window.reach // 2 for o in range(extent)]
    inner = [sum(middle < cut for middle in middles) for cut in cuts.bounds[1:-1]]
    assert output_cuts(window, cuts).bounds == (0, *inner, extent)


@given(st.one_of(WINDOWS, TRANSPOSED), any_cuts())
@example(Window(1), Cuts((0, 0, 0, 0)))
@example(Window(7, 5, 30), Cuts((0, 0, 3, 3, 3)))
def test_output_cuts_rise_from_0_to_the_output_extent(window: Reads, cuts: Cuts) -> None:
    extent = window.output_extent(cuts.extent)
    assume(extent >= 0)
    bounds = output_cuts(window, cuts).bounds
    assert (bounds[0], bounds[-1], len(bounds)) == (0, extent, len(cuts.bounds))
    assert all(a <= b for a, b in pairwise(bounds))


@given(KERNELS, DILATIONS, any_cuts())
def test_same_padding_does_not_move_the_cuts(kernel: int, dilation: int, cuts: Cuts) -> None:
    reach = dilation * (kernel - 1)
    window = Window(kernel, 1, reach // 2, dilation, extra=reach % 2)
    assert output_cuts(window, cuts) == cuts


@given(KERNELS, any_cuts())
def test_a_pool_over_aligned_pieces_reads_no_halo(kernel: int, cuts: Cuts) -> None:
    window = Window(kernel, stride=kernel)
    aligned = cuts.scaled(kernel)
    assert output_cuts(window, aligned) == cuts
    assert [window.reads(span) for span in cuts.spans] == list(aligned.spans)


@given(any_cuts(), st.integers(-9, 9), st.integers(-9, 9))
def test_a_window_of_one_index_pads_the_first_and_the_last_piece(
    cuts: Cuts, below: int, above: int
) -> None:
    assume(cuts.extent + below + above >= 0)
    padded = output_cuts(Window(1, padding=below, extra=above - below), cuts)
    extent = cuts.extent + below + above
    inner = [min(max(0, cut + below), extent) for cut in cuts.bounds[1:-1]]
    assert padded.bounds == (0, *inner, extent)


@pytest.mark.parametrize(
    ("window", "words"),
    [
        (Window(9), r"kernel=9.* does not fit an extent of 4: .* an extent of -4"),
        (Window(1, padding=-3), r"padding=-3.* does not fit an extent of 4: .* an extent of -2"),
        (TransposedWindow(1, padding=3), r"padding=3.* does not fit an extent of 4"),
    ],
    ids=str,
)
def test_a_window_that_does_not_fit_is_refused_by_its_numbers(window: Reads, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        output_cuts(window, Cuts((0, 2, 4)))


@given(TRANSPOSED, st.integers(1, 12))
def test_a_transposed_window_has_the_outputs_it_adds_to_less_the_padding(
    window: TransposedWindow, extent: int
) -> None:
    written = hull([o for i in range(extent) for o in outputs_of(window, i)])
    stop = written.stop - window.padding + window.output_padding
    assert window.output_extent(extent) == stop


@given(TRANSPOSED, st.integers(1, 12))
def test_a_window_undoes_the_extent_of_its_transposed_window(
    window: TransposedWindow, extent: int
) -> None:
    assume(window.output_padding < window.stride)
    back = Window(window.kernel, window.stride, window.padding, window.dilation)
    assert back.output_extent(window.output_extent(extent)) == extent


@given(TRANSPOSED, SPANS)
def test_inputs_write_exactly_the_hull_of_their_taps(
    window: TransposedWindow, inputs: Span
) -> None:
    touched = [o for i in range(inputs.start, inputs.stop) for o in outputs_of(window, i)]
    if touched:
        assert window.writes(inputs) == hull(touched)
    else:
        assert window.writes(inputs).size == 0


@given(TRANSPOSED, FULL_SPANS)
def test_outputs_read_every_input_that_adds_to_them(window: TransposedWindow, output: Span) -> None:
    read = window.reads(output)
    for i in range(-60, 60):
        if any(output.start <= o < output.stop for o in outputs_of(window, i)):
            assert read.start <= i < read.stop


@given(TRANSPOSED, FULL_SPANS)
def test_the_inputs_that_are_read_write_all_outputs(window: TransposedWindow, output: Span) -> None:
    assert window.writes(window.reads(output)).contains(output)


@given(TRANSPOSED, FULL_SPANS)
def test_no_input_at_either_end_is_read_in_vain(window: TransposedWindow, output: Span) -> None:
    read = window.reads(output)
    fewer = {
        read.start: Span(read.start + 1, read.stop),
        read.stop - 1: Span(read.start, read.stop - 1),
    }
    for end, rest in fewer.items():
        reaches_output = (hull(outputs_of(window, end)) & output).size > 0
        assert reaches_output or not window.writes(rest).contains(output)


@given(TRANSPOSED, st.integers(-8, 12))
def test_no_outputs_read_nothing(window: TransposedWindow, start: int) -> None:
    assert window.reads(Span(start, start)).size == 0


def test_a_transposed_convolution_that_doubles_its_input_doubles_the_cuts() -> None:
    window = TransposedWindow(3, stride=2, padding=1, output_padding=1)
    assert output_cuts(window, Cuts((0, 4, 8))).bounds == (0, 8, 16)


@given(TRANSPOSED, st.integers(0, 12))
def test_an_input_owns_the_outputs_in_the_middle_of_those_it_adds_to(
    window: TransposedWindow, index: int
) -> None:
    written = hull(outputs_of(window, index))
    own = Span(window.output_cut(index), window.output_cut(index + 1))
    assert own.size == window.stride
    assert abs((own.start - written.start) - (written.stop - own.stop)) <= 1


EXTENTS = st.integers(1, 30)
POOLED = st.builds(
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


@given(st.builds(UnpaddedStart, EXTENTS, st.integers(1, 6), st.integers(0, 9)), POOLED)
def test_padding_before_the_start_is_not_read(window: UnpaddedStart, output: Span) -> None:
    padded = Window(window.kernel, window.stride, window.padding).reads(output)
    reads = window.reads(output)
    assert reads == padded & Span(0, max(0, padded.stop))
    assert window.padding_before(output) == max(0, -padded.start)


@st.composite
def resamplings(draw: st.DrawFn) -> Resampling:
    extent, num = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    shifts = draw(st.booleans())
    step = extent / num
    if shifts:
        step = draw(st.sampled_from([0.125, 0.25, 0.5, 2.0, 4.0]))
        extent = max(extent, math.ceil(step))
        num = int(extent / step)
    offset = draw(st.sampled_from([0.0, step / 2, step / 2 - 0.5]))
    below, above = draw(st.sampled_from([(0, 0), (0, 1), (1, 2)]))
    return Resampling(extent, num, step, offset, below, above, shifts)


def inputs_around(resampling: Resampling, output: int) -> set[int]:
    """The inputs around the output's place; the outermost stand for those beyond."""
    place = math.floor(output * resampling.step + resampling.offset)
    around = range(place - resampling.below, place + resampling.above + 1)
    return {min(max(0, i), resampling.extent - 1) for i in around}


@given(resamplings(), st.data())
def test_outputs_read_what_lies_around_them(resampling: Resampling, data: st.DataObject) -> None:
    bounds = st.integers(0, resampling.num)
    output = Span(*sorted((data.draw(bounds), data.draw(bounds))))
    reads = resampling.reads(output)
    assert 0 <= reads.start <= reads.stop <= resampling.extent
    for o in range(*output):
        assert inputs_around(resampling, o) <= set(range(*reads))
        assert resampling.first(o) <= min(inputs_around(resampling, o)) or resampling.first(o) < 0
    if not output.size:
        assert not reads.size


@given(resamplings().filter(lambda resampling: resampling.shifts), st.data())
def test_a_window_that_shifts_makes_all_of_its_outputs(
    resampling: Resampling, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, resampling.num - 1))
    output = Span(start, data.draw(st.integers(start + 1, resampling.num)))
    reads = resampling.reads(output)
    first = reads.start / resampling.step
    assert first == int(first) <= output.start
    assert first + int(reads.size / resampling.step) >= output.stop


ROWS = st.builds(
    TransposedWindow, st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(1, 2)
)


@given(ROWS, st.integers(1, 6), st.integers(1, 6))
def test_rows_read_whole_rows_of_patches(
    rows: TransposedWindow, num_across: int, num_rows: int
) -> None:
    folded = FoldedRows(rows, num_across)
    height = folded.output_extent(num_rows * num_across)
    assert height == rows.output_extent(num_rows)
    for row in range(height):
        patches, columns = rows.reads(Span(row, row + 1)), folded.reads(Span(row, row + 1))
        assert columns == Span(patches.start * num_across, patches.stop * num_across)


@given(ROWS, st.integers(1, 6), st.integers(0, 9))
def test_rows_are_cut_where_rows_of_patches_are(
    rows: TransposedWindow, num_across: int, cut: int
) -> None:
    assert FoldedRows(rows, num_across).output_cut(cut * num_across) == rows.output_cut(cut)
