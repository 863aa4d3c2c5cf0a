import re
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, strategies as st

from hyperslab.errors import LayoutError
from hyperslab.layout import Cuts, cut_evenly
from hyperslab.layout.cuts import cut_at

SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def cuts_from(sizes: list[int]) -> Cuts:
    return Cuts((0, *accumulate(sizes)))


@given(SIZES)
def test_spans_are_consecutive_pieces_of_the_sizes_they_were_cut_to(sizes: list[int]) -> None:
    cuts = cuts_from(sizes)
    assert [span.size for span in cuts.spans] == sizes
    assert (cuts.num, cuts.extent) == (len(sizes), sum(sizes))
    held = [i for span in cuts.spans for i in range(span.start, span.stop)]
    assert held == list(range(sum(sizes)))


@given(SIZES, st.integers(1, 4))
def test_scaled_cuts_hold_factor_indices_for_each(sizes: list[int], factor: int) -> None:
    assert cuts_from(sizes).scaled(factor) == cuts_from([size * factor for size in sizes])


@given(st.integers(0, 40), st.integers(1, 12))
def test_even_pieces_differ_by_one_at_most_and_longer_ones_come_first(
    extent: int, num: int
) -> None:
    cuts = cut_evenly(extent, num)
    sizes = [span.size for span in cuts.spans]
    assert (cuts.num, cuts.extent, sum(sizes)) == (num, extent, extent)
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(-3, 9), max_size=6))
def test_bounds_that_are_no_cuts_are_refused(bounds: list[int]) -> None:
    rising = all(a <= b for a, b in pairwise(bounds))
    if len(bounds) > 1 and bounds[0] == 0 and rising:
        assert Cuts(tuple(bounds)).bounds == tuple(bounds)
        return
    with pytest.raises(LayoutError, match="must start at 0 and not decrease") as caught:
        Cuts(tuple(bounds))
    assert f"got {bounds}: give the first index of every piece" in str(caught.value)


@given(SIZES)
def test_cuts_that_fit_are_taken_as_they_are(sizes: list[int]) -> None:
    cuts = cuts_from(sizes)
    assert cut_at(list(cuts.bounds), cuts.extent, cuts.num, "depth") == cuts


@pytest.mark.parametrize(("extent", "num"), [(17, 2), (16, 3), (15, 1)])
def test_cuts_that_do_not_fit_are_refused_with_both_sides_numbers(extent: int, num: int) -> None:
    words = (
        f"cuts [0, 9, 16] along depth make 2 pieces of an extent of 16, but the mesh has "
        f"depth={num} and the tensor an extent of {extent} there"
    )
    with pytest.raises(LayoutError, match=re.escape(words)):
        cut_at([0, 9, 16], extent, num, "depth")
