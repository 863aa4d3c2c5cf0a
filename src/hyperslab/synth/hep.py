"""Collisions of protons as a calorimeter sees them, in files as HEPCNN has them.

Momenta are in GeV, across the beam; directions are eta along it and phi around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from hyperslab.synth.production import BatchFiles, check_size

# Jets: how a quark or a gluon becomes a spray of particles, and how a spray is found again


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


# Collisions: jets as they are always made, and heavy particles that fall apart

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


# A detector around the beam, unrolled: what each of its cells measures

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


# Files of collisions seen by a calorimeter, as HEPCNN has them: many images a file

EXPECTED = {"background": 1000.0, "signal": 0.05}
"""Real collisions that one drawn collision stands for, on average."""
CUTS = {"jets": 4, "pt": 80.0, "eta": 2.8, "sum": 1200.0}
"""A search without a network keeps events with so many jets, so hard, and such a sum of pt."""


@dataclass(frozen=True, kw_only=True)
class Collisions(BatchFiles):
    """Images of collisions in HEPCNN's schema.

    ``data`` (n, 3, eta, phi) float32, and for each of them: ``label`` int32, 1 for signal; ``psr``
    int32, 1 where it passes the cuts of a search without a network; ``normweight`` float32, 1 on
    average in each class; ``weight`` float32, the same times how common the class is.
    """

    prefix = "hep"
    count: int = 256
    per_file: int = 64

    def __post_init__(self) -> None:
        check_size("an image", self.shape, 1, 4096)
        super().__post_init__()

    @property
    def memory_nbytes(self) -> int:
        return 2**27 + 40 * self.shape[0] * self.shape[1]

    def file_nbytes(self, index: int) -> int:
        return len(self.numbers(index)) * (12 * self.shape[0] * self.shape[1] + 16) + 2**14

    def fill(self, file: h5py.File, index: int) -> None:
        images = self.numbers(index)
        data = file.create_dataset("data", (len(images), 3, *self.shape), np.float32)
        numbers = []
        for place, number in enumerate(images):
            rng = self.rng(number)
            data[place], row = _event(self.shape, rng)
            numbers.append(row)
        label, passes, weight, rarity = np.array(numbers).T
        file["label"] = label.astype(np.int32)
        file["psr"] = passes.astype(np.int32)
        file["normweight"] = weight.astype(np.float32)
        file["weight"] = (weight * rarity).astype(np.float32)


def _event(
    shape: tuple[int, int], rng: np.random.Generator
) -> tuple[NDArray[np.float32], tuple[int, bool, float, float]]:
    name = "signal" if rng.random() < 0.5 else "background"
    particles, weight = (signal if name == "signal" else background)(rng)
    jets = find_jets(particles.of(np.abs(particles.eta) < CUTS["eta"]), least_pt=CUTS["pt"])
    passes = len(jets.pt) >= CUTS["jets"] and jets.pt.sum() >= CUTS["sum"]
    pixels = image(particles, shape, rng)
    return pixels, (int(name == "signal"), passes, weight, EXPECTED[name])
