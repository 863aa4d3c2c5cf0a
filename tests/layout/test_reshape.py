import math
import re
from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, event, given, settings, strategies as st
from numpy.typing import NDArray

from hyperslab.errors import LayoutError
from hyperslab.layout import AXES, Box, Cuts, Grid, Layout, Split, infer_shape, plan_reshape

Array = NDArray[np.int64]
Shape = tuple[int, ...]

GRIDS = [Grid(sizes) for sizes in product((1, 2, 3), repeat=len(AXES)) if math.prod(sizes) <= 16]
FACTORS = st.lists(st.sampled_from([2, 2, 2, 3, 3, 5]), max_size=5)

simulation = settings(max_examples=75, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def groupings(draw: st.DrawFn, factors: Sequence[int]) -> Shape:
    """A shape whose dims are the products of runs of ``factors``; that of an empty run is 1."""
    inner = sorted(draw(st.lists(st.integers(0, len(factors)), max_size=4)))
    if not factors and not inner and draw(st.booleans()):
        return ()
    return tuple(math.prod(factors[a:b]) for a, b in pairwise((0, *inner, len(factors))))


@st.composite
def shape_pairs(draw: st.DrawFn) -> tuple[Shape, Shape]:
    """Two shapes with equally many elements, many of them with bounds in common."""
    factors = draw(FACTORS)
    again = draw(st.just(factors) | st.permutations(factors))
    return draw(groupings(factors)), draw(groupings(again))


@st.composite
def cuts_of(draw: st.DrawFn, extent: int, num: int) -> Cuts:
    """Any cuts, often at multiples, so that they are cuts of a split dim too."""
    step = draw(st.sampled_from([n for n in range(1, extent + 1) if extent % n == 0] or [1]))
    inner = st.integers(0, extent // step).map(lambda i: i * step)
    return Cuts((0, *sorted(draw(st.lists(inner, min_size=num - 1, max_size=num - 1))), extent))


@st.composite
def layouts(draw: st.DrawFn, grid: Grid, shape: Shape) -> Layout:
    axes: Sequence[str | None] = draw(st.permutations((*grid.long_axes, *[None] * len(shape))))
    splits = [
        Split(axis, draw(cuts_of(extent, grid.size(axis)))) if axis else None
        for axis, extent in zip(axes, shape, strict=False)
    ]
    return Layout(shape, tuple(splits))


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[Grid, Layout, Shape]:
    grid = draw(st.sampled_from(GRIDS))
    before, after = draw(shape_pairs())
    return grid, draw(layouts(grid, before)), after


def numbered(shape: Shape) -> Array:
    return np.arange(math.prod(shape)).reshape(shape)


def piece_of(array: Array, box: Box) -> Array:
    return array[box.slices_in(Box.whole(array.shape))]


@simulation
@given(reshapes())
def test_pieces_that_are_reshaped_are_the_pieces_of_the_reshaped_tensor(
    case: tuple[Grid, Layout, Shape],
) -> None:
    grid, source, shape = case
    before, after = plan_reshape(source, shape)
    event(f"{len(after.split_dims)} of {len(source.split_dims)} dims stay split")
    assert (before.shape, after.shape) == (source.shape, shape)
    for coords in grid.coords:
        local = piece_of(numbered(before.shape), before.box(coords))
        reshaped = local.reshape(after.box(coords).shape)
        np.testing.assert_array_equal(reshaped, piece_of(numbered(shape), after.box(coords)))


@simulation
@given(reshapes())
def test_dims_stay_split_as_they_were_or_become_whole(case: tuple[Grid, Layout, Shape]) -> None:
    _, source, shape = case
    before, after = plan_reshape(source, shape)
    for split, kept in zip(source.splits, before.splits, strict=True):
        assert kept in (split, None)
    assert sorted(before.axes) == sorted(after.axes)


@simulation
@given(st.data())
def test_a_dim_is_gathered_only_where_no_new_dim_can_be_cut_at_its_elements(
    data: st.DataObject,
) -> None:
    shape, target = data.draw(shape_pairs())
    assume(max(shape, default=1) > 1)
    dim = data.draw(st.sampled_from([d for d, extent in enumerate(shape) if extent > 1]))
    cuts = data.draw(cuts_of(shape[dim], 2).filter(lambda cuts: all(s.size for s in cuts.spans)))
    source = Layout.unsplit(shape).with_dim(dim, shape[dim], Split("depth", cuts))
    before, _ = plan_reshape(source, target)
    held = piece_of(numbered(shape), source.box({"depth": 0}))
    # The first piece is, if anything, the first so many indices along a dim of the new shape.
    prefixes = [
        numbered(target)[(slice(None),) * d + (slice(stop),)]
        for d, extent in enumerate(target)
        for stop in range(1, extent)
    ]
    can_stay = any(set(held.flat) == set(prefix.flat) for prefix in prefixes)
    assert (before == source) == can_stay


@given(reshapes())
def test_a_tensor_in_its_own_shape_stays_as_it_is(case: tuple[Grid, Layout, Shape]) -> None:
    _, source, _ = case
    # A dim of extent 1 has nothing to split: it may as well be whole.
    long = source.whole_along([dim for dim, extent in enumerate(source.shape) if extent == 1])
    assert plan_reshape(long, source.shape) == (long, long)


@pytest.mark.parametrize("shape", [(0,), (4, 0, 2), (0, 0)])
def test_a_tensor_without_elements_becomes_whole(shape: Shape) -> None:
    source = Layout((4, 0), (Split("sample", Cuts((0, 2, 4))), Split("width", Cuts((0, 0, 0)))))
    assert plan_reshape(source, shape) == (Layout.unsplit((4, 0)), Layout.unsplit(shape))


def test_flattening_keeps_samples_split_and_gathers_what_follows_the_channels() -> None:
    sample, width = Split("sample", Cuts((0, 1, 4))), Split("width", Cuts((0, 3, 6)))
    before, after = plan_reshape(Layout((4, 2, 6), (sample, None, width)), (4, 12))
    assert before == Layout((4, 2, 6), (sample, None, None))
    assert after == Layout((4, 12), (sample, None))


def test_a_split_dim_stays_split_where_its_cuts_are_cuts_of_the_dims_it_is_taken_apart_into() -> (
    None
):
    even, uneven = Split("depth", Cuts((0, 4, 8))), Split("depth", Cuts((0, 3, 8)))
    _, after = plan_reshape(Layout((3, 8), (None, even)), (3, 2, 4))
    assert after == Layout((3, 2, 4), (None, Split("depth", Cuts((0, 1, 2))), None))
    _, after = plan_reshape(Layout((3, 8), (None, uneven)), (3, 2, 4))
    assert after == Layout.unsplit((3, 2, 4))


def test_new_dims_of_extent_1_leave_all_splits_as_they_are() -> None:
    height, width = Split("height", Cuts((0, 1, 4))), Split("width", Cuts((0, 3, 6)))
    source = Layout((4, 6), (height, width))
    before, after = plan_reshape(source, (1, 4, 1, 6, 1))
    assert before == source
    assert after == Layout((1, 4, 1, 6, 1), (None, height, None, width, None))


@given(st.lists(st.sampled_from([-1, -1, 0, 1, 2, 3, 4, 6]), max_size=4), st.integers(0, 48))
def test_an_inferred_shape_is_that_of_numpy_or_is_refused_by_its_words(
    shape: list[int], numel: int
) -> None:
    try:
        expected = np.empty(numel).reshape(shape).shape
    except ValueError:
        words = f"shape {tuple(shape)} does not hold the {numel} elements of the tensor"
        with pytest.raises(LayoutError, match=re.escape(words)):
            infer_shape(shape, numel)
    else:
        assert infer_shape(shape, numel) == expected


@given(shape_pairs(), st.data())
def test_one_extent_is_inferred_from_the_others(
    pair: tuple[Shape, Shape], data: st.DataObject
) -> None:
    shape, _ = pair
    assume(shape)
    at = data.draw(st.integers(0, len(shape) - 1))
    assert infer_shape((*shape[:at], -1, *shape[at + 1 :]), math.prod(shape)) == shape


@pytest.mark.parametrize("shape", [(-2, -6), (-1, -4), (-1, -2, -3), (3, -4), (-12,)])
def test_extents_below_minus_1_are_refused(shape: Shape) -> None:
    words = f"shape {shape} does not hold the 12 elements of the tensor"
    with pytest.raises(LayoutError, match=re.escape(words)):
        infer_shape(shape, 12)
