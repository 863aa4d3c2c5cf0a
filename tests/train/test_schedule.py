import pytest

from hyperslab.train.config import ScheduleConfig
from hyperslab.train.schedule import RateFactor


def factors(config, steps_per_epoch=10, num_epochs=10):
    factor = RateFactor(config, steps_per_epoch, num_epochs)
    return [factor(step / steps_per_epoch) for step in range(steps_per_epoch * num_epochs + 1)]


def test_without_settings_the_rate_stays():
    assert set(factors(ScheduleConfig())) == {1.0}


def test_warm_up_rises_evenly_to_one_and_never_begins_at_zero():
    found = factors(ScheduleConfig(warmup_epochs=0.5))
    assert found[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


@pytest.mark.parametrize("decay", ["polynomial", "cosine"])
def test_decay_falls_all_the_way_and_stays_at_its_end(decay):
    config = ScheduleConfig(warmup_epochs=1, decay=decay, decay_epochs=8, final=0.1)
    found = factors(config)
    after = found[10:]
    assert after[0] == 1.0
    assert after == sorted(after, reverse=True)
    assert found[80:] == pytest.approx([0.1] * 21)


def test_a_polynomial_of_power_two_has_a_quarter_half_way():
    assert factors(ScheduleConfig(decay="polynomial", power=2))[50] == pytest.approx(0.25)


def test_cosine_has_half_half_way():
    assert factors(ScheduleConfig(decay="cosine"))[50] == pytest.approx(0.5)


def test_a_warm_up_longer_than_the_run_never_divides_by_nothing():
    found = factors(ScheduleConfig(warmup_epochs=20, decay="cosine"))
    assert max(found) <= 1.0
    assert found == sorted(found)
