import math

import pytest

from hyperslab.layout import (
    Box,
    Grid,
    Layout,
    Route,
    Span,
    Split,
    Step,
    Window,
    cut_evenly,
    plan_chain,
)
from hyperslab.layout.chain import cut_tiles

CONV, POOL = Window(3, 1, 1), Window(3, 2, 1)


def conv_and_pool(size, channels=8, samples=1):
    """A convolution and a pool of ``size`` by ``size``, and a sum of the pool and a part of it."""
    steps = [
        Step((samples, 2, size, size)),
        Step((samples, channels, size, size), (0,), (None, None, CONV, CONV)),
        Step((samples, channels, size // 2, size // 2), (1,), (None, None, POOL, POOL)),
        Step((samples, channels, size // 2, 1), (2,), (None, None, None, Window(size // 2))),
        Step((samples, channels, size // 2, size // 2), (3, 2)),
    ]
    return Route(tuple(steps), 4, Layout.unsplit(steps[-1].shape))


def test_needs_are_those_of_all_ways_to_the_output():
    route = conv_and_pool(32)
    needs = route.needs(Box.of((0, 1), (0, 8), (4, 6), (0, 1)))
    assert [box.spans[2] for box in needs] == [(6, 13), (7, 12), (4, 6), (4, 6), (4, 6)]
    assert [box.spans[3] for box in needs] == [(0, 32), (0, 32), (0, 16), (0, 1), (0, 1)]
    assert [box.shape[1] for box in needs] == [2, 8, 8, 8, 8]


def test_a_tensor_is_needed_as_far_as_its_farthest_reader_reads():
    shape = (1, 2, 16, 16)
    steps = (Step(shape), Step(shape, (0,)), Step(shape, (0,), (None, None, CONV, CONV)))
    route = Route((*steps, Step(shape, (1, 2))), 3, Layout.unsplit(shape))
    needs = route.needs(Box.of((0, 1), (0, 2), (4, 6), (4, 6)))
    assert [box.spans[2] for box in needs] == [(3, 7), (4, 6), (4, 6), (4, 6)]


def test_tensors_that_nothing_is_made_of_are_not_needed():
    steps = (*conv_and_pool(8).steps, Step((1, 9, 8, 8), (0,), (None, None, CONV, CONV)))
    route = Route(steps, 2, Layout.unsplit(steps[2].shape))
    assert [box is None for box in route.needs(Box.whole(steps[2].shape))] == [False] * 3 + [
        True
    ] * 3


def chain(size, samples=1):
    route = conv_and_pool(size, samples=samples)
    return Route(route.steps[:3], 2, Layout.unsplit(route.steps[2].shape))


def test_tiles_cover_the_outputs_once_and_stay_below_the_limit():
    route = chain(64)
    outputs = Box.of((0, 1), (0, 8), (5, 32), (0, 31))
    tiles = list(cut_tiles(route, outputs, 3000))
    assert sum(tile.numel for tile in tiles) == outputs.numel
    assert all(outputs.contains(tile) for tile in tiles)
    assert len({tile.spans for tile in tiles}) == len(tiles) > 8
    assert max(box.numel for tile in tiles for box in route.needs(tile)) <= 3000


def test_samples_are_cut_first_then_long_runs_of_memory():
    assert {tile.shape for tile in cut_tiles(chain(64, 4), Box.whole((4, 8, 32, 32)), 2**15)} == {
        (1, 8, 32, 32)
    }
    first, *_ = cut_tiles(chain(256), Box.whole((1, 8, 128, 128)), 2**18)
    assert first.shape == (1, 8, 43, 128)


@pytest.mark.parametrize("limit", [900, 3000, 9000])
def test_no_dim_is_cut_into_more_pieces_than_it_must_be(limit):
    route, outputs = chain(64), Box.whole((1, 8, 32, 32))
    tiles = list(cut_tiles(route, outputs, limit))
    nums = [len({tile.spans[dim] for tile in tiles}) for dim in (2, 3)]
    for dim in (0, 1):
        fewer = [num - (i == dim) for i, num in enumerate(nums)]
        sizes = [-(-32 // max(1, num)) for num in fewer]
        middle = [((32 - size) // 2, (32 + size) // 2) for size in sizes]
        needs = route.needs(Box.of((0, 1), (0, 8), *middle))
        assert nums[dim] == 1 or max(box.numel for box in needs) > limit


def test_a_limit_that_nothing_fits_gives_single_outputs():
    tiles = list(cut_tiles(chain(8), Box.whole((1, 8, 4, 4)), 1))
    assert [tile.shape for tile in tiles] == [(1, 8, 1, 1)] * 16


def test_every_rank_fetches_what_its_outputs_need_inside_the_tensor():
    grid = Grid((1, 1, 1, 2, 1))
    split = Split("height", cut_evenly(64, 2))
    source = Layout.unsplit((1, 2, 64, 64)).with_dim(2, 64, split)
    output = chain(64).output.with_dim(2, 32, Split("height", cut_evenly(32, 2)))
    route = Route(chain(64).steps, 2, output)
    plans = [plan_chain(grid, rank, source, route, 2**30) for rank in range(2)]
    assert [plan.exchange.wanted.spans[2] for plan in plans] == [Span(0, 33), Span(30, 64)]
    assert [math.prod(plan.outputs.shape) for plan in plans] == [8 * 16 * 32] * 2
    assert all(len(plan.tiles) == 1 for plan in plans)
