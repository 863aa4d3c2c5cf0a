"""What the planner counts on, against the plans that ranks exchange by."""

import math

from hypothesis import given, strategies as st

from hyperslab.layout import Grid, Layout, Split, Window, cut_evenly, plan_windows
from hyperslab.planner.network import INPUT, Layer, Network
from hyperslab.planner.shards import Cut, Shards, dim_shards


@st.composite
def windows(draw):
    kernel, dilation = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    padding = draw(st.integers(0, dilation * (kernel - 1)))
    return Window(kernel, draw(st.integers(1, 3)), padding, dilation)


@st.composite
def cut_windows(draw):
    """A window, an extent that has outputs, and over how many ranks it is cut."""
    window = draw(windows())
    extent = draw(st.integers(window.reach + 1, 40))
    return window, extent, draw(st.integers(1, min(extent, 9)))


def conv(shape, windows, channels=3, **options):
    """One convolution of a sample of ``shape``."""
    pairs = zip(windows, shape[1:], strict=True)
    made = (channels, *(window.output_extent(extent) for window, extent in pairs))
    layer = Layer("", "conv", "conv", (INPUT,), made, windows, **options)
    return Network("", shape, (layer,), 0)


def plans(window, extent, num):
    source = Layout((1, 1, extent), (None, None, Split("depth", cut_evenly(extent, num))))
    grid = Grid((1, 1, num, 1, 1))
    return [plan_windows(grid, rank, source, (None, None, window)) for rank in range(num)]


@given(cut_windows())
def test_a_rank_fetches_what_it_receives(case):
    window, extent, num = case
    shard = dim_shards(conv((2, extent), (window,)), 0, num)[0]
    found = plans(window, extent, num)
    received = [[m.box.spans[2].size for m in each.exchange.receives] for each in found]
    assert shard.fetches == max(map(sum, received))
    assert shard.num_peers == max(map(len, received))
    assert shard.makes == max(each.box.spans[2].size for each in found)
    assert shard.holds == max(each.exchange.owned.spans[2].size for each in found)


@given(cut_windows(), windows())
def test_the_next_layer_is_cut_as_the_first_leaves_it(case, second):
    window, extent, num = case
    network = conv((2, extent), (window,))
    (first,) = network.layers
    if first.shape[1] <= second.reach:
        return
    after = (3, second.output_extent(first.shape[1]))
    layers = (first, Layer("", "conv", "conv", (0,), after, (second,)))
    shard = dim_shards(Network("", network.input_shape, layers, 0), 0, num)[1]
    boxes = [each.box.spans[2].size for each in plans(window, extent, num)]
    assert shard.holds == max(boxes)
    assert shard.makes >= -(-after[1] // num)


def test_a_layer_without_a_window_is_cut_as_its_input():
    pool = Layer("", "relu", "pointwise", (0,), (3, 9))
    network = conv((2, 9), (Window(3, 1, 1, 1),))
    shard = dim_shards(Network("", (2, 9), (*network.layers, pool), 0), 0, 2)[1]
    assert (shard.holds, shard.fetches, shard.makes) == (5, 0, 5)


def test_what_has_no_spatial_dims_is_whole():
    flat = Layer("", "flatten", "view", (0,), (27,))
    network = conv((2, 9), (Window(3, 1, 1, 1),))
    network = Network("", (2, 9), (*network.layers, flat), 0)
    assert dim_shards(network, 0, 2)[1] is None
    assert Shards(network, Cut((1, 1, 1, 1, 2)), 4).made == (4 * 3 * 5, 4 * 27)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_the_busiest_rank_has_at_least_its_share(batch, samples, rows, channels):
    network = conv((6, 16, 16), (Window(3, 1, 1, 1),) * 2, channels=12)
    shards = Shards(network, Cut((samples, channels, 1, rows, 1)), batch)
    ranks = samples * rows * channels
    assert shards.made[0] * ranks >= batch * network.layers[0].numel
    assert shards.sample * ranks >= batch * network.input_numel
    assert math.isclose(shards.share(0), -(-16 // rows) / 16)
