import math

import numpy as np
import pytest

from hyperslab.errors import ConfigError
from hyperslab.synth.cosmology import RANGES, Cosmology, EisensteinHu, top_hat_sigma


def test_the_largest_scales_are_untouched():
    transfer = EisensteinHu(matter=0.147, baryons=0.022)
    np.testing.assert_allclose(transfer(np.array([1e-6, 1e-5])), 1, rtol=1e-4)


def test_small_scales_fall_as_cold_matter_does():
    transfer = EisensteinHu(matter=0.147, baryons=1e-4)
    k = np.array([50.0, 100.0])
    slope = np.diff(np.log(transfer(k))) / np.diff(np.log(k))
    assert -2 < slope[0] < -1.7  # ln(k) / k^2


def test_the_drag_epoch_is_that_of_the_wmap_five_year_results():
    # Komatsu et al. (2009), which uses this fit: z_d = 1020.5 +- 1.6, r_s = 153.3 +- 2.0 Mpc.
    transfer = EisensteinHu(matter=0.1358, baryons=0.02267)
    assert transfer.drag_redshift == pytest.approx(1020.5, abs=1.6)
    assert transfer.sound_horizon == pytest.approx(153.3, abs=2.0)


def test_oscillations_have_the_length_of_the_sound_horizon():
    transfer = EisensteinHu(matter=0.147, baryons=0.022)
    k = np.linspace(0.05, 0.3, 2000)
    ratio = transfer(k) / transfer._pressureless(k, 1, 1)
    wiggles = ratio / np.exp(np.polyval(np.polyfit(k, np.log(ratio), 3), k))
    peaks = k[1:-1][(wiggles[1:-1] > wiggles[:-2]) & (wiggles[1:-1] > wiggles[2:])]
    assert len(peaks) >= 4
    np.testing.assert_allclose(np.diff(peaks), 2 * np.pi / transfer.sound_horizon, rtol=0.1)


def test_planck_s_primordial_spectrum_gives_planck_s_sigma_8():
    # Planck 2018: ln(1e10 A_s) = 3.044 and sigma_8 = 0.811. The fit is good to a few percent, and
    # knows no neutrinos, whose mass takes away another.
    h, omega_m, tilt = 0.6736, 0.3153, 0.9649
    transfer = EisensteinHu(matter=omega_m * h**2, baryons=0.02237)
    growth = Cosmology(omega_m=omega_m).growth_from_matter_era(0)

    def power(k):
        primordial = np.exp(3.044) * 1e-10 * (k * h / 0.05) ** (tilt - 1)
        per_log = 4 / 25 * primordial * (k * 2997.92458) ** 4 * (transfer(k * h) * growth) ** 2
        return per_log / omega_m**2 * 2 * np.pi**2 / k**3

    assert top_hat_sigma(power, 8) == pytest.approx(0.811, rel=0.03)


def test_the_amplitude_of_sound_waves_is_that_of_the_paper():
    """Equations 14 and 15 with y the ratio of scale factors, (1 + z_eq) / (1 + z_d)."""
    fit = EisensteinHu(matter=0.147, baryons=0.02205)
    y = (1 + fit.equality_redshift) / (1 + fit.drag_redshift)
    root = math.sqrt(1 + y)
    growth = y * (-6 * root + (2 + 3 * y) * math.log((root + 1) / (root - 1)))
    drag = 31.5e3 * 0.02205 * (2.7255 / 2.7) ** -4 / fit.drag_redshift
    horizons = fit.equality_wavenumber * fit.sound_horizon
    assert fit._sound_amplitude == pytest.approx(2.07 * horizons * (1 + drag) ** -0.75 * growth)


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
