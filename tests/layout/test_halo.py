import pytest

from hyperslab.layout import Grid, Layout, Span, Split, Window, cut_evenly, plan_halo

WHOLE = Span(0, 29)
WINDOWS = [
    Window(kernel, stride, padding, dilation)
    for kernel in (1, 2, 3, 4)
    for stride in (1, 2, 3)
    for padding in range(kernel)
    for dilation in (1, 2)
]


def plans(window):
    """Those of three ranks along one dim."""
    layout = Layout((1, 2, WHOLE.stop), (None, None, Split("depth", cut_evenly(WHOLE.stop, 3))))
    return [plan_halo(Grid((1, 1, 3, 1, 1)), rank, layout, (window,)) for rank in range(3)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_the_call_on_a_piece_makes_the_outputs_of_its_rank(window):
    for plan in plans(window):
        (padding,), (*_, kept) = plan.interior.padding, plan.interior.output
        first_read = plan.exchange.owned.spans[2].start - padding + kept.start * window.stride
        assert padding >= 0
        assert first_read == plan.exchange.wanted.spans[2].start


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_outputs_that_read_what_other_ranks_hold_are_in_strips(window):
    for plan in plans(window):
        own, (*_, kept) = plan.exchange.owned.spans[2], plan.interior.output
        stripped = {n for strip in plan.strips for n in range(99)[strip.output[2]]}
        for number in range(kept.stop - kept.start):
            start = plan.exchange.wanted.spans[2].start + number * window.stride
            reads = Span(start, start + window.reach + 1) & WHOLE
            assert own.contains(reads) != (number in stripped)
