import h5py
import numpy as np
import pytest

from hyperslab.errors import ConfigError
from hyperslab.synth import Collisions, produce
from hyperslab.synth.hep import (
    GLUON,
    QUARK,
    Sprays,
    background,
    boosted,
    decay,
    find_jets,
    hadronize,
    image,
    power_law,
    shower,
    signal,
    wrapped,
)


def one(pt, eta=0.0, phi=0.0):
    return Sprays(np.array([pt]), np.array([eta]), np.array([phi]))


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_momentum_is_kept_by_showers_and_hadrons(rng):
    for pt in (0.1, 5.0, 500.0):
        partons = shower(one(pt), GLUON, rng)
        assert partons.pt.sum() == pytest.approx(pt)
        assert hadronize(partons, rng).pt.sum() == pytest.approx(pt)


def test_gluons_radiate_more_than_quarks_and_hard_ones_more_than_soft(rng):
    def number(pt, charge):
        return np.mean([len(shower(one(pt), charge, rng).pt) for _ in range(200)])

    assert number(500, GLUON) > 1.3 * number(500, QUARK)
    assert number(500, QUARK) > 1.3 * number(50, QUARK)


def test_hard_jets_are_narrow(rng):
    def width(pt):
        found = [hadronize(shower(one(pt), QUARK, rng), rng) for _ in range(100)]
        return np.mean([(jet.pt * np.hypot(jet.eta, jet.phi)).sum() / pt for jet in found])

    assert width(1000) < width(100) < 0.4


def test_jets_are_found_again_across_the_seam(rng):
    truth = Sprays(np.array([300.0, 200.0]), np.array([1.0, -1.0]), np.array([np.pi, 0.0]))
    found = find_jets(hadronize(shower(truth, QUARK, rng), rng), radius=0.8)
    assert len(found.pt) == 2
    assert found.pt == pytest.approx([300, 200], rel=0.1)
    np.testing.assert_allclose(wrapped(found.phi - truth.phi), 0, atol=0.3)


def test_nothing_has_no_jets():
    assert len(find_jets(Sprays(*np.zeros((3, 0)))).pt) == 0


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


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    out = tmp_path_factory.mktemp("hep")
    produce(Collisions(shape=(64, 64), count=200, per_file=150), out)
    return sorted(out.iterdir())


def read(files, name):
    return np.concatenate([h5py.File(path)[name][:] for path in files])


def ranked(scores, labels):
    """The chance that a signal has a higher score than a background."""
    signal, background = scores[labels == 1], scores[labels == 0]
    return (signal[:, None] > background).mean() + (signal[:, None] == background).mean() / 2


def test_files_have_the_schema_of_hepcnn(files):
    assert len(files) == 2
    with h5py.File(files[1]) as file:
        assert {name: (array.shape, array.dtype.str) for name, array in file.items()} == {
            "data": ((50, 3, 64, 64), "<f4"),
            "label": ((50,), "<i4"),
            "psr": ((50,), "<i4"),
            "normweight": ((50,), "<f4"),
            "weight": ((50,), "<f4"),
        }
        assert file["data"].chunks is None


def test_both_classes_are_there_and_weights_tell_which_is_rare(files):
    label, weight = read(files, "label"), read(files, "weight")
    assert 0.4 < label.mean() < 0.6
    assert weight[label == 1].mean() < weight[label == 0].mean() / 100
    assert set(read(files, "psr")) == {0, 1}


def test_the_classes_can_be_told_apart_but_not_by_energy_alone(files):
    data, label = read(files, "data"), read(files, "label")
    energy = data[:, :2].sum(1)
    in_blocks = energy.reshape(-1, 8, 8, 8, 8).sum((2, 4)).reshape(len(energy), -1)
    num_hot = (in_blocks > 60).sum(1)
    assert ranked(num_hot, label) > 0.85
    assert ranked(energy.sum((1, 2)), label) < ranked(num_hot, label)
    cuts = read(files, "psr")
    assert cuts[label == 1].mean() > 3 * cuts[label == 0].mean()


@pytest.mark.parametrize("setting", [{"shape": (0, 5)}, {"shape": (5000, 5)}, {"per_file": 0}])
def test_settings_that_will_not_do_are_refused(setting):
    with pytest.raises(ConfigError, match="must be"):
        Collisions(**setting)


def test_no_file_repeats_the_images_of_another(files):
    first, second = (h5py.File(path)["data"][:50] for path in files)
    assert not np.array_equal(first, second)
