"""All ranks of a grid play an exchange in turn: arrays for tensors, a dict for the network."""

import math
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
from hypothesis import HealthCheck, given, settings, strategies as st
from numpy.typing import NDArray

from hyperslab.layout import (
    AXES,
    Box,
    Cuts,
    Exchange,
    Grid,
    Layout,
    Reads,
    Span,
    Split,
    TransposedWindow,
    Window,
    output_box_reads,
    plan_exchange,
    plan_recut,
    plan_windows,
)

Array = NDArray[np.int64]

FILL = -1
"""What the ranks put where an index lies outside the tensor, whose elements begin at 0."""
UNSET = -2
"""What nobody put anywhere."""

GRIDS = [
    Grid(sizes)
    for sizes in product((1, 2, 3, 4, 5, 7, 16), repeat=len(AXES))
    if math.prod(sizes) <= 16
]
"""Up to 16 ranks, so up to 4 long axes."""

simulation = settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])


def cuts_of(extent: int, num: int) -> st.SearchStrategy[Cuts]:
    """Any cuts, those with empty pieces among them."""
    inner = st.lists(st.integers(0, extent), min_size=num - 1, max_size=num - 1)
    return inner.map(lambda cuts: Cuts((0, *sorted(cuts), extent)))


@st.composite
def layouts(draw: st.DrawFn, grid: Grid, shape: Sequence[int]) -> Layout:
    """Each dim split along an axis of its own or whole, so some axes may split nothing."""
    axes: Sequence[str | None] = draw(st.permutations((*grid.long_axes, *[None] * len(shape))))
    splits = [
        Split(axis, draw(cuts_of(extent, grid.size(axis)))) if axis else None
        for axis, extent in zip(axes, shape, strict=False)
    ]
    return Layout(tuple(shape), tuple(splits))


@st.composite
def sources(draw: st.DrawFn) -> tuple[Grid, Layout]:
    grid = draw(st.sampled_from(GRIDS))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    return grid, draw(layouts(grid, shape))


@st.composite
def boxes(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    """Any box, empty or not, that may reach beyond the tensor or miss it."""
    starts = [draw(st.integers(-3, extent + 2)) for extent in shape]
    return Box.of(*((start, start + draw(st.integers(0, 6))) for start in starts))


@st.composite
def asked_for(draw: st.DrawFn) -> tuple[Grid, Layout, list[Box]]:
    grid, source = draw(sources())
    wanted = draw(st.lists(boxes(source.shape), min_size=grid.num_ranks, max_size=grid.num_ranks))
    return grid, source, wanted


@st.composite
def recuts(draw: st.DrawFn) -> tuple[Grid, Layout, Layout]:
    grid, source = draw(sources())
    return grid, source, draw(layouts(grid, source.shape))


def windows_for(extent: int) -> st.SearchStrategy[Reads | None]:
    """Index by index, or a window that leaves outputs of ``extent`` inputs."""
    small = st.integers(1, 3)
    window = st.builds(Window, small, small, st.integers(0, 4), small, st.integers(0, 2))
    transposed = st.builds(
        TransposedWindow, small, small, st.integers(0, 2), small, st.integers(0, 2)
    )
    fitting = st.one_of(window, transposed).filter(lambda w: w.output_extent(extent) >= 0)
    return st.one_of(st.none(), fitting)


@st.composite
def windowed(draw: st.DrawFn) -> tuple[Grid, Layout, tuple[Reads | None, ...]]:
    grid = draw(st.sampled_from(GRIDS))
    source = draw(layouts(grid, draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))))
    return grid, source, tuple(draw(windows_for(extent)) for extent in source.shape)


def numbered(shape: Sequence[int]) -> Array:
    """A tensor whose every element is another."""
    return np.arange(math.prod(shape)).reshape(shape)


def piece_of(array: Array, box: Box) -> Array:
    return array[box.slices_in(Box.whole(array.shape))]


def pieces_of(array: Array, grid: Grid, layout: Layout) -> list[Array]:
    return [piece_of(array, layout.box(coords)) for coords in grid.coords]


def padded(array: Array, box: Box) -> Array:
    """``box`` of ``array``, index by index, with FILL outside."""
    out = np.full(box.shape, FILL)
    for index in np.ndindex(out.shape):
        at = tuple(span.start + i for span, i in zip(box.spans, index, strict=True))
        if all(0 <= i < extent for i, extent in zip(at, array.shape, strict=True)):
            out[index] = array[at]
    return out


def play(exchanges: Sequence[Exchange], pieces: Sequence[Array]) -> list[Array]:
    """What every rank ends up with when all of them send what they are told to."""
    mail = {
        (rank, message.peer): piece[message.where]
        for rank, (exchange, piece) in enumerate(zip(exchanges, pieces, strict=True))
        for message in exchange.sends
    }
    results = []
    for rank, (exchange, piece) in enumerate(zip(exchanges, pieces, strict=True)):
        out = np.full(exchange.wanted.shape, UNSET)
        for where in exchange.outside:
            out[where] = FILL
        out[exchange.kept_to] = piece[exchange.kept_from]
        for message in exchange.receives:
            out[message.where] = mail.pop((message.peer, rank))
        results.append(out)
    assert not mail, "sent, and received by nobody"
    return results


def play_back(exchanges: Sequence[Exchange], grads: Sequence[Array]) -> list[Array]:
    """The gradients of the pieces, when the gradients of received boxes are sent home and added."""
    mail = {
        (rank, message.peer): grad[message.where]
        for rank, (exchange, grad) in enumerate(zip(exchanges, grads, strict=True))
        for message in exchange.receives
    }
    homes = []
    for rank, (exchange, grad) in enumerate(zip(exchanges, grads, strict=True)):
        home = np.zeros(exchange.owned.shape, np.int64)
        home[exchange.kept_from] += grad[exchange.kept_to]
        for message in exchange.sends:
            home[message.where] += mail.pop((message.peer, rank))
        homes.append(home)
    assert not mail, "sent, and received by nobody"
    return homes


def adjoint(
    grid: Grid, source: Layout, wanted: Sequence[Box], grads: Sequence[Array]
) -> list[Array]:
    """The gradients of the pieces: ranks that hold the tensor once add up what all of them got."""
    whole = Box.whole(source.shape)
    homes = dict[int, Array]()
    for group in grid.groups(source.axes):
        total = np.zeros(source.shape, np.int64)
        for rank in group:
            inside = wanted[rank] & whole
            if inside:
                total[inside.slices_in(whole)] += grads[rank][inside.slices_in(wanted[rank])]
        homes |= {rank: piece_of(total, source.box(grid.coords[rank])) for rank in group}
    return [homes[rank] for rank in range(grid.num_ranks)]


def on_all_ranks(grid: Grid, plan: Callable[[int], Exchange]) -> list[Exchange]:
    return [plan(rank) for rank in range(grid.num_ranks)]


def random_like(boxes: Sequence[Box]) -> list[Array]:
    rng = np.random.default_rng(0)
    return [rng.integers(-9, 10, box.shape) for box in boxes]


def check_exchanges(
    exchanges: Sequence[Exchange], grid: Grid, source: Layout, wanted: Sequence[Box]
) -> None:
    """Every box arrives as it was asked for, and its gradient goes home."""
    tensor = numbered(source.shape)
    results = play(exchanges, pieces_of(tensor, grid, source))
    for result, box in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(result, padded(tensor, box))
    grads = random_like(wanted)
    expected = adjoint(grid, source, wanted, grads)
    for home, due in zip(play_back(exchanges, grads), expected, strict=True):
        np.testing.assert_array_equal(home, due)


@simulation
@given(asked_for())
def test_every_rank_gets_the_box_it_asks_for_and_its_gradient_goes_home(
    asked: tuple[Grid, Layout, list[Box]],
) -> None:
    grid, source, wanted = asked
    exchanges = on_all_ranks(grid, lambda rank: plan_exchange(grid, rank, source, wanted))
    assert [exchange.wanted for exchange in exchanges] == wanted
    assert [exchange.owned for exchange in exchanges] == [source.box(c) for c in grid.coords]
    check_exchanges(exchanges, grid, source, wanted)


@simulation
@given(asked_for())
def test_each_send_meets_a_receive_of_the_same_box_on_its_peer(
    asked: tuple[Grid, Layout, list[Box]],
) -> None:
    grid, source, wanted = asked
    exchanges = on_all_ranks(grid, lambda rank: plan_exchange(grid, rank, source, wanted))
    sent = [(rank, m.peer, m.box) for rank, e in enumerate(exchanges) for m in e.sends]
    received = [(m.peer, rank, m.box) for rank, e in enumerate(exchanges) for m in e.receives]
    assert sorted(sent) == sorted(received)
    assert len({(rank, peer) for rank, peer, _ in sent}) == len(sent), "one message for a pair"
    assert all(rank != peer and box for rank, peer, box in sent)


@simulation
@given(asked_for())
def test_each_wanted_index_is_kept_received_or_outside_and_only_one_of_them(
    asked: tuple[Grid, Layout, list[Box]],
) -> None:
    grid, source, wanted = asked
    whole = numbered(source.shape)
    for rank in range(grid.num_ranks):
        exchange = plan_exchange(grid, rank, source, wanted)
        outside = padded(whole, wanted[rank]) == FILL
        arrivals, fills = np.zeros(outside.shape, int), np.zeros(outside.shape, int)
        arrivals[exchange.kept_to] += 1
        for message in exchange.receives:
            arrivals[message.where] += 1
        for where in exchange.outside:
            fills[where] += 1
        np.testing.assert_array_equal(arrivals, ~outside)
        np.testing.assert_array_equal(fills, outside)
        assert bool(exchange.outside) == outside.any()


@simulation
@given(asked_for())
def test_an_exchange_is_idle_on_all_ranks_alike_where_no_rank_sends(
    asked: tuple[Grid, Layout, list[Box]],
) -> None:
    grid, source, wanted = asked
    exchanges = on_all_ranks(grid, lambda rank: plan_exchange(grid, rank, source, wanted))
    silent = not any(exchange.sends for exchange in exchanges)
    assert {exchange.idle for exchange in exchanges} == {silent}


@simulation
@given(sources(), st.data())
def test_an_exchange_is_idle_where_every_rank_asks_for_a_part_of_its_own(
    held: tuple[Grid, Layout], data: st.DataObject
) -> None:
    grid, source = held
    wanted = [source.box(coords) & data.draw(boxes(source.shape)) for coords in grid.coords]
    for rank in range(grid.num_ranks):
        exchange = plan_exchange(grid, rank, source, wanted)
        assert exchange.idle
        assert not exchange.outside
        assert not exchange.receives


@simulation
@given(asked_for())
def test_ranks_ask_those_that_share_their_coords_along_axes_that_split_nothing(
    asked: tuple[Grid, Layout, list[Box]],
) -> None:
    grid, source, wanted = asked
    beside = [axis for axis in AXES if axis not in source.axes]
    for rank, coords in enumerate(grid.coords):
        for message in plan_exchange(grid, rank, source, wanted).receives:
            assert all(grid.coords[message.peer][axis] == coords[axis] for axis in beside)


@simulation
@given(recuts())
def test_a_recut_tensor_lies_under_its_new_layout(recut: tuple[Grid, Layout, Layout]) -> None:
    grid, source, target = recut
    exchanges = on_all_ranks(grid, lambda rank: plan_recut(grid, rank, source, target))
    assert not any(exchange.outside for exchange in exchanges)
    check_exchanges(exchanges, grid, source, [target.box(coords) for coords in grid.coords])


@simulation
@given(sources())
def test_a_tensor_that_stays_under_its_layout_is_not_sent(held: tuple[Grid, Layout]) -> None:
    grid, source = held
    for rank in range(grid.num_ranks):
        exchange = plan_recut(grid, rank, source, source)
        assert exchange.idle
        assert exchange.kept == exchange.wanted == exchange.owned


def weight(window: Reads, output: int, index: int) -> int:
    """The weight of input ``index`` in ``output`` of a convolution: another one for each tap."""
    match window:
        case Window():
            distance = index + window.padding - output * window.stride
        case TransposedWindow():
            distance = output + window.padding - index * window.stride
        case _:
            raise AssertionError(window)
    tap, rest = divmod(distance, window.dilation)
    return tap + 1 if rest == 0 and 0 <= tap < window.kernel else 0


def convolve(array: Array, windows: Sequence[Reads | None], inputs: Box, outputs: Box) -> Array:
    """The ``outputs`` of a convolution along every dim of ``array``, which holds ``inputs``."""
    for dim, window in enumerate(windows):
        if window is not None:
            reads, writes = inputs.spans[dim], outputs.spans[dim]
            taps = [
                [weight(window, o, i) for i in range(reads.start, reads.stop)]
                for o in range(writes.start, writes.stop)
            ]
            matrix = np.array(taps, np.int64).reshape(writes.size, reads.size)
            array = np.moveaxis(np.tensordot(matrix, array, (1, dim)), 0, dim)
    return array


@simulation
@given(windowed())
def test_the_windows_of_a_rank_hold_all_that_its_outputs_read(
    case: tuple[Grid, Layout, tuple[Reads | None, ...]],
) -> None:
    grid, source, windows = case
    plans = [plan_windows(grid, rank, source, windows) for rank in range(grid.num_ranks)]
    (output,) = {plan.output for plan in plans}
    tensor = numbered(source.shape)
    serial = convolve(tensor, windows, Box.whole(source.shape), Box.whole(output.shape))
    fetched = play([plan.exchange for plan in plans], pieces_of(tensor, grid, source))
    for coords, plan, inputs in zip(grid.coords, plans, fetched, strict=True):
        assert plan.box == output.box(coords)
        zero_padded = np.where(inputs == FILL, 0, inputs)
        local = convolve(zero_padded, windows, plan.exchange.wanted, plan.box)
        np.testing.assert_array_equal(local, piece_of(serial, plan.box))


@simulation
@given(windowed())
def test_every_rank_gets_its_windows_and_their_gradient_goes_home(
    case: tuple[Grid, Layout, tuple[Reads | None, ...]],
) -> None:
    grid, source, windows = case
    plans = [plan_windows(grid, rank, source, windows) for rank in range(grid.num_ranks)]
    wanted = [output_box_reads(source, windows, plan.box) for plan in plans]
    check_exchanges([plan.exchange for plan in plans], grid, source, wanted)


@simulation
@given(windowed())
def test_outputs_are_split_as_their_inputs_and_whole_dims_stay_whole(
    case: tuple[Grid, Layout, tuple[Reads | None, ...]],
) -> None:
    grid, source, windows = case
    plan = plan_windows(grid, 0, source, windows)
    assert plan.output.axes == source.axes
    assert plan.output.split_dims == source.split_dims
    for dim, window in enumerate(windows):
        if window is None:
            assert plan.output.splits[dim] == source.splits[dim]
        else:
            assert plan.output.shape[dim] == window.output_extent(source.shape[dim])
            if source.splits[dim] is None:
                assert plan.exchange.wanted.spans[dim] == Span(0, source.shape[dim])


@simulation
@given(st.sampled_from(GRIDS), st.integers(1, 4), st.data())
def test_a_pool_over_aligned_pieces_sends_nothing(
    grid: Grid, kernel: int, data: st.DataObject
) -> None:
    pooled = data.draw(layouts(grid, data.draw(st.lists(st.integers(0, 4), max_size=4))))
    source = Layout(
        tuple(extent * kernel for extent in pooled.shape),
        tuple(split and Split(split.axis, split.cuts.scaled(kernel)) for split in pooled.splits),
    )
    for rank in range(grid.num_ranks):
        plan = plan_windows(grid, rank, source, (Window(kernel, kernel),) * len(source.shape))
        assert plan.output == pooled
        assert plan.exchange.idle
        assert plan.exchange.wanted == plan.exchange.owned


def test_a_halo_wider_than_its_neighbour_reaches_the_next_one() -> None:
    grid = Grid((1, 1, 4, 1, 1))
    source = Layout((8,), (Split("depth", Cuts((0, 4, 5, 5, 8))),))
    plan = plan_windows(grid, 3, source, (Window(5, padding=2),))
    assert plan.exchange.wanted == Box.of((3, 10))
    assert [(m.peer, m.box) for m in plan.exchange.receives] == [
        (0, Box.of((3, 4))),
        (1, Box.of((4, 5))),
    ]
    assert plan.exchange.outside == ((slice(5, 7),),)
