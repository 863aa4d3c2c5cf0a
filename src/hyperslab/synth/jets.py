"""Jets: how a quark or a gluon becomes a spray of particles, and how a spray is found again.

Momenta are in GeV, across the beam; directions are eta along it and phi around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

COUPLING = 0.2
"""The strong coupling at the scales of a shower."""
QUARK, GLUON = 4 / 3, 3.0
"""Colour charges: how strongly each radiates."""
LEAST_KT = 1.0
"""Radiation softer than this against its emitter is left to the making of hadrons."""
WIDEST = 0.8
"""The largest angle of radiation inside a jet."""


class Sprays(NamedTuple):
    """Partons or particles, one an entry."""

    pt: Array
    eta: Array
    phi: Array

    def of(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> Sprays:
        return Sprays(self.pt[chosen], self.eta[chosen], self.phi[chosen])

    @classmethod
    def join(cls, parts: Sequence[Sprays]) -> Sprays:
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def shower(partons: Sprays, charge: float, rng: np.random.Generator) -> Sprays:
    """What ``partons`` have radiated into, and what is left of them.

    To leading logarithms, radiation fills a triangle of ln(1 / angle) and ln(kt) evenly (the Lund
    plane), and what was radiated radiates in turn, at smaller angles and softer.
    """
    done = []
    depth = np.log(np.maximum(partons.pt * WIDEST / LEAST_KT, 1))
    widest = np.full_like(depth, WIDEST)
    while len(partons.pt):
        num = rng.poisson(COUPLING * charge / np.pi * depth**2)
        parent = np.repeat(np.arange(len(num)), num)
        narrower = depth[parent] * (1 - np.sqrt(rng.random(len(parent))))
        softer = (depth[parent] - narrower) * rng.random(len(parent))
        angle = widest[parent] * np.exp(-narrower)
        kt = LEAST_KT * np.exp(softer)
        share = np.minimum(kt / (partons.pt[parent] * angle), 0.5)
        left = np.exp(np.bincount(parent, np.log1p(-share), len(num)))
        unit = partons.pt / (left + np.bincount(parent, share, len(num)))  # keeps the sum of pt
        done.append(partons._replace(pt=left * unit))
        partons = _turned(partons.of(parent)._replace(pt=share * unit[parent]), angle, rng)
        depth, widest, charge = softer, angle, GLUON
    return Sprays.join(done)


def hadronize(partons: Sprays, rng: np.random.Generator) -> Sprays:
    """The particles that detectors see: a few of each parton, close to its direction."""
    num = 1 + rng.poisson(np.log1p(partons.pt))
    parent = np.repeat(np.arange(len(num)), num)
    share = rng.exponential(size=len(parent))
    share /= np.bincount(parent, share, len(num))[parent]
    pt = share * partons.pt[parent]
    kt = rng.rayleigh(0.3, len(pt))
    return _turned(partons.of(parent)._replace(pt=pt), np.minimum(kt / pt, 0.5), rng)


def _turned(sprays: Sprays, angle: Array, rng: np.random.Generator) -> Sprays:
    around = rng.uniform(0, 2 * np.pi, len(angle))
    eta, phi = sprays.eta + angle * np.cos(around), sprays.phi + angle * np.sin(around)
    return sprays._replace(eta=eta, phi=phi)


def find_jets(particles: Sprays, *, radius: float = 0.4, least_pt: float = 50.0) -> Sprays:
    """Jets by cones around the hardest particle that is left, hardest first."""
    rest = particles.of(np.argsort(particles.pt)[::-1])
    jets = []
    while len(rest.pt):
        eta, phi = rest.eta - rest.eta[0], wrapped(rest.phi - rest.phi[0])
        inside = eta**2 + phi**2 < radius**2
        pt = rest.pt[inside]
        jets.append((pt.sum(), rest.eta[0] + pt @ eta[inside] / pt.sum(), rest.phi[0]))
        rest = rest.of(~inside)
        if 20 * rest.pt.max(initial=0) < least_pt:
            break
    found = Sprays(*np.array(jets).reshape(-1, 3).T)
    return found.of(found.pt >= least_pt)


def wrapped(phi: Array) -> Array:
    """The same angle, from -pi to pi."""
    return (phi + np.pi) % (2 * np.pi) - np.pi
