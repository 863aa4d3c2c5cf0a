import numpy as np
import pytest

from hyperslab.synth.calorimeter import image
from hyperslab.synth.jets import Sprays


def test_energy_is_measured_well_and_wraps_around_phi():
    rng = np.random.default_rng(0)
    particles = Sprays(np.full(200, 100.0), np.zeros(200), np.full(200, np.pi))
    pixels = image(particles, (64, 64), rng)
    assert pixels[:2].sum() == pytest.approx(200 * 100, rel=0.02)
    columns = pixels[:2].sum((0, 1))
    assert columns[0] > 1000
    assert columns[-1] > 1000
    assert columns[8:-8].sum() == 0


def test_tracks_are_those_of_charged_particles_near_the_middle():
    rng = np.random.default_rng(0)
    particles = Sprays(np.full(1000, 10.0), np.full(1000, 1.0), rng.uniform(-3, 3, 1000))
    tracks = image(particles, (64, 64), rng)[2]
    assert tracks.sum() == pytest.approx(1000 * 0.6 * 0.95, rel=0.1)
    forward = particles._replace(eta=np.full(1000, 3.0))
    assert image(forward, (64, 64), rng)[2].sum() == 0
