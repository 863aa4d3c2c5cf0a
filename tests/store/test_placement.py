from hyperslab.io.schedule import Schedule
from hyperslab.store.placement import assign_owners


def test_samples_belong_to_those_who_take_them_in_the_epoch_that_a_run_begins_with():
    schedule = Schedule(num_samples=8, batch_size=4, seed=5)
    owners = assign_owners(schedule, 2, epoch=3)
    assert owners.shares[schedule.order(3)].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert owners.numbers[schedule.order(3)].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
