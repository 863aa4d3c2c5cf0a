"""Which channels and filters belong together, against a list of all pairs."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hyperslab.layout import (
    Box,
    Cuts,
    Grid,
    Groups,
    Layout,
    Span,
    Split,
    cut_in_chunks,
    plan_gather_channels,
    plan_scatter_filters,
)

GROUPS = st.builds(
    lambda num, channels, filters: Groups(num * channels, num * filters, num),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 4),
)


def pairs(groups):
    """Whether a filter, by rows, reads a channel."""
    of_filters = np.arange(groups.filters) // (groups.filters // groups.num)
    of_channels = np.arange(groups.channels) // (groups.channels // groups.num)
    return of_filters[:, None] == of_channels[None]


def spans(extent):
    return st.lists(st.integers(0, extent), min_size=2, max_size=2).map(lambda s: Span(*sorted(s)))


@given(GROUPS, st.data())
def test_filters_read_the_channels_of_their_groups(groups, data):
    filters = data.draw(spans(groups.filters))
    read = np.flatnonzero(pairs(groups)[filters.start : filters.stop].any(0))
    assert list(range(*groups.reads(filters))) == list(read)


@given(GROUPS, st.data())
def test_channels_add_to_the_filters_of_their_groups(groups, data):
    channels = data.draw(spans(groups.channels))
    written = np.flatnonzero(pairs(groups)[:, channels.start : channels.stop].any(1))
    assert list(range(*groups.writes(channels))) == list(written)


def pairs_of(runs, groups):
    """How often runs compute each pair, where a run has equal groups of its own."""
    found = np.zeros((groups.filters, groups.channels), int)
    for run in runs:
        own = Groups(run.channels.size, run.filters.size, run.num_groups)
        found[run.filters.start : run.filters.stop, run.channels.start : run.channels.stop] += (
            pairs(own)
        )
    return found


@given(GROUPS, st.data())
def test_runs_of_filters_compute_each_pair_once(groups, data):
    filters = data.draw(spans(groups.filters))
    runs = groups.runs_of_filters(filters)
    due = pairs(groups) & np.isin(np.arange(groups.filters), range(*filters))[:, None]
    assert np.array_equal(pairs_of(runs, groups), due)
    assert [f for run in runs for f in range(*run.filters)] == list(range(*filters))
    assert len(runs) <= 3


@given(GROUPS, st.data())
def test_runs_of_channels_compute_each_pair_once(groups, data):
    channels = data.draw(spans(groups.channels))
    runs = groups.runs_of_channels(channels)
    due = pairs(groups) & np.isin(np.arange(groups.channels), range(*channels))
    assert np.array_equal(pairs_of(runs, groups), due)
    assert len(runs) <= 3


def test_whole_groups_share_one_call():
    depthwise = Groups(channels=8, filters=16, num=8)
    ((channels, filters, num_groups),) = depthwise.runs_of_filters(Span(4, 12))
    assert (channels, filters, num_groups) == (Span(2, 6), Span(4, 12), 4)


@given(GROUPS, st.integers(2, 4), st.data())
def test_messages_bring_what_filters_read_and_return_what_channels_made(groups, num, data):
    """Every rank gets each channel that it lacks once; each filter's parts go to its owner."""
    grid = Grid((1, num, 1, 1, 1))
    bounds = st.lists(st.integers(0, groups.channels), min_size=num - 1, max_size=num - 1)
    channels = Split("channel", Cuts((0, *sorted(data.draw(bounds)), groups.channels)))
    filters = Split("channel", cut_in_chunks(groups.filters, num))
    source = Layout((2, groups.channels, 3), (None, channels, None))
    output = Layout((2, groups.filters, 3), (None, filters, None))
    for rank, coords in enumerate(grid.coords):
        gather = plan_gather_channels(grid, rank, source, groups, filters)
        wanted = groups.reads(filters.cuts.spans[coords["channel"]])
        assert gather.wanted == source.box(coords).with_span(1, wanted)
        got = np.zeros((2, groups.channels, 3), int)
        own = gather.owned & gather.wanted
        for box in [*([own] if own else []), *(message.box for message in gather.receives)]:
            got[box.slices_in(Box.whole(got.shape))] += 1
        due = np.zeros_like(got)
        due[:, wanted.start : wanted.stop] = 1
        assert np.array_equal(got, due)
        scatter = plan_scatter_filters(grid, rank, output, groups, channels)
        assert scatter.owned == output.box(coords)
        assert scatter.wanted.spans[1] == groups.writes(channels.cuts.spans[coords["channel"]])


@pytest.mark.parametrize("extent", range(9))
@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_chunks_are_those_of_torch(extent, num):
    torch = pytest.importorskip("torch")
    sizes = [len(chunk) for chunk in torch.arange(extent).chunk(num)]
    due = sizes + [0] * (num - len(sizes))
    assert [span.size for span in cut_in_chunks(extent, num).spans] == due
