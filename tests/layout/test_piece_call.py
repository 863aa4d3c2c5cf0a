from hypothesis import assume, given, strategies as st

from hyperslab.layout import (
    Box,
    Layout,
    Route,
    Span,
    Step,
    TransposedWindow,
    Window,
    plan_piece_call,
    plan_transposed_call,
)

small = st.integers(1, 4)
windows = st.builds(Window, small, small, st.integers(0, 3), small, st.integers(0, 2))
transposed = st.builds(TransposedWindow, small, small, st.integers(0, 2), small, st.integers(0, 2))


@st.composite
def calls(draw, kinds):
    """A window, an extent, some outputs, and a span that holds at least what they need."""
    window, extent = draw(kinds), draw(st.integers(1, 20))
    num = window.output_extent(extent)
    assume(num > 0)
    first = draw(st.integers(0, num - 1))
    outputs = Span(first, draw(st.integers(first + 1, num)))
    steps = Step((1, 1, extent)), Step((1, 1, num), (0,), (None, None, window))
    route = Route(steps, 1, Layout.unsplit((1, 1, num)))
    needs = route.needs(Box.of((0, 1), (0, 1), outputs))[0].spans[2]
    more = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    return (
        window,
        extent,
        outputs,
        Span(needs.start - more[0], needs.stop + more[1]) & Span(0, extent),
    )


@given(calls(windows))
def test_a_call_computes_outputs_from_what_they_read_in_the_whole_tensor(case):
    window, extent, outputs, held = case
    call = plan_piece_call(window, outputs, extent)
    assert call.outputs == outputs
    assert held.contains(call.reads)
    for place, output in enumerate(range(*call.outputs), start=call.drop):
        begins = call.reads.start - (window.padding if call.at_end else 0)
        assert begins + place * window.stride == output * window.stride - window.padding
        reads = window.reads(Span(output, output + 1))
        assert call.reads.contains(reads & Span(0, extent))
        assert call.at_end or reads == reads & Span(0, extent)


@given(calls(transposed))
def test_a_transposed_call_computes_outputs_from_all_that_add_to_them(case):
    window, extent, outputs, held = case
    call = plan_transposed_call(window, held, extent)
    assert call.outputs.contains(outputs)
    written = window.writes(held)
    more = window.output_padding if call.at_end else 0
    assert Span(written.start, written.stop + more).contains(call.outputs)
    assert call.drop == call.outputs.start - written.start
    adding = [i for i in range(extent) if window.writes(Span(i, i + 1)) & call.outputs != (0, 0)]
    for output in range(*call.outputs):
        taps = [(output + window.padding - i * window.stride, i) for i in adding]
        adds = [i for tap, i in taps if 0 <= tap <= window.reach and tap % window.dilation == 0]
        assert all(held.start <= i < held.stop for i in adds)
