"""Products by a matrix in blocks, played by numpy on all ranks at once."""

from functools import reduce

import numpy as np
from hypothesis import given, strategies as st

from hyperslab.layout import AXES, Box, Cuts, Grid, Layout, Split, plan_blocks


@st.composite
def split_over_some(draw, grid, shape, axes):
    """A layout of ``shape`` on ``grid``, each dim cut along one of ``axes`` or along none."""
    free = list(draw(st.permutations(axes)))
    splits = []
    for extent in shape:
        axis = free.pop() if free and draw(st.booleans()) else None
        if axis is None:
            splits.append(None)
            continue
        num = grid.size(axis)
        inner = draw(st.lists(st.integers(0, extent), min_size=num - 1, max_size=num - 1))
        splits.append(Split(axis, Cuts((0, *sorted(inner), extent))))
    return Layout(tuple(shape), tuple(splits))


def part(array, layout, coords):
    return array[layout.box(coords).slices_in(Box.whole(array.shape))]


@given(st.data())
def test_what_ranks_make_of_their_blocks_adds_up_to_the_product(data):
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 3]), min_size=5, max_size=5))
    grid = Grid(tuple(sizes))
    long = [axis for axis in AXES if grid.size(axis) > 1][:3]
    grid = Grid(tuple(grid.size(axis) if axis in long else 1 for axis in AXES))
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    source = data.draw(split_over_some(grid, (4, 3, columns), long))
    weight = data.draw(split_over_some(grid, (rows, columns), long))
    if not weight.split_dims:
        return
    rng = np.random.default_rng(0)
    x, w = rng.integers(0, 9, source.shape), rng.integers(0, 9, weight.shape)
    plans = [plan_blocks(grid, rank, source, weight) for rank in range(grid.num_ranks)]
    layouts = {(plan.input, plan.output, plan.axis) for plan in plans}
    assert len(layouts) == 1  # all ranks plan alike
    made = [
        part(x, plan.input, coords) @ part(w, weight, coords).T
        for plan, coords in zip(plans, grid.coords, strict=True)
    ]
    for plan, coords in zip(plans, grid.coords, strict=True):
        beside = [
            (other, of, out)
            for other, of, out in zip(plans, grid.coords, made, strict=True)
            if all(of[axis] == coords[axis] for axis in AXES if axis != plan.axis)
        ]
        if plan.axis is None:
            found = made[list(grid.coords).index(coords)]
        elif plan.exchange is None:
            found = reduce(np.add, [out for _, _, out in beside])
        else:
            whole = np.zeros((4, 3, rows), int)
            for other, _, out in beside:
                whole[other.exchange.wanted.slices_in(Box.whole(whole.shape))] += out
            found = part(whole, plan.output, coords)
        assert np.array_equal(found, part(x @ w.T, plan.output, coords))
