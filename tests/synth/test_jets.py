import numpy as np
import pytest

from hyperslab.synth.jets import GLUON, QUARK, Sprays, find_jets, hadronize, shower, wrapped


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
