"""Which tiles are picked."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hyperslab.kernels.tiled_conv import Adding, Pairing
from hyperslab.kernels.tiles import TILE_NUMEL, Each, Sliding, Whole, outermost_first, pick_tiles
from hyperslab.layout import Span, Window

examples = settings(max_examples=80, deadline=None)
numbers = st.integers(1, 4)
windows = st.builds(Window, numbers, numbers, st.integers(0, 4), numbers)


def conv_axes(num_samples, channels, filters, extents, window, kind=Sliding):
    spatial = [kind(window, n, window.output_extent(n)) for n in extents]
    return (Each(num_samples), Whole(channels, filters), *spatial)


def sizes(tiles):
    """The elements that the calls read, and those that they make."""
    reads = [math.prod(step.reads.size for step in tile) for tile in tiles]
    return reads, [math.prod(step.makes for step in tile) for tile in tiles]


def test_the_first_convolution_of_cosmoflow_is_cut_along_depth():
    axes = conv_axes(1, 4, 16, (512, 512, 512), Window(3, 1, 1))
    tiles = pick_tiles(axes, (0, 2, 3, 4), TILE_NUMEL)
    depth = [tile[2] for tile in tiles]
    bounds = [0, 128, 256, 384, 512]
    assert [step.own for step in depth] == list(map(Span, bounds, bounds[1:]))
    assert [tuple(step.reads) for step in depth] == [(0, 129), (127, 257), (255, 385), (383, 512)]
    assert [step.drop for step in depth] == [0, 0, 0, 1]
    assert all(step.own == Span(0, 512) == step.reads for tile in tiles for step in tile[3:])


def test_tiles_that_read_no_padding_make_nothing_but_their_own():
    axes = conv_axes(1, 4, 16, (1024, 1024, 1024), Window(3, 1, 1))
    tiles = pick_tiles(axes, (0, 2, 3, 4), 2**29)
    inner = [tile[2] for tile in tiles][1:-1]
    assert all(step.makes == step.own.size == step.reads.size - 2 for step in inner)
    assert all(axes[2].pads(step.own) == 0 for step in inner)
    axes = conv_axes(1, 16, 4, (1024, 1024, 1024), Window(3, 1, 1), Adding)
    inner = [tile[2] for tile in pick_tiles(axes, (0, 2, 3, 4), 2**29)][1:-1]
    assert all(step.makes == step.own.size == step.reads.size - 2 for step in inner)


def test_samples_are_cut_before_anything_else():
    axes = conv_axes(6, 4, 8, (16, 16, 16), Window(3, 1, 1))
    tiles = pick_tiles(axes, (0, 2, 3, 4), 2 * 8 * 16**3)
    assert [tile[0].own for tile in tiles] == [Span(0, 2), Span(2, 4), Span(4, 6)]
    assert all(tile[2].own == Span(0, 16) for tile in tiles)


def test_what_one_index_makes_too_large_is_cut_along_the_next_dim():
    axes = conv_axes(1, 1, 2, (4, 100, 8), Window(1))
    tiles = pick_tiles(axes, (0, 2, 3, 4), 2 * 50 * 8)
    assert len(tiles) == 8
    assert {tile[2].own.size for tile in tiles} == {1}
    assert {tile[3].own for tile in tiles} == {Span(0, 50), Span(50, 100)}


def test_work_that_cannot_be_cut_so_small_is_cut_as_small_as_it_can():
    tiles = pick_tiles((Each(2), Whole(5, 7), Each(3)), (0, 2), limit=4)
    assert len(tiles) == 6


@examples
@given(windows, st.integers(1, 30), st.sampled_from([Sliding, Pairing]), st.data())
def test_tiles_of_windows_own_every_output_and_read_all_that_it_needs(window, extent, kind, data):
    num = window.output_extent(extent)
    if num < 1:
        return
    axis = kind(window, extent, num)
    limit = data.draw(st.integers(1, extent + 8))
    tiles = [step for (step,) in pick_tiles((axis,), (0,), limit)]
    assert [i for step in tiles for i in range(*step.own)] == list(range(num))
    for step in tiles:
        needs = window.reads(step.own) & Span(0, extent)
        assert step.reads.contains(needs)
        assert 0 <= step.drop <= step.makes - step.own.size
        if kind is Sliding:
            assert step.reads.size
            assert Span(0, extent).contains(step.reads)
            first = step.reads.start - axis.pads(step.own)  # that the call's first output reads
            assert first == (step.own.start - step.drop) * window.stride - window.padding


@examples
@given(windows, st.integers(1, 30), st.data())
def test_tiles_of_sums_own_every_output_and_read_all_that_adds_to_it(window, num_inputs, data):
    extent = (num_inputs - 1) * window.stride - 2 * window.padding + window.reach + 1
    extent += data.draw(st.integers(0, max(window.stride, window.dilation) - 1))
    if extent < 1:
        return
    axis = Adding(window, num_inputs, extent)
    tiles = [step for (step,) in pick_tiles((axis,), (0,), data.draw(st.integers(1, extent + 8)))]
    assert [i for step in tiles for i in range(*step.own)] == list(range(extent))
    for step in tiles:
        adds = [i for i in range(num_inputs) if (window.reads(Span(i, i + 1)) & step.own).size]
        assert all(step.reads.start <= i < step.reads.stop for i in adds)
        assert 0 <= step.drop <= step.makes - step.own.size
        assert max(axis.pads(step.own)[1], 0) < max(window.stride, window.dilation)


@examples
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)),
    st.lists(st.integers(8, 20), min_size=1, max_size=3),
    st.builds(Window, st.integers(1, 3), st.integers(1, 2), st.integers(0, 1)),
    st.sampled_from([Sliding, Adding, Pairing]),
    st.integers(2, 30),
)
def test_no_call_passes_the_limit_and_there_are_few(channels, extents, window, kind, share):
    axes = conv_axes(*channels, extents, window, kind)
    spatial = tuple(range(2, 2 + len(extents)))
    (reads,), (makes,) = sizes(pick_tiles(axes, (), 1))
    limit = max(reads, makes) // share
    if limit < 6 ** len(extents) * max(channels):  # windows and what is dropped take that much
        return
    tiles = pick_tiles(axes, (0, *spatial), limit)
    assert max(map(max, sizes(tiles))) <= limit
    assert len(tiles) <= share * 4 ** len(extents)


@pytest.mark.parametrize(
    ("memory_format", "order"),
    [(torch.contiguous_format, (0, 1, 2, 3, 4)), (torch.channels_last_3d, (0, 2, 3, 4, 1))],
)
def test_dims_are_cut_from_the_outermost_in_memory(memory_format, order):
    x = torch.empty(2, 3, 4, 5, 6).to(memory_format=memory_format)
    assert outermost_first(x) == order
    assert outermost_first(x, without=[1]) == (0, 2, 3, 4)
