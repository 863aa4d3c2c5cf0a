import math
import pickle
import re
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hyperslab.errors import LayoutError
from hyperslab.layout import (
    AXES,
    DIM_AXES,
    Box,
    Cuts,
    Grid,
    Layout,
    Span,
    Split,
    cut_evenly,
    cut_in_chunks,
    split_over,
)

GRIDS = st.tuples(*[st.integers(1, 3)] * len(AXES)).map(Grid)
EIGHT = Grid((2, 1, 2, 2, 1))
LAYOUT = Layout(
    (4, 3, 9), (Split("sample", Cuts((0, 2, 4))), None, Split("width", Cuts((0, 9, 9))))
)


@st.composite
def sizes_by_axis(draw: st.DrawFn, grid: Grid) -> dict[str, list[int]]:
    """The sizes of the pieces along some axes, empty ones among them."""
    axes = draw(st.sets(st.sampled_from(AXES)))
    return {
        axis: draw(st.lists(st.integers(0, 4), min_size=num, max_size=num))
        for axis in sorted(axes)
        if (num := grid.size(axis))
    }


@given(GRIDS, st.integers(0, 5), st.data())
def test_pieces_cover_the_tensor_once_for_each_set_of_axes_that_do_not_split_it(
    grid: Grid, num_dims: int, data: st.DataObject
) -> None:
    sizes = st.integers(3, 5)
    shape = data.draw(st.lists(sizes, min_size=num_dims, max_size=num_dims))
    layout = split_over(shape, grid)
    count = np.zeros(shape, int)
    for coords in grid.coords:
        count[layout.box(coords).slices_in(Box.whole(shape))] += 1
    num_split = np.prod([grid.size(axis) for axis in layout.axes])
    assert (count == grid.num_ranks // num_split).all()


@given(GRIDS, st.integers(0, 5))
def test_dims_are_cut_evenly_along_their_axes_and_channels_as_torch_chunks_them(
    grid: Grid, num_dims: int
) -> None:
    layout = split_over([7] * num_dims, grid)
    for axis, split in zip(DIM_AXES[num_dims], layout.splits, strict=True):
        num = grid.size(axis) if axis else 1
        cut = cut_in_chunks if axis == "channel" else cut_evenly
        assert split == (Split(str(axis), cut(7, num)) if num > 1 else None)


def test_ranks_beyond_the_channels_hold_none() -> None:
    layout = split_over((2, 4, 8), Grid((1, 3, 1, 1, 1)))
    assert layout.splits[1] == Split("channel", Cuts((0, 2, 4, 4)))


@given(GRIDS, st.data())
def test_given_cuts_are_kept_and_the_other_axes_are_cut_evenly(
    grid: Grid, data: st.DataObject
) -> None:
    sizes = data.draw(sizes_by_axis(grid))
    shape = [sum(sizes.get(axis, [5])) for axis in AXES]
    cuts = {axis: [0, *accumulate(pieces)] for axis, pieces in sizes.items()}
    layout = split_over(shape, grid, cuts=cuts)
    for coords in grid.coords:
        for dim, axis in enumerate(AXES):
            if axis in sizes:
                assert layout.span(dim, coords).size == sizes[axis][coords[axis]]
            else:
                cut = cut_in_chunks if axis == "channel" else cut_evenly
                assert layout.span(dim, coords) == cut(5, grid.size(axis)).spans[coords[axis]]


def test_named_axes_say_which_dim_is_cut_by_which() -> None:
    layout = split_over((6, 8, 4, 5, 6, 7), EIGHT, axes=("depth", None, "sample", None, None, None))
    assert layout.axes == ("depth", "sample")
    assert layout.split_dims == (0, 2)
    assert layout.describe() == "6x8x4x5x6x7, dim 0 split over depth=2, dim 2 split over sample=2"


def test_an_axis_longer_than_its_dim_is_refused() -> None:
    words = (
        "cannot split dim 2 of a tensor of shape (2, 3, 1, 4, 4), an extent of 1, over depth=2: "
        "every rank needs at least one index (use a smaller depth, or give cuts with empty pieces)"
    )
    with pytest.raises(LayoutError, match=re.escape(words)):
        split_over((2, 3, 1, 4, 4), EIGHT)
    layout = split_over((2, 3, 1, 4, 4), EIGHT, cuts={"depth": [0, 1, 1]})
    assert layout.splits[2] == Split("depth", Cuts((0, 1, 1)))


@pytest.mark.parametrize("shape", [(2, 3, 0, 4, 4), (0, 3, 2, 4, 4)])
def test_a_tensor_without_elements_enters_where_no_axis_cuts_its_empty_dim(
    shape: tuple[int, ...],
) -> None:
    assert split_over(shape, Grid((1, 1, 1, 2, 2))).shape == shape


@pytest.mark.parametrize("bounds", [[0, 4, 9], [0, 8], [0, 2, 5, 8]])
def test_cuts_that_do_not_fit_the_mesh_or_the_tensor_are_refused(bounds: list[int]) -> None:
    words = (
        re.escape(f"cuts {bounds} along height make") + ".* the mesh has height=2 .* extent of 8 "
    )
    with pytest.raises(LayoutError, match=words):
        split_over((2, 3, 8, 8, 8), EIGHT, cuts={"height": bounds})


def test_cuts_are_checked_along_an_axis_of_one_rank_too() -> None:
    assert split_over((2, 3, 8, 8, 8), EIGHT, cuts={"width": [0, 8]}).splits[4] is None
    with pytest.raises(LayoutError, match="the mesh has width=1"):
        split_over((2, 3, 8, 8, 8), EIGHT, cuts={"width": [0, 4, 8]})


def test_cuts_that_fall_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"start at 0 and not decrease, got \[0, 9, 8\]"):
        split_over((2, 3, 8, 8, 8), EIGHT, cuts={"depth": [0, 9, 8]})


@pytest.mark.parametrize("axis", ["depth", "time"])
def test_cuts_along_an_axis_that_cuts_no_dim_are_refused(axis: str) -> None:
    words = rf"cuts are given for \['{axis}'\], but the axes that cut the tensor are "
    with pytest.raises(LayoutError, match=words + r"\['sample', 'channel', 'height', 'width'\]"):
        split_over((2, 3, 8, 8), EIGHT, cuts={axis: [0, 4, 8]})


def test_six_dims_want_their_axes_named() -> None:
    words = "shape (1, 2, 3, 4, 5, 6) has 6 dims, and the axes of at most 5 are known: name them"
    with pytest.raises(LayoutError, match=re.escape(words)):
        split_over((1, 2, 3, 4, 5, 6), EIGHT)


@pytest.mark.parametrize(
    "axes",
    [("sample", "time"), ("sample",), ("sample", None, "depth"), ("depth", "depth")],
    ids=str,
)
def test_axes_that_are_unknown_too_many_too_few_or_named_twice_are_refused(
    axes: tuple[str | None, ...],
) -> None:
    words = (
        f"axes {axes} do not fit a tensor of shape (4, 6): give one of {AXES} or None for each dim"
    )
    with pytest.raises(LayoutError, match=re.escape(words)):
        split_over((4, 6), EIGHT, axes=axes)


def test_a_rank_holds_the_box_at_its_coords() -> None:
    coords = dict.fromkeys(AXES, 0) | {"sample": 1}
    assert LAYOUT.box(coords) == Box.of((2, 4), (0, 3), (0, 9))
    assert LAYOUT.box(coords | {"width": 1}) == Box.of((2, 4), (0, 3), (9, 9))
    assert LAYOUT.span(0, coords) == Span(2, 4)


def test_a_layout_knows_its_split_dims_and_their_axes() -> None:
    assert LAYOUT.split_dims == (0, 2)
    assert LAYOUT.axes == ("sample", "width")
    assert LAYOUT.axes_of([1, 2]) == ("width",)
    assert LAYOUT.describe() == "4x3x9, dim 0 split over sample=2, dim 2 split over width=2"
    assert Layout.unsplit(()).describe() == "scalar, whole on every rank"


def test_dims_are_made_whole_and_replaced_one_by_one() -> None:
    sample, _, width = LAYOUT.splits
    assert LAYOUT.whole_along([0, 1]) == Layout((4, 3, 9), (None, None, width))
    assert LAYOUT.with_dim(2, 5) == Layout((4, 3, 5), (sample, None, None))
    assert LAYOUT.with_dim(1, 9, width) == Layout((4, 9, 9), (sample, width, width))


def test_equal_layouts_have_equal_hashes() -> None:
    again = LAYOUT.with_dim(1, 7).with_dim(1, 3)
    assert again == LAYOUT
    assert hash(again) == hash(LAYOUT)
    assert len({again, LAYOUT, LAYOUT.whole_along([0])}) == 2


def test_a_layout_from_another_process_gets_the_hash_of_this_one() -> None:
    # Hashes of strings differ from process to process, so those of layouts do.
    foreign = Layout(LAYOUT.shape, LAYOUT.splits)
    object.__setattr__(foreign, "_hash", hash(LAYOUT) + 1)
    arrived = pickle.loads(pickle.dumps(foreign))
    assert arrived == LAYOUT
    assert hash(arrived) == hash(LAYOUT)


@given(GRIDS)
def test_ranks_are_numbered_in_row_major_order(grid: Grid) -> None:
    assert grid.num_ranks == len(grid.coords) == math.prod(grid.sizes)
    for rank, coords in enumerate(grid.coords):
        index = tuple(coords[axis] for axis in AXES)
        assert np.ravel_multi_index(index, grid.sizes) == rank


@given(GRIDS)
def test_long_axes_are_those_with_several_ranks(grid: Grid) -> None:
    assert list(grid.long_axes) == [axis for axis in AXES if grid.size(axis) > 1]


@given(GRIDS, st.sets(st.sampled_from(AXES)))
def test_groups_partition_the_ranks_by_their_coords_along_the_other_axes(
    grid: Grid, axes: set[str]
) -> None:
    groups = list(grid.groups(axes))
    assert sorted(rank for group in groups for rank in group) == list(range(grid.num_ranks))
    for group in groups:
        others = {tuple(grid.coords[rank][a] for a in AXES if a not in axes) for rank in group}
        assert len(others) == 1
        assert len(group) == math.prod(grid.size(axis) for axis in axes)
        assert list(group) == sorted(group)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [((2, 1, 4, 1, 1), "sample=2 x depth=4"), ((1, 1, 1, 1, 1), "one rank")],
)
def test_a_grid_names_its_long_axes(sizes: tuple[int, ...], words: str) -> None:
    assert Grid(sizes).describe() == words
