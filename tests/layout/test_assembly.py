import numpy as np
from hypothesis import given, settings, strategies as st

from hyperslab.layout import (
    OWN,
    Assembly,
    Grid,
    Layout,
    Piece,
    Split,
    Window,
    cut_evenly,
    cut_out,
    plan_halo,
)


def whole(shape):
    return tuple(slice(0, n) for n in shape)


def assembled(assembly, own, received, fill=-1):
    """As a kernel would have it; what is neither written nor outside stays empty."""
    found = [np.full(shape, -2) for shape in assembly.shapes]
    for number, where in assembly.outside:
        assert (found[number][where] == -2).all(), "boxes outside do not overlap"
        found[number][where] = fill
    for source, of, target, to in assembly.pieces:
        assert (found[target][to] == -2).all(), "a piece lies on nothing else"
        found[target][to] = (own if source == OWN else received[source])[of]
    return found


@st.composite
def holes(draw):
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    starts = [draw(st.integers(0, n - 1)) for n in shape]
    hole = tuple(slice(a, draw(st.integers(a + 1, n))) for a, n in zip(starts, shape, strict=True))
    return tuple(shape), hole


@settings(max_examples=30, deadline=None)
@given(holes())
def test_what_no_piece_fills_is_outside(case):
    shape, hole = case
    own = np.arange(np.prod(shape)).reshape(shape)
    assembly = Assembly((shape, shape), (Piece(OWN, hole, 0, hole),))
    filled, empty = assembled(assembly, own, [])
    expected = np.full(shape, -1)
    expected[hole] = own[hole]
    assert np.array_equal(filled, expected)
    assert (empty == -1).all()


def test_boxes_are_cut_out():
    x = np.arange(12).reshape(3, 4)
    box = (slice(1, 3), slice(0, 2))
    cut = cut_out((box, whole((3, 4))), ((2, 2), (3, 4)))
    assert list(map(np.ndarray.tolist, assembled(cut, x, []))) == [x[box].tolist(), x.tolist()]
    assert cut.is_full
    assert not cut_out((), ()).is_full
    assert not cut_out(((slice(1, 1), slice(0, 2)),), ((0, 2),)).is_full


def test_equal_assemblies_are_one_to_a_cache():
    box = (slice(1, 3),)
    one, two = (cut_out((box,), ((2,),)) for _ in range(2))
    assert one == two
    assert {one: 1}[two] == 1
    assert one != cut_out(((slice(0, 2),),), ((2,),))


def plans(sizes, extents, windows):
    """The halo plans of all ranks of a grid over depth, height and width."""
    grid = Grid((1, 1, *sizes))
    splits = [
        Split(axis, cut_evenly(extent, num)) if num > 1 else None
        for axis, num, extent in zip(("depth", "height", "width"), sizes, extents, strict=True)
    ]
    layout = Layout((1, 2, *extents), (None, None, *splits))
    return layout, [plan_halo(grid, rank, layout, windows) for rank in range(grid.num_ranks)]


def test_strips_are_made_of_own_and_received_inputs():
    windows = (Window(3, 1, 1), Window(4, 2, 1), Window(3, 1, 1))
    layout, found = plans((2, 2, 1), (9, 13, 4), windows)
    x = np.arange(np.prod(layout.shape)).reshape(layout.shape)
    padded = np.pad(x, [(0, 0), (0, 0), (4, 4), (4, 4), (0, 0)], constant_values=-1)
    for plan in found:
        exchange = plan.exchange

        def piece(box, of=x):
            return of[tuple(slice(s.start, s.stop) for s in box.spans)]

        own, received = piece(exchange.owned), [piece(m.box) for m in exchange.receives]
        window = exchange.assembled
        (wanted,) = assembled(window, own, received)
        spans = exchange.wanted.spans
        moved = [
            slice(s.start + 4 * (2 <= d < 4), s.stop + 4 * (2 <= d < 4))
            for d, s in enumerate(spans)
        ]
        assert np.array_equal(wanted, padded[tuple(moved)])
        strips = assembled(plan.strip_inputs, own, received)
        halos = assembled(plan.strip_halos, own, received)
        for strip, halo in zip(strips, halos, strict=True):
            assert ((halo == strip) | (halo == -1)).all()
            assert set(strip[halo == -1].tolist()) <= {-1, *own.ravel().tolist()}


def test_a_box_that_several_strips_read_has_no_single_reader():
    windows = (Window(3, 1, 1),) * 3
    _, along_depth = plans((3, 1, 1), (9, 4, 4), windows)
    for plan in along_depth:
        readers = plan.single_readers
        assert [piece.source for piece in readers] == list(range(len(plan.exchange.receives)))
    _, both = plans((2, 2, 1), (8, 8, 4), windows)
    assert all(plan.single_readers is None for plan in both)
