"""A detector around the beam, unrolled: what each of its cells measures."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hyperslab.synth.jets import Sprays

ETA_REACH = 5.0
"""Calorimeters cover eta from minus this to plus this; phi goes all around."""
TRACKS_REACH, LEAST_TRACK_PT, TRACKS_SEEN = 2.5, 0.5, 0.95
"""Tracks are seen up to this eta and from this momentum, in GeV, with this chance."""
BEND = 0.36
"""Radians that a charged particle of 1 GeV turns in the magnet, before the calorimeter."""

CHARGED, PHOTON = 0.6, 0.9
"""Of 10 particles 6 are charged hadrons, 3 photons and 1 a neutral hadron."""
EM_NOISE, HADRON_NOISE = 0.1, 0.5
"""Relative errors of 1 GeV; they fall as the square root of the energy."""
EM_WIDTH, HADRON_WIDTH, SPOTS = 0.015, 0.05, 6
"""Of showers in the calorimeter, which leave their energy in a few spots."""


def image(
    particles: Sprays, shape: tuple[int, int], rng: np.random.Generator
) -> NDArray[np.float32]:
    """Channels of (eta, phi): energy of the inner calorimeter, of the outer one, number of tracks.

    Energies are across the beam, in GeV. Phi wraps around.
    """
    kind = rng.random(len(particles.pt))
    charged, photon = kind < CHARGED, (kind >= CHARGED) & (kind < PHOTON)
    at_calorimeter = _bent(particles, charged, rng)
    # A hadron starts its shower in the inner calorimeter, to a share of its own.
    inner = np.where(photon, 1, 0.3 * rng.random(len(kind)))
    layers = [
        _energies(at_calorimeter, inner, EM_NOISE, EM_WIDTH, shape, rng),
        _energies(at_calorimeter, 1 - inner, HADRON_NOISE, HADRON_WIDTH, shape, rng),
        _tracks(particles.of(charged), shape, rng),
    ]
    return np.stack(layers).astype(np.float32)


def _bent(particles: Sprays, charged: NDArray[np.bool_], rng: np.random.Generator) -> Sprays:
    sign = charged * rng.choice([-1, 1], len(charged))
    half_turn = np.arcsin(np.minimum(BEND / 2 / np.maximum(particles.pt, 1e-9), 1))
    return particles._replace(phi=particles.phi + sign * half_turn)


def _energies(
    particles: Sprays,
    share: NDArray[np.float64],
    noise: float,
    width: float,
    shape: tuple[int, int],
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    true = particles.pt * share
    seen = np.maximum(true + noise * np.sqrt(true) * rng.standard_normal(len(true)), 0)
    spots = rng.exponential(size=(SPOTS, len(true)))
    spots *= seen / spots.sum(axis=0)
    eta = particles.eta + rng.normal(0, width, spots.shape)
    phi = particles.phi + rng.normal(0, width, spots.shape)
    return _binned(eta, phi, spots, shape)


def _tracks(
    charged: Sprays, shape: tuple[int, int], rng: np.random.Generator
) -> NDArray[np.float64]:
    seen = (np.abs(charged.eta) < TRACKS_REACH) & (charged.pt > LEAST_TRACK_PT)
    seen &= rng.random(len(seen)) < TRACKS_SEEN
    found = charged.of(seen)
    return _binned(found.eta, found.phi, np.ones_like(found.pt), shape)


def _binned(
    eta: NDArray[np.float64],
    phi: NDArray[np.float64],
    weights: NDArray[np.float64],
    shape: tuple[int, int],
) -> NDArray[np.float64]:
    """Sums of ``weights`` in the cells; what flies past the ends of the detector is lost."""
    height, width = shape
    row = np.floor((eta + ETA_REACH) * (height / (2 * ETA_REACH))).astype(np.int64)
    column = np.floor((phi + np.pi) * (width / (2 * np.pi))).astype(np.int64) % width
    inside = (row >= 0) & (row < height)
    index = (row * width + column)[inside]
    sums = np.bincount(index, weights[inside], height * width)
    return sums.reshape(shape).astype(np.float64)
