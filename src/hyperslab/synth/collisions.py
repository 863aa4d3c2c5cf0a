"""Collisions of protons: jets as they are always made, and heavy particles that fall apart."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hyperslab.synth.jets import GLUON, QUARK, Array, Sprays, hadronize, shower

LEAST_PT, MOST_PT = 350.0, 2500.0
"""Of the jets of a background collision, in GeV."""
FALLS_AS, DRAWN_AS = 6, 3
"""Powers of the spectrum: as it is, and as it is drawn, so that hard ones are seen too."""
HEAVY_MASS = 800.0
"""Of each of the two particles of a signal collision, in GeV; each decays to three quarks."""
PILE_UP = 700
"""Soft particles from other collisions, on average."""


class Collision(NamedTuple):
    """What comes out, and how many real collisions it stands for, 1 on average."""

    particles: Sprays
    weight: float


def background(rng: np.random.Generator) -> Collision:
    """Two jets back to back, with a falling spectrum, and what the beams radiate."""
    pt = power_law(rng, LEAST_PT, MOST_PT, DRAWN_AS)
    eta = rng.normal(0, 1.0) + rng.uniform(0, 1.2) * np.array([1, -1])
    phi = rng.uniform(-np.pi, np.pi) + np.array([0, np.pi])
    partons = Sprays(np.full(2, pt), eta, phi)
    charge = GLUON if rng.random() < 0.5 else QUARK
    jets = shower(Sprays.join([partons, _from_the_beams(rng)]), charge, rng)
    return Collision(_with_pile_up(jets, rng), _weight(pt))


def signal(rng: np.random.Generator) -> Collision:
    """Two heavy particles, each of which decays to three quarks."""
    pt = rng.exponential(300.0)
    phi = rng.uniform(-np.pi, np.pi)
    quarks = [_decayed(pt, rng.normal(0, 0.6), phi + turn, rng) for turn in (0, np.pi)]
    jets = shower(Sprays.join([*quarks, _from_the_beams(rng)]), QUARK, rng)
    return Collision(_with_pile_up(jets, rng), 1.0)


def power_law(rng: np.random.Generator, low: float, high: float, power: int) -> float:
    """A number between the two, with a density that falls as its ``power``."""
    ends = np.array([low, high]) ** (1.0 - power)
    return float(rng.uniform(ends[1], ends[0]) ** (1 / (1.0 - power)))


def _weight(pt: float) -> float:
    """The real spectrum over the drawn one, each with an integral of 1."""
    real, drawn = (
        (n - 1) * pt**-n / (LEAST_PT ** (1 - n) - MOST_PT ** (1 - n)) for n in (FALLS_AS, DRAWN_AS)
    )
    return real / drawn


def _from_the_beams(rng: np.random.Generator) -> Sprays:
    num = rng.poisson(1.5)
    pt = np.array([power_law(rng, 20.0, 300.0, 2) for _ in range(num)])
    return Sprays(pt, rng.uniform(-4, 4, num), rng.uniform(-np.pi, np.pi, num))


def _with_pile_up(jets: Sprays, rng: np.random.Generator) -> Sprays:
    num = rng.poisson(PILE_UP)
    soft = Sprays(
        rng.exponential(0.6, num), rng.uniform(-5, 5, num), rng.uniform(-np.pi, np.pi, num)
    )
    return Sprays.join([hadronize(jets, rng), soft])


def _decayed(pt: float, rapidity: float, phi: float, rng: np.random.Generator) -> Sprays:
    """Three quarks of a heavy particle that flies as told."""
    across = np.hypot(HEAVY_MASS, pt)
    flies = np.array(
        [across * np.cosh(rapidity), pt * np.cos(phi), pt * np.sin(phi), across * np.sinh(rapidity)]
    )
    _, x, y, z = boosted(decay(HEAVY_MASS, 3, rng), flies / HEAVY_MASS).T
    return Sprays(np.hypot(x, y), np.arcsinh(z / np.hypot(x, y)), np.arctan2(y, x))


def decay(mass: float, num: int, rng: np.random.Generator) -> Array:
    """Four-momenta ``(num, 4)``, energy first, of massless particles that a mass at rest decays to.

    Even in phase space, by RAMBO (Kleiss, Stirling and Ellis 1986, Comput. Phys. Commun. 40, 359).
    """
    cosine, phi = rng.uniform(-1, 1, num), rng.uniform(0, 2 * np.pi, num)
    energy = -np.log((1 - rng.random(num)) * (1 - rng.random(num)))
    sine = np.sqrt(1 - cosine**2)
    direction = np.stack([np.ones(num), sine * np.cos(phi), sine * np.sin(phi), cosine], axis=1)
    free = energy[:, None] * direction
    total = free.sum(axis=0)
    invariant = np.sqrt(total[0] ** 2 - total[1:] @ total[1:])
    at_rest = total * [1, -1, -1, -1] / invariant
    return np.asarray(boosted(free, at_rest) * (mass / invariant))


def boosted(momenta: Array, velocity: NDArray[np.float64]) -> Array:
    """The same as seen where a thing at rest has the four-velocity ``velocity``."""
    gamma, along = velocity[0], velocity[1:]
    energy, space = momenta[:, :1], momenta[:, 1:]
    product = space @ along[:, None]
    moved = space + along * (energy + product / (1 + gamma))
    return np.hstack([gamma * energy + product, moved])
