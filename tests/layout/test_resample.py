import math

from hypothesis import given, strategies as st

from hyperslab.layout import Resampling, Span


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


def inputs_of(resampling: Resampling, output: int) -> set[int]:
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
        assert inputs_of(resampling, o) <= set(range(*reads))
        assert resampling.first(o) <= min(inputs_of(resampling, o)) or resampling.first(o) < 0
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
