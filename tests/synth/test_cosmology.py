import numpy as np
import pytest

from hyperslab.errors import ConfigError
from hyperslab.synth.cosmology import RANGES, Cosmology, top_hat_sigma
from hyperslab.synth.eisenstein_hu import EisensteinHu


@pytest.mark.parametrize("sigma_8", [0.78, 0.95])
@pytest.mark.parametrize("omega_m", [0.25, 0.35])
def test_the_spectrum_has_the_sigma_8_asked_for(sigma_8, omega_m):
    cosmology = Cosmology(sigma_8=sigma_8, omega_m=omega_m)
    assert top_hat_sigma(cosmology.power, 8) == pytest.approx(sigma_8, rel=1e-9)


def test_the_top_hat_integral_is_right_for_a_power_law():
    # For P = 1 / k the integral has a closed form.
    expected = np.sqrt(9 / (8 * np.pi**2 * 64))
    assert top_hat_sigma(lambda k: 1 / k, 8) == pytest.approx(expected, rel=1e-4)


def test_without_a_cosmological_constant_structure_grows_as_the_universe_does():
    cosmology = Cosmology(omega_m=1)
    for redshift in (0, 0.5, 3, 9):
        assert cosmology.growth(redshift) == pytest.approx(1 / (1 + redshift), rel=1e-9)


def test_growth_slows_as_much_as_is_known():
    # Carroll, Press and Turner (1992): 0.779 of an Einstein-de Sitter universe for Omega_m = 0.3.
    assert Cosmology(omega_m=0.3).growth_from_matter_era(0) == pytest.approx(0.779, abs=1e-3)
    early = Cosmology(omega_m=0.3).growth_from_matter_era(99)
    assert early == pytest.approx(0.01, rel=1e-4)


def test_less_matter_means_earlier_structure_and_more_power_on_large_scales():
    few, many = Cosmology(omega_m=0.25), Cosmology(omega_m=0.35)
    assert few.growth(3) > many.growth(3)
    k = np.array([0.01, 1.0])
    assert few.power(k)[0] > many.power(k)[0]
    assert few.power(k)[1] < many.power(k)[1]


def test_the_tilt_moves_power_to_small_scales():
    k = np.array([0.01, 1.0])
    flat, tilted = Cosmology(n_s=1.0).power(k), Cosmology(n_s=0.9).power(k)
    assert tilted[0] > flat[0]
    assert tilted[1] < flat[1]


def test_units_reach_from_one_end_of_the_ranges_to_the_other():
    ends = [Cosmology.from_unit(np.full(4, unit)).parameters for unit in (-1, 1)]
    np.testing.assert_allclose(ends, np.transpose(list(RANGES.values())))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"omega_m": 0.01}, "omega_m must be above 0.045"),
        ({"sigma_8": 0}, "sigma_8 must be a number above 0"),
        ({"h_0": float("nan")}, "h_0 must be a number above 0"),
    ],
)
def test_universes_that_cannot_be_are_refused(setting, words):
    with pytest.raises(ConfigError, match=words):
        Cosmology(**setting)


def test_the_transfer_function_takes_wavenumbers_without_h():
    cosmology, k = Cosmology(h_0=70.0), np.array([0.02, 0.2])
    transfer = EisensteinHu(matter=0.3 * 0.49, baryons=0.045 * 0.49)
    shape = k**0.96 * transfer(0.7 * k) ** 2
    ratio = cosmology.power(k)[0] / cosmology.power(k)[1]
    assert ratio == pytest.approx(shape[0] / shape[1])
