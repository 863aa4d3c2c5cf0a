"""A flat universe of cold matter and a cosmological constant: its power spectrum and growth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError
from hyperslab.synth.eisenstein_hu import Array, EisensteinHu

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
