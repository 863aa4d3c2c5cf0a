import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hyperslab.errors import ConfigError
from hyperslab.io.schedule import Position, Schedule, split_samples

ORDER_0 = [4, 6, 3, 5, 7, 1, 2, 0]
ORDER_1 = [2, 6, 1, 4, 3, 5, 7, 0]

schedules = st.builds(
    Schedule,
    num_samples=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    shuffle=st.sampled_from(["global", "local", "none"]),
    seed=st.integers(0, 2**64 - 1),
    num_shares=st.integers(1, 6),
)


def epoch_of(schedule, epoch):
    batches = schedule.batches(Position(epoch, 0))
    return list(itertools.takewhile(lambda batch: batch.at.epoch == epoch, batches))


@given(schedules, st.integers(0, 3))
def test_an_epoch_visits_every_sample_once(schedule, epoch):
    batches = epoch_of(schedule, epoch)
    assert len(batches) == len(schedule)
    visited = [index for batch in batches for index in batch.indices]
    assert sorted(visited) == list(range(schedule.num_samples))
    assert [len(batch.indices) for batch in batches[:-1]] == [schedule.batch_size] * (
        len(batches) - 1
    )


@given(schedules, st.integers(0, 60))
def test_going_on_anywhere_gives_what_would_have_come(schedule, num_taken):
    row = schedule.batches(Position(0, 0))
    taken = list(itertools.islice(row, num_taken))
    resumed = schedule.batches(taken[-1].next if taken else Position(0, 0))
    assert list(itertools.islice(resumed, 5)) == list(itertools.islice(row, 5))


@given(schedules)
def test_shares_of_a_local_shuffle_keep_their_samples(drawn):
    schedule = replace(drawn, shuffle="local")

    def samples_of(epoch):
        order = schedule.order(epoch)
        return [sorted(order[places].tolist()) for places in schedule._share_places]

    assert samples_of(0) == samples_of(1) == samples_of(5)


def test_a_local_shuffle_draws_another_order_each_epoch():
    schedule = Schedule(num_samples=40, batch_size=8, shuffle="local", num_shares=2)
    orders = {tuple(schedule.order(epoch).tolist()) for epoch in range(5)}
    assert len(orders) == 5


def test_a_short_batch_may_be_dropped():
    schedule = Schedule(num_samples=10, batch_size=4, drop_last=True)
    batches = epoch_of(schedule, 0)
    assert [len(batch.indices) for batch in batches] == [4, 4]
    assert batches[-1].next == Position(1, 0)
    assert schedule.checked(Position(0, 8)) == Position(1, 0)


def test_orders_are_those_of_every_release():
    assert Schedule(num_samples=8, batch_size=2).order(0).tolist() == ORDER_0
    assert Schedule(num_samples=8, batch_size=2).order(1).tolist() == ORDER_1


@pytest.mark.parametrize("num_samples", [64, 1000])
def test_a_global_shuffle_takes_samples_to_any_place(num_samples):
    """Were it a shuffle within parts, some places would never see some samples."""
    schedule = Schedule(num_samples=num_samples, batch_size=8)
    places = np.array([np.argsort(schedule.order(epoch)) for epoch in range(400)])
    mean = (num_samples - 1) / 2
    spread = num_samples / np.sqrt(12 * len(places))
    assert np.abs(places.mean(0) - mean).max() < 5 * spread
    correlation = np.corrcoef(places[:-1].ravel(), places[1:].ravel())[0, 1]
    assert abs(correlation) < 5 / np.sqrt(places[1:].size)


@given(st.integers(8, 200), st.integers(0, 5))
def test_parts_by_fraction_share_no_sample_and_leave_none_out(num, seed):
    parts = split_samples(num, {"train": 0.5, "validation": 0.25, "test": 0.25}, seed)
    assert sorted(np.concatenate(list(parts.values()))) == list(range(num))
    assert abs(len(parts["train"]) - num / 2) <= 1


@given(st.integers(3, 60), st.lists(st.floats(0.001, 0.3), min_size=1, max_size=3))
def test_every_share_gets_a_sample_however_small(num, shares):
    parts = split_samples(num, {str(i): share for i, share in enumerate(shares)})
    for share, part in zip(shares, parts.values(), strict=True):
        assert len(part) >= 1
        assert len(part) <= max(1, np.ceil(share * num))
    assert len(np.unique(np.concatenate(list(parts.values())))) == sum(map(len, parts.values()))


def test_listed_samples_are_not_drawn_for_other_parts():
    parts = split_samples(6, {"test": [5, 0], "train": 1.0})
    assert parts["test"].tolist() == [5, 0]
    assert parts["train"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"a": 0.7, "b": 0.7}, "sum to at most 1"),
        ({"a": [0, 9]}, "lists sample 9, but there are 4"),
        ({"a": [1], "b": [1]}, "listed twice"),
        ({"a": 0.0, "b": 0.5}, "parts a of 4 samples would be empty"),
        ({"a": [0, 1, 2], "b": 0.5, "c": 0.5}, "parts b of 4 samples would be empty"),
        ({"a": [[1]]}, "a fraction or a list"),
    ],
)
def test_parts_that_cannot_be_are_refused(parts, words):
    with pytest.raises(ConfigError, match=words):
        split_samples(4, parts)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"batch_size": 2.0}, "batch_size must be a whole number"),
        ({"shuffle": "some"}, "global, local, none, got 'some'"),
        ({"seed": -1}, "seed must be"),
        ({"batch_size": 9, "drop_last": True}, "8 samples make no batch of 9"),
    ],
)
def test_schedules_that_cannot_be_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        Schedule(**{"num_samples": 8, "batch_size": 2, **settings})
