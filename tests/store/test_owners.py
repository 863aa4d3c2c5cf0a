import pytest

from hyperslab.errors import ConfigError
from hyperslab.io.schedule import Position, Schedule
from hyperslab.store.owners import assign_owners
from hyperslab.store.saved import restored, saved


def test_samples_belong_to_those_who_take_them_in_the_epoch_that_a_run_begins_with():
    schedule = Schedule(num_samples=8, batch_size=4, seed=5)
    owners = assign_owners(schedule, 2, epoch=3)
    assert owners.shares[schedule.order(3)].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert owners.numbers[schedule.order(3)].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]


def test_a_state_of_another_shuffle_is_refused():
    schedule = Schedule(num_samples=8, batch_size=4, shuffle="none")
    state = saved(schedule, Position(0, 4))
    assert restored(schedule, state) == (schedule, Position(0, 4))
    with pytest.raises(ConfigError, match="saved with shuffle='none', but the loader has 'global'"):
        restored(Schedule(num_samples=8, batch_size=4), state)
