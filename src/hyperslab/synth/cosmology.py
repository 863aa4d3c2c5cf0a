"""A flat universe of cold matter and a cosmological constant: its power spectrum and growth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError

# How structure grew before recombination: the transfer function of cold matter and baryons


Array = NDArray[np.float64]

CMB_TEMPERATURE = 2.7255
"""Kelvin, today."""


@dataclass(frozen=True, kw_only=True)
class EisensteinHu:
    """The fit of Eisenstein and Hu (1998, ApJ 496, 605), acoustic oscillations included.

    Lengths are in Mpc, not Mpc/h. Numbers of equations are those of the paper.
    """

    matter: float
    """Omega_m h^2, baryons included."""
    baryons: float
    """Omega_b h^2."""

    @property
    def baryon_fraction(self) -> float:
        return self.baryons / self.matter

    @property
    def _theta(self) -> float:
        return CMB_TEMPERATURE / 2.7

    @property
    def equality_redshift(self) -> float:
        """When matter and radiation were equally dense (2)."""
        return 2.50e4 * self.matter * self._theta**-4

    @property
    def equality_wavenumber(self) -> float:
        """Of the horizon at that time (3)."""
        return 7.46e-2 * self.matter * self._theta**-2

    @cached_property
    def drag_redshift(self) -> float:
        """When photons let go of the baryons (4)."""
        b1 = 0.313 * self.matter**-0.419 * (1 + 0.607 * self.matter**0.674)
        b2 = 0.238 * self.matter**0.223
        without = 1291 * self.matter**0.251 / (1 + 0.659 * self.matter**0.828)
        return float(without * (1 + b1 * self.baryons**b2))

    def _baryons_per_photon(self, redshift: float) -> float:
        """The ratio of their momentum densities (5)."""
        return 31.5e3 * self.baryons * self._theta**-4 / redshift

    @cached_property
    def sound_horizon(self) -> float:
        """How far sound had come by the drag epoch (6)."""
        drag = self._baryons_per_photon(self.drag_redshift)
        equality = self._baryons_per_photon(self.equality_redshift)
        ratio = (np.sqrt(1 + drag) + np.sqrt(drag + equality)) / (1 + np.sqrt(equality))
        scale = 2 / (3 * self.equality_wavenumber) * np.sqrt(6 / equality)
        return float(scale * np.log(ratio))

    def __call__(self, wavenumber: Array) -> Array:
        """T(k), which is 1 on the largest scales; ``wavenumber`` is in 1/Mpc and above 0 (16)."""
        of_baryons = self.baryon_fraction * self._baryon_part(wavenumber)
        return of_baryons + (1 - self.baryon_fraction) * self._cold_part(wavenumber)

    def _cold_part(self, k: Array) -> Array:
        """Cold matter, held back by the baryons (9 to 12, 17, 18)."""
        a1 = (46.9 * self.matter) ** 0.670 * (1 + (32.1 * self.matter) ** -0.532)
        a2 = (12.0 * self.matter) ** 0.424 * (1 + (45.0 * self.matter) ** -0.582)
        fraction = self.baryon_fraction
        alpha = a1**-fraction * a2 ** -(fraction**3)
        b1 = 0.944 / (1 + (458 * self.matter) ** -0.708)
        b2 = (0.395 * self.matter) ** -0.0266
        beta = 1 / (1 + b1 * ((1 - fraction) ** b2 - 1))
        mix = 1 / (1 + (k * self.sound_horizon / 5.4) ** 4)
        return mix * self._pressureless(k, 1, beta) + (1 - mix) * self._pressureless(k, alpha, beta)

    def _baryon_part(self, k: Array) -> Array:
        """Baryons: the sound waves, and what they damp (14, 15, 19 to 24)."""
        x = k * self.sound_horizon
        node = 8.41 * self.matter**0.435
        shifted = x / np.cbrt(1 + (node / x) ** 3)
        quiet = self._pressureless(k, 1, 1) / (1 + (x / 5.2) ** 2)
        fraction = self.baryon_fraction
        beta = 0.5 + fraction + (3 - 2 * fraction) * np.hypot(17.2 * self.matter, 1)
        silk = 1.6 * self.baryons**0.52 * self.matter**0.73 * (1 + (10.4 * self.matter) ** -0.95)
        loud = self._sound_amplitude / (1 + (beta / x) ** 3) * np.exp(-((k / silk) ** 1.4))
        return np.asarray((quiet + loud) * np.sinc(shifted / np.pi))

    @property
    def _sound_amplitude(self) -> float:
        drag = self._baryons_per_photon(self.drag_redshift)
        y = (1 + self.equality_redshift) / (1 + self.drag_redshift)
        root = np.sqrt(1 + y)
        growth = y * (-6 * root + (2 + 3 * y) * np.log((root + 1) / (root - 1)))
        horizons = self.equality_wavenumber * self.sound_horizon
        return float(2.07 * horizons * (1 + drag) ** -0.75 * growth)

    def _pressureless(self, k: Array, alpha: float, beta: float) -> Array:
        q = k / (13.41 * self.equality_wavenumber)
        curve = 14.2 / alpha + 386 / (1 + 69.9 * q**1.08)
        log = np.log(np.e + 1.8 * beta * q)
        return np.asarray(log / (log + curve * q**2))


OMEGA_B = 0.045
"""Baryons, the same in all universes, as in the CosmoFlow simulations."""

RANGES = {
    "Omega_m": (0.25, 0.35),
    "sigma_8": (0.78, 0.95),
    "N_spec": (0.9, 1.0),
    "H_0": (63.0, 77.0),
}
"""What parameters are drawn from, uniformly, with the names and the order of the CosmoFlow files.

The first three are those of the CosmoFlow paper (SC18, arXiv:1808.04728). It keeps H_0 fixed; the
sets with four parameters vary it by 10 percent around 70 (github.com/NERSC/cosmoflow-sims).
"""


@dataclass(frozen=True, kw_only=True)
class Cosmology:
    """Lengths are in Mpc/h, wavenumbers in h/Mpc."""

    omega_m: float = 0.3
    """Matter today, as a share of the critical density."""
    sigma_8: float = 0.8
    """The standard deviation of linear density in spheres of 8 Mpc/h today."""
    n_s: float = 0.96
    """The tilt of the primordial spectrum."""
    h_0: float = 70.0
    """Hubble's constant in km/s/Mpc."""

    def __post_init__(self) -> None:
        if not OMEGA_B < self.omega_m <= 1:
            raise ConfigError(f"omega_m must be above {OMEGA_B} and at most 1, got {self.omega_m}")
        for name in ("sigma_8", "n_s", "h_0"):
            if not 0 < (value := getattr(self, name)) < np.inf:
                raise ConfigError(f"{name} must be a number above 0, got {value}")

    @classmethod
    def from_unit(cls, unit: NDArray[np.floating]) -> Cosmology:
        """The one whose parameters lie at ``unit``, from -1 to 1, in their ``RANGES``."""
        omega_m, sigma_8, n_s, h_0 = (
            (low + high) / 2 + float(place) * (high - low) / 2
            for place, (low, high) in zip(unit, RANGES.values(), strict=True)
        )
        return cls(omega_m=omega_m, sigma_8=sigma_8, n_s=n_s, h_0=h_0)

    @property
    def parameters(self) -> tuple[float, float, float, float]:
        """In the order of ``RANGES``."""
        return self.omega_m, self.sigma_8, self.n_s, self.h_0

    def growth(self, redshift: float) -> float:
        """How far linear structure has grown, with 1 today."""
        return self.growth_from_matter_era(redshift) / self._growth_until_today

    def growth_from_matter_era(self, redshift: float) -> float:
        """The same, with 1 / (1 + redshift) while matter ruled."""
        today = 1 / (1 + redshift)
        nodes, weights = np.polynomial.legendre.leggauss(64)
        # a = root^2 makes the integrand of da / (a H)^3 smooth at 0.
        root = np.sqrt(today) * (nodes + 1) / 2
        a = root**2
        integrand = 2 * root**4 / (self.omega_m + (1 - self.omega_m) * a**3) ** 1.5
        integral = np.sqrt(today) / 2 * float(weights @ integrand)
        hubble = np.sqrt(self.omega_m / today**3 + 1 - self.omega_m)
        return float(2.5 * self.omega_m * hubble * integral)

    @cached_property
    def _growth_until_today(self) -> float:
        return self.growth_from_matter_era(0)

    def power(self, wavenumber: Array) -> Array:
        """The linear power spectrum today, in (Mpc/h)^3, normalised to ``sigma_8``."""
        return self._amplitude * self._shape(wavenumber)

    @cached_property
    def _transfer(self) -> EisensteinHu:
        h = self.h_0 / 100
        return EisensteinHu(matter=self.omega_m * h**2, baryons=OMEGA_B * h**2)

    def _shape(self, k: Array) -> Array:
        return np.asarray(k**self.n_s * self._transfer(k * self.h_0 / 100) ** 2)

    @cached_property
    def _amplitude(self) -> float:
        return (self.sigma_8 / top_hat_sigma(self._shape, 8)) ** 2


def top_hat_sigma(power: Callable[[Array], Array], radius: float) -> float:
    """The standard deviation of the mean density in spheres of ``radius``."""
    log_k = np.linspace(np.log(1e-5), np.log(1e2), 20001)
    k = np.exp(log_k)
    x = k * radius
    # 3 j1(x) / x; its difference of two terms loses all digits for small x.
    series = 1 - x**2 / 10 + x**4 / 280
    window = np.where(x < 0.05, series, 3 * (np.sin(x) - x * np.cos(x)) / x**3)
    return float(np.sqrt(np.trapezoid(k**3 * power(k) * window**2, log_k) / (2 * np.pi**2)))
