"""How structure grew before recombination: the transfer function of cold matter and baryons."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

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
