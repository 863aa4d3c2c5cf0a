import math

import numpy as np
import pytest

from hyperslab.synth.cosmology import Cosmology, top_hat_sigma
from hyperslab.synth.eisenstein_hu import EisensteinHu


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
