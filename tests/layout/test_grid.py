import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hyperslab.layout import AXES, Grid

GRIDS = st.tuples(*[st.integers(1, 3)] * len(AXES)).map(Grid)


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
