import numpy as np
from hypothesis import given, strategies as st

from hyperslab.trace.analysis.intervals import Intervals, amounts_before, grouped, union

RANGE = 30
pairs = st.lists(st.tuples(st.integers(0, RANGE), st.integers(0, RANGE)), max_size=8)


def intervals_of(drawn):
    starts, stops = np.array(drawn, np.int64).reshape(-1, 2).T
    return Intervals.of(starts, stops)


def moments(drawn):
    return {moment for start, stop in drawn for moment in range(start, stop)}


def moments_of(intervals):
    return moments(zip(intervals.starts.tolist(), intervals.stops.tolist(), strict=True))


@given(pairs, pairs)
def test_sets_of_intervals_are_sets_of_moments(first, second):
    one, other = intervals_of(first), intervals_of(second)
    a, b = moments(first), moments(second)
    assert moments_of(one) == a
    assert moments_of(one | other) == moments_of(union([one, Intervals(), other])) == a | b
    assert moments_of(one & other) == a & b
    assert moments_of(one - other) == a - b
    assert one.total == len(a)
    assert one.within(other) == len(a & b)
    for each in (one, one | other, one & other, one - other):
        assert (each.stops > each.starts).all()
        assert (each.starts[1:] > each.stops[:-1]).all()


@given(pairs, st.integers(0, RANGE), st.integers(0, RANGE))
def test_intervals_are_measured_and_cut_at_any_time(drawn, start, length):
    found = intervals_of(drawn)
    times = np.arange(-1, RANGE + 2)
    assert found.before(times).tolist() == [
        len([each for each in moments(drawn) if each < time]) for time in times
    ]
    cut = found.clipped(start, start + length)
    assert moments_of(cut) == {each for each in moments(drawn) if start <= each < start + length}


@given(pairs, st.integers(1, 4))
def test_coarse_intervals_are_few_and_cover_the_fine_ones(drawn, most):
    found = intervals_of(drawn)
    coarse = found.coarse(most)
    assert len(coarse) <= max(len(found) if len(found) <= most else 0, 2 * most + 1)
    assert moments_of(found) <= moments_of(coarse)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10), st.integers(0, 99)), max_size=6))
def test_amounts_come_evenly(drawn):
    starts, lengths, amounts = np.array(drawn, np.int64).reshape(-1, 3).T
    times = np.arange(0, 35)
    wanted = [
        sum(amount * min(max(time - start, 0), length) / length for start, length, amount in drawn)
        for time in times
    ]
    np.testing.assert_allclose(
        amounts_before(times, starts, starts + lengths, amounts), wanted, atol=1e-9
    )


def test_groups_keep_their_order():
    found = {number: where.tolist() for number, where in grouped(np.array([3, 1, 3, 2, 1]))}
    assert found == {1: [1, 4], 2: [3], 3: [0, 2]}
    assert [*grouped(np.empty(0, np.int64))] == []
