import numpy as np
from hypothesis import given, settings, strategies as st

from hyperslab.io.engine.tiles import runs, tiles
from hyperslab.layout import Box

DIMS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=4
)


@settings(deadline=None, max_examples=60)
@given(DIMS, st.integers(1, 200))
def test_tiles_cover_a_box_once_and_are_cut_at_multiples_of_the_grain(dims, max_numel):
    box = Box.of(*((start, start + size) for start, size, _ in dims))
    grain = [grain for _, _, grain in dims]
    count = np.zeros([start + size for start, size, _ in dims], int)
    for tile in tiles(box, grain, max_numel):
        count[tuple(slice(*span) for span in tile.spans)] += 1
        for span, whole, step in zip(tile.spans, box.spans, grain, strict=True):
            assert span.start in (whole.start, span.start // step * step)
            assert span.stop in (whole.stop, span.stop // step * step)
        cell = np.prod([min(g, s) for g, s in zip(grain, tile.shape, strict=True)])
        assert tile.numel <= max(max_numel, cell)
    assert count.sum() == box.numel
    assert count.max(initial=0) <= 1


@settings(deadline=None, max_examples=60)
@given(DIMS)
def test_runs_lie_in_one_piece(dims):
    shape = [start + size + extra - 1 for start, size, extra in dims]
    box = Box.of(*((start, start + size) for start, size, _ in dims))
    whole = np.arange(np.prod(shape)).reshape(shape)
    wanted = whole[tuple(slice(*span) for span in box.spans)]
    for index, first in runs(box, shape):
        run = wanted[index].reshape(-1)
        np.testing.assert_array_equal(run, np.arange(first, first + run.size))
