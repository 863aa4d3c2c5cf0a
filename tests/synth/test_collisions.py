import numpy as np
import pytest

from hyperslab.synth.collisions import background, boosted, decay, power_law, signal
from hyperslab.synth.jets import find_jets


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def invariant(momentum):
    return np.sqrt(np.maximum(momentum[..., 0] ** 2 - (momentum[..., 1:] ** 2).sum(-1), 0))


def test_a_decay_keeps_energy_and_momentum(rng):
    for num in (2, 3, 5):
        momenta = decay(100.0, num, rng)
        np.testing.assert_allclose(momenta.sum(0), [100, 0, 0, 0], atol=1e-9)
        np.testing.assert_allclose(invariant(momenta), 0, atol=1e-4)


def test_a_boost_keeps_masses(rng):
    velocity = np.array([1.25, 0.45, 0.0, 0.6])
    flying = boosted(decay(100.0, 3, rng), velocity)
    assert invariant(flying.sum(0)) == pytest.approx(100)
    np.testing.assert_allclose(flying.sum(0), 100 * velocity, atol=1e-9)


def test_three_bodies_share_the_energy_as_phase_space_says(rng):
    # Massless, even in phase space: the density of each energy grows linearly up to half the mass.
    energies = np.concatenate([decay(1.0, 3, rng)[:, 0] for _ in range(2000)])
    assert energies.max() <= 0.5 + 1e-9
    assert np.mean(energies**2) == pytest.approx(1 / 8, rel=0.03)


def test_a_power_law_falls_as_asked(rng):
    drawn = np.array([power_law(rng, 1, 1e9, 3) for _ in range(5000)])
    assert np.median(drawn) == pytest.approx(np.sqrt(2), rel=0.05)


def test_signals_have_more_jets(rng):
    numbers = [
        np.mean([len(find_jets(make(rng).particles).pt) for _ in range(40)])
        for make in (background, signal)
    ]
    assert numbers[1] > numbers[0] + 1.5


def test_weights_are_1_on_average_and_small_for_hard_collisions(rng):
    weights = np.array([background(rng).weight for _ in range(400)])
    assert weights.mean() == pytest.approx(1, abs=0.1)
    assert weights.min() < 0.1
